"""Softmax over the free dimension: exp(x - max) / sum(exp(x - max)).

x [N, D] @ HBM; result [N, D] in its type.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x333:f32", "512x2048:bf16")


def reference(x):
    return torch.softmax(x, -1)


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        shifted_sb = nl.subtract(x_sb, nl.max(x_sb, axis=1, keepdims=True))
        powers_sb = nl.exp(shifted_sb)
        sum_sb = nl.sum(powers_sb, axis=1, keepdims=True)
        nl.store(out_hbm[row:end, :], nl.divide(powers_sb, sum_sb))
    return out_hbm
