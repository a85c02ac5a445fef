"""Qwen3 with experts for AWS Trainium2 and 3: NKI kernels, and the modules that call them.

An entry for the contest of 2026 (MLSys, Qwen3-30B-A3B, batch 1), one file in today's kernel
language (`nki`, SDK 2.28 and later). A layer is attention (norm, projections, norms of heads,
rotation, softmax, output) and experts (norm, router, the best k of E MLPs). A prompt has kernels
for each. A decode step is one kernel of all layers, collectives inside, and one of the head.
Read the file from top to bottom: tile helpers, norm and router, attention, experts, head; then
configuration, modules and checkpoint. Without kernels the model is the SDK's own.

Axis letters:

    T  tokens of one call                            H  hidden size, a multiple of 128
    K  contraction size of a product                 N  output features of a product
    E  experts, k of them a token                    I  inner size of an expert, per rank
    D  head dimension, 128                           L  cached tokens

Where things lie. Activations are rows [T, H] @ HBM. Partition p of a contraction over H holds the
H/128 features from p * H/128 on, so that a weight [H, N] is read as it lies in the checkpoint: one
contiguous piece a partition. Weights that make hidden states have their columns in the order
(p, f) -> f * 128 + p (``strided``): a decode step's products then leave PSUM as the next norm wants
them. In a decode step weights are stationary and one column moves, 64 cycles a tile of 128 x 128;
all of it takes TensorE half of the time that DMA takes for the weights.

Two physical cores share a logical one (``kernel[2]``): query heads, experts, blocks and vocabulary
are divided; each core makes keys and values for itself. A decode step's cores exchange what they
have behind each collective; those of a prompt add it up before.
"""

import functools
import inspect
import linecache
from typing import Any, Dict, Tuple, Type

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig
from neuronx_distributed_inference.models.qwen3_moe import modeling_qwen3_moe as sdk
from torch import nn

FP32 = nl.float32
P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array; also the head dimension
MOVING_MAX = 512  # free size of the moving operand; one PSUM bank of fp32
HEAD_TILES = 12  # of the head's weight in one load: rows of 3 KiB
BEST = 8  # VectorE finds as many at once: a token has at most as many experts
BY_TURNS = nisa.vector_engine, nisa.scalar_engine  # engines of copies that wait for each other
NEVER = -1.0e30  # the score of a key that a query does not see
StateDict = Dict[str, torch.Tensor]


# --- Tile helpers ---------------------------------------------------------------------------------


def spans(length, most):
    """(start, size) of the pieces of ``most`` that cover ``length``; the last may be smaller."""
    found = []
    for start in range(0, length, most):
        found.append((start, min(most, length - start)))
    return found


def own_share(items):
    """This physical core's part of a list."""
    core, cores = nl.program_id(0), nl.num_programs(0)
    return items[len(items) * core // cores : len(items) * (core + 1) // cores]


def own_numbers(count):
    """This physical core's part of 0 to ``count`` - 1."""
    numbers = []
    for at in range(count):  # the parser knows no list(range())
        numbers.append(at)
    return own_share(numbers)


def tile_of(shape, dtype):
    """An uninitialised tile @ SBUF."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum_of(shape):
    """An uninitialised tile @ PSUM, in which products add up in fp32."""
    return nl.ndarray(shape, dtype=FP32, buffer=nl.psum)


def result_of(shape, dtype):
    """An uninitialised result @ HBM, of both cores."""
    fits = nisa.get_nc_version() >= nisa.nc_version.gen3
    assert fits, "these kernels are for trn2 and trn3: set NEURON_PLATFORM_TARGET_OVERRIDE"
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def filled(shape, value, dtype):
    """A tile of one value @ SBUF."""
    made_sb = tile_of(shape, dtype)
    nisa.memset(dst=made_sb, value=value)
    return made_sb


def copied(x, dtype):
    """A tile @ SBUF or PSUM -> another @ SBUF."""
    made_sb = tile_of(x.shape, dtype)
    nisa.tensor_copy(dst=made_sb, src=x)
    return made_sb


def loaded(x_hbm):
    """A part of a tensor @ HBM -> the same shape @ SBUF."""
    made_sb = tile_of(x_hbm.shape, x_hbm.dtype)
    nisa.dma_copy(dst=made_sb, src=x_hbm)
    return made_sb


def loaded_column(x_hbm):
    """One token [1, H] or a gain [H] @ HBM -> [128, H/128, 1] @ SBUF."""
    return loaded(x_hbm.reshape((P_MAX, x_hbm.shape[-1] // P_MAX, 1)))


def scaled(dst, data, factor):
    """dst = data * factor, a number or one for each partition [P, 1] fp32."""
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=factor)


def multiply(dst, data1, data2):
    """dst = data1 * data2, element by element."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.multiply)


def product(dst, stationary, moving):
    """stationary [K, M].T @ moving [K, N] into dst [M, N] @ PSUM: on top of what products of the
    same place have put there. Sums may share a tile, as in AWS's MLP: ``accumulate`` stays open."""
    nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving)


def contract(dst, stationary, moving):
    """The sum over K of stationary [128, K/128, M] and moving [128, K/128, N] @ SBUF into dst [M,
    N] @ PSUM: K/128 passes of TensorE."""
    for k in range(moving.shape[1]):
        product(dst, stationary[:, k, :], moving[:, k, :])


def add_columns(acc_psum, weight_sb, column_sb):
    """A column [P, 1] times a weight [P, H] @ SBUF, strided, into acc [128, H/128] @ PSUM."""
    for tile in range(acc_psum.shape[1]):
        own_sb = weight_sb[:, tile * P_MAX : (tile + 1) * P_MAX]
        product(acc_psum[:, tile : tile + 1], own_sb, column_sb)


def turn(dst, data, engine=nisa.engine.unknown):
    """dst [F, P] = data [P, F] @ SBUF, transposed by TensorE through PSUM, which an engine of the
    compiler's choice empties, or the one that is named."""
    turned_psum = nl.ndarray(dst.shape, dtype=data.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=data)
    nisa.tensor_copy(dst=dst, src=turned_psum, engine=engine)


