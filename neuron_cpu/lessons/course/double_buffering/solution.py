"""Double buffering: two tiles for each iteration, one loaded and one computed.

The result has a tile of its own, so that the next load does not wait for this
store either. The loop is an affine_range again: nothing goes from one
iteration to another.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile


@nki.jit
def double_buffering(x_hbm):
    """gelu(x), [R, F] @ HBM, R a multiple of 128 -> the same @ HBM."""
    rows, _ = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    for tile in nl.affine_range(rows // P_MAX):
        own_rows = nl.ds(tile * P_MAX, P_MAX)
        x_sb = nl.load(x_hbm[own_rows, :])
        gelu_sb = nisa.activation(nl.gelu, x_sb)
        nl.store(out_hbm[own_rows, :], gelu_sb)
    return out_hbm
