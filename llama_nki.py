"""Llama's kernels in the current kernel language (`nki`, SDK 2.29 and later).

A file of its own: llama.py, the submission, is written for SDK 2.21, and one text for both
languages would hide every instruction behind a helper. Algorithms, layouts and the order of work
are llama.py's, so that results are equal and estimated times on trn1 lie within 3 %
(tests/nki/test_llama_nki.py); docs/porting.md has construct beside construct. Read it from top to
bottom: sizes, tile helpers, projections, attention of a prompt, attention of a decode step, the
kernels. Python is what the compiler's parser takes: loops over one name, no comprehensions, classes
of fields and methods.

Axis letters:

    T  tokens of one call (batch times sequence)     H  hidden size, padded to whole tiles of 128
    K  contraction size of a product                 N  output features of a product
    D  head dimension, 64 or 128                     F  intermediate size of the MLP
    B  batch                                         L  keys of a cache

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Features lie on partitions from end to end:
weights are stationary and tokens move, so that nothing is transposed between a norm and an output
but softmax weights and contexts. Partition p of a hidden state holds the H/128 features from
p * H/128 on. Not here: quantised weights, biases and norms of heads, and several new tokens over a
cache; llama.py has them.
"""

import math

import nki
import nki.isa as nisa
import nki.language as nl

FP32 = nl.float32
P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
MOVING_MAX = 512  # free size of the moving operand; one PSUM bank of fp32

PIECE_BYTES = 16384  # per partition of a weight, loaded at once
BLOCK_PIECE_BYTES = 8192  # of attention, beside several blocks of tokens
LONG_PIECE_BYTES = 32768  # of few tokens, which leave more room
FEW_TOKENS = 64  # up to so many need no room for hidden states beside weights
LAST_PIECE_BYTES = 4096  # at the end of a kernel's weights: DMA wants rows of 2 KiB or more
SHORT_ROW_TOKENS = 32  # of which a tile's row is 64 bytes
SHORT_BLOCK = 256  # tokens that lie together in hidden states up to H of 2048
LONG_BLOCK = 384  # and beyond
WEIGHT_BYTES = 96 * 1024  # SBUF for weights of attention that stay for all blocks
TOKEN_CHUNK = 1024  # tokens per pass over a weight: from 340 on TensorE takes longer than DMA
CHUNK_BYTES = 112 * 1024  # SBUF per partition for what is kept of those tokens
CACHE_BYTES = 64 * 1024  # SBUF for the cache of a tile of sequences in a decode step
GROUP_HEADS = MOVING_MAX // P_MAX  # query heads of a group: 128 tokens of each fill a bank of PSUM
AUGMENTED = 1 + GROUP_HEADS  # rows behind the features of keys: the mask, and ones for each head
LEAD = 2  # groups between their two passes: no engine waits for what another one has just begun
STEPS_LATER = 4  # after which TensorE goes on with what other engines have made of its products


class Norm(nl.NKIObject):
    """Constants of an RMSNorm: the features that count (H is padded with zeros), and epsilon."""

    features: int
    eps: float


class HeadShape(nl.NKIObject):
    """Heads of one rank: ``group`` query heads share a KV head, ``stack`` KV heads a tile.

    Tile s * group + g of the queries holds the g-th query head of each KV head of stack s; tile s
    of the keys the KV heads of stack s. Where the last stack is not full, its lanes are zero.
    """

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

    def stack_of(self, kv_head):
        """The tile of a KV head's keys."""
        return kv_head // self.stack

    def lanes(self, kv_head):
        """Its partitions of that tile."""
        return nl.ds(kv_head % self.stack * self.head_dim, self.head_dim)

    def ends_stack(self, kv_head):
        """Whether it is the last one of its tile."""
        return (kv_head + 1) % self.stack == 0 or kv_head + 1 == self.kv_heads


# --- Sizes: plain arithmetic, done while the kernel is built --------------------------------------


def spans(length, most):
    """(start, size) of the pieces of ``most`` that cover ``length``; the last may be smaller."""
    found = []
    for start in range(0, length, most):
        found.append((start, min(most, length - start)))
    return found


def even_spans(length, most):
    """(start, size) of as few pieces of at most ``most`` as cover ``length``, as equal as can be.

    Sizes are multiples of 64, the columns that TensorE moves in the time of one.
    """
    size = math.ceil(length / math.ceil(length / most) / 64) * 64
    return spans(length, min(most, size))


def moved(pieces, by):
    """(start, size) of pieces, each start ``by`` further."""
    found = []
    for piece in pieces:
        found.append((piece[0] + by, piece[1]))
    return found


