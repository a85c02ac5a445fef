"""Linear layer with bias and GELU (tanh form): gelu(x @ w + bias).

x [M, K] @ HBM, w [K, N] @ HBM, bias [1, N] @ HBM; result [M, N] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x192:f32 192x200:f32 1x200:f32", "512x512:bf16 512x512:bf16 1x512:bf16")


def reference(x, w, bias):
    return torch.nn.functional.gelu(x @ w + bias, approximate="tanh")


@nki.jit
def kernel(x_hbm, w_hbm, bias_hbm):
    rows, depth = x_hbm.shape
    width = w_hbm.shape[1]
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        for column in nl.static_range(0, width, 128):
            stop = min(column + 128, width)
            sum_psum = nl.zeros((end - row, stop - column), dtype=nl.float32, buffer=nl.psum)
            for inner in nl.static_range(0, depth, 128):
                x_sb = nl.load(x_hbm[row:end, inner : min(inner + 128, depth)])
                w_sb = nl.load(w_hbm[inner : min(inner + 128, depth), column:stop])
                sum_psum += nl.matmul(x_sb, w_sb)
            bias_sb = nl.load(bias_hbm[:, column:stop], dtype=nl.float32)
            biases_sb = nl.broadcast_to(bias_sb, shape=(end - row, stop - column))
            active_sb = nl.gelu_apprx_tanh(nl.add(sum_psum, biases_sb))
            nl.store(out_hbm[row:end, column:stop], active_sb)
    return out_hbm
