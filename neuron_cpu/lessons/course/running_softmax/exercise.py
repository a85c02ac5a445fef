"""Softmax with a running maximum: rows longer than the chip can hold.

exp() of 89 overflows fp32, so a softmax subtracts the row's maximum first,
which no term exceeds. But a row that comes in chunks shows its maximum with
the last chunk only, and a second pass would load everything twice.

The way out (Milakov and Gimelshein 2018): subtract the maximum of what has
been seen so far. Where a chunk brings a larger one, everything summed up to
then was relative to the old maximum: multiply it by exp(old - new).

This kernel weights values by the softmax of scores, chunk by chunk, and
subtracts nothing.

Task: keep a running maximum, and rescale both sums when it grows. One pass:
a kernel that takes much longer than this one does not pass.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch

CHUNK = 512  # columns loaded at a time


@nki.jit
def running_softmax(scores_hbm, values_hbm):
    """Rows' sums of softmax(scores) * values, both [R, S] fp32 @ HBM -> [R, 1].

    R is at most 128, S a multiple of 512.
    """
    rows, columns = scores_hbm.shape
    out_hbm = nl.ndarray((rows, 1), nl.float32, buffer=nl.shared_hbm)
    # Sums of the weights, and of the weighted values.
    sums_sb = nl.zeros((rows, 2), nl.float32, buffer=nl.sbuf)
    for chunk in nl.sequential_range(columns // CHUNK):
        own_columns = nl.ds(chunk * CHUNK, CHUNK)
        scores_sb = nl.load(scores_hbm[:, own_columns])
        values_sb = nl.load(values_hbm[:, own_columns])
        weights_sb = nisa.activation(nl.exp, scores_sb)
        weighted_sb = nisa.tensor_tensor(weights_sb, values_sb, nl.multiply)
        chunk_sb = nl.ndarray((rows, 2), nl.float32, buffer=nl.sbuf)
        chunk_sb[:, 0:1] = nisa.tensor_reduce(nl.add, weights_sb, axis=1)
        chunk_sb[:, 1:2] = nisa.tensor_reduce(nl.add, weighted_sb, axis=1)
        sums_sb[...] = nisa.tensor_tensor(sums_sb, chunk_sb, nl.add)
    inverse_sb = nisa.reciprocal(sums_sb[:, 0:1])
    nl.store(
        out_hbm, nisa.tensor_scalar(sums_sb[:, 1:2], nl.multiply, inverse_sb)
    )
    return out_hbm


# --- The check: what is right, on which shapes, and how fast -----------------
CASES = "30x512:f32 30x512:f32", "128x2048:f32 128x2048:f32"
FASTER = 0.8  # than the kernel above, on the last case


def reference(scores, values):
    return (torch.softmax(scores, dim=1) * values).sum(dim=1, keepdim=True)
