"""Linear layer with int8 weights and one scale for each output: (x @ w) * scale.

x [M, K] @ HBM, w [K, N] int8 @ HBM, scale [1, N] fp32 @ HBM; result [M, N] in the type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

CASES = (
    "77x192:f32 192x200:i8:-127..127 1x200:f32:0.001..0.02",
    "128x512:bf16 512x512:i8:-127..127 1x512:f32:0.001..0.02",
)


def reference(x, w, scale):
    return (x @ w.to(x.dtype)) * scale


@nki.jit
def kernel(x_hbm, w_hbm, scale_hbm):
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
                sum_psum += nl.matmul(x_sb, nl.copy(w_sb, dtype=x_hbm.dtype))
            scale_sb = nl.load(scale_hbm[:, column:stop])
            scales_sb = nl.broadcast_to(scale_sb, shape=(end - row, stop - column))
            nl.store(out_hbm[row:end, column:stop], nl.multiply(sum_psum, scales_sb))
    return out_hbm
