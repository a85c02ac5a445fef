"""Tiled matmul: products larger than the array that computes them.

TensorE multiplies a stationary tile [K, M] by a moving tile [K, N] and leaves
the product over K, [M, N], in PSUM. Both operands have the contraction K on
their partitions, so the first one is given transposed. One instruction takes
K up to 128, M up to 128 and N up to 512: a bank of PSUM holds 512 fp32 numbers
per partition.

This kernel asks for the whole product at once.

Task: loop over tiles of M and N, one product each. PSUM is no place to keep
results, and DMA does not read it: copy each to SBUF with nisa.tensor_copy.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

STATIONARY_MAX = 128  # columns of the stationary operand
MOVING_MAX = 512  # columns of the moving operand


@nki.jit
def tiled_matmul(a_hbm, b_hbm):
    """a.T @ b, [K, M] and [K, N] @ HBM -> [M, N] @ HBM.

    K is at most 128, M a multiple of 128, N a multiple of 512.
    """
    shape = a_hbm.shape[1], b_hbm.shape[1]
    out_hbm = nl.ndarray(shape, a_hbm.dtype, buffer=nl.shared_hbm)
    a_sb = nl.load(a_hbm)
    b_sb = nl.load(b_hbm)
    out_psum = nisa.nc_matmul(a_sb, b_sb)
    nl.store(out_hbm, nisa.tensor_copy(out_psum, dtype=a_hbm.dtype))
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = "128x256:bf16 128x1024:bf16", "60x128:f32 60x512:f32"


def reference(a, b):
    return a.T @ b
