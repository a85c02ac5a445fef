"""PSUM accumulation: sums over more than 128 numbers cost nothing.

A contraction longer than 128 partitions takes several products, whose sum is
wanted. PSUM adds in fp32 while TensorE writes: the first product of a group
overwrites the bank, each further one is added to it. The compiler recognises
a group by three things, and all three are needed:

    the tile comes from nl.zeros(..., buffer=nl.psum)
    the loop over the contraction is an nl.affine_range
    nothing but products is added to the tile, by +=

This kernel is a linear layer. It lets the sum begin with the bias, where what
the first product does to it is undefined on this core.

Task: accumulate products only. ScalarE adds one number per partition for free
while it copies: nisa.activation(nl.copy, tile, bias=column, scale=1.0).
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile


@nki.jit
def psum_accumulation(x_hbm, weight_hbm, bias_hbm):
    """weight.T @ x + bias: [K, T], [K, N] and [N, 1] @ HBM -> [N, T] @ HBM.

    K is a multiple of 128, N at most 128, T at most 512.
    """
    k_size, tokens = x_hbm.shape
    features = weight_hbm.shape[1]
    out_hbm = nl.ndarray((features, tokens), x_hbm.dtype, buffer=nl.shared_hbm)
    bias_sb = nl.load(bias_hbm)
    acc_psum = nl.ndarray((features, tokens), nl.float32, buffer=nl.psum)
    acc_psum[...] = nl.copy(bias_sb.broadcast_to((features, tokens)))
    for k in nl.affine_range(k_size // P_MAX):
        own_rows = nl.ds(k * P_MAX, P_MAX)
        weight_sb = nl.load(weight_hbm[own_rows, :])
        x_sb = nl.load(x_hbm[own_rows, :])
        acc_psum[...] += nisa.nc_matmul(weight_sb, x_sb)
    nl.store(out_hbm, nisa.tensor_copy(acc_psum, dtype=x_hbm.dtype))
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = (
    "384x256:bf16 384x128:bf16 128x1:f32",
    "128x60:f32 128x32:f32 32x1:f32",
)


def reference(x, weight, bias):
    return weight.T @ x + bias
