"""Masked tail: one mask for what is read, the same one for what is written.

The relu needs none: it computes on 128 partitions in the time of one, and its
results for rows that were not loaded go nowhere: the store leaves them out. An
instruction that mixes partitions or columns, a product or a sum, would have to
leave them out itself.
"""

import math

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile


@nki.jit
def masked_tail(x_hbm):
    """relu(x), [R, F] @ HBM with any number of rows R -> the same @ HBM."""
    rows, columns = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    i_partition = nl.arange(P_MAX)[:, None]
    i_column = nl.arange(columns)[None, :]
    for tile in nl.affine_range(math.ceil(rows / P_MAX)):
        i_row = tile * P_MAX + i_partition
        x_sb = nl.load(x_hbm[i_row, i_column], mask=i_row < rows)
        nl.store(out_hbm[i_row, i_column], nl.relu(x_sb), mask=i_row < rows)
    return out_hbm
