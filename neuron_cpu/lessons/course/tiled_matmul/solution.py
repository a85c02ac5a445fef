"""Tiled matmul: both operands are loaded once, their tiles are sliced on chip.

Each product has a PSUM tile of its own, made in the loop, so that the copy of
one and the next product do not wait for each other: PSUM has eight banks. One
store takes a whole row of tiles, N numbers per partition next to each other:
DMA likes long rows.
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
    m_size, n_size = a_hbm.shape[1], b_hbm.shape[1]
    out_hbm = nl.ndarray((m_size, n_size), a_hbm.dtype, buffer=nl.shared_hbm)
    a_sb = nl.load(a_hbm)
    b_sb = nl.load(b_hbm)
    for m in nl.affine_range(m_size // STATIONARY_MAX):
        rows = nl.ds(m * STATIONARY_MAX, STATIONARY_MAX)
        out_sb = nl.ndarray(
            (STATIONARY_MAX, n_size), a_hbm.dtype, buffer=nl.sbuf
        )
        for n in nl.affine_range(n_size // MOVING_MAX):
            columns = nl.ds(n * MOVING_MAX, MOVING_MAX)
            out_psum = nisa.nc_matmul(a_sb[:, rows], b_sb[:, columns])
            out_sb[:, columns] = nisa.tensor_copy(out_psum)
        nl.store(out_hbm[rows, :], out_sb)
    return out_hbm
