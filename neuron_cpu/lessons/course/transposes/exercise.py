"""Transposes: a product always contracts over partitions.

nisa.nc_matmul(a, b) computes a.T @ b: it multiplies what lies on the same
partition and sums over partitions. Rows from HBM have their features along the
free axis, the wrong way round for a product over features. TensorE transposes
them: nisa.nc_transpose takes a tile [P, F] of at most 128 x 128 in SBUF and
leaves [F, P] in PSUM.

This kernel is to score every row of a against every row of b. On square tiles
nothing complains: the shapes fit, and every number is wrong.

Task: bring the features of both operands to partitions, then multiply.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def transposes(a_hbm, b_hbm):
    """a @ b.T, [M, D] and [N, D] @ HBM, each at most 128 -> [M, N] @ HBM."""
    shape = a_hbm.shape[0], b_hbm.shape[0]
    out_hbm = nl.ndarray(shape, a_hbm.dtype, buffer=nl.shared_hbm)
    a_sb = nl.load(a_hbm)
    b_sb = nl.load(b_hbm)
    out_psum = nisa.nc_matmul(a_sb, b_sb)
    nl.store(out_hbm, nisa.tensor_copy(out_psum, dtype=a_hbm.dtype))
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = "128x128:f32 128x128:f32", "96x64:bf16 40x64:bf16"


def reference(a, b):
    return a @ b.T
