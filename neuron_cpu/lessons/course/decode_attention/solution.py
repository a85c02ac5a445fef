"""Decode attention: heads on the partitions of the scores, each key read once.

All queries are one stationary operand, so a product scores 128 keys for every
head. The softmax runs along the free axis, one instruction for all heads.
Weights turn round 128 keys at a time, and are stationary again: the values
move, D columns a product, and their sum over keys stays in PSUM.

Keys lie in runs (lesson 9): partition p holds the S / 128 keys from
p * S / 128 on, one contiguous row of HBM, for keys and for values. Neither the
softmax nor the sum over keys minds that order.
"""

import math

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile


def turned(x_sb):
    """[P, F] @ SBUF, at most 128 x 128 -> [F, P] @ SBUF."""
    shape = x_sb.shape[1], x_sb.shape[0]
    turned_psum = nl.ndarray(shape, nl.float32, buffer=nl.psum)
    turned_psum[...] = nisa.nc_transpose(x_sb)
    turned_sb = nl.ndarray(shape, x_sb.dtype, buffer=nl.sbuf)
    turned_sb[...] = nisa.tensor_copy(turned_psum)
    return turned_sb


@nki.jit
def decode_attention(q_hbm, k_hbm, v_hbm):
    """softmax(q @ k.T / sqrt(D)) @ v, [H, D] and twice [S, D] -> [H, D] @ HBM.

    Of the H query heads that share a KV head. H and D are at most 128, S is a
    multiple of 128.
    """
    heads, d = q_hbm.shape
    tiles = k_hbm.shape[0] // P_MAX
    out_hbm = nl.ndarray(q_hbm.shape, q_hbm.dtype, buffer=nl.shared_hbm)
    q_sb = turned(nl.load(q_hbm))
    k_sb = nl.load(k_hbm.reshape((P_MAX, tiles, d)))
    v_sb = nl.load(v_hbm.reshape((P_MAX, tiles, d)))
    # Scores, [H, S]: the queries are stationary, 128 keys move.
    scores_sb = nl.ndarray((heads, tiles * P_MAX), nl.float32, buffer=nl.sbuf)
    for tile in nl.affine_range(tiles):
        scores_psum = nisa.nc_matmul(q_sb, turned(k_sb[:, tile, :]))
        scores_sb[:, nl.ds(tile * P_MAX, P_MAX)] = nisa.tensor_copy(scores_psum)
    # exp(scale * score - maximum), and its sum.
    scale = 1 / math.sqrt(d)
    max_sb = nisa.tensor_reduce(nl.max, scores_sb, axis=1, negate=True)
    bias_sb = nisa.tensor_scalar(max_sb, nl.multiply, scale)
    weights_sb = nl.ndarray(scores_sb.shape, q_hbm.dtype, buffer=nl.sbuf)
    sum_sb = nl.ndarray((heads, 1), nl.float32, buffer=nl.sbuf)
    weights_sb[...] = nisa.activation_reduce(
        nl.exp,
        scores_sb,
        bias=bias_sb,
        scale=scale,
        reduce_op=nl.add,
        reduce_res=sum_sb,
    )
    # Weighted values, [H, D]: the weights turn round, keys on partitions.
    acc_psum = nl.zeros((heads, d), nl.float32, buffer=nl.psum)
    for tile in nl.affine_range(tiles):
        weights_t_sb = turned(weights_sb[:, nl.ds(tile * P_MAX, P_MAX)])
        acc_psum[...] += nisa.nc_matmul(weights_t_sb, v_sb[:, tile, :])
    inverse_sb = nisa.reciprocal(sum_sb)
    out_sb = nl.ndarray(q_hbm.shape, q_hbm.dtype, buffer=nl.sbuf)
    out_sb[...] = nisa.tensor_scalar(acc_psum, nl.multiply, inverse_sb)
    nl.store(out_hbm, out_sb)
    return out_hbm
