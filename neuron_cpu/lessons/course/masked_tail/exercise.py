"""Masked tail: tensors with more rows than partitions, and not a multiple.

A tile has at most 128 partitions, so a tensor of more rows takes a loop over
tiles of rows. Sizes are seldom multiples of 128: the last tile is shorter, but
the body of a device loop is traced once and has one shape.

A mask says which part of a tile counts. It compares indices, it is known when
the kernel is compiled, and what it leaves out is neither read nor written:

    nl.load(tensor[i_row, i_column], mask=i_row < rows)

This kernel reads and writes rows that do not exist.

Task: make it right for every number of rows.
"""

import math

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
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
        x_sb = nl.load(x_hbm[i_row, i_column])
        nl.store(out_hbm[i_row, i_column], nl.relu(x_sb))
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = "300x64:f32", "77x40:f32", "256x96:bf16"


def reference(x):
    return x.clamp(min=0)
