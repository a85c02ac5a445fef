"""Attention of many queries for llama.py, over keys that may be anywhere, by heads of any size.

For prompts that llama.py does not take (long ones, windows, padding on the left, heads of other
sizes) and for chunks over a cache (llama_cached.py). A source of keys is anything with tiles,
lanes, ``load`` and masks.

    bank   of PSUM: 512 numbers fp32 a partition, the most that one product writes
    lanes  the partitions of one head in a tile, zero beyond D, or those that a tile of keys takes
    slot   up to 128 rows of a contraction that is longer
    augmented row   a row behind the D features of a head that scores contract, too
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

from llama import (
    BLOCK_PIECE_BYTES, MOVING_MAX, P_MAX, SHORT_FEATURES, AttentionLayer, Block, Hbm, HeadShape,
    Linear, Projection, Sbuf, add_terms, block_part, causal_mask, depth_of, even_spans, grouped,
    key_rows, load_constant, load_weight, mask_of, negated_maximum, products, project_tile,
    projection, psum_tile, psum_zeros, qkv_tiles, residual_sum, score_scales, select_equal,
    shifted_identity, spans, store_product, times_features, value_parts, whole_tiles,
)  # fmt: skip

# --- Choices --------------------------------------------------------------------------------------

WEIGHT_BYTES = 96 * 1024  # SBUF for weights of attention that stay for all blocks
KEPT_BYTES = 188 * 1024  # for them, keys, scores and blocks, which are not there all at once
TWO_KEPT_BYTES = 156 * 1024  # the same of two sequences at once, without their scores
SCORE_BYTES = 72 * 1024  # for keys and values whose scores stay, and these scores
JOINED_BYTES = 120 * 1024  # for tokens and keys of blocks that are one where weights do not stay
BESIDE_BYTES = 88 * 1024  # for blocks on their way where weights do not stay
WHOLE_BYTES = 128 * 1024  # for one, its queries and keys where these come piece by piece
WAITING_BLOCKS = 3  # whose outputs are beside later blocks, where weights stay
SCRATCH_TILES = 16  # tiles of keys that come back from HBM at a time
SCRATCH_BYTES = 16 * 1024  # SBUF for them and their values
RESIDENT_BYTES = 48 * 1024  # keys and values of a sequence stay in SBUF up to this many
ADAPTER_BYTES = 16 * 1024  # less where adapters are beside them


# --- Attention of many queries --------------------------------------------------------------------
#
# Prompts, their chunks and token trees. Scores are transposed: a tile of up to 128 keys is
# stationary and up to 512 columns of queries move, those of a KV head's group, of several heads
# where tokens are few. So exp leaves the weights with keys on partitions, where the product with
# the values contracts them: weights are stationary, and D + 1 columns of values move. The last one
# is ones, and gives the sum of the weights. What exp subtracts differs from column to column: a
# first pass over all keys, with queries on partitions, finds each query's maximum, and the second
# contracts two augmented rows beside the D features, rows of the array that are idle where D is 64:
#
#   keys (mask, 1, 1, ..)     queries (1, -maximum, ..), of which the first pass contracts the first
#
# Each tile of queries that share a bank has an augmented row of its own, zero for the others'
# queries, so that one product transposes the maxima of all. Once they are known, no query is ever
# rescaled; they may be rounded, since they are the same for all of a query's keys. Where D is 128
# no row is idle: as long as all keys stay in SBUF, the scores of the first pass stay, too, and
# TensorE transposes their weights instead of scoring once more.
#
# ScalarE takes scores out of PSUM and VectorE compares copies of them in SBUF, since both at PSUM
# exclude each other. So ScalarE bounds both passes, and TensorE has time for the projections of
# others: the steps of the second pass take turns with those of the next queries' first pass, and
# with other work, in the order in which their tiles of PSUM are wanted.

TILES_AT_ONCE = MOVING_MAX // P_MAX  # tiles of queries whose scores share a bank of PSUM
AUGMENTED = 1 + TILES_AT_ONCE
HEADS_AT_ONCE = 4  # KV heads of a tile whose blocks of a cache are in SBUF at the same time


class ScoreBank(NamedTuple):
    """Queries whose scores share a bank of PSUM: [head, member of its group; token].

    ``heads`` KV heads from ``head`` on, ``members`` of their groups from ``member`` on, and
    ``tokens`` new tokens: the columns from ``column`` on of the ``block``-th qk_sb, before which
    ``position`` new tokens stand in their sequence.
    """

    head: int
    heads: int
    member: int
    members: int
    block: int
    column: int
    position: int
    tokens: int

    @property
    def rows(self) -> int:
        """Queries of each token."""
        return self.heads * self.members

    @property
    def augmented(self) -> int:
        """Augmented rows of its queries: the first, and one for each tile of them."""
        return 1 + len(self.tiles())

    @property
    def queries(self) -> int:
        """Queries of its largest tile."""
        return max(count for *_, count in self.tiles()) * self.tokens

    def part(self, x_sb, heads, stack, lanes=slice(0, P_MAX)):
        """Its part of queries or contexts, a list by block of [128, tiles, T], in the tiles of a
        stack of KV heads: [lanes, members, tokens]."""
        tiles = nl.ds(stack * heads.group + self.member, self.members)
        return x_sb[self.block][lanes, tiles, nl.ds(self.column, self.tokens)]

    def own(self, head):
        """Rows of its ``head``-th head."""
        return nl.ds(head * self.members, self.members)

    def together(self):
        """(first, count) of a head's members whose queries share a tile of 128 partitions."""
        return spans(self.members, max(1, P_MAX // self.tokens))

    def tiles(self):
        """(head, first row, rows) of those tiles."""
        return [
            (head, head * self.members + first, count)
            for head in range(self.heads)
            for first, count in self.together()
        ]


def score_banks(parts, heads, largest):
    """Banks of tiles ``parts`` of tokens, (block, column, position, tokens), of up to ``largest``
    tokens: a list for each set of KV heads, whole stacks, whose contexts share tiles."""
    together = P_MAX // largest
    most = TILES_AT_ONCE * together  # members of a group whose queries share a bank
    each = max(1, TILES_AT_ONCE // math.ceil(heads.group / together))
    each = min(HEADS_AT_ONCE // heads.slots, each)
    return [
        [
            ScoreBank(first + head, count, member, members, *part)
            for part in parts
            for member, members in spans(heads.group, most)
            for head, count in spans(some, each)
        ]
        for first, some in spans(heads.kv_heads, math.ceil(each / heads.stack) * heads.stack)
    ]


def heads_of(banks):
    """(first, count) of the KV heads of a set of banks."""
    return banks[0].head, banks[-1].head + banks[-1].heads - banks[0].head


def contraction(depth):
    """(slot, rows) of the products that contract so many features and augmented rows."""
    return [(start // P_MAX, rows) for start, rows in spans(depth, P_MAX)]


class KeyTiles(NamedTuple):
    """``tiles`` tiles of ``lanes`` keys of some KV heads @ SBUF.

    k_sb [128, heads, slots * stride, lanes], features and augmented rows behind them, 128 rows a
    slot; v_sb [128, stride, heads, D + 1], the last column ones, None where nobody asks for values.
    ``head`` is the first one there that counts. ``mask_sb`` [tokens, lanes], if any, is added to
    the scores of the last tile, a triangle where it is ``causal``. bias_sb [n, tiles, lanes], if
    any, hides keys from the queries that owners_sb [n, rows, tokens] are ones of: of n sequences,
    or of one, whose augmented rows are no rows of k_sb. ``before`` tiles of k_sb and v_sb come
    first that nobody sees, and ``edges`` are masks of a Window for some tiles, (tile, [128, 128] @
    SBUF).
    """

    k_sb: Sbuf
    v_sb: Sbuf
    stride: int
    tiles: int
    lanes: int
    head: int = 0
    mask_sb: Optional[Sbuf] = None
    causal: bool = False
    bias_sb: Optional[Sbuf] = None
    owners_sb: Optional[Sbuf] = None
    before: int = 0
    edges: Sequence[Tuple[int, Any]] = ()

    def keys(self, head, slot, rows, tile, tiles):
        """Operand of a product: some tiles of a head's keys, some rows of a slot."""
        part = nl.ds(slot * self.stride + self.before + tile, tiles)
        return self.k_sb[0:rows, self.head + head, part, 0 : self.lanes]

    def masks(self, start, tiles, tokens):
        """(tile, mask [tokens, lanes]) of what is added to the scores of some tiles of them."""
        last = [] if self.mask_sb is None else [(self.tiles - 1, self.mask_sb)]
        edges = [(tile, edge_sb[0:tokens, 0 : self.lanes]) for tile, edge_sb in self.edges]
        return [each for each in last + edges if start <= each[0] < start + tiles]

    def load(self, values=True):
        """As what comes from HBM."""
        return self

    def values(self, head, tile):
        """Values and ones of a tile of a head's keys."""
        return self.v_sb[0 : self.lanes, self.before + tile, self.head + head, :]


class Window(NamedTuple):
    """A sliding window over tiles of 128 keys: a tile of queries sees ``back`` tiles before its
    own, and masks [128, 128] @ SBUF hide what is too old from some of its queries, (tiles back,
    mask), at most two."""

    back: int
    masks: Sequence[Tuple[int, Any]] = ()

    @classmethod
    def of(cls, window, dtype):
        """Of so many tokens, the query's included; None for any number."""
        if window is None:
            return None
        back = (window + P_MAX - 2) // P_MAX
        row, column = nl.arange(P_MAX)[:, None], nl.arange(P_MAX)[None, :]
        masks = [
            (tiles, mask_of(column + window - 1 >= row + tiles * P_MAX, P_MAX, dtype))
            for tiles in [*range(back + 1)][-2:]
            if (tiles + 1) * P_MAX > window
        ]
        return cls(back, masks)

    def visible(self, own, tiles):
        """What a tile of queries, the ``own``-th of its sequence, sees of so many tiles: the first,
        and its edges, (tile behind that, mask)."""
        first = max(0, own - self.back)
        edges = [(own - back, mask_sb) for back, mask_sb in self.masks]
        return first, [(tile - first, mask) for tile, mask in edges if first <= tile < tiles]


class NewKeys(NamedTuple):
    """Keys and values of a sequence's new tokens, filled in order: k_sb and v_sb as in KeyTiles,
    zero behind the last key. ``augmented`` are the rows behind the features, none where nobody
    contracts them; where the first one ``hides`` keys, queries have a one for it. mask_sb [tokens,
    tokens] is added to the scores of a tile of tokens with each other, a triangle where no
    augmented row hides any. Of several sequences bias_sb [sequences, tiles * 128] hides each one's
    keys from the others. A Window may hide older ones.
    """

    heads: HeadShape
    k_sb: Sbuf
    v_sb: Sbuf
    mask_sb: Sbuf
    augmented: int
    hides: bool
    bias_sb: Optional[Sbuf] = None
    window: Optional[Window] = None

    def append(self, start, qk_sb, column, v_sb):
        """Keep a tile of tokens, the sequence's from ``start`` on: keys from qk_sb, behind its
        queries, and values [tokens, kv_heads * D]."""
        heads, (size, _), tile = self.heads, v_sb.shape, start // P_MAX
        shape = (size, heads.kv_heads, heads.head_dim)
        for head in nl.static_range(heads.kv_heads):
            for slot, (stack, lanes) in enumerate(heads.tiles(head)):
                at, rows = slot * self.v_sb.shape[1] + tile, min(heads.depth, P_MAX)
                self.k_sb[0:rows, head, at, 0:size] = nisa.tensor_copy(
                    qk_sb[lanes, heads.q_tiles + stack, nl.ds(column, size)]
                )
        self.v_sb[0:size, tile, :, 0 : heads.head_dim] = nisa.tensor_copy(v_sb.reshape(shape))

    def visible(self, bank):
        """KeyTiles of what the queries of a bank see: whole tiles before them, and their own."""
        lanes = P_MAX if bank.position else bank.tokens
        stride, tiles = self.v_sb.shape[1], bank.position // P_MAX + 1
        mask_sb, bias_sb = self.mask_sb[0 : bank.tokens, 0:lanes], None
        if self.bias_sb is not None:
            shape = self.bias_sb.shape[0], tiles, lanes
            bias_sb = self.bias_sb[:, 0 : tiles * lanes].reshape(shape)
        visible = KeyTiles(
            self.k_sb, self.v_sb, stride, tiles, lanes, bank.head, mask_sb, not self.hides, bias_sb
        )
        if self.window is None:
            return visible
        first, edges = self.window.visible(tiles - 1, tiles)
        return visible._replace(tiles=tiles - first, before=first, edges=edges)


def new_keys(tokens, heads, dtype, mask_sb, augmented, hides, bias_hbm=None):
    """NewKeys without keys yet; augmented rows and ones are there.

    bias [1, tokens] @ HBM is 0 for keys that count and MASKED for others; None: all count.
    """
    d, tiles, last = heads.head_dim, whole_tiles(tokens), tokens // P_MAX
    slots, (slot, row) = len(contraction(heads.depth + augmented)), divmod(heads.depth, P_MAX)
    k_sb = nl.ndarray((P_MAX, heads.kv_heads, slots * tiles, P_MAX), dtype)
    v_sb = nl.ndarray((P_MAX, tiles, heads.kv_heads, d + 1), dtype)
    if last < tiles:
        for half in nl.static_range(heads.slots):
            own = k_sb[:, :, half * tiles + last, :]
            own[...] = nisa.memset((P_MAX, heads.kv_heads, P_MAX), 0.0, dtype)
        v_sb[:, last, :, :] = nisa.memset((P_MAX, heads.kv_heads, d + 1), 0.0, dtype)
    v_sb[:, :, :, d : d + 1] = nisa.memset((P_MAX, tiles, heads.kv_heads, 1), 1.0, dtype)
    if augmented:
        shape, part = (heads.kv_heads, tiles, P_MAX), nl.ds(slot * tiles, tiles)
        k_sb[row : row + AUGMENTED, :, part, :] = nisa.memset((AUGMENTED, *shape), 1.0, dtype)
        k_sb[row : row + 1, :, part, :] = nisa.memset((1, *shape), 0.0, dtype)
    if bias_hbm is not None:
        for head in nl.affine_range(heads.kv_heads):
            for tile, (start, size) in enumerate(spans(tokens, P_MAX)):
                k_sb[row : row + 1, head, slot * tiles + tile, 0:size] = nl.load(
                    bias_hbm[:, nl.ds(start, size)]
                )
    return NewKeys(heads, k_sb, v_sb, mask_sb, augmented, hides)


class Constants(NamedTuple):
    """Tiles that the attention of many queries reads: zeros [128, 1] fp32, the identity [128, 128],
    which of n tokens a query is, [n, rows, n], for any number of ``rows`` of queries, and which
    augmented rows are a tile's, the first and its own, [AUGMENTED, TILES_AT_ONCE] fp32."""

    zero_sb: Sbuf
    eye_sb: Sbuf
    which_sb: Sbuf
    own_sb: Sbuf


def attention_constants(length, heads, dtype):
    """Constants for sequences of so many tokens."""
    largest = min(length, P_MAX)
    every = [score_banks([(0, 0, 0, size)], heads, largest) for _, size in spans(length, largest)]
    rows = max(bank.rows for sets in every for banks in sets for bank in banks)
    token, other = nl.arange(largest)[:, None, None], nl.arange(largest)[None, None, :]
    row = nl.arange(rows)[None, :, None]
    which_sb = select_equal(token + 0 * row, other, (largest, rows, largest), dtype)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    eye_sb = shifted_identity(P_MAX, P_MAX, 0, dtype)
    own = np.concatenate((np.ones((1, TILES_AT_ONCE)), np.eye(TILES_AT_ONCE)))
    own_sb = load_constant(own.astype(np.float32), nl.float32)
    return Constants(zero_sb, eye_sb, which_sb, own_sb)


def bank_queries(qk_sb, bank, heads, augmented, hides):
    """Queries of a bank [128, slots, rows, tokens] @ SBUF, as the keys of KeyTiles have them, with
    room for so many ``augmented``; the first is there where that of the keys ``hides`` some."""
    depth, shape = heads.depth, (bank.rows, bank.tokens)
    slots, (slot, row) = len(contraction(depth + augmented)), divmod(depth, P_MAX)
    q_sb = nl.ndarray((P_MAX, slots, *shape), qk_sb[0].dtype)
    for at in nl.static_range(bank.heads):
        for part, (stack, lanes) in enumerate(heads.tiles(bank.head + at)):
            q_sb[0 : min(depth, P_MAX), part, bank.own(at), :] = nisa.tensor_copy(
                bank.part(qk_sb, heads, stack, lanes), engine=nisa.vector_engine
            )
    if hides:
        q_sb[row : row + 1, slot, :, :] = nisa.memset((1, *shape), 1.0, q_sb.dtype)
    return q_sb


def score_tile(q_sb, bank, keys, tile, scores_psum, depth, constants):
    """Products of one tile of keys with a bank's queries, ``depth`` rows of features and augmented
    rows, into scores_psum [lanes, rows, tokens]."""
    for head in nl.static_range(bank.heads):
        own = bank.own(head)
        for slot, size in contraction(depth):
            scores_psum[:, own, :] += nisa.nc_matmul(
                keys.keys(head, slot, size, tile, 1), q_sb[0:size, slot, own, :]
            )
    if keys.bias_sb is not None:
        scores_psum[...] += nisa.nc_matmul(keys.bias_sb[:, tile, :], keys.owners_sb)
    which_sb = constants.which_sb[0 : bank.tokens, 0 : bank.rows, 0 : bank.tokens]
    for _, mask_sb in keys.masks(tile, 1, bank.tokens):
        scores_psum[...] += nisa.nc_matmul(mask_sb, which_sb)


def key_spans(bank, tiles):
    """Spans of tiles of keys whose transposed scores share a bank of PSUM."""
    return spans(tiles, MOVING_MAX // (bank.rows * bank.tokens))


def zero_sums(bank, head_dim):
    """Zeros for the sums of a bank's queries, [queries, tiles, D + 1] fp32 @ PSUM, as many tiles
    of queries as share a bank."""
    return [
        psum_zeros((bank.queries, tiles, head_dim + 1))
        for _, tiles in spans(len(bank.tiles()), MOVING_MAX // (head_dim + 1))
    ]


def sum_of(sums, at, queries):
    """The ``at``-th tile of so many queries among those of a bank [queries, D + 1]; of reciprocals
    [queries, 1]."""
    tiles, at = sums[at // sums[0].shape[1]], at % sums[0].shape[1]
    return tiles[0:queries, at, :] if len(tiles.shape) == 3 else tiles[0:queries, nl.ds(at, 1)]


class QueryGroup(NamedTuple):
    """``banks`` of a set of KV heads, and the keys that they see: ``blocks`` that come from HBM
    (KeyTiles, or what has their sizes and a method ``load``), then ``new`` ones. Queries are in
    qk_sb, contexts go to context_sb [128, tiles, T], a list of both by block of tokens. Of several
    sequences owners [sequences, rows, tokens] of each bank @ SBUF."""

    banks: List[ScoreBank]
    blocks: List[Any]
    new: NewKeys
    qk_sb: List[Any]
    constants: Constants
    context_sb: List[Any]
    owners: Optional[List[Any]] = None

    @property
    def head_dim(self) -> int:
        return self.new.heads.head_dim

    def parts(self, bank):
        """(part, tiles, lanes) of the keys that a bank sees."""
        visible = self.new.visible(bank)
        every = [
            *((block.tiles, block.lanes) for block in self.blocks),
            (visible.tiles, visible.lanes),
        ]
        return [(part, *sizes) for part, sizes in enumerate(every)]

    def spans(self, bank):
        """(part of the keys, span of its tiles) whose scores with 128 queries share a bank."""
        return [
            (part, span)
            for part, tiles, lanes in self.parts(bank)
            for span in spans(tiles, MOVING_MAX // lanes)
        ]

    def keys(self, part, n, held, values):
        """KeyTiles of a part for the ``n``-th bank, with ``values`` or without; ``held`` are the
        last block that was loaded and its number."""
        bank, owners_sb = self.banks[n], None if self.owners is None else self.owners[n]
        if part == len(self.blocks):
            return self.new.visible(bank)._replace(owners_sb=owners_sb)
        if held[0] != part:
            held[:] = part, self.blocks[part].load(values)
        return held[1]._replace(head=bank.head - self.banks[0].head, owners_sb=owners_sb)


class MaximaPass(NamedTuple):
    """First pass: q_sb of each bank, and for each tile of a bank's queries the maxima that its
    steps found [queries, tiles, steps] @ SBUF, or, where the second pass turns scores, these and
    their negated maximum."""

    group: QueryGroup
    q_sb: List[Any]
    maxima_sb: List[Any]
    scores: List[List[Any]]
    held: List[Any]

    @classmethod
    def of(cls, group):
        banks, new, maxima_sb = group.banks, group.new, []
        q_sb = [
            bank_queries(group.qk_sb, bank, new.heads, new.augmented, new.hides) for bank in banks
        ]
        for bank in banks:
            shape = (bank.queries, len(bank.tiles()), len(group.spans(bank)))
            maxima_sb.append(nl.ndarray(shape, new.k_sb.dtype))
            if len({count for *_, count in bank.tiles()}) > 1:  # one has fewer queries
                maxima_sb[-1][...] = nisa.memset(shape, 0.0, new.k_sb.dtype)
        scores = [[None for _ in bank.tiles()] for bank in banks]
        return cls(group, q_sb, maxima_sb, scores, [None, None])

    def steps(self):
        """(part of the keys, span of its tiles, bank, tile of its queries, step of that), block by
        block."""
        found = [
            (part, span, n, at, step)
            for n, bank in enumerate(self.group.banks)
            for at in range(len(bank.tiles()))
            for step, (part, span) in enumerate(self.group.spans(bank))
        ]
        return sorted(found, key=lambda step: step[0])

    def run(self, work):
        """One bank of PSUM: scores of up to 128 queries with up to 512 keys, and their maxima;
        behind the last, the augmented rows of its queries."""
        (part, span, n, at, step), group = work, self.group
        bank, new, keys = group.banks[n], group.new, group.keys(part, n, self.held, False)
        queries, last = bank.tiles()[at][2] * bank.tokens, len(group.spans(bank)) - 1
        if new.augmented:
            scores_sb = nl.ndarray((queries, span[1], keys.lanes), new.k_sb.dtype)
            self.score_rows(n, at, keys, span, scores_sb)
            self.maxima_sb[n][0:queries, at, nl.ds(step, 1)] = nisa.tensor_reduce(
                nl.max, scores_sb, axis=[1, 2]
            )
            if step == last and at + 1 == len(bank.tiles()):
                self.augment(n)
            return
        if step == 0:
            shape = (queries, keys.tiles, keys.lanes)
            self.scores[n][at] = nl.ndarray(shape, new.k_sb.dtype), None
        scores_sb, _ = self.scores[n][at]
        self.score_rows(n, at, keys, span, scores_sb[:, nl.ds(*span), :])
        if step == last:
            flat_sb = scores_sb.reshape((queries, keys.tiles * keys.lanes))
            lowest_sb = negated_maximum(flat_sb, score_scales(group.head_dim)[1])
            self.scores[n][at] = scores_sb, lowest_sb

    def score_rows(self, n, at, keys, span, scores_sb):
        """Scores of the ``at``-th tile of a bank's queries with a span of tiles of KeyTiles, into
        scores_sb [queries, tiles, lanes] in their type.

        Queries are stationary here and stand on partitions, 512 keys move.
        """
        group, bank, (start, tiles) = self.group, self.group.banks[n], span
        (head, row, count), constants = bank.tiles()[at], group.constants
        queries, rows = count * bank.tokens, nl.ds(row, count)
        scores_psum = psum_zeros((queries, tiles, keys.lanes))
        for slot, size in contraction(depth_of(group.head_dim) + int(group.new.hides)):
            scores_psum[...] += nisa.nc_matmul(
                self.q_sb[n][0:size, slot, rows, :], keys.keys(head, slot, size, start, tiles)
            )
        if keys.bias_sb is not None:
            scores_psum[...] += nisa.nc_matmul(
                keys.owners_sb[:, rows, :], keys.bias_sb[:, nl.ds(start, tiles), :]
            )
        which_sb = constants.which_sb[0 : bank.tokens, rows, 0 : bank.tokens]
        for tile, mask_sb in keys.masks(start, tiles, bank.tokens):
            scores_psum[:, tile - start, :] += nisa.nc_matmul(which_sb, mask_sb)
        scores_sb[...] = nisa.activation(nl.copy, scores_psum, bias=constants.zero_sb[0:queries, :])

    def augment(self, n):
        """Augmented rows of a bank's queries for the second pass [augmented rows, rows, tokens]: 1,
        and of each tile of queries the negated maxima of all parts.

        A product with the identity, 128 columns for all tiles, brings them from partitions to rows;
        ScalarE, alone at SBUF, copies these to each tile's queries.
        """
        bank, constants, q_sb = self.group.banks[n], self.group.constants, self.q_sb[n]
        lowest_sb = nisa.tensor_reduce(nl.max, self.maxima_sb[n], axis=2, negate=True)
        (queries, tiles), count = lowest_sb.shape, bank.augmented
        augmented_sb = nisa.memset((queries, count), 1.0, q_sb.dtype)
        augmented_sb[:, nl.ds(1, tiles)] = nisa.tensor_copy(lowest_sb)
        transposed_psum = nisa.nc_matmul(augmented_sb, constants.eye_sb[0:queries, 0:queries])
        transposed_sb = nisa.tensor_copy(transposed_psum, dtype=q_sb.dtype)
        slot, first = divmod(depth_of(self.group.head_dim), P_MAX)
        for at, (_, row, members) in enumerate(bank.tiles()):
            part_sb = transposed_sb[:, 0 : members * bank.tokens]
            q_sb[nl.ds(first, count), slot, nl.ds(row, members), :] = nisa.activation(
                nl.copy, part_sb.reshape((count, members, bank.tokens)),
                bias=constants.zero_sb[0:count, :], scale=constants.own_sb[0:count, nl.ds(at, 1)],
            )  # fmt: skip


class WeightsPass(NamedTuple):
    """Second pass: for each bank the sums of blocks before @ SBUF, and those being added @ PSUM."""

    first: MaximaPass
    before: List[Any]
    sums: List[Any]
    held: List[Any]

    @classmethod
    def of(cls, first):
        banks = first.group.banks
        return cls(first, [None for _ in banks], [None for _ in banks], [None, None])

    def steps(self):
        """(part of the keys, bank, span of tiles of keys, tile of its queries or None for all,
        whether it is the first of a part, and the last)."""
        group, found = self.first.group, []
        for n, bank in enumerate(group.banks):
            for part, tiles, _ in group.parts(bank):
                if group.new.augmented:
                    each = [(span, None) for span in key_spans(bank, tiles)]
                else:
                    queries = [count * bank.tokens for *_, count in bank.tiles()]
                    each = [
                        (span, at)
                        for at, size in enumerate(queries)
                        for span in spans(tiles, MOVING_MAX // size)
                    ]
                last = len(each) - 1
                found += [(part, n, *step, k == 0, k == last) for k, step in enumerate(each)]
        return sorted(found, key=lambda step: step[0])

    def run(self, step):
        """One bank of PSUM; behind the last, the contexts of all."""
        (part, n, span, at, begins, ends), group = step, self.first.group
        keys, bank = group.keys(part, n, self.held, True), group.banks[n]
        if begins:
            self.sums[n] = zero_sums(bank, group.head_dim)
        if at is None:
            self.add_weighted(n, keys, span)
        else:
            self.add_transposed(n, at, keys, span)
        if not ends:
            return
        if self.before[n] is not None:
            pairs = zip(self.before[n], self.sums[n])
            self.sums[n] = [nisa.tensor_tensor(b_psum, a_sb, nl.add) for a_sb, b_psum in pairs]
        elif group.blocks or n + 2 < len(group.banks):  # PSUM has room for the sums of two
            self.sums[n] = [nisa.tensor_copy(sums_psum) for sums_psum in self.sums[n]]
        self.before[n] = self.sums[n]
        if part == len(group.blocks) and n + 1 == len(group.banks):
            bank_contexts(group.banks, self.sums, group.new.heads, group.context_sb)

    def add_weighted(self, n, keys, span):
        """exp(scale * (score - maximum)) of some tiles of keys times their values and ones, added
        to the sums of each tile of a bank's queries [queries, D + 1] fp32 @ PSUM."""
        group, bank, q_sb = self.first.group, self.first.group.banks[n], self.first.q_sb[n]
        constants, (start, tiles) = group.constants, span
        depth = depth_of(group.head_dim) + bank.augmented
        triangle = keys.causal and start + tiles == keys.tiles
        if keys.causal:
            keys = keys._replace(mask_sb=None)
        scores_psum = psum_zeros((keys.lanes, tiles, bank.rows, bank.tokens))
        for tile in nl.static_range(tiles):
            part_psum = scores_psum[:, tile, :, :]
            score_tile(q_sb, bank, keys, start + tile, part_psum, depth, constants)
        weights_sb = nisa.activation(
            nl.exp, scores_psum, bias=constants.zero_sb[0 : keys.lanes, :],
            scale=score_scales(group.head_dim)[1], dtype=q_sb.dtype,
        )  # fmt: skip
        if triangle:  # GpSimdE: 662 cycles, beside TensorE, which would take 576
            token, row = nl.arange(bank.tokens)[None, None, :], nl.arange(bank.rows)[None, :, None]
            lane, own_sb = nl.arange(keys.lanes)[:, None, None], weights_sb[:, tiles - 1, :, :]
            own_sb[...] = nisa.affine_select(token + 0 * row >= lane, own_sb, 0.0)
        for at, (head, row, count) in enumerate(bank.tiles()):
            sums_psum = sum_of(self.sums[n], at, count * bank.tokens)
            for tile in nl.static_range(tiles):
                sums_psum[...] += nisa.nc_matmul(
                    weights_sb[:, tile, nl.ds(row, count), :], keys.values(head, start + tile)
                )

    def add_transposed(self, n, at, keys, span):
        """The same of one tile of queries, from scores [queries, tiles, lanes] that stayed in SBUF:
        TensorE transposes the weights round, 128 keys at a time."""
        (head, _, _), (start, tiles) = self.first.group.banks[n].tiles()[at], span
        scores_sb, lowest_sb = self.first.scores[n][at]
        queries, _, lanes = scores_sb.shape
        weights_sb = nisa.activation(
            nl.exp, scores_sb[:, nl.ds(start, tiles), :], bias=lowest_sb,
            scale=score_scales(self.first.group.head_dim)[1],
        )  # fmt: skip
        transposed_psum = psum_tile((lanes, tiles, queries))
        for tile in nl.affine_range(tiles):
            transposed_psum[:, tile, :] = nisa.nc_transpose(weights_sb[:, tile, :])
        transposed_sb = nisa.tensor_copy(transposed_psum, dtype=scores_sb.dtype)
        sums_psum = sum_of(self.sums[n], at, queries)
        for tile in nl.affine_range(tiles):
            v_sb = keys.values(head, start + tile)
            sums_psum[...] += nisa.nc_matmul(transposed_sb[:, tile, :], v_sb)


def bank_contexts(banks, sums, heads, context_sb):
    """Divides the sums of a set of heads by those of the weights -> context_sb [128, tiles, T].

    Contexts come with queries on partitions, and are transposed for all heads of a stack at once;
    of the heads of a stack the banks follow each other.
    """
    d, dtype, rows = heads.head_dim, context_sb[0].dtype, []
    scales = [[nisa.reciprocal(tiles[:, :, d]) for tiles in found] for found in sums]
    each = [(*given, at) for given in zip(banks, sums, scales) for at in range(given[0].heads)]
    for bank, found, scale, at in each:
        places, parts = heads.tiles(bank.head + at), bank.together()
        _, lanes = places[0]
        if lanes.start == 0:
            shapes = [(count * bank.tokens, heads.slots * P_MAX) for _, count in parts]
            rows = [nl.ndarray(shape, dtype) for shape in shapes]
            if heads.kv_heads - bank.head - at < heads.stack or heads.stack * d < P_MAX:
                # lanes without a feature
                rows = [nisa.memset(shape, 0.0, dtype) for shape in shapes]
        for n, rows_sb in enumerate(rows, at * len(parts)):
            values = sum_of(found, n, rows_sb.shape[0])[:, 0:d]
            scale_sb = sum_of(scale, n, rows_sb.shape[0])
            rows_sb[:, nl.ds(lanes.start, d)] = nisa.tensor_scalar(values, nl.multiply, scale_sb)
        if lanes.stop > P_MAX - heads.depth or bank.head + at + 1 == heads.kv_heads:
            shape = (P_MAX, bank.members, bank.tokens)
            for slot, (stack, _) in enumerate(places):
                transposed_psum = psum_tile((P_MAX, bank.members * bank.tokens))
                for (first, count), rows_sb in zip(parts, rows):
                    part = nl.ds(first * bank.tokens, count * bank.tokens)
                    transposed_psum[:, part] = nisa.nc_transpose(
                        rows_sb[:, nl.ds(slot * P_MAX, P_MAX)]
                    )
                out = bank.part(context_sb, heads, stack)
                out[...] = nisa.tensor_copy(transposed_psum.reshape(shape))


def step_share(items, step, steps):
    """The ``step``-th of ``steps`` equal parts of a list."""
    return items[len(items) * step // steps : len(items) * (step + 1) // steps]


def attend(first, following, beside):
    """The second pass of a group, beside it the first of the next one (or None) and other work,
    (what has a method ``run``, its argument): steps take turns, since PSUM is granted in order."""
    second, work = WeightsPass.of(first), beside
    steps, ahead = second.steps(), following.steps() if following is not None else []
    for n, step in enumerate(steps):
        second.run(step)
        for other in step_share(ahead, n, len(steps)):
            following.run(other)
        for other, argument in step_share(work, n, len(steps)):
            other.run(argument)


# --- Blocks of tokens -----------------------------------------------------------------------------


class StreamedWeight(NamedTuple):
    """A Linear whose weight is loaded piece by piece, where a tile of it is first asked for."""

    linear: Linear
    spans: List[Tuple[int, int]]
    loaded: List[Any]

    @classmethod
    def of(cls, linear, spans):
        return cls(linear, spans, [None for _ in spans])

    @property
    def tiles(self) -> int:
        return self.linear.tiles

    def tile(self, at):
        """(the piece that holds a tile of output features, the tile's place in it)."""
        n = next(n for n, (first, count) in enumerate(self.spans) if first <= at < first + count)
        if self.loaded[n] is None:
            self.loaded[n] = load_weight(self.linear, *self.spans[n])
        return self.loaded[n], at - self.spans[n][0]


def attention_weights(layer, tokens):
    """StreamedWeights of both projections for passes of so many tokens (of the output, None where
    it is no part of the kernel): keys and values begin with half a piece, so that little waits for
    hidden states."""
    qkv, out, q_tiles = layer.qkv, layer.out, layer.heads.q_tiles
    queries, others = (
        qkv.pieces(tokens, tiles=tiles, row_bytes=BLOCK_PIECE_BYTES)
        for tiles in (q_tiles, qkv.tiles - q_tiles)
    )
    of_qkv = StreamedWeight.of(qkv, [*queries, *((q_tiles + at, size) for at, size in others)])
    if out.weight_hbm is None:
        return of_qkv, None
    pieces = out.pieces(tokens, last=True, row_bytes=BLOCK_PIECE_BYTES)
    return of_qkv, StreamedWeight.of(out, pieces)


class TokenBlock(NamedTuple):
    """A Block on its way through attention: what is projected of it @ SBUF, its context, and the
    StreamedWeights of both projections. ``inputs`` are those of the output's terms, filled with
    its first tiles."""

    block: Block
    p: Projection
    qk_sb: Sbuf
    v_sb: Sbuf
    qkv: StreamedWeight
    out: StreamedWeight
    inputs: List[Any]

    @classmethod
    def of(cls, block, layer, weights, apart=True):
        """Hidden states are loaded behind the first weights. Values come ``apart`` for each part of
        the block, or as ``value_parts`` says."""
        weights[0].tile(layer.heads.q_tiles)
        x_sb = residual_sum(layer.x_hbm, layer.delta_hbm, layer.stream_hbm, block)
        parts = [(column, size) for _, _, column, size in block.parts()]
        if not apart:
            parts = value_parts(parts, block.count, layer.heads, layer.x_hbm.itemsize)
        p = projection(x_sb, layer, block.start, parts)
        return cls(block, p, *qkv_tiles(p), *weights, [])

    @property
    def context_sb(self) -> Any:
        """[128, q_tiles, count]: contexts take the place of their queries."""
        return self.qk_sb[:, 0 : self.p.heads.q_tiles, :]

    def run(self, work):
        """Work is (tile of features, first token, tokens), tiles of the output behind those of Q, K
        and V."""
        (at, *span), tiles = work, self.qkv.tiles
        if at < tiles:
            project_tile(self.p, self.qkv.tile(at), at, span, self.qk_sb, self.v_sb)
        else:
            self.store_output(at - tiles)

    def store_output(self, first):
        """Two tiles of the output [128, 2, count], q_tiles passes of all tokens for each, stored
        together; of few tokens all tiles."""
        out, tiles, count = self.out.linear, min(2, self.out.tiles - first), self.block.count
        if count <= P_MAX:
            store_product(out, [(self.context_sb, self.block)], self.p.layer.out_hbm)
            return
        if first == 0:
            self.inputs[:] = out.inputs(self.context_sb, self.block.start)
        rows_sb = out.rows(first, tiles)
        out_sb = nl.ndarray((P_MAX, tiles, count), self.context_sb.dtype)
        for n in nl.static_range(tiles):
            weight_sb, tile = self.out.tile(first + n)
            out_psum = products(weight_sb, tile, 1, self.context_sb, 0, count)
            add_terms(out_psum, rows_sb, self.inputs, n, 0)
            times_features(out_sb[:, nl.ds(n, 1), :], out_psum, out.scales(first + n, 1))
        for column, block in self.block.in_hbm():
            part_hbm = block_part(self.p.layer.out_hbm, block, first, tiles)
            nl.store(part_hbm, out_sb[:, :, nl.ds(column, block.count)])

    def queries(self, head, heads):
        """The work for the queries of so many KV heads from ``head`` on."""
        own, (end, _) = self.p.heads, self.p.heads.tiles(head + heads - 1)[0]
        tiles = [
            tile
            for start, _ in own.tiles(head)
            for tile in range(start * own.group, (start + end + 1 - head // own.stack) * own.group)
        ]
        return [(at, *span) for at in tiles for span in even_spans(self.block.count, 256)]

    def keys_and_values(self):
        return [(at, 0, self.block.count) for at in range(self.p.heads.q_tiles, self.qkv.tiles)]

    def outputs(self):
        tiles, count = self.qkv.tiles, self.block.count
        return [
            (tiles + at, 0, count) for at in range(0, self.out.tiles if count > P_MAX else 1, 2)
        ]

    def part_values(self, n, values_hbm):
        """Values [tokens, kv_heads * D] @ SBUF of the ``n``-th of the block's parts, those of all
        being stored in rows @ HBM."""
        parts = self.block.parts()
        if len(self.v_sb) == len(parts):
            return self.v_sb[n]
        _, _, column, size = parts[n]
        return nl.load(values_hbm[nl.ds(self.block.start + column, size), :])

    def store_keys(self, keys_hbm, values_hbm):
        """New keys and values into rows @ HBM."""
        for (column, size), rows_sb in zip(self.p.parts, self.v_sb):
            rows = nl.ds(self.block.start + column, size)
            nl.store(values_hbm[rows, :], rows_sb)
            nl.store(keys_hbm[rows, :], key_rows(self.qk_sb, column, size, self.p.heads))


# --- Prefill attention ----------------------------------------------------------------------------
#
# Where they have room, three blocks of tokens are on their way at any time: beside the attention of
# one, the block before it is multiplied with the output weight, and keys, values and first queries
# of the next one are projected. Otherwise one is.


def store_transposed(k_hbm, k_sb, first=0):
    """Keys transposed, with augmented rows, [128, heads, slots * tiles, lanes] @ SBUF -> [heads,
    depth + AUGMENTED, tiles, lanes] @ HBM, there from tile ``first`` on."""
    slots = contraction(k_hbm.shape[1])
    tiles = k_sb.shape[2] // len(slots)
    for head in nl.affine_range(k_hbm.shape[0]):
        for slot, size in slots:
            nl.store(
                k_hbm[head, nl.ds(slot * P_MAX, size), nl.ds(first, tiles), :],
                k_sb[0:size, head, nl.ds(slot * tiles, tiles), :],
            )


def load_transposed(k_hbm, head, heads, first, tiles):
    """The way back, of some heads and tiles: SBUF has slots of whole 128 rows."""
    slots = contraction(k_hbm.shape[1])
    k_sb = nl.ndarray((P_MAX, heads, len(slots) * tiles, k_hbm.shape[3]), k_hbm.dtype)
    for at in nl.affine_range(heads):
        for slot, size in slots:
            k_sb[0:size, at, nl.ds(slot * tiles, tiles), :] = nl.load(
                k_hbm[head + at, nl.ds(slot * P_MAX, size), nl.ds(first, tiles), :]
            )
    return k_sb


class Scratch(NamedTuple):
    """HBM for keys and values of a sequence that is too long for SBUF: k_hbm [kv_heads, D +
    AUGMENTED, tiles, 128], v_hbm [128, tiles, kv_heads, D + 1]."""

    k_hbm: Hbm
    v_hbm: Hbm

    @classmethod
    def of(cls, tiles, heads, dtype):
        kv_heads, d = heads.kv_heads, heads.head_dim
        k_hbm = nl.ndarray((kv_heads, heads.depth + AUGMENTED, tiles, P_MAX), dtype, buffer=nl.hbm)
        return cls(k_hbm, nl.ndarray((P_MAX, tiles, kv_heads, d + 1), dtype, buffer=nl.hbm))

    def append(self, tile, new):
        """Store the NewKeys of a block of tokens, which begins with tile ``tile``."""
        store_transposed(self.k_hbm, new.k_sb, tile)
        nl.store(self.v_hbm[:, nl.ds(tile, new.v_sb.shape[1]), :, :], new.v_sb)


class ScratchTiles(NamedTuple):
    """``tiles`` tiles of keys from ``tile`` on, of ``count`` KV heads from ``head`` on; ``edges``
    as in KeyTiles."""

    scratch: Scratch
    head: int
    count: int
    tile: int
    tiles: int
    edges: Sequence[Tuple[int, Any]] = ()
    lanes: int = P_MAX

    def load(self, values=True):
        """-> KeyTiles."""
        (k_hbm, v_hbm), heads = self.scratch, nl.ds(self.head, self.count)
        k_sb = load_transposed(k_hbm, self.head, self.count, self.tile, self.tiles)
        v_sb = nl.load(v_hbm[:, nl.ds(self.tile, self.tiles), heads, :]) if values else None
        return KeyTiles(k_sb, v_sb, self.tiles, self.tiles, P_MAX, edges=self.edges)


def key_bytes(tokens, heads, augmented, itemsize):
    """Bytes per partition of keys and values of so many tokens of a sequence."""
    columns = heads.kv_heads * (
        len(contraction(heads.depth + augmented)) * P_MAX + heads.head_dim + 1
    )
    return itemsize * whole_tiles(tokens) * columns


def block_bytes(layer, block, waiting):
    """Bytes per partition of blocks on their way: hidden states of two, queries or contexts, and
    keys, of these and of those ``waiting`` for their output."""
    heads, tiles = layer.heads, layer.qkv.k_tiles * (1 if layer.gain_sb is None else 2)
    tiles = 2 * tiles + (2 + waiting) * heads.qk_tiles
    return layer.x_hbm.itemsize * block.count * tiles


def joined_blocks(layer, blocks, keys):
    """Blocks of prompts whose weights do not stay: DMA brings these for each one, so up to 512
    tokens are one where its hidden states, queries and keys have room. ``keys``: bytes per
    partition of a sequence's keys and values."""
    joined = [Block.joined(some) for some in grouped(blocks, MOVING_MAX)]
    count, length = joined[0].count, joined[0].length
    tiles = layer.qkv.k_tiles + layer.heads.q_tiles + layer.heads.stacks
    kept = layer.x_hbm.itemsize * count * tiles + math.ceil(count / length) * keys
    wide = layer.x_hbm.shape[0] > SHORT_FEATURES and length <= MOVING_MAX
    return joined if wide and layer.gain_sb is None and kept <= JOINED_BYTES else blocks


class Prefill(NamedTuple):
    """A TokenBlock of a prompt and the keys that it sees: the NewKeys of its sequences, and, of a
    sequence that is too long for SBUF, the ``before`` tokens that are in scratch. ``whole``: all
    queries come before attention, beside which hidden states have no room."""

    tokens: TokenBlock
    new: List[NewKeys]
    scratch: Optional[Scratch]
    before: int
    constants: Constants
    whole: bool = False

    def first_work(self):
        """Keys and values, and queries of the first set of heads."""
        if self.whole:
            return []
        (banks, *_), *_ = self.sets()
        return [*self.tokens.keys_and_values(), *self.tokens.queries(*heads_of(banks))]

    def begin(self):
        """The first block of all, beside which nothing runs: keys and values, H/128 passes of its
        tokens for every tile of features, first queries -> the MaximaPass of their maxima."""
        for each in self.first_work():
            self.tokens.run(each)
        self.keep_keys()
        first = MaximaPass.of(self.groups()[0][0])
        for step in first.steps():
            first.run(step)
        return first

    def sets(self):
        """Banks of each tile of tokens, for each set of heads."""
        parts = [(0, column, position, size) for _, position, column, size in self.parts()]
        heads, largest = self.tokens.p.heads, self.constants.which_sb.shape[0]
        return [*zip(*(score_banks([part], heads, largest) for part in parts))]

    def parts(self):
        """(NewKeys, position among these, column, tokens) of each tile of tokens."""
        block = self.tokens.block
        return [
            (self.new[sequence - block.start // block.length], position - self.before, *part)
            for sequence, position, *part in block.parts()
        ]

    def keep_keys(self):
        """The block's keys and values, where its queries and those behind it find them."""
        for (new, position, column, _), rows_sb in zip(self.parts(), self.tokens.v_sb):
            new.append(position, self.tokens.qk_sb, column, rows_sb)
        if self.scratch is not None:
            self.scratch.append(self.before // P_MAX, self.new[0])

    def groups(self):
        """QueryGroups, a list for each set of heads: a tile of tokens at a time."""
        own = [self.tokens.qk_sb], self.constants, [self.tokens.context_sb]
        return [
            [
                QueryGroup(banks, self.in_scratch(banks), new, *own)
                for banks, (new, *_) in zip(some, self.parts())
            ]
            for some in self.sets()
        ]

    def in_scratch(self, banks):
        """The ScratchTiles that the queries of a set of banks see."""
        tiles, window, first, edges = self.before // P_MAX, self.new[0].window, 0, []
        if window is not None:
            first, edges = window.visible(tiles + banks[0].position // P_MAX, tiles)
        head, count = heads_of(banks)
        itemsize, heads = self.tokens.p.layer.x_hbm.itemsize, self.tokens.p.heads
        of_tile = key_bytes(P_MAX, heads._replace(kv_heads=count), AUGMENTED, itemsize)
        most = max(1, min(SCRATCH_TILES, SCRATCH_BYTES // of_tile))
        return [
            ScratchTiles(
                self.scratch, head, count, first + at, size,
                [(tile - at, edge) for tile, edge in edges if at <= tile < at + size],
            )
            for at, size in spans(tiles - first, most)
        ]  # fmt: skip


class Prompt(NamedTuple):
    """The Blocks of a prompt and what they share: the ``layer``, the bias [B, S] @ HBM of left
    padding and a Window, or None, the triangle of a tile of tokens with itself, Constants, how many
    ``augmented`` keys have, whether keys and values of a sequence stay in SBUF (``short``), both
    StreamedWeights where these stay, None where each block reads them, whether other blocks are on
    their way ``beside`` one, and, where none are, whether all queries come first, as in Prefill."""

    layer: AttentionLayer
    blocks: List[Block]
    bias_hbm: Hbm
    window: Optional[Window]
    causal_sb: Sbuf
    constants: Constants
    augmented: int
    short: bool
    weights: Optional[Tuple[StreamedWeight, StreamedWeight]]
    beside: bool
    whole: bool

    @classmethod
    def of(cls, layer, bias_hbm, window, blocks):
        """Of some Blocks, the first of which is the largest."""
        block = blocks[0]
        heads, dtype, itemsize = layer.heads, layer.x_hbm.dtype, layer.x_hbm.itemsize
        # which tokens a tile's queries are, the identity, and the triangle of a tile with itself
        length, most = block.length, min(block.length, P_MAX)
        constants = attention_constants(length, heads, dtype)
        causal_sb, window = causal_mask(most, dtype), Window.of(window, dtype)
        # augmented rows where rows of the array are idle, where keys are hidden, where scores do
        # not stay
        most_bytes = RESIDENT_BYTES - (ADAPTER_BYTES if layer.out.added else 0)
        least = key_bytes(length, heads, 0, itemsize)
        # a tile of queries for each of 512 rows or of a group, in both passes
        scores = 2 * itemsize * heads.group * max(1, TILES_AT_ONCE // heads.group) * length
        transposed = heads.depth == P_MAX and bias_hbm is None and least <= most_bytes
        augmented = 0 if transposed and least + scores <= SCORE_BYTES else AUGMENTED
        keys = key_bytes(length, heads, augmented, itemsize)
        short = keys <= most_bytes
        # both weights [128, tiles, .., 128] stay in SBUF where they fit; else each block reads them
        weights = attention_weights(layer, block.count)
        bytes_of_weights = sum(2 * w.tiles * w.linear.k_tiles * P_MAX for w in weights)
        if short and blocks[-1].start >= length:  # two sequences are on their way at one time
            kept, most_kept = 2 * keys, TWO_KEPT_BYTES
        else:
            kept, most_kept = min(keys, most_bytes) + (0 if augmented else scores), KEPT_BYTES
        kept += bytes_of_weights
        kept += block_bytes(layer, block, min(len(blocks) // 2, WAITING_BLOCKS))
        if bytes_of_weights > WEIGHT_BYTES or kept > most_kept:
            weights = None
            blocks = joined_blocks(layer, blocks, keys) if short else blocks
            block = blocks[0]
        # keys on their way to scratch are there beside the blocks
        own = key_bytes(block.count, heads, augmented, itemsize)
        on_way = block_bytes(layer, block, 1) + (0 if short else 2 * own)
        beside = weights is not None or on_way <= BESIDE_BYTES + (0 if short else SCRATCH_BYTES)
        tiles = layer.qkv.k_tiles + heads.q_tiles + heads.stacks
        whole = not beside and itemsize * block.count * tiles + max(own, short * keys) > WHOLE_BYTES
        return cls(
            layer, blocks, bias_hbm, window, causal_sb, constants, augmented, short, weights,
            beside, whole,
        )  # fmt: skip

    def start(self, block, before):
        """The Prefill of a block behind that of the block ``before``: its hidden states [128,
        H/128, count], and room for its keys and values, with those of its sequences, or, of a
        sequence that is too long, on the way to scratch."""
        weights = self.weights or attention_weights(self.layer, block.count)
        tokens, at = TokenBlock.of(block, self.layer, weights), block.start % block.length
        if self.whole:
            for each in [*tokens.keys_and_values(), *tokens.queries(0, self.layer.heads.kv_heads)]:
                tokens.run(each)
        if self.short and at:
            return before._replace(tokens=tokens)
        new = self.keys_of(block)
        if self.short:
            return Prefill(tokens, new, None, 0, self.constants, self.whole)
        shape = whole_tiles(block.length), self.layer.heads, tokens.qk_sb.dtype
        scratch = before.scratch if at else Scratch.of(*shape)
        return Prefill(tokens, new, scratch, at, self.constants, self.whole)

    def keys_of(self, block):
        """NewKeys for each sequence of a block: of all its tokens, or of the block's part."""
        first, at = divmod(block.start, block.length)
        size, begin = (block.length, 0) if self.short else (block.count, at)
        columns, shape = nl.ds(begin, size), (size, self.layer.heads, self.causal_sb.dtype)
        biases = [
            None if self.bias_hbm is None else self.bias_hbm[nl.ds(sequence, 1), columns]
            for sequence in range(first, first + math.ceil(block.count / block.length))
        ]
        found = [
            new_keys(*shape, self.causal_sb, self.augmented, bias_hbm is not None, bias_hbm)
            for bias_hbm in biases
        ]
        return [new._replace(window=self.window) for new in found]


def before_last(rows, items, step, steps):
    """The work beside a step of what is to be done before the last of ``steps`` begins, which is
    done at once where there is no step before."""
    if steps > 1:
        return [(rows, each) for each in step_share(items, step, steps - 1)]
    for each in items:
        rows.run(each)
    return []


def attend_block(prefill, ahead, before, following):
    """Attention of a block of tokens, the MaximaPass of whose first group is ``ahead``; beside it
    the outputs of TokenBlocks ``before``, and what the Prefill ``following`` begins with (it may be
    None). -> the MaximaPass of the first group of that."""
    tokens, groups = prefill.tokens, prefill.groups()
    outputs = [(rows, each) for rows in before for each in rows.outputs()]
    order = [(n, at) for n, some in enumerate(groups) for at in range(len(some))]
    for step, (n, at) in enumerate(order):
        # what the maxima of the next group read is there before its pass begins: queries of the
        # next set of heads, and all that the next block begins with
        work = step_share(outputs, step, len(order))
        if n + 1 < len(groups) and not prefill.whole:
            queries = tokens.queries(*heads_of(groups[n + 1][0].banks))
            work += before_last(tokens, queries, at, len(groups[n]))
        if following is not None:
            work += before_last(following.tokens, following.first_work(), step, len(order))
        first, ahead = ahead, None
        if step + 1 < len(order):
            next_set, next_group = order[step + 1]
            ahead = MaximaPass.of(groups[next_set][next_group])
        elif following is not None:
            following.keep_keys()
            ahead = MaximaPass.of(following.groups()[0][0])
        attend(first, ahead, work)
    return ahead


def attend_one_by_one(prompt, keys_hbm, values_hbm):
    """Attention of a Prompt, new keys and values into rows @ HBM: a block after the other."""
    prefill = None
    for block in prompt.blocks:
        # hidden states [128, H/128, count], behind their first weights; keys and values; attention,
        # a bank of PSUM at a time, beside it queries of further heads; the output, H/128 tiles
        prefill = prompt.start(block, prefill)
        ahead, tokens = prefill.begin(), prefill.tokens
        if prefill.whole:  # values leave SBUF, too
            tokens.store_keys(keys_hbm, values_hbm)
        attend_block(prefill, ahead, [], None)
        if not prefill.whole:
            tokens.store_keys(keys_hbm, values_hbm)
        for each in tokens.outputs():
            tokens.run(each)


def attend_side_by_side(prompt, keys_hbm, values_hbm):
    """The same with three blocks or more on their way."""
    blocks, started, ahead, last = prompt.blocks, [], None, len(prompt.blocks) - 1
    # beside which block the output of each is: of the next one or, where its weight and contexts
    # have room to stay, of one halfway to the last: later ones attend to more keys, and TensorE
    # would wait for ScalarE
    most = 1 if prompt.weights is None else WAITING_BLOCKS
    beside = [min(m + most, (m + last + 2) // 2) for m in range(last)]
    for n in nl.static_range(len(blocks) + 1):
        if n <= last:
            # hidden states of the next block [128, H/128, count], behind its first weights
            started.append(prompt.start(blocks[n], started[-1] if started else None))
        if n == 0:
            ahead = started[0].begin()
            continue
        # attention of a block, a bank of PSUM at a time; beside it what the next one begins with,
        # and outputs of those before
        before = [started[m].tokens for m in range(last) if beside[m] == n - 1]
        following = started[n] if n <= last else None
        ahead = attend_block(started[n - 1], ahead, before, following)
        started[n - 1].tokens.store_keys(keys_hbm, values_hbm)
    # the last output [128, H/128, count], a pass for each tile of its context: alone again
    for each in started[-1].tokens.outputs():
        started[-1].tokens.run(each)


def attend_prompt(prompt, keys_hbm, values_hbm):
    """Attention of a Prompt, new keys and values into rows @ HBM."""
    if prompt.beside:
        attend_side_by_side(prompt, keys_hbm, values_hbm)
    else:
        attend_one_by_one(prompt, keys_hbm, values_hbm)
