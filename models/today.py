"""Llama's kernels in the current kernel language (`nki`, SDK 2.29 and later).

The submission, llama.py, is written for SDK 2.21; one text for both languages would hide every
instruction behind a helper. This file follows llama.py section by section and name by name. Read
there the layouts, axis letters, examples and reasons that hold for both. Heads have 64 or 128
features. Results are equal, and estimated times on trn1 lie within 3 % (tests/nki/
test_llama_nki.py). docs/porting_pairs.md has construct beside construct. Two things differ:
engines take instructions in the order of the text, so "Order of work" defers products that wait
for another engine, and the compiler's parser takes less of Python. Functions on numbers are
llama.py's own. A name that both files define works on tensors or holds some.

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Features lie on partitions from end to end,
and partition p of a hidden state holds the H/128 features from p * H/128 on.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

from llama import (
    BLOCK_PIECE_BYTES,
    GROUP_HEADS,
    LEAD,
    LONG_BLOCK,
    MOVING_MAX,
    PIECE_BYTES,
    P_MAX,
    SHORT_BLOCK,
    SHORT_FEATURES,
    SHORT_ROW_TOKENS,
    cache_runs,
    contraction,
    even_spans,
    grouped,
    score_scales,
    spans,
    step_share,
    token_chunk,
    weight_pieces,
    whole_tiles,
)

FP32 = nl.float32
TILE_CACHE_BYTES = 64 * 1024  # SBUF for the cache of a tile of sequences in a decode step
STEPS_LATER = 4  # TensorE waits so long for other engines' results on its products


class HeadShape(nl.NKIObject):
    """Heads of one rank: ``group`` query heads share a KV head, ``stack`` KV heads a tile. Tiles of
    queries, and behind them of keys, lie as llama.py's."""

    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self):
        assert self.head_dim == 64 or self.head_dim == 128, "expected heads of 64 or 128"
        assert self.q_heads % self.kv_heads == 0, "expected whole groups of query heads"
        self.group = self.q_heads // self.kv_heads
        self.stack = P_MAX // self.head_dim
        self.stacks = math.ceil(self.kv_heads / self.stack)
        self.q_tiles = self.stacks * self.group
        self.qk_tiles = self.q_tiles + self.stacks
        self.kv_features = self.kv_heads * self.head_dim

    def place(self, kv_head):
        """(stack, lanes) of a KV head: its tile of the keys, and its partitions there."""
        return kv_head // self.stack, nl.ds(kv_head % self.stack * self.head_dim, self.head_dim)

    def leaves_lanes(self):
        """Whether tiles of heads have lanes without features."""
        return self.kv_heads % self.stack > 0


# --- Sizes known while tracing --------------------------------------------------------------------


def bytes_of(dtype):
    """Bytes of an element."""
    return 4 if dtype == nl.float32 else 2


def on_gen2():
    return nisa.get_nc_version() == nisa.nc_version.gen2


def psum_parts(tiles, tokens):
    """(tile, first token, tokens) of the parts of a product: a tile @ PSUM each. Several sums in
    one tile lost their first products on a trn1 (foxl-ai/kiln, docs/neuron-notes.md) and on a trn2
    (mega-trainium, megakernel/symnki_poc)."""
    found = []
    for columns in even_spans(tokens, MOVING_MAX):
        for tile in range(tiles):
            found.append((tile, columns[0], columns[1]))
    return found


class Block(nl.NKIObject):
    """Tokens that lie together in hidden states @ HBM: ``count`` from ``start`` on, of sequences of
    ``length`` tokens."""

    start: int
    count: int
    length: int

    def parts(self):
        """(sequence, position, column, tokens) of its tiles: up to 128 tokens of one sequence."""
        tokens, found = min(self.count, self.length), []
        for column in range(0, self.count, tokens):
            sequence, position = divmod(self.start + column, self.length)
            for part in spans(tokens, P_MAX):
                found.append((sequence, position + part[0], column + part[0], part[1]))
        return found


