"""Transposes: TensorE turns both operands, [D, M] and [D, N], and multiplies.

PSUM tiles are fp32, whatever the type of the operands: multiplying by one and
adding zeros changes no number, so the copy back into their type is exact. It
is needed, because TensorE reads SBUF only. A kernel that loads the same rows
more than once turns them once.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


def turned(x_sb):
    """[P, F] @ SBUF, at most 128 x 128 -> [F, P] @ SBUF."""
    shape = x_sb.shape[1], x_sb.shape[0]
    turned_psum = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    turned_psum[...] = nisa.nc_transpose(x_sb)
    turned_sb = nl.ndarray(shape, x_sb.dtype, buffer=nl.sbuf)
    turned_sb[...] = nisa.tensor_copy(turned_psum)
    return turned_sb


@nki.jit
def transposes(a_hbm, b_hbm):
    """a @ b.T, [M, D] and [N, D] @ HBM, each at most 128 -> [M, N] @ HBM."""
    shape = a_hbm.shape[0], b_hbm.shape[0]
    out_hbm = nl.ndarray(shape, a_hbm.dtype, buffer=nl.shared_hbm)
    a_sb = turned(nl.load(a_hbm))
    b_sb = turned(nl.load(b_hbm))
    out_psum = nisa.nc_matmul(a_sb, b_sb)
    nl.store(out_hbm, nisa.tensor_copy(out_psum, dtype=a_hbm.dtype))
    return out_hbm
