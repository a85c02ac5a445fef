"""PSUM accumulation: products add up in the bank, the bias comes at the end.

The result has to leave PSUM anyway, and ScalarE computes f(x * scale + bias)
in the time of a copy. Neither the sum over K nor the bias takes an instruction
of its own.
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
    acc_psum = nl.zeros((features, tokens), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(k_size // P_MAX):
        own_rows = nl.ds(k * P_MAX, P_MAX)
        weight_sb = nl.load(weight_hbm[own_rows, :])
        x_sb = nl.load(x_hbm[own_rows, :])
        acc_psum[...] += nisa.nc_matmul(weight_sb, x_sb)
    out_sb = nl.ndarray((features, tokens), x_hbm.dtype, buffer=nl.sbuf)
    out_sb[...] = nisa.activation(nl.copy, acc_psum, bias=bias_sb, scale=1.0)
    nl.store(out_hbm, out_sb)
    return out_hbm
