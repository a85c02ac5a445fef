"""Sum over the partition dimension: of every column, over all rows.

x [N, D] @ HBM; result [1, D] in fp32.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("77x200:f32", "1024x512:bf16")


def reference(x):
    return x.sum(0, keepdim=True)


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.shared_hbm)
    for column in nl.static_range(0, width, 128):
        stop = min(column + 128, width)
        sum_sb = nl.zeros((stop - column, 1), dtype=nl.float32)
        for row in nl.static_range(0, rows, 128):
            x_sb = nl.load(x_hbm[row : min(row + 128, rows), column:stop], dtype=nl.float32)
            columns_sb = nl.copy(nl.transpose(x_sb))
            sum_sb[...] = nl.add(sum_sb, nl.sum(columns_sb, axis=1, keepdims=True))
        nl.store(out_hbm[:, column:stop], nl.copy(nl.transpose(sum_sb)))
    return out_hbm