def step_share(items, step, steps):
    """The ``step``-th of ``steps`` equal parts of a list."""
    return items[len(items) * step // steps : len(items) * (step + 1) // steps]


def bytes_of(dtype):
    """Bytes of an element."""
    return 4 if dtype == nl.float32 else 2


def token_chunk(bytes_per_token):
    """Tokens of one pass over a weight, of which each keeps so many bytes per partition."""
    return max(P_MAX, min(TOKEN_CHUNK, CHUNK_BYTES // bytes_per_token // P_MAX * P_MAX))


def weight_pieces(tiles, k_tiles, tokens, last=False, row_bytes=PIECE_BYTES):
    """(first, count) of the tiles of output features that are loaded at once, of many tokens in
    rows of at most ``row_bytes``.

    Many tokens begin with half a piece: their hidden states arrive behind it. The ``last`` weights
    of a kernel end with LAST_PIECE_BYTES, and those before with at most half of the rest: TensorE
    needs a fifth of DMA's time for few tokens, so that little is left to multiply at the end.
    """
    few, tile_bytes = tokens <= FEW_TOKENS, 2 * k_tiles * P_MAX
    most = max(1, (LONG_PIECE_BYTES if few else row_bytes) // tile_bytes)
    tail = max(1, LAST_PIECE_BYTES // tile_bytes)
    if last and tiles > tail:
        rest = tiles - tail
        return spans(rest, min(most, math.ceil(rest / 2))) + [(rest, tail)]
    if few:
        return spans(tiles, most)
    first = min(tiles, max(1, most // 2))
    return [(0, first)] + moved(spans(tiles - first, most), first)


def on_gen2():
    return nisa.get_nc_version() == nisa.nc_version.gen2


def sums_a_tile(columns):
    """How many sums of so many columns share a tile @ PSUM: a bank's, but one on gen2, where the
    compiler of SDK 2.32 lost the first product of all others (foxl-ai/kiln, docs/neuron-notes.md).
    """
    return 1 if on_gen2() else max(1, MOVING_MAX // columns)


def psum_parts(tiles, tokens):
    """(first tile, tiles, first token, tokens) of the parts of a product that fill a PSUM tile."""
    found = []
    for columns in even_spans(tokens, MOVING_MAX):
        for rows in spans(tiles, sums_a_tile(columns[1])):
            found.append((rows[0], rows[1], columns[0], columns[1]))
    return found


def stored_together(pieces, tokens):
    """Pieces of a weight, grouped by what is stored at once of their results.

    Of many tokens every piece; of up to 128 the last piece is apart, so that little is left to
    store at the end; of up to 32 all at once: DMA takes as long for their rows as for 256 bytes.
    """
    if tokens > P_MAX:
        groups = []
        for piece in pieces:
            groups.append([piece])
        return groups
    if tokens > SHORT_ROW_TOKENS and len(pieces) > 1:
        return [pieces[:-1], pieces[-1:]]
    return [pieces]


class Block(nl.NKIObject):
    """Tokens that lie together in hidden states @ HBM: ``count`` from ``start`` on, of sequences of
    ``length`` tokens."""

    start: int
    count: int
    length: int

    def parts(self):
        """(sequence, position, column, tokens) of its tiles: up to 128 tokens of one sequence."""
        own, found = min(self.count, self.length), []
        for column in range(0, self.count, own):
            sequence, position = divmod(self.start + column, self.length)
            for part in spans(own, P_MAX):
                found.append((sequence, position + part[0], column + part[0], part[1]))
        return found


def token_blocks(features, tokens, length):
    """The Blocks of so many tokens, sequences of ``length``: several whole sequences, or whole
    tiles of one, as equal as can be.

    Rows of DMA are as long as a block is large, and what waits for a block waits for all of it.
    Weights of more than 2048 features do not stay in SBUF: they are read again for each block, and
    from 340 tokens on TensorE takes longer than DMA.
    """
    most, found = SHORT_BLOCK if features <= 2048 else LONG_BLOCK, []
    if length < most:
        for piece in spans(tokens, most // length * length):
            found.append(Block(piece[0], piece[1], length))
        return found
    size = math.ceil(length / math.ceil(length / most) / P_MAX) * P_MAX
    for first in range(0, tokens, length):
        for piece in spans(length, size):
            found.append(Block(first + piece[0], piece[1], length))
    return found


def grouped(blocks, most):
    """Lists of Blocks that follow each other, of at most so many tokens each."""
    found, tokens = [], most
    for block in blocks:
        if tokens + block.count > most:
            found.append([])
            tokens = 0
        found[-1].append(block)
        tokens += block.count
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


def turned_of(shape, dtype):
    """A tile @ PSUM for transposes: TensorE of gen2 writes fp32, later ones the data's type."""
    return nl.ndarray(shape, dtype=FP32 if on_gen2() else dtype, buffer=nl.psum)


def filled(shape, value, dtype):
    """A tile of one value @ SBUF."""
    made_sb = tile_of(shape, dtype)
    nisa.memset(dst=made_sb, value=value)
    return made_sb


def selected(shape, pattern, kept, value, dtype, compare=nl.equal, offset=0):
    """``kept`` where partition + pattern + offset compares with 0, else ``value`` @ SBUF.

    GpSimdE has nothing else to do; a constant would take its turn in the queues of DMA.
    """
    kept_sb, made_sb = filled(shape, kept, dtype), tile_of(shape, dtype)
    nisa.affine_select(
        dst=made_sb,
        pattern=pattern,
        offset=offset,
        channel_multiplier=1,
        on_true_tile=kept_sb,
        on_false_value=value,
        cmp_op=compare,
    )
    return made_sb


def masked(dtype):
    """What is added to scores that do not count: exp gives 0, and twice it is finite."""
    return -3.0e4 if dtype == nl.float16 else -1.5e38


def feature_tiles(weight_hbm, k_tiles):
    """Tiles of 128 output features of a kernel weight [128, N/128 * K/128 * 128]."""
    return weight_hbm.shape[1] // (k_tiles * P_MAX)


def feature_rows(x_hbm):
    """Tiles of 128 features of hidden states [H, T] @ HBM."""
    assert x_hbm.shape[0] % P_MAX == 0, f"{x_hbm.shape[0]} features, expected whole tiles of 128"
    return x_hbm.shape[0] // P_MAX


def check_weight(weight_hbm, features, k, name):
    """Refuse a kernel weight of other sizes than ``features`` from ``k``."""
    columns = math.ceil(features / P_MAX) * (k // P_MAX) * P_MAX
    expected = (P_MAX, columns)
    assert weight_hbm.shape == expected, f"{name} is {weight_hbm.shape}, expected {expected}"


def load_weight(weight_hbm, first, tiles, k_tiles):
    """Tiles of a kernel weight -> [128, tiles, k_tiles, 128] @ SBUF, one contiguous row each."""
    tiled_hbm = weight_hbm.reshape((P_MAX, feature_tiles(weight_hbm, k_tiles), k_tiles, P_MAX))
    return nl.load(tiled_hbm[:, nl.ds(first, tiles)])


def products(weight_sb, first, tiles, x_sb, start, tokens):
    """``tiles`` tiles of features of ``W @ x`` for a span of tokens -> [128, tiles, tokens] @ PSUM.

    The weights of 128 features are stationary and the tokens move: k_tiles passes of max(64,
    tokens) columns a tile.
    """
    acc_psum = psum_of((P_MAX, tiles, tokens))
    for tile in range(tiles):
        for k in range(x_sb.shape[1]):
            nisa.nc_matmul(
                dst=acc_psum[:, tile, :],
                stationary=weight_sb[:, first + tile, k, :],
                moving=x_sb[:, k, nl.ds(start, tokens)],
                accumulate=k > 0,
            )
    return acc_psum


def store_product(weight_hbm, passed, out_hbm):
    """``W @ x`` of ``passed``, (x_sb [128, k_tiles, count], Block), into out [N, T] @ HBM: one pass
    over the weights. Features lie in runs, so that each partition stores contiguous rows."""
    k_tiles, count = passed[0][0].shape[1], passed[0][0].shape[2]
    tiles = feature_tiles(weight_hbm, k_tiles)
    for group in stored_together(weight_pieces(tiles, k_tiles, count, last=True), count):
        begin, size = group[0][0], group[-1][0] + group[-1][1] - group[0][0]
        outs = []
        for one in passed:
            outs.append(tile_of((P_MAX, size, one[1].count), out_hbm.dtype))
        for piece in group:
            weight_sb = load_weight(weight_hbm, piece[0], piece[1], k_tiles)
            for n in range(len(passed)):
                for part in psum_parts(piece[1], passed[n][1].count):
                    tile, beside, at, tokens = part
                    out_psum = products(weight_sb, tile, beside, passed[n][0], at, tokens)
                    rows = nl.ds(piece[0] - begin + tile, beside)
                    nisa.tensor_copy(dst=outs[n][:, rows, nl.ds(at, tokens)], src=out_psum)
        for n in range(len(passed)):
            nl.store(block_part(out_hbm, passed[n][1], begin, size), outs[n])


# --- Residual stream and norm ---------------------------------------------------------------------


def block_part(x_hbm, block, tile, tiles):
    """Some tiles of features of a block of hidden states [H, T] @ HBM -> [128, tiles * count]: a
    partition's are contiguous."""
    k_tiles = feature_rows(x_hbm)
    rows_hbm = x_hbm.reshape((P_MAX, k_tiles * x_hbm.shape[1]))
    return rows_hbm[:, nl.ds(k_tiles * block.start + tile * block.count, tiles * block.count)]


def stream_of(x_hbm, delta_hbm):
    """Where x + delta goes @ HBM; without delta x itself."""
    if delta_hbm is None:
        return x_hbm
    return nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)


class Residual(nl.NKIObject):
    """x and delta of a block of tokens @ SBUF, to be added into x_sb [128, H/128 * count]:
    ``parts`` of both, and of the sum @ HBM. Without delta just x."""

    x_sb: nl.NkiTensor
    parts: list

    def __post_init__(self):
        self.added = 0

    def add(self, count):
        """Up to so many further parts of the sum, and their stores."""
        for part in self.parts[self.added : self.added + count]:
            part_sb, delta_sb, sum_hbm = part
            self.added += 1
            if delta_sb is None:
                continue
            nisa.tensor_tensor(dst=part_sb, data1=part_sb, data2=delta_sb, op=nl.add)
            nisa.dma_copy(dst=sum_hbm, src=part_sb)


def residual(x_hbm, delta_hbm, sum_hbm, block):
    """The Residual of a block, [H, T] @ HBM, on its way. Many tokens arrive in up to eight parts,
    so that what follows starts with one, in rows of 4 KiB."""
    k_tiles, count, parts = feature_rows(x_hbm), block.count, []
    x_sb = tile_of((P_MAX, k_tiles * count), x_hbm.dtype)
    each = k_tiles if count <= P_MAX else max(math.ceil(k_tiles / 8), 2048 // count)
    for piece in spans(k_tiles, each):
        first, tiles = piece
        part_sb, delta_sb = x_sb[:, nl.ds(first * count, tiles * count)], None
        nisa.dma_copy(dst=part_sb, src=block_part(x_hbm, block, first, tiles))
        if delta_hbm is not None:
            delta_sb = nl.load(block_part(delta_hbm, block, first, tiles))
        parts.append((part_sb, delta_sb, block_part(sum_hbm, block, first, tiles)))
    return Residual(x_sb, parts)


def residual_sum(x_hbm, delta_hbm, sum_hbm, block):
    """x + delta for a block of tokens, [H, T] @ HBM -> [128, H/128, count] @ SBUF, and stored."""
    given = residual(x_hbm, delta_hbm, sum_hbm, block)
    given.add(len(given.parts))
    return given.x_sb.reshape((P_MAX, feature_rows(x_hbm), block.count))


def squared_lengths(x_sb, start, tokens):
    """Sums of squares of up to 128 tokens -> [T, T] fp32 @ SBUF, on the diagonal of zeros.

    TensorE multiplies the tokens with themselves, exactly and in the columns of one product. Other
    tokens' products are selected away rather than multiplied by zero: they may overflow.
    """
    own = nl.ds(start, tokens)
    gram_psum = psum_of((tokens, tokens))
    for k in range(x_sb.shape[1]):
        own_sb = x_sb[:, k, own]
        nisa.nc_matmul(dst=gram_psum, stationary=own_sb, moving=own_sb, accumulate=k > 0)
    lengths_sb = tile_of((tokens, tokens), FP32)
    nisa.tensor_copy(dst=lengths_sb, src=gram_psum)
    if tokens == 1:
        return lengths_sb
    diagonal_sb = tile_of((tokens, tokens), FP32)
    nisa.affine_select(
        dst=diagonal_sb,
        pattern=[[-1, tokens]],  # row - column against 0
        channel_multiplier=1,
        on_true_tile=lengths_sb,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    return diagonal_sb


class Scales(nl.NKIObject):
    """1 / rms of tokens, fp32 @ SBUF: along the free axis, [128, T] with all rows equal, and on
    partitions, a list of [tokens, 1], one for each tile of tokens."""

    along_sb: nl.NkiTensor
    down_sb: list


def norm_scales(x_sb, norm, parts):
    """1 / sqrt(mean(x^2) + eps) of [128, H/128, T] @ SBUF -> Scales (Zhang and Sennrich 2019), ones
    where ``norm`` is None; ``parts`` are (first token, tokens).

    A norm's scale is one number per token, so it may wait until behind the product that reads the
    norm: W (x * gain / rms) = (W gain) x / rms. TensorE need not wait for it, and the gain is in
    the weights.
    """
    return scales_of(all_lengths(x_sb, norm, parts), norm, parts, x_sb.shape[2])


def all_lengths(x_sb, norm, parts):
    """``squared_lengths`` of each of the parts, none where ``norm`` is None."""
    lengths = []
    for part in parts:
        if norm is not None:
            lengths.append(squared_lengths(x_sb, part[0], part[1]))
    return lengths


def scales_of(lengths, norm, parts, tokens):
    """The Scales of tokens with such lengths."""
    shape, down_sb = (P_MAX, tokens), []
    if norm is None:
        for part in parts:
            down_sb.append(filled((part[1], 1), 1.0, FP32))
        return Scales(filled(shape, 1.0, FP32), down_sb)
    along_sb, scale = tile_of(shape, FP32), 1.0 / norm.features
    ones_sb, eps_sb = filled((P_MAX, P_MAX), 1.0, FP32), filled((P_MAX, 1), norm.eps, FP32)
    for n in range(len(parts)):
        start, size = parts[n]
        # along: a product with ones adds the columns up, on every partition
        total_psum = psum_of((P_MAX, size))
        nisa.nc_matmul(dst=total_psum, stationary=ones_sb[0:size, :], moving=lengths[n])
        along = along_sb[:, nl.ds(start, size)]
        nisa.activation(dst=along, op=nl.rsqrt, data=total_psum, bias=eps_sb, scale=scale)
        # down: VectorE adds up the rows, of which each partition has its own
        total_sb, root_sb = tile_of((size, 1), FP32), tile_of((size, 1), FP32)
        nisa.tensor_reduce(dst=total_sb, op=nl.add, data=lengths[n], axis=1)
        eps = eps_sb[0:size, :]
        nisa.activation(dst=root_sb, op=nl.rsqrt, data=total_sb, bias=eps, scale=scale)
        down_sb.append(root_sb)
    return Scales(along_sb, down_sb)


def times_scale(x_psum, along_sb, start, dtype):
    """Products [128, tiles, T] @ PSUM times the scale of their tokens -> the same @ SBUF: one
    instruction over all tiles, which reads the scale's row again for each."""
    out_sb = tile_of(x_psum.shape, dtype)
    row_sb = along_sb[:, nl.ds(start, x_psum.shape[2])]
    scale_sb = row_sb.expand_dim(1).broadcast(1, x_psum.shape[1])
    nisa.tensor_tensor(dst=out_sb, data1=x_psum, data2=scale_sb, op=nl.multiply)
    return out_sb


# --- Order of work --------------------------------------------------------------------------------


class Later(nl.NKIObject):
    """What TensorE goes on with when other engines have finished with its products.

    Engines take their instructions in the order in which they are written. So what follows a
    product of another engine's result is no part of a step, but is left here with a method
    ``finish``, and comes behind what STEPS_LATER others have left: TensorE has their products
    meanwhile.
    """

    def __post_init__(self):
        self.left, self.done = [], 0

    def leave(self, rest):
        """-> the number of this rest."""
        self.left.append(rest)
        number = len(self.left)
        self.settle(number - STEPS_LATER)
        return number

    def settle(self, number):
        """Finishes what was left up to this number."""
        while self.done < number:
            self.done += 1
            self.left[self.done - 1].finish()

    def settle_all(self):
        """The same of everything, and of what that leaves."""
        while self.done < len(self.left):
            self.settle(len(self.left))


# --- Queries, keys and values ---------------------------------------------------------------------


def swapped_halves(head_dim, dtype):
    """[128, 128] @ SBUF: a permutation that swaps the halves of each head in a tile of features."""
    half, heads = head_dim // 2, P_MAX // head_dim
    # a one where partition = head * D + half - second * half + lane, of column (head, second, lane)
    pattern = [[-head_dim, heads], [half, 2], [-1, half]]
    return selected((P_MAX, P_MAX), pattern, 1.0, 0.0, dtype, offset=-half)


class AttentionLayer(nl.NKIObject):
    """What the blocks of an attention kernel share: hidden states [H, T], delta and their sum @
    HBM, the partial output [H, T]; the norm, or None; tables of cos and sin [128, T]; the heads."""

    x_hbm: nl.NkiTensor
    delta_hbm: nl.NkiTensor
    stream_hbm: nl.NkiTensor
    out_hbm: nl.NkiTensor
    norm: Norm
    cos_hbm: nl.NkiTensor
    sin_hbm: nl.NkiTensor
    heads: HeadShape


def check_layer(layer, qkv_w_hbm, out_w_hbm):
    """Refuse weights and tables that do not belong to the hidden states and heads of a layer."""
    heads, features = layer.heads, layer.x_hbm.shape[0]
    columns = (heads.q_tiles + heads.stacks) * P_MAX + heads.kv_heads * heads.head_dim
    check_weight(qkv_w_hbm, columns, features, "the weight of QKV")
    check_weight(out_w_hbm, features, heads.q_tiles * P_MAX, "the weight of the output")
    expected = (P_MAX, layer.x_hbm.shape[1])
    for table_hbm in (layer.cos_hbm, layer.sin_hbm):
        assert table_hbm.shape == expected, f"a table is {table_hbm.shape}, expected {expected}"


class Projection(nl.NKIObject):
    """What the projections to queries, keys and values read of a block of tokens @ SBUF: x_sb [128,
    H/128, T], the ``scales`` of its norm, cos and sin [128, T] times these scales, the identity and
    the permutation that swaps the halves of each head [128, 128], zeros [128, 1], and ``parts``,
    (first token, tokens) of its tiles."""

    x_sb: nl.NkiTensor
    scales: Scales
    cos_sb: nl.NkiTensor
    sin_sb: nl.NkiTensor
    identity_sb: nl.NkiTensor
    swap_sb: nl.NkiTensor
    zero_sb: nl.NkiTensor
    parts: list
    heads: HeadShape


def projection(x_sb, scales, layer, first_token, parts):
    """The Projection of the tokens from ``first_token`` on, x_sb [128, H/128, T], with Scales."""
    columns, tables, dtype = nl.ds(first_token, x_sb.shape[2]), [], x_sb.dtype
    for table_hbm in (layer.cos_hbm, layer.sin_hbm):
        scaled_sb = tile_of(scales.along_sb.shape, FP32)
        table_sb = nl.load(table_hbm[:, columns])
        nisa.tensor_tensor(dst=scaled_sb, data1=table_sb, data2=scales.along_sb, op=nl.multiply)
        tables.append(scaled_sb)
    identity_sb = nl.shared_identity_matrix(P_MAX, dtype=dtype)
    swap_sb = swapped_halves(layer.heads.head_dim, dtype)
    zero_sb = filled((P_MAX, 1), 0.0, FP32)
    return Projection(
        x_sb, scales, tables[0], tables[1], identity_sb, swap_sb, zero_sb, parts, layer.heads
    )


def score_scales(head_dim):
    """(what queries are multiplied by, what scores are): together 1 / sqrt(D).

    A power of two (D = 64) rounds nothing and goes to the queries; others wait for the exponential,
    whose argument is fp32.
    """
    return (0.125, 1.0) if head_dim == 64 else (1.0, 1.0 / math.sqrt(head_dim))


class Rotation(nl.NKIObject):
    """Tile ``at`` of the query or key heads of the tokens from ``start`` on times cos and times sin
    [128, 2, tokens] @ SBUF, the two terms of its rotation, on their way into qk_sb[:, at]."""

    p: Projection
    terms_sb: nl.NkiTensor
    qk_sb: nl.NkiTensor
    at: int
    start: int

    def finish(self):
        """TensorE adds both terms, the second with the halves of each head exchanged. Queries are
        divided by sqrt(D) where that rounds nothing."""
        p, terms_sb = self.p, self.terms_sb
        scale = score_scales(p.heads.head_dim)[0] if self.at < p.heads.q_tiles else 1.0
        rotated_psum, columns = psum_of((P_MAX, terms_sb.shape[2])), terms_sb.shape[2]
        nisa.nc_matmul(dst=rotated_psum, stationary=p.identity_sb, moving=terms_sb[:, 0, :])
        nisa.nc_matmul(dst=rotated_psum, stationary=p.swap_sb, moving=terms_sb[:, 1, :])
        out_sb = self.qk_sb[:, self.at, nl.ds(self.start, columns)]
        nisa.activation(dst=out_sb, op=nl.copy, data=rotated_psum, bias=p.zero_sb, scale=scale)


def rotation(p, weight_sb, tile, qk_sb, at, start, size):
    """The Rotation of tile ``at`` of a span of tokens: VectorE multiplies whole rows of its product
    by cos and sin."""
    columns, terms_sb = nl.ds(start, size), tile_of((P_MAX, 2, size), p.x_sb.dtype)
    x_psum = products(weight_sb, tile, 1, p.x_sb, start, size)
    cos_sb, sin_sb = p.cos_sb[:, columns], p.sin_sb[:, columns]
    nisa.tensor_tensor(dst=terms_sb[:, 0, :], data1=x_psum, data2=cos_sb, op=nl.multiply)
    nisa.tensor_tensor(dst=terms_sb[:, 1, :], data1=x_psum, data2=sin_sb, op=nl.multiply)
    return Rotation(p, terms_sb, qk_sb, at, start)


def value_tile(p, weight_sb, tile, start, v_sb):
    """A tile of features of V of every tile of tokens into the columns from ``start`` on.

    Tokens are stationary here: they land on partitions, where the sums over keys contract them.
    """
    width = min(P_MAX, v_sb[0].shape[1] - start)
    for n in range(len(p.parts)):
        first, size = p.parts[n]
        acc_psum = psum_of((size, width))
        for k in range(p.x_sb.shape[1]):
            nisa.nc_matmul(
                dst=acc_psum,
                stationary=p.x_sb[:, k, nl.ds(first, size)],
                moving=weight_sb[:, tile, k, 0:width],
                accumulate=k > 0,
            )
        nisa.tensor_scalar(
            dst=v_sb[n][:, nl.ds(start, width)],
            data=acc_psum,
            op0=nl.multiply,
            operand0=p.scales.down_sb[n],
        )


def qkv_tiles(heads, tokens, parts, dtype):
    """Tiles for what is projected @ SBUF: qk_sb [128, query tiles then key tiles, T], and one tile
    [tokens, kv_heads * D] of values per tile of tokens."""
    v_sb = []
    for part in parts:
        v_sb.append(tile_of((part[1], heads.kv_heads * heads.head_dim), dtype))
    return tile_of((P_MAX, heads.q_tiles + heads.stacks, tokens), dtype), v_sb


def project_qkv(p, qkv_w_hbm):
    """Q, K and V of a few tokens -> the tiles of ``qkv_tiles``, queries and keys rotated."""
    k_tiles, tokens = p.x_sb.shape[1], p.x_sb.shape[2]
    qk_sb, v_sb = qkv_tiles(p.heads, tokens, p.parts, p.x_sb.dtype)
    rotated = p.heads.q_tiles + p.heads.stacks
    for piece in weight_pieces(feature_tiles(qkv_w_hbm, k_tiles), k_tiles, tokens):
        first, count = piece
        weight_sb = load_weight(qkv_w_hbm, first, count, k_tiles)
        for tile in range(count):
            if first + tile < rotated:
                rotation(p, weight_sb, tile, qk_sb, first + tile, 0, tokens).finish()
            else:
                value_tile(p, weight_sb, tile, (first + tile - rotated) * P_MAX, v_sb)
    return qk_sb, v_sb


def key_rows(qk_sb, start, tokens, heads):
    """Keys of a span, behind the queries of qk_sb -> rows [tokens, kv_heads * D] @ SBUF for the
    cache."""
    d = heads.head_dim
    rows_sb = tile_of((tokens, heads.kv_heads * d), qk_sb.dtype)
    for stacked in spans(heads.kv_heads, heads.stack):
        first, count = stacked
        keys_sb = qk_sb[0 : count * d, heads.q_tiles + heads.stack_of(first), nl.ds(start, tokens)]
        rows_psum = turned_of((tokens, count * d), qk_sb.dtype)
        nisa.nc_transpose(dst=rows_psum, data=keys_sb)
        nisa.tensor_copy(dst=rows_sb[:, nl.ds(first * d, count * d)], src=rows_psum)
    return rows_sb


def negated_maximum(scores_sb, scale):
    """The negated maximum of rows of scores [Q, keys] @ SBUF times ``scale`` -> [Q, 1].

    VectorE compares two bf16 numbers a cycle where the result is bf16, too: it is one of them.
    """
    neg_max_sb = tile_of((scores_sb.shape[0], 1), scores_sb.dtype)
    nisa.tensor_reduce(dst=neg_max_sb, op=nl.maximum, data=scores_sb, axis=1, negate=True)
    if scale == 1.0:
        return neg_max_sb
    scaled_sb = tile_of(neg_max_sb.shape, FP32)
    nisa.tensor_scalar(dst=scaled_sb, data=neg_max_sb, op0=nl.multiply, operand0=scale)
    return scaled_sb


def divide(out_sb, sums_psum, head_dim):
    """Weighted values [Q, D] by the sum of their weights, the column behind, into ``out_sb``."""
    inverse_sb = tile_of((sums_psum.shape[0], 1), FP32)
    nisa.reciprocal(dst=inverse_sb, data=sums_psum[:, head_dim : head_dim + 1])
    values_psum = sums_psum[:, 0:head_dim]
    nisa.tensor_scalar(dst=out_sb, data=values_psum, op0=nl.multiply, operand0=inverse_sb)


# --- Attention of a prompt ------------------------------------------------------------------------
#
# The algorithm and its example, with what lies on partitions at each step, are those of llama.py
# under the same heading, and so are the names. A group is up to 128 tokens of a sequence in up to
# four query heads that share a KV head. It passes twice over its visible keys: the first pass finds
# each query's maximum, which stands in augmented rows behind the features; the second multiplies
# these with ones behind the features of keys, so that exp leaves weights with keys on partitions.


class SequenceKeys(nl.NKIObject):
    """Keys and values of a sequence @ SBUF, filled block by block: k_sb [128, kv_heads, keys] and
    v_sb [128, keys / 128, kv_heads, D + 1], whole tiles of 128 keys. Augmented rows [AUGMENTED, 1
    or kv_heads, keys] are part of k_sb where D is 64, a tile of their own where it is 128.
    ``padded``: their first row hides keys."""

    heads: HeadShape
    k_sb: nl.NkiTensor
    v_sb: nl.NkiTensor
    augmented_sb: nl.NkiTensor
    padded: bool

    def append(self, position, tokens, qk_sb, column, v_sb):
        """Keep up to 128 tokens, the sequence's from ``position`` on: keys from a column of qk_sb
        on, where they lie behind the queries, and values [tokens, kv_heads * D]."""
        heads, d = self.heads, self.heads.head_dim
        for head in range(heads.kv_heads):
            tile, columns = heads.q_tiles + heads.stack_of(head), nl.ds(column, tokens)
            own_sb = self.k_sb[0:d, head, nl.ds(position, tokens)]
            nisa.tensor_copy(dst=own_sb, src=qk_sb[heads.lanes(head), tile, columns])
        nisa.tensor_copy(dst=self.v_sb[0:tokens, position // P_MAX, :, 0:d], src=v_sb)

    def operand(self, head, slot, rows, start, keys):
        """Rows of a slot of the contraction [rows, keys], keys of a head from ``start`` on."""
        if slot == 0:
            return self.k_sb[0:rows, head, nl.ds(start, keys)]
        return self.augmented_sb[0:rows, 0, nl.ds(start, keys)]


def sequence_keys(length, heads, dtype, bias_hbm):
    """SequenceKeys without keys yet. bias [1, length] @ HBM is ``masked`` for keys of left padding,
    else 0; None: no padding."""
    d, kv_heads, tiles = heads.head_dim, heads.kv_heads, math.ceil(length / P_MAX)
    k_sb = tile_of((P_MAX, kv_heads, tiles * P_MAX), dtype)
    v_sb = tile_of((P_MAX, tiles, kv_heads, d + 1), dtype)
    nisa.memset(dst=v_sb[:, :, :, d : d + 1], value=1.0)
    if length < tiles * P_MAX:  # the second pass takes whole tiles
        nisa.memset(dst=k_sb[:, :, length : tiles * P_MAX], value=0.0)
    if d < P_MAX:
        augmented_sb, copies = k_sb[d : d + AUGMENTED], kv_heads
    else:
        augmented_sb, copies = tile_of((AUGMENTED, 1, tiles * P_MAX), dtype), 1
    nisa.memset(dst=augmented_sb, value=1.0)
    nisa.memset(dst=augmented_sb[0:1], value=0.0)
    if bias_hbm is not None:
        for head in range(copies):
            nisa.dma_copy(dst=augmented_sb[0:1, head, 0:length], src=bias_hbm)
    return SequenceKeys(heads, k_sb, v_sb, augmented_sb, bias_hbm is not None)


def contraction(rows):
    """(slot, rows) of the products that contract so many rows of features and augmented ones."""
    found = []
    for piece in spans(rows, P_MAX):
        found.append((piece[0] // P_MAX, piece[1]))
    return found


class Constants(nl.NKIObject):
    """Tiles that all groups read: zeros [128, 1] fp32, the identity [128, 128], the triangle of 128
    tokens with themselves [128, 128], and which augmented rows are a head's, the first and its own,
    [AUGMENTED, GROUP_HEADS] fp32."""

    zero_sb: nl.NkiTensor
    eye_sb: nl.NkiTensor
    triangle_sb: nl.NkiTensor
    own_sb: nl.NkiTensor


def prompt_constants(dtype):
    """Constants, made on chip: a load would take its turn in the queues of DMA."""
    eye_sb = nl.shared_identity_matrix(P_MAX, dtype=dtype)
    pattern, visible = [[-1, P_MAX]], nl.greater_equal
    triangle_sb = selected((P_MAX, P_MAX), pattern, 0.0, masked(dtype), dtype, visible)
    own_sb = selected((AUGMENTED, GROUP_HEADS), [[-1, GROUP_HEADS]], 1.0, 0.0, FP32, offset=-1)
    nisa.memset(dst=own_sb[0:1, :], value=1.0)
    return Constants(filled((P_MAX, 1), 0.0, FP32), eye_sb, triangle_sb, own_sb)


class GroupAttention(nl.NKIObject):
    """Attention of a group: ``tokens`` columns of qk_sb from ``column`` on, the sequence's tokens
    from ``position`` on, in ``count`` query heads from ``first`` on of those of a KV ``head``.

    q_sb [128, slots, count, tokens] and maxima_sb [tokens, count, spans of keys] @ SBUF; sums, each
    [tokens, heads, D + 1] fp32 @ PSUM, of as many heads as share a tile; rows_sb [tokens, count,
    128] @ SBUF, one for the KV heads of a tile of qk_sb.
    """

    keys: SequenceKeys
    constants: Constants
    later: Later
    qk_sb: nl.NkiTensor
    column: int
    position: int
    tokens: int
    head: int
    first: int
    count: int
    rows_sb: nl.NkiTensor

    def __post_init__(self):
        heads, dtype, self.visible = self.keys.heads, self.qk_sb.dtype, self.position + self.tokens
        slots = len(contraction(heads.head_dim + AUGMENTED))
        passes = len(spans(self.visible, MOVING_MAX))
        self.q_sb = tile_of((P_MAX, slots, self.count, self.tokens), dtype)
        self.maxima_sb = tile_of((self.tokens, self.count, passes), dtype)
        self.sums, self.augmented = [], 0  # the number of what is left of its augmented rows

    def part(self, lanes):
        """These partitions of its tiles of qk_sb [lanes, count, tokens]."""
        heads = self.keys.heads
        tiles = nl.ds(heads.stack_of(self.head) * heads.group + self.first, self.count)
        return self.qk_sb[lanes, tiles, nl.ds(self.column, self.tokens)]

    def begin(self):
        """Queries apart from the other head of their tiles, in the rows of its keys."""
        d, lanes = self.keys.heads.head_dim, self.keys.heads.lanes(self.head)
        own_sb, engine = self.part(lanes), nisa.vector_engine
        nisa.tensor_copy(dst=self.q_sb[0:d, 0, :, :], src=own_sb, engine=engine)
        if self.keys.padded:  # the first pass contracts the mask, too
            slot, row = divmod(d, P_MAX)
            nisa.memset(dst=self.q_sb[row : row + 1, slot, :, :], value=1.0)

    def first_pass(self):
        """Steps: (query head, number of a span of up to 512 visible keys, its start, its keys)."""
        found, pieces = [], spans(self.visible, MOVING_MAX)
        for at in range(self.count):
            for n in range(len(pieces)):
                found.append((at, n, pieces[n][0], pieces[n][1]))
        return found

    def score(self, step):
        """Scores of a query head with a span of keys [tokens, keys], and their maxima."""
        at, n, start, keys = step
        tokens, c, dtype = self.tokens, self.constants, self.q_sb.dtype
        scores_psum, scores_sb = psum_of((tokens, keys)), tile_of((tokens, keys), dtype)
        for part in contraction(self.keys.heads.head_dim + int(self.keys.padded)):
            slot, rows = part
            q_sb = self.q_sb[0:rows, slot, at, :]
            k_sb = self.keys.operand(self.head, slot, rows, start, keys)
            nisa.nc_matmul(dst=scores_psum, stationary=q_sb, moving=k_sb)
        last = start + keys == self.visible
        if last:  # its own keys, of which a token sees those up to itself
            own_psum, triangle_sb = scores_psum[:, keys - tokens : keys], c.triangle_sb
            eye_sb, triangle_sb = c.eye_sb[0:tokens, 0:tokens], triangle_sb[0:tokens, 0:tokens]
            nisa.nc_matmul(dst=own_psum, stationary=eye_sb, moving=triangle_sb)
        zero_sb = c.zero_sb[0:tokens, :]
        nisa.activation(dst=scores_sb, op=nl.copy, data=scores_psum, bias=zero_sb)
        found_sb = self.maxima_sb[:, at, nl.ds(n, 1)]
        nisa.tensor_reduce(dst=found_sb, op=nl.maximum, data=scores_sb, axis=1)
        if last and at + 1 == self.count:
            columns_sb = filled((tokens, 1 + self.count), 1.0, dtype)
            maxima_sb, lowest_sb = self.maxima_sb, columns_sb[:, nl.ds(1, self.count)]
            nisa.tensor_reduce(dst=lowest_sb, op=nl.maximum, data=maxima_sb, axis=2, negate=True)
            self.augmented = self.later.leave(AugmentedRows(self, columns_sb))

    def second_pass(self):
        """Work: tiles of 128 visible keys."""
        found = []
        for tile in range(math.ceil(self.visible / P_MAX)):
            found.append((self, tile))
        return found

    def run(self, tile):
        """exp(scale * (score - maximum)) of a tile of keys; what they weigh is left for later."""
        self.later.settle(self.augmented)
        d, start = self.keys.heads.head_dim, tile * P_MAX
        shape = (P_MAX, self.count, self.tokens)
        scores_psum, weights_sb = psum_of(shape), tile_of(shape, self.q_sb.dtype)
        for part in contraction(d + 1 + self.count):
            slot, rows = part
            k_sb, q_sb = self.keys.operand(self.head, slot, rows, start, P_MAX), self.q_sb
            nisa.nc_matmul(dst=scores_psum, stationary=k_sb, moving=q_sb[0:rows, slot, :, :])
        zero_sb, scale = self.constants.zero_sb, score_scales(d)[1]
        nisa.activation(dst=weights_sb, op=nl.exp, data=scores_psum, bias=zero_sb, scale=scale)
        if start + P_MAX >= self.visible:  # weights of keys behind a token may be infinite
            nisa.affine_select(
                dst=weights_sb,
                pattern=[[0, self.count], [1, self.tokens]],  # token - key against 0
                channel_multiplier=-1,
                on_true_tile=weights_sb,
                on_false_value=0.0,
                cmp_op=nl.greater_equal,
            )
        self.later.leave(WeightedValues(self, tile, weights_sb))

    def add(self, tile, weights_sb):
        """Weights of a tile of keys times its values and ones into the sums; behind the last tile
        contexts leave them."""
        start, each = tile * P_MAX, sums_a_tile(self.keys.heads.head_dim + 1)
        if tile == 0:
            for part in spans(self.count, each):
                self.sums.append(psum_of((self.tokens, part[1], self.keys.heads.head_dim + 1)))
        keys = min(P_MAX, self.visible - start)
        values_sb = self.keys.v_sb[0:keys, tile, self.head, :]
        for at in range(self.count):
            own_psum, own_sb = self.sums[at // each][:, at % each, :], weights_sb[0:keys, at, :]
            nisa.nc_matmul(dst=own_psum, stationary=own_sb, moving=values_sb)
        if start + P_MAX >= self.visible:
            self.divide(each)

    def divide(self, each):
        """Divides by the sums of weights; behind the last head of a tile of qk_sb, leaves the
        contexts of all that it holds."""
        heads, d = self.keys.heads, self.keys.heads.head_dim
        for n in range(len(self.sums)):
            sums_psum = self.sums[n]
            inverse_sb = tile_of(sums_psum.shape[0:2], FP32)
            nisa.reciprocal(dst=inverse_sb, data=sums_psum[:, :, d])
            for at in range(sums_psum.shape[1]):
                nisa.tensor_scalar(
                    dst=self.rows_sb[:, n * each + at, heads.lanes(self.head)],
                    data=sums_psum[:, at, 0:d],
                    op0=nl.multiply,
                    operand0=inverse_sb[:, nl.ds(at, 1)],
                )
        if heads.ends_stack(self.head):
            self.later.leave(Contexts(self))


class AugmentedRows(nl.NKIObject):
    """Columns [tokens, 1 + count] @ SBUF of a group, ones and the negated maxima of each head, on
    their way into the augmented rows of its queries."""

    group: GroupAttention
    columns_sb: nl.NkiTensor

    def finish(self):
        """A product with the identity, 128 columns for all heads, brings them from partitions to
        rows; ScalarE copies these to each head's queries, zeros for those of others."""
        group, c = self.group, self.group.constants
        tokens, rows = self.columns_sb.shape
        turned_psum, turned_sb = psum_of((rows, tokens)), tile_of((rows, tokens), group.q_sb.dtype)
        eye_sb = c.eye_sb[0:tokens, 0:tokens]
        nisa.nc_matmul(dst=turned_psum, stationary=self.columns_sb, moving=eye_sb)
        nisa.tensor_copy(dst=turned_sb, src=turned_psum)
        slot, begin = divmod(group.keys.heads.head_dim, P_MAX)
        for at in range(group.count):
            nisa.activation(
                dst=group.q_sb[begin : begin + rows, slot, at, :],
                op=nl.copy,
                data=turned_sb,
                bias=c.zero_sb[0:rows, :],
                scale=c.own_sb[0:rows, nl.ds(at, 1)],
            )


class WeightedValues(nl.NKIObject):
    """Weights [128 keys, count, tokens] @ SBUF of a group, on their way to its sums."""

    group: GroupAttention
    tile: int
    weights_sb: nl.NkiTensor

    def finish(self):
        self.group.add(self.tile, self.weights_sb)


class Contexts(nl.NKIObject):
    """Contexts in rows_sb of a group, of all heads that share tiles of qk_sb, on their way to the
    places of their queries."""

    group: GroupAttention

    def finish(self):
        """TensorE transposes those of all KV heads at once."""
        group = self.group
        turned_psum = turned_of((P_MAX, group.count, group.tokens), group.qk_sb.dtype)
        for at in range(group.count):
            nisa.nc_transpose(dst=turned_psum[:, at, :], data=group.rows_sb[:, at, :])
        nisa.tensor_copy(dst=group.part(slice(0, P_MAX)), src=turned_psum)


# --- Blocks of a prompt ---------------------------------------------------------------------------
#
# While a block of tokens attends, TensorE multiplies the contexts of the block before it with the
# output's weight and projects the block behind it. Work is a list of (what has a method ``run``,
# its argument), in the order in which it is issued.


def run_all(work):
    """Work that nothing else is beside."""
    for each in work:
        each[0].run(each[1])


class Pieces(nl.NKIObject):
    """A kernel weight in SBUF, loaded piece by piece, (first, count) of tiles, where a tile is
    first asked for."""

    weight_hbm: nl.NkiTensor
    k_tiles: int
    pieces: list

    def __post_init__(self):
        self.tiles = feature_tiles(self.weight_hbm, self.k_tiles)
        self.loaded = [None] * len(self.pieces)

    def tile(self, at):
        """(the piece that holds a tile of output features, the tile's place in it)."""
        n = 0
        while at >= self.pieces[n][0] + self.pieces[n][1]:
            n += 1
        first, count = self.pieces[n]
        if self.loaded[n] is None:
            self.loaded[n] = load_weight(self.weight_hbm, first, count, self.k_tiles)
        return self.loaded[n], at - first


def attention_weights(layer, qkv_w_hbm, out_w_hbm, tokens):
    """Pieces of both weights for passes of so many tokens: keys and values begin with half a piece,
    so that little waits for hidden states."""
    k_tiles, q_tiles = feature_rows(layer.x_hbm), layer.heads.q_tiles
    tiles, out_tiles = feature_tiles(qkv_w_hbm, k_tiles), feature_tiles(out_w_hbm, q_tiles)
    queries = weight_pieces(q_tiles, k_tiles, tokens, row_bytes=BLOCK_PIECE_BYTES)
    others = weight_pieces(tiles - q_tiles, k_tiles, tokens, row_bytes=BLOCK_PIECE_BYTES)
    outputs = weight_pieces(out_tiles, q_tiles, tokens, last=True, row_bytes=BLOCK_PIECE_BYTES)
    qkv = Pieces(qkv_w_hbm, k_tiles, queries + moved(others, q_tiles))
    return [qkv, Pieces(out_w_hbm, q_tiles, outputs)]


class Arrival(nl.NKIObject):
    """Hidden states of a Block on their way to a Projection, ``p``."""

    block: Block
    layer: AttentionLayer
    residual: Residual

    def __post_init__(self):
        self.p, self.lengths, self.parts = None, [], []
        for part in self.block.parts():
            self.parts.append((part[2], part[3]))

    def sums(self):
        """(self, work) for parts of the residual sum, before its norm needs them."""
        return [(self, "part")] * len(self.residual.parts)

    def norms(self):
        """The same for the rest of the sum with its lengths, and for their norm."""
        return [(self, "lengths"), (self, "scales")]

    def run(self, work):
        given, layer, count = self.residual, self.layer, self.block.count
        x_sb = given.x_sb.reshape((P_MAX, feature_rows(layer.x_hbm), count))
        if work == "part":
            given.add(1)
        elif work == "lengths":
            given.add(len(given.parts))
            self.lengths = all_lengths(x_sb, layer.norm, self.parts)
        else:
            scales = scales_of(self.lengths, layer.norm, self.parts, count)
            self.p = projection(x_sb, scales, layer, self.block.start, self.parts)


class TokenBlock(nl.NKIObject):
    """A Block under way: its Arrival, what is projected of it @ SBUF, and the Pieces of the weights
    of both projections. Contexts take the place of their queries. ``rotated`` is the number of what
    is left of its last rotation.
    """

    block: Block
    layer: AttentionLayer
    arrival: Arrival
    qk_sb: nl.NkiTensor
    v_sb: list
    qkv: Pieces
    out: Pieces
    later: Later

    def __post_init__(self):
        self.rotated, self.context_sb = 0, self.qk_sb[:, 0 : self.layer.heads.q_tiles, :]

    def run(self, at):
        """A tile of queries, keys or values of all tokens; or, numbered behind these, two tiles of
        the output, which are stored together, of few tokens all."""
        if at >= self.qkv.tiles:
            self.run_output(at - self.qkv.tiles)
            return
        weight_sb, tile = self.qkv.tile(at)
        p, rotated = self.arrival.p, self.layer.heads.q_tiles + self.layer.heads.stacks
        if at < rotated:
            rest = rotation(p, weight_sb, tile, self.qk_sb, at, 0, self.block.count)
            self.rotated = self.later.leave(rest)
        else:
            value_tile(p, weight_sb, tile, (at - rotated) * P_MAX, self.v_sb)

    def run_output(self, first):
        count, out_hbm = self.block.count, self.layer.out_hbm
        if first == 0:
            self.later.settle_all()  # the last contexts
        if count <= P_MAX:
            store_product(self.out.weight_hbm, [(self.context_sb, self.block)], out_hbm)
            return
        tiles = min(2, self.out.tiles - first)
        out_sb = tile_of((P_MAX, tiles, count), self.context_sb.dtype)
        for n in range(tiles):
            weight_sb, tile = self.out.tile(first + n)
            out_psum = products(weight_sb, tile, 1, self.context_sb, 0, count)
            nisa.tensor_copy(dst=out_sb[:, n, :], src=out_psum)
        nl.store(block_part(out_hbm, self.block, first, tiles), out_sb)

    def projections(self):
        """Work: hidden states and their norm; keys and values, queries."""
        found, q_tiles = self.arrival.norms(), self.layer.heads.q_tiles
        for at in range(q_tiles, self.qkv.tiles):
            found.append((self, at))
        for at in range(q_tiles):
            found.append((self, at))
        return found

    def outputs(self):
        """Work: tiles of the output."""
        found = []
        for at in range(0, self.out.tiles if self.block.count > P_MAX else 1, 2):
            found.append((self, self.qkv.tiles + at))
        return found

    def groups(self, sequences, constants):
        """GroupAttention of all its queries; KV heads of a tile of qk_sb follow each other."""
        heads, found = self.layer.heads, []
        for part in self.block.parts():
            sequence, position, column, tokens = part
            for stacked in spans(heads.kv_heads, heads.stack):
                for members in spans(heads.group, GROUP_HEADS):
                    first, count = members
                    rows_sb = tile_of((tokens, count, P_MAX), self.qk_sb.dtype)
                    if stacked[1] < heads.stack:  # lanes without a head
                        nisa.memset(dst=rows_sb, value=0.0)
                    for head in range(stacked[0], stacked[0] + stacked[1]):
                        group = GroupAttention(
                            sequences[sequence], constants, self.later, self.qk_sb, column,
                            position, tokens, head, first, count, rows_sb,
                        )  # fmt: skip
                        found.append(group)
        return found

    def store_keys(self, keys_hbm, values_hbm):
        """New keys and values into rows @ HBM."""
        for n in range(len(self.v_sb)):
            column, size = self.arrival.parts[n]
            rows = nl.ds(self.block.start + column, size)
            nl.store(values_hbm[rows, :], self.v_sb[n])
            nl.store(keys_hbm[rows, :], key_rows(self.qk_sb, column, size, self.layer.heads))


def token_block(block, layer, weights, later):
    """The TokenBlock of a Block; hidden states are loaded behind the first weights."""
    weights[0].tile(layer.heads.q_tiles)
    given = residual(layer.x_hbm, layer.delta_hbm, layer.stream_hbm, block)
    arrival, count, dtype = Arrival(block, layer, given), block.count, layer.x_hbm.dtype
    qk_sb, v_sb = qkv_tiles(layer.heads, count, arrival.parts, dtype)
    return TokenBlock(block, layer, arrival, qk_sb, v_sb, weights[0], weights[1], later)


class PromptAttention(nl.NKIObject):
    """What the blocks of a prompt share: their layer and both its weights @ HBM, the bias [B, S] of
    left padding or None, Constants, and the Pieces of weights that stay, an empty list where each
    block reads its own. ``sequences`` are the SequenceKeys, by number."""

    layer: AttentionLayer
    qkv_w_hbm: nl.NkiTensor
    out_w_hbm: nl.NkiTensor
    bias_hbm: nl.NkiTensor
    constants: Constants
    kept: list

    def __post_init__(self):
        self.later, self.sequences = Later(), []

    def start(self, block):
        """The TokenBlock of a Block."""
        weights = self.kept
        if len(weights) == 0:
            weights = attention_weights(self.layer, self.qkv_w_hbm, self.out_w_hbm, block.count)
        return token_block(block, self.layer, weights, self.later)

    def keep_keys(self, rows):
        """Keys and values of a TokenBlock, for its own queries and those behind it."""
        self.later.settle(rows.rotated)
        parts, length = rows.block.parts(), rows.block.length
        for n in range(len(parts)):
            sequence, position, column, tokens = parts[n]
            if position == 0:
                own_hbm = None
                if self.bias_hbm is not None:
                    own_hbm = self.bias_hbm[nl.ds(sequence, 1), :]
                keys = sequence_keys(length, self.layer.heads, rows.qk_sb.dtype, own_hbm)
                self.sequences.append(keys)
            self.sequences[sequence].append(position, tokens, rows.qk_sb, column, rows.v_sb[n])

    def attend(self, rows, before, behind, waiting):
        """Attention of a TokenBlock, but for the second pass of its last groups, which come back;
        ``waiting`` are those of the block ``before``. In turns with it the output of that one and
        the projections of the one ``behind``, each None where there is none."""
        groups, projections, outputs = rows.groups(self.sequences, self.constants), [], []
        if behind is not None:
            projections = behind.projections()
        if before is not None:
            outputs = before.outputs()
        count = len(groups)
        lead = max(1, min(LEAD, count // 2))
        for n in range(count):
            left = min(len(waiting), lead - 1)
            ready = waiting[: len(waiting) - left]
            waiting = waiting[len(ready) :] + [groups[n]]
            work = step_share(projections, n, count)
            if behind is not None and n == 0:
                work = behind.arrival.sums() + work
            if n >= lead:  # contexts of the block before are complete
                work = work + step_share(outputs, n - lead, count - lead)
            take_turns(groups[n], ready, work)
        if count == lead:
            run_all(outputs)
        return waiting


def take_turns(group, ready, work):
    """The first pass of a group; in turns with its steps the second pass of those that are
    ``ready``, and work. PSUM is granted in the order in which its tiles are first used."""
    group.begin()
    steps, second = group.first_pass(), []
    for other in ready:
        second = second + other.second_pass()
    for n in range(len(steps)):
        group.score(steps[n])
        run_all(step_share(second, n, len(steps)))
        run_all(step_share(work, n, len(steps)))


def prompt_attention(layer, qkv_w_hbm, out_w_hbm, bias_hbm, block):
    """The PromptAttention of blocks like this one, the first: both weights stay in SBUF where they
    fit."""
    kept = []
    if 2 * (qkv_w_hbm.shape[1] + out_w_hbm.shape[1]) <= WEIGHT_BYTES:
        kept = attention_weights(layer, qkv_w_hbm, out_w_hbm, block.count)
    constants = prompt_constants(layer.x_hbm.dtype)
    return PromptAttention(layer, qkv_w_hbm, out_w_hbm, bias_hbm, constants, kept)


# --- Attention of a decode step -------------------------------------------------------------------
#
# One new token per sequence has few rows of scores, and an instruction on 4 partitions takes as
# long as one on 128. So the query heads of all sequences share the partitions of one tile of
# scores: queries stand block by block in a stationary operand that is zero elsewhere (one slot of
# the contraction per sequence and stack of KV heads), and the slots' products add up in PSUM, and
# with them the mask: a selection of sequences times the bias of their keys.


def decode_runs(length, kv_heads):
    """(lanes, runs): how ``length`` keys of each KV head lie on partitions that heads share.

    Partition p of a head takes the ``runs`` keys from p * runs on, which lie next to each other in
    HBM; tile t holds the keys t, t + runs, ... Sums over keys do not mind the order, if the mask
    has it too. One product over all partitions serves all heads.
    """
    runs = math.ceil(length / (P_MAX // kv_heads))
    while length % runs != 0:
        runs += 1
    return length // runs, runs


def sequences_at_once(length, heads, dtype, tokens=1, room=CACHE_BYTES):
    """Sequences of a decode step over ``length`` keys that share a tile of scores."""
    itemsize = bytes_of(dtype)
    kept = itemsize * length * (heads.stacks + 1)  # keys turned, and a row of the mask
    runs = decode_runs(length, heads.kv_heads)[1]
    kept += 2 * itemsize * runs * (heads.head_dim + 1)  # values, as they came too
    return max(1, min(P_MAX // (heads.q_heads * tokens), room // kept))


class CachedSequences(nl.NKIObject):
    """The cache of ``count`` sequences from ``first`` on @ SBUF, and room for their new tokens,
    ``each`` of a sequence and T in all.

    k_sb [128, slots, keys + T]: keys turned, slot b * stacks + s has the heads of stack s of
    sequence b; the columns behind are the new keys', zero for other sequences. mask_sb [T, keys +
    T], added to scores. v_sb [kv_heads * lanes, count, tiles, D + 1]: values, the lanes of each
    head in turn, and a column of ones, which gives the sum of the weights.
    """

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


def runs_of(cache_hbm, sequence, head, length):
    """The first ``length`` rows of a head's cache [B, kv_heads, L, D] @ HBM -> [lanes, runs, D]."""
    lanes, runs = decode_runs(length, cache_hbm.shape[1])
    return cache_hbm[sequence, head, 0:length, :].reshape((lanes, runs, cache_hbm.shape[3]))


def turned_keys(keys_hbm, sequence, length, k_sb, first_slot, heads):
    """The first ``length`` keys of a sequence of a cache into its slots of k_sb.

    Rows of tiles * D come from HBM; as many tiles as share a PSUM bank turn round, lanes columns
    each, a transpose for all heads of a stack, and leave it together.
    """
    kv_heads, d = heads.kv_heads, heads.head_dim
    lanes, tiles = decode_runs(length, kv_heads)
    rows_sb = tile_of((lanes, kv_heads, tiles, d), keys_hbm.dtype)
    for head in range(kv_heads):
        own_hbm = runs_of(keys_hbm, sequence, head, length)
        nisa.dma_copy(dst=rows_sb[:, head, :, :], src=own_hbm)
    for stacked in spans(kv_heads, heads.stack):
        head, count = stacked
        for part in spans(tiles, MOVING_MAX // lanes):
            at, together = part
            turned_psum = turned_of((count * d, together, lanes), keys_hbm.dtype)
            for t in range(together):
                turning_sb = rows_sb[:, nl.ds(head, count), at + t, :]
                nisa.nc_transpose(dst=turned_psum[:, t, :], data=turning_sb)
            columns = nl.ds(at * lanes, together * lanes)
            own_sb = k_sb[0 : count * d, first_slot + heads.stack_of(head), columns]
            nisa.tensor_copy(dst=own_sb, src=turned_psum)


def cached_sequences(keys_hbm, values_hbm, bias_hbm, first, count, heads, each=1):
    """CachedSequences of a decode step with ``each`` new tokens a sequence, from caches [B,
    kv_heads, L, D] and the bias of their first keys [B, up to L] @ HBM."""
    batch, kv_heads, room, d = keys_hbm.shape
    length, dtype, new = bias_hbm.shape[1], bias_hbm.dtype, count * each
    lanes, tiles = decode_runs(length, kv_heads)
    partitions = kv_heads * lanes
    k_sb = tile_of((P_MAX, count * heads.stacks, length + new), dtype)
    if kv_heads % heads.stack:
        nisa.memset(dst=k_sb, value=0.0)
    for b in range(count):
        turned_keys(keys_hbm, first + b, length, k_sb, b * heads.stacks, heads)
    # values, when the rows of keys have left SBUF: one load a sequence where all of the cache is
    # read, as heads and lanes follow each other in HBM; GpSimdE puts ones behind
    v_sb = filled((partitions, count, tiles, d + 1), 1.0, values_hbm.dtype)
    for b in range(count):
        if length == room:
            rows_sb = nl.load(values_hbm.reshape((batch, partitions, tiles, d))[first + b])
        else:
            rows_sb = tile_of((partitions, tiles, d), values_hbm.dtype)
            for head in range(kv_heads):
                own_hbm = runs_of(values_hbm, first + b, head, length)
                nisa.dma_copy(dst=rows_sb[nl.ds(head * lanes, lanes)], src=own_hbm)
        nisa.tensor_copy(dst=v_sb[:, b, :, 0:d], src=rows_sb, engine=nisa.gpsimd_engine)
    own, mask_sb = nl.ds(length, new), tile_of((new, length + new), dtype)
    nisa.memset(dst=k_sb[:, :, own], value=0.0)
    if each == 1:
        nisa.dma_copy(dst=mask_sb[:, 0:length], src=bias_hbm[nl.ds(first, count), :])
    else:
        for b in range(count):
            row_hbm = bias_hbm[nl.ds(first + b, 1), :].broadcast(0, each)
            nisa.dma_copy(dst=mask_sb[nl.ds(b * each, each), 0:length], src=row_hbm)
    nisa.tensor_copy(dst=mask_sb[:, own], src=own_mask(count, each, dtype))
    return CachedSequences(first, count, each, length, k_sb, mask_sb, v_sb)


def own_mask(count, each, dtype):
    """What is added to scores of ``each`` new tokens of ``count`` sequences among themselves, [T,
    T] @ SBUF: a token sees its own sequence's up to itself."""
    new, hidden = count * each, masked(dtype)
    if each == 1:
        return selected((new, new), [[-1, new]], 0.0, hidden, dtype)
    own_sb = selected((new, new), [[-1, new]], 0.0, hidden, dtype, nl.greater_equal)
    seen_sb = tile_of((new, new), dtype)
    nisa.affine_select(
        dst=seen_sb,
        pattern=[[-each, count], [0, each]],  # tokens behind the last one of a column's sequence
        offset=-each,
        channel_multiplier=1,
        on_true_tile=own_sb,
        on_false_value=hidden,
        cmp_op=nl.less,
    )
    return seen_sb


def decode_queries(qk_sb, cache, heads):
    """Queries of the sequences, block by block: [128, slots, rows] @ SBUF.

    Row t * q_heads + h belongs to head h of new token t; slot b * stacks + s holds the heads of
    stack s of sequence b in the rows of its tokens.
    """
    group, slots = heads.group, cache.count * heads.stacks
    q_sb = filled((P_MAX, slots, cache.tokens * heads.q_heads), 0.0, qk_sb.dtype)
    by_token_sb = q_sb.reshape((P_MAX, slots, cache.tokens, heads.q_heads))
    for b in range(cache.count):
        tokens = nl.ds(b * cache.each, cache.each)
        for kv_head in range(heads.kv_heads):
            stack, lanes = heads.stack_of(kv_head), heads.lanes(kv_head)
            members, slot = nl.ds(kv_head * group, group), b * heads.stacks + stack
            own_sb = qk_sb[lanes, nl.ds(stack * group, group), cache.columns(b)]
            placed_sb = by_token_sb[lanes, slot, tokens, members]
            nisa.tensor_copy(dst=placed_sb, src=own_sb.permute((0, 2, 1)))
    return q_sb


def decode_scores(qk_sb, cache, heads):
    """Masked scores of all rows against cached and new keys [rows, keys + T] @ SBUF."""
    q_sb, new, stacks = decode_queries(qk_sb, cache, heads), cache.tokens, heads.stacks
    slots, rows, keys = q_sb.shape[1], q_sb.shape[2], cache.k_sb.shape[2]
    # which rows are a token's
    pattern = [[-1, new], [0, heads.q_heads]]
    which_sb = selected((new, rows), pattern, 1.0, 0.0, qk_sb.dtype)
    for b in range(cache.count):
        own = nl.ds(cache.keys + b * cache.each, cache.each)
        nisa.tensor_copy(
            dst=cache.k_sb[:, nl.ds(b * stacks, stacks), own],
            src=qk_sb[:, nl.ds(heads.q_tiles, stacks), cache.columns(b)],
        )
    scores_sb = tile_of((rows, keys), q_sb.dtype)
    for span in spans(keys, MOVING_MAX):
        part, scores_psum = nl.ds(span[0], span[1]), psum_of((rows, span[1]))
        for slot in range(slots):
            keys_sb = cache.k_sb[:, slot, part]
            nisa.nc_matmul(dst=scores_psum, stationary=q_sb[:, slot, :], moving=keys_sb)
        nisa.nc_matmul(dst=scores_psum, stationary=which_sb, moving=cache.mask_sb[:, part])
        nisa.tensor_copy(dst=scores_sb[:, part], src=scores_psum)
    return scores_sb


def turn_tiles(x_sb, tiles, width):
    """``tiles`` times [Q, width] @ SBUF, side by side -> [width, tiles, Q]: turned round, as many
    as share a PSUM bank taken out by one copy."""
    queries = x_sb.shape[0]
    out_sb = tile_of((width, tiles, queries), x_sb.dtype)
    for part in spans(tiles, MOVING_MAX // queries):
        at, count = part
        turned_psum = turned_of((width, count, queries), x_sb.dtype)
        for t in range(count):
            turning_sb = x_sb[:, nl.ds((at + t) * width, width)]
            nisa.nc_transpose(dst=turned_psum[:, t, :], data=turning_sb)
        nisa.tensor_copy(dst=out_sb[:, nl.ds(at, count), :], src=turned_psum)
    return out_sb


def spread_weights(weights_sb, cache, heads):
    """Weights of cached keys [rows, keys] @ SBUF -> [kv_heads * lanes, kv_heads, tiles, T, group].

    TensorE turns them, lanes on partitions, and then copies each KV head's part to that head's
    lanes: a product with an identity that stands there, and is zero at the lanes of other heads.
    """
    partitions, tiles, count = cache.v_sb.shape[0], cache.v_sb.shape[2], cache.tokens
    kv_heads, group, dtype = heads.kv_heads, heads.group, weights_sb.dtype
    lanes = partitions // kv_heads
    turned_sb = turn_tiles(weights_sb, tiles, lanes)
    of_heads_sb = turned_sb.reshape((lanes, tiles, count, kv_heads, group))
    width, shift = 2 * partitions - lanes, partitions - lanes
    place_sb = selected((lanes, width), [[-1, width]], 1.0, 0.0, dtype, offset=shift)
    spread_sb = tile_of((partitions, kv_heads, tiles, count, group), dtype)
    for span in spans(tiles, MOVING_MAX // weights_sb.shape[0]):
        part = nl.ds(span[0], span[1])
        spread_psum = psum_of((partitions, kv_heads, span[1] * count * group))
        for head in range(kv_heads):
            nisa.nc_matmul(
                dst=spread_psum[:, head, :],
                stationary=place_sb[:, nl.ds(shift - head * lanes, partitions)],
                moving=of_heads_sb[:, part, :, head, :],
            )
        nisa.tensor_copy(dst=spread_sb[:, :, part, :, :], src=spread_psum)
    return spread_sb


def own_weights(weights_sb, cache, heads):
    """Weights of the new keys [rows, T] @ SBUF, turned -> [T, kv_heads, rows], zero for the rows of
    other heads than the part's."""
    kv_heads, group, count, rows = heads.kv_heads, heads.group, cache.tokens, weights_sb.shape[0]
    turned_psum = turned_of((count, rows), weights_sb.dtype)
    nisa.nc_transpose(dst=turned_psum, data=weights_sb[:, nl.ds(cache.keys, count)])
    own_sb = filled((count, kv_heads, rows), 0.0, weights_sb.dtype)
    # [T, head, token, member of the head's group]: the diagonal of parts and heads
    pattern = [
        [kv_heads * rows, count],
        [rows + group, kv_heads],
        [heads.q_heads, count],
        [1, group],
    ]
    of_heads_psum = turned_psum.reshape((count, count, kv_heads, group))
    nisa.tensor_copy(dst=own_sb.ap(pattern), src=of_heads_psum.permute((0, 2, 1, 3)))
    return own_sb


def attend_cached(qk_sb, v_sb, cache, heads, context_sb):
    """Attention of some sequences' new tokens over their cache and themselves -> their columns of
    context_sb [128, tiles, T]; v_sb [T, kv_heads * D] are the new values."""
    count, d, group, kv_heads = cache.tokens, heads.head_dim, heads.group, heads.kv_heads
    dtype, scale = v_sb.dtype, score_scales(d)[1]
    # softmax weights [T * q_heads, keys + T]: 512 keys move a pass, one for each slot and the mask
    scores_sb = decode_scores(qk_sb, cache, heads)
    neg_max_sb = negated_maximum(scores_sb, scale)
    weights_sb = tile_of(scores_sb.shape, dtype)
    nisa.activation(dst=weights_sb, op=nl.exp, data=scores_sb, bias=neg_max_sb, scale=scale)
    # the same with keys on partitions, as values have them: cached ones of all heads, and new ones
    spread_sb = spread_weights(weights_sb, cache, heads)
    own_sb = own_weights(weights_sb, cache, heads)
    own_values_sb = filled((count, kv_heads, d + 1), 1.0, dtype)
    nisa.tensor_copy(dst=own_values_sb[:, :, 0:d], src=v_sb.reshape((count, kv_heads, d)))
    # context of each sequence's tokens [q_heads * each, D + 1], rows by KV head, token, member of
    # its group: D + 1 columns of values move, a pass for each tile of 128 cached keys and for each
    # head's new keys; divided by the last column, it turns round
    each, own_sb = cache.each, own_sb.reshape((count, kv_heads, count, kv_heads, group))
    turned_psum, rows = turned_of((d, cache.count, kv_heads, each, group), dtype), []
    for b in range(cache.count):
        tokens = nl.ds(b * each, each)
        out_psum = psum_of((each * heads.q_heads, d + 1))
        for t in range(cache.v_sb.shape[2]):
            own_spread_sb, values_sb = spread_sb[:, :, t, tokens, :], cache.v_sb[:, b, t, :]
            nisa.nc_matmul(dst=out_psum, stationary=own_spread_sb, moving=values_sb)
        for head in range(kv_heads):
            values_sb = own_values_sb[:, head, :]
            weights_sb = own_sb[:, head, tokens, :, :].permute((0, 2, 1, 3))
            nisa.nc_matmul(dst=out_psum, stationary=weights_sb, moving=values_sb)
        rows.append(tile_of((each * heads.q_heads, d), dtype))
        divide(rows[b], out_psum, d)
    for b in range(cache.count):
        nisa.nc_transpose(dst=turned_psum[:, b], data=rows[b])
    # [D, B, kv_heads, each, group] to the lanes and tiles of the heads, all sequences at once
    for kv_head in range(kv_heads):
        tiles = nl.ds(heads.stack_of(kv_head) * group, group)
        nisa.tensor_copy(
            dst=context_sb[heads.lanes(kv_head), tiles, nl.ds(cache.first * each, count)],
            src=turned_psum[:, :, kv_head, :, :].permute((0, 3, 1, 2)),
        )


# --- Kernels, in the order of the model -----------------------------------------------------------


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None):
    """Linear layer, after RMSNorm where ``norm`` is given: x [H, T] -> [T, N], type of x.

    The LM head: tokens are few and leave the device, so they come out in rows. N is whole tiles.
    """
    k_tiles, tokens = feature_rows(x_hbm), x_hbm.shape[1]
    tiles = feature_tiles(weight_hbm, k_tiles)
    check_weight(weight_hbm, tiles * P_MAX, x_hbm.shape[0], "the weight")
    out_hbm = nl.ndarray((tokens, tiles * P_MAX), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    rows_hbm = out_hbm.reshape((tokens, P_MAX, tiles))
    for block in token_blocks(x_hbm.shape[0], tokens, 1):
        # hidden states [128, H/128, T] and the scale of their norm: some KiB, before the weights
        x_sb = residual_sum(x_hbm, None, x_hbm, block)
        parts = spans(block.count, P_MAX)
        along_sb = norm_scales(x_sb, norm, parts).along_sb
        for own in parts:
            start, count = own
            # a piece of the weights after another at DMA's pace; VectorE takes its products out
            # scaled, tokens outermost, so that each has a row of its own
            out_sb = tile_of((P_MAX, count, tiles), x_hbm.dtype)
            for piece in weight_pieces(tiles, k_tiles, count, last=True):
                weight_sb = load_weight(weight_hbm, piece[0], piece[1], k_tiles)
                for part in psum_parts(piece[1], count):
                    out_psum = products(weight_sb, part[0], part[1], x_sb, start, count)
                    scale_sb = along_sb[:, nl.ds(start, count)].expand_dim(2)
                    nisa.tensor_tensor(
                        dst=out_sb[:, :, nl.ds(piece[0] + part[0], part[1])],
                        data1=out_psum.permute((0, 2, 1)),
                        data2=scale_sb.broadcast(2, part[1]),
                        op=nl.multiply,
                    )
            # features lie in runs: a partition stores N/128 neighbours of a token as one row
            own_hbm = rows_hbm[nl.ds(block.start + start, count)]
            nisa.dma_copy(dst=own_hbm.permute((1, 0, 2)), src=out_sb)
    return out_hbm


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch, bias_hbm=None
):
    """Everything between two all-reduces of a prefill: residual sum, norm, QKV, RoPE, causal flash
    attention of all new tokens (Dao et al. 2022), output projection.

    x and delta [H, B * S] (delta None in the first layer), norm or None for none, kernel weights of
    QKV and output, cos and sin [128, B * S], ``heads`` a HeadShape, bias [B, S] in the type of x or
    None: 0 for keys that count, ``masked`` for left padding. -> partial output [H, B * S], rotated
    keys and values [B * S, kv_heads * D], and x + delta where there is a delta.
    """
    tokens, length, dtype = x_hbm.shape[1], x_hbm.shape[1] // batch, x_hbm.dtype
    new_shape = (tokens, heads.kv_heads * heads.head_dim)
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray(new_shape, dtype=dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray(new_shape, dtype=dtype, buffer=nl.shared_hbm)
    stream_hbm = stream_of(x_hbm, delta_hbm)
    layer = AttentionLayer(x_hbm, delta_hbm, stream_hbm, out_hbm, norm, cos_hbm, sin_hbm, heads)
    check_layer(layer, qkv_w_hbm, out_w_hbm)
    assert tokens == batch * length, f"{tokens} tokens are no {batch} sequences of one length"
    blocks = token_blocks(x_hbm.shape[0], tokens, length)
    prompt = prompt_attention(layer, qkv_w_hbm, out_w_hbm, bias_hbm, blocks[0])
    rows, before, waiting = prompt.start(blocks[0]), None, []
    run_all(rows.projections())
    for n in range(len(blocks)):
        prompt.keep_keys(rows)
        behind = None
        if n + 1 < len(blocks):
            # hidden states of the next block [128, H/128, count], behind its first weights
            behind = prompt.start(blocks[n + 1])
        waiting = prompt.attend(rows, before, behind, waiting)
        rows.store_keys(keys_hbm, values_hbm)
        before, rows = rows, behind
    for group in waiting:
        run_all(group.second_pass())
    # the last output [128, H/128, count], a pass for each tile of its context: alone again
    run_all(before.outputs())
    if delta_hbm is None:
        return out_hbm, keys_hbm, values_hbm
    return out_hbm, keys_hbm, values_hbm, stream_hbm


@nki.jit
def attention_decode_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm,
    bias_hbm, heads,
):  # fmt: skip
    """The same for one new token per sequence: attention over the cache and the token itself.

    x and delta [H, B], cos and sin [128, B], cached keys and values [B, kv_heads, L, D], bias
    [B, L] in the type of x: 0 for keys that count, ``masked`` otherwise, keys in the order of
    ``decode_runs``. -> partial output [H, B], new keys (rotated) and values [B, kv_heads * D], and
    x + delta where there is a delta.
    """
    batch, dtype = x_hbm.shape[1], x_hbm.dtype
    new_shape = (batch, heads.kv_heads * heads.head_dim)
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray(new_shape, dtype=dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray(new_shape, dtype=dtype, buffer=nl.shared_hbm)
    stream_hbm = stream_of(x_hbm, delta_hbm)
    layer = AttentionLayer(x_hbm, delta_hbm, stream_hbm, out_hbm, norm, cos_hbm, sin_hbm, heads)
    check_layer(layer, qkv_w_hbm, out_w_hbm)
    # hidden states [128, H/128, B], a few KiB, then the cache, before the weights: TensorE turns
    # its keys, 128 a pass, while those stream
    block = Block(0, batch, 1)
    x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
    at_once = sequences_at_once(bias_hbm.shape[1], heads, dtype)
    parts, caches = spans(batch, at_once), []
    for part in parts:
        caches.append(cached_sequences(keys_hbm, values_hbm, bias_hbm, part[0], part[1], heads))
    # queries and keys [128, tiles, B], values [B, kv_heads * D]: H/128 passes of 64 columns a tile,
    # a fifth of the time that DMA takes for its weights
    p = projection(x_sb, norm_scales(x_sb, layer.norm, parts), layer, 0, parts)
    qk_sb, v_sb = project_qkv(p, qkv_w_hbm)
    nl.store(new_keys_hbm, key_rows(qk_sb, 0, batch, heads))
    # context [128, tiles, B] while the first output weights arrive; lanes without a head are zero
    context_sb = tile_of((P_MAX, heads.q_tiles, batch), dtype)
    if heads.kv_heads % heads.stack:
        nisa.memset(dst=context_sb, value=0.0)
    for n in range(len(caches)):
        rows = nl.ds(caches[n].first, caches[n].count)
        nl.store(new_values_hbm[rows, :], v_sb[n])
        attend_cached(qk_sb, v_sb[n], caches[n], heads, context_sb)
    store_product(out_w_hbm, [(context_sb, block)], out_hbm)
    if delta_hbm is None:
        return out_hbm, new_keys_hbm, new_values_hbm
    return out_hbm, new_keys_hbm, new_values_hbm, stream_hbm


@nki.jit
def swiglu_mlp_kernel(x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, length=None):
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    x and delta [H, T] (delta or norm may be None), kernel weights of gate and up [F, H] and of down
    [H, F], ``length`` tokens of a sequence if there are several -> partial output [H, T], and x +
    delta where there is a delta. One pass over the weights for every ``token_chunk`` of tokens.
    """
    tokens, k_tiles, dtype = x_hbm.shape[1], feature_rows(x_hbm), x_hbm.dtype
    tiles = feature_tiles(gate_hbm, k_tiles)
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    stream_hbm = stream_of(x_hbm, delta_hbm)
    check_weight(up_hbm, tiles * P_MAX, x_hbm.shape[0], "the weight of up")
    check_weight(down_hbm, x_hbm.shape[0], tiles * P_MAX, "the weight of down")
    zero_sb = filled((P_MAX, 1), 0.0, FP32)
    blocks = token_blocks(x_hbm.shape[0], tokens, tokens if length is None else length)
    for some in grouped(blocks, token_chunk(bytes_of(dtype) * (tiles + k_tiles))):
        # the first piece of gate and up [128, tiles, H/128, 128] goes before the hidden states
        # [128, H/128, count] of each block, whose first features then are multiplied while the
        # others arrive
        pieces, passed = weight_pieces(tiles, k_tiles, some[0].count), []
        gate_w_sb = load_weight(gate_hbm, pieces[0][0], pieces[0][1], k_tiles)
        up_w_sb = load_weight(up_hbm, pieces[0][0], pieces[0][1], k_tiles)
        for block in some:
            x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
            along_sb = norm_scales(x_sb, norm, spans(block.count, P_MAX)).along_sb
            passed.append((tile_of((P_MAX, tiles, block.count), dtype), block, x_sb, along_sb))
        # silu(gate) * up [128, F/128, count], features on partitions as down contracts them. A PSUM
        # bank at a time: H/128 passes of its tokens for each tile, while DMA loads the next piece
        # and VectorE and ScalarE finish the bank before
        for piece in pieces:
            if piece[0]:
                gate_w_sb = load_weight(gate_hbm, piece[0], piece[1], k_tiles)
                up_w_sb = load_weight(up_hbm, piece[0], piece[1], k_tiles)
            for one in passed:
                for part in psum_parts(piece[1], one[1].count):
                    gated(one, gate_w_sb, up_w_sb, part, piece[0] + part[0], zero_sb)
        # down [128, H/128, count]: F/128 passes a tile, the last tiles' weights alone at the end
        store_product(down_hbm, passed, out_hbm)
    if delta_hbm is None:
        return out_hbm
    return out_hbm, stream_hbm


def gated(passed, gate_w_sb, up_w_sb, part, own, zero_sb):
    """silu(gate) * up of a part of ``psum_parts`` into the tiles from ``own`` on of passed, (inner
    [128, F/128, count], Block, hidden states, their scales)."""
    inner_sb, block, x_sb, along_sb = passed
    tile, beside, at, columns = part
    gate_psum = products(gate_w_sb, tile, beside, x_sb, at, columns)
    gate_sb = times_scale(gate_psum, along_sb, at, x_sb.dtype)
    silu_sb = tile_of(gate_sb.shape, x_sb.dtype)
    nisa.activation(dst=silu_sb, op=nl.silu, data=gate_sb, bias=zero_sb)
    up_psum = products(up_w_sb, tile, beside, x_sb, at, columns)
    up_sb = times_scale(up_psum, along_sb, at, x_sb.dtype)
    inner = inner_sb[:, nl.ds(own, beside), nl.ds(at, columns)]
    nisa.tensor_tensor(dst=inner, data1=silu_sb, data2=up_sb, op=nl.multiply)
