"""LayerNorm over the free dimension: (x - mean) / sqrt(variance + 1e-5) * weight + bias.

x [N, D] @ HBM, weight and bias [1, D] @ HBM; result [N, D] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

EPSILON = 1e-5
CASES = ("77x333:f32 1x333:f32 1x333:f32", "512x2048:bf16 1x2048:bf16 1x2048:bf16")


def reference(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight[0], bias[0], EPSILON)


@nki.jit
def kernel(x_hbm, weight_hbm, bias_hbm):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        centred_sb = nl.subtract(x_sb, nl.mean(x_sb, axis=1, keepdims=True))
        variance_sb = nl.mean(nl.multiply(centred_sb, centred_sb), axis=1, keepdims=True)
        normed_sb = nl.multiply(centred_sb, nl.rsqrt(nl.add(variance_sb, EPSILON)))
        weight_sb = nl.load(weight_hbm, dtype=nl.float32)
        weights_sb = nl.broadcast_to(weight_sb, shape=(end - row, width))
        bias_sb = nl.load(bias_hbm, dtype=nl.float32)
        biases_sb = nl.broadcast_to(bias_sb, shape=(end - row, width))
        nl.store(out_hbm[row:end, :], nl.add(nl.multiply(normed_sb, weights_sb), biases_sb))
    return out_hbm
