"""Cumulative sum along the free dimension.

x [N, D] @ HBM; result [N, D] in fp32: element j is the sum of elements 0 to j.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("77x100:f32", "128x512:bf16")


def reference(x):
    return x.cumsum(-1)


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        sums_sb = nl.ndarray((end - row, width), dtype=nl.float32, buffer=nl.sbuf)
        sums_sb[:, 0:1] = nl.copy(x_sb[:, 0:1])
        for column in nl.static_range(1, width):
            before_sb = sums_sb[:, column - 1 : column]
            sums_sb[:, column : column + 1] = nl.add(before_sb, x_sb[:, column : column + 1])
        nl.store(out_hbm[row:end, :], sums_sb)
    return out_hbm
