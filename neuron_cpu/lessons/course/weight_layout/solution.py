"""Layout of weights: partition p takes K / 128 features from p * K / 128 on.

Their rows are neighbours in HBM, so a partition's share of the whole weight is
one contiguous row of K / 128 * N numbers, and the same reshape puts the same
features of x on the same partitions. The k-th product contracts the k-th
feature of every partition; all of them together have seen each feature once.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile


@nki.jit
def weight_layout(x_hbm, weight_hbm):
    """weight.T @ x, [K, T] and [K, N] @ HBM -> [N, T] @ HBM.

    K and N are multiples of 128, T is at most 512.
    """
    k_tiles, tokens = x_hbm.shape[0] // P_MAX, x_hbm.shape[1]
    features = weight_hbm.shape[1]
    out_hbm = nl.ndarray((features, tokens), x_hbm.dtype, buffer=nl.shared_hbm)
    x_sb = nl.load(x_hbm.reshape((P_MAX, k_tiles, tokens)))
    weight_sb = nl.load(weight_hbm.reshape((P_MAX, k_tiles, features)))
    for n in nl.affine_range(features // P_MAX):
        columns = nl.ds(n * P_MAX, P_MAX)
        acc_psum = nl.zeros((P_MAX, tokens), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(k_tiles):
            acc_psum[...] += nisa.nc_matmul(
                weight_sb[:, k, columns], x_sb[:, k, :]
            )
        out_sb = nl.ndarray((P_MAX, tokens), x_hbm.dtype, buffer=nl.sbuf)
        out_sb[...] = nisa.tensor_copy(acc_psum)
        nl.store(out_hbm[columns, :], out_sb)
    return out_hbm
