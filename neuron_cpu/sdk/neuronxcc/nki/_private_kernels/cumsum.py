"""The kernel with which NxDI 0.3 to 0.8 draw tokens and lay out a prompt's chunks.

Its later form is public and has other arguments (aws-neuron/nki-library d2ad3a5, core/cumsum). This
one is written anew: its estimates are not the closed kernel's.
"""

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

COLUMNS = 2048  # of fp32 a tile: 8 of a partition's 192 KiB


def _spans(size, most):
    """The (start, length) of each piece."""
    return [(start, min(most, size - start)) for start in range(0, size, most)]


def cumsum(x_hbm, sums_hbm, axis=1):
    """Running sums along axis 1: x [rows, N] @ HBM -> sums [rows, N] @ HBM, carried in fp32."""
    assert axis == 1, f"cumsum got axis {axis}, expected the last one, 1; transpose in front of it."
    for rows in _spans(x_hbm.shape[0], nl.tile_size.pmax):
        carried = 0.0
        for columns in _spans(x_hbm.shape[1], COLUMNS):
            part = nl.ds(*rows), nl.ds(*columns)
            x_sb = nl.load(x_hbm[part])
            ones_sb = nl.ones(x_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
            sums_sb = nisa.tensor_tensor_scan(ones_sb, x_sb, carried, nl.multiply, nl.add)
            nl.store(sums_hbm[part], sums_sb)
            carried = nl.copy(sums_sb[:, nl.ds(columns[1] - 1, 1)])
    return sums_hbm
