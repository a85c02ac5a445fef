"""Product of one row and a matrix, as in token generation: x @ w.

x [1, K] @ HBM, w [K, N] @ HBM; result [1, N] in the type of x, accumulated in fp32.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = ("1x192:f32 192x200:f32", "1x2048:bf16 2048x1024:bf16")


def reference(x, w):
    return x @ w


@nki.jit
def kernel(x_hbm, w_hbm):
    depth, width = w_hbm.shape
    out_hbm = nl.ndarray((1, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for column in nl.static_range(0, width, 128):
        stop = min(column + 128, width)
        sum_psum = nl.zeros((1, stop - column), dtype=nl.float32, buffer=nl.psum)
        for inner in nl.static_range(0, depth, 128):
            x_sb = nl.load(x_hbm[:, inner : min(inner + 128, depth)])
            w_sb = nl.load(w_hbm[inner : min(inner + 128, depth), column:stop])
            sum_psum += nl.matmul(x_sb, w_sb)
        nl.store(out_hbm[:, column:stop], nl.copy(sum_psum))
    return out_hbm
