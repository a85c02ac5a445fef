"""Transpose of a matrix.

x [N, D] @ HBM; result [D, N] in its type.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("77x200:f32", "512x1024:bf16")


def reference(x):
    return x.T


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((width, rows), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        for column in nl.static_range(0, width, 128):
            stop = min(column + 128, width)
            x_sb = nl.load(x_hbm[row:end, column:stop])
            turned_sb = nl.copy(nl.transpose(x_sb))
            nl.store(out_hbm[column:stop, row:end], turned_sb)
    return out_hbm
