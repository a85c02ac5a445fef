"""Cached keys of any kind for llama.py: several new tokens over a cache, blocks, windows.

Servers need this file: prompts in chunks, guesses that one call checks, caches of blocks that a
table names, chunks that sequences share, sliding windows, and caches larger than SBUF.

Attention makes the two passes of models/queries.py over blocks of the cache, whose keys TensorE
transposes, and then over the new tokens. Up to 128 queries of a sequence (attend_few) wait for the
cache, not for an engine, and read it once. Cached keys and values are stationary in both products,
128 keys at a time. The queries of all heads of a stack move together: a few columns take as long as
64. Scores leave PSUM in fp32, so that exp can wait for their maximum while TensorE makes the next
block's scores. Weights are relative to their block's maximum; a larger one rescales the sums.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from torch import nn

import llama
from llama import (
    CHUNK_BYTES,
    MOVING_MAX,
    P_MAX,
    Columns,
    Hbm,
    HeadShape,
    Hidden,
    NeuronLlamaModel,
    Sbuf,
    Tokens,
    _mask_bias,
    cache_in_runs,
    cache_runs,
    causal_mask,
    grouped,
    masked,
    option,
    psum,
    score_scales,
    spans,
    store_product,
    token_blocks,
    token_chunk,
    whole_tiles,
)
from models.families import CACHED, has_attention_kernels, window_of
from models.weights import SharedSizes
from models.queries import (
    AUGMENTED,
    RESIDENT_BYTES,
    Constants,
    KeyTiles,
    QueryGroup,
    Window,
    attend_groups,
    attention_constants,
    bank_queries,
    contraction,
    heads_of,
    key_bytes,
    key_spans,
    load_constant,
    load_transposed,
    new_keys,
    project_blocks,
    score_banks,
    score_tile,
    store_transposed,
    tile_values,
)
from models.layers import AnyAttention, attention_prefill_kernel, layer_of

CACHE_ROW_BYTES = 3072  # a load's row, by head and partition: longer rows gain nothing
FEW_ROW_BYTES = 4096  # the same for few queries: no augmented rows, no ones
DMA_ROW_BYTES = 2048  # a row that a table names, all heads: shorter ones take as long


# --- Sizes known while tracing --------------------------------------------------------------------


def chunk_tokens(features, heads, itemsize, quantised=False):
    """The tokens of a chunk of attention. x, Q and K of each token stay, with room for another Q,
    and x times the norm's gain where weights are quantised; behind them stand Q, K, V and new
    keys."""
    tiles = features // P_MAX * (2 if quantised else 1)
    projected = itemsize * (tiles + 2 * heads.q_tiles + heads.stacks)
    values = itemsize * heads.kv_heads * heads.head_dim + key_bytes(
        P_MAX, heads, AUGMENTED, itemsize
    )
    attended = itemsize * (heads.q_tiles + heads.stacks) + math.ceil(values / P_MAX)
    return token_chunk(max(projected, attended))


def key_room(shape, heads, dtype):
    """Room for keys in rows [*shape, depth] @ SBUF, zeros where features are fewer."""
    if heads.depth == heads.head_dim:
        return nl.ndarray((*shape, heads.depth), dtype)
    return nisa.memset((*shape, heads.depth), 0.0, dtype)


# --- Sources of keys ------------------------------------------------------------------------------


class AnyCache(NamedTuple):
    """Keys and values @ HBM [B, kv_heads, L, D] and bias [rows, n] of their first n keys, or a
    cache of blocks: [rows, run, kv_heads, D], or [rows, run, D] where heads lie separately. rows_sb
    [lanes, B * parts (* kv_heads)] @ SBUF then names the rows on the partitions of each part."""

    keys_hbm: Hbm
    values_hbm: Hbm
    bias_hbm: Hbm
    rows_sb: Optional[Sbuf] = None

    @property
    def length(self) -> int:
        """Keys of a sequence."""
        return self.bias_hbm.shape[1]

    @property
    def itemsize(self) -> int:
        """Bytes of a number in SBUF: fp8 keys are transposed into the type of x."""
        return max(2, self.keys_hbm.itemsize)

    @property
    def lanes(self) -> int:
        """Partitions of a head's keys; of a decode step without a table see ``cache_runs``."""
        return cache_runs(self.length)[0] if self.rows_sb is None else self.rows_sb.shape[0]

    @property
    def by_token(self) -> bool:
        """Whether rows that a table names hold a token's heads side by side."""
        return self.rows_sb is not None and len(self.keys_hbm.shape) == 4


class AnyRows(NamedTuple):
    """Keys or values of some cached tokens of a sequence @ SBUF: [lanes, heads, tiles, D], or, if
    ``by_token``, [lanes, tiles, heads, D] as in a cache of blocks. Heads count from ``head`` on."""

    rows_sb: Sbuf
    by_token: bool = False
    head: int = 0

    @property
    def tiles(self) -> int:
        return self.rows_sb.shape[1 if self.by_token else 2]

    def tile(self, first, count, tile):
        """A tile of ``count`` heads from the ``first`` on that counts: [lanes, count, D]."""
        heads = slice(self.head + first, self.head + first + count)
        at = (tile, heads) if self.by_token else (heads, tile)
        return self.rows_sb[(slice(None), *at, slice(None))]

    def transposed(self, first, count, start, tiles):
        """Transpose ``tiles`` tiles of these heads from ``start`` on -> [count * D, tiles, lanes] @
        PSUM, as many as share a bank. A transpose takes all heads of a tile."""
        lanes, *_, depth = self.rows_sb.shape
        keys_psum = psum((count * depth, tiles, lanes), nl.ndarray)
        for t in nl.affine_range(tiles):
            keys_psum[:, t, :] = nisa.nc_transpose(self.tile(first, count, start + t))
        return keys_psum


