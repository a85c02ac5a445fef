"""GELU with the error function: x * (1 + erf(x / sqrt(2))) / 2.

x [N, D] @ HBM; result [N, D] in its type.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x333:f32", "512x2048:bf16")
# 1 + erf(x) has no digits left where x lies far below zero
VALUES = ("random", "zeros", "ties", "large", "tiny", "cancelling")


def reference(x):
    return torch.nn.functional.gelu(x)


@nki.jit
def kernel(x_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        scaled_sb = nl.multiply(x_sb, 0.5**0.5)
        share_sb = nl.multiply(nl.add(nl.erf(scaled_sb), 1.0), 0.5)
        nl.store(out_hbm[row:end, :], nl.multiply(x_sb, share_sb))
    return out_hbm
