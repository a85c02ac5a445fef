"""Depthwise causal convolution of width 4, as in state-space models.

out[c, t] = sum over k of weight[c, k] * x[c, t - 3 + k]; x is zero before its beginning.
x [C, T] @ HBM, weight [C, 4] @ HBM; result [C, T] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x100:f32 77x4:f32", "256x2048:bf16 256x4:bf16")


def reference(x, weight):
    padded = torch.nn.functional.pad(x, (3, 0))
    taps = [padded[:, k : k + x.shape[1]] * weight[:, k : k + 1] for k in range(4)]
    return sum(taps)


@nki.jit
def kernel(x_hbm, weight_hbm):
    channels, length = x_hbm.shape
    out_hbm = nl.ndarray((channels, length), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for channel in nl.static_range(0, channels, 128):
        end = min(channel + 128, channels)
        weight_sb = nl.load(weight_hbm[channel:end, :], dtype=nl.float32)
        sum_sb = nl.zeros((end - channel, length), dtype=nl.float32)
        for tap in nl.static_range(4):
            shifted_sb = nl.zeros((end - channel, length), dtype=nl.float32)
            late = 3 - tap
            shifted_sb[:, late:length] = nl.load(x_hbm[channel:end, 0 : length - late])
            product_sb = nl.multiply(shifted_sb, weight_sb[:, tap : tap + 1])
            sum_sb[...] = nl.add(sum_sb, product_sb)
        nl.store(out_hbm[channel:end, :], sum_sb)
    return out_hbm