class CacheTiles(NamedTuple):
    """Some tiles of a sequence's Cache, of ``count`` KV heads from ``head`` on, and which of the
    rows of its bias, (first, count), are those of its queries.

    ``shared``: queries have different rows, of sequences that stand in one or their own, and the
    bias is separate. k_hbm [count, depth + AUGMENTED, tiles, lanes], if any, keeps transposed keys
    from when they are first loaded to the second time."""

    cache: AnyCache
    sequence: int
    head: int
    count: int
    tile: int
    tiles: int
    heads: HeadShape
    bias_rows: Tuple[int, int]
    shared: bool
    k_hbm: Optional[Hbm] = None

    @property
    def lanes(self) -> int:
        return self.cache.lanes

    def named_rows(self, cache_hbm, head):
        """Keys or values @ SBUF by an indirect load, a partition takes the row of HBM that the
        block table names: [lanes, tiles, kv_heads, D], or of one head [lanes, tiles, D]."""
        rows, *shape = cache_hbm.shape
        flat_hbm = cache_hbm.reshape((rows, math.prod(shape)))
        parts, heads = self.cache.length // (self.lanes * self.tiles), self.heads.kv_heads
        at = self.sequence * parts + self.tile // self.tiles
        at = at if self.cache.by_token else at * heads + head
        lane, column = nl.arange(self.lanes)[:, None], nl.arange(math.prod(shape))[None, :]
        return nl.load(flat_hbm[self.cache.rows_sb[lane, at], column]).reshape((self.lanes, *shape))

    def rows_of(self, cache_hbm, head):
        """Keys or values of a head [lanes, tiles, D] @ SBUF."""
        if self.cache.rows_sb is not None:
            return self.named_rows(cache_hbm, head)
        lane, tile = nl.arange(self.lanes)[:, None, None], nl.arange(self.tiles)[None, :, None]
        key = lane * (self.cache.length // self.lanes) + self.tile + tile
        feature = nl.arange(self.heads.head_dim)[None, None, :]
        return nl.load(cache_hbm[self.sequence, head, key, feature])

    def rows(self, cache_hbm):
        """Load AnyRows of keys or values: [lanes, heads, tiles, depth] for its heads, a load a head
        with rows as long as the tiles, or all heads as ``named_rows`` has them."""
        d, room = self.heads.head_dim, (self.lanes, self.count, self.tiles)
        if self.cache.by_token:
            rows_sb = self.named_rows(cache_hbm, 0)
            if self.heads.depth > d:
                narrow_sb = rows_sb
                rows_sb = key_room(narrow_sb.shape[:3], self.heads, cache_hbm.dtype)
                rows_sb[:, :, :, 0:d] = nisa.tensor_copy(narrow_sb)
            return AnyRows(rows_sb, True, self.head)
        rows_sb = key_room(room, self.heads, cache_hbm.dtype)
        for at in nl.affine_range(self.count):
            rows_sb[:, at, :, 0:d] = self.rows_of(cache_hbm, self.head + at)
        return AnyRows(rows_sb)

    def bias(self):
        """The bias of its keys [rows, tiles, lanes] @ HBM."""
        rows, length = self.cache.bias_hbm.shape
        runs_hbm = self.cache.bias_hbm.reshape((rows, length // self.lanes, self.lanes))
        return runs_hbm[nl.ds(*self.bias_rows), nl.ds(self.tile, self.tiles), :]

    def transposed_keys(self, k_sb):
        """Write keys into k_sb. A tile turns for all heads of a stack at once; ScalarE is alone at
        PSUM beside many queries."""
        d, keys = self.heads.depth, self.rows(self.cache.keys_hbm)
        for first, stacked in spans(self.count, self.heads.stack):
            for start, tiles in spans(self.tiles, MOVING_MAX // self.lanes):
                transposed_psum = keys.transposed(first, stacked, start, tiles)
                for at in nl.static_range(stacked):
                    k_sb[0:d, first + at, nl.ds(start, tiles), :] = nisa.tensor_copy(
                        transposed_psum[at * d : (at + 1) * d, :, :], engine=nisa.scalar_engine
                    )

    def values(self):
        """Values [128, tiles, heads, D + 1] @ SBUF: VectorE puts ones behind, which GpSimdE would
        keep from SBUF."""
        values_hbm, d = self.cache.values_hbm, self.heads.head_dim
        shape = (P_MAX, self.tiles, self.count, d + 1)
        v_sb = nl.ndarray(shape, values_hbm.dtype)
        v_sb[:, :, :, d : d + 1] = nisa.memset((*shape[:3], 1), 1.0, values_hbm.dtype)
        if self.cache.by_token:
            rows_sb = self.named_rows(values_hbm, 0)[:, :, self.head : self.head + self.count, :]
            v_sb[0 : self.lanes, :, :, 0:d] = nisa.tensor_copy(rows_sb, engine=nisa.vector_engine)
            return v_sb
        for at in nl.affine_range(self.count):
            rows_sb = self.rows_of(values_hbm, self.head + at)
            v_sb[0 : self.lanes, :, at, 0:d] = nisa.tensor_copy(rows_sb, engine=nisa.vector_engine)
        return v_sb

    def load(self, values=True):
        """-> KeyTiles. Keys that came without ``values`` come back from k_hbm, if any: turning them
        again took a tenth of the port to PSUM beside chunks of 160 tokens."""
        bias_hbm = self.bias()
        if values and self.k_hbm is not None:
            k_sb = load_transposed(self.k_hbm, 0, self.count, 0, self.tiles)
        else:
            tiles = len(contraction(self.heads.depth + AUGMENTED)) * self.tiles
            k_sb = nl.ndarray((P_MAX, self.count, tiles, self.lanes), bias_hbm.dtype)
            self.transposed_keys(k_sb)
            self.augment(k_sb, bias_hbm)
            if self.k_hbm is not None:
                store_transposed(self.k_hbm, k_sb)
        bias_sb = nl.load(bias_hbm) if self.shared else None
        v_sb = self.values() if values else None
        return KeyTiles(k_sb, v_sb, self.tiles, self.tiles, self.lanes, bias_sb=bias_sb)

    def augment(self, k_sb, bias_hbm):
        """The rows behind the features of each head: the bias, zero where it is separate, and
        ones."""
        slot, row = divmod(self.heads.depth, P_MAX)
        ones = np.ones((AUGMENTED, self.tiles, self.lanes), np.float32)
        ones[0] = 0.0
        for at in nl.affine_range(self.count):
            part, first = nl.ds(slot * self.tiles, self.tiles), 0 if self.shared else 1
            if not self.shared:
                k_sb[row : row + 1, at, part, :] = nl.load(bias_hbm)
            rows = k_sb[row + first : row + AUGMENTED, at, part, :]
            rows[...] = load_constant(ones[first:], bias_hbm.dtype)


def few_queries(banks):
    """Whether ``attend_few`` takes the banks of a set of heads, of a tile each."""
    return len(banks) == 1 and banks[0].rows * banks[0].tokens <= P_MAX


def cache_blocks(cache, sequence, banks, heads, bias_rows, shared=False):
    """The CacheTiles of a sequence for the heads of some banks, or KeyTiles where all fit. Each of
    the queries' ``bias_rows`` says which keys count."""
    (head, count), few = heads_of(banks), few_queries(banks)
    # with few queries, fp8 keys do not lie transposed in the type of x
    size = FEW_ROW_BYTES // cache.keys_hbm.itemsize if few else CACHE_ROW_BYTES // cache.itemsize
    each = size // heads.head_dim if cache.rows_sb is None else cache.keys_hbm.shape[1]
    blocks = [
        CacheTiles(cache, sequence, head, count, *block, heads, bias_rows, shared)
        for block in spans(cache.length // cache.lanes, each)
    ]
    rows = heads.depth + AUGMENTED
    columns = count * (len(contraction(rows)) * P_MAX + heads.head_dim + 1)
    if few:
        return blocks
    if cache.length // cache.lanes * cache.itemsize * columns <= RESIDENT_BYTES:
        return [block.load() for block in blocks]
    shapes = [(count, rows, block.tiles, block.lanes) for block in blocks]
    transposed_hbm = [nl.ndarray(shape, cache.bias_hbm.dtype, buffer=nl.hbm) for shape in shapes]
    return [block._replace(k_hbm=k_hbm) for block, k_hbm in zip(blocks, transposed_hbm)]


# --- Attention of few queries ---------------------------------------------------------------------


class Weighted(NamedTuple):
    """Attention of a bank's queries over some keys, each [128, columns] fp32: the negated maximum
    of scaled scores and the sum of exp, alike on all partitions, and the sums of weighted values,
    at the lanes of a column's own head."""

    negated_sb: Sbuf
    sum_sb: Sbuf
    values: Any

    def joined(self, other, zero_sb):
        """Join the sums over other keys: both rescale to the larger maximum (Milakov, Gimelshein
        2018)."""
        negated_sb, factors = nisa.tensor_tensor(self.negated_sb, other.negated_sb, nl.minimum), []
        for one in (self, other):
            less_sb = nisa.tensor_tensor(negated_sb, one.negated_sb, nl.subtract)
            factors.append(nisa.activation(nl.exp, less_sb, bias=zero_sb))
        sums = []
        for pair in ((self.sum_sb, other.sum_sb), (self.values, other.values)):
            first_sb, second_sb = (
                nisa.tensor_tensor(x, factor_sb, nl.multiply) for x, factor_sb in zip(pair, factors)
            )
            sums.append(nisa.tensor_tensor(first_sb, second_sb, nl.add))
        return Weighted(negated_sb, *sums)


class FewQueries(NamedTuple):
    """Up to 128 queries of a sequence, a bank, on their way over its cache. Column (row, token) of
    q_sb [128, columns] @ SBUF is zero at the lanes of other heads than its own; owners_sb [n, rows,
    tokens] says which rows of the bias are its own. ones_sb [128, 128] fp32."""

    group: QueryGroup
    q_sb: Sbuf
    owners_sb: Sbuf
    ones_sb: Sbuf

    @classmethod
    def of(cls, group):
        (bank,), heads, dtype = group.banks, group.new.heads, group.qk_sb[0].dtype
        q_sb = nisa.memset((P_MAX, bank.rows, bank.tokens), 0.0, dtype)
        for at in nl.static_range(bank.heads):
            stack, lanes = heads.place(bank.head + at)
            queries_sb = bank.part(group.qk_sb, heads, stack, lanes)
            q_sb[lanes, bank.rows_of(at), :] = nisa.tensor_copy(queries_sb)
        ones_sb = nisa.memset((P_MAX, P_MAX), 1.0, nl.float32)
        owned = group.owners or [nisa.memset((1, bank.rows, bank.tokens), 1.0, dtype)]
        return cls(group, q_sb.reshape((P_MAX, bank.rows * bank.tokens)), owned[0], ones_sb)

    @property
    def columns(self) -> int:
        return self.q_sb.shape[1]

    def stacks(self):
        """(first head of the bank, heads, features, columns) of each stack."""
        (bank,), heads = self.group.banks, self.group.new.heads
        each = bank.members * bank.tokens
        return [
            (first, count, count * heads.depth, nl.ds(first * each, count * each))
            for first, count in spans(bank.heads, heads.stack)
        ]

    def scores(self, part):
        """Scores of all queries with CacheTiles [lanes, columns, tiles] fp32 @ SBUF, and their
        maxima on each partition [lanes, columns].

        128 keys at a time are transposed for all heads of a stack, and are stationary again in the
        product with their queries: 64 cycles each, for up to 64 columns.
        """
        lanes, columns = part.lanes, self.columns
        each = spans(part.tiles, MOVING_MAX // columns)
        scores_sb = nl.ndarray((lanes, columns, part.tiles), nl.float32)
        best_sb = nl.ndarray((lanes, columns, len(each)), nl.float32)
        keys, bias_sb = part.rows(part.cache.keys_hbm), nl.load(part.bias())
        for n, (start, tiles) in enumerate(each):
            scores_psum = psum((lanes, columns, tiles))
            for tile in nl.static_range(tiles):
                scores_psum[:, :, tile] += nisa.nc_matmul(
                    bias_sb[:, start + tile, :], self.owners_sb
                )
            for first, count, features, of_stack in self.stacks():
                for begin, some in spans(tiles, MOVING_MAX // lanes):
                    transposed = keys.transposed(first, count, start + begin, some)
                    k_sb = nisa.tensor_copy(transposed, dtype=self.q_sb.dtype)
                    for t in nl.static_range(some):
                        scores_psum[:, of_stack, begin + t] += nisa.nc_matmul(
                            k_sb[:, t, :], self.q_sb[0:features, of_stack]
                        )
            part_sb = scores_sb[:, :, nl.ds(start, tiles)]
            part_sb[...] = nisa.tensor_copy(scores_psum)
            best_sb[:, :, n] = nisa.tensor_reduce(nl.max, part_sb, axis=2)
        return scores_sb, nisa.tensor_reduce(nl.max, best_sb, axis=2)

    def new_scores(self, keys):
        """The same with KeyTiles of new tokens, head by head."""
        group, (bank,), depth = self.group, self.group.banks, self.group.new.heads.depth
        q_sb = bank_queries(group.qk_sb, bank, group.new.heads, 0, False)
        scores_sb = nl.ndarray((keys.lanes, self.columns, keys.tiles), nl.float32)
        for start, tiles in key_spans(bank, keys.tiles):
            scores_psum = psum((keys.lanes, bank.rows, bank.tokens, tiles))
            for tile in nl.static_range(tiles):
                part_psum = scores_psum[:, :, :, tile]
                score_tile(q_sb, bank, keys, start + tile, part_psum, depth, group.constants)
            shape = keys.lanes, self.columns, tiles
            scores_sb[:, :, nl.ds(start, tiles)] = nisa.tensor_copy(scores_psum.reshape(shape))
        return scores_sb, nisa.tensor_reduce(nl.max, scores_sb, axis=2)

    def negated_maxima(self, maxima):
        """Negate and scale maxima of some partitions [P, columns] each -> on all [128, columns]
        fp32. TensorE transposes them and multiplies a diagonal by ones."""
        columns = self.columns
        sizes = [best_sb.shape[0] for best_sb in maxima]
        transposed_psum = psum((columns, sum(sizes)), nl.ndarray)
        for n, best_sb in enumerate(maxima):
            transposed_psum[:, nl.ds(sum(sizes[:n]), sizes[n])] = nisa.nc_transpose(best_sb)
        negated_sb = nisa.tensor_reduce(nl.max, transposed_psum, axis=1, negate=True)
        eye_sb = self.group.constants.eye_sb[0:columns, 0:columns]
        each_sb = nisa.tensor_scalar(
            eye_sb, nl.multiply, negated_sb, op1=nl.multiply, operand1=self.scale, dtype=nl.float32
        )
        return nisa.tensor_copy(nisa.nc_matmul(self.ones_sb[0:columns, :], each_sb))

    def weights(self, scores_sb, negated_sb):
        """exp(scale * score - maximum) [P, columns, tiles] @ SBUF, an instruction a column."""
        lanes, columns, _ = scores_sb.shape
        weights_sb = nl.ndarray(scores_sb.shape, self.q_sb.dtype)
        for column in nl.affine_range(columns):
            weights_sb[:, column, :] = nisa.activation(
                nl.exp,
                scores_sb[:, column, :],
                bias=negated_sb[0:lanes, nl.ds(column, 1)],
                scale=self.scale,
            )
        return weights_sb

    @property
    def scale(self) -> float:
        return score_scales(self.group.head_dim)[1]

    def attend(self, part, scores, new):
        """Weighted of CacheTiles by their ``scores`` and, behind the last, KeyTiles of ``new``
        tokens."""
        found = [scores, *([] if new is None else [self.new_scores(new)])]
        negated_sb = self.negated_maxima([best_sb for _, best_sb in found])
        weights = [self.weights(scores_sb, negated_sb) for scores_sb, _ in found]
        sums = [nisa.tensor_reduce(nl.add, x_sb, axis=2, dtype=nl.float32) for x_sb in weights]
        values = part.rows(part.cache.values_hbm)
        # values are stationary, too: 64 cycles serve all queries of a stack, and the lanes of other
        # heads are never read
        values_psum = psum((P_MAX, self.columns))
        for first, count, features, of_stack in self.stacks():
            for tile in nl.static_range(part.tiles):
                v_sb = values.tile(first, count, tile)
                values_psum[0:features, of_stack] += nisa.nc_matmul(
                    v_sb, weights[0][:, of_stack, tile]
                )
        if new is not None:
            self.add_new(values_psum, new, weights[1])
        sum_psum = psum((P_MAX, self.columns))
        for each_sb in sums:
            sum_psum[...] += nisa.nc_matmul(self.ones_sb[0 : each_sb.shape[0], :], each_sb)
        return Weighted(negated_sb, sum_psum, values_psum)

    def add_new(self, values_psum, new, weights_sb):
        """Values of KeyTiles of new tokens times their weights, head by head."""
        (bank,), heads = self.group.banks, self.group.new.heads
        queries = bank.members * bank.tokens
        for at in nl.static_range(bank.heads):
            first, columns = heads.place(bank.head + at)[1].start, nl.ds(at * queries, queries)
            for tile in nl.static_range(new.tiles):
                v_sb = new.values(at, tile)[:, 0 : heads.head_dim]
                values_psum[nl.ds(first, heads.head_dim), columns] += nisa.nc_matmul(
                    v_sb, weights_sb[:, columns, tile]
                )

    def finish(self, found):
        """Values divided by the sums of their weights, into the heads' lanes of the context."""
        group, (bank,), heads = self.group, self.group.banks, self.group.new.heads
        for first, _, features, _ in self.stacks():
            if features < P_MAX:  # some lanes have no head
                out = bank.part(group.context_sb, heads, heads.place(bank.head + first)[0])
                out[...] = nisa.memset(out.shape, 0.0, out.dtype)
        shape = (P_MAX, bank.rows, bank.tokens)
        scale_sb = nisa.reciprocal(found.sum_sb).reshape(shape)
        values = found.values.reshape(shape)
        for at in nl.static_range(bank.heads):
            stack, lanes = heads.place(bank.head + at)
            rows, out = bank.rows_of(at), bank.part(group.context_sb, heads, stack, lanes)
            out[...] = nisa.tensor_tensor(
                values[lanes, rows, :], scale_sb[lanes, rows, :], nl.multiply
            )


def attend_few(group):
    """Attention of a group of up to 128 queries, one bank, which reads each block of keys once ->
    Weighted of all of them. Scores of a block are made before the values of the one in front of it
    have been added."""
    few, blocks, found = FewQueries.of(group), group.blocks, None
    ahead = few.scores(blocks[0])
    for n, part in enumerate(blocks):
        scores, new = ahead, None
        if n + 1 < len(blocks):
            ahead = few.scores(blocks[n + 1])
        else:
            new = group.new.visible(group.banks[0])._replace(owners_sb=few.owners_sb)
        some = few.attend(part, scores, new)
        found = some if found is None else found.joined(some, group.constants.zero_sb)
    few.finish(found)
    return found


def attend_few_and_many(groups):
    """Attend several groups, those of few queries by ``attend_few``."""

    def many():
        for group in groups:
            if few_queries(group.banks):
                attend_few(group)
            else:
                yield group

    attend_groups(many())


def store_weights(weights_hbm, bank, found):
    """The negated maxima of a bank's scores and the sums of their weights, of its Weighted, into
    their places of [kv_heads, queries, 2] fp32 @ HBM."""
    queries = bank.members * bank.tokens
    weights_sb = nl.ndarray((1, bank.heads, queries, 2), nl.float32)
    for n, all_sb in enumerate((found.negated_sb, found.sum_sb)):
        row_sb = all_sb[0:1, :].reshape((1, bank.heads, queries))
        weights_sb[:, :, :, n] = nisa.tensor_copy(row_sb)
    for at in nl.static_range(bank.heads):
        nl.store(weights_hbm[nl.ds(bank.head + at, 1), :, :], weights_sb[:, at, :, :])


# --- Attention of chunks --------------------------------------------------------------------------


def others_bias(owners_sb):
    """Make the bias of new keys [sequences, tiles * 128] from owners [sequences, T] @ SBUF: 0 for
    the keys of a sequence, MASKED for others. The triangle hides the columns after the last key."""
    (sequences, tokens), dtype = owners_sb.shape, owners_sb.dtype
    bias_sb = nisa.memset((sequences, whole_tiles(tokens) * P_MAX), 0.0, dtype)
    bias_sb[:, 0:tokens] = nisa.tensor_scalar(
        owners_sb, nl.subtract, 1.0, op1=nl.multiply, operand1=-masked(dtype)
    )
    return bias_sb


def owners_of(owners_sb, bank):
    """Owners of a bank's queries [sequences, rows, tokens] @ SBUF."""
    sequences, (rows, tokens) = owners_sb.shape[0], (bank.rows, bank.tokens)
    out_sb = nl.ndarray((sequences, rows, tokens), owners_sb.dtype)
    for row in nl.static_range(rows):
        out_sb[:, row, :] = nisa.tensor_copy(owners_sb[:, nl.ds(bank.position, tokens)])
    return out_sb


class Chunk(NamedTuple):
    """Tensors that the attention of several new tokens shares: the Cache; new values [T, kv_heads *
    D] @ HBM; ``active`` [B, n, n] @ HBM, which new tokens see each other (None: the triangle);
    owners of the tokens [sequences, T] @ SBUF if the chunk has several sequences; a Window or None;
    Constants; whether each query has its own row of the bias, as under a window."""

    cache: AnyCache
    new_hbm: Hbm
    active_hbm: Hbm
    causal_sb: Sbuf
    owners_sb: Sbuf
    window: Optional[Window]
    constants: Constants
    heads: HeadShape
    by_query: bool

    def groups(self, sequence, length, passed):
        """The queries of a sequence in the Projections ``passed``, over its cache and its new keys:
        yields a QueryGroup for each set of KV heads, and for each tile of queries that has rows of
        the bias."""
        heads, active_sb, shared = self.heads, self.causal_sb, self.owners_sb is not None
        if self.active_hbm is not None:
            active_sb = nl.load(self.active_hbm[sequence])
        new = new_keys(length, heads, self.causal_sb.dtype, active_sb, hides=True)
        bias_sb = others_bias(self.owners_sb) if shared else None
        new, parts = new._replace(bias_sb=bias_sb, window=self.window), []
        for n, rows in enumerate(passed):
            for at, (owner, position, column, size) in enumerate(rows.tokens.block.tiles()):
                if owner == sequence:
                    rows_sb = tile_values(rows, at, self.new_hbm)
                    new.append(position, rows.qk_sb, column, rows_sb)
                    parts.append((n, column, position, size))
        qk_sb, context_sb = [rows.qk_sb for rows in passed], [rows.context_sb for rows in passed]
        together = [[part] for part in parts] if self.by_query else [parts]
        sets = [score_banks(some, heads, min(length, P_MAX)) for some in together]
        for banks in [banks for some in sets for banks in some]:
            owners, bias_rows = None, (sequence, 1)
            if shared:
                owners = [owners_of(self.owners_sb, bank) for bank in banks]
                bias_rows = 0, self.cache.bias_hbm.shape[0]
            if self.by_query:
                bias_rows = sequence * length + banks[0].position, banks[0].tokens
                which_sb = self.constants.which_sb  # each query belongs to its own row
                owners = [which_sb[0 : b.tokens, 0 : b.rows, 0 : b.tokens] for b in banks]
            blocks = cache_blocks(
                self.cache, sequence, banks, heads, bias_rows, shared=owners is not None
            )
            yield QueryGroup(banks, blocks, new, qk_sb, self.constants, context_sb, owners)


# --- Kernels --------------------------------------------------------------------------------------


def attend_blocks(some, layer, chunk, length, results_hbm):
    """Put the outputs, new keys and new values of some blocks of tokens where they belong."""
    out_hbm, new_keys_hbm, new_values_hbm = results_hbm
    # queries and keys [128, tiles, count], values [tokens, kv_heads * D] of some blocks: H/128
    # passes of a block's tokens for each tile of features, and the weights pass once for all
    passed = project_blocks(some, layer)
    for rows in passed:
        rows.store_keys(new_keys_hbm, new_values_hbm)
    # contexts [128, tiles, count]: cached keys and values of some KV heads come in blocks, in
    # rows of up to CACHE_ROW_BYTES a partition; TensorE transposes the keys, 128 a pass
    sequences = sorted({tile.sequence for block in some for tile in block.tiles()})
    each = (chunk.groups(sequence, length, passed) for sequence in sequences)
    attend_few_and_many(group for groups in each for group in groups)
    # the output [128, H/128, count], a pass for each tile of context; the weight passes once
    contexts = [Tokens(rows.tokens.block, rows.context_sb) for rows in passed]
    store_product(layer.out, contexts, out_hbm)


@nki.jit
def attention_chunk_kernel(
    x_hbm,
    delta_hbm,
    norm,
    qkv_w_hbm,
    out_w_hbm,
    cos_hbm,
    sin_hbm,
    keys_hbm,
    values_hbm,
    bias_hbm,
    active_hbm,
    heads,
    qkv_b_hbm=None,
    gains_hbm=None,
    scales_hbm=None,
    a_hbm=None,
    b_hbm=None,
    chosen_hbm=None,
    rows_hbm=None,
    owners_hbm=None,
    window=None,
):
    """Attend with several new tokens per sequence: over the cache, and causally over themselves.

    bias [B, L], keys in the order of ``cache_runs``: a cache that is longer is read as far as its
    L-th key; active [B, n, n] in the type of x, 0 where a token (row) sees one and MASKED
    elsewhere, for up to 128 tokens; None: they see those before and themselves. Of a cache of
    blocks, as ``blocks_in_runs`` gives them: keys and values [rows, run, kv_heads, D] and int32
    rows [lanes, B * parts], or [rows, run, D] and [lanes, B * parts * kv_heads]. A chunk of several
    sequences, end to end, is one that B stand in: owners [B, n] in the type of x are ones of the
    tokens of each, who see the cached keys of bias [B, L] and each other. Under a ``window`` of so
    many tokens, or None, cached keys count by query: bias [B, n, L]; keys are read again for every
    128 queries. -> partial output [H, B * n], new keys (rotated) and values [B * n, kv_heads * D],
    and x + delta. All tokens of a sequence share one pass over the weights.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    shared = owners_hbm is not None
    length = tokens if shared else tokens // bias_hbm.shape[0]
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    layer = layer_of(
        Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm),
        norm,
        heads,
        (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm),
        (qkv_b_hbm, gains_hbm),
        scales_hbm,
        (a_hbm, b_hbm, chosen_hbm),
    )
    rows_sb, most = None if rows_hbm is None else nl.load(rows_hbm), min(length, P_MAX)
    by_query = len(bias_hbm.shape) == 3
    rows_of_bias = math.prod(bias_hbm.shape[:-1]), bias_hbm.shape[-1]
    cache = AnyCache(keys_hbm, values_hbm, bias_hbm.reshape(rows_of_bias), rows_sb)
    causal_sb = causal_mask(most, dtype)
    window = None if active_hbm is not None else Window.of(window, dtype)
    constants = attention_constants(length, heads, dtype)
    owners_sb = nl.load(owners_hbm) if shared else None
    given = cache, new_values_hbm, active_hbm
    chunk = Chunk(*given, causal_sb, owners_sb, window, constants, heads, by_query)
    most_tokens = chunk_tokens(features, heads, x_hbm.itemsize, scales_hbm is not None)
    assert length <= most_tokens, (
        f"a chunk of {length} new tokens a sequence keeps more than {CHUNK_BYTES} bytes of a "
        f"partition, expected at most {most_tokens}; take a smaller one"
    )
    results = out_hbm, new_keys_hbm, new_values_hbm
    blocks = token_blocks(features, tokens, length)
    for some in grouped(blocks, max(1, most_tokens // length) * length):
        attend_blocks(some, layer, chunk, length, results)
    return results if delta_hbm is None else (*results, stream_hbm)


# --- Modules --------------------------------------------------------------------------------------


class CachedAttention(AnyAttention):
    """Attention over caches of any kind."""

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        super().__init__(config, ranks, **group)
        self.window = window_of(config)

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """Attend also under a window, in a tree whose rows lie elsewhere (rotary_position_ids), and
        in a chunk of several sequences, whose cache is in tiles.

        A prompt behind a prefix in blocks of the cache has both masks, as several tokens a step do;
        the caller gives the prefix's mask, int32 [B, prefix].
        """
        past, *masks = (given.get(name) for name in CACHED)
        if masks[0].dim() == 2:
            masks[0] = masks[0].to(torch.bool)[:, None, None]
        places = given.get("rotary_position_ids")
        places = given.get("position_ids") if places is None else places
        if self.window is not None:
            masks = self.within_window(*masks, None if past is None else places)
        if given.get("tile_masks") is not None:
            in_tiles = self.blocks_of_tiles if self.nki_enabled else self.in_tiles
            past, masks = in_tiles(past, masks[0], given)
        given = {**given, "position_ids": places, **dict(zip(CACHED, (past, *masks)))}
        return super().forward(hidden, norm, given)

    def within_window(
        self, mask: torch.Tensor, active_mask: Optional[torch.Tensor], places: Any
    ) -> Tuple[Any, ...]:
        """The masks without keys ``window`` tokens and more in front of a query; ``places`` [B, n]
        of new tokens behind a cache, None where there is no cache."""
        keys = torch.arange(mask.shape[-1], device=mask.device)
        queries = keys[None] if places is None else places  # prompts are padded on the right
        mask = mask & (queries[:, None, :, None] - keys < self.window)
        if active_mask is not None:
            new = torch.arange(active_mask.shape[-1], device=mask.device)
            active_mask = active_mask & (new[:, None] - new < self.window)
        return mask, active_mask

    def in_tiles(
        self, caches: Sequence[torch.Tensor], mask: torch.Tensor, given: Dict[str, Any]
    ) -> Tuple[Any, ...]:
        """The caches [blocks, kv_rank, block, D] of a chunk's tiles as keys and values of one
        sequence, with the masks of these keys and of the chunk with itself.

        NxDI lays the sequences' cached tokens end to end and cuts them, and the chunk, into tiles.
        ``tile_block_tables`` [tiles, blocks] has a tile's keys, see ``named_blocks``;
        ``tile_q_indices`` [tiles] the tile of queries that looks at them; ``tile_masks`` [tiles,
        queries, keys] the keys each query sees.
        """
        queries, visible = given["tile_q_indices"], masks_in_order(given)
        blocks = named_blocks(given["tile_block_tables"], len(caches[0]))
        past = [cache[blocks].permute(2, 0, 1, 3, 4).flatten(1, 3)[None] for cache in caches]
        length = mask.shape[-1]
        spans_of = torch.arange(math.ceil(length / visible.shape[1]), device=visible.device)
        counted = (spans_of[:, None] == queries)[:, None, :, None] & visible.transpose(0, 1)
        return past, (counted.flatten(2, 3).flatten(0, 1)[None, None, :length], mask)

    def blocks_of_tiles(
        self, caches: Sequence[torch.Tensor], mask: torch.Tensor, given: Dict[str, Any]
    ) -> Tuple[Any, ...]:
        """Do the work of ``in_tiles`` for the kernels: caches, the blocks of all tiles [1, n], the
        owners of tokens, bool [sequences + 1, tokens] (padding last), and the cached keys that each
        owner sees [sequences + 1, 1, 1, keys].

        A sequence sees what its last token does: the keys of one tile of queries, and no key twice.
        """
        visible, ends = masks_in_order(given), given["num_queries"].cumsum(0)
        owner = (torch.arange(mask.shape[-1], device=visible.device)[:, None] >= ends).sum(1)
        owners = owner == torch.arange(len(ends) + 1, device=visible.device)[:, None]
        last = (ends - 1).clamp_min(0)
        tile, row = last // visible.shape[1], last % visible.shape[1]
        of_last = (
            visible[:, row].transpose(0, 1) & (tile[:, None] == given["tile_q_indices"])[..., None]
        )
        keys = nn.functional.pad(of_last.flatten(1), (0, 0, 0, 1))
        blocks = named_blocks(given["tile_block_tables"], len(caches[0]))
        return (*caches[:2], blocks.reshape(1, -1), owners), (keys[:, None, None], None)

    def kernel_results(self, hidden, norm, tables, given) -> Tuple[Any, ...]:
        past, mask, active_mask = (given.get(name) for name in CACHED)
        batch, dtype, rank = hidden.shape[0], hidden.stream.dtype, self.sizes.of_rank
        weights = self.qkv_proj.weight, self.o_proj.weight
        inputs = hidden.stream, hidden.delta, norm, *weights, *tables
        operands = self.operands(hidden)
        if past is None:
            padded = option(self.config, "padding_side") == "left"
            bias = _mask_bias(mask[:, 0, -1], dtype) if padded else None
            cut = None if self.window is None or self.window >= mask.shape[-1] else self.window
            return attention_prefill_kernel(*inputs, rank, batch, bias, *operands, window=cut)
        *cache, rows = self.cache_operands(past, mask, active_mask, dtype)
        active = self.active_bias(active_mask, hidden)
        owners = past[3].to(dtype) if len(past) == 4 else None
        return attention_chunk_kernel(
            *inputs,
            *cache,
            active,
            rank,
            *operands,
            rows_hbm=rows,
            owners_hbm=owners,
            window=self.window,
        )

    def cache_operands(self, past, mask, active_mask, dtype) -> Tuple[Any, ...]:
        """Keys, values, bias and, where a table names them, rows, as the kernels take them: of
        ``past`` keys and values, and of a cache of blocks the table."""
        by_query = self.window is not None and active_mask is not None
        bias = _mask_bias(mask[:, 0] if by_query else mask[:, 0, 0], dtype)
        if len(past) > 2:
            heads_first = option(self.config, "is_chunked_prefill")
            return blocks_in_runs(*past[:3], bias, heads_first, self.window)
        if self.window is not None:  # each sequence is one block
            table = torch.arange(len(bias), device=bias.device)[:, None]
            return blocks_in_runs(*past, table, bias, True, self.window)
        if option(self.config, "prompt_in_chunks") and active_mask is not None:
            # a bucket has room for the chunk, too: as many keys as it has are not cached yet
            cached = whole_tiles(bias.shape[1] - active_mask.shape[-1])
            bias = bias[:, : max(1, cached) * P_MAX]
        return *cache_in_runs(*past, bias), None

    def active_bias(
        self, active_mask: Optional[torch.Tensor], hidden: Columns
    ) -> Optional[torch.Tensor]:
        """bool [B, 1, n, n] -> bias for the kernel [B, n, n]. None for one token, and for a long
        chunk of a prompt, which has the base class's triangle."""
        if active_mask is None:
            return None
        tokens, dtype = active_mask.shape[-1], hidden.stream.dtype
        quantised = self.o_proj.scale is not None
        most = chunk_tokens(len(hidden.stream), self.sizes.of_rank, dtype.itemsize, quantised)
        if tokens > most:
            raise ValueError(
                f"The kernels take at most {most} new tokens a sequence over a cache, got "
                f"{tokens}; choose a speculation_length, and prefill buckets in front of which "
                f"there are prefix_buckets, of at most {most}."
            )
        return None if tokens > P_MAX else _mask_bias(active_mask[:, 0], dtype)


class CachedModel(NeuronLlamaModel):
    """The model with caches of blocks or in fp8, and with Medusa's length."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        super().setup_attr_for_model(config)
        self.medusa_speculation_length = config.neuron_config.medusa_speculation_length

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        """Make the caches. Kernels read stored fp8 directly, except in a model of float32."""
        super().init_inference_optimization(config)
        narrow, kernels = (
            config.neuron_config.torch_dtype is not torch.float32,
            has_attention_kernels(config),
        )
        if kernels and config.neuron_config.kv_cache_quant and narrow:
            if hasattr(self.kv_mgr, "_dequantize_cache"):  # NxDI 0.8 and later have it
                self.kv_mgr._dequantize_cache = lambda cache, *_, **__: cache
            else:
                self.kv_mgr.dequant_dtype = self.kv_mgr.quant_dtype
        if kernels and option(config, "is_block_kv_layout"):
            self.kv_mgr.get_cache = self.blocks_and_table

    def blocks_and_table(self, active_block_table: torch.Tensor, **_: Any) -> List[Any]:
        """All blocks of keys and values of each layer, and the blocks of each sequence [B, n], in
        place of the copies that the cache's manager would gather."""
        caches = self.kv_mgr.past_key_values
        pairs = zip(caches[::2], caches[1::2])
        return [[keys, values, active_block_table] for keys, values in pairs]


def masks_in_order(given: Dict[str, Any]) -> torch.Tensor:
    """Masks of tiles [tiles, queries, keys] in the order of their keys: NxDI has them as its kernel
    loads keys, in rows of 128 partitions with several of one block on each, column by column."""
    masks = given["tile_masks"]
    keys, rows = masks.shape[-1], max(P_MAX, given["tile_block_tables"].shape[-1])
    if keys <= rows:
        return masks
    by_column = masks.unflatten(-1, (rows // P_MAX, keys // rows, P_MAX))
    return by_column.transpose(-1, -2).flatten(-3)


def named_blocks(tables: torch.Tensor, blocks: int) -> torch.Tensor:
    """Fill in tables of tiles [tiles, n]: a tile whose first number none of the ``blocks`` has
    repeats the blocks of the tile before."""
    tiles = torch.arange(len(tables), device=tables.device)
    named = torch.where(tables[:, 0] < blocks, tiles, 0)
    return tables[torch.cummax(named, 0).values].long()


def runs_of_window(bias: torch.Tensor, run: int, most: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Numbers [B, most] of the runs of keys that a window shows, from the first key of the first
    query on, and their part of bias [B, L] or [B, n, L]."""
    length, by_query = bias.shape[-1], bias.reshape(len(bias), -1, bias.shape[-1])
    first = (by_query[:, 0] == 0).to(torch.int32).argmax(1) // run
    first = first.clamp_max(length // run - most)[:, None]
    number = first + torch.arange(most, device=bias.device)
    keys = (number[:, :, None] * run + torch.arange(run, device=bias.device)).flatten(1)
    theirs = by_query.gather(2, keys[:, None].expand(-1, by_query.shape[1], -1))
    return number, theirs.reshape(*bias.shape[:-1], -1)


def blocks_in_runs(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    heads_first: bool = False,
    window: Optional[int] = None,
) -> Tuple[torch.Tensor, ...]:
    """Caches of blocks [blocks, .., kv_heads, D], each sequence's blocks [B, n] and bias [B, L] of
    L keys -> caches [rows, run, kv_heads, D], bias, and row numbers, int32 [lanes, B * parts].
    ``heads_first`` takes [blocks, kv_heads, block, D] -> [rows, run, D], [lanes, B * parts *
    heads].

    A run of a block's tokens is a row of HBM: 128 partitions hold a whole sequence, DMA likes its
    length, and it fits SBUF's share for keys of a head. Row r of part p of a sequence lies on
    partition r - p * lanes; the bias is permuted to the order of ``CacheTiles``. A chunk that
    sequences share has one table of all and a row of the bias for each sequence. A ``window`` takes
    only the runs from the first key that a first query sees, bias [B, L] or [B, n, L].
    """
    (*queries, length), (batch, _), dim = bias.shape, table.shape, keys.shape[-1]
    heads = keys.shape[1 if heads_first else -2]
    block, size = math.prod(keys.shape[1:-1]) // heads, max(2, keys.dtype.itemsize) * dim
    wanted = min(length, window or length) / P_MAX
    wanted = max(wanted, DMA_ROW_BYTES / ((1 if heads_first else heads) * size))
    run = 2 ** min(math.ceil(math.log2(max(1, wanted))), int(math.log2(CACHE_ROW_BYTES // size)))
    run = math.gcd(run, block)
    number, pieces = torch.arange(length // run, device=table.device)[None], block // run
    most = 1 if window is None else (window + 2 * run - 3) // run + 1  # W - 1 keys, not aligned
    if window is not None and most < length // run:
        number, bias = runs_of_window(bias, run, most)
    separate, count = heads if heads_first else 1, number.shape[1]
    named = table.long().gather(1, (number // pieces).expand(batch, -1))
    rows = named * (separate * pieces) + number % pieces
    parts = whole_tiles(count)
    lanes = math.ceil(count / parts)
    missing = parts * lanes - count
    bias = nn.functional.pad(bias, (0, missing * run), value=masked(bias.dtype))
    bias = bias.view(-1, parts, lanes, run).transpose(2, 3).reshape(*queries, -1)
    rows = nn.functional.pad(rows, (0, missing)).view(batch, parts, lanes)
    of_heads = pieces * torch.arange(separate, device=table.device)
    rows = (rows.permute(2, 0, 1)[..., None] + of_heads).reshape(lanes, -1).to(torch.int32)
    shape = (-1, run, dim) if heads_first else (-1, run, heads, dim)
    return keys.reshape(shape), values.reshape(shape), bias, rows


class CachedConfig(llama.NeuronConfigNKI):
    """With ``prompt_in_chunks``, calls of ``speculation_length`` tokens feed a prompt, and its last
    token is a decode step. Only the last row of logits is then read."""

    def __init__(self, **kwargs: Any) -> None:
        self.prompt_in_chunks = bool(kwargs.pop("prompt_in_chunks", False))
        super().__init__(**kwargs)


def check_window(config: InferenceConfig) -> None:
    """ValueError for a sliding window with options that count positions otherwise."""
    window, neuron_config = window_of(config), config.neuron_config
    if getattr(config, "use_sliding_window", False):  # Qwen's
        raise ValueError(
            "use_sliding_window gives some layers a window and others none, expected False; no "
            "layer of this file chooses."
        )
    for asked, why, mend in (
        (
            neuron_config.is_chunked_prefill,
            "counts positions, which a chunk's tiles do not have, expected no "
            "chunked_prefill_config",
            "leave one of them out",
        ),
        (
            neuron_config.flash_decoding_enabled,
            "counts rows of a cache, which flash_decoding_enabled spreads over ranks, expected one "
            "of the two",
            "leave flash_decoding_enabled out",
        ),
        (
            neuron_config.padding_side == "left",
            "counts from the right here, got padding_side 'left'",
            "pad on the right",
        ),
    ):
        if window is not None and asked:
            raise ValueError(f"sliding_window {window} {why}; {mend}.")


def chunks_too_large(config: InferenceConfig) -> Dict[str, bool]:
    """What chunks that several sequences share may have too much of -> whether they do."""
    neuron_config, rank = config.neuron_config, SharedSizes.of(config).of_rank
    if not neuron_config.is_chunked_prefill or not has_attention_kernels(config):
        return {}
    tokens, features = neuron_config.max_context_length, whole_tiles(config.hidden_size) * P_MAX
    quantised = option(config, "quantized")
    most = chunk_tokens(features, rank, neuron_config.torch_dtype.itemsize, quantised)
    sequences = neuron_config.chunked_prefill_config.max_num_seqs
    return {
        f"a max_context_length of {tokens} in chunks, but one of at most {most}": tokens > most,
        f"{sequences} sequences in a chunk, but at most {P_MAX - 1}": sequences >= P_MAX,
    }