def token_blocks(features, tokens, length):
    """The Blocks of so many tokens, sequences of ``length``: several whole sequences, or whole
    tiles of one, as equal as can be."""
    most, found = SHORT_BLOCK if features <= SHORT_FEATURES else LONG_BLOCK, []
    if length < most:
        for piece in spans(tokens, most // length * length):
            found.append(Block(piece[0], piece[1], length))
        return found
    size = math.ceil(length / math.ceil(length / most) / P_MAX) * P_MAX
    for first in range(0, tokens, length):
        for piece in spans(length, size):
            found.append(Block(first + piece[0], piece[1], length))
    return found


# --- Tile helpers ---------------------------------------------------------------------------------
#
# A tile made in a loop is a new tile in each iteration, so buffers rotate by themselves. Products
# into a fresh PSUM tile leave ``accumulate`` open: the first into each element overwrites, the
# others add.


def tile_of(shape, dtype):
    """An uninitialised tile @ SBUF."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum_of(shape):
    """An uninitialised tile @ PSUM, in which products add up in fp32."""
    return nl.ndarray(shape, dtype=FP32, buffer=nl.psum)


def transposes_of(shape, dtype):
    """A tile @ PSUM for transposes: TensorE of gen2 writes fp32, later ones the data's type."""
    return nl.ndarray(shape, dtype=FP32 if on_gen2() else dtype, buffer=nl.psum)


def filled(shape, value, dtype):
    """A tile of one value @ SBUF."""
    made_sb = tile_of(shape, dtype)
    nisa.memset(dst=made_sb, value=value)
    return made_sb


def select(kept_sb, pattern, value, compare=nl.equal, offset=0, multiplier=1):
    """``kept_sb`` where partition * multiplier + pattern + offset compares with 0, else ``value`` @
    SBUF. GpSimdE has nothing else to do; a constant would take its turn in the queues of DMA."""
    made_sb = tile_of(kept_sb.shape, kept_sb.dtype)
    nisa.affine_select(
        dst=made_sb,
        pattern=pattern,
        offset=offset,
        channel_multiplier=multiplier,
        on_true_tile=kept_sb,
        on_false_value=value,
        cmp_op=compare,
    )
    return made_sb


def select_equal(pattern, offset, shape, dtype):
    """Ones where partition + pattern + offset is 0, else zeros @ SBUF."""
    return select(filled(shape, 1.0, dtype), pattern, 0.0, offset=offset)


def masked(dtype):
    """The number added to scores that do not count: its exp is 0, and twice it is finite."""
    return -3.0e4 if dtype == nl.float16 else -1.5e38


def causal_mask(tokens, dtype):
    """[tokens, tokens] @ SBUF: 0 where a token (row) sees one, itself and those before, else
    ``masked``."""
    zeros_sb = filled((tokens, tokens), 0.0, dtype)
    return select(zeros_sb, [[-1, tokens]], masked(dtype), nl.greater_equal)


class Linear(nl.NKIObject):
    """A linear layer of a kernel: its weight in kernel layout @ HBM, of ``k_tiles`` tiles of K."""

    weight_hbm: nl.NkiTensor
    k_tiles: int

    def __post_init__(self):
        self.tiles = self.weight_hbm.shape[1] // (self.k_tiles * P_MAX)

    def pieces(self, tokens, last=False, row_bytes=PIECE_BYTES):
        """(first, count) of its tiles that are loaded at once, see ``weight_pieces``."""
        return weight_pieces(self.tiles, 2 * self.k_tiles * P_MAX, tokens, last, row_bytes)

    def load(self, first, tiles):
        """The Piece of some of its tiles, one contiguous row of a partition each."""
        tiled_hbm = self.weight_hbm.reshape((P_MAX, self.tiles, self.k_tiles, P_MAX))
        return Piece(first, nl.load(tiled_hbm[:, nl.ds(first, tiles)]))


class Piece(nl.NKIObject):
    """Tiles of a Linear from the ``first`` on @ SBUF [128, tiles, K/128, 128]."""

    first: int
    weight_sb: nl.NkiTensor

    def product(self, part, x_sb):
        """A part of ``psum_parts`` of W x [128, tokens] @ PSUM, of the tokens x_sb [128, K/128, T]:
        k_tiles passes of max(64, tokens) columns."""
        tile, start, tokens = part
        acc_psum = psum_of((P_MAX, tokens))
        for k in range(x_sb.shape[1]):
            w_sb, part_sb = self.weight_sb[:, tile, k, :], x_sb[:, k, nl.ds(start, tokens)]
            nisa.nc_matmul(dst=acc_psum, stationary=w_sb, moving=part_sb, accumulate=k > 0)
        return acc_psum


def linear_of(weight_hbm, features, k, name):
    """The Linear of a kernel weight; refuses another size than ``features`` from ``k``."""
    expected = (P_MAX, whole_tiles(features) * (k // P_MAX) * P_MAX)
    assert weight_hbm.shape == expected, f"{name} is {weight_hbm.shape}, expected {expected}"
    return Linear(weight_hbm, k // P_MAX)


def stored_together(pieces, tokens):
    """Group the pieces of a weight whose results are stored at once: each piece alone for many
    tokens, the last piece alone for up to 128, all together for up to 32."""
    if tokens <= SHORT_ROW_TOKENS or len(pieces) == 1:
        return [pieces]
    if tokens <= P_MAX:
        return [pieces[:-1], pieces[-1:]]
    groups = []
    for piece in pieces:
        groups.append([piece])
    return groups


def store_product(linear, inputs, out_hbm):
    """``W @ x`` of ``inputs``, (x_sb [128, k_tiles, count], Block), into out [N, T] @ HBM: one pass
    over the weights. Features lie in runs, so that each partition stores contiguous rows."""
    count = inputs[0][1].count
    for group in stored_together(linear.pieces(count, last=True), count):
        begin, size, outs = group[0][0], group[-1][0] + group[-1][1] - group[0][0], []
        for rows in inputs:
            outs.append(tile_of((P_MAX, size, rows[1].count), out_hbm.dtype))
        for span in group:
            piece = linear.load(span[0], span[1])
            for n in range(len(inputs)):
                for part in psum_parts(span[1], inputs[n][1].count):
                    out_sb = outs[n][:, span[0] - begin + part[0], nl.ds(part[1], part[2])]
                    nisa.tensor_copy(dst=out_sb, src=piece.product(part, inputs[n][0]))
        for n in range(len(inputs)):
            nl.store(block_part(out_hbm, inputs[n][1], begin, size), outs[n])


# --- Residual stream and norm ---------------------------------------------------------------------


class Norm(nl.NKIObject):
    """Constants of an RMSNorm: the features that count (H is padded with zeros), and epsilon."""

    features: int
    eps: float


def hidden_tiles(x_hbm):
    """Tiles of 128 features of hidden states [H, T] @ HBM."""
    assert x_hbm.shape[0] % P_MAX == 0, f"{x_hbm.shape[0]} features, expected whole tiles of 128"
    return x_hbm.shape[0] // P_MAX


def block_part(x_hbm, block, tile, tiles):
    """Some tiles of features of a block of hidden states [H, T] @ HBM -> [128, tiles, count]: a
    partition's are contiguous."""
    k_tiles, count = hidden_tiles(x_hbm), block.count
    rows_hbm = x_hbm.reshape((P_MAX, k_tiles * x_hbm.shape[1]))
    part_hbm = rows_hbm[:, nl.ds(k_tiles * block.start + tile * count, tiles * count)]
    return part_hbm.reshape((P_MAX, tiles, count))


def stream_of(x_hbm, delta_hbm):
    """The tensor @ HBM that takes x + delta; x itself if there is no delta."""
    if delta_hbm is None:
        return x_hbm
    return nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)


class Residual(nl.NKIObject):
    """x + delta of a Block of hidden states [H, T] @ HBM on its way to x_sb [128, H/128, count] @
    SBUF; without delta just x. Many tokens arrive in up to eight ``parts``, in rows of 4 KiB."""

    x_hbm: nl.NkiTensor
    delta_hbm: nl.NkiTensor
    sum_hbm: nl.NkiTensor
    block: Block

    def __post_init__(self):
        k_tiles, count = hidden_tiles(self.x_hbm), self.block.count
        self.parts = []
        self.x_sb = tile_of((P_MAX, k_tiles, count), self.x_hbm.dtype)
        each = k_tiles if count <= P_MAX else max(math.ceil(k_tiles / 8), 2048 // count)
        for span in spans(k_tiles, each):
            first, tiles = span
            part_sb = self.x_sb[:, nl.ds(first, tiles), :]
            nisa.dma_copy(dst=part_sb, src=block_part(self.x_hbm, self.block, first, tiles))
            if self.delta_hbm is not None:
                delta_sb = nl.load(block_part(self.delta_hbm, self.block, first, tiles))
                self.parts.append((part_sb, delta_sb, first, tiles))

    def add(self):
        """The sum, and its store."""
        for part in self.parts:
            part_sb, delta_sb, first, tiles = part
            nisa.tensor_tensor(dst=part_sb, data1=part_sb, data2=delta_sb, op=nl.add)
            nl.store(block_part(self.sum_hbm, self.block, first, tiles), part_sb)


def residual_sum(x_hbm, delta_hbm, sum_hbm, block):
    """x + delta for a block of tokens, [H, T] @ HBM -> [128, H/128, count] @ SBUF, and stored."""
    given = Residual(x_hbm, delta_hbm, sum_hbm, block)
    given.add()
    return given.x_sb


def squared_lengths(x_sb, parts):
    """Sums of squares of each of the ``parts``, (first token, up to 128 tokens) -> [tokens, tokens]
    fp32 @ SBUF each, on the diagonal of zeros. TensorE multiplies tokens with themselves."""
    found = []
    for part in parts:
        start, tokens = part
        gram_psum, lengths_sb = psum_of((tokens, tokens)), tile_of((tokens, tokens), FP32)
        for k in range(x_sb.shape[1]):
            rows_sb = x_sb[:, k, nl.ds(start, tokens)]
            nisa.nc_matmul(dst=gram_psum, stationary=rows_sb, moving=rows_sb, accumulate=k > 0)
        nisa.tensor_copy(dst=lengths_sb, src=gram_psum)
        found.append(select(lengths_sb, [[-1, tokens]], 0.0) if tokens > 1 else lengths_sb)
    return found


class NormScales(nl.NKIObject):
    """1 / rms of tokens, fp32 @ SBUF: along the free axis, [128, T] with all rows equal, and on
    partitions, a list of [tokens, 1], one for each tile of tokens."""

    along_sb: nl.NkiTensor
    down_sb: list


def norm_scales(x_sb, norm, parts):
    """1 / sqrt(mean(x^2) + eps) of [128, H/128, T] @ SBUF -> NormScales, ones where ``norm`` is
    None; ``parts`` are (first token, tokens)."""
    lengths = [] if norm is None else squared_lengths(x_sb, parts)
    return scales_of(lengths, norm, parts, x_sb.shape[2])


def scales_of(lengths, norm, parts, tokens):
    """The NormScales of tokens with such ``squared_lengths``."""
    shape, down_sb = (P_MAX, tokens), []
    if norm is None:
        for part in parts:
            down_sb.append(filled((part[1], 1), 1.0, FP32))
        return NormScales(filled(shape, 1.0, FP32), down_sb)
    along_sb, scale = tile_of(shape, FP32), 1.0 / norm.features
    ones_sb, eps_sb = filled((P_MAX, P_MAX), 1.0, FP32), filled((P_MAX, 1), norm.eps, FP32)
    for n in range(len(parts)):
        start, size = parts[n]
        # along: a product with ones sums the columns, on every partition
        total_psum, part_sb = psum_of((P_MAX, size)), along_sb[:, nl.ds(start, size)]
        nisa.nc_matmul(dst=total_psum, stationary=ones_sb[0:size, :], moving=lengths[n])
        nisa.activation(dst=part_sb, op=nl.rsqrt, data=total_psum, bias=eps_sb, scale=scale)
        # down: VectorE sums the rows; each partition has its own
        total_sb, root_sb = tile_of((size, 1), FP32), tile_of((size, 1), FP32)
        nisa.tensor_reduce(dst=total_sb, op=nl.add, data=lengths[n], axis=1)
        rows_sb = eps_sb[0:size, :]
        nisa.activation(dst=root_sb, op=nl.rsqrt, data=total_sb, bias=rows_sb, scale=scale)
        down_sb.append(root_sb)
    return NormScales(along_sb, down_sb)


# --- Order of work --------------------------------------------------------------------------------


class Later(nl.NKIObject):
    """Products that wait for another engine while TensorE goes on. A step leaves an object here
    whose method ``finish`` does them; it comes after STEPS_LATER further ones."""

    def __post_init__(self):
        self.left = []
        self.done = 0

    def leave(self, what, rest):
        """Leave a ``rest`` for ``what.finish`` -> its number."""
        self.left.append((what, rest))
        number = len(self.left)
        self.settle(number - STEPS_LATER)
        return number

    def settle(self, number):
        """Finish all products that were left up to this number."""
        while self.done < number:
            what, rest = self.left[self.done]
            self.done += 1
            what.finish(rest)

    def settle_all(self):
        """Finish everything that was left, and everything that this leaves."""
        while self.done < len(self.left):
            self.settle(len(self.left))


# --- Queries, keys and values ---------------------------------------------------------------------


def swapped_halves(head_dim, dtype):
    """[128, 128] @ SBUF: a permutation that swaps the halves of each head in a tile of features."""
    half, heads = head_dim // 2, P_MAX // head_dim
    # column (head, second, lane) has a one at partition head * D + half - second * half + lane
    pattern = [[-head_dim, heads], [half, 2], [-1, half]]
    return select_equal(pattern, -half, (P_MAX, P_MAX), dtype)


class AttentionLayer(nl.NKIObject):
    """Tensors and constants that all passes of an attention kernel share.

    @ HBM: ``hidden`` (states, delta, their sum, the output), ``weights`` (of Q, K and V, and of the
    output), ``tables`` (cos, sin), and the Linears made of them. @ SBUF: the identity and the
    permutation that swaps the halves of each head in a tile [128, 128], zeros [128, 1] fp32.
    """

    hidden: tuple
    norm: Norm
    heads: HeadShape
    weights: tuple
    tables: tuple

    def __post_init__(self):
        """Refuse operands that do not belong together."""
        x_hbm, delta_hbm, stream_hbm, out_hbm = self.hidden
        self.x_hbm = x_hbm
        self.delta_hbm = delta_hbm
        self.stream_hbm = stream_hbm
        self.out_hbm = out_hbm
        features, tokens, heads = self.x_hbm.shape[0], self.x_hbm.shape[1], self.heads
        columns, contexts = heads.qk_tiles * P_MAX + heads.kv_features, heads.q_tiles * P_MAX
        self.qkv = linear_of(self.weights[0], columns, features, "the weight of QKV")
        self.out = linear_of(self.weights[1], features, contexts, "the weight of the output")
        for table_hbm in self.tables:
            found, expected = table_hbm.shape, (P_MAX, tokens)
            assert found == expected, f"a table is {found}, expected {expected}"
        self.identity_sb = nl.shared_identity_matrix(P_MAX, dtype=self.x_hbm.dtype)
        self.swap_sb = swapped_halves(heads.head_dim, self.x_hbm.dtype)
        self.zero_sb = filled((P_MAX, 1), 0.0, FP32)

    def projection(self, x_sb, block, scales, parts):
        """The Projection of a Block's tokens x_sb [128, H/128, T], tiles ``parts`` of them, with
        their NormScales."""
        columns, tables = nl.ds(block.start, x_sb.shape[2]), []
        for table_hbm in self.tables:
            tables.append(times_scales(nl.load(table_hbm[:, columns]), scales))
        return Projection(self, x_sb, scales, tables[0], tables[1], parts)


def times_scales(table_sb, scales):
    """cos or sin [128, T] times the scales of a norm, fp32 @ SBUF."""
    scaled_sb = tile_of(scales.along_sb.shape, FP32)
    nisa.tensor_tensor(dst=scaled_sb, data1=table_sb, data2=scales.along_sb, op=nl.multiply)
    return scaled_sb


class Projection(nl.NKIObject):
    """Operands @ SBUF of a Block's projections to queries, keys and values: x_sb [128, H/128, T],
    the ``scales`` of its norm, cos and sin [128, T] times these scales, and ``parts``, (start,
    size) of its tiles of tokens."""

    layer: AttentionLayer
    x_sb: nl.NkiTensor
    scales: NormScales
    cos_sb: nl.NkiTensor
    sin_sb: nl.NkiTensor
    parts: list

    def project(self, piece, at, qk_sb, v_sb, later):
        """Project tile ``at`` of queries, keys and values, which ``piece`` holds -> the number
        under which its rotation waits in Later."""
        heads = self.layer.heads
        if at < heads.qk_tiles:
            return later.leave(self, self.project_heads(piece, at, qk_sb))
        self.project_values(piece, at - piece.first, (at - heads.qk_tiles) * P_MAX, v_sb)
        return 0

    def project_heads(self, piece, at, qk_sb):
        """Tile ``at`` of query or key heads times cos and times sin [128, 2, T] @ SBUF, the terms
        of its rotation: VectorE multiplies whole rows. -> the input of ``finish``."""
        terms_sb = tile_of((P_MAX, 2, self.x_sb.shape[2]), self.x_sb.dtype)
        x_psum = piece.product((at - piece.first, 0, self.x_sb.shape[2]), self.x_sb)
        for term in range(2):
            table_sb, term_sb = self.sin_sb if term else self.cos_sb, terms_sb[:, term, :]
            nisa.tensor_tensor(dst=term_sb, data1=x_psum, data2=table_sb, op=nl.multiply)
        return terms_sb, at, qk_sb

    def finish(self, rest):
        """TensorE adds both terms into tile ``at``, the second with the halves of each head
        exchanged. Queries are divided by sqrt(D) where that rounds nothing."""
        terms_sb, at, qk_sb = rest
        layer, rotated_psum = self.layer, psum_of((P_MAX, terms_sb.shape[2]))
        nisa.nc_matmul(dst=rotated_psum, stationary=layer.identity_sb, moving=terms_sb[:, 0, :])
        nisa.nc_matmul(dst=rotated_psum, stationary=layer.swap_sb, moving=terms_sb[:, 1, :])
        scale = score_scales(layer.heads.head_dim)[0] if at < layer.heads.q_tiles else 1.0
        nisa.activation(dst=qk_sb[:, at, :], op=nl.copy, data=rotated_psum, scale=scale)

    def project_values(self, piece, tile, start, v_sb):
        """A tile of features of V of every tile of tokens into the columns from ``start`` on.
        Tokens are stationary: they land on partitions, where sums over keys contract them."""
        width = min(P_MAX, self.layer.heads.kv_features - start)
        for n in range(len(self.parts)):
            at, size = self.parts[n]
            acc_psum, rows_sb = psum_of((size, width)), v_sb[n][:, nl.ds(start, width)]
            for k in range(self.x_sb.shape[1]):
                x_sb, w_sb = self.x_sb[:, k, nl.ds(at, size)], piece.weight_sb[:, tile, k, 0:width]
                nisa.nc_matmul(dst=acc_psum, stationary=x_sb, moving=w_sb, accumulate=k > 0)
            norm_sb = self.scales.down_sb[n]
            nisa.tensor_scalar(dst=rows_sb, data=acc_psum, op0=nl.multiply, operand0=norm_sb)


def qkv_tiles(heads, tokens, parts, dtype):
    """Make the tiles of the results @ SBUF: qk_sb [128, query tiles then key tiles, T], and v_sb,
    one [tokens, kv_heads * D] of values per tile of tokens."""
    v_sb = []
    for part in parts:
        v_sb.append(tile_of((part[1], heads.kv_features), dtype))
    return tile_of((P_MAX, heads.qk_tiles, tokens), dtype), v_sb


def project_qkv(p, qkv, pieces):
    """Q, K and V of a few tokens, by the pieces of a Linear -> ``qkv_tiles``."""
    later, (qk_sb, v_sb) = Later(), qkv_tiles(p.layer.heads, p.x_sb.shape[2], p.parts, p.x_sb.dtype)
    for span in pieces:
        piece = qkv.load(span[0], span[1])
        for at in range(span[0], span[0] + span[1]):
            p.project(piece, at, qk_sb, v_sb, later)
    later.settle_all()
    return qk_sb, v_sb


def key_rows(qk_sb, start, tokens, heads):
    """Keys of a span of tokens, behind their queries -> rows [tokens, kv_heads * D] @ SBUF."""
    d = heads.head_dim
    rows_sb = tile_of((tokens, heads.kv_features), qk_sb.dtype)
    for span in spans(heads.kv_heads, heads.stack):
        first, count = span
        rows_psum = transposes_of((tokens, count * d), qk_sb.dtype)
        tile, columns = heads.q_tiles + heads.place(first)[0], nl.ds(start, tokens)
        nisa.nc_transpose(dst=rows_psum, data=qk_sb[0 : count * d, tile, columns])
        nisa.tensor_copy(dst=rows_sb[:, nl.ds(first * d, count * d)], src=rows_psum)
    return rows_sb


# --- Attention of a prompt ------------------------------------------------------------------------
#
# The algorithm, its example, with what lies on partitions at each step, and the names are those of
# llama.py under the same heading.


class SequenceKeys(nl.NKIObject):
    """Keys and values of a sequence @ SBUF, filled block by block: k_sb [128, kv_heads, keys] and
    v_sb [128, keys / 128, kv_heads, D + 1], whole tiles of 128 keys. Augmented rows, ones
    [GROUP_HEADS, 1 or kv_heads, keys], are part of k_sb where D is 64, else a tile of their own."""

    heads: HeadShape
    length: int
    dtype: type

    def __post_init__(self):
        length, dtype = self.length, self.dtype
        d, kv_heads, keys = self.heads.head_dim, self.heads.kv_heads, whole_tiles(length) * P_MAX
        self.k_sb = tile_of((P_MAX, kv_heads, keys), dtype)
        self.v_sb = tile_of((P_MAX, keys // P_MAX, kv_heads, d + 1), dtype)
        nisa.memset(dst=self.v_sb[:, :, :, d : d + 1], value=1.0)
        if length < keys:  # the second pass takes whole tiles
            nisa.memset(dst=self.k_sb[:, :, length:keys], value=0.0)
        if d < P_MAX:  # the array's rows behind the features are idle
            self.augmented_sb = self.k_sb[d : d + GROUP_HEADS]
        else:
            self.augmented_sb = tile_of((GROUP_HEADS, 1, keys), dtype)
        nisa.memset(dst=self.augmented_sb, value=1.0)

    def append(self, position, tokens, qk_sb, column, v_sb):
        """Keep up to 128 tokens, the sequence's from ``position`` on: keys from a column of qk_sb
        on, where they lie behind the queries, and values [tokens, kv_heads * D]."""
        heads, d = self.heads, self.heads.head_dim
        for head in range(heads.kv_heads):
            stack, lanes = heads.place(head)
            keys_sb = qk_sb[lanes, heads.q_tiles + stack, nl.ds(column, tokens)]
            nisa.tensor_copy(dst=self.k_sb[0:d, head, nl.ds(position, tokens)], src=keys_sb)
        nisa.tensor_copy(dst=self.v_sb[0:tokens, position // P_MAX, :, 0:d], src=v_sb)

    def operand(self, head, slot, rows, start, keys):
        """Rows of a slot of the contraction [rows, keys], keys of a head from ``start`` on."""
        if slot == 0:
            return self.k_sb[0:rows, head, nl.ds(start, keys)]
        return self.augmented_sb[0:rows, 0, nl.ds(start, keys)]


class GroupAttention(nl.NKIObject):
    """Attention of a group: ``tokens`` of a sequence from ``position`` on, which are the columns of
    qk_sb from ``column`` on, in ``count`` query heads of a KV ``head`` from ``first`` on. @ SBUF:
    q_sb [128, slots, count, tokens], maxima_sb [tokens, count, spans of keys], rows_sb [tokens,
    count, 128]; ``sums``, each [tokens, heads, D + 1] @ PSUM."""

    keys: SequenceKeys
    layer: AttentionLayer
    triangle_sb: nl.NkiTensor
    later: Later
    qk_sb: nl.NkiTensor
    column: int
    position: int
    tokens: int
    head: int
    first: int
    rows_sb: nl.NkiTensor

    def __post_init__(self):
        heads, dtype = self.keys.heads, self.qk_sb.dtype
        self.visible = self.position + self.tokens
        self.count = self.rows_sb.shape[1]
        slots = len(contraction(heads.head_dim + GROUP_HEADS))
        passes = len(spans(self.visible, MOVING_MAX))
        self.q_sb = tile_of((P_MAX, slots, self.count, self.tokens), dtype)
        self.maxima_sb = tile_of((self.tokens, self.count, passes), dtype)
        self.sums = []
        self.augmented = 0  # the number of its augmented rows in Later

    def part(self, lanes):
        """The ``lanes`` of its tiles of qk_sb [lanes, count, tokens]."""
        stack, group = self.keys.heads.place(self.head)[0], self.keys.heads.group
        tiles = nl.ds(stack * group + self.first, self.count)
        return self.qk_sb[lanes, tiles, nl.ds(self.column, self.tokens)]

    def begin(self):
        """Copy the queries, without the other head of their tiles, to the rows of their keys."""
        d, lanes = self.keys.heads.head_dim, self.keys.heads.place(self.head)[1]
        queries_sb, engine = self.part(lanes), nisa.vector_engine
        nisa.tensor_copy(dst=self.q_sb[0:d, 0, :, :], src=queries_sb, engine=engine)

    def first_pass(self):
        """Steps: (query head, number of a span of up to 512 visible keys, its start, its keys)."""
        found, every = [], spans(self.visible, MOVING_MAX)
        for at in range(self.count):
            for n in range(len(every)):
                found.append((at, n, every[n][0], every[n][1]))
        return found

    def score(self, step):
        """Scores of a query head with a span of keys [tokens, keys], and their maxima."""
        at, n, start, keys = step
        tokens, layer, dtype = self.tokens, self.layer, self.q_sb.dtype
        scores_psum, scores_sb = psum_of((tokens, keys)), tile_of((tokens, keys), dtype)
        d = self.keys.heads.head_dim
        q_sb, k_sb = self.q_sb[0:d, 0, at, :], self.keys.operand(self.head, 0, d, start, keys)
        nisa.nc_matmul(dst=scores_psum, stationary=q_sb, moving=k_sb)
        last = start + keys == self.visible
        if last:  # the block's own keys: a token sees those up to itself
            diagonal_psum = scores_psum[:, keys - tokens : keys]
            eye_sb, triangle_sb = layer.identity_sb, self.triangle_sb[0:tokens, 0:tokens]
            eye_sb = eye_sb[0:tokens, 0:tokens]
            nisa.nc_matmul(dst=diagonal_psum, stationary=eye_sb, moving=triangle_sb)
        nisa.activation(dst=scores_sb, op=nl.copy, data=scores_psum)
        maximum_sb = self.maxima_sb[:, at, nl.ds(n, 1)]
        nisa.tensor_reduce(dst=maximum_sb, op=nl.maximum, data=scores_sb, axis=1)
        if last and at + 1 == self.count:
            columns_sb, maxima_sb = tile_of((tokens, self.count), dtype), self.maxima_sb
            nisa.tensor_reduce(dst=columns_sb, op=nl.maximum, data=maxima_sb, axis=2, negate=True)
            self.augmented = self.later.leave(self, ("augment", 0, columns_sb))

    def finish(self, rest):
        """Continue with results of other engines: see ``score``, ``run`` and ``divide``."""
        step, tile, left_sb = rest
        if step == "augment":
            self.augment(left_sb)
        elif step == "weigh":
            self.weigh(tile, left_sb)
        else:
            self.transpose(left_sb)

    def augment(self, columns_sb):
        """Augmented rows of the queries, of negated maxima in columns [tokens, count]: of each head
        its own, zero for the others. TensorE brings them to rows, 128 columns for all heads."""
        (tokens, count), identity_sb = columns_sb.shape, self.layer.identity_sb
        rows_psum, rows_sb = psum_of((count, tokens)), tile_of((count, tokens), self.q_sb.dtype)
        eye_sb = identity_sb[0:tokens, 0:tokens]
        nisa.nc_matmul(dst=rows_psum, stationary=columns_sb, moving=eye_sb)
        nisa.tensor_copy(dst=rows_sb, src=rows_psum)
        # every head gets all rows, times one at its own row and zero elsewhere
        slot, begin = divmod(self.keys.heads.head_dim, P_MAX)
        augmented_sb = self.q_sb[begin : begin + count, slot, :, :]
        every_sb = rows_sb.expand_dim(1).broadcast(1, count)
        mine_sb = identity_sb[0:count, 0:count].expand_dim(2).broadcast(2, tokens)
        nisa.tensor_tensor(dst=augmented_sb, data1=every_sb, data2=mine_sb, op=nl.multiply)

    def second_pass(self):
        """Work: tiles of 128 visible keys."""
        found = []
        for tile in range(whole_tiles(self.visible)):
            found.append((self, tile))
        return found

    def run(self, tile):
        """Compute exp(scale * (score - maximum)) of a tile of keys; values wait in Later."""
        self.later.settle(self.augmented)
        d, start = self.keys.heads.head_dim, tile * P_MAX
        shape = (P_MAX, self.count, self.tokens)
        scores_psum, weights_sb = psum_of(shape), tile_of(shape, self.q_sb.dtype)
        for part in contraction(d + self.count):
            slot, rows = part
            k_sb, q_sb = self.keys.operand(self.head, slot, rows, start, P_MAX), self.q_sb
            nisa.nc_matmul(dst=scores_psum, stationary=k_sb, moving=q_sb[0:rows, slot, :, :])
        zero_sb, scale = self.layer.zero_sb, score_scales(d)[1]
        nisa.activation(dst=weights_sb, op=nl.exp, data=scores_psum, bias=zero_sb, scale=scale)
        if start + P_MAX >= self.visible:  # a key behind a token may have an infinite weight
            pattern = [[0, self.count], [1, self.tokens]]  # it compares token - key with 0
            weights_sb = select(weights_sb, pattern, 0.0, nl.greater_equal, multiplier=-1)
        self.later.leave(self, ("weigh", tile, weights_sb))

    def weigh(self, tile, weights_sb):
        """Weights of a tile of keys times its values and ones into the sums."""
        start, columns = tile * P_MAX, self.keys.heads.head_dim + 1
        if tile == 0:
            for _ in range(self.count):
                self.sums.append(psum_of((self.tokens, columns)))
        keys = min(P_MAX, self.visible - start)
        values_sb = self.keys.v_sb[0:keys, tile, self.head, :]
        for at in range(self.count):
            part_sb = weights_sb[0:keys, at, :]
            nisa.nc_matmul(dst=self.sums[at], stationary=part_sb, moving=values_sb)
        if start + P_MAX >= self.visible:
            self.divide()

    def divide(self):
        """Divides by the sums of weights; behind the last head of a tile of qk_sb, leaves the
        contexts of all that it holds."""
        heads, d = self.keys.heads, self.keys.heads.head_dim
        lanes = heads.place(self.head)[1]
        for n in range(self.count):
            data, inverse_sb = self.sums[n][:, 0:d], tile_of((self.tokens, 1), FP32)
            nisa.reciprocal(dst=inverse_sb, data=self.sums[n][:, d : d + 1])
            out_sb = self.rows_sb[:, n, lanes]
            nisa.tensor_scalar(dst=out_sb, data=data, op0=nl.multiply, operand0=inverse_sb)
        if (self.head + 1) % heads.stack == 0 or self.head + 1 == heads.kv_heads:
            self.later.leave(self, ("transpose", 0, self.rows_sb))

    def transpose(self, rows_sb):
        """TensorE transposes the contexts of all KV heads of a tile of qk_sb at once; they take the
        place of their queries."""
        contexts_psum = transposes_of((P_MAX, self.count, self.tokens), self.qk_sb.dtype)
        for at in range(self.count):
            nisa.nc_transpose(dst=contexts_psum[:, at, :], data=rows_sb[:, at, :])
        nisa.tensor_copy(dst=self.part(slice(0, P_MAX)), src=contexts_psum)


# --- Blocks of a prompt ---------------------------------------------------------------------------
#
# While a block of tokens attends, TensorE multiplies the contexts of the block before it with the
# output's weight and projects the block behind it. Work is a list of (what has a method ``run``,
# its number), in the order in which it is issued.


class WeightPieces(nl.NKIObject):
    """A Linear that loads each piece of its weight when one of the piece's tiles is first asked
    for: (first, count) of each piece in ``spans``."""

    linear: Linear
    spans: list

    def __post_init__(self):
        self.loaded = [None] * len(self.spans)

    def piece(self, at):
        """The Piece that holds a tile of features."""
        n = 0
        while at >= self.spans[n][0] + self.spans[n][1]:
            n += 1
        if self.loaded[n] is None:
            self.loaded[n] = self.linear.load(self.spans[n][0], self.spans[n][1])
        return self.loaded[n]


def prompt_weights(layer, tokens):
    """[WeightPieces of Q, K and V, of the output] for passes of so many tokens: keys and values
    begin with half a piece, so that little waits for hidden states."""
    qkv, q_tiles, most = layer.qkv, layer.heads.q_tiles, BLOCK_PIECE_BYTES
    tile_bytes = 2 * qkv.k_tiles * P_MAX
    pieces = weight_pieces(q_tiles, tile_bytes, tokens, row_bytes=most)
    for span in weight_pieces(qkv.tiles - q_tiles, tile_bytes, tokens, row_bytes=most):
        pieces.append((q_tiles + span[0], span[1]))
    outputs = layer.out.pieces(tokens, last=True, row_bytes=most)
    return [WeightPieces(qkv, pieces), WeightPieces(layer.out, outputs)]


LENGTHS, SCALES = -2, -1  # a PromptBlock's work before its first tile


class PromptBlock(nl.NKIObject):
    """A Block under way: its Residual, later its Projection; the results qk_sb and v_sb of
    ``qkv_tiles``; the WeightPieces of both linear layers. Contexts take the place of their queries.
    ``rotated`` is the number under which its last rotation waits in Later."""

    block: Block
    layer: AttentionLayer
    residual: Residual
    qkv: WeightPieces
    out: WeightPieces
    later: Later

    def __post_init__(self):
        heads = self.layer.heads
        self.parts = []
        self.lengths = []
        self.rotated = 0
        self.projection = None
        for part in self.block.parts():
            self.parts.append((part[2], part[3]))
        dtype = self.layer.x_hbm.dtype
        qk_sb, v_sb = qkv_tiles(heads, self.block.count, self.parts, dtype)
        self.qk_sb = qk_sb
        self.v_sb = v_sb
        self.context_sb = self.qk_sb[:, 0 : heads.q_tiles, :]

    def projections(self):
        """Work: the norm of hidden states; a tile of keys, values or queries at a time."""
        found, q_tiles = [(self, LENGTHS), (self, SCALES)], self.layer.heads.q_tiles
        for at in range(self.layer.qkv.tiles):
            found.append((self, (q_tiles + at) % self.layer.qkv.tiles))
        return found

    def outputs(self):
        """Work: two tiles of the output at a time, numbered behind those of Q, K and V; of few
        tokens one step."""
        found, few = [], self.block.count <= P_MAX
        for at in range(0, 1 if few else self.layer.out.tiles, 2):
            found.append((self, self.layer.qkv.tiles + at))
        return found

    def run(self, at):
        """A step before the first tile; a tile of queries, keys or values; or two of the output."""
        tiles = self.layer.qkv.tiles
        if at < 0:
            self.prepare(at)
        elif at < tiles:
            piece = self.qkv.piece(at)
            left = self.projection.project(piece, at, self.qk_sb, self.v_sb, self.later)
            self.rotated = max(self.rotated, left)
        else:
            self.store_output(at - tiles)

    def prepare(self, step):
        """Hidden states [128, H/128, count] become a Projection."""
        given, layer, parts, count = self.residual, self.layer, self.parts, self.block.count
        if step == LENGTHS:
            given.add()
            self.lengths = [] if layer.norm is None else squared_lengths(given.x_sb, parts)
        else:
            scales = scales_of(self.lengths, layer.norm, parts, count)
            self.projection = layer.projection(given.x_sb, self.block, scales, parts)

    def store_output(self, first):
        """Two tiles of the output [128, 2, count], a pass of all tokens for each tile of contexts,
        stored together; of few tokens all tiles."""
        out, out_hbm, count = self.layer.out, self.layer.out_hbm, self.block.count
        if first == 0:
            self.later.settle_all()  # it finishes the last contexts
        if count <= P_MAX:
            store_product(out, [(self.context_sb, self.block)], out_hbm)
            return
        tiles = min(2, out.tiles - first)
        out_sb = tile_of((P_MAX, tiles, count), self.context_sb.dtype)
        for n in range(tiles):
            piece = self.out.piece(first + n)
            out_psum = piece.product((first + n - piece.first, 0, count), self.context_sb)
            nisa.tensor_copy(dst=out_sb[:, n, :], src=out_psum)
        nl.store(block_part(out_hbm, self.block, first, tiles), out_sb)

    def groups(self, sequences, triangle_sb):
        """GroupAttention of all its queries; KV heads of a tile of qk_sb follow each other.
        ``sequences`` are the SequenceKeys by number."""
        heads, found = self.layer.heads, []
        for part in self.block.parts():
            sequence, position, column, tokens = part
            for stacked in spans(heads.kv_heads, heads.stack):
                for members in spans(heads.group, GROUP_HEADS):
                    rows_sb = tile_of((tokens, members[1], P_MAX), self.qk_sb.dtype)
                    if stacked[1] < heads.stack:  # some lanes have no head
                        nisa.memset(dst=rows_sb, value=0.0)
                    for head in range(stacked[0], stacked[0] + stacked[1]):
                        group = GroupAttention(
                            sequences[sequence],
                            self.layer,
                            triangle_sb,
                            self.later,
                            self.qk_sb,
                            column,
                            position,
                            tokens,
                            head,
                            members[0],
                            rows_sb,
                        )
                        found.append(group)
        return found

    def store_keys(self, keys_hbm, values_hbm):
        """New keys and values into rows @ HBM."""
        for n in range(len(self.v_sb)):
            column, size = self.parts[n]
            rows = nl.ds(self.block.start + column, size)
            nl.store(values_hbm[rows, :], self.v_sb[n])
            nl.store(keys_hbm[rows, :], key_rows(self.qk_sb, column, size, self.layer.heads))


def run_each(work):
    """Run steps of work one after the other."""
    for each in work:
        each[0].run(each[1])


def take_turns(group, ready, work):
    """Run the first pass of a group, in turns with the second pass of the ``ready`` groups and with
    ``work``. The compiler grants PSUM in the order in which its tiles are first used."""
    group.begin()
    steps, second = group.first_pass(), []
    for other in ready:
        second = second + other.second_pass()
    for n in range(len(steps)):
        group.score(steps[n])
        run_each(step_share(second, n, len(steps)) + step_share(work, n, len(steps)))


class PromptAttention(nl.NKIObject):
    """State that the blocks of a prompt share: the layer, and new keys and values in rows @ HBM.
    ``sequences`` has the SequenceKeys by number."""

    layer: AttentionLayer
    keys_hbm: nl.NkiTensor
    values_hbm: nl.NkiTensor

    def __post_init__(self):
        self.triangle_sb = causal_mask(P_MAX, self.layer.x_hbm.dtype)
        self.later = Later()
        self.sequences = []

    def run(self, blocks):
        """Blocks that overlap; beside the first projections and the last output is nothing."""
        current, before, waiting = self.start(blocks[0]), None, []
        run_each(current.projections())
        for n in range(len(blocks)):
            self.keep_keys(current)
            behind = self.start(blocks[n + 1]) if n + 1 < len(blocks) else None
            waiting = self.attend(current, before, behind, waiting)
            current.store_keys(self.keys_hbm, self.values_hbm)
            before, current = current, behind
        for group in waiting:
            run_each(group.second_pass())
        run_each(before.outputs())

    def start(self, block):
        """The PromptBlock of a Block; its hidden states are loaded behind the first weights."""
        layer, weights = self.layer, prompt_weights(self.layer, block.count)
        weights[0].piece(layer.heads.q_tiles)
        given = Residual(layer.x_hbm, layer.delta_hbm, layer.stream_hbm, block)
        return PromptBlock(block, layer, given, weights[0], weights[1], self.later)

    def keep_keys(self, current):
        """Keys and values of a PromptBlock, for its own queries and those behind it."""
        self.later.settle(current.rotated)
        parts, qk_sb = current.block.parts(), current.qk_sb
        for n in range(len(parts)):
            sequence, position, column, tokens = parts[n]
            if position == 0:
                keys = SequenceKeys(self.layer.heads, current.block.length, qk_sb.dtype)
                self.sequences.append(keys)
            self.sequences[sequence].append(position, tokens, qk_sb, column, current.v_sb[n])

    def attend(self, current, before, behind, waiting):
        """Run the attention of a PromptBlock, in turns with the output of the block ``before`` and
        the projections of the block ``behind`` (None where there is none). ``waiting`` groups of
        the block before get their second pass; this block's last groups wait and are returned."""
        groups = current.groups(self.sequences, self.triangle_sb)
        projections = [] if behind is None else behind.projections()
        outputs, count = [] if before is None else before.outputs(), len(groups)
        lead = max(1, min(LEAD, count // 2))
        for n in range(count):
            ready = waiting[: max(0, len(waiting) - lead + 1)]
            waiting = waiting[len(ready) :] + [groups[n]]
            work = step_share(projections, n, count)
            if n >= lead:  # the block before has all its contexts
                work = work + step_share(outputs, n - lead, count - lead)
            take_turns(groups[n], ready, work)
        if count == lead:
            run_each(outputs)
        return waiting


# --- Decode attention -----------------------------------------------------------------------------
#
# The query heads of all sequences share the partitions of one tile of scores, as in llama.py's
# example. A sequence may have several new tokens here (models/step.py): its rows of scores are
# those of each token in turn.


def sequences_at_once(length, heads, dtype, tokens=1, room=TILE_CACHE_BYTES):
    """Sequences of a decode step over ``length`` keys that share a tile of scores."""
    runs, itemsize = cache_runs(length, P_MAX // heads.kv_heads)[1], bytes_of(dtype)
    # keys lie transposed, with a row of the mask; values lie as they came
    kept = length * (heads.stacks + 1) + 2 * runs * (heads.head_dim + 1)
    return max(1, min(P_MAX // (heads.q_heads * tokens), room // (itemsize * kept)))


class CachedSequences(nl.NKIObject):
    """The cache of ``count`` sequences from ``first`` on @ SBUF, and room for their new tokens,
    ``each`` of a sequence and T in all. k_sb [128, slots, keys + T]: transposed keys, slot b *
    stacks + s has the heads of stack s of sequence b, the new keys' columns are zero for other
    sequences. mask_sb [T, keys + T], added to scores. v_sb [kv_heads * lanes, count, tiles, D + 1]:
    values, the lanes of each head in turn, and ones."""

    first: int
    count: int
    each: int
    keys: int
    k_sb: nl.NkiTensor
    mask_sb: nl.NkiTensor
    v_sb: nl.NkiTensor

    def __post_init__(self):
        self.tokens = self.count * self.each

    def columns(self, sequence):
        """The new tokens of one of the sequences among all of the call."""
        return nl.ds((self.first + sequence) * self.each, self.each)


def head_runs(cache_hbm, sequence, head, runs):
    """The first keys or values of a head of a cache [B, kv_heads, L, D] @ HBM, as ``runs`` of
    ``cache_runs`` say -> [lanes, runs, D]."""
    lanes, each = runs
    return cache_hbm[sequence, head, 0 : lanes * each, :].reshape((lanes, each, cache_hbm.shape[3]))


def stack_keys(k_sb, rows_sb, first_slot, heads):
    """Transpose keys [lanes, kv_heads, tiles, D] @ SBUF into a sequence's slots of k_sb: as many
    tiles as share a PSUM bank, a stack of heads at once, which leave it together."""
    lanes, kv_heads, tiles, d = rows_sb.shape
    for stacked in spans(kv_heads, heads.stack):
        head, count = stacked
        features, slot = count * d, first_slot + heads.place(head)[0]
        for part in spans(tiles, MOVING_MAX // lanes):
            at, together = part
            keys_psum = transposes_of((features, together, lanes), rows_sb.dtype)
            for n in range(together):
                tile_sb = rows_sb[:, nl.ds(head, count), at + n, :]
                nisa.nc_transpose(dst=keys_psum[:, n, :], data=tile_sb)
            columns = nl.ds(at * lanes, together * lanes)
            nisa.tensor_copy(dst=k_sb[0:features, slot, columns], src=keys_psum)


def new_mask(count, each, dtype):
    """The mask [T, T] @ SBUF that is added to scores of ``each`` new tokens of ``count`` sequences
    among themselves: a token sees its own sequence up to itself."""
    tokens, hidden = count * each, masked(dtype)
    if each == 1:
        return select(filled((tokens, tokens), 0.0, dtype), [[-1, tokens]], hidden)
    # a token behind the last one of a column's sequence sees none of it
    pattern = [[-each, count], [0, each]]
    return select(causal_mask(tokens, dtype), pattern, hidden, nl.less, offset=-each)


def cached_sequences(keys_hbm, values_hbm, bias_hbm, first, count, heads, each=1):
    """Load the CachedSequences of a decode step with ``each`` new tokens a sequence. The caches @
    HBM are [B, kv_heads, L, D]; the bias [B, up to L] covers their first keys."""
    batch, kv_heads, room, d = keys_hbm.shape
    length, dtype, tokens = bias_hbm.shape[1], bias_hbm.dtype, count * each
    runs = cache_runs(length, P_MAX // kv_heads)
    lanes, tiles = runs
    partitions, new = kv_heads * lanes, nl.ds(length, tokens)
    k_sb = tile_of((P_MAX, count * heads.stacks, length + tokens), dtype)
    if heads.leaves_lanes():
        nisa.memset(dst=k_sb, value=0.0)
    for b in range(count):
        rows_sb = tile_of((lanes, kv_heads, tiles, d), keys_hbm.dtype)  # each row has tiles * D
        for head in range(kv_heads):
            nisa.dma_copy(dst=rows_sb[:, head], src=head_runs(keys_hbm, first + b, head, runs))
        stack_keys(k_sb, rows_sb, b * heads.stacks, heads)
    # values come when the keys' rows have left SBUF: one load brings a sequence where all of the
    # cache is read, as heads and lanes follow each other in HBM; GpSimdE appends the ones
    v_sb = filled((partitions, count, tiles, d + 1), 1.0, values_hbm.dtype)
    for b in range(count):
        if length == room:
            rows_sb = nl.load(values_hbm.reshape((batch, partitions, tiles, d))[first + b])
        else:
            rows_sb = tile_of((partitions, tiles, d), values_hbm.dtype)
            for head in range(kv_heads):
                part_sb = rows_sb[nl.ds(head * lanes, lanes)]
                nisa.dma_copy(dst=part_sb, src=head_runs(values_hbm, first + b, head, runs))
        nisa.tensor_copy(dst=v_sb[:, b, :, 0:d], src=rows_sb, engine=nisa.gpsimd_engine)
    mask_sb = tile_of((tokens, length + tokens), dtype)
    nisa.memset(dst=k_sb[:, :, new], value=0.0)
    if each == 1:
        nisa.dma_copy(dst=mask_sb[:, 0:length], src=bias_hbm[nl.ds(first, count), :])
    else:
        for b in range(count):
            row_hbm = bias_hbm[nl.ds(first + b, 1), :].broadcast(0, each)
            nisa.dma_copy(dst=mask_sb[nl.ds(b * each, each), 0:length], src=row_hbm)
    nisa.tensor_copy(dst=mask_sb[:, new], src=new_mask(count, each, dtype))
    return CachedSequences(first, count, each, length, k_sb, mask_sb, v_sb)


def decode_queries(qk_sb, cache, heads):
    """Queries of the sequences, block by block: [128, slots, rows] @ SBUF, and which rows are a
    token's, [T, rows]. Row t * q_heads + h belongs to head h of new token t."""
    group, slots, dtype = heads.group, cache.count * heads.stacks, qk_sb.dtype
    rows = cache.tokens * heads.q_heads
    q_sb = filled((P_MAX, slots, rows), 0.0, dtype)
    by_token_sb = q_sb.reshape((P_MAX, slots, cache.tokens, heads.q_heads))
    for b in range(cache.count):
        tokens = nl.ds(b * cache.each, cache.each)
        for kv_head in range(heads.kv_heads):
            stack, lanes = heads.place(kv_head)
            members, slot = nl.ds(kv_head * group, group), b * heads.stacks + stack
            queries_sb = qk_sb[lanes, nl.ds(stack * group, group), cache.columns(b)]
            placed_sb = by_token_sb[lanes, slot, tokens, members]
            nisa.tensor_copy(dst=placed_sb, src=queries_sb.permute((0, 2, 1)))
    pattern = [[-1, cache.tokens], [0, heads.q_heads]]
    return q_sb, select_equal(pattern, 0, (cache.tokens, rows), dtype)


def decode_scores(qk_sb, cache, heads):
    """Masked scores of all rows against cached and new keys [rows, keys + T] @ SBUF."""
    q_sb, which_sb = decode_queries(qk_sb, cache, heads)
    slots, rows, keys, stacks = q_sb.shape[1], q_sb.shape[2], cache.k_sb.shape[2], heads.stacks
    for b in range(cache.count):
        new = nl.ds(cache.keys + b * cache.each, cache.each)
        keys_sb = qk_sb[:, nl.ds(heads.q_tiles, stacks), cache.columns(b)]
        nisa.tensor_copy(dst=cache.k_sb[:, nl.ds(b * stacks, stacks), new], src=keys_sb)
    scores_sb = tile_of((rows, keys), q_sb.dtype)
    for span in spans(keys, MOVING_MAX):
        part, scores_psum = nl.ds(span[0], span[1]), psum_of((rows, span[1]))
        for slot in range(slots):
            keys_sb = cache.k_sb[:, slot, part]
            nisa.nc_matmul(dst=scores_psum, stationary=q_sb[:, slot, :], moving=keys_sb)
        nisa.nc_matmul(dst=scores_psum, stationary=which_sb, moving=cache.mask_sb[:, part])
        nisa.tensor_copy(dst=scores_sb[:, part], src=scores_psum)
    return scores_sb


def transposed_tiles(x_sb, tiles, width):
    """``tiles`` times [Q, width] @ SBUF, side by side -> [width, tiles, Q]: transposed, as many as
    share a PSUM bank taken out by one copy."""
    queries = x_sb.shape[0]
    out_sb = tile_of((width, tiles, queries), x_sb.dtype)
    for part in spans(tiles, MOVING_MAX // queries):
        at, count = part
        transposed_psum = transposes_of((width, count, queries), x_sb.dtype)
        for t in range(count):
            tile_sb = x_sb[:, nl.ds((at + t) * width, width)]
            nisa.nc_transpose(dst=transposed_psum[:, t, :], data=tile_sb)
        nisa.tensor_copy(dst=out_sb[:, nl.ds(at, count), :], src=transposed_psum)
    return out_sb


def spread_weights(weights_sb, cache, heads):
    """Weights of cached keys [rows, keys] @ SBUF -> [kv_heads * lanes, kv_heads, tiles, T, group].

    TensorE transposes them, lanes on partitions, and then copies each KV head's part to that head's
    lanes. Identities that are zero at other heads' lanes copy it.
    """
    partitions, tiles, count = cache.v_sb.shape[0], cache.v_sb.shape[2], cache.tokens
    kv_heads, group, dtype = heads.kv_heads, heads.group, weights_sb.dtype
    lanes = partitions // kv_heads
    transposed_sb = transposed_tiles(weights_sb, tiles, lanes)
    of_heads_sb = transposed_sb.reshape((lanes, tiles, count, kv_heads, group))
    width, shift = 2 * partitions - lanes, partitions - lanes
    place_sb = select_equal([[-1, width]], shift, (lanes, width), dtype)
    spread_sb = tile_of((partitions, kv_heads, tiles, count, group), dtype)
    for span in spans(tiles, MOVING_MAX // weights_sb.shape[0]):
        part = nl.ds(span[0], span[1])
        spread_psum = psum_of((partitions, kv_heads, span[1] * count * group))
        for head in range(kv_heads):
            window_sb = place_sb[:, nl.ds(shift - head * lanes, partitions)]
            head_sb = of_heads_sb[:, part, :, head, :]
            nisa.nc_matmul(dst=spread_psum[:, head, :], stationary=window_sb, moving=head_sb)
        nisa.tensor_copy(dst=spread_sb[:, :, part, :, :], src=spread_psum)
    return spread_sb


def new_weights(weights_sb, cache, heads):
    """Weights of the new keys [rows, T] @ SBUF, transposed -> [T, kv_heads, T, kv_heads, group],
    zero for the rows of other heads than the part's."""
    kv_heads, group, count, rows = heads.kv_heads, heads.group, cache.tokens, weights_sb.shape[0]
    transposed_psum = transposes_of((count, rows), weights_sb.dtype)
    nisa.nc_transpose(dst=transposed_psum, data=weights_sb[:, nl.ds(cache.keys, count)])
    spread_sb = filled((count, kv_heads, rows), 0.0, weights_sb.dtype)
    # [T, head, token, member of the head's group]: only the diagonal of parts and heads counts
    pattern = [[kv_heads * rows, count], [rows + group, kv_heads]]
    diagonal_sb = spread_sb.ap(pattern + [[heads.q_heads, count], [1, group]])
    of_heads_psum = transposed_psum.reshape((count, count, kv_heads, group))
    nisa.tensor_copy(dst=diagonal_sb, src=of_heads_psum.permute((0, 2, 1, 3)))
    return spread_sb.reshape((count, kv_heads, count, kv_heads, group))


def attend_cached(qk_sb, v_sb, cache, heads, context_sb):
    """Attention of some sequences' new tokens over their cache and themselves -> their columns of
    context_sb [128, tiles, T]; v_sb [T, kv_heads * D] are the new values."""
    count, d, group, kv_heads = cache.tokens, heads.head_dim, heads.group, heads.kv_heads
    dtype, scale, each, rows = v_sb.dtype, score_scales(d)[1], cache.each, []
    # softmax weights [T * q_heads, keys + T]: 512 keys move a pass, slots and mask apart
    scores_sb = decode_scores(qk_sb, cache, heads)
    max_sb, shape = tile_of((scores_sb.shape[0], 1), dtype), scores_sb.shape
    neg_max_sb, weights_sb = tile_of(max_sb.shape, FP32), tile_of(shape, dtype)
    nisa.tensor_reduce(dst=max_sb, op=nl.maximum, data=scores_sb, axis=1)
    nisa.tensor_scalar(dst=neg_max_sb, data=max_sb, op0=nl.multiply, operand0=-scale)
    nisa.activation(dst=weights_sb, op=nl.exp, data=scores_sb, bias=neg_max_sb, scale=scale)
    # the same weights with keys on partitions, like values: cached ones of all heads, and new ones
    spread_sb = spread_weights(weights_sb, cache, heads)
    new_sb = new_weights(weights_sb, cache, heads)
    new_values_sb = filled((count, kv_heads, d + 1), 1.0, dtype)
    nisa.tensor_copy(dst=new_values_sb[:, :, 0:d], src=v_sb.reshape((count, kv_heads, d)))
    # context of a sequence's tokens [q_heads * each, D + 1], rows by KV head, token and member of
    # its group: D + 1 columns of values move in a pass for each tile of 128 cached keys and each
    # head's new keys; it is divided by its last column and transposed
    contexts_psum = transposes_of((d, cache.count, kv_heads, each, group), dtype)
    for b in range(cache.count):
        tokens, rows_sb = nl.ds(b * each, each), tile_of((each * heads.q_heads, d), dtype)
        sums_psum = psum_of((each * heads.q_heads, d + 1))
        inverse_sb = tile_of((each * heads.q_heads, 1), FP32)
        for t in range(cache.v_sb.shape[2]):
            part_sb, values_sb = spread_sb[:, :, t, tokens, :], cache.v_sb[:, b, t, :]
            nisa.nc_matmul(dst=sums_psum, stationary=part_sb, moving=values_sb)
        for head in range(kv_heads):
            part_sb = new_sb[:, head, tokens, :, :].permute((0, 2, 1, 3))
            values_sb = new_values_sb[:, head, :]
            nisa.nc_matmul(dst=sums_psum, stationary=part_sb, moving=values_sb)
        data = sums_psum[:, 0:d]
        nisa.reciprocal(dst=inverse_sb, data=sums_psum[:, d : d + 1])
        nisa.tensor_scalar(dst=rows_sb, data=data, op0=nl.multiply, operand0=inverse_sb)
        rows.append(rows_sb)
    for b in range(cache.count):
        nisa.nc_transpose(dst=contexts_psum[:, b], data=rows[b])
    # [D, B, kv_heads, each, group] goes to the heads' lanes and tiles, all sequences at once
    for kv_head in range(kv_heads):
        stack, lanes = heads.place(kv_head)
        place_sb = context_sb[lanes, nl.ds(stack * group, group), nl.ds(cache.first * each, count)]
        contexts = contexts_psum[:, :, kv_head, :, :].permute((0, 3, 1, 2))
        nisa.tensor_copy(dst=place_sb, src=contexts)


def decode_step(layer, x_sb, caches, keys_hbm, values_hbm):
    """``attention_decode_kernel`` behind its residual sum x_sb [128, H/128, B], over the
    CachedSequences of all. New keys and values into rows @ HBM."""
    heads, batch, dtype, parts = layer.heads, x_sb.shape[2], x_sb.dtype, []
    tokens, shape = Block(0, batch, 1), (P_MAX, heads.q_tiles, batch)
    for cache in caches:
        parts.append((cache.first, cache.count))
    # queries and keys [128, tiles, B], values [B, kv_heads * D]: H/128 passes of 64 columns a tile
    # take a fifth of the time in which DMA brings its weights
    scales = norm_scales(x_sb, layer.norm, parts)
    pieces = layer.qkv.pieces(batch)
    qk_sb, v_sb = project_qkv(layer.projection(x_sb, tokens, scales, parts), layer.qkv, pieces)
    nl.store(keys_hbm, key_rows(qk_sb, 0, batch, heads))
    # context [128, tiles, B] while the first output weights arrive; a lane without a head is zero
    context_sb = filled(shape, 0.0, dtype) if heads.leaves_lanes() else tile_of(shape, dtype)
    for n in range(len(caches)):
        nl.store(values_hbm[nl.ds(parts[n][0], parts[n][1]), :], v_sb[n])
        attend_cached(qk_sb, v_sb[n], caches[n], heads, context_sb)
    store_product(layer.out, [(context_sb, tokens)], layer.out_hbm)


# --- MLP ------------------------------------------------------------------------------------------


class InnerTokens(nl.NKIObject):
    """A Block on its way through the MLP @ SBUF: hidden states [128, H/128, count], the scale of
    their norm [128, count], and the input of down [128, F/128, count]."""

    block: Block
    x_sb: nl.NkiTensor
    along_sb: nl.NkiTensor
    inner_sb: nl.NkiTensor

    def normed(self, piece, part):
        """A part of ``psum_parts`` of gate or up times the norm's scale @ SBUF."""
        out_psum, scale_sb = (
            piece.product(part, self.x_sb),
            self.along_sb[:, nl.ds(part[1], part[2])],
        )
        out_sb = tile_of(out_psum.shape, self.x_sb.dtype)
        nisa.tensor_tensor(dst=out_sb, data1=out_psum, data2=scale_sb, op=nl.multiply)
        return out_sb

    def gate(self, gate, up, part, zero_sb):
        """silu(gate) * up of that part of two Pieces."""
        tile, at, tokens = part
        gate_sb = self.normed(gate, part)
        silu_sb = tile_of(gate_sb.shape, self.x_sb.dtype)
        nisa.activation(dst=silu_sb, op=nl.silu, data=gate_sb, bias=zero_sb)
        inner = self.inner_sb[:, gate.first + tile, nl.ds(at, tokens)]
        nisa.tensor_tensor(dst=inner, data1=silu_sb, data2=self.normed(up, part), op=nl.multiply)


def gated_mlp(hidden, norm, gate, up, down, length):
    """``swiglu_mlp_kernel`` of three Linears; ``hidden`` are x, delta, their sum and the output @
    HBM. One pass over the weights for every ``token_chunk``."""
    x_hbm, delta_hbm, stream_hbm, out_hbm = hidden
    zero_sb, dtype = filled((P_MAX, 1), 0.0, FP32), x_hbm.dtype
    most = token_chunk(bytes_of(dtype) * (gate.tiles + gate.k_tiles))  # silu(gate) * up and x stay
    for blocks in grouped(token_blocks(x_hbm.shape[0], x_hbm.shape[1], length), most):
        # the first piece of gate and up [128, tiles, H/128, 128] is loaded before the hidden
        # states [128, H/128, count] of each block: TensorE multiplies their first features while
        # the others arrive
        pieces, passed, inner = gate.pieces(blocks[0].count), [], []
        gate_piece, up_piece = gate.load(0, pieces[0][1]), up.load(0, pieces[0][1])
        for block in blocks:
            x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
            along_sb = norm_scales(x_sb, norm, spans(block.count, P_MAX)).along_sb
            inner_sb = tile_of((P_MAX, gate.tiles, block.count), dtype)
            passed.append(InnerTokens(block, x_sb, along_sb, inner_sb))
            inner.append((inner_sb, block))
        # silu(gate) * up [128, F/128, count], features on partitions as down contracts them. A PSUM
        # bank takes H/128 passes of its tokens for each tile. Meanwhile DMA loads the next piece,
        # and VectorE and ScalarE finish the bank before
        for span in pieces:
            if span[0] > 0:
                gate_piece, up_piece = gate.load(span[0], span[1]), up.load(span[0], span[1])
            for tokens in passed:
                for part in psum_parts(span[1], tokens.block.count):
                    tokens.gate(gate_piece, up_piece, part, zero_sb)
        # down [128, H/128, count]: F/128 passes a tile; the last tiles' weights come alone
        store_product(down, inner, out_hbm)


# --- Kernels, in the order of the model -----------------------------------------------------------
#
# llama.py explains, under the same heading, the arguments that several kernels take. A kernel
# without a delta returns no sum.


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None):
    """Linear layer, after RMSNorm where ``norm`` is given: x [H, T] -> [T, N], type of x.

    The LM head: tokens are few and leave the device, so they come out in rows. N is whole tiles.
    """
    features, tokens, columns = x_hbm.shape[0], x_hbm.shape[1], weight_hbm.shape[1]
    linear = linear_of(weight_hbm, columns // hidden_tiles(x_hbm), features, "the weight")
    tiles = linear.tiles
    out_hbm = nl.ndarray((tokens, tiles * P_MAX), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    rows_hbm = out_hbm.reshape((tokens, P_MAX, tiles))
    for block in token_blocks(features, tokens, 1):
        # hidden states [128, H/128, T] and their norm's scale, some KiB, come before the weights
        x_sb, parts = residual_sum(x_hbm, None, x_hbm, block), spans(block.count, P_MAX)
        along_sb = norm_scales(x_sb, norm, parts).along_sb
        for span in parts:
            # pieces of the weights come one by one, at DMA's pace; VectorE scales their products
            # and takes them out with tokens outermost, so that each token has its own row
            start, count = span
            out_sb = tile_of((P_MAX, count, tiles), x_hbm.dtype)
            scale_sb = along_sb[:, nl.ds(start, count)]
            for one in linear.pieces(count, last=True):
                piece = linear.load(one[0], one[1])
                for part in psum_parts(one[1], count):
                    out_psum = piece.product((part[0], start, count), x_sb)
                    rows_sb = out_sb[:, :, one[0] + part[0]]
                    nisa.tensor_tensor(dst=rows_sb, data1=out_psum, data2=scale_sb, op=nl.multiply)
            # features lie in runs: a partition stores N/128 neighbours of a token in one row
            tokens_hbm = rows_hbm[nl.ds(block.start + start, count)]
            nisa.dma_copy(dst=tokens_hbm.permute((1, 0, 2)), src=out_sb)
    return out_hbm


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch
):
    """Everything between two all-reduces of a prefill: residual sum, norm, QKV, RoPE, causal flash
    attention of all new tokens (Dao et al. 2022), output projection.

    -> partial output [H, B * S], rotated keys and values [B * S, kv_heads * D], and x + delta.
    """
    tokens, length, dtype = x_hbm.shape[1], x_hbm.shape[1] // batch, x_hbm.dtype
    assert tokens == batch * length, f"{tokens} tokens are no {batch} sequences of one length"
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype=dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype=dtype, buffer=nl.shared_hbm)
    hidden = x_hbm, delta_hbm, stream_of(x_hbm, delta_hbm), out_hbm
    weights, tables = (qkv_w_hbm, out_w_hbm), (cos_hbm, sin_hbm)
    layer = AttentionLayer(hidden, norm, heads, weights, tables)
    prompt = PromptAttention(layer, keys_hbm, values_hbm)
    prompt.run(token_blocks(x_hbm.shape[0], tokens, length))
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else results + (layer.stream_hbm,)


@nki.jit
def attention_decode_kernel(
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
    heads,
):
    """Do the same for one new token per sequence: attention over the cache and the token itself.

    bias [B, L], keys in the order of ``cache_runs`` over P_MAX // kv_heads partitions. -> partial
    output [H, B], new keys (rotated) and values [B, kv_heads * D], and x + delta.
    """
    batch, dtype, caches = x_hbm.shape[1], x_hbm.dtype, []
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((batch, heads.kv_features), dtype=dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((batch, heads.kv_features), dtype=dtype, buffer=nl.shared_hbm)
    hidden = x_hbm, delta_hbm, stream_of(x_hbm, delta_hbm), out_hbm
    # hidden states [128, H/128, B], a few KiB, and the cache come before the weights: TensorE
    # transposes the cache's keys, 128 a pass, while the weights stream
    x_sb = residual_sum(x_hbm, delta_hbm, hidden[2], Block(0, batch, 1))
    for part in spans(batch, sequences_at_once(bias_hbm.shape[1], heads, dtype)):
        caches.append(cached_sequences(keys_hbm, values_hbm, bias_hbm, part[0], part[1], heads))
    weights, tables = (qkv_w_hbm, out_w_hbm), (cos_hbm, sin_hbm)
    layer = AttentionLayer(hidden, norm, heads, weights, tables)
    decode_step(layer, x_sb, caches, new_keys_hbm, new_values_hbm)
    results = out_hbm, new_keys_hbm, new_values_hbm
    return results if delta_hbm is None else results + (layer.stream_hbm,)


@nki.jit
def swiglu_mlp_kernel(x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, length=None):
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Gate, up [F, H] and down [H, F] are kernel weights; several sequences have ``length`` tokens
    each. -> partial output [H, T], and x + delta.
    """
    features, gate = x_hbm.shape[0], Linear(gate_hbm, hidden_tiles(x_hbm))
    up = linear_of(up_hbm, gate.tiles * P_MAX, features, "the weight of up")
    down = linear_of(down_hbm, features, gate.tiles * P_MAX, "the weight of down")
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    hidden = x_hbm, delta_hbm, stream_of(x_hbm, delta_hbm), out_hbm
    gated_mlp(hidden, norm, gate, up, down, x_hbm.shape[1] if length is None else length)
    return out_hbm if delta_hbm is None else (out_hbm, hidden[2])
