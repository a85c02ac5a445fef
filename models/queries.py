"""Attention of many queries for llama.py, over keys that may be anywhere, by heads of any size.

It serves prompts that llama.py does not take (long ones, windows, padding on the left, heads of
other sizes) and chunks over a cache (models/cached.py). A source of keys is anything with tiles,
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
    BLOCK_PIECE_BYTES,
    MOVING_MAX,
    P_MAX,
    Hbm,
    HeadShape,
    Sbuf,
    Tokens,
    causal_mask,
    contraction,
    psum,
    score_scales,
    select_equal,
    select_mask,
    spans,
    step_share,
    store_product,
    whole_tiles,
)

# --- Choices --------------------------------------------------------------------------------------

VALUE_BYTES = 32 * 1024  # new values in one tile a sequence; larger ones come back from HBM
SCRATCH_BYTES = 16 * 1024  # SBUF for keys and values that come back from HBM at a time
RESIDENT_BYTES = 48 * 1024  # a sequence's keys and values stay in SBUF up to this size
ADAPTER_BYTES = 16 * 1024  # subtracted where adapters lie in SBUF, too


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
# rescaled; they may be rounded, since they are the same for all of a query's keys.
#
# ScalarE takes scores out of PSUM and VectorE compares copies of them in SBUF, since both at PSUM
# exclude each other. So ScalarE bounds both passes: the steps of the second pass take turns with
# those of the next queries' first pass, in the order in which their tiles of PSUM are wanted.

TILES_AT_ONCE = MOVING_MAX // P_MAX  # tiles of queries whose scores share a bank of PSUM
AUGMENTED = 1 + TILES_AT_ONCE
HEADS_AT_ONCE = 4  # KV heads of a tile whose blocks of the cache share SBUF


class ScoreBank(NamedTuple):
    """Queries whose scores share a bank of PSUM: [head, member of its group; token].

    A bank has ``heads`` KV heads from ``head`` on, ``members`` of their groups from ``member`` on,
    and ``tokens`` new tokens: the columns of the ``block``-th qk_sb from ``column`` on.
    ``position`` new tokens stand before these in their sequence.
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
        """The bank's part of queries or contexts [lanes, members, tokens], which are a list by
        block of [128, tiles, T], in the tiles of a stack of KV heads."""
        tiles = nl.ds(stack * heads.group + self.member, self.members)
        return x_sb[self.block][lanes, tiles, nl.ds(self.column, self.tokens)]

    def rows_of(self, head):
        """Rows of its ``head``-th head."""
        return nl.ds(head * self.members, self.members)

    def together(self):
        """(first, count) of the members of a head whose queries share a tile of 128 partitions."""
        return spans(self.members, max(1, P_MAX // self.tokens))

    def tiles(self):
        """(head, first row, rows) of the tiles of ``together``, for all heads."""
        return [
            (head, head * self.members + first, count)
            for head in range(self.heads)
            for first, count in self.together()
        ]


def score_banks(parts, heads, largest):
    """Banks of the tiles ``parts`` of tokens, (block, column, position, tokens), of up to
    ``largest`` tokens. Each set of KV heads, whole stacks whose contexts share tiles, has a list of
    banks."""
    together = P_MAX // largest
    most = TILES_AT_ONCE * together  # members of a group that share a bank
    each = max(1, TILES_AT_ONCE // math.ceil(heads.group / together))
    each = min(HEADS_AT_ONCE, each)
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


class KeyTiles(NamedTuple):
    """``tiles`` tiles of ``lanes`` keys of some KV heads @ SBUF, which count from ``head`` on.

    k_sb [128, heads, slots * stride, lanes] has features, then augmented rows, 128 rows a slot;
    v_sb [128, stride, heads, D + 1] ends in a column of ones (None: nobody asks for values).
    ``mask_sb`` [tokens, lanes], if any, is added to the scores of the last tile. bias_sb [n, tiles,
    lanes], if any, hides keys from the queries that have ones in owners_sb [n, rows, tokens]: for n
    sequences, or for one whose augmented rows are not in k_sb.
    Nobody sees the first ``before`` tiles of k_sb and v_sb. ``edges`` are masks of a Window, (tile,
    [128, 128] @ SBUF).
    """

    k_sb: Sbuf
    v_sb: Sbuf
    stride: int
    tiles: int
    lanes: int
    head: int = 0
    mask_sb: Optional[Sbuf] = None
    bias_sb: Optional[Sbuf] = None
    owners_sb: Optional[Sbuf] = None
    before: int = 0
    edges: Sequence[Tuple[int, Any]] = ()

    def keys(self, head, slot, rows, tile, tiles):
        """Operand of a product: some tiles of a head's keys, some rows of a slot."""
        part = nl.ds(slot * self.stride + self.before + tile, tiles)
        return self.k_sb[0:rows, self.head + head, part, 0 : self.lanes]

    def masks(self, start, tiles, tokens):
        """(tile, mask [tokens, lanes]) to add to the scores of these tiles."""
        last = [] if self.mask_sb is None else [(self.tiles - 1, self.mask_sb)]
        edges = [(tile, edge_sb[0:tokens, 0 : self.lanes]) for tile, edge_sb in self.edges]
        return [each for each in last + edges if start <= each[0] < start + tiles]

    def load(self, values=True):
        """These tiles: they are in SBUF already."""
        return self

    def values(self, head, tile):
        """Values and ones of a tile of a head's keys."""
        return self.v_sb[0 : self.lanes, self.before + tile, self.head + head, :]


def load_constant(values, dtype):
    """A numpy array of at most 128 rows, part of the compiled graph -> the same @ SBUF."""
    return nl.load(nl.shared_constant(values, dtype=dtype))


class Window(NamedTuple):
    """A sliding window over tiles of 128 keys. A tile of queries sees ``back`` tiles before its
    own; up to two masks [128, 128] @ SBUF, (tiles back, mask), hide keys that are too old for some
    of its queries."""

    back: int
    masks: Sequence[Tuple[int, Any]] = ()

    @classmethod
    def of(cls, window, dtype):
        """The Window of ``window`` tokens, the query's included; None for any number of tokens."""
        if window is None:
            return None
        back = (window + P_MAX - 2) // P_MAX
        row, column = nl.arange(P_MAX)[:, None], nl.arange(P_MAX)[None, :]
        masks = [
            (tiles, select_mask(column + window - 1 >= row + tiles * P_MAX, P_MAX, dtype))
            for tiles in [*range(back + 1)][-2:]
            if (tiles + 1) * P_MAX > window
        ]
        return cls(back, masks)

    def visible(self, number, tiles):
        """The first of so many tiles that the ``number``-th tile of queries of a sequence sees, and
        the masks (tile behind the first, mask) of its edges."""
        first = max(0, number - self.back)
        edges = [(number - back, mask_sb) for back, mask_sb in self.masks]
        return first, [(tile - first, mask) for tile, mask in edges if first <= tile < tiles]


class NewKeys(NamedTuple):
    """Keys and values of a sequence's new tokens, filled in order: k_sb and v_sb as in KeyTiles,
    zero behind the last key. Where the first augmented row ``hides`` keys, queries have a one for
    it. mask_sb [tokens, tokens] is added to the scores of a tile of tokens with each other, a
    triangle where no augmented row hides any. Of several sequences bias_sb [sequences, tiles * 128]
    hides each one's keys from the others. A Window may hide older ones.
    """

    heads: HeadShape
    k_sb: Sbuf
    v_sb: Sbuf
    mask_sb: Sbuf
    hides: bool
    bias_sb: Optional[Sbuf] = None
    window: Optional[Window] = None

    def append(self, start, qk_sb, column, v_sb):
        """Keep a tile of tokens, the sequence's from ``start`` on: keys from qk_sb, behind its
        queries, and values [tokens, kv_heads * D]."""
        heads, (size, _), tile = self.heads, v_sb.shape, start // P_MAX
        shape = (size, heads.kv_heads, heads.head_dim)
        for head in nl.static_range(heads.kv_heads):
            stack, lanes = heads.place(head)
            self.k_sb[0 : heads.depth, head, tile, 0:size] = nisa.tensor_copy(
                qk_sb[lanes, heads.q_tiles + stack, nl.ds(column, size)]
            )
        self.v_sb[0:size, tile, :, 0 : heads.head_dim] = nisa.tensor_copy(v_sb.reshape(shape))

    def visible(self, bank):
        """The KeyTiles that the queries of a bank see: whole tiles before them, and their own."""
        lanes = P_MAX if bank.position else bank.tokens
        stride, tiles = self.v_sb.shape[1], bank.position // P_MAX + 1
        mask_sb, bias_sb = self.mask_sb[0 : bank.tokens, 0:lanes], None
        if self.bias_sb is not None:
            shape = self.bias_sb.shape[0], tiles, lanes
            bias_sb = self.bias_sb[:, 0 : tiles * lanes].reshape(shape)
        sizes = stride, tiles, lanes, bank.head
        visible = KeyTiles(self.k_sb, self.v_sb, *sizes, mask_sb, bias_sb)
        if self.window is None:
            return visible
        first, edges = self.window.visible(tiles - 1, tiles)
        return visible._replace(tiles=tiles - first, before=first, edges=edges)


def new_keys(tokens, heads, dtype, mask_sb, hides, bias_hbm=None):
    """Make NewKeys without keys; augmented rows and ones are there. bias [1, tokens] @ HBM is 0 for
    keys that count and MASKED for others (None: all count)."""
    d, tiles, last = heads.head_dim, whole_tiles(tokens), tokens // P_MAX
    slots, (slot, row) = len(contraction(heads.depth + AUGMENTED)), divmod(heads.depth, P_MAX)
    k_sb = nl.ndarray((P_MAX, heads.kv_heads, slots * tiles, P_MAX), dtype)
    v_sb = nl.ndarray((P_MAX, tiles, heads.kv_heads, d + 1), dtype)
    if last < tiles:
        k_sb[:, :, last, :] = nisa.memset((P_MAX, heads.kv_heads, P_MAX), 0.0, dtype)
        v_sb[:, last, :, :] = nisa.memset((P_MAX, heads.kv_heads, d + 1), 0.0, dtype)
    v_sb[:, :, :, d : d + 1] = nisa.memset((P_MAX, tiles, heads.kv_heads, 1), 1.0, dtype)
    shape, part = (heads.kv_heads, tiles, P_MAX), nl.ds(slot * tiles, tiles)
    k_sb[row : row + AUGMENTED, :, part, :] = nisa.memset((AUGMENTED, *shape), 1.0, dtype)
    k_sb[row : row + 1, :, part, :] = nisa.memset((1, *shape), 0.0, dtype)
    if bias_hbm is not None:
        for head in nl.affine_range(heads.kv_heads):
            for tile, (start, size) in enumerate(spans(tokens, P_MAX)):
                k_sb[row : row + 1, head, slot * tiles + tile, 0:size] = nl.load(
                    bias_hbm[:, nl.ds(start, size)]
                )
    return NewKeys(heads, k_sb, v_sb, mask_sb, hides)


class Constants(NamedTuple):
    """Tiles that the attention of many queries reads: zeros [128, 1] fp32; the identity [128, 128];
    which of n tokens a query is, [n, rows, n], for any number of ``rows`` of queries; which
    augmented rows are a tile's, the first and its own, [AUGMENTED, TILES_AT_ONCE] fp32."""

    zero_sb: Sbuf
    eye_sb: Sbuf
    which_sb: Sbuf
    head_rows_sb: Sbuf


def attention_constants(length, heads, dtype):
    """Constants for sequences of so many tokens."""
    largest = min(length, P_MAX)
    every = [score_banks([(0, 0, 0, size)], heads, largest) for _, size in spans(length, largest)]
    rows = max(bank.rows for sets in every for banks in sets for bank in banks)
    token, other = nl.arange(largest)[:, None, None], nl.arange(largest)[None, None, :]
    row = nl.arange(rows)[None, :, None]
    which_sb = select_equal(token + 0 * row, other, (largest, rows, largest), dtype)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    lane, column = nl.arange(P_MAX)[:, None], nl.arange(P_MAX)[None, :]
    eye_sb = select_equal(lane, column, (P_MAX, P_MAX), dtype)
    head_rows = np.concatenate((np.ones((1, TILES_AT_ONCE)), np.eye(TILES_AT_ONCE)))
    head_rows_sb = load_constant(head_rows.astype(np.float32), nl.float32)
    return Constants(zero_sb, eye_sb, which_sb, head_rows_sb)


def bank_queries(qk_sb, bank, heads, augmented, hides):
    """Queries of a bank [128, slots, rows, tokens] @ SBUF, as the keys of KeyTiles have them, with
    room for so many ``augmented``; the first is there where that of the keys ``hides`` some."""
    depth, shape = heads.depth, (bank.rows, bank.tokens)
    slots, (slot, row) = len(contraction(depth + augmented)), divmod(depth, P_MAX)
    q_sb = nl.ndarray((P_MAX, slots, *shape), qk_sb[0].dtype)
    for at in nl.static_range(bank.heads):
        queries_sb = bank.part(qk_sb, heads, *heads.place(bank.head + at))
        q_sb[0:depth, 0, bank.rows_of(at), :] = nisa.tensor_copy(
            queries_sb, engine=nisa.vector_engine
        )
    if hides:
        q_sb[row : row + 1, slot, :, :] = nisa.memset((1, *shape), 1.0, q_sb.dtype)
    return q_sb


def score_tile(q_sb, bank, keys, tile, scores_psum, depth, constants):
    """Products of one tile of keys with a bank's queries, ``depth`` rows of features and augmented
    rows, into scores_psum [lanes, rows, tokens]."""
    for head in nl.static_range(bank.heads):
        rows = bank.rows_of(head)
        for slot, size in contraction(depth):
            scores_psum[:, rows, :] += nisa.nc_matmul(
                keys.keys(head, slot, size, tile, 1), q_sb[0:size, slot, rows, :]
            )
    if keys.bias_sb is not None:
        scores_psum[...] += nisa.nc_matmul(keys.bias_sb[:, tile, :], keys.owners_sb)
    which_sb = constants.which_sb[0 : bank.tokens, 0 : bank.rows, 0 : bank.tokens]
    for _, mask_sb in keys.masks(tile, 1, bank.tokens):
        scores_psum[...] += nisa.nc_matmul(mask_sb, which_sb)


def key_spans(bank, tiles):
    """Spans of tiles of keys: the transposed scores of a span share a bank of PSUM."""
    return spans(tiles, MOVING_MAX // (bank.rows * bank.tokens))


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
        """(part of the keys, span of its tiles): the scores of a span with 128 queries share a
        bank."""
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
    steps found [queries, tiles, steps] @ SBUF."""

    group: QueryGroup
    q_sb: List[Sbuf]
    maxima_sb: List[Sbuf]
    held: List[Any]

    @classmethod
    def of(cls, group):
        banks, new, maxima_sb = group.banks, group.new, []
        q_sb = [bank_queries(group.qk_sb, bank, new.heads, AUGMENTED, new.hides) for bank in banks]
        for bank in banks:
            shape = (bank.queries, len(bank.tiles()), len(group.spans(bank)))
            maxima_sb.append(nl.ndarray(shape, new.k_sb.dtype))
            if len({count for *_, count in bank.tiles()}) > 1:  # one tile has fewer queries
                maxima_sb[-1][...] = nisa.memset(shape, 0.0, new.k_sb.dtype)
        return cls(group, q_sb, maxima_sb, [None, None])

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
        bank, keys = group.banks[n], group.keys(part, n, self.held, False)
        queries, last = bank.tiles()[at][2] * bank.tokens, len(group.spans(bank)) - 1
        scores_sb = nl.ndarray((queries, span[1], keys.lanes), group.new.k_sb.dtype)
        self.score_rows(n, at, keys, span, scores_sb)
        self.maxima_sb[n][0:queries, at, nl.ds(step, 1)] = nisa.tensor_reduce(
            nl.max, scores_sb, axis=[1, 2]
        )
        if step == last and at + 1 == len(bank.tiles()):
            self.augment(n)

    def score_rows(self, n, at, keys, span, scores_sb):
        """Scores of the ``at``-th tile of a bank's queries with a span of tiles of KeyTiles, into
        scores_sb [queries, tiles, lanes] in their type.

        Queries are stationary here and stand on partitions, 512 keys move.
        """
        group, bank, (start, tiles) = self.group, self.group.banks[n], span
        (head, row, count), constants = bank.tiles()[at], group.constants
        queries, rows = count * bank.tokens, nl.ds(row, count)
        scores_psum = psum((queries, tiles, keys.lanes))
        for slot, size in contraction(group.new.heads.depth + int(group.new.hides)):
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
        slot, first = divmod(self.group.new.heads.depth, P_MAX)
        for at, (_, row, members) in enumerate(bank.tiles()):
            part_sb = transposed_sb[:, 0 : members * bank.tokens]
            q_sb[nl.ds(first, count), slot, nl.ds(row, members), :] = nisa.activation(
                nl.copy,
                part_sb.reshape((count, members, bank.tokens)),
                bias=constants.zero_sb[0:count, :],
                scale=constants.head_rows_sb[0:count, nl.ds(at, 1)],
            )


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
        """(part of the keys, bank, span of tiles of keys, whether the span begins a part, whether
        it ends one)."""
        group, found = self.first.group, []
        for n, bank in enumerate(group.banks):
            for part, tiles, _ in group.parts(bank):
                each = key_spans(bank, tiles)
                last = len(each) - 1
                found += [(part, n, span, k == 0, k == last) for k, span in enumerate(each)]
        return sorted(found, key=lambda step: step[0])

    def run(self, step):
        """Weigh the values of a span for one bank. The last step makes the contexts of all
        banks."""
        (part, n, span, begins, ends), group = step, self.first.group
        keys, bank = group.keys(part, n, self.held, True), group.banks[n]
        if begins:
            columns = group.head_dim + 1  # as many tiles of queries share a bank
            self.sums[n] = [
                psum((bank.queries, tiles, columns))
                for _, tiles in spans(len(bank.tiles()), MOVING_MAX // columns)
            ]
        self.add_weighted(n, keys, span)
        if not ends:
            return
        if self.before[n] is not None:
            pairs = zip(self.before[n], self.sums[n])
            self.sums[n] = [nisa.tensor_tensor(b_psum, a_sb, nl.add) for a_sb, b_psum in pairs]
        else:
            self.sums[n] = [nisa.tensor_copy(sums_psum) for sums_psum in self.sums[n]]
        self.before[n] = self.sums[n]
        if part == len(group.blocks) and n + 1 == len(group.banks):
            bank_contexts(group.banks, self.sums, group.new.heads, group.context_sb)

    def add_weighted(self, n, keys, span):
        """Add exp(scale * (score - maximum)) of some tiles of keys, times their values and ones, to
        the sums of each tile of a bank's queries [queries, D + 1] fp32 @ PSUM."""
        group, bank, q_sb = self.first.group, self.first.group.banks[n], self.first.q_sb[n]
        constants, (start, tiles) = group.constants, span
        depth = group.new.heads.depth + bank.augmented
        scores_psum = psum((keys.lanes, tiles, bank.rows, bank.tokens))
        for tile in nl.static_range(tiles):
            part_psum = scores_psum[:, tile, :, :]
            score_tile(q_sb, bank, keys, start + tile, part_psum, depth, constants)
        weights_sb = nisa.activation(
            nl.exp,
            scores_psum,
            bias=constants.zero_sb[0 : keys.lanes, :],
            scale=score_scales(group.head_dim)[1],
            dtype=q_sb.dtype,
        )
        for at, (head, row, count) in enumerate(bank.tiles()):
            sums_psum = sum_of(self.sums[n], at, count * bank.tokens)
            for tile in nl.static_range(tiles):
                sums_psum[...] += nisa.nc_matmul(
                    weights_sb[:, tile, nl.ds(row, count), :], keys.values(head, start + tile)
                )


def bank_contexts(banks, sums, heads, context_sb):
    """Divide the sums of a set of heads by the sums of the weights -> context_sb [128, tiles, T].

    Contexts come with queries on partitions, and are transposed for all heads of a stack at once;
    of the heads of a stack the banks follow each other.
    """
    d, dtype, rows = heads.head_dim, context_sb[0].dtype, []
    scales = [[nisa.reciprocal(tiles[:, :, d]) for tiles in found] for found in sums]
    each = [(*given, at) for given in zip(banks, sums, scales) for at in range(given[0].heads)]
    for bank, found, scale, at in each:
        (stack, lanes), parts = heads.place(bank.head + at), bank.together()
        if lanes.start == 0:
            shapes = [(count * bank.tokens, P_MAX) for _, count in parts]
            rows = [nl.ndarray(shape, dtype) for shape in shapes]
            if heads.kv_heads - bank.head - at < heads.stack or heads.stack * d < P_MAX:
                # some lanes have no feature
                rows = [nisa.memset(shape, 0.0, dtype) for shape in shapes]
        for n, rows_sb in enumerate(rows, at * len(parts)):
            values = sum_of(found, n, rows_sb.shape[0])[:, 0:d]
            scale_sb = sum_of(scale, n, rows_sb.shape[0])
            rows_sb[:, nl.ds(lanes.start, d)] = nisa.tensor_scalar(values, nl.multiply, scale_sb)
        if lanes.stop > P_MAX - heads.depth or bank.head + at + 1 == heads.kv_heads:
            shape = (P_MAX, bank.members, bank.tokens)
            transposed_psum = psum((P_MAX, bank.members * bank.tokens), nl.ndarray)
            for (first, count), rows_sb in zip(parts, rows):
                part = nl.ds(first * bank.tokens, count * bank.tokens)
                transposed_psum[:, part] = nisa.nc_transpose(rows_sb)
            out = bank.part(context_sb, heads, stack)
            out[...] = nisa.tensor_copy(transposed_psum.reshape(shape))


def attend(first, following):
    """Run the second pass of a group, in turns with the first pass of the ``following`` one (or
    None): PSUM is granted in order."""
    second = WeightsPass.of(first)
    steps, ahead = second.steps(), following.steps() if following is not None else []
    for n, step in enumerate(steps):
        second.run(step)
        for other in step_share(ahead, n, len(steps)):
            following.run(other)


# --- Blocks of tokens -----------------------------------------------------------------------------


def value_tiles(tiles, tokens, heads, itemsize):
    """(start, size) of the tokens whose values are projected together: ``tiles`` of attention if
    they have room in SBUF, else 128 tokens each."""
    each = heads.kv_features * itemsize
    return tiles if len(tiles) * each <= VALUE_BYTES else spans(tokens, P_MAX)


def tile_values(projection, n, values_hbm):
    """Values [tokens, kv_heads * D] @ SBUF of the ``n``-th TokenTile of a Projection's Block; the
    values of all are stored in rows @ HBM."""
    block = projection.tokens.block
    tiles = block.tiles()
    if len(projection.v_sb) == len(tiles):
        return projection.v_sb[n]
    return nl.load(values_hbm[nl.ds(block.start + tiles[n].column, tiles[n].tokens), :])


def project_blocks(blocks, layer):
    """The Projections of some Blocks, one pass over the weights: H/128 passes of a block's tokens
    for every tile of features. Hidden states are loaded behind the first weights."""
    pieces = layer.qkv.pieces(blocks[0].count, row_bytes=BLOCK_PIECE_BYTES)
    loaded, passed = layer.qkv.load(*pieces[0]), []
    for block in blocks:
        tokens = layer.hidden.load(block)
        tiles = [(tile.column, tile.tokens) for tile in block.tiles()]
        tiles = value_tiles(tiles, block.count, layer.heads, layer.hidden.x_hbm.itemsize)
        passed.append(layer.projection(tokens, tiles))
    for first, count in pieces:
        loaded = layer.qkv.load(first, count) if first else loaded
        for at in range(first, first + count):
            for projection in passed:
                projection.project(loaded, at)
    return passed


def attend_groups(groups):
    """Attention of several groups: the first pass of one beside the second of that before. Groups
    are made, and their keys loaded, one ahead of their turn."""
    ahead = None
    for group in groups:
        following = MaximaPass.of(group)
        if ahead is None:
            for step in following.steps():
                following.run(step)
        else:
            attend(ahead, following)
        ahead = following
    if ahead is not None:
        attend(ahead, None)


# --- Prefill attention ----------------------------------------------------------------------------
#
# Blocks of tokens follow each other: a block is projected, attends, and is multiplied with the
# output's weight. A sequence's keys and values stay in SBUF, or come back from HBM, by room.


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

    def tiles(self, banks, before, window, heads):
        """The ScratchTiles of ``before`` tokens that the queries of a set of banks see."""
        tiles, first, edges = before // P_MAX, 0, []
        if window is not None:
            first, edges = window.visible(tiles + banks[0].position // P_MAX, tiles)
        head, count = heads_of(banks)
        of_tile = key_bytes(P_MAX, heads._replace(kv_heads=count), AUGMENTED, self.k_hbm.itemsize)
        most = max(1, SCRATCH_BYTES // of_tile)
        return [
            ScratchTiles(
                self,
                head,
                count,
                first + at,
                size,
                [(tile - at, edge) for tile, edge in edges if at <= tile < at + size],
            )
            for at, size in spans(tiles - first, most)
        ]


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


def attend_prompt(layer, blocks, bias_hbm, window, new_hbm):
    """Attention of a prompt's Blocks; ``new_hbm`` are new keys and values in rows @ HBM. bias [B,
    S] @ HBM is MASKED for left padding, or None; ``window``: tokens that a query sees, or None."""
    heads, x_hbm, length = layer.heads, layer.hidden.x_hbm, blocks[0].length
    dtype = x_hbm.dtype
    constants, window = attention_constants(length, heads, dtype), Window.of(window, dtype)
    causal_sb = causal_mask(min(length, P_MAX), dtype)
    short = key_bytes(length, heads, AUGMENTED, x_hbm.itemsize) <= RESIDENT_BYTES
    kept, scratch = {}, None
    for block in blocks:
        # hidden states [128, H/128, count], after their first weights; queries, keys, values
        (rows,), at = project_blocks([block], layer), block.start % length
        rows.store_keys(*new_hbm)
        before, size = (0, length) if short else (at, block.count)
        if not short and at == 0:
            scratch = Scratch.of(whole_tiles(length), heads, dtype)
        groups = []
        for n, (sequence, position, column, tokens) in enumerate(block.tiles()):
            if position == before:
                mask_hbm = (
                    None if bias_hbm is None else bias_hbm[nl.ds(sequence, 1), nl.ds(before, size)]
                )
                new = new_keys(size, heads, dtype, causal_sb, mask_hbm is not None, mask_hbm)
                kept[sequence] = new._replace(window=window)
            part = 0, column, position - before, tokens
            values_sb = tile_values(rows, n, new_hbm[1])
            kept[sequence].append(position - before, rows.qk_sb, column, values_sb)
            groups += [
                (sequence, banks) for banks in score_banks([part], heads, min(length, P_MAX))
            ]
        if not short:
            scratch.append(before // P_MAX, kept[groups[0][0]])
        # attention takes one bank of PSUM at a time
        attend_groups(
            QueryGroup(
                banks,
                [] if short else scratch.tiles(banks, before, window, heads),
                kept[sequence],
                [rows.qk_sb],
                constants,
                [rows.context_sb],
            )
            for sequence, banks in groups
        )
        # the output [128, H/128, count], q_tiles passes of all tokens a tile
        store_product(layer.out, [Tokens(block, rows.context_sb)], layer.hidden.out_hbm)