def strided_tiles(rows_sb, first, tiles):
    """Rows [T, H] @ SBUF -> the features of ``tiles`` tiles of ``strided`` columns, as those lie:
    [T, tiles, 128]."""
    own = rows_sb.reshape((rows_sb.shape[0], P_MAX, rows_sb.shape[1] // P_MAX))
    return own[:, :, first : first + tiles].permute((0, 2, 1))


# --- Norm and router ------------------------------------------------------------------------------


def summed(op, x, low_sb=None, scale=1.0):
    """Sums of op(x * scale + low) of rows [P, F] @ SBUF or PSUM -> [P, 1] fp32."""
    made_sb, sums_sb = tile_of(x.shape, FP32), tile_of((x.shape[0], 1), FP32)
    nisa.activation_reduce(
        dst=made_sb, op=op, data=x, bias=low_sb, scale=scale, reduce_op=nl.add, reduce_res=sums_sb
    )
    return sums_sb


def inverse_roots(sums, features, eps):
    """1 / rms from sums of squares over ``features``, fp32 @ SBUF (Zhang and Sennrich 2019); eps is
    a number or [P, 1] fp32 @ SBUF."""
    roots_sb = tile_of(sums.shape, FP32)
    nisa.activation(dst=roots_sb, op=nl.rsqrt, data=sums, bias=eps, scale=1.0 / features)
    return roots_sb


def column_norm(x_sb, gain_sb, eps):
    """RMSNorm of one token [128, H/128, 1] @ SBUF in two parts: x * gain, rounded once, of which
    products are made at once; and 1 / rms [128, 1] fp32, which scales what they give. The third
    result is eps * rms ** 2 [128, 1]: eps of a norm behind such a product that nothing scaled."""
    total_psum, ones_sb = psum_of((P_MAX, 1)), filled((P_MAX, P_MAX), 1.0, FP32)
    gained_sb, eps_sb = tile_of(x_sb.shape, x_sb.dtype), tile_of((P_MAX, 1), FP32)
    multiply(gained_sb, x_sb, gain_sb)
    product(total_psum, ones_sb, summed(nl.square, x_sb))  # sums the partitions
    size = P_MAX * x_sb.shape[1]
    nisa.tensor_scalar(eps_sb, total_psum, nl.multiply, eps / size, op1=nl.add, operand1=eps**2)
    return gained_sb, inverse_roots(total_psum, size, eps), eps_sb


def row_norm(x_sb, gain_sb, eps):
    """RMSNorm of rows [T, H] @ SBUF, the gain in each of [128, H], rounded once."""
    made_sb, (tokens, hidden) = tile_of(x_sb.shape, x_sb.dtype), x_sb.shape
    roots_sb = inverse_roots(summed(nl.square, x_sb), hidden, eps)
    gain_sb = gain_sb[0:tokens, :]
    nisa.scalar_tensor_tensor(made_sb, x_sb, nl.multiply, roots_sb, nl.multiply, gain_sb)
    return made_sb


def as_columns(x_sb):
    """Rows [T, H] @ SBUF -> [128, H/128, T]: a transpose for every H/128-th feature."""
    tokens, tiles = x_sb.shape[0], x_sb.shape[1] // P_MAX
    made_sb = tile_of((P_MAX, tiles, tokens), x_sb.dtype)
    for tile in range(tiles):
        turn(made_sb[:, tile, :], strided_tiles(x_sb, tile, 1)[:, 0, :])
    return made_sb


def routed(x_sb, router_sb, each, normalized, root_sb=None):
    """x [128, H/128, T], router [128, H/128, E] @ SBUF -> numbers (int32) and weights (fp32) of the
    best 8 experts [T, 8]; weights are a softmax over the best ``each`` where ``normalized``, else
    over all. Products of bf16 add up in fp32: the router's logits are those of one in fp32. Of one
    token whose norm's scale is to come they are ``root_sb`` [128, 1] times the products."""
    tokens, experts = x_sb.shape[2], router_sb.shape[2]
    logits_psum = psum_of((tokens, experts))
    contract(logits_psum, x_sb, router_sb)
    best_sb, number_sb = tile_of((tokens, BEST), FP32), tile_of((tokens, BEST), nl.uint32)
    nisa.max8(dst=best_sb, src=logits_psum)
    nisa.nc_find_index8(dst=number_sb, data=logits_psum, vals=best_sb)
    low_sb, weights_sb = tile_of((tokens, 1), FP32), tile_of((tokens, BEST), FP32)
    scale = 1.0 if root_sb is None else root_sb[0:tokens, :]
    nisa.tensor_scalar(low_sb, best_sb[:, 0:1], nl.multiply, -1.0, op1=nl.multiply, operand1=scale)
    sums_sb = summed(nl.exp, best_sb[:, 0:each] if normalized else logits_psum, low_sb, scale)
    nisa.activation(dst=weights_sb, op=nl.exp, data=best_sb, bias=low_sb, scale=scale)
    nisa.reciprocal(dst=sums_sb, data=sums_sb)
    scaled(weights_sb, weights_sb, sums_sb)
    return number_sb.view(nl.int32), weights_sb


# --- Attention ------------------------------------------------------------------------------------


class Heads(nl.NKIObject):
    """Heads of a rank: ``group`` query heads share each of ``kv_heads`` KV heads. A weight has, KV
    head by KV head, the value's matrix [H, D], the key's and its queries'. A physical core takes
    ``own`` of each group's queries, from ``first`` on."""

    kv_heads: int
    group: int

    def __post_init__(self):
        cores = nl.num_programs(0)
        assert self.group % cores == 0, f"{self.group} queries of a KV head on {cores} cores"
        self.own = self.group // cores
        self.first = self.own * nl.program_id(0)

    def load(self, made_sb, weight_hbm, kv_head):
        """A KV head's value, key and own queries, of QKV [kv_heads * (group + 2) * H, D] @ HBM,
        into [128, own + 2, H/128, D] @ SBUF."""
        shape = self.kv_heads, self.group + 2, P_MAX, made_sb.shape[2], P_MAX
        for n in range(self.own + 2):
            head_hbm = weight_hbm.reshape(shape)[kv_head, n if n < 2 else n + self.first]
            nisa.dma_copy(dst=made_sb[:, n, :, :], src=head_hbm)

    def output(self, weight_hbm, kv_head):
        """The output weights of its own queries, of [kv_heads * group * D, H] @ HBM -> [128, own,
        H] @ SBUF."""
        heads_hbm = weight_hbm.reshape((self.kv_heads, self.group, P_MAX, weight_hbm.shape[1]))
        own_hbm = heads_hbm[kv_head, self.first : self.first + self.own]
        return loaded(own_hbm.permute((1, 0, 2)))


def gained(gains_sb, cos_sb, sin_sb):
    """Gains of norms [n, D] into cos and sin [n, D] fp32 @ SBUF -> [D, n] fp32 twice: what features
    of a head are multiplied with, and what those of its other half."""
    rows, half, made = cos_sb.shape[0], P_MAX // 2, []
    own_sb, other_sb = tile_of(cos_sb.shape, FP32), tile_of(cos_sb.shape, FP32)
    multiply(own_sb, gains_sb, cos_sb)
    for to in (0, half):
        part, other, sign = nl.ds(to, half), nl.ds(half - to, half), 1.0 if to else -1.0
        gain_sb, sines = gains_sb[:, other], sin_sb[:, part]
        nisa.scalar_tensor_tensor(other_sb[:, part], gain_sb, nl.multiply, sign, nl.multiply, sines)
    for table_sb in (own_sb, other_sb):
        made.append(tile_of((P_MAX, rows), FP32))
        turn(made[-1], table_sb)
    return made


def rotated(dst, heads_psum, tables, eps):
    """dst [D, n] @ SBUF = heads [D, n] fp32 @ PSUM, normed and rotated (Su et al. 2021) by their
    ``gained`` tables, in fp32. Features stay on partitions: a product with ones adds them up."""
    shape, half, sums_psum = heads_psum.shape, P_MAX // 2, psum_of(heads_psum.shape)
    square_sb, own_sb, other_sb = tile_of(shape, FP32), tile_of(shape, FP32), tile_of(shape, FP32)
    nisa.activation(dst=square_sb, op=nl.square, data=heads_psum)
    product(sums_psum, filled((P_MAX, P_MAX), 1.0, FP32), square_sb)
    nisa.tensor_copy(dst=other_sb[0:half, :], src=heads_psum[half:, :])
    nisa.tensor_copy(dst=other_sb[half:, :], src=heads_psum[0:half, :])
    multiply(own_sb, heads_psum, tables[0])
    multiply(other_sb, other_sb, tables[1])
    nisa.tensor_tensor(dst=own_sb, data1=own_sb, data2=other_sb, op=nl.add)
    multiply(dst, own_sb, inverse_roots(sums_psum, P_MAX, eps))


def scores_of(q_sb, k_sb, by_sb, bias_sb):
    """q . k of queries [D, R] and keys [D, keys] @ SBUF, and to the last n of the keys by.T @ bias,
    of [B, R] and [B, n] @ SBUF, in tiles [R, up to 512] @ PSUM. A product puts the bias there
    before queries come."""
    scores, before = [], k_sb.shape[1] - bias_sb.shape[1]
    for part in spans(k_sb.shape[1], MOVING_MAX):
        start, size = part
        first, end = max(start, before), start + size
        scores.append(psum_of((q_sb.shape[1], size)))
        if first < end:
            own_sb = bias_sb[:, first - before : end - before]
            product(scores[-1][:, first - start : size], by_sb, own_sb)
        product(scores[-1], q_sb, k_sb[:, start:end])
    return scores


def context_of(scores, values, dtype):
    """softmax(scores / sqrt(D)), of tiles [R, n], times the values -> [D, R] @ SBUF. ``values`` are
    [up to 128 keys, D] @ SBUF each, in the order of the keys. Weights are rounded once, then
    divided by their sum, which a product with ones makes for every partition."""
    rows, scale, keys, turned, done = scores[0].shape[0], P_MAX**-0.5, 0, [], 0
    highest_sb, low_sb = tile_of((rows, len(scores)), FP32), tile_of((rows, 1), FP32)
    for n in range(len(scores)):
        nisa.tensor_reduce(dst=highest_sb[:, n : n + 1], op=nl.maximum, data=scores[n], axis=1)
        keys += scores[n].shape[1]
    nisa.tensor_reduce(dst=low_sb, op=nl.maximum, data=highest_sb, axis=1)
    scaled(low_sb, low_sb, -scale)
    weights_sb, ones_sb = tile_of((rows, keys), dtype), filled((P_MAX, P_MAX), 1.0, dtype)
    for part in scores:
        own_sb, done = weights_sb[:, done : done + part.shape[1]], done + part.shape[1]
        nisa.activation(dst=own_sb, op=nl.exp, data=part, bias=low_sb, scale=scale)
    context_psum, sums_psum, at = psum_of((P_MAX, rows)), psum_of((P_MAX, rows)), 0
    for values_sb in values:
        count = values_sb.shape[0]
        turned.append(tile_of((count, rows), dtype))
        turn(turned[-1], weights_sb[:, at : at + count], BY_TURNS[len(turned) % 2])
        at += count
    for n in range(len(values)):
        product(sums_psum, ones_sb[0 : values[n].shape[0], :], turned[n])
    for n in range(len(values)):
        product(context_psum, values[n], turned[n])
    shares_sb, context_sb = tile_of((P_MAX, rows), FP32), tile_of((P_MAX, rows), dtype)
    nisa.reciprocal(dst=shares_sb, data=sums_psum)
    multiply(context_sb, context_psum, shares_sb)
    return context_sb


def attend_token(step, x_sb, weights, caches):
    """Attention of one new token over a cache and itself, of the stream x [128, H/128, 1] @ SBUF.

    ``weights`` @ HBM are a gain [H], QKV [kv_heads * (group + 2) * H, D], gains of a key and its
    group's queries [group + 1, D], output [kv_heads * group * D, H] strided; ``caches`` of keys and
    values [1, kv_heads, room, D] @ HBM -> this core's part of the output [128, H/128] @ PSUM, and
    the new (key, value) of each KV head, rows [1, D] @ SBUF.
    """
    heads, dtype, tiles, length = step.heads, x_sb.dtype, x_sb.shape[1], step.length
    count, parts, new, acc_psum = heads.own + 1, spans(length, P_MAX), [], psum_of((P_MAX, tiles))
    gain_sb, gains_sb = loaded_column(weights[0]), loaded(weights[2][0:count, :])
    tables, ones_sb = gained(gains_sb, step.cos_sb, step.sin_sb), filled((1, heads.own), 1.0, dtype)
    gained_sb, root_sb, eps_sb = column_norm(x_sb, gain_sb, step.eps)
    for kv_head in range(heads.kv_heads):
        weight_sb, keys, values = step.qkv[kv_head], [], []
        heads.load(weight_sb, weights[1], kv_head)
        for cached in ((keys, caches[0]), (values, caches[1])):
            for part in parts:
                cached[0].append(loaded(cached[1][0, kv_head, nl.ds(part[0], part[1]), :]))
        out_w_sb = heads.output(weights[3], kv_head)
        # TensorE transposes the cached keys while it waits for the stream; the new key comes last
        k_sb = tile_of((P_MAX, length + 1), dtype)
        for n in range(len(parts)):
            turn(k_sb[:, nl.ds(parts[n][0], parts[n][1])], keys[n], BY_TURNS[n % 2])
        # key and queries [D, own + 1], one column of PSUM each, have norms of their own: the scale
        # of the stream's norm matters only beside their epsilon
        qk_psum, qk_sb = psum_of((P_MAX, count)), tile_of((P_MAX, count), dtype)
        for n in range(count):
            contract(qk_psum[:, n : n + 1], weight_sb[:, n + 1], gained_sb)
        rotated(qk_sb, qk_psum, tables, eps_sb)
        nisa.tensor_copy(dst=k_sb[:, length : length + 1], src=qk_sb[:, 0:1])
        scores = scores_of(qk_sb[:, 1:count], k_sb, ones_sb, step.bias_sb)
        # the value, a row [1, D], is made while other engines compute the scores
        v_psum, v_sb = psum_of((1, P_MAX)), tile_of((1, P_MAX), dtype)
        contract(v_psum, gained_sb, weight_sb[:, 0])
        scaled(v_sb, v_psum, root_sb[0:1, :])
        values.append(v_sb)
        context_sb = context_of(scores, values, dtype)
        for n in range(heads.own):
            add_columns(acc_psum, out_w_sb[:, n, :], context_sb[:, n : n + 1])
        key_sb = tile_of((1, P_MAX), dtype)
        turn(key_sb, qk_sb[:, 0:1], nisa.scalar_engine)
        new.append((key_sb, v_sb))
    return acc_psum, new


@nki.jit
def attention_prefill_kernel(
    x_hbm, gain_hbm, qkv_hbm, head_gains_hbm, out_w_hbm, cos_hbm, sin_hbm, kv_heads, group, eps
):
    """Causal attention of a prompt, from the residual stream to the output.

    x [T, H], cos and sin [T, D] fp32, the rest as in a decode step; padding follows the prompt ->
    this rank's part of the output [T, H], keys and values [kv_heads, T, D].
    """
    (tokens, hidden), dtype = x_hbm.shape, x_hbm.dtype
    heads, parts, tiles = Heads(kv_heads, group), spans(tokens, P_MAX), hidden // P_MAX
    out_hbm = result_of((tokens, hidden), dtype)
    new_shape = (kv_heads, tokens, P_MAX)
    k_hbm, v_hbm = result_of(new_shape, dtype), result_of(new_shape, dtype)
    gain_sb, weights, outs = loaded(gain_hbm.broadcast(0, P_MAX)), [], []
    gains_sb = loaded(head_gains_hbm[0:2, :].expand_dim(0).broadcast(0, P_MAX))
    for kv_head in range(kv_heads):
        weights.append(tile_of((P_MAX, heads.own + 2, tiles, P_MAX), dtype))
        heads.load(weights[kv_head], qkv_hbm, kv_head)
    # all tokens' queries and keys have features on partitions, values lie in rows, as scores need
    q_sb = tile_of((P_MAX, kv_heads * heads.own, tokens), dtype)
    k_sb, values = tile_of((P_MAX, kv_heads, tokens), dtype), []
    for part in parts:
        start, size = part
        own = nl.ds(start, size)
        normed_sb = as_columns(row_norm(loaded(x_hbm[own, :]), gain_sb, eps))
        cos_sb, sin_sb, tables = loaded(cos_hbm[own, :]), loaded(sin_hbm[own, :]), []
        for n in range(2):
            tables.append(gained(gains_sb[0:size, n, :], cos_sb, sin_sb))
        values.append(tile_of((size, kv_heads, P_MAX), dtype))
        for kv_head in range(kv_heads):
            weight_sb, value_sb = weights[kv_head], values[-1][:, kv_head, :]
            v_psum, key_sb = psum_of((size, P_MAX)), tile_of((size, P_MAX), dtype)
            contract(v_psum, normed_sb, weight_sb[:, 0])
            nisa.tensor_copy(dst=value_sb, src=v_psum)
            for n in range(heads.own + 1):
                head_psum, place = psum_of((P_MAX, size)), kv_head * heads.own + n - 1
                contract(head_psum, weight_sb[:, n + 1], normed_sb)
                head_sb = q_sb[:, place, own] if n else k_sb[:, kv_head, own]
                rotated(head_sb, head_psum, tables[min(n, 1)], eps)
            turn(key_sb, k_sb[:, kv_head, own])
            if nl.program_id(0) == 0:
                nisa.dma_copy(dst=k_hbm[kv_head, own, :], src=key_sb)
                nisa.dma_copy(dst=v_hbm[kv_head, own, :], src=value_sb)
    for kv_head in range(kv_heads):
        out_w_sb = heads.output(out_w_hbm, kv_head)
        for n in range(heads.own):
            outs.append(out_w_sb[:, n, :])
    for n in range(len(parts)):
        start, size = parts[n]
        rows = row_tiles(size, hidden)
        add_rows(causal_contexts(q_sb, k_sb, values, heads, parts, n), outs, rows)
        store_rows(rows, out_hbm[nl.ds(start, size), :])
    return out_hbm, k_hbm, v_hbm


def causal_contexts(q_sb, k_sb, values, heads, parts, n):
    """Causal attention of the n-th of the ``parts`` of tokens, queries [D, heads, T] over keys [D,
    kv_heads, T] and values, a tile [up to 128, kv_heads, D] of each part -> of each head [D, up to
    128] @ SBUF. All scores of a part fit in PSUM at once."""
    (start, size), dtype, contexts = parts[n], q_sb.dtype, []
    seen_sb, one_sb = filled((size, size), 0.0, dtype), nl.shared_identity_matrix(size, dtype=dtype)
    nisa.affine_select(  # in the part itself only keys that are not later count
        dst=seen_sb,
        pattern=[[-1, size]],
        channel_multiplier=1,
        on_true_tile=seen_sb,
        on_false_value=NEVER,
        cmp_op=nl.greater_equal,
    )
    for head in range(q_sb.shape[1]):
        kv_head, seen = head // heads.own, []
        for m in range(n + 1):
            seen.append(values[m][:, kv_head, :])
        own_sb, keys_sb = q_sb[:, head, nl.ds(start, size)], k_sb[:, kv_head, 0 : start + size]
        contexts.append(context_of(scores_of(own_sb, keys_sb, one_sb, seen_sb), seen, dtype))
    return contexts


def row_tiles(tokens, features):
    """Tiles [T, up to 512] @ PSUM for rows of so many features, strided."""
    rows = []
    for part in spans(features, MOVING_MAX):
        rows.append(psum_of((tokens, part[1])))
    return rows


def add_rows(columns, weights, rows):
    """Columns, tiles of [K, T], times a weight, tiles of [K, H] strided @ SBUF, into ``rows``."""
    for n in range(len(columns)):
        for m in range(len(rows)):
            some = nl.ds(m * MOVING_MAX, rows[m].shape[1])
            product(rows[m], columns[n], weights[n][:, some])


def in_order(rows, dtype):
    """``row_tiles`` -> [T, H] @ SBUF with features in their order."""
    tokens, done = rows[0].shape[0], 0
    rows_sb = tile_of((tokens, len(rows) * MOVING_MAX - MOVING_MAX + rows[-1].shape[1]), dtype)
    for part in rows:
        tiles = part.shape[1] // P_MAX
        own_sb = strided_tiles(rows_sb, done, tiles)
        nisa.tensor_copy(dst=own_sb, src=part.reshape((tokens, tiles, P_MAX)))
        done += tiles
    return rows_sb


def store_rows(rows, out_hbm):
    """``row_tiles``, of which each core has a part, added up -> out [T, H] @ HBM. Of two cores each
    sends the other one its half of the features, adds in fp32 and stores its own half."""
    rows_sb, core, cores = in_order(rows, FP32), nl.program_id(0), nl.num_programs(0)
    width = out_hbm.shape[1] // cores
    own, shape = nl.ds(core * width, width), (out_hbm.shape[0], width)
    sum_sb, theirs_sb = tile_of(shape, out_hbm.dtype), filled(shape, 0.0, FP32)
    if cores > 1:
        sent_sb, other = rows_sb[:, nl.ds((1 - core) * width, width)], 1 - core
        nisa.sendrecv(sent_sb, theirs_sb, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    nisa.tensor_tensor(dst=sum_sb, data1=rows_sb[:, own], data2=theirs_sb, op=nl.add)
    nisa.dma_copy(dst=out_hbm[:, own], src=sum_sb)


# --- Experts --------------------------------------------------------------------------------------
#
# A decode step reads the weights of the chosen experts alone. Up to 128 tokens of a prompt go
# through all experts: DMA needs longer for the weights than TensorE for the products, and sums stay
# in PSUM from the first expert to the last. More tokens form blocks of 128, one expert a block
# (Gale et al. 2022, "MegaBlocks"): the graph gives each block its expert and tokens, and each token
# the places of its results.


def expert_weights(gate_up_hbm, down_hbm, number_sb, pieces=1):
    """The expert that a tile [1, 1] names when the kernel runs: gate and up [128, H/128, 2 I], in
    so many ``pieces``, and the tiles of down, each [up to 128, H], @ SBUF."""
    (_, hidden, double), inner = gate_up_hbm.shape, down_hbm.shape[1]
    tiles, downs = hidden // P_MAX, []
    gate_up_sb = tile_of((P_MAX, tiles, double), gate_up_hbm.dtype)
    for part in spans(tiles, -(-tiles // pieces)):
        pattern, first = [[tiles * double, P_MAX], [double, part[1]], [1, double]], part[0] * double
        own_hbm = gate_up_hbm.ap(pattern, offset=first, scalar_offset=number_sb, indirect_dim=0)
        nisa.dma_copy(dst=gate_up_sb[:, nl.ds(part[0], part[1]), :], src=own_hbm)
    for part in spans(inner, P_MAX):
        pattern, first = [[hidden, part[1]], [1, hidden]], part[0] * hidden
        own_hbm = down_hbm.ap(pattern, offset=first, scalar_offset=number_sb, indirect_dim=0)
        downs.append(loaded(own_hbm))
    return gate_up_sb, downs


def inner_features(x_sb, gate_up_sb, weight, root_sb=None):
    """silu(gate) * up * weight of x [128, H/128, T] @ SBUF, the tiles of [I, T], rounded once
    (Shazeer 2020). weight [128, T] fp32 @ SBUF or PSUM, or None for 1; ``root_sb`` [128, 1] scales
    what silu takes."""
    (_, tiles, tokens), inner, made = x_sb.shape, gate_up_sb.shape[2] // 2, []
    for pair in spans(inner, 2 * P_MAX):
        parts, both = spans(pair[1], P_MAX), []
        for part in parts:
            both.append(psum_of((part[1], 2, tokens)))
        for k in range(tiles):  # a whole piece of the weight, as it arrives
            for n in range(2 * len(parts)):
                start, size = parts[n // 2]
                own_sb = gate_up_sb[:, k, nl.ds(pair[0] + start + n % 2 * inner, size)]
                product(both[n // 2][:, n % 2, :], own_sb, x_sb[:, k, :])
        for both_psum in both:
            size, gate_psum, up_psum = both_psum.shape[0], both_psum[:, 0, :], both_psum[:, 1, :]
            gate_sb, inner_sb = tile_of((size, tokens), FP32), tile_of((size, tokens), x_sb.dtype)
            scale = 1.0 if root_sb is None else root_sb[0:size, :]
            nisa.activation(dst=gate_sb, op=nl.silu, data=gate_psum, scale=scale)
            if weight is not None:
                multiply(gate_sb, gate_sb, weight[0:size, :])
            multiply(inner_sb, gate_sb, up_psum)
            made.append(inner_sb)
    return made


def run_chosen(step, x_sb, weights):
    """Norm, router and the chosen experts of one token, of the stream x [128, H/128, 1] @ SBUF.

    ``weights`` @ HBM are a gain [H], router [H, E], gate and up [E, H, 2 I], down [E, I, H] strided
    -> this core's part of what they add [128, H/128] @ PSUM. Experts are best whatever scales their
    scores, so the norm's scale goes into their weights and into what the activation takes.
    """
    acc_psum = psum_of(x_sb.shape[0:2])
    gain_sb = loaded_column(weights[0])
    router_sb = loaded(weights[1].reshape((P_MAX, x_sb.shape[1], -1)))
    gained_sb, root_sb, _ = column_norm(x_sb, gain_sb, step.eps)
    number_sb, shares_sb = routed(gained_sb, router_sb, step.each, step.normalized, root_sb)
    # a product with ones puts the experts' scaled shares [1, 8] on every partition
    ones_sb, spread_psum = filled((1, P_MAX), 1.0, FP32), psum_of((P_MAX, BEST))
    scaled(shares_sb, shares_sb, root_sb[0:1, :])
    product(spread_psum, ones_sb, shares_sb)
    spread_sb = copied(spread_psum, FP32)
    # an expert has 2.4 MB; TensorE multiplies it faster than DMA brings the next expert's weights
    choices = own_numbers(step.each)
    for choice in choices:
        own, pieces = nl.ds(choice, 1), 4 if choice == choices[-1] else 2
        gate_up_sb, downs = expert_weights(weights[2], weights[3], number_sb[:, own], pieces)
        inners = inner_features(gained_sb, gate_up_sb, spread_sb[:, own], root_sb)
        for n in range(len(inners)):
            add_columns(acc_psum, downs[n], inners[n])
    return acc_psum


@nki.jit
def router_kernel(x_hbm, delta_hbm, gain_hbm, router_hbm, each, normalized, eps):
    """Residual sum, norm and router of a prompt, x and delta [T, H] -> the norm's result and x +
    delta [T, H], numbers (int32) and weights (fp32) of the best 8 experts [T, 8]."""
    tokens, dtype = x_hbm.shape[0], x_hbm.dtype
    results = result_of(x_hbm.shape, dtype), result_of(x_hbm.shape, dtype)
    results += result_of((tokens, BEST), nl.int32), result_of((tokens, BEST), FP32)
    gain_sb = loaded(gain_hbm.broadcast(0, P_MAX))
    router_sb = loaded(router_hbm.reshape((P_MAX, x_hbm.shape[1] // P_MAX, -1)))
    for part in own_share(spans(tokens, P_MAX // nl.num_programs(0))):
        start, size = part
        own = nl.ds(start, size)
        x_sb, sum_sb = loaded(x_hbm[own, :]), tile_of((size, x_hbm.shape[1]), dtype)
        nisa.tensor_tensor(dst=sum_sb, data1=x_sb, data2=loaded(delta_hbm[own, :]), op=nl.add)
        normed_sb = row_norm(sum_sb, gain_sb, eps)
        number_sb, weights_sb = routed(as_columns(normed_sb), router_sb, each, normalized)
        made = normed_sb, sum_sb, number_sb, weights_sb
        for n in range(len(made)):
            nisa.dma_copy(dst=results[n][own, :], src=made[n])
    return results


@nki.jit
def experts_dense_kernel(normed_hbm, weight_hbm, gate_up_hbm, down_hbm):
    """All experts on up to 128 tokens: normed [T, H], weights [E, T] fp32, 0 for experts that a
    token has not chosen -> [T, H]."""
    (tokens, hidden), dtype, experts = normed_hbm.shape, normed_hbm.dtype, weight_hbm.shape[0]
    out_hbm, rows = result_of((tokens, hidden), dtype), row_tiles(tokens, hidden)
    normed_sb, weight_sb = as_columns(loaded(normed_hbm)), loaded(weight_hbm)
    number_sb, one_sb = tile_of((1, experts), nl.int32), nl.shared_identity_matrix(P_MAX, FP32)
    nisa.iota(dst=number_sb, pattern=[[1, experts]])
    for expert in own_numbers(experts):
        number = number_sb[:, expert : expert + 1]
        gate_up_sb, downs = expert_weights(gate_up_hbm, down_hbm, number)
        # a product with a column of the identity puts the expert's row on every partition
        spread_psum, column_sb = psum_of((P_MAX, tokens)), one_sb[0:experts, expert : expert + 1]
        product(spread_psum, column_sb.broadcast(1, P_MAX), weight_sb)
        inners = inner_features(normed_sb, gate_up_sb, spread_psum)
        add_rows(inners, downs, rows)
    store_rows(rows, out_hbm)
    return out_hbm


@nki.jit
def experts_block_kernel(
    normed_hbm, token_hbm, expert_hbm, place_hbm, weight_hbm, gate_up_hbm, down_hbm, each
):
    """Blocks of 128 tokens, each through one expert, and what they add up to.

    normed [T, H]; of block b the tokens [blocks, 128, 1] and the expert [1, blocks]; of a token the
    places of its results [T, k], b * 128 + row, and their weights [T, 8] fp32, of which ``each``
    count. Places of a block that no token has are computed and never read -> [T, H].
    """
    (tokens, hidden), dtype, blocks = normed_hbm.shape, normed_hbm.dtype, token_hbm.shape[0]
    made_hbm = result_of((blocks * P_MAX, hidden), dtype)
    out_hbm = result_of(normed_hbm.shape, dtype)
    expert_sb = loaded(expert_hbm)
    for block in own_numbers(blocks):
        gate_up_sb, downs = expert_weights(gate_up_hbm, down_hbm, expert_sb[:, block : block + 1])
        x_sb = as_columns(gathered(normed_hbm, loaded(token_hbm[block])))
        rows = row_tiles(P_MAX, hidden)
        add_rows(inner_features(x_sb, gate_up_sb, None), downs, rows)
        own_hbm = made_hbm[block * P_MAX : (block + 1) * P_MAX, :]
        nisa.dma_copy(dst=own_hbm, src=in_order(rows, dtype))
    if nl.num_programs(0) > 1:
        nisa.core_barrier(made_hbm, (0, 1))
    for part in own_share(spans(tokens, P_MAX)):
        own, sum_sb = nl.ds(part[0], part[1]), filled((part[1], hidden), 0.0, FP32)
        place_sb, weight_sb = loaded(place_hbm[own, :]), loaded(weight_hbm[own, :])
        for choice in range(each):
            at = nl.ds(choice, 1)
            made_sb, by = gathered(made_hbm, place_sb[:, at]), weight_sb[:, at]
            nisa.scalar_tensor_tensor(sum_sb, made_sb, nl.multiply, by, nl.add, sum_sb)
        nisa.dma_copy(dst=out_hbm[own, :], src=copied(sum_sb, dtype))
    return out_hbm


def gathered(rows_hbm, number_sb):
    """The rows [T, H] of a tensor @ HBM that a tile [T, 1] names, @ SBUF."""
    count, hidden = number_sb.shape[0], rows_hbm.shape[1]
    pattern = [[hidden, count], [1, hidden]]
    return loaded(rows_hbm.ap(pattern, offset=0, vector_offset=number_sb))


# --- A decode step --------------------------------------------------------------------------------


class Step(nl.NKIObject):
    """What all layers of a decode step share: the ranks that add up (a ReplicaGroup or None); cos
    and sin [own + 1, D] fp32, the bias of ``length`` cached keys and the new one [1, length + 1],
    the new one's place in the caches [1, 1] int32, room for QKV's weights @ SBUF; how many
    experts are chosen and whether their weights add up to 1; epsilon."""

    heads: Heads
    ranks: ncc.ReplicaGroup
    cos_sb: nl.NkiTensor
    sin_sb: nl.NkiTensor
    bias_sb: nl.NkiTensor
    place_sb: nl.NkiTensor
    qkv: list
    length: int
    each: int
    normalized: bool
    eps: float

    def keep(self, row_sb, cache_hbm, kv_head):
        """A new key or value [1, D] to its place in the cache, whose address is data."""
        place_hbm = cache_hbm.ap(
            pattern=[[P_MAX, 1], [1, P_MAX]],
            offset=kv_head * cache_hbm.shape[2] * P_MAX,
            scalar_offset=self.place_sb,
            indirect_dim=2,
        )
        nisa.dma_copy(dst=place_hbm, src=row_sb)

    def added(self, x_sb, part_psum):
        """The stream x [128, H/128, 1] @ SBUF behind what the cores of all ranks add in parts, fp32
        @ PSUM. They travel as H/128 rows of 512 bytes. Both cores add the same two, in PSUM."""
        shape, sum_psum = (x_sb.shape[1], P_MAX), psum_of((P_MAX, x_sb.shape[1]))
        sum_sb = tile_of(x_sb.shape, x_sb.dtype)
        parts, one_sb = [tile_of(shape, FP32)], nl.shared_identity_matrix(shape[0], dtype=FP32)
        turn(parts[0], copied(part_psum, FP32))
        if self.ranks is not None:
            parts.append(tile_of(shape, FP32))
            ncc.all_reduce(srcs=parts[:1], dsts=parts[1:], replica_group=self.ranks, op=nl.add)
            parts = parts[1:]
        if nl.num_programs(0) > 1:
            other = 1 - nl.program_id(0)
            parts.append(tile_of(shape, FP32))
            nisa.sendrecv(parts[0], parts[1], send_to_rank=other, recv_from_rank=other, pipe_id=0)
        for n in range(len(parts)):
            product(sum_psum, parts[n], one_sb)
        nisa.tensor_tensor(dst=sum_sb, data1=x_sb, data2=sum_psum.expand_dim(2), op=nl.add)
        return sum_sb


def decode_step_kernel(
    x_hbm,
    weights,
    caches,
    cos_hbm,
    sin_hbm,
    bias_hbm,
    place_hbm,
    kv_heads,
    group,
    each,
    normalized,
    eps,
    groups=None,
):
    """All layers of a decode step, of one token.

    x [1, H], embedded. ``weights`` has eight tensors a layer, those of ``attend_token`` and of
    ``run_chosen``; ``caches`` its keys and values [1, kv_heads, room, D], updated in place at place
    [1, 1] int32. cos and sin [1, D] fp32; bias [1, L + 1]: 0 for cached keys that count, the
    token's own last. ``groups`` lists the ranks that add up (None: one rank) -> the stream behind
    the last layer [1, H], then the caches. ``kernel_of`` makes a kernel of it.
    """
    heads, tiles, ranks = Heads(kv_heads, group), x_hbm.shape[1] // P_MAX, None
    out_hbm, count = result_of(x_hbm.shape, x_hbm.dtype), heads.own + 1
    if groups is not None:
        ranks = ncc.ReplicaGroup(groups)
    x_sb, qkv = loaded_column(x_hbm), []
    for _ in range(kv_heads):
        qkv.append(tile_of((P_MAX, heads.own + 2, tiles, P_MAX), x_hbm.dtype))
    # QKV's weights have one place: the next layer's come while softmax and a collective run, and
    # leave the DMA queues before the experts'
    step = Step(
        heads,
        ranks,
        loaded(cos_hbm.broadcast(0, count)),
        loaded(sin_hbm.broadcast(0, count)),
        loaded(bias_hbm),
        loaded(place_hbm),
        qkv,
        bias_hbm.shape[1] - 1,
        each,
        normalized,
        eps,
    )
    for n in range(len(caches) // 2):
        attention, experts = weights[8 * n : 8 * n + 4], weights[8 * n + 4 : 8 * n + 8]
        cached = caches[2 * n : 2 * n + 2]
        part_psum, new = attend_token(step, x_sb, attention, cached)
        x_sb = step.added(x_sb, part_psum)
        if nl.program_id(0) == 0:  # after an exchange both cores have read the caches
            for kv_head in range(kv_heads):
                step.keep(new[kv_head][0], cached[0], kv_head)
                step.keep(new[kv_head][1], cached[1], kv_head)
        x_sb = step.added(x_sb, run_chosen(step, x_sb, experts))
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out_hbm.reshape((P_MAX, tiles, 1)), src=x_sb)
    return (out_hbm,) + caches


@functools.cache
def kernel_of(layers):
    """``decode_step_kernel`` of so many layers, whose tensors are arguments of their own.

    A device's frontend gives tensors within tuples no place in HBM; the kernel of a whole step that
    ran on one is generated, too (KevGomes1403/nki-moe-megakernel 621932e, transformer_qwen.py).
    """
    names, passed, many = [], [], {"weights": 8 * layers, "caches": 2 * layers}
    for name in inspect.signature(decode_step_kernel).parameters:
        own = [f"{name}_{n}" for n in range(many[name])] if name in many else [name]
        names += own
        passed.append(f"({', '.join(own)},)" if name in many else name)
    name = f"{decode_step_kernel.__name__}_{layers}"
    text = f"def {name}({', '.join(names)}):\n    return body({', '.join(passed)})\n"
    linecache.cache[f"<{name}>"] = len(text), None, text.splitlines(keepends=True), f"<{name}>"
    scope = {"__name__": __name__, "body": decode_step_kernel}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return nki.jit(scope[name])


def __getattr__(name):
    """Generated kernels by their names, as graphs that are saved ask for them."""
    body, _, layers = name.rpartition("_")
    if body != decode_step_kernel.__name__ or not layers.isdigit():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return kernel_of(int(layers))


# --- Head -----------------------------------------------------------------------------------------


@nki.jit
def head_kernel(x_hbm, gain_hbm, weight_hbm, eps):
    """Norm and logits of one token: x [1, H], gain [1, H], weight [H, V] strided -> [1, V], type of
    x. A partition has V/128 logits that follow each other."""
    dtype, vocabulary = x_hbm.dtype, weight_hbm.shape[1]
    tiles, out_hbm = vocabulary // P_MAX, result_of((1, vocabulary), dtype)
    gained_sb, root_sb, _ = column_norm(loaded_column(x_hbm), loaded_column(gain_hbm), eps)
    own = own_numbers(tiles)
    logits_sb = tile_of((P_MAX, len(own)), dtype)
    for part in spans(len(own), HEAD_TILES):
        start, count = part
        columns = nl.ds((own[0] + start) * P_MAX, count * P_MAX)
        logits_psum = psum_of((P_MAX, count))
        weight_sb = loaded(weight_hbm.reshape((P_MAX, -1, vocabulary))[:, :, columns])
        for n in range(count):
            stationary_sb = weight_sb[:, :, n * P_MAX : (n + 1) * P_MAX]
            contract(logits_psum[:, n : n + 1], stationary_sb, gained_sb)
        scaled(logits_sb[:, start : start + count], logits_psum, root_sb)
    own_hbm = out_hbm.reshape((P_MAX, tiles))[:, nl.ds(own[0], len(own))]
    nisa.dma_copy(dst=own_hbm, src=logits_sb)
    return out_hbm


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(MoENeuronConfig):
    """MoENeuronConfig with ``nki_enabled``: run the kernels of this file.

    A driver's ``enable_nki`` decides. The contest's own, whose word for a file is ``qwen``, keeps
    ``enable_nki`` for another file: under it the kernels always run.
    """

    def __init__(self, **kwargs: Any) -> None:
        asked = bool(kwargs.pop("enable_nki", kwargs.pop("nki_enabled", False)))
        self.nki_enabled = asked or "qwen" in kwargs
        super().__init__(**kwargs)


class Qwen3MoeInferenceConfig(sdk.Qwen3MoeInferenceConfig):
    """The SDK's, with a NeuronConfigNKI; what the kernels do not take is refused."""

    def add_derived_config(self) -> None:
        super().add_derived_config()
        own, group = self.neuron_config, self.num_attention_heads // self.num_key_value_heads
        self.cores = cores = 2 if getattr(own, "logical_nc_config", 1) == 2 else 1
        each, tp = self.num_experts_per_tok, own.tp_degree
        sizes = "num_attention_heads", "num_key_value_heads", "moe_intermediate_size", "vocab_size"
        unknown = ("flash_decoding_enabled", "sequence_parallel_enabled", "lora_config")
        fits = (
            (not self.mlp_only_layers, "layers without experts", "none"),
            *(
                (
                    getattr(self, name) % tp == 0,
                    f"{name} {getattr(self, name)}",
                    f"a multiple of the tensor-parallel degree {tp}",
                )
                for name in sizes
            ),
            *((not getattr(own, name, False), name, "none") for name in unknown),
            (self.head_dim == P_MAX, f"head_dim {self.head_dim}", P_MAX),
            (
                self.hidden_size % (P_MAX * cores) == 0,
                f"hidden_size {self.hidden_size}",
                f"a multiple of {P_MAX * cores}",
            ),
            (group % cores == 0, f"{group} query heads of a KV head", "an even number"),
            (self.num_experts <= P_MAX, f"num_experts {self.num_experts}", "at most 128"),
            (
                each <= BEST and each % cores == 0,
                f"num_experts_per_tok {each}",
                "an even number of at most 8",
            ),
            (not self.tie_word_embeddings, "a head tied to the embedding", "one of its own"),
            (own.batch_size == 1, f"batch_size {own.batch_size}", 1),
            (not own.speculation_length, f"steps of {own.speculation_length} tokens", "of one"),
            (own.padding_side == "right", f"padding_side {own.padding_side}", "right"),
        )
        for fit, found, expected in fits:
            if own.nki_enabled and not fit:
                raise ValueError(
                    f"The kernels got {found}, expected {expected}; run without --enable-nki."
                )

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


# --- Modules --------------------------------------------------------------------------------------


def rotation(position_ids: torch.Tensor, config: InferenceConfig) -> Tuple[torch.Tensor, ...]:
    """cos and sin [B, T, D] of positions [B, T], fp32; both halves of a head turn alike."""
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / -config.head_dim
    angles = position_ids.to(torch.float32)[:, :, None] * config.rope_theta**powers
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class RankWeight(ColumnParallelLinear):
    """The weight [K, N] of one rank; the checkpoint has the ranks' weights one below another.

    It is a ColumnParallelLinear so that the SDK's loader cuts it, whichever way it is parallel.
    """

    def __init__(self, k: int, n: int, config: InferenceConfig) -> None:
        own, kept = config.neuron_config, {"bias": False, "gather_output": False}
        super().__init__(n, k * own.tp_degree, dtype=own.torch_dtype, **kept)


def gain_of(size: int, config: InferenceConfig) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, dtype=config.neuron_config.torch_dtype))


class Qwen3MoeAttention(nn.Module):
    """Grouped-query attention with norms of queries and keys, behind its norm."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, tp, hidden = config, config.neuron_config.tp_degree, config.hidden_size
        self.eps, self.kv_heads = config.rms_norm_eps, config.num_key_value_heads // tp
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.gain = gain_of(hidden, config)
        self.head_gains = nn.Parameter(self.gain.new_ones(self.group + 1, P_MAX))
        self.qkv = RankWeight(self.kv_heads * (self.group + 2) * hidden, P_MAX, config)
        self.out = RankWeight(self.kv_heads * self.group * P_MAX, hidden, config)

    def weights(self) -> Tuple[torch.Tensor, ...]:
        return self.gain, self.qkv.weight, self.head_gains, self.out.weight

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tuple[Any, ...]:
        """Stream [1, T, H] of a prompt, cos and sin [1, T, D] -> what attention adds, and keys and
        values [1, kv_heads, T, D]."""
        gain, *weights = self.weights()
        inputs = x[0], gain[None], *weights, cos[0], sin[0]
        sizes = {"kv_heads": self.kv_heads, "group": self.group, "eps": self.eps}
        out, keys, values = attention_prefill_kernel[self.config.cores](*inputs, **sizes)
        return reduce_from_tensor_model_parallel_region(out[None]), (keys[None], values[None])


class Qwen3MoeExperts(nn.Module):
    """Residual sum, norm, router and the chosen experts, each sharded like a Llama's MLP."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.experts, self.hidden = config, config.num_experts, config.hidden_size
        self.each, self.normalized = config.num_experts_per_tok, bool(config.norm_topk_prob)
        self.eps = config.rms_norm_eps
        self.inner = config.moe_intermediate_size // config.neuron_config.tp_degree
        self.gain = gain_of(self.hidden, config)
        self.router = nn.Parameter(self.gain.new_empty(self.hidden, self.experts))
        self.gate_up = RankWeight(self.experts * self.hidden, 2 * self.inner, config)
        self.down = RankWeight(self.experts * self.inner, self.hidden, config)

    def weights(self) -> Tuple[torch.Tensor, ...]:
        gate_up = self.gate_up.weight.reshape(self.experts, self.hidden, 2 * self.inner)
        down = self.down.weight.reshape(self.experts, self.inner, self.hidden)
        return self.gain, self.router, gate_up, down

    def forward(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Stream of a prompt, what attention adds, [1, T, H] -> the stream behind the experts."""
        gain, router, gate_up, down = self.weights()
        given, cores = (x[0], delta[0], gain[None], router), self.config.cores
        kept = {"each": self.each, "normalized": self.normalized, "eps": self.eps}
        rows, stream, number, weight = router_kernel[cores](*given, **kept)
        chosen, weights = number[:, : self.each].to(torch.int64), weight[:, : self.each]
        if x.shape[1] <= P_MAX:
            none = torch.zeros((x.shape[1], self.experts), dtype=weight.dtype, device=x.device)
            spread = none.scatter(1, chosen, weights).t().contiguous()
            out = experts_dense_kernel[cores](rows, spread, gate_up, down)
        else:
            inputs = rows, *self.blocks(chosen), weight, gate_up, down
            out = experts_block_kernel[cores](*inputs, each=self.each)
        return (stream + reduce_from_tensor_model_parallel_region(out))[None]

    def blocks(self, number: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Experts of each token [T, k] -> tokens of each block [blocks, 128, 1], the blocks'
        experts [1, blocks] and the places of each token's results [T, k], all int32.

        An expert with n tokens has the next ceil(n / 128) blocks, so that there can be no more than
        one for each 128 results and one more for each expert.
        """
        tokens, device = number.shape[0], number.device
        most = number.numel() // P_MAX + self.experts
        chosen = torch.zeros((tokens, self.experts), dtype=torch.int64, device=device)
        chosen = chosen.scatter(1, number, 1)
        ends = ((chosen.sum(0) + P_MAX - 1) // P_MAX).cumsum(0)
        firsts = torch.cat((torch.zeros_like(ends[:1]), ends[:-1])) * P_MAX
        places = (firsts + chosen.cumsum(0) - 1).gather(1, number)  # a token's own experts
        rows = torch.arange(tokens, device=device)[:, None].expand(places.shape)
        slots = torch.zeros(most * P_MAX, dtype=torch.int64, device=device)
        slots = slots.scatter(0, places.reshape(-1), rows.reshape(-1))
        block = torch.arange(most, device=device)[:, None]
        owners = (ends[None] <= block).sum(1).clamp(max=self.experts - 1)[None]
        made = slots.reshape(most, P_MAX, 1), owners, places
        return tuple(one.to(torch.int32).contiguous() for one in made)


class Qwen3MoeDecoderLayer(nn.Module):
    """Attention and experts of a prompt, each with its norm in front of it."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.attention, self.experts = Qwen3MoeAttention(config), Qwen3MoeExperts(config)
        self.config = config

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> Tuple[Any, ...]:
        """Stream [1, T, H] -> the same, (K, V), cos, sin, and no residual beside the stream."""
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        if cos is None:
            cos, sin = rotation(given["position_ids"], self.config)
        delta, cached = self.attention(hidden_states, cos, sin)
        return self.experts(hidden_states, delta), cached, cos, sin, None


class Qwen3MoeHead(RankWeight):
    """Norm and LM head, sharded over the vocabulary; gathered unless the device samples."""

    def __init__(self, config: InferenceConfig, gathers: bool) -> None:
        self.vocabulary = config.vocab_size // config.neuron_config.tp_degree
        padded = self.vocabulary + -self.vocabulary % (P_MAX * config.cores)
        super().__init__(config.hidden_size, padded, config)
        self.config, self.gathers, self.gain = config, gathers, gain_of(config.hidden_size, config)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """Stream [1, 1, H] -> logits [1, 1, V] (of this rank where the device samples)."""
        inputs = x[0], self.gain[None], self.weight, self.config.rms_norm_eps
        logits = head_kernel[self.config.cores](*inputs)[None, :, : self.vocabulary]
        return gather_from_tensor_model_parallel_region(logits) if self.gathers else logits


class NeuronQwen3MoeModel(sdk.NeuronQwen3MoeModel):
    """Embedding, decoder layers and head, as the NxDI base class calls them."""

    def init_model(self, config: InferenceConfig) -> None:
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        sizes, dtype = (config.vocab_size, config.hidden_size), config.neuron_config.torch_dtype
        self.embed_tokens = ParallelEmbedding(
            *sizes, config.pad_token_id, dtype=dtype, shard_across_embedding=True
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(config) for _ in layers)
        self.norm = nn.Identity()  # the head has the norm
        self.lm_head = Qwen3MoeHead(config, gathers=not self.on_device_sampling)

    def get_model_output(self, input_ids: Any = None, **given: Any) -> Tuple[Any, Any]:
        """Hidden states and caches: a decode step is one kernel, which updates the caches."""
        if input_ids.shape[1] > 1:
            return super().get_model_output(input_ids=input_ids, **given)
        x, first, config = self.embed_tokens(input_ids), self.layers[0], self.config
        places, caches = given["position_ids"], tuple(self.kv_mgr.past_key_values)
        seen = nn.functional.pad(given["attention_mask"][0, 0], (0, 1), value=True)
        layers, tp, hidden = (), config.neuron_config.tp_degree, torch.finfo(x.dtype).min / 2
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, hidden)
        for layer in self.layers:
            layers += layer.attention.weights() + layer.experts.weights()
        out, *caches = kernel_of(len(self.layers))[config.cores](
            x[0],
            *layers,
            *caches,
            *(table[0] for table in rotation(places, config)),
            bias,
            places.to(torch.int32),
            first.attention.kv_heads,
            first.attention.group,
            first.experts.each,
            first.experts.normalized,
            config.rms_norm_eps,
            (tuple(range(tp)),) if tp > 1 else None,
        )
        return self.norm(out[None]), caches


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------


def by_ranks(weight: torch.Tensor, tp: int, dim: int) -> torch.Tensor:
    """A weight [.., K, N] cut along ``dim`` -> the ranks' [K', N'], one below another."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in weight.chunk(tp, dim=dim)])


def strided(weight: torch.Tensor) -> torch.Tensor:
    """A weight [.., H] with the columns in the order (p, f) -> f * 128 + p."""
    return weight.unflatten(-1, (P_MAX, -1)).transpose(-1, -2).flatten(-2)


def convert_layer(old: StateDict, config: InferenceConfig) -> StateDict:
    """One layer, names without its prefix: heads of a KV head side by side, experts stacked."""
    tp, dim, experts = config.neuron_config.tp_degree, config.head_dim, config.num_experts
    q, k, v, out = (old[f"self_attn.{name}_proj.weight"].t() for name in "qkvo")
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    q_gain, k_gain = (old[f"self_attn.{name}_norm.weight"] for name in "qk")
    grouped = [part.unflatten(1, (kv_heads, -1, dim)) for part in (v, k, q)]
    stacked = {
        name: torch.stack([old[f"mlp.experts.{e}.{name}_proj.weight"].t() for e in range(experts)])
        for name in ("gate", "up", "down")
    }
    shares = [stacked[name].chunk(tp, 2) for name in ("gate", "up")]
    both = [torch.cat(parts, 2) for parts in zip(*shares)]
    return {
        "attention.gain": old["input_layernorm.weight"],
        "attention.head_gains": torch.stack([k_gain, *[q_gain] * group]),
        "attention.qkv.weight": torch.cat(grouped, 2).permute(1, 2, 0, 3).reshape(-1, dim),
        "attention.out.weight": by_ranks(strided(out), tp, 0),
        "experts.gain": old["post_attention_layernorm.weight"],
        "experts.router": old["mlp.gate.weight"].t().contiguous(),
        "experts.gate_up.weight": by_ranks(torch.cat(both, 2), tp, 2),
        "experts.down.weight": by_ranks(strided(stacked["down"]), tp, 1),
    }


class NeuronQwen3MoeForCausalLM(sdk.NeuronQwen3MoeForCausalLM):
    """What the driver compiles, loads and generates with; without kernels it is the SDK's own."""

    @property
    def _model_cls(self) -> Type[nn.Module]:
        own = self.config.neuron_config.nki_enabled
        return NeuronQwen3MoeModel if own else sdk.NeuronQwen3MoeModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's."""
        if not config.neuron_config.nki_enabled:
            return sdk.NeuronQwen3MoeForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)
        tp, made = config.neuron_config.tp_degree, {}
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}."
            names = [name for name in state_dict if name.startswith(prefix)]
            old = {name[len(prefix) :]: state_dict.pop(name) for name in names}
            made |= {prefix + name: part for name, part in convert_layer(old, config).items()}
        made["embed_tokens.weight"] = state_dict["embed_tokens.weight"]
        whole, head = P_MAX * config.cores, state_dict["lm_head.weight"].chunk(tp)
        parts = [nn.functional.pad(part.t(), (0, -part.shape[0] % whole)) for part in head]
        made["lm_head.weight"] = torch.cat([strided(part) for part in parts])
        made["lm_head.gain"] = state_dict["norm.weight"]
        made["rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
        return made

    @classmethod
    def get_config_cls(cls) -> Type[Qwen3MoeInferenceConfig]:
        return Qwen3MoeInferenceConfig
