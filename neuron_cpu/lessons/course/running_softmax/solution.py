"""Softmax with a running maximum: three numbers per row go from chunk to chunk.

The maximum is kept negated: VectorE negates a reduction for nothing, ScalarE
adds a number per partition before exp(), and the larger of two maxima is the
smaller of the negated ones. It begins beyond every score, so that the first
factor is exp() of something very negative, 0, and sums of nothing stay nothing.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

CHUNK = 512  # columns loaded at a time
NO_MAXIMUM = 3.0e38  # negated: below every score


@nki.jit
def running_softmax(scores_hbm, values_hbm):
    """Rows' sums of softmax(scores) * values, both [R, S] fp32 @ HBM -> [R, 1].

    R is at most 128, S a multiple of 512.
    """
    rows, columns = scores_hbm.shape
    out_hbm = nl.ndarray((rows, 1), nl.float32, buffer=nl.shared_hbm)
    # Sums of the weights, and of the weighted values, relative to the maximum.
    sums_sb = nl.zeros((rows, 2), nl.float32, buffer=nl.sbuf)
    neg_max_sb = nl.full((rows, 1), NO_MAXIMUM, nl.float32, buffer=nl.sbuf)
    for chunk in nl.sequential_range(columns // CHUNK):
        own_columns = nl.ds(chunk * CHUNK, CHUNK)
        scores_sb = nl.load(scores_hbm[:, own_columns])
        values_sb = nl.load(values_hbm[:, own_columns])
        # The maximum with this chunk, and what the sums so far are worth.
        chunk_neg_sb = nisa.tensor_reduce(
            nl.max, scores_sb, axis=1, negate=True
        )
        new_neg_sb = nisa.tensor_tensor(chunk_neg_sb, neg_max_sb, nl.minimum)
        factor_sb = nisa.activation(
            nl.exp, neg_max_sb, bias=new_neg_sb, scale=-1.0
        )
        neg_max_sb[...] = nisa.tensor_copy(new_neg_sb)
        # This chunk's own sums.
        chunk_sb = nl.ndarray((rows, 2), nl.float32, buffer=nl.sbuf)
        weights_sb = nisa.activation_reduce(
            nl.exp,
            scores_sb,
            bias=new_neg_sb,
            reduce_op=nl.add,
            reduce_res=chunk_sb[:, 0:1],
        )
        weighted_sb = nisa.tensor_tensor(weights_sb, values_sb, nl.multiply)
        chunk_sb[:, 1:2] = nisa.tensor_reduce(nl.add, weighted_sb, axis=1)
        sums_sb[...] = nisa.scalar_tensor_tensor(
            data=sums_sb,
            op0=nl.multiply,
            operand0=factor_sb,
            op1=nl.add,
            operand1=chunk_sb,
        )
    inverse_sb = nisa.reciprocal(sums_sb[:, 0:1])
    nl.store(
        out_hbm, nisa.tensor_scalar(sums_sb[:, 1:2], nl.multiply, inverse_sb)
    )
    return out_hbm
