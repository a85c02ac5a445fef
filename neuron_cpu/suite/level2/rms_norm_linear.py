"""RMSNorm, then a linear layer: (x / sqrt(mean(x^2) + 1e-5) * weight) @ w.

x [M, K] @ HBM, weight [1, K] @ HBM, w [K, N] @ HBM; result [M, N] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

EPSILON = 1e-5
CASES = ("77x192:f32 1x192:f32 192x200:f32", "256x512:bf16 1x512:bf16 512x512:bf16")


def reference(x, weight, w):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    return (x * scale * weight) @ w


@nki.jit
def kernel(x_hbm, weight_hbm, w_hbm):
    rows, depth = x_hbm.shape
    width = w_hbm.shape[1]
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        x_sb = nl.load(x_hbm[row:end, :], dtype=nl.float32)
        mean_sb = nl.mean(nl.multiply(x_sb, x_sb), axis=1, keepdims=True)
        scale_sb = nl.rsqrt(nl.add(mean_sb, EPSILON))
        weight_sb = nl.load(weight_hbm, dtype=nl.float32)
        weights_sb = nl.broadcast_to(weight_sb, shape=(end - row, depth))
        scaled_sb = nl.multiply(x_sb, scale_sb)
        normed_sb = nl.multiply(scaled_sb, weights_sb, dtype=x_hbm.dtype)
        for column in nl.static_range(0, width, 128):
            stop = min(column + 128, width)
            sum_psum = nl.zeros((end - row, stop - column), dtype=nl.float32, buffer=nl.psum)
            for inner in nl.static_range(0, depth, 128):
                last = min(inner + 128, depth)
                w_sb = nl.load(w_hbm[inner:last, column:stop])
                sum_psum += nl.matmul(normed_sb[:, inner:last], w_sb)
            nl.store(out_hbm[row:end, column:stop], nl.copy(sum_psum))
    return out_hbm
