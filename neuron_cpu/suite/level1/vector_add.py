"""Sum of two matrices: x + y.

x, y [N, D] @ HBM; result [N, D] in their type.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("77x333:f32 77x333:f32", "512x2048:bf16 512x2048:bf16")


def reference(x, y):
    return x + y


@nki.jit
def kernel(x_hbm, y_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        for column in nl.static_range(0, width, 512):
            stop = min(column + 512, width)
            x_sb = nl.load(x_hbm[row:end, column:stop])
            y_sb = nl.load(y_hbm[row:end, column:stop])
            nl.store(out_hbm[row:end, column:stop], nl.add(x_sb, y_sb))
    return out_hbm
