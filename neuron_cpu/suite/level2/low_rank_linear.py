"""Linear layer with a low-rank adapter: x @ w + (x @ a) @ b.

x [M, K] @ HBM, w [K, N] @ HBM, a [K, R] @ HBM, b [R, N] @ HBM, R at most 128; result [M, N] in the
type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = (
    "77x192:f32 192x200:f32 192x8:f32 8x200:f32",
    "128x512:bf16 512x512:bf16 512x16:bf16 16x512:bf16",
)


def reference(x, w, a, b):
    return x @ w + (x @ a) @ b


@nki.jit
def kernel(x_hbm, w_hbm, a_hbm, b_hbm):
    rows, depth = x_hbm.shape
    width, rank = b_hbm.shape[1], b_hbm.shape[0]
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        for column in nl.static_range(0, width, 128):
            stop = min(column + 128, width)
            narrow_psum = nl.zeros((end - row, rank), dtype=nl.float32, buffer=nl.psum)
            sum_psum = nl.zeros((end - row, stop - column), dtype=nl.float32, buffer=nl.psum)
            for inner in nl.static_range(0, depth, 128):
                last = min(inner + 128, depth)
                x_sb = nl.load(x_hbm[row:end, inner:last])
                a_sb = nl.load(a_hbm[inner:last, :])
                w_sb = nl.load(w_hbm[inner:last, column:stop])
                narrow_psum += nl.matmul(x_sb, a_sb)
                sum_psum += nl.matmul(x_sb, w_sb)
            narrow_sb = nl.copy(narrow_psum, dtype=x_hbm.dtype)
            b_sb = nl.load(b_hbm[:, column:stop])
            added_sb = nl.add(nl.copy(sum_psum), nl.matmul(narrow_sb, b_sb))
            nl.store(out_hbm[row:end, column:stop], added_sb)
    return out_hbm
