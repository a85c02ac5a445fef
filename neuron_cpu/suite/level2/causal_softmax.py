"""Softmax of attention scores under a causal mask: row i sees columns 0 to i.

scores [S, S] @ HBM; result [S, S] in their type, zero above the diagonal.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch

HIDDEN = -1e30  # what a masked score is; exp() of it is zero
CASES = ("77x77:f32", "512x512:bf16")


def reference(scores):
    hidden = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


@nki.jit
def kernel(scores_hbm):
    size = scores_hbm.shape[0]
    out_hbm = nl.ndarray((size, size), dtype=scores_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, size, 128):
        count = min(128, size - row)
        scores_sb = nl.load(scores_hbm[row : row + count, :], dtype=nl.float32)
        i_row, i_column = nl.mgrid[0:count, 0:size]
        seen_sb = nisa.affine_select(row + i_row >= i_column, scores_sb, HIDDEN)
        powers_sb = nl.exp(nl.subtract(seen_sb, nl.max(seen_sb, axis=1, keepdims=True)))
        sum_sb = nl.sum(powers_sb, axis=1, keepdims=True)
        nl.store(out_hbm[row : row + count, :], nl.divide(powers_sb, sum_sb))
    return out_hbm
