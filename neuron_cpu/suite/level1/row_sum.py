"""Sum over the free dimension.

x [N, D] @ HBM; result [N, 1] in fp32.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("77x333:f32", "512x4096:bf16")


def reference(x):
    return x.sum(-1, keepdim=True)


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        sum_sb = nl.zeros((end - row, 1), dtype=nl.float32)
        for column in nl.static_range(0, width, 512):
            x_sb = nl.load(x_hbm[row:end, column : min(column + 512, width)], dtype=nl.float32)
            sum_sb[...] = nl.add(sum_sb, nl.sum(x_sb, axis=1, keepdims=True))
        nl.store(out_hbm[row:end, :], sum_sb)
    return out_hbm
