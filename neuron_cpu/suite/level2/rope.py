"""Rotary position embedding, rotate-half form: x * cos + rotate_half(x) * sin.

rotate_half puts minus the second half of a row before the first. x [N, D] @ HBM, cos and sin
[N, D / 2] @ HBM, for both halves; result [N, D] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = (
    "77x64:f32 77x32:f32:-1..1 77x32:f32:-1..1",
    "1024x128:bf16 1024x64:f32:-1..1 1024x64:f32:-1..1",
)


def reference(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@nki.jit
def kernel(x_hbm, cos_hbm, sin_hbm):
    rows, width = x_hbm.shape
    half = width // 2
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        first_sb = nl.load(x_hbm[row:end, 0:half], dtype=nl.float32)
        second_sb = nl.load(x_hbm[row:end, half:width], dtype=nl.float32)
        cos_sb = nl.load(cos_hbm[row:end, :])
        sin_sb = nl.load(sin_hbm[row:end, :])
        before_sb = nl.subtract(nl.multiply(first_sb, cos_sb), nl.multiply(second_sb, sin_sb))
        after_sb = nl.add(nl.multiply(second_sb, cos_sb), nl.multiply(first_sb, sin_sb))
        nl.store(out_hbm[row:end, 0:half], before_sb)
        nl.store(out_hbm[row:end, half:width], after_sb)
    return out_hbm
