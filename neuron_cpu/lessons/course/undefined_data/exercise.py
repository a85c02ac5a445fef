"""Undefined data: a tile holds what was there before, until it is written.

nl.ndarray reserves memory and writes nothing: until its first write an element
holds what some other tile has left there. A kernel that reads it may pass its
tests on one day and fail on the next. Here every element that reaches a result
is followed back to what wrote it.

This kernel takes the mean of each element and its two neighbours in the row,
with zeros beyond both ends. It makes room for these zeros.

Task: write the missing elements. nisa.memset(shape, value, dtype) makes a tile
of one value, and an assignment to a slice of a tile writes that slice.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch


@nki.jit
def undefined_data(x_hbm):
    """Mean of three neighbours, [P, F] @ HBM, at most 128 rows -> the same."""
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    padded_sb = nl.ndarray((rows, width + 2), x_hbm.dtype, buffer=nl.sbuf)
    padded_sb[:, nl.ds(1, width)] = nl.load(x_hbm)
    pair_sb = nl.add(
        padded_sb[:, nl.ds(0, width)], padded_sb[:, nl.ds(1, width)]
    )
    sum_sb = nl.add(pair_sb, padded_sb[:, nl.ds(2, width)])
    nl.store(out_hbm, nl.multiply(sum_sb, 1 / 3))
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = "128x256:f32", "20x33:f32"


def reference(x):
    zero = x.new_zeros(x.shape[0], 1)
    left = torch.cat((zero, x[:, :-1]), dim=1)
    right = torch.cat((x[:, 1:], zero), dim=1)
    return (left + x + right) / 3
