"""Residual addition, then RMSNorm: h = x + residual, h / sqrt(mean(h^2) + 1e-5) * weight.

x, residual [N, D] @ HBM, weight [1, D] @ HBM; results h and its norm, [N, D] each in the type
of x; the norm is that of h before it is rounded.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

EPSILON = 1e-5
CASES = ("77x333:f32 77x333:f32 1x333:f32", "512x1024:bf16 512x1024:bf16 1x1024:bf16")


def reference(x, residual, weight):
    total = x + residual
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON)
    return total, total * scale * weight


@nki.jit
def kernel(x_hbm, residual_hbm, weight_hbm):
    rows, width = x_hbm.shape
    total_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    normed_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        residual_sb = nl.load(residual_hbm[row:end, :], dtype=nl.float32)
        total_sb = nl.add(x_sb, residual_sb)
        nl.store(total_hbm[row:end, :], total_sb)
        mean_sb = nl.mean(nl.multiply(total_sb, total_sb), axis=1, keepdims=True)
        scale_sb = nl.rsqrt(nl.add(mean_sb, EPSILON))
        weight_sb = nl.load(weight_hbm, dtype=nl.float32)
        weights_sb = nl.broadcast_to(weight_sb, shape=(end - row, width))
        normed_sb = nl.multiply(nl.multiply(total_sb, scale_sb), weights_sb)
        nl.store(normed_hbm[row:end, :], normed_sb)
    return total_hbm, normed_hbm
