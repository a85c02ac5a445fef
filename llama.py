"""Llama for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

The idea: a token waits for the weights, 1.24 GB a core, and for nothing else as long. So they
stream through once, in long rows, and everything else hides behind them. Features stay on
partitions from the norm to the down projection, where each product contracts what the last one
left, and one kernel runs between two all-reduces. A layer is these ten lines, a kernel for each
half, with the residual sum of the half before in front:

    h = x + delta                                               # the last half's all-reduced result
    n = h * rsqrt(mean(h ** 2) + eps)                           # its gain is in the weights
    q, k, v = rope(n @ wq), rope(n @ wk), n @ wv
    keys, values = cat(cached_keys, k), cat(cached_values, v)
    delta = all_reduce(softmax(mask(q @ keys.T / sqrt(d))) @ values @ wo)

    h = h + delta
    n = h * rsqrt(mean(h ** 2) + eps)
    delta = all_reduce((silu(n @ gate) * (n @ up)) @ down)

Eight tokens wait for the weights as long as one: so a call looks ahead (section "Look-ahead").

This one file is a complete submission: any tensor-parallel degree that divides the KV heads, bf16
or fp32. It imports torch, transformers and the Neuron SDK, nothing else. Other models and servers
need more: models/extended.py composes that from the files beside it, and some layers here leave a
place for it.

The file goes from the limits of the core to layouts, sizes known while tracing and tile helpers.
Attention and the kernels follow in model order. Configuration, modules (NxD Inference's own run
without kernels) and the conversion of a Hugging Face checkpoint come last.

To learn the language, read "Layouts" first. Go on with ``linear_kernel`` and ``swiglu_mlp_kernel``
and their helpers, then ``attention_decode_kernel``. "Attention of a prompt" comes last: its example
draws every tile of one step.

What calls what, phase by phase:

    linear_kernel                multiply_rows
    multiply_rows                Hidden.load, norm_scales, Linear.load, Piece.product
    swiglu_mlp_kernel            gated_mlp
    gated_mlp                    Hidden.load, norm_scales, InnerTokens.gate, store_product
    attention_decode_kernel      Hidden.load, cached_sequences, decode_step
    decode_step                  AttentionLayer.projection, project_qkv, attend_cached
                                 store_product
    attention_prefill_kernel     PromptPlan.of, PromptAttention.run

    PromptAttention.run          PromptAttention.run_blocks
    PromptAttention.run_blocks   PromptAttention.start, PromptAttention.attend
    PromptAttention.attend       PromptBlock.groups, take_turns
    take_turns                   GroupAttention.begin, GroupAttention.score, run_all beside them
    PromptBlock.project          Projection.project
    project_qkv                  Projection.project
    Projection.project           Piece.product, Projection.rope

    attention_for_kernels        HeadShape.order, layouts_of_ranks
    mlp_for_kernels              layouts_of_ranks

Axis letters used throughout:

    T  tokens of one call (batch times sequence)     H  hidden size, padded to whole tiles of 128
    K  contraction size of a product                 N  output features of a product
    P  partitions of a tile (at most 128)            F  intermediate size of the MLP
    D  head dimension                                B, S  batch, sequence length
    L  keys of a cache

Words that mean one thing here:

    tile     up to 128 features or tokens on partitions, or what an instruction makes @ SBUF, PSUM
    piece    tiles of a weight that are loaded at once
    run      neighbours in HBM that one partition holds
    block    tokens that lie together in hidden states
    bank     of PSUM: 512 numbers fp32 a partition, the most that one product writes
    group    the query heads of a KV head
    stack    the KV heads that share a tile, as many as its partitions hold: two where D is 64
    lanes    the partitions of one head in a tile, or those that a tile of cached keys takes
    slot     up to 128 rows of a contraction that is longer

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Kernels take and return HBM tensors; the
helpers above them work on tiles that are already on chip. Interfaces follow NxD Inference 0.1 to
0.6 (github.com/aws-neuron/neuronx-distributed-inference), the kernel language SDK 2.21.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# --- Limits of a NeuronCore-v2 (aws-neuron-sdk v2.21.1, general/nki/programming_model.rst) --------

P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
QUADRANT = 32  # partitions: an operand begins at one of four
MOVING_MAX = 512  # free size of the moving matmul operand; one PSUM bank of fp32

# --- Choices of these kernels: how much of a weight, or of the tokens, is on chip at once ---------

PIECE_BYTES = 16384  # per partition of a weight, loaded at once: four pieces take 64 KiB
BLOCK_PIECE_BYTES = 8192  # of attention, beside several blocks of tokens
LONG_PIECE_BYTES = 32768  # of few tokens, which leave more room
FEW_TOKENS = 64  # up to so many need no room for hidden states beside weights
LAST_PIECE_BYTES = 4096  # at the end of a kernel's stream of weights: DMA wants 2 KiB or more
SHORT_ROW_TOKENS = 32  # of which a tile's row is 64 bytes
SHORT_BLOCK = 256  # tokens that lie together in hidden states up to H of SHORT_FEATURES
LONG_BLOCK = 384  # and beyond
SHORT_FEATURES = 2048
HEAD_BYTES = 64 * 1024  # SBUF for rows of the head, of tokens of one pass over its weight
TOKEN_CHUNK = 1024  # tokens per pass over a weight: from 340 on TensorE takes longer than DMA
CHUNK_BYTES = 112 * 1024  # SBUF per partition for the kept tensors of a chunk
# --- Layouts --------------------------------------------------------------------------------------
#
# Features lie on partitions from end to end: every product keeps its weights stationary and lets up
# to 512 tokens move, and leaves the features that the next product contracts on partitions. So a
# layer transposes nothing between its norm and its output but softmax weights and contexts.
#
#   tensor                 shape per rank               partition axis   written by
#   hidden states (HBM)    [H, T], in token_blocks()    -                in_blocks(), the kernels
#   hidden states (SBUF)   [128, H/128, T]              128 runs of H    Hidden.load()
#   Q, K (SBUF)            [128, tiles, T]              heads of a tile  rope()
#   V (SBUF)               [tokens, kv heads * D]       tokens           project()
#   context (SBUF)         [128, tiles, T]              heads of a tile  attention of any kind
#   HF weight              [N, K]                       -                checkpoint
#   kernel weight (HBM)    [128, N/128 * K/128 * 128]   contraction      kernel_layout(), once
#   kernel weight (SBUF)   [128, tiles, K/128, 128]     contraction      Linear.load()
#
# Partition p of a hidden state holds the H/128 features from p * H/128 on ("in runs"): a block of
# tokens in HBM is the plain transpose of its rows, and a partition's part of it is contiguous.
# Weights are permuted to that order on both sides when they are loaded (in_runs). The tile of a
# head dimension D of 64 holds one query head of each of two KV heads (HeadShape), so that both
# halves do the same work.
#
# A linear layer of 512 hidden features on 128 tokens takes four passes for each tile of 128 output
# features, one for each k. All are added up in one bank of PSUM:
#
#     weight_sb[:, tile, k, :]          x_sb[:, k, :]                  products(..)[:, tile, :]
#     0   +- 128 output features -+     0   +--- 128 tokens ---+       0   +- 128 tokens -+
#         | rows of the weight    |         | hidden feature   |           | output       |
#         | that meet feature     |  and    | 4 p + k on       |  make     | feature p of |
#         | 4 p + k on p          |         | partition p      |           | this tile    |
#     127 +-----------------------+     127 +------------------+       127 +--------------+
#        stationary                        moving
#
# Element [p, (tile, k, n)] of a kernel weight is W[tile * 128 + n, k * 128 + p]: a partition reads
# any number of neighbouring tiles of 128 output features as one contiguous row of HBM. DMA wants 2
# KiB or more per row, and loses 1 % at 16 KiB. Prefill and decode read the same weights.


def whole_tiles(features: int) -> int:
    """Tiles of 128 that hold so many features."""
    return math.ceil(features / P_MAX)


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Zeros appended along ``dim`` up to ``size``."""
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim) if shape[dim] else x


def pad_tiles(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros appended along ``dim`` up to whole tiles of 128."""
    return pad_to(x, dim, whole_tiles(x.shape[dim]) * P_MAX)


def in_runs(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorder the features along ``dim`` so that partition p of their tiles holds the p-th run."""
    padded = pad_tiles(weight, dim)
    runs = padded.unflatten(dim, (P_MAX, padded.shape[dim] // P_MAX))
    return runs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def in_blocks(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Hidden states [T, H] of sequences of ``length`` tokens -> [H, T] in ``token_blocks``."""
    padded = pad_tiles(rows, 1)
    tokens, features = padded.shape
    blocks = [
        padded[block.start : block.start + block.count].t().reshape(P_MAX, -1)
        for block in token_blocks(features, tokens, length)
    ]
    return torch.cat(blocks, 1).reshape(features, tokens)


def from_blocks(x: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of ``in_blocks``, padding included."""
    features, tokens = x.shape
    blocks = token_blocks(features, tokens, length)
    sizes = [block.count * features // P_MAX for block in blocks]
    parts = x.reshape(P_MAX, -1).split(sizes, 1)
    return torch.cat([part.reshape(features, -1).t() for part in parts])


def kernel_layout(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [128, N/128 * K/128 * 128], zero-padded to whole tiles on both sides."""
    padded = pad_tiles(pad_tiles(weight, 0), 1)
    tiled = padded.unflatten(1, (-1, P_MAX)).unflatten(0, (-1, P_MAX))
    return tiled.permute(3, 0, 2, 1).reshape(P_MAX, -1)


class HeadShape(NamedTuple):
    """Heads of one rank: ``group`` query heads share a KV head, ``stack`` KV heads a tile.

    Tile s * group + g of the queries holds the g-th query head of each KV head of stack s. Tile s
    of the keys holds the KV heads of stack s. Lanes without a head or beyond D are zero.
    """

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def depth(self) -> int:
        """Rows of a product that contracts a head: whole quadrants of 32, since operands begin at
        no other partition. Zeros fill the rows behind the head's features."""
        return math.ceil(self.head_dim / QUADRANT) * QUADRANT

    @property
    def stack(self) -> int:
        return max(1, P_MAX // self.depth)

    @property
    def stacks(self) -> int:
        return math.ceil(self.kv_heads / self.stack)

    @property
    def q_tiles(self) -> int:
        return self.stacks * self.group

    @property
    def kv_features(self) -> int:
        """Features of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    def place(self, kv_head: int) -> Tuple[int, slice]:
        """(stack, lanes) of a KV head: its tile of the keys, and its partitions there."""
        stack, lane = divmod(kv_head, self.stack)
        return stack, slice(lane * self.depth, (lane + 1) * self.depth)

    def leaves_lanes(self) -> bool:
        """Whether tiles of heads have lanes without features."""
        return self.kv_heads % self.stack > 0 or self.stack * self.head_dim < P_MAX

    def order(self, weight: torch.Tensor, group: int) -> torch.Tensor:
        """Rows of ``group`` heads per KV head, head by head -> rows of tiles, zeros where empty."""
        d, stack = self.head_dim, self.stack
        padded = pad_to(weight, 0, math.ceil(self.kv_heads / stack) * stack * group * d)
        heads = padded.view(-1, stack, group, d, weight.shape[1]).transpose(1, 2)
        return pad_tiles(pad_to(heads, 3, self.depth).flatten(2, 3), 2).flatten(0, 2)


# --- Sizes known while tracing --------------------------------------------------------------------
#
# The compiler turns Python's range into a loop that it traces once. Lists and nl.static_range stand
# where a body needs real numbers. ``while`` counts where models/today.py shares a function: its
# compiler's parser takes neither comprehensions nor a ``for`` over pairs.


def spans(length, most, first=0):
    """(start, size) of the pieces of ``most`` that cover ``length`` from ``first`` on; the last may
    be smaller."""
    found, at = [], 0
    while at < length:
        found.append((first + at, min(most, length - at)))
        at += most
    return found


def even_spans(length, most):
    """(start, size) of as few pieces of at most ``most`` as cover ``length``, as equal as can be.

    Sizes are multiples of 64, the columns that TensorE moves in the time of one.
    """
    size = math.ceil(length / math.ceil(length / most) / 64) * 64
    return spans(length, min(most, size))


def token_chunk(bytes_per_token):
    """Tokens of one pass over a weight; each token keeps ``bytes_per_token`` of a partition."""
    return max(P_MAX, min(TOKEN_CHUNK, CHUNK_BYTES // bytes_per_token // P_MAX * P_MAX))


def weight_pieces(tiles, tile_bytes, tokens, last=False, row_bytes=PIECE_BYTES):
    """(first, count) of the tiles of output features that are loaded at once: the pieces.

        tokens                   begin with      go on with pieces of     end with
        up to FEW_TOKENS         -               LONG_PIECE_BYTES         -
        more                     half a piece    ``row_bytes``            -
        of the ``last`` weight   -               half of the rest, too    LAST_PIECE_BYTES

    Hidden states of many tokens arrive behind half a piece. Behind a kernel's last piece little is
    left to multiply.
    """
    few, begin, end = tokens <= FEW_TOKENS, 0, max(1, LAST_PIECE_BYTES // tile_bytes)
    most = max(1, (LONG_PIECE_BYTES if few else row_bytes) // tile_bytes)
    if last and tiles > end:
        most = min(most, math.ceil((tiles - end) / 2))
    else:
        begin, end = 0 if few else min(tiles, max(1, most // 2)), 0
    rest = spans(tiles - begin - end, most, begin)
    return spans(begin, most) + rest + spans(end, P_MAX, tiles - end)


def psum_banks(tiles, tokens):
    """(first tile, tiles, first token, tokens) of a product's parts, each of a bank of PSUM."""
    return [
        (tile, together, at, size)
        for at, size in even_spans(tokens, MOVING_MAX)
        for tile, together in spans(tiles, max(1, MOVING_MAX // size))
    ]


class TokenTile(NamedTuple):
    """Up to 128 tokens of a ``sequence``: ``tokens`` from its ``position`` on, which are the
    columns from ``column`` on of their Block."""

    sequence: int
    position: int
    column: int
    tokens: int


class Block(NamedTuple):
    """Tokens that lie together in hidden states @ HBM: ``count`` from ``start`` on, of sequences of
    ``length`` tokens."""

    start: int
    count: int
    length: int

    def tiles(self):
        """Its TokenTiles."""
        tokens = min(self.count, self.length)  # of one sequence
        return [
            TokenTile(*divmod(self.start + column, self.length), column, size)
            for begin, _ in spans(self.count, tokens)
            for column, size in spans(tokens, P_MAX, begin)
        ]


def token_blocks(features, tokens, length):
    """Cut ``tokens`` of sequences of ``length`` into Blocks: several whole sequences each, or whole
    tiles of one sequence, as equal as can be.

    A larger block has longer rows of DMA, but its first reader waits for all of it. Weights of more
    than 2048 features do not stay in SBUF: each block reads them again, and TensorE takes longer
    than DMA from 340 tokens on.
    """
    most = SHORT_BLOCK if features <= SHORT_FEATURES else LONG_BLOCK
    if length < most:
        return [Block(*span, length) for span in spans(tokens, most // length * length)]
    size = math.ceil(length / math.ceil(length / most) / P_MAX) * P_MAX
    return [
        Block(first + at, count, length)
        for first in range(0, tokens, length)
        for at, count in spans(length, size)
    ]


def grouped(blocks, most):
    """Lists of Blocks that follow each other, of at most so many tokens each; one at least."""
    found, total = [], most
    for block in blocks:
        if total + block.count > most:
            found.append([])
            total = 0
        found[-1].append(block)
        total += block.count
    return found


# --- Tile helpers: everything here works on SBUF and PSUM tiles -----------------------------------
#
# Instructions return their tile. nl.ndarray makes one, in SBUF if it names no buffer, where several
# instructions fill it, or where a result takes another type than its operands.


MASKED = -1.5e38  # added to scores that do not count: exp gives 0, and twice it is finite
MASKED_FP16 = -3.0e4  # the same for float16, which ends at 65504


def masked(dtype):
    """The number added to scores that do not count, for a type of the kernels or of PyTorch."""
    return MASKED_FP16 if dtype == nl.float16 or dtype is torch.float16 else MASKED


def psum(shape, make=nl.zeros):
    """Zeros fp32 @ PSUM that products are added to, or a tile that nl.ndarray makes, which
    transposes or single products fill. An accumulation needs zeros, an affine loop and nothing but
    products (known issues of SDK 2.22)."""
    return make(shape, nl.float32, buffer=nl.psum)


def select_mask(visible, tokens, dtype):
    """[tokens, tokens] @ SBUF: 0 where a comparison of row and column holds, else MASKED."""
    mask_sb = nisa.memset((tokens, tokens), 0.0, dtype)
    return nisa.affine_select(visible, mask_sb, on_false_value=masked(dtype))


def causal_mask(tokens, dtype):
    """``select_mask`` in which each token (row) sees itself and the tokens before it."""
    row, column = nl.arange(tokens)[:, None], nl.arange(tokens)[None, :]
    return select_mask(row >= column, tokens, dtype)


Hbm = Any  # a tensor in HBM, or a part of one
Sbuf = Any  # a tile in SBUF, or a part of one


class Tokens(NamedTuple):
    """Features of a Block's tokens @ SBUF [128, features / 128, count]."""

    block: Block
    x_sb: Sbuf


class Linear(NamedTuple):
    """A linear layer of a kernel: its weight in kernel layout @ HBM, of ``k_tiles`` tiles of K."""

    weight_hbm: Hbm
    k_tiles: int

    @property
    def tiles(self) -> int:
        """Tiles of 128 output features."""
        return self.weight_hbm.shape[1] // (self.k_tiles * P_MAX)

    def pieces(self, tokens, last=False, tiles=None, row_bytes=PIECE_BYTES):
        """(first, count) of its pieces, or of its first ``tiles``; see ``weight_pieces``."""
        tile_bytes = self.weight_hbm.itemsize * self.k_tiles * P_MAX
        return weight_pieces(tiles or self.tiles, tile_bytes, tokens, last, row_bytes)

    def load(self, first, tiles):
        """The Piece of some of its tiles, one contiguous row each."""
        weight_hbm, k_tiles = self.weight_hbm, self.k_tiles
        weight_sb = nl.ndarray((P_MAX, tiles, k_tiles, P_MAX), weight_hbm.dtype)
        tiled_hbm = weight_hbm.reshape((P_MAX, self.tiles, k_tiles, P_MAX))
        # a last tile, if alone, comes in rows of LAST_PIECE_BYTES: TensorE begins sooner
        halved = tiles == 1 and first + 1 == self.tiles
        each = max(1, LAST_PIECE_BYTES // (P_MAX * weight_hbm.itemsize)) if halved else k_tiles
        for k in (nl.ds(*span) for span in spans(k_tiles, each)):
            weight_sb[:, :, k, :] = nl.load(tiled_hbm[:, nl.ds(first, tiles), k, :])
        return Piece(first, weight_sb)


class Piece(NamedTuple):
    """Tiles of a Linear from the ``first`` on @ SBUF [128, tiles, K/128, 128]."""

    first: int
    weight_sb: Sbuf

    def product(self, bank, tokens):
        """Multiply Tokens: a bank of ``psum_banks`` of W x -> [128, tiles, count] @ PSUM.

        The weights of 128 features are stationary and the tokens move: K/128 passes of max(64,
        count) columns a tile, and the result has features on partitions.
        """
        (first, tiles, at, count), x_sb = bank, tokens.x_sb
        acc_psum = psum((P_MAX, tiles, count))
        for tile in nl.affine_range(tiles):
            for k in nl.affine_range(x_sb.shape[1]):
                acc_psum[:, tile, :] += nisa.nc_matmul(
                    self.weight_sb[:, first + tile, k, :], x_sb[:, k, nl.ds(at, count)]
                )
        return acc_psum


def store_product(linear, inputs, out_hbm):
    """Store ``W @ x`` of Tokens [128, k_tiles, count] into out [N, T] @ HBM in one pass over the
    weights. Features lie in runs: each partition stores contiguous rows.

    Many tokens store each piece by itself. Up to 128 tokens store the last piece alone, so that
    little is left at the end. Up to 32 store all at once: DMA takes as long as for 256 bytes.
    """
    count = inputs[0].block.count
    pieces = linear.pieces(count, last=True)
    together = [[piece] for piece in pieces] if count > P_MAX else [pieces[:-1], pieces[-1:]]
    for group in [pieces] if count <= SHORT_ROW_TOKENS or len(pieces) == 1 else together:
        begin, size = group[0][0], sum(tiles for _, tiles in group)
        outs = [nl.ndarray((P_MAX, size, x.block.count), out_hbm.dtype) for x in inputs]
        for first, tiles in group:
            piece = linear.load(first, tiles)
            for x, out_sb in zip(inputs, outs):
                for bank in psum_banks(tiles, x.block.count):
                    tile, some, at, tokens = bank
                    rows, columns = nl.ds(first - begin + tile, some), nl.ds(at, tokens)
                    out_sb[:, rows, columns] = nisa.tensor_copy(piece.product(bank, x))
        for x, out_sb in zip(inputs, outs):
            nl.store(block_tiles(out_hbm, x.block, begin, size), out_sb)


# --- Residual stream and norm ---------------------------------------------------------------------


class Norm(NamedTuple):
    """Constants of an RMSNorm: the features that count (H is padded with zeros), and epsilon."""

    features: int
    eps: float


def block_tiles(x_hbm, block, tile, tiles):
    """Some tiles of features of a block of hidden states [H, T] @ HBM -> [128, tiles, count]: a
    partition's are contiguous."""
    k_tiles, count = x_hbm.shape[0] // P_MAX, block.count
    rows_hbm = x_hbm.reshape((P_MAX, k_tiles * x_hbm.shape[1]))
    row, at = nl.arange(P_MAX)[:, None, None], nl.arange(tiles)[None, :, None]
    column = k_tiles * block.start + count * (tile + at) + nl.arange(count)[None, None, :]
    return rows_hbm[row, column]


class Hidden(NamedTuple):
    """Hidden states [H, T] @ HBM of a kernel: x, what is added to it first (or None), room for
    their sum, and the output."""

    x_hbm: Hbm
    delta_hbm: Optional[Hbm] = None
    sum_hbm: Optional[Hbm] = None
    out_hbm: Optional[Hbm] = None

    def load(self, block):
        """Load and store x + delta of a Block -> Tokens [128, H/128, count]; without delta load x.

        Many tokens arrive in up to eight runs of tiles, in rows of 4 KiB, so that the next engine
        starts with the first one.
        """
        k_tiles, count = self.x_hbm.shape[0] // P_MAX, block.count
        x_sb = nl.ndarray((P_MAX, k_tiles, count), self.x_hbm.dtype)
        each = k_tiles if count <= P_MAX else max(math.ceil(k_tiles / 8), 2048 // count)
        for first, tiles in spans(k_tiles, each):
            run_sb = x_sb[:, nl.ds(first, tiles), :]
            run_sb[...] = nl.load(block_tiles(self.x_hbm, block, first, tiles))
            if self.delta_hbm is not None:
                delta_sb = nl.load(block_tiles(self.delta_hbm, block, first, tiles))
                run_sb[...] = nisa.tensor_tensor(run_sb, delta_sb, nl.add)
                nl.store(block_tiles(self.sum_hbm, block, first, tiles), run_sb)
        return Tokens(block, x_sb)


class NormScales(NamedTuple):
    """1 / rms of tokens, fp32 @ SBUF: along the free axis, [128, T] with all rows equal, and on
    partitions, one [tokens, 1] per tile of tokens."""

    along_sb: Sbuf
    down_sb: List[Sbuf]


def norm_scales(x_sb, norm, tiles):
    """1 / sqrt(mean(x^2) + eps) of [128, H/128, T] @ SBUF -> NormScales (Zhang and Sennrich 2019),
    ones where ``norm`` is None; ``tiles`` are (start, size) of up to 128 tokens.

    A norm's scale is one number per token, so it may wait until behind the product that reads the
    norm: W (x * gain / rms) = (W gain) x / rms. TensorE need not wait for it, and the gain is in
    the weights. It multiplies the tokens with themselves, exactly and in the columns of one
    product, whose diagonal has the sums of squares. The rest is selected away rather than
    multiplied by zero: other tokens' products may overflow.
    """
    shape = (P_MAX, x_sb.shape[2])
    if norm is None:
        down_sb = [nisa.memset((size, 1), 1.0, nl.float32) for _, size in tiles]
        return NormScales(nisa.memset(shape, 1.0, nl.float32), down_sb)
    along_sb, down_sb, scale = nl.ndarray(shape, nl.float32), [], 1.0 / norm.features
    ones_sb = nisa.memset((P_MAX, P_MAX), 1.0, nl.float32)
    eps_sb = nisa.memset((P_MAX, 1), norm.eps, nl.float32)
    for start, size in tiles:
        tokens, gram_psum = nl.ds(start, size), psum((size, size))
        for k in nl.affine_range(x_sb.shape[1]):
            gram_psum[...] += nisa.nc_matmul(x_sb[:, k, tokens], x_sb[:, k, tokens])
        lengths_sb = nisa.tensor_copy(gram_psum)
        if size > 1:
            row, column = nl.arange(size)[:, None], nl.arange(size)[None, :]
            lengths_sb = nisa.affine_select(row >= column, lengths_sb, on_false_value=0.0)
            lengths_sb = nisa.affine_select(row <= column, lengths_sb, on_false_value=0.0)
        # along: a product with ones adds the columns up, on every partition
        total_psum = nisa.nc_matmul(ones_sb[0:size, :], lengths_sb)
        along_sb[:, tokens] = nisa.activation(nl.rsqrt, total_psum, bias=eps_sb, scale=scale)
        # down: VectorE adds up the rows, of which each partition has its own
        total_sb = nisa.tensor_reduce(nl.add, lengths_sb, axis=1)
        down_sb.append(nisa.activation(nl.rsqrt, total_sb, bias=eps_sb[0:size, :], scale=scale))
    return NormScales(along_sb, down_sb)


# --- Queries, keys and values ---------------------------------------------------------------------


def select_equal(first, second, shape, dtype):
    """Ones where two affine expressions of the place are equal, else zeros @ SBUF.

    GpSimdE has nothing else to do; a constant would take its turn in the queues of DMA.
    """
    ones_sb = nisa.memset(shape, 1.0, dtype)
    below_sb = nisa.affine_select(first >= second, ones_sb, on_false_value=0.0)
    return nisa.affine_select(first <= second, below_sb, on_false_value=0.0)


class AttentionLayer(NamedTuple):
    """Tensors and constants that all passes of an attention kernel share.

    @ HBM: hidden states, two Linears (Q, K and V together; the output), and the tables of cos and
    sin. @ SBUF: the identity and the permutation that swaps the halves of each head in a tile [128,
    128], and zeros [128, 1] fp32."""

    hidden: Hidden
    norm: Optional[Norm]
    heads: HeadShape
    qkv: Linear
    out: Linear
    cos_hbm: Hbm
    sin_hbm: Hbm
    identity_sb: Sbuf
    swap_sb: Sbuf
    zero_sb: Sbuf

    @classmethod
    def of(cls, hidden, norm, heads, qkv, out, cos_hbm, sin_hbm):
        """Make the constants. Column (head, second, lane) of the permutation has a one in the row
        of its partner in the other half of the head."""
        dtype, d, depth = hidden.x_hbm.dtype, heads.head_dim, heads.depth
        row, column = nl.arange(P_MAX)[:, None], nl.arange(P_MAX)[None, :]
        identity_sb = select_equal(row, column, (P_MAX, P_MAX), dtype)
        of_tile, half = P_MAX // depth, d // 2
        row, head = nl.arange(P_MAX)[:, None, None, None], nl.arange(of_tile)
        second, lane = nl.arange(2)[None, None, :, None], nl.arange(half)[None, None, None, :]
        partner = head[None, :, None, None] * depth + half - second * half + lane
        ones_sb = select_equal(row, partner, (P_MAX, of_tile, 2, half), dtype)
        swap_sb = nisa.memset((P_MAX, P_MAX), 0.0, dtype)
        by_head_sb = swap_sb[:, 0 : of_tile * depth].reshape((P_MAX, of_tile, depth))
        by_head_sb[:, :, 0:d] = nisa.tensor_copy(ones_sb.reshape((P_MAX, of_tile, d)))
        zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
        return cls(hidden, norm, heads, qkv, out, cos_hbm, sin_hbm, identity_sb, swap_sb, zero_sb)

    def projection(self, tokens, tiles):
        """The Projection of Tokens [128, H/128, T] with ``tiles``, (start, size) of some each."""
        (block, x_sb), heads = tokens, self.heads
        scales, columns = norm_scales(x_sb, self.norm, tiles), nl.ds(block.start, block.count)
        tables = [
            nisa.tensor_tensor(nl.load(table_hbm[:, columns]), scales.along_sb, nl.multiply)
            for table_hbm in (self.cos_hbm, self.sin_hbm)
        ]
        qk_sb = nl.ndarray((P_MAX, heads.q_tiles + heads.stacks, block.count), x_sb.dtype)
        v_sb = [nl.ndarray((size, heads.kv_features), x_sb.dtype) for _, size in tiles]
        return Projection(self, tokens, scales, *tables, tiles, qk_sb, v_sb)


class Projection(NamedTuple):
    """Projections of a Block's Tokens to queries, keys and values, operands and results @ SBUF.

    The ``scales`` of the norm, cos and sin [128, T] times these scales; qk_sb [128, query tiles
    then key tiles, T], and v_sb, [tokens, kv_heads * D] of values for each of the ``tiles`` of
    tokens, (start, size).
    """

    layer: AttentionLayer
    tokens: Tokens
    scales: NormScales
    cos_sb: Sbuf
    sin_sb: Sbuf
    tiles: List[Tuple[int, int]]
    qk_sb: Sbuf
    v_sb: List[Sbuf]

    def project(self, piece, at):
        """Project tile ``at`` of queries, keys and values, which ``piece`` holds. Queries and keys
        are rotated. For values tokens are stationary: they land on partitions, where the sums over
        keys contract them."""
        heads, x_sb, tile = self.layer.heads, self.tokens.x_sb, at - piece.first
        keys, values = heads.q_tiles, heads.q_tiles + heads.stacks  # where their tiles begin
        if at < values:
            # W x [128, T] @ PSUM, H/128 passes of its columns
            x_psum = piece.product((tile, 1, 0, self.tokens.block.count), self.tokens)
            self.rope(x_psum[:, 0, :], at, of_queries=at < keys)
            return
        start = (at - values) * P_MAX
        width = min(P_MAX, heads.kv_features - start)
        for (first, size), norm_sb, rows_sb in zip(self.tiles, self.scales.down_sb, self.v_sb):
            acc_psum = psum((size, width))
            for k in nl.affine_range(x_sb.shape[1]):
                acc_psum[...] += nisa.nc_matmul(
                    x_sb[:, k, nl.ds(first, size)], piece.weight_sb[:, tile, k, 0:width]
                )
            rows_sb[:, nl.ds(start, width)] = nisa.tensor_scalar(acc_psum, nl.multiply, norm_sb)

    def rope(self, x, at, of_queries):
        """Write the rotary embedding of x [128, T] to tile ``at`` of qk_sb.

        VectorE multiplies whole rows by cos and sin; TensorE adds both terms, the second with the
        halves of each head exchanged. Queries are divided by sqrt(D) where that rounds nothing.
        """
        # x cos and x sin, times the norm's scale: they leave PSUM one after another
        terms_sb = nl.ndarray((P_MAX, 2, x.shape[1]), self.qk_sb.dtype)
        terms_sb[:, 0, :] = nisa.tensor_tensor(x, self.cos_sb, nl.multiply)
        terms_sb[:, 1, :] = nisa.tensor_tensor(x, self.sin_sb, nl.multiply)
        # their sum [128, T], two passes: x cos unchanged, x sin with halves of heads exchanged
        layer, rotated_psum = self.layer, psum(x.shape)
        rotated_psum[...] += nisa.nc_matmul(layer.identity_sb, terms_sb[:, 0, :])
        rotated_psum[...] += nisa.nc_matmul(layer.swap_sb, terms_sb[:, 1, :])
        scale = score_scales(layer.heads.head_dim)[0] if of_queries else 1.0
        self.qk_sb[:, at, :] = nisa.activation(
            nl.copy, rotated_psum, bias=layer.zero_sb, scale=scale
        )

    @property
    def context_sb(self) -> Sbuf:
        """[128, q_tiles, T]: contexts take the place of their queries."""
        return self.qk_sb[:, 0 : self.layer.heads.q_tiles, :]

    def store_keys(self, keys_hbm, values_hbm):
        """New keys and values into rows @ HBM."""
        for (column, size), rows_sb in zip(self.tiles, self.v_sb):
            rows = nl.ds(self.tokens.block.start + column, size)
            nl.store(values_hbm[rows, :], rows_sb)
            nl.store(keys_hbm[rows, :], key_rows(self.qk_sb, column, size, self.layer.heads))


def project_qkv(projection):
    """Project a few tokens to queries, keys and values."""
    qkv = projection.layer.qkv
    for first, count in qkv.pieces(projection.tokens.block.count):
        piece = qkv.load(first, count)
        for at in range(first, first + count):
            projection.project(piece, at)


def key_rows(qk_sb, start, tokens, heads):
    """Keys of a span of tokens, behind their queries -> rows [tokens, kv_heads * D] @ SBUF."""
    d, depth = heads.head_dim, heads.depth
    rows_sb = nl.ndarray((tokens, heads.kv_heads, d), qk_sb.dtype)
    for first, count in spans(heads.kv_heads, heads.stack):
        tile = heads.q_tiles + heads.place(first)[0]
        rows_psum = psum((tokens, count * depth), nl.ndarray)
        rows_psum[...] = nisa.nc_transpose(qk_sb[0 : count * depth, tile, nl.ds(start, tokens)])
        features_psum = rows_psum.reshape((tokens, count, depth))[:, :, 0:d]
        rows_sb[:, nl.ds(first, count), :] = nisa.tensor_copy(features_psum)
    return rows_sb.reshape((tokens, heads.kv_features))


# --- Attention ------------------------------------------------------------------------------------
#
# Softmax weights are relative to the maximum of their query; their product with a column of ones
# behind the values is their sum.


def score_scales(head_dim):
    """(factor of the queries, factor of the scores): their product is 1 / sqrt(D).

    A power of two (D = 64) rounds nothing and goes to the queries. Other factors wait for the
    exponential, whose argument is fp32.
    """
    root = math.sqrt(head_dim)
    return (1.0 / root, 1.0) if root in (2.0, 4.0, 8.0, 16.0) else (1.0, 1.0 / root)


# --- Attention of a prompt ------------------------------------------------------------------------
#
# A group is up to 128 tokens of a sequence in up to four query heads that share a KV head. It
# passes twice over its visible keys, up to its last token. An example: 128 tokens, heads A
# and B of 64 features, each with queries, keys and values of its own. Partitions run downwards.
# The projections leave queries and keys with features on partitions, values with tokens there:
#
#     queries, keys: qk_sb         values: v_sb
#     0   +---- 128 tokens ---+    token 0   +--------+--------+
#         | 64 features of A  |              |   64   |   64   |
#     64  +-------------------+              | of A   | of B   |
#         | 64 features of B  |              |        |        |
#     127 +-------------------+    token 127 +--------+--------+
#
# SequenceKeys keeps keys and values by head. An augmented row stands behind the features of keys,
# where TensorE has idle rows, and a column of ones behind the values. For head A:
#
#     k_sb                         q_sb                         v_sb
#     0   +---- 128 keys -----+    0   +--- 128 queries ---+    key 0   +-------------+-+
#         | 64 features of A  |        | 64 features of A  |            | 64 features |1|
#     64  +-------------------+    64  +-------------------+            | of A        |1|
#         |  1    1  ..    1  |        | -maximum of each  |    key 127 +-------------+-+
#         +-------------------+        +-------------------+
#
# First pass: queries are stationary and keys move. Scores have queries on partitions, so VectorE
# finds the maximum of each. A product with the identity brings the maxima to row 64 of q_sb.
#
#     scores_sb, q k               maxima_sb        maxima, transposed
#     query 0   +- 128 keys -+     +--+             +--------- 128 queries --------+
#               | s . . .  . |     |m |     -->     | -m  -m  -m  ..               |
#     query 127 | s s s .. s |     |m |             +------------------------------+
#               +------------+     +--+
#
# Second pass: keys are stationary and queries move, augmented row included. The product is the
# transposed score less its query's maximum. So exp leaves weights with keys on partitions, where
# the product with values contracts them; its column of ones gives the sum of the weights.
#
#     transposed scores            weights_sb                   sums_psum
#     key 0   +- 128 queries -+    key 0   +- 128 queries -+    query 0   +-------------+---+
#             | s-m s-m .. s-m| exp        |  w   w  ..  w |  v           | 64 features |sum|
#             |     s-m .. s-m| -->        |  0   w  ..  w | -->          | of A        |   |
#     key 127 +---------------+    key 127 +---------------+    query 127 +-------------+---+
#
# Each row is divided by its sum and stands beside that of B in rows_sb [128 queries, A | B].
# TensorE transposes both at once: contexts [A and B, 128 queries] take the place of their queries
# in qk_sb, and the output's weight contracts them there.
#
# A group of four heads has four augmented rows of maxima, since TensorE leaves those of head m on
# partition m: each row is zero for the queries of the other heads. Where D is 128 no row of the
# array is idle, and the augmented rows are a product of their own. Maxima may be rounded: they are
# the same for all keys of a query. Scores beyond 2^15 (D = 64) could overflow for that.
#
# ScalarE takes scores out of PSUM in both passes, 380 ns for a bank of 512, since VectorE and
# ScalarE exclude each other there. It bounds both passes, and TensorE has time for the projections
# of other tokens. So the steps of all that is under way take turns, a bank of PSUM at a time.

GROUP_HEADS = MOVING_MAX // P_MAX  # query heads of a group: 128 tokens of each fill a bank of PSUM
LEAD = 2  # groups between their two passes: no engine waits for work that another just began
PROMPT_BYTES = 154 * 1024  # SBUF for the kept tensors of a prompt; steps need some 20 KiB more


def contraction(rows):
    """(slot, rows) of the products that contract so many rows of features and augmented ones."""
    found, slot = [], 0
    while slot * P_MAX < rows:
        found.append((slot, min(P_MAX, rows - slot * P_MAX)))
        slot += 1
    return found


class SequenceKeys(NamedTuple):
    """Keys and values of a sequence @ SBUF, filled block by block: k_sb [128, kv_heads, keys] and
    v_sb [128, keys / 128, kv_heads, D + 1], whole tiles of 128 keys. Augmented rows, ones
    [GROUP_HEADS, 1 or kv_heads, keys], are part of k_sb where D is 64, a tile of their own where it
    is 128. The triangle [128, 128] is MASKED where a key (column) comes after a query (row), else
    0."""

    heads: HeadShape
    triangle_sb: Sbuf
    k_sb: Sbuf
    v_sb: Sbuf
    augmented_sb: Sbuf

    @classmethod
    def of(cls, length, heads, triangle_sb):
        """Room for a sequence of so many tokens."""
        dtype = triangle_sb.dtype
        d, kv_heads, keys = heads.head_dim, heads.kv_heads, whole_tiles(length) * P_MAX
        k_sb = nl.ndarray((P_MAX, kv_heads, keys), dtype)
        v_sb = nl.ndarray((P_MAX, keys // P_MAX, kv_heads, d + 1), dtype)
        v_sb[:, :, :, d : d + 1] = nisa.memset((P_MAX, keys // P_MAX, kv_heads, 1), 1.0, dtype)
        if length < keys:  # the second pass takes whole tiles
            k_sb[:, :, length:keys] = nisa.memset((P_MAX, kv_heads, keys - length), 0.0, dtype)
        if d < P_MAX:  # rows of the array behind the features are idle
            augmented_sb = k_sb[d : d + GROUP_HEADS]
        else:
            augmented_sb = nl.ndarray((GROUP_HEADS, 1, keys), dtype)
        augmented_sb[...] = nisa.memset(augmented_sb.shape, 1.0, dtype)
        return cls(heads, triangle_sb, k_sb, v_sb, augmented_sb)

    def append(self, tile, qk_sb, v_sb):
        """Keep a TokenTile: keys, which lie behind the queries in qk_sb, and values [tokens,
        kv_heads * D]."""
        heads, d, (_, position, column, tokens) = self.heads, self.heads.head_dim, tile
        for head in nl.static_range(heads.kv_heads):
            stack, lanes = heads.place(head)
            self.k_sb[0:d, head, nl.ds(position, tokens)] = nisa.tensor_copy(
                qk_sb[lanes, heads.q_tiles + stack, nl.ds(column, tokens)]
            )
        shape = tokens, heads.kv_heads, d
        self.v_sb[0:tokens, position // P_MAX, :, 0:d] = nisa.tensor_copy(v_sb.reshape(shape))

    def operand(self, head, slot, rows, start, keys):
        """Rows of a slot of the contraction [rows, keys], keys of a head from ``start`` on."""
        if slot == 0:
            return self.k_sb[0:rows, head, nl.ds(start, keys)]
        return self.augmented_sb[0:rows, 0, nl.ds(start, keys)]


class GroupAttention(NamedTuple):
    """Attention of a group: a TokenTile in query heads of a KV ``head`` from the ``first`` on.

    The example names the tiles @ SBUF: q_sb [128, slots, count, tokens], maxima_sb [tokens, count,
    spans of keys], and rows_sb [tokens, count, 128], which the KV heads of a tile of qk_sb share.
    Each of ``sums`` [tokens, heads, D + 1] fp32 @ PSUM has as many heads as a bank holds.
    """

    keys: SequenceKeys
    projection: Projection
    tile: TokenTile
    head: int
    first: int
    rows_sb: Sbuf
    q_sb: Sbuf
    maxima_sb: Sbuf
    sums: List[Sbuf]

    @classmethod
    def of(cls, keys, projection, tile, head, first, rows_sb):
        """Make its tiles; rows_sb tells the count of heads."""
        (tokens, count, _), dtype, d = rows_sb.shape, rows_sb.dtype, keys.heads.head_dim
        q_sb = nl.ndarray((P_MAX, len(contraction(d + GROUP_HEADS)), count, tokens), dtype)
        passes = len(spans(tile.position + tokens, MOVING_MAX))
        maxima_sb = nl.ndarray((tokens, count, passes), dtype)
        banks = spans(count, MOVING_MAX // (d + 1))
        sums = [psum((tokens, heads, d + 1)) for _, heads in banks]
        return cls(keys, projection, tile, head, first, rows_sb, q_sb, maxima_sb, sums)

    @property
    def count(self) -> int:
        """Its query heads."""
        return self.rows_sb.shape[1]

    @property
    def visible(self) -> int:
        """Keys that the last token sees."""
        return self.tile.position + self.tile.tokens

    def own(self, lanes):
        """The ``lanes`` of its tiles of qk_sb [lanes, count, tokens]."""
        (stack, _), group = self.keys.heads.place(self.head), self.keys.heads.group
        tiles, columns = nl.ds(stack * group + self.first, self.count), self.tile[2:]
        return self.projection.qk_sb[lanes, tiles, nl.ds(*columns)]

    def begin(self):
        """Copy the queries, without the other head of their tiles, to the rows of their keys."""
        d, (_, lanes) = self.keys.heads.head_dim, self.keys.heads.place(self.head)
        queries_sb = self.own(lanes)
        self.q_sb[0:d, 0, :, :] = nisa.tensor_copy(queries_sb, engine=nisa.vector_engine)

    def first_pass(self):
        """Steps: (query head, number of a span of up to 512 visible keys, its start, its keys)."""
        every = [*enumerate(spans(self.visible, MOVING_MAX))]
        return [(at, n, *span) for at in range(self.count) for n, span in every]

    def score(self, step):
        """Scores of a query head with a span of keys [tokens, keys], and their maxima."""
        (at, n, start, keys), tokens, layer = step, self.tile.tokens, self.projection.layer
        d, scores_psum = self.keys.heads.head_dim, psum((tokens, keys))
        k_sb = self.keys.operand(self.head, 0, d, start, keys)
        scores_psum[...] += nisa.nc_matmul(self.q_sb[0:d, 0, at, :], k_sb)
        if start + keys == self.visible:  # 128 columns of TensorE: a token sees those up to itself
            triangle_sb = self.keys.triangle_sb[0:tokens, 0:tokens]
            scores_psum[:, nl.ds(keys - tokens, tokens)] += nisa.nc_matmul(
                layer.identity_sb[0:tokens, 0:tokens], triangle_sb
            )
        zero_sb, dtype = layer.zero_sb[0:tokens, :], self.q_sb.dtype
        scores_sb = nisa.activation(nl.copy, scores_psum, bias=zero_sb, dtype=dtype)
        # VectorE compares two bf16 numbers a cycle in SBUF
        self.maxima_sb[:, at, nl.ds(n, 1)] = nisa.tensor_reduce(nl.max, scores_sb, axis=1)

    def augment(self):
        """Fill the augmented rows: each has its head's negated maxima, zero for other heads."""
        tokens, count, layer = self.tile.tokens, self.count, self.projection.layer
        identity_sb = layer.identity_sb
        columns_sb = nisa.tensor_reduce(nl.max, self.maxima_sb, axis=2, negate=True)
        # the same in rows [count, tokens]: 128 columns of TensorE for all heads
        rows_psum = nisa.nc_matmul(columns_sb, identity_sb[0:tokens, 0:tokens])
        rows_sb = nisa.tensor_copy(rows_psum, dtype=self.q_sb.dtype)
        row, head = nl.arange(count)[:, None, None], nl.arange(count)[None, :, None]
        query = nl.arange(tokens)[None, None, :]
        # all rows for every head, times one where the row is its own
        slot, begin = divmod(self.keys.heads.head_dim, P_MAX)
        augmented_sb = self.q_sb[begin : begin + count, slot, :, :]
        augmented_sb[...] = nisa.tensor_tensor(
            rows_sb[row, 0 * head + query], identity_sb[row, head + 0 * query], nl.multiply
        )

    def second_pass(self):
        """Work: tiles of 128 visible keys; contexts follow from the last one."""
        last = whole_tiles(self.visible) - 1
        return [*((self.weigh, tile) for tile in range(last)), (self.weigh_last, last)]

    def weigh_last(self, tile):
        """Weigh the last tile of keys, and make the contexts."""
        self.weigh(tile)
        self.divide()

    def weigh(self, tile):
        """Add exp(scale * (score - maximum)) of a tile of keys, times its values and ones, to the
        sums."""
        d, start, layer = self.keys.heads.head_dim, tile * P_MAX, self.projection.layer
        count, tokens = self.count, self.tile.tokens
        scores_psum = psum((P_MAX, count, tokens))
        for slot, rows in contraction(d + count):
            k_sb = self.keys.operand(self.head, slot, rows, start, P_MAX)
            scores_psum[...] += nisa.nc_matmul(k_sb, self.q_sb[0:rows, slot, :, :])
        given = dict(bias=layer.zero_sb, scale=score_scales(d)[1], dtype=self.q_sb.dtype)
        weights_sb = nisa.activation(nl.exp, scores_psum, **given)
        if start + P_MAX >= self.visible:
            # weights of keys behind a token may be infinite: GpSimdE selects, in 662 cycles
            key, token = nl.arange(P_MAX)[:, None, None], nl.arange(tokens)[None, None, :]
            visible = token + 0 * nl.arange(count)[None, :, None] >= key
            weights_sb = nisa.affine_select(visible, weights_sb, 0.0)
        keys = min(P_MAX, self.visible - start)
        values_sb = self.keys.v_sb[0:keys, tile, self.head, :]
        for at in nl.static_range(count):
            bank, place = divmod(at, self.sums[0].shape[1])
            self.sums[bank][:, place, :] += nisa.nc_matmul(weights_sb[0:keys, at, :], values_sb)

    def divide(self):
        """Divide by the sums of weights. The last head of a tile of qk_sb transposes the contexts
        of all its heads, which take the place of their queries."""
        heads, d, each = self.keys.heads, self.keys.heads.head_dim, self.sums[0].shape[1]
        _, lanes = heads.place(self.head)
        for bank, sums_psum in enumerate(self.sums):
            inverse_sb = nisa.reciprocal(sums_psum[:, :, d])
            for at in nl.static_range(sums_psum.shape[1]):
                self.rows_sb[:, bank * each + at, lanes] = nisa.tensor_scalar(
                    sums_psum[:, at, 0:d], nl.multiply, inverse_sb[:, nl.ds(at, 1)]
                )
        if lanes.stop < P_MAX and self.head + 1 < heads.kv_heads:
            return
        contexts_psum = psum((P_MAX, self.count, self.tile.tokens), nl.ndarray)
        for at in nl.static_range(self.count):
            contexts_psum[:, at, :] = nisa.nc_transpose(self.rows_sb[:, at, :])
        contexts = self.own(slice(0, P_MAX))
        contexts[...] = nisa.tensor_copy(contexts_psum)


# --- Blocks of a prompt ---------------------------------------------------------------------------
#
# A prompt passes in blocks of 256 tokens (384 of wide models). While one attends, TensorE
# multiplies the contexts of the block before it with the output's weight and projects the block
# behind it. Of 640 tokens, three blocks by their numbers, while time runs to the right:
#
#     projections    | 0 |   1   |   2   |       |
#     first pass     |   |   0   |   1   |   2   |
#     second pass    |   |     0 | 0   1 | 1   2 | 2        LEAD groups behind their first pass
#     output         |   |       |   0   |   1   |   2
#
# Work is a list of steps, (method, number), in the order in which they are issued: they project a
# tile of features, multiply two tiles of the output, or weigh a tile of keys.


class WeightPieces(NamedTuple):
    """A Linear that loads each piece of its weight when one of the piece's tiles is first asked
    for: (first, count) of each piece in ``spans``, and the Pieces that are loaded."""

    linear: Linear
    spans: List[Tuple[int, int]]
    loaded: List[Optional[Piece]]

    @classmethod
    def of(cls, linear, spans):
        return cls(linear, spans, [None for _ in spans])

    def piece(self, at):
        """The Piece that holds a tile of features."""
        n = [first <= at < first + count for first, count in self.spans].index(True)
        if self.loaded[n] is None:
            self.loaded[n] = self.linear.load(*self.spans[n])
        return self.loaded[n]


def prompt_weights(layer, tokens):
    """WeightPieces of Q, K and V, keys and values first, and of the output."""
    qkv, out, q_tiles, most = layer.qkv, layer.out, layer.heads.q_tiles, BLOCK_PIECE_BYTES
    others = qkv.pieces(tokens, tiles=qkv.tiles - q_tiles, row_bytes=most)
    queries = qkv.pieces(tokens, tiles=q_tiles, row_bytes=most)
    of_qkv = [*((q_tiles + at, size) for at, size in others), *queries]
    outputs = out.pieces(tokens, last=True, row_bytes=most)
    return WeightPieces.of(qkv, of_qkv), WeightPieces.of(out, outputs)


class PromptBlock(NamedTuple):
    """A Block under way: its Projection, and the WeightPieces of both linear layers."""

    projection: Projection
    qkv: WeightPieces
    out: WeightPieces

    @classmethod
    def of(cls, block, layer, weights):
        """The first weights come before the hidden states [128, H/128, count]."""
        weights[0].piece(layer.heads.q_tiles)
        tokens = layer.hidden.load(block)
        tiles = [(tile.column, tile.tokens) for tile in block.tiles()]
        return cls(layer.projection(tokens, tiles), *weights)

    @property
    def block(self) -> Block:
        return self.projection.tokens.block

    @property
    def few(self) -> bool:
        """Whether its output is one step."""
        return self.block.start + self.block.count <= P_MAX

    def projections(self):
        """Work: a tile of keys, values or queries at a time, H/128 passes of the block's tokens."""
        pieces = self.qkv.spans
        return [(self.project, first + at) for first, count in pieces for at in range(count)]

    def outputs(self):
        """Work: two tiles of the output at a time, from these on."""
        tiles = 1 if self.few else self.out.linear.tiles
        return [(self.store_output, first) for first in range(0, tiles, 2)]

    def project(self, at):
        """Project to a tile of queries, keys or values."""
        self.projection.project(self.qkv.piece(at), at)

    def store_output(self, first):
        """Store two tiles of the output [128, 2, count] together, each after a pass of all tokens
        for each tile of contexts. Few tokens store all tiles."""
        context_sb, out, block = self.projection.context_sb, self.out.linear, self.block
        contexts, out_hbm = Tokens(block, context_sb), self.projection.layer.hidden.out_hbm
        if self.few:
            store_product(out, [contexts], out_hbm)
            return
        tiles = min(2, out.tiles - first)
        out_sb = nl.ndarray((P_MAX, tiles, block.count), context_sb.dtype)
        for n in nl.static_range(tiles):
            piece = self.out.piece(first + n)
            out_psum = piece.product((first + n - piece.first, 1, 0, block.count), contexts)
            out_sb[:, nl.ds(n, 1), :] = nisa.tensor_copy(out_psum)
        nl.store(block_tiles(out_hbm, block, first, tiles), out_sb)

    def groups(self, sequences):
        """GroupAttention of all its queries; KV heads of a tile of qk_sb follow each other.
        ``sequences`` are the SequenceKeys by number."""
        projection, heads, found = self.projection, self.projection.layer.heads, []
        for tile in self.block.tiles():
            keys = sequences[tile.sequence]
            for begin, stacked in spans(heads.kv_heads, heads.stack):
                for first, count in spans(heads.group, GROUP_HEADS):
                    rows_sb = nl.ndarray((tile.tokens, count, P_MAX), projection.qk_sb.dtype)
                    if stacked < heads.stack:  # lanes without a head
                        rows_sb[...] = nisa.memset(rows_sb.shape, 0.0, rows_sb.dtype)
                    found += [
                        GroupAttention.of(keys, projection, tile, begin + at, first, rows_sb)
                        for at in range(stacked)
                    ]
        return found


def run_all(work):
    """Run the steps of ``work`` one after another."""
    for step, number in work:
        step(number)


def step_share(items, step, steps):
    """The ``step``-th of ``steps`` equal parts of a list."""
    return items[len(items) * step // steps : len(items) * (step + 1) // steps]


def take_turns(group, ready, work):
    """Run the first pass of a group, in turns with the second pass of the ``ready`` groups and with
    ``work``. The compiler grants PSUM in the order in which its tiles are first used."""
    group.begin()
    steps, second = group.first_pass(), [step for each in ready for step in each.second_pass()]
    for n, step in enumerate(steps):
        group.score(step)
        if n + 1 == len(steps):
            group.augment()
        run_all(step_share(second, n, len(steps)) + step_share(work, n, len(steps)))


class PromptPlan(NamedTuple):
    """How the Blocks of a prompt use SBUF: whether weights ``stay`` there or come again with each
    block, and whether blocks ``overlap`` or follow each other."""

    blocks: List[Block]
    stay: bool
    overlap: bool

    @classmethod
    def fitting(cls, features, heads, tokens, length, itemsize):
        """The plans that fit into SBUF, fastest first."""
        blocks = token_blocks(features, tokens, length)
        plans = cls(blocks, True, True), cls(blocks, False, True), cls(blocks, False, False)
        sizes = features // P_MAX, heads, itemsize
        return [plan for plan in plans if plan.bytes(*sizes) <= PROMPT_BYTES]

    @classmethod
    def of(cls, layer, length):
        """The fastest plan that fits."""
        x_hbm = layer.hidden.x_hbm
        plans = cls.fitting(x_hbm.shape[0], layer.heads, x_hbm.shape[1], length, x_hbm.itemsize)
        assert plans, (
            f"attention of a prompt of {length} tokens keeps more than {PROMPT_BYTES} bytes of a "
            "partition; take a higher degree, or models/extended.py"
        )
        return plans[0]

    def bytes(self, k_tiles, heads, itemsize):
        """Bytes per partition that stay in SBUF, term by term. Of overlapping blocks two have
        hidden states, and three queries and keys."""
        block, overlapping = self.blocks[0], self.overlap and len(self.blocks) > 1
        qk_tiles, kept_hidden, kept_qk = heads.q_tiles + heads.stacks, 1, 1
        weight_tiles = (qk_tiles + whole_tiles(heads.kv_features) + heads.q_tiles) * k_tiles
        sequences = max(1, block.count // block.length)
        if overlapping:
            kept_hidden, kept_qk = 2, 3
            sequences *= 2 if self.blocks[-1].start >= block.length else 1
        a_key_and_value = heads.kv_heads * (P_MAX + heads.head_dim + 1)  # of 128 tokens
        weights = weight_tiles * P_MAX * itemsize if self.stay else 4 * BLOCK_PIECE_BYTES
        keys_and_values = sequences * whole_tiles(block.length) * a_key_and_value * itemsize
        hidden = kept_hidden * k_tiles * block.count * itemsize
        queries_and_keys = kept_qk * qk_tiles * block.count * itemsize
        return weights + keys_and_values + hidden + queries_and_keys


class PromptAttention(NamedTuple):
    """State that the blocks of a prompt share: the layer, the plan, the triangle of SequenceKeys,
    these by the number of their sequence, and new keys and values in rows @ HBM."""

    layer: AttentionLayer
    plan: PromptPlan
    triangle_sb: Sbuf
    sequences: Dict[int, SequenceKeys]
    keys_hbm: Hbm
    values_hbm: Hbm

    def run(self):
        """Run all blocks, which overlap or follow each other."""
        blocks, weights = self.plan.blocks, prompt_weights(self.layer, self.plan.blocks[0].count)
        for some in [blocks] if self.plan.overlap else [[block] for block in blocks]:
            self.run_blocks(some, weights)

    def run_blocks(self, blocks, weights):
        """Run blocks that overlap. The first projections and the last output run alone."""
        current, before, waiting = self.start(blocks[0], weights), None, []
        run_all(current.projections())
        for block in [*blocks[1:], None]:
            self.keep_keys(current)
            behind = None if block is None else self.start(block, weights)
            waiting = self.attend(current, before, behind, waiting)
            current.projection.store_keys(self.keys_hbm, self.values_hbm)
            before, current = current, behind
        run_all([step for group in waiting for step in group.second_pass()])
        run_all(before.outputs())

    def start(self, block, weights):
        """The PromptBlock of a Block."""
        if not self.plan.stay:
            weights = prompt_weights(self.layer, block.count)
        return PromptBlock.of(block, self.layer, weights)

    def keep_keys(self, current):
        """Keep the keys and values of a PromptBlock for its queries and for later blocks."""
        block, projection = current.block, current.projection
        for tile, v_sb in zip(block.tiles(), projection.v_sb):
            if tile.position == 0:
                made = SequenceKeys.of(block.length, projection.layer.heads, self.triangle_sb)
                self.sequences[tile.sequence] = made
            self.sequences[tile.sequence].append(tile, projection.qk_sb, v_sb)

    def attend(self, current, before, behind, waiting):
        """Run the attention of a PromptBlock, in turns with the output of the block ``before`` and
        the projections of the block ``behind`` (None where there is none). ``waiting`` groups of
        the block before get their second pass; this block's last groups wait and are returned."""
        groups = current.groups(self.sequences)
        projections = [] if behind is None else behind.projections()
        outputs = [] if before is None else before.outputs()
        lead = max(1, min(LEAD, len(groups) // 2))
        for n, group in enumerate(groups):
            # the last ``lead`` groups, this one among them, wait for their second pass
            ready = waiting[: max(0, len(waiting) - lead + 1)]
            waiting = [*waiting[len(ready) :], group]
            work = step_share(projections, n, len(groups))
            if n >= lead:  # contexts of the block before are complete
                work += step_share(outputs, n - lead, len(groups) - lead)
            take_turns(group, ready, work)
        if len(groups) == lead:
            run_all(outputs)
        return waiting


# --- Decode attention -----------------------------------------------------------------------------
#
# One new token per sequence has few rows of scores, and an instruction on 4 partitions takes as
# long as one on 128. So the query heads of all sequences share the partitions of one tile of
# scores. Queries stand block by block in a stationary operand that is zero elsewhere, with one slot
# of the contraction per sequence and stack of KV heads. The slots' products add up in PSUM. One
# more product adds the mask: a selection of sequences times the bias of their keys.
#
# The example again: one sequence, KV heads A and B of 64 features with two query heads each, 256
# cached keys. Queries stand where the keys of their head do, and meet zeros of the other one:
#
#     q_sb                          k_sb                             scores_sb
#     0   +--A0--A1---0---0--+     0   +----- 256 keys -----+-1-+    A0 +--- 256 + 1 keys ---+
#         |   64 features    |         |   64 features of A |new|    A1 | s   s   s  ..    s |
#     64  +---0---0--B0--B1--+     64  +--------------------+key|    B0 | s   s   s  ..    s |
#         |   64 features    |         |   64 features of B |   |    B1 | s   s   s  ..    s |
#     127 +------------------+     127 +--------------------+---+       +--------------------+
#
# Rows of scores lie beside each other, so one instruction finds their maxima, and one makes weights
# of them. A partition of the cache has four neighbouring keys of a head, since a row of DMA is long
# then: 64 partitions for each head, four tiles of keys. The weights are transposed to those places:
#
#     spread_sb, of one tile        v_sb, of one tile             sums_psum, of four tiles
#     0   +--A0--A1---0---0--+     0   +---------------+-+        A0 +---------------+---+
#         |   w   w   0   0  |         |   values of A |1|        A1 |  64 features  |sum|
#     64  +---0---0--B0--B1--+     64  +---------------+-+        B0 |               |   |
#         |   0   0   w   w  |         |   values of B |1|        B1 +---------------+---+
#     127 +------------------+     127 +---------------+-+
#
# New keys and values have a product of their own. Rows divided by their sums are transposed to
# context_sb, a column for each head, where the output's weight contracts them.


CACHE_BYTES = 96 * 1024  # SBUF for the caches of a step, which come before the weights
KEY_BYTES = 64 * 1024  # for their keys on the way, before these are transposed
DECODE_KEYS = 2048  # cached keys up to which a step has them all in SBUF at once


def cache_runs(length, most=P_MAX):
    """(lanes, runs): how a cache of so many keys lies on at most ``most`` partitions.

    Partition p takes the ``runs`` keys from p * runs on, which lie next to each other in HBM; tile
    t holds the keys t, t + runs, ... Sums over keys allow any order, if the mask has it, too.
    """
    runs = math.ceil(length / most)
    while length % runs:
        runs += 1
    return length // runs, runs


def fits_at_once(length, sequences, heads, itemsize):
    """Whether a decode step has the caches of all sequences, of so many keys each, in SBUF."""
    keys = whole_tiles(length) * P_MAX
    runs = cache_runs(keys, P_MAX // heads.kv_heads)[1]
    # of a partition: transposed keys, a row of the mask, and values
    each = itemsize * (keys * (heads.stacks + 1) + runs * (heads.head_dim + 1))
    return length <= DECODE_KEYS and sequences * each <= CACHE_BYTES


class CachedSequences(NamedTuple):
    """The cache of ``count`` sequences from ``first`` on @ SBUF, and room for their new tokens,
    ``each`` of a sequence and T in all: one of several sequences, or several of one.

    Of each sequence there are ``keys``. k_sb [128, slots, keys + T] has them transposed: slot b *
    stacks + s the heads of stack s of sequence b. Its last columns take the new keys and are zero
    for other sequences. mask_sb [T, keys + T] is added to scores. v_sb [kv_heads * lanes, count,
    tiles, D + 1] has values, the lanes of each head in turn, and a column of ones, which gives the
    sum of the weights.
    """

    first: int
    count: int
    keys: int
    k_sb: Sbuf
    mask_sb: Sbuf
    v_sb: Sbuf
    each: int = 1


def stack_keys(k_sb, rows, first_slot, first_column, heads, first_head=0):
    """Transpose keys into a sequence's slots of k_sb [128, slots, keys]. Each of ``rows`` [lanes,
    heads, depth] @ SBUF has a tile of keys, for the heads from ``first_head`` on. TensorE
    transposes a stack of heads at once; the tiles that share a PSUM bank leave it in one copy.
    """
    lanes, count, depth = rows[0].shape
    for head, stacked in spans(count, heads.stack):
        slot, features = first_slot + heads.place(first_head + head)[0], stacked * depth
        for at, together in spans(len(rows), MOVING_MAX // lanes):
            keys_psum = psum((features, together, lanes), nl.ndarray)
            for n in nl.static_range(together):
                keys_psum[:, n, :] = nisa.nc_transpose(rows[at + n][:, nl.ds(head, stacked), :])
            columns = nl.ds(first_column + at * lanes, together * lanes)
            k_sb[0:features, slot, columns] = nisa.tensor_copy(
                keys_psum.reshape((features, together * lanes))
            )


def room_for_keys(bias_hbm, first, count, heads, each=1):
    """Make k_sb and mask_sb of CachedSequences, without the cached keys. A token sees its own new
    key and, of the same sequence, those before it. The bias [T, keys] has a row for each token."""
    (_, length), dtype, tokens = bias_hbm.shape, bias_hbm.dtype, count * each
    shape = (P_MAX, count * heads.stacks, length + tokens)
    k_sb, new = nl.ndarray(shape, dtype), nl.ds(length, tokens)
    if heads.leaves_lanes():
        k_sb[...] = nisa.memset(shape, 0.0, dtype)
    k_sb[:, :, new] = nisa.memset((P_MAX, count * heads.stacks, tokens), 0.0, dtype)
    mask_sb = nl.ndarray((tokens, length + tokens), dtype)
    mask_sb[:, 0:length] = nl.load(bias_hbm[nl.ds(first * each, tokens), :])
    if tokens == 1:
        mask_sb[:, new] = nisa.memset((1, 1), 0.0, dtype)
    elif each > 1:
        mask_sb[:, new] = causal_mask(tokens, dtype)
    else:
        row, column = nl.arange(count)[:, None], nl.arange(count)[None, :]
        diagonal_sb = select_equal(row, column, (count, count), dtype)  # 1, 0 to 0, MASKED
        mask_sb[:, new] = nisa.tensor_scalar(
            diagonal_sb, nl.subtract, 1.0, op1=nl.multiply, operand1=-masked(dtype)
        )
    return k_sb, mask_sb


def cached_sequences(keys_hbm, values_hbm, bias_hbm, first, count, heads, each=1):
    """Load the CachedSequences of a decode step from keys and values @ HBM [B, kv_heads, L, D] and
    the bias of keys [T, L]. Keys and bias have the type of x; values may have another one."""
    batch, kv_heads, length, d = keys_hbm.shape
    # KV heads share the partitions: a row of DMA is kv_heads times as long, and one product over
    # all partitions serves all heads
    lanes, tiles = cache_runs(length, P_MAX // kv_heads)
    partitions, whole = kv_heads * lanes, heads.depth == d
    keys_hbm = keys_hbm.reshape((batch, kv_heads, lanes, tiles, d))
    values_hbm = values_hbm.reshape((batch, partitions, tiles, d))
    k_sb, mask_sb = room_for_keys(bias_hbm, first, count, heads, each)
    together = KEY_BYTES // (keys_hbm.itemsize * tiles * heads.depth * heads.stack)
    for b in nl.affine_range(count):
        # keys [lanes, some heads, tiles, D], rows of tiles * D
        for start, some in spans(kv_heads, max(1, together) * heads.stack):
            shape, dtype = (lanes, some, tiles, heads.depth), keys_hbm.dtype
            rows_sb = nl.ndarray(shape, dtype) if whole else nisa.memset(shape, 0.0, dtype)
            for head in nl.affine_range(some):
                rows_sb[:, head, :, 0:d] = nl.load(keys_hbm[first + b, start + head])
            rows = [rows_sb[:, :, tile, :] for tile in range(tiles)]
            stack_keys(k_sb, rows, b * heads.stacks, 0, heads, start)
    # values come after the rows of keys have left SBUF, a load a sequence: heads and lanes follow
    # each other in HBM; GpSimdE puts ones behind them
    v_sb = nisa.memset((partitions, count, tiles, d + 1), 1.0, values_hbm.dtype)
    for b in nl.affine_range(count):
        v_sb[:, b, :, 0:d] = nisa.tensor_copy(
            nl.load(values_hbm[first + b]), engine=nisa.gpsimd_engine
        )
    return CachedSequences(first, count, length, k_sb, mask_sb, v_sb, each)


def decode_queries(qk_sb, cache, heads):
    """Queries of the sequences, block by block [128, slots, rows] @ SBUF, and ones where a row is a
    new token's [T, rows].

    Rows of a sequence follow each other, those of a head, and a head's tokens; slot b * stacks + s
    holds the heads of stack s of that sequence in its rows.
    """
    each, group, dtype = cache.each, heads.group, qk_sb.dtype
    slots, owners = cache.count * heads.stacks, cache.count * heads.q_heads
    q_sb = nisa.memset((P_MAX, slots, owners * each), 0.0, dtype)
    by_head_sb, rows = q_sb.reshape((P_MAX, slots, owners, each)), owners * each
    for b in nl.static_range(cache.count):
        columns = nl.ds((cache.first + b) * each, each)
        for kv_head in nl.static_range(heads.kv_heads):
            stack, lanes = heads.place(kv_head)
            own = nl.ds(b * heads.q_heads + kv_head * group, group)
            by_head_sb[lanes, b * heads.stacks + stack, own, :] = nisa.tensor_copy(
                qk_sb[lanes, nl.ds(stack * group, group), columns]
            )
    tokens = cache.count * each
    if tokens == 1:
        return q_sb, nisa.memset((1, rows), 1.0, dtype)
    shape = tokens, cache.count, heads.q_heads, each
    token, sequence = nl.arange(tokens)[:, None, None, None], nl.arange(cache.count)
    owner = each * sequence[None, :, None, None] + nl.arange(each)[None, None, None, :]
    owner = owner + 0 * nl.arange(heads.q_heads)[None, None, :, None]
    return q_sb, select_equal(token, owner, shape, dtype).reshape((tokens, rows))


def decode_scores(qk_sb, cache, heads):
    """Masked scores of all rows against cached and new keys [rows, keys + T] @ SBUF."""
    q_sb, which_sb = decode_queries(qk_sb, cache, heads)
    for b in nl.affine_range(cache.count):
        new = nl.ds(cache.keys + b * cache.each, cache.each)
        columns = nl.ds((cache.first + b) * cache.each, cache.each)
        for stack in nl.affine_range(heads.stacks):
            cache.k_sb[:, b * heads.stacks + stack, new] = nisa.tensor_copy(
                qk_sb[:, heads.q_tiles + stack, columns]
            )
    (_, slots, rows), keys = q_sb.shape, cache.k_sb.shape[2]
    scores_sb = nl.ndarray((rows, keys), q_sb.dtype)
    for at, size in spans(keys, MOVING_MAX):
        columns = nl.ds(at, size)
        scores_psum = psum((rows, size))
        for slot in nl.affine_range(slots):
            scores_psum[...] += nisa.nc_matmul(q_sb[:, slot, :], cache.k_sb[:, slot, columns])
        scores_psum[...] += nisa.nc_matmul(which_sb, cache.mask_sb[:, columns])
        scores_sb[:, columns] = nisa.tensor_copy(scores_psum)
    return scores_sb


def transposed_tiles(x_sb, tiles, width):
    """Transpose ``tiles`` of [Q, width] @ SBUF that lie side by side -> [width, tiles, Q].

    TensorE multiplies by the identity, into fp32 as always. One copy takes all tiles of a PSUM bank
    out of it.
    """
    queries = x_sb.shape[0]
    out_sb = nl.ndarray((width, tiles, queries), x_sb.dtype)
    for at, count in spans(tiles, MOVING_MAX // queries):
        transposed_psum = psum((width, count, queries), nl.ndarray)
        for t in nl.affine_range(count):
            transposed_psum[:, t, :] = nisa.nc_transpose(x_sb[:, nl.ds((at + t) * width, width)])
        out_sb[:, nl.ds(at, count), :] = nisa.tensor_copy(transposed_psum)
    return out_sb


def spread_weights(weights_sb, cache, heads):
    """Weights of cached keys [rows, keys] @ SBUF -> [kv_heads * lanes, kv_heads, tiles, B, group].

    TensorE transposes them, lanes on partitions, and then copies each KV head's part to that head's
    lanes. Identities that are zero at other heads' lanes copy it.
    """
    (partitions, count, tiles, _), dtype = cache.v_sb.shape, weights_sb.dtype
    kv_heads, group, rows = heads.kv_heads, heads.group, weights_sb.shape[0]
    lanes = partitions // kv_heads
    transposed_sb = transposed_tiles(weights_sb, tiles, lanes)
    of_heads_sb = transposed_sb.reshape((lanes, tiles, count, kv_heads, group))
    lane, column = nl.arange(lanes)[:, None], nl.arange(2 * partitions - lanes)[None, :]
    shape = lanes, 2 * partitions - lanes
    place_sb = select_equal(lane + partitions - lanes, column, shape, dtype)
    spread_sb = nl.ndarray((partitions, kv_heads, tiles, count, group), dtype)
    for at, size in spans(tiles, MOVING_MAX // rows):
        some, columns = nl.ds(at, size), size * count * group
        spread_psum = psum((partitions, kv_heads, columns), nl.ndarray)
        for head in nl.static_range(kv_heads):
            window = nl.ds(partitions - (head + 1) * lanes, partitions)
            spread_psum[:, head, :] = nisa.nc_matmul(
                place_sb[:, window], of_heads_sb[:, some, :, head, :]
            )
        shape = (partitions, kv_heads, size, count, group)
        spread_sb[:, :, some, :, :] = nisa.tensor_copy(spread_psum.reshape(shape))
    return spread_sb


def new_weights(weights_sb, cache, heads):
    """Transpose the weights of the new keys [rows, T] @ SBUF -> [T, kv_heads, rows]; a head's part
    is zero in the rows of other heads."""
    kv_heads, group, rows = heads.kv_heads, heads.group, weights_sb.shape[0]
    count, tokens = cache.count, cache.count * cache.each
    transposed_psum = psum((tokens, rows), nl.ndarray)
    transposed_psum[...] = nisa.nc_transpose(weights_sb[:, nl.ds(cache.keys, tokens)])
    of_heads_psum = transposed_psum.reshape((tokens, count, kv_heads, group))
    spread_sb = nisa.memset((tokens, kv_heads, count, kv_heads, group), 0.0, weights_sb.dtype)
    for head in nl.affine_range(kv_heads):
        spread_sb[:, head, :, head, :] = nisa.tensor_copy(of_heads_psum[:, :, head, :])
    return spread_sb.reshape((tokens, kv_heads, rows))


class CachedWeights(NamedTuple):
    """Softmax weights of some sequences' new tokens over their cached keys and new ones @ SBUF, as
    ``spread_weights`` and ``new_weights`` leave them, relative to each row's maximum; and the new
    values with a column of ones [T, kv_heads, D + 1]."""

    spread_sb: Sbuf
    new_sb: Sbuf
    new_values_sb: Sbuf

    @classmethod
    def of(cls, qk_sb, v_sb, cache, heads):
        """Weigh the keys for queries in qk_sb; v_sb has the new values [T, kv_heads * D]."""
        tokens, d = cache.count * cache.each, heads.head_dim
        # weights [rows, keys + T]: 512 keys move a pass, one for each slot and the mask
        scores_sb, scale = decode_scores(qk_sb, cache, heads), score_scales(d)[1]
        # VectorE compares two bf16 numbers a cycle if the result is bf16, too; a maximum is
        neg_max_sb = nisa.tensor_reduce(nl.max, scores_sb, axis=1, negate=True)
        if scale != 1.0:
            neg_max_sb = nisa.tensor_scalar(neg_max_sb, nl.multiply, scale, dtype=nl.float32)
        weights_sb = nisa.activation(nl.exp, scores_sb, bias=neg_max_sb, scale=scale)
        # the same with keys on partitions, as values have them: cached ones of all heads, and new
        # ones; several tokens of a sequence are rows like as many query heads
        rows = heads._replace(q_heads=heads.q_heads * cache.each)
        spread_sb = spread_weights(weights_sb, cache, rows)
        new_sb = new_weights(weights_sb, cache, rows)
        new_values_sb = nisa.memset((tokens, heads.kv_heads, d + 1), 1.0, v_sb.dtype)
        new_values_sb[:, :, 0:d] = nisa.tensor_copy(v_sb.reshape((tokens, heads.kv_heads, d)))
        return cls(spread_sb, new_sb, new_values_sb)


def attend_cached(qk_sb, v_sb, cache, heads, context_sb):
    """Attend from some sequences' new tokens to their cache and themselves, into these tokens'
    columns of context_sb [128, tiles, T]."""
    count, rows, d = cache.count, heads.q_heads * cache.each, heads.head_dim
    contexts_psum = psum((d, rows, count), nl.ndarray)
    weights = CachedWeights.of(qk_sb, v_sb, cache, heads)
    # context of each sequence [rows, D + 1]: D + 1 columns of values move, a pass for each tile of
    # cached keys and for each head's new keys; divided by the last column, it is transposed
    for b in nl.affine_range(count):
        sums = psum((rows, d + 1))
        for t in nl.affine_range(cache.v_sb.shape[2]):
            sums[...] += nisa.nc_matmul(weights.spread_sb[:, :, t, b, :], cache.v_sb[:, b, t, :])
        for head in nl.affine_range(heads.kv_heads):
            own_sb = weights.new_sb[:, head, nl.ds(b * rows, rows)]
            sums[...] += nisa.nc_matmul(own_sb, weights.new_values_sb[:, head, :])
        inverse_sb = nisa.reciprocal(sums[:, d : d + 1])
        rows_sb = nisa.tensor_scalar(sums[:, 0:d], nl.multiply, inverse_sb, dtype=context_sb.dtype)
        contexts_psum[:, :, b] = nisa.nc_transpose(rows_sb)
    # [D, q_heads, T] to the lanes and tiles of the heads, all tokens at once
    by_token_psum = contexts_psum.reshape((d, heads.q_heads, count * cache.each))
    columns = nl.ds(cache.first * cache.each, count * cache.each)
    for kv_head in nl.static_range(heads.kv_heads):
        (stack, lanes), group = heads.place(kv_head), heads.group
        members, tiles = nl.ds(kv_head * group, group), nl.ds(stack * group, group)
        place = context_sb[nl.ds(lanes.start, d), tiles, columns]
        place[...] = nisa.tensor_copy(by_token_psum[:, members, :])


def decode_step(layer, tokens, caches, keys_hbm, values_hbm):
    """Do the work of ``attention_decode_kernel`` after its residual sum, Tokens [128, H/128, B],
    over all CachedSequences. New keys and values go into rows @ HBM."""
    heads, (block, x_sb) = layer.heads, tokens
    # queries and keys [128, tiles, B], values [B, kv_heads * D]: H/128 passes of 64 columns a tile,
    # a fifth of the time that DMA takes for its weights
    tiles = [(cache.first * cache.each, cache.count * cache.each) for cache in caches]
    projection = layer.projection(tokens, tiles)
    project_qkv(projection)
    nl.store(keys_hbm, key_rows(projection.qk_sb, 0, block.count, heads))
    for tile, rows_sb in zip(tiles, projection.v_sb):
        nl.store(values_hbm[nl.ds(*tile), :], rows_sb)
    # context [128, tiles, B] while the first output weights arrive; lanes without a head are zero
    shape = P_MAX, heads.q_tiles, block.count
    context_sb = nl.ndarray(shape, x_sb.dtype)
    if heads.leaves_lanes():
        context_sb[...] = nisa.memset(shape, 0.0, x_sb.dtype)
    for cache, new_sb in zip(caches, projection.v_sb):
        attend_cached(projection.qk_sb, new_sb, cache, heads, context_sb)
    store_product(layer.out, [Tokens(block, context_sb)], layer.hidden.out_hbm)


# --- MLP ------------------------------------------------------------------------------------------
#
# Gate and up multiply the same hidden states and leave inner features on partitions, 128 a tile. So
# silu(gate) * up lies as down contracts it, and nothing is transposed. Weights are read once for up
# to TOKEN_CHUNK tokens, whose inner features stay in SBUF. A rank of Llama-3.2-1B at degree 2 has
# 32 tiles of them: 64 bytes of a partition for each token, beside 32 bytes of hidden states. 1024
# tokens take 96 KiB; wider models pass in chunks of fewer tokens.


class InnerTokens(NamedTuple):
    """Tokens on their way through the MLP @ SBUF: hidden states [128, H/128, count], the scale of
    their norm [128, count], and the input of down [128, F/128, count]."""

    hidden: Tokens
    along_sb: Sbuf
    inner: Tokens

    def gate(self, gate, up, bank, zero_sb, act):
        """Compute act(gate) * up for a bank of ``psum_banks`` of two Pieces."""
        (first, tiles, at, count), factors = bank, []
        columns = nl.ds(at, count)
        for piece in (gate, up):
            out_psum = piece.product(bank, self.hidden)
            out_sb = nl.ndarray(out_psum.shape, self.hidden.x_sb.dtype)
            for tile in nl.affine_range(tiles):
                out_sb[:, tile, :] = nisa.tensor_tensor(
                    out_psum[:, tile, :], self.along_sb[:, columns], nl.multiply
                )
            is_gate = piece is gate
            factors.append(nisa.activation(act, out_sb, bias=zero_sb) if is_gate else out_sb)
        inner_sb = self.inner.x_sb[:, nl.ds(gate.first + first, tiles), columns]
        inner_sb[...] = nisa.tensor_tensor(*factors, nl.multiply)


def gated_mlp(hidden, norm, linears, length, most, act=nl.silu):
    """Do the work of ``swiglu_mlp_kernel`` for Hidden states with the Linears gate, up and down.
    Each ``most`` tokens take a pass over the weights. ``act`` is another function than SiLU."""
    x_hbm, (gate, up, down) = hidden.x_hbm, linears
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    for blocks in grouped(token_blocks(*x_hbm.shape, length or x_hbm.shape[1]), most):
        # the first pieces of gate and up [128, tiles, H/128, 128] come before the hidden states
        # [128, H/128, count] of each block: TensorE multiplies the first features while others come
        pieces = gate.pieces(blocks[0].count)
        loaded, inner = [linear.load(*pieces[0]) for linear in (gate, up)], []
        for block in blocks:
            tokens = hidden.load(block)
            along_sb = norm_scales(tokens.x_sb, norm, spans(block.count, P_MAX)).along_sb
            inner_sb = nl.ndarray((P_MAX, down.k_tiles, block.count), x_hbm.dtype)
            inner.append(InnerTokens(tokens, along_sb, Tokens(block, inner_sb)))
        # silu(gate) * up [128, F/128, count], features on partitions as down contracts them. A PSUM
        # bank at a time: H/128 passes of its tokens for each tile, while DMA loads the next piece
        # and VectorE and ScalarE finish the bank before
        for first, size in pieces:
            if first > 0:
                loaded = [linear.load(first, size) for linear in (gate, up)]
            for tokens in inner:
                for bank in psum_banks(size, tokens.hidden.block.count):
                    tokens.gate(*loaded, bank, zero_sb, act)
        # down [128, H/128, count]: F/128 passes a tile, the last tiles' weights alone at the end
        store_product(down, [tokens.inner for tokens in inner], hidden.out_hbm)


# --- Kernels, in the order of the model -----------------------------------------------------------
#
# Several kernels take these arguments, for T tokens of B sequences:
#
#   x_hbm, delta_hbm      [H, T]              hidden states, and what is added to them first; the
#                                             first layer's delta is None, and no sum comes out
#   norm                  Norm                None for none
#   qkv_w_hbm, out_w_hbm  kernel weights      of Q, K and V together, and of the output
#   cos_hbm, sin_hbm      [128, T]            of each lane of a tile of heads, the sine signed
#   heads                 HeadShape           of this rank
#   keys_hbm, values_hbm  [B, kv heads, L, D] the cache; new ones come out, [T, kv heads * D]
#   bias_hbm              [B, keys]           type of x: 0 for keys that count, MASKED for others
#
# Tensors are arguments by themselves: nothing public shows tensors inside of tuples, dicts or
# classes as arguments of SDK 2.21. Norm and HeadShape hold numbers, constants of a trace. A kernel
# makes its results @ HBM at its top level, since the compiler refuses results that helpers made.


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None):
    """Linear layer, after RMSNorm where ``norm`` is given: x [H, T] -> [T, N], type of x.

    The LM head: tokens are few and leave the device, so they come out in rows. N is whole tiles.
    """
    linear = Linear(weight_hbm, x_hbm.shape[0] // P_MAX)
    shape = x_hbm.shape[1], linear.tiles * P_MAX
    out_hbm = nl.ndarray(shape, x_hbm.dtype, buffer=nl.shared_hbm)
    multiply_rows(x_hbm, linear, norm, out_hbm)
    return out_hbm


def multiply_rows(x_hbm, linear, norm, out_hbm):
    """Do the work of ``linear_kernel`` with a Linear, into out [T, N] @ HBM."""
    tokens, dtype = x_hbm.shape[1], x_hbm.dtype
    rows_hbm = out_hbm.reshape((tokens, P_MAX, linear.tiles))
    for block in token_blocks(*x_hbm.shape, 1):
        # hidden states [128, H/128, T] and the scale of their norm: some KiB, before the weights
        x = Hidden(x_hbm).load(block)
        along_sb = norm_scales(x.x_sb, norm, spans(block.count, P_MAX)).along_sb
        # W @ x [128, tiles, T] in PSUM, a piece of the weights after another at DMA's pace; VectorE
        # takes it out token by token, scaled, each into a row of its own [128, T, N/128]
        fitting = HEAD_BYTES // (linear.tiles * x_hbm.itemsize)
        for start, count in spans(block.count, min(P_MAX, fitting)):
            out_sb = nl.ndarray((P_MAX, count, linear.tiles), dtype)
            for first, size in linear.pieces(count, last=True):
                piece = linear.load(first, size)
                for tile, together, at, most in psum_banks(size, count):
                    out_psum = piece.product((tile, together, start + at, most), x)
                    features = nl.ds(first + tile, together)
                    for token in nl.affine_range(most):
                        scale_sb = along_sb[:, nl.ds(start + at + token, 1)]
                        out_sb[:, at + token, features] = nisa.tensor_scalar(
                            out_psum[:, :, token], nl.multiply, scale_sb
                        )
            # features lie in runs: a partition stores neighbours of a token as one row
            for token in nl.affine_range(count):
                nl.store(rows_hbm[block.start + start + token], out_sb[:, token, :])


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch
):
    """Do everything between two all-reduces of a prefill: residual sum, norm, QKV, RoPE, causal
    flash attention of all new tokens (Dao et al. 2022), output projection.

    -> partial output [H, B * S], rotated keys and values [B * S, kv_heads * D], and x + delta.
    Weights that fit stay in SBUF, others are read for every block of tokens.
    """
    (_, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    qkv, out = Linear(qkv_w_hbm, x_hbm.shape[0] // P_MAX), Linear(out_w_hbm, heads.q_tiles)
    hidden = Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm)
    layer = AttentionLayer.of(hidden, norm, heads, qkv, out, cos_hbm, sin_hbm)
    plan, triangle_sb = PromptPlan.of(layer, tokens // batch), causal_mask(P_MAX, dtype)
    PromptAttention(layer, plan, triangle_sb, {}, keys_hbm, values_hbm).run()
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


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
    each=1,
):
    """Do the same for one new token per sequence, or for ``each`` of a single sequence: attention
    over the cache, the tokens before and the token itself.

    bias [T, L] has keys in the order of ``cache_runs`` over P_MAX // kv_heads partitions.
    -> partial output [H, T], new keys (rotated) and values [T, kv_heads * D], and x + delta.
    """
    (_, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    # hidden states [128, H/128, T], a few KiB, then the cache, before the weights: TensorE
    # transposes its keys, 128 a pass, while those stream
    hidden = Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm)
    x = hidden.load(Block(0, tokens, 1))
    # sequences whose queries share a tile of scores
    together, cached = P_MAX // (heads.q_heads * each), (keys_hbm, values_hbm, bias_hbm)
    caches = [
        cached_sequences(*cached, *some, heads, each) for some in spans(tokens // each, together)
    ]
    qkv, out = Linear(qkv_w_hbm, x_hbm.shape[0] // P_MAX), Linear(out_w_hbm, heads.q_tiles)
    layer = AttentionLayer.of(hidden, norm, heads, qkv, out, cos_hbm, sin_hbm)
    decode_step(layer, x, caches, new_keys_hbm, new_values_hbm)
    results = out_hbm, new_keys_hbm, new_values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def swiglu_mlp_kernel(x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, length=None):
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Gate, up [F, H] and down [H, F] are kernel weights; several sequences have ``length`` tokens
    each. -> partial output [H, T], and x + delta.
    """
    shape, dtype = x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    k_tiles = shape[0] // P_MAX
    gate, up = (Linear(weight_hbm, k_tiles) for weight_hbm in (gate_hbm, up_hbm))
    hidden = Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm)
    linears = gate, up, Linear(down_hbm, gate.tiles)
    # of each token silu(gate) * up and x stay
    most = token_chunk(x_hbm.itemsize * (gate.tiles + k_tiles))
    gated_mlp(hidden, norm, linears, length, most)
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood.
    """

    def __init__(self, **kwargs: Any) -> None:
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        self.looks_ahead = bool(kwargs.pop("looks_ahead", False))
        if self.looks_ahead:  # of a saved configuration: its length is derived anew
            kwargs.pop("speculation_length", None)
        super().__init__(**kwargs)


class LlamaInferenceConfig(modeling_llama.LlamaInferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    # settings of NxDI that change what layers are given, or what is asked of them
    beyond: Tuple[str, ...] = (
        "quantized",
        "kv_cache_quant",
        "lora_config",
        "is_block_kv_layout",
        "is_chunked_prefill",
        "flash_decoding_enabled",
        "speculation_length",
        "is_medusa",
        "enable_eagle_speculation",
        "enable_fused_speculation",
        "sequence_parallel_enabled",
        "k_cache_transposed",
    )

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        neuron_config = self.neuron_config
        tokens, _ = call_tokens(self)
        neuron_config.looks_ahead = tokens > 1
        if tokens > 1:
            neuron_config.speculation_length = tokens

    def uncovered(self) -> Optional[str]:
        """Say in a sentence what this file does not cover and what to do; None: it covers all.

        The driver asks in the process that runs this file. A model that is made raises it.
        """
        own = ("speculation_length",) if option(self, "looks_ahead") else ()
        asked = [name for name in self.beyond if option(self, name) and name not in own]
        asked += ["cp_degree"] if option(self, "cp_degree", 1) > 1 else []
        asked += ["left padding"] if option(self, "padding_side") == "left" else []
        asked += ["biases"] if getattr(self, "attention_bias", False) else []
        tp, kv = self.neuron_config.tp_degree, self.num_key_value_heads
        if kv % tp and tp % kv and kv != self.num_attention_heads and not is_nki_enabled(self):
            asked.append(f"{kv} KV heads on {tp} ranks")  # NxDI loses their weights
        kind = getattr(self, "model_type", "llama")
        if asked or kind != "llama":
            return (
                "llama.py runs Llamas in float, padded on the right, each with its own cache, got "
                f"a {kind} with {', '.join(asked) or 'layers of its own'}; give models/extended.py."
            )
        try:
            lacking = self.lacking() if is_nki_enabled(self) else []
        except ValueError as error:  # a degree that does not divide the heads
            return str(error)
        if not lacking:
            return None
        return (
            f"The kernels do not cover {lacking[0]}, expected a Llama with SiLU and heads of 64 or "
            "128, whose prompts and caches SBUF holds; give models/extended.py, or run without "
            "--enable-nki."
        )

    def lacking(self) -> List[str]:
        """What the kernels of this file do not cover."""
        rank, neuron_config = Sizes.of(self).of_rank, self.neuron_config
        batch = neuron_config.max_batch_size
        length, itemsize = neuron_config.max_context_length, neuron_config.torch_dtype.itemsize
        tokens = length * (option(self, "ctx_batch_size", None) or neuron_config.batch_size)
        features = whole_tiles(self.hidden_size) * P_MAX
        found = {
            f"head_dim {rank.head_dim}": rank.head_dim not in (64, 128),
            f"{rank.q_heads} query heads per rank": rank.q_heads > P_MAX,
            f"a batch of {batch}": batch > P_MAX,
            f"{neuron_config.seq_len} cached keys": not self.holds_caches(rank),
            "so long prompts": not PromptPlan.fitting(features, rank, tokens, length, itemsize),
            "mlp_bias": bool(getattr(self, "mlp_bias", False)),
            f"hidden_act {self.hidden_act}": self.hidden_act != "silu",
        }
        return [what for what, wrong in found.items() if wrong]

    def holds_caches(self, rank: HeadShape) -> bool:
        """Whether a decode step has all cached keys in SBUF."""
        given = self.neuron_config
        return fits_at_once(given.seq_len, given.max_batch_size, rank, given.torch_dtype.itemsize)

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


def check_degree(config: InferenceConfig, *names: str) -> None:
    """Raise ValueError unless the degree divides these numbers of the configuration."""
    tp = config.neuron_config.tp_degree
    for name in names:
        if getattr(config, name) % tp:
            other = ", or give models/extended.py instead" if "heads" in name else ""
            raise ValueError(
                f"{name} {getattr(config, name)} is not divisible by the tensor-parallel degree "
                f"{tp}; choose a degree that divides it{other}."
            )


class Sizes(NamedTuple):
    """The tensor-parallel degree, and the heads of each rank; modules and weights share them."""

    tp: int
    of_rank: HeadShape

    @classmethod
    def of(cls, config: InferenceConfig) -> Sizes:
        check_degree(config, "num_key_value_heads", "intermediate_size", "vocab_size")
        tp, heads = config.neuron_config.tp_degree, config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(tp, HeadShape(heads // tp, config.num_key_value_heads // tp, dim))


def option(config: InferenceConfig, name: str, default: Any = False) -> Any:
    """A setting of NxDI, or its default where the release does not know it."""
    return getattr(config.neuron_config, name, default)


def is_nki_enabled(config: InferenceConfig) -> bool:
    """Whether kernels run."""
    return bool(option(config, "nki_enabled"))


# --- Modules --------------------------------------------------------------------------------------
#
# Without kernels NxDI's own layers run. A module names the classes of its parts as attributes. It
# has a method for each thing that another model does otherwise; models/extended.py replaces both.


class Columns(NamedTuple):
    """Hidden states between kernels: transposed, and the last partial result not yet added.

    ``stream`` is [H, T], ``delta`` [H, T] or None, ``shape`` (B, S, H). ``chosen`` is for
    extensions, None here. The base class hands Columns from layer to layer; SumOfColumns makes
    them [B, S, H] again behind the last one.
    """

    stream: torch.Tensor
    delta: Optional[torch.Tensor]
    shape: Tuple[int, ...]
    chosen: Optional[torch.Tensor] = None

    @classmethod
    def of(cls, hidden: Any) -> Columns:
        """The embedding [B, S, H], or what the layer before returned."""
        if isinstance(hidden, cls):
            return hidden
        rows = hidden.reshape(-1, hidden.shape[-1])
        return cls(in_blocks(rows, hidden.shape[1]), None, tuple(hidden.shape))

    def rows(self) -> torch.Tensor:
        """[B, S, H]: the sum in the layout of layers in PyTorch."""
        total = self.stream if self.delta is None else self.stream + self.delta
        return from_blocks(total, self.shape[1])[:, : self.shape[-1]].reshape(self.shape)

    def after(self, partial: torch.Tensor, stream: Sequence[torch.Tensor]) -> Columns:
        """The Columns after a kernel: its result, reduced, and the sum that it stored, if any."""
        delta = reduce_from_tensor_model_parallel_region(partial)
        return self._replace(stream=stream[0] if stream else self.stream, delta=delta)


class SumOfColumns(nn.Module):
    """Columns -> [B, S, H], in the place of the final norm, which the head's kernel does."""

    def forward(self, columns: Columns) -> torch.Tensor:
        return columns.rows()


class KernelWeight(ColumnParallelLinear):
    """A weight in kernel layout, [128, N/128 * K/128 * 128] per rank.

    It is a ColumnParallelLinear so that the SDK's loader cuts it for the ranks. The full tensor has
    the ranks' parts one after another, whichever way the product itself is parallel.
    """

    def __init__(self, n: int, k: int, tp_degree: int, dtype: torch.dtype, **group: Any) -> None:
        row, self.tp_degree = whole_tiles(n) * whole_tiles(k) * P_MAX, tp_degree
        given = dict(bias=False, gather_output=False, dtype=dtype, **group)
        super().__init__(row, P_MAX * tp_degree, **given)


class NeuronLlamaMLP(nn.Module):
    """SwiGLU MLP in one kernel per rank, and an all-reduce."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        self.gate_proj = KernelWeight(inner // tp, hidden, tp, dtype)
        self.up_proj = KernelWeight(inner // tp, hidden, tp, dtype)
        self.down_proj = KernelWeight(hidden, inner // tp, tp, dtype)

    def forward(self, hidden: Columns, norm: Norm, given: Dict[str, Any]) -> Columns:
        """hidden + MLP(norm(hidden)); ``given`` has the keywords of the decoder layer."""
        partial, *stream = self.kernel_results(hidden, norm)
        return hidden.after(partial, stream)

    def kernel_results(self, hidden: Columns, norm: Norm) -> Tuple[torch.Tensor, ...]:
        """The kernel's partial output and, where there is a delta, the sum."""
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        x = hidden.stream, hidden.delta
        results = swiglu_mlp_kernel(*x, norm, *weights, hidden.shape[1])
        return (results,) if hidden.delta is None else results


class PlainMLP(modeling_llama.NeuronLlamaMLP):
    """NxDI's MLP, called as the kernels' MLP is: [B, S, H] and a norm that is a module."""

    def forward(self, hidden: torch.Tensor, norm: nn.Module, given: Dict[str, Any]) -> torch.Tensor:
        return hidden + super().forward(norm(hidden))[0]


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def in_lanes(of_head: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Repeat the rows of one head [D, ..] for all lanes of a tile of heads [128, ..]."""
    depth = HeadShape(1, 1, head_dim).depth
    of_heads = [pad_to(of_head, 0, depth)] * max(1, P_MAX // depth)
    return pad_tiles(torch.cat(of_heads), 0)[:P_MAX]  # of 256 the halves have the same frequencies


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of the rotary position embedding, half-rotation convention (Su et al. 2021).

    Frequencies are a Python list: the loader casts every buffer to the model's type, which would
    cost bf16 models their positions. Scaling follows the Hugging Face config; "dynamic" begins
    beyond the positions that the model was trained for, which no cache here reaches.
    """

    def __init__(self, config: InferenceConfig, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.inv_freq, self.amplitude = rope_frequencies(config, head_dim)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """position_ids [B, S] -> cos, sin [128, B * S] in ``dtype``, angles in fp32: a row for each
        lane of a tile of heads. The second half of a head has the same angles, negative."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=position_ids.device)
        lanes = in_lanes(torch.cat((inv_freq, -inv_freq)), self.head_dim)
        angles = lanes[:, None] * position_ids.to(torch.float32).reshape(1, -1)
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return cos.to(dtype), sin.to(dtype)


def rope_frequencies(config: InferenceConfig, dim: int) -> Tuple[List[float], float]:
    """Frequencies of ``dim`` features and the factor of cos and sin, for the configuration's
    ``rope_scaling``. transformers computes them, in fp32 as for its own models."""
    scaling = getattr(config, "rope_scaling", None) or {"rope_type": "default"}
    scaling = dict(scaling) if isinstance(scaling, dict) else vars(scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope_scaling of type {kind}, expected {', '.join(ROPE_KINDS)}.")
    longest, positions = config.neuron_config.seq_len, config.max_position_embeddings
    if kind == "dynamic" and longest > positions:
        raise ValueError(
            f"rope_scaling 'dynamic' changes with each token beyond max_position_embeddings "
            f"{positions}, got seq_len {longest}; choose a shorter seq_len."
        )
    read = PretrainedConfig(
        rope_theta=config.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
    )
    with torch.device("cpu"):  # modules may be made on the meta device
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](read, torch.device("cpu"))
    return frequencies.tolist(), amplitude


class NeuronLlamaAttention(nn.Module):
    """Grouped-query attention; returns the new tokens' K and V for the base class's cache."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config)
        self.rotary_emb = LlamaRotaryEmbedding(config, self.sizes.of_rank.head_dim)
        self.make_kernel_weights()

    def make_kernel_weights(self, **group: Any) -> None:
        hidden, rank = self.config.hidden_size, self.sizes.of_rank
        shared = self.sizes.tp, self.config.neuron_config.torch_dtype
        tiles = rank.q_tiles + rank.stacks + whole_tiles(rank.kv_features)
        self.qkv_proj = KernelWeight(tiles * P_MAX, hidden, *shared, **group)
        self.o_proj = KernelWeight(hidden, rank.q_tiles * P_MAX, *shared, **group)

    def forward(self, hidden: Columns, norm: Norm, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """hidden + attention(norm(hidden)), then (K, V), cos and sin.

        The base class gives position_ids [B, S], attention_mask and active_mask (True where keys
        count), past_key_value, two [B, kv_rank, L, D], and cos_cache and sin_cache of the layer
        before. All but the first two may be None.
        """
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        if cos is None:
            cos, sin = self.rotary_emb(given["position_ids"], hidden.stream.dtype)
        # residual sum, norm, QKV, RoPE, attention and output projection, then an all-reduce
        partial, k, v, *stream = self.kernel_results(hidden, norm, (cos, sin), given)
        present = tuple(self.heads(rows, hidden.shape[0]) for rows in (k, v))
        return hidden.after(partial, stream), present, cos, sin

    def heads(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[B * S, n * D] (or [B, S, n * D]) -> [B, n, S, D]."""
        dim = self.sizes.of_rank.head_dim
        return rows.reshape(batch, -1, rows.shape[-1] // dim, dim).transpose(1, 2)

    def kernel_results(self, hidden, norm, tables, given) -> Tuple[Any, ...]:
        """Call the kernel for a prompt, or the kernel for a token over a cache."""
        rank, weights = self.sizes.of_rank, (self.qkv_proj.weight, self.o_proj.weight)
        inputs = hidden.stream, hidden.delta, norm, *weights, *tables
        past = given.get("past_key_value")
        if past is None:
            return attention_prefill_kernel(*inputs, rank, hidden.shape[0])
        each = hidden.shape[1]  # new tokens of a sequence
        bias = _mask_bias(given["attention_mask"][:, 0, 0], hidden.stream.dtype)
        keys, values, bias = cache_in_runs(*past, bias, P_MAX // past[0].shape[1])
        bias = bias if each == 1 else bias.expand(each, -1)
        return attention_decode_kernel(*inputs, keys, values, bias, rank, each)


class PlainAttention(modeling_llama.NeuronLlamaAttention):
    """NxDI's attention, called as the kernels' is: [B, S, H] and a norm that is a module."""

    def forward(self, hidden: Any, norm: nn.Module, given: Dict[str, Any]) -> Tuple[Any, ...]:
        names = ["attention_mask", "position_ids", "past_key_value", "active_mask"]
        cos = given.get("cos_cache")
        if cos is not None and cos.dim() > 2:  # a comparison of both paths hands on the kernels'
            names += ["cos_cache", "sin_cache"]
        known = {name: given.get(name) for name in names}
        output, *results = super().forward(norm(hidden), **known)
        return hidden + output, *results


def _mask_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [B, keys] -> bias for scores in ``dtype``: 0 where a key counts, else MASKED."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, masked(dtype))


def cache_in_runs(
    keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, most: int = P_MAX
) -> Tuple[torch.Tensor, ...]:
    """Bring keys and values [B, kv_heads, L, D] and bias [B, n] to the order of ``cache_runs``.

    Only the bias is permuted; keys behind the first n are not read. An n that would leave over half
    of the partitions idle is padded. A cache that has no more keys is padded with it, at the cost
    of a copy. Multiples of 128, and numbers up to 128, need no padding.
    """
    length = bias.shape[1]
    if length > most and cache_runs(length, most)[0] < most / 2:
        missing = whole_tiles(length) * P_MAX - length
        bias = nn.functional.pad(bias, (0, missing), value=masked(bias.dtype))
        pad, dtype = (0, 0, 0, bias.shape[1] - keys.shape[2]), bias.dtype
        if pad[-1] > 0:  # fp8 has no padding on every device
            keys, values = (nn.functional.pad(x.to(dtype), pad) for x in (keys, values))
    runs = bias.unflatten(1, cache_runs(bias.shape[1], most)).transpose(1, 2)
    return keys, values, runs.reshape(bias.shape)


class NeuronLlamaDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    attention_cls: Type[nn.Module] = NeuronLlamaAttention
    mlp_cls: Type[nn.Module] = NeuronLlamaMLP
    plain_cls: Tuple[Type[nn.Module], ...] = PlainAttention, PlainMLP

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.nki_enabled = config, is_nki_enabled(config)
        # the kernels find the gains in their weights
        kinds = (self.attention_cls, self.mlp_cls) if self.nki_enabled else self.plain_cls
        norm_cls = Norm if self.nki_enabled else modeling_llama.CustomRMSNorm
        self.self_attn, self.mlp = (kind(config) for kind in kinds)
        self.input_layernorm = norm_cls(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = norm_cls(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Any, **given: Any) -> Tuple[Any, ...]:
        """Hidden states, (K, V), cos, sin; a fifth item where the base passes ``residual``.

        NxDI 0.3 and later hand a ``residual`` keyword to every layer and read five results; before
        that they read exactly four.
        """
        hidden = Columns.of(hidden_states) if self.nki_enabled else hidden_states
        hidden, *results = self.attention(given)(hidden, self.input_layernorm, given)
        hidden = self.mlp(hidden, self.post_attention_layernorm, given)
        return hidden, *results, *([None] if "residual" in given else [])

    def attention(self, given: Dict[str, Any]) -> nn.Module:
        """The attention that a call with these arguments takes."""
        return self.self_attn


class NeuronLlamaHead(KernelWeight):
    """Final norm and LM head in one kernel; logits are gathered unless the device samples.

    The base class passes only the last token of each sequence, so no other row is normalised.
    """

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        vocabulary = config.vocab_size // tp
        super().__init__(vocabulary, config.hidden_size, tp, dtype)
        self.vocabulary, self.gather_output = vocabulary, gather_output
        self.norm: Optional[Norm] = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """[B, S, H] -> logits [B, S, V] (of this rank where the device samples)."""
        shape = x.shape[:-1]
        rows = self.multiply(in_blocks(x.reshape(-1, x.shape[-1]), 1))
        logits = rows[:, : self.vocabulary].reshape(*shape, self.vocabulary)
        return gather_from_tensor_model_parallel_region(logits) if self.gather_output else logits

    def multiply(self, columns: torch.Tensor) -> torch.Tensor:
        """[H, T] -> [T, N] by the kernel."""
        return linear_kernel(columns, self.weight, self.norm)


class NeuronLlamaModel(modeling_llama.NeuronLlamaModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    layer_cls: Type[nn.Module] = NeuronLlamaDecoderLayer
    head_cls: Type[nn.Module] = NeuronLlamaHead

    def init_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=neuron_config.torch_dtype,
            shard_across_embedding=not neuron_config.vocab_parallel,
            pad=True,
            use_spmd_rank=neuron_config.vocab_parallel,  # one graph serves all ranks
        )
        self.lm_head = self.output_head(config)
        self.norm = self.final_norm(config)
        self.layers = nn.ModuleList(self.layer_cls(config) for _ in range(config.num_hidden_layers))

    def forward(self, *args: Any, **given: Any) -> List[torch.Tensor]:
        """NxDI's graph. Rows of logits leave the device in the model's type, which the head made
        them in, as half the bytes of NxDI's fp32: a call that looks ahead has eight."""
        outputs = super().forward(*args, **given)
        if option(self.config, "looks_ahead"):
            outputs[0] = outputs[0].to(self.config.neuron_config.torch_dtype)
        return outputs

    def output_head(self, config: InferenceConfig) -> nn.Module:
        """Hidden states -> logits: a kernel, or a plain layer behind its norm."""
        gather = not self.on_device_sampling
        if is_nki_enabled(config):
            return self.head_cls(config, gather)
        return ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=gather,
            dtype=config.neuron_config.torch_dtype,
            pad=True,
        )

    def final_norm(self, config: InferenceConfig) -> nn.Module:
        """The module behind the last layer: none normalises where the head's kernel does."""
        if is_nki_enabled(config):
            return SumOfColumns()
        return modeling_llama.CustomRMSNorm(config.hidden_size, config.rms_norm_eps)


# --- Look-ahead -----------------------------------------------------------------------------------
#
# A decode step reads all weights for one token, and would read them once for eight. So one call
# takes the newest token and seven guesses of what follows. Its row of logits behind a token counts
# where all guesses before are right, and then it is the row that the plain step would give. An
# example: the text so far ends in "to be or not to", and "to" was followed by "be or" before:
#
#     tokens of the call     to    be    or    not   to    be    or    not
#     row of logits          r0    r1    r2    r3    r4    r5    r6    r7
#     the user's choices     be    or    else
#
# forward(to) answers r0. The user chooses "be", which was guessed: forward(be) answers r1 without a
# call, forward(or) answers r2. "else" was not guessed, so forward(else) begins the next call. It
# writes over the cache's rows of "not", "to" and so on; until then masks hide them, since a call
# sees the tokens before its own. Rows of wrong guesses are dropped: a guess costs a row of logits
# to the host, never a token. Guesses come from the text of this sequence alone.

CALL_TOKENS = 8  # of a call, the newest one and its guesses
CONTEXT = 4  # newest tokens that are looked up


def call_tokens(config: InferenceConfig) -> Tuple[int, str]:
    """Tokens of a call that looks ahead, whose queries of a KV head share a tile of scores; or 1,
    and what it steps aside for: nothing where nobody expects guesses."""
    given = config.neuron_config
    if not is_nki_enabled(config) or option(config, "speculation_length"):
        return 1, ""
    rank = max(1, config.num_attention_heads // given.tp_degree)
    tokens = min(CALL_TOKENS, P_MAX // rank)
    reasons = {
        f"{given.max_batch_size} sequences": given.max_batch_size > 1,
        "tokens that the device samples": given.on_device_sampling_config is not None,
        "asynchronous calls": option(config, "async_mode"),
        "prompts padded on the left": given.padding_side == "left",
        f"{rank} query heads a rank": tokens < 2,
        f"prompts of at most {given.max_context_length} tokens": tokens >= given.max_context_length,
    }
    why = ", ".join(reason for reason, holds in reasons.items() if holds)
    return (1, why) if why else (tokens, "")


class Guesser:
    """Guesses what follows a text: the token that followed its newest ones the last time, the
    longest context that is known before shorter ones. Then what followed these, and so on.

    Both methods together take some 15 microseconds a token.
    """

    def __init__(self) -> None:
        self.text: List[int] = []
        self.after: Dict[Tuple[int, ...], int] = {}  # the last follower of up to CONTEXT tokens

    def add(self, token: int) -> None:
        """Append a token."""
        for length in range(1, min(CONTEXT, len(self.text)) + 1):
            self.after[tuple(self.text[-length:])] = token
        self.text.append(token)

    def guess(self, most: int) -> List[int]:
        """At most so many tokens behind the text; none where its newest token is new."""
        recent = self.text[-CONTEXT:]
        for _ in range(most):
            contexts = (tuple(recent[-length:]) for length in range(CONTEXT, 0, -1))
            token = next((self.after[one] for one in contexts if one in self.after), None)
            if token is None:
                break
            recent.append(token)
        return recent[min(CONTEXT, len(self.text)) :]


class LookAhead:
    """A sequence under way: its text, and what the last call has left.

    The ``tokens`` of that call, from position ``start`` on, have the logits ``rows`` [1, T, V], of
    which ``used`` have been answered. ``calls`` counts calls behind the prompt, [those without a
    guess, those with guesses], and ``kept_rows`` the answers that needed none.
    """

    def __init__(self, tokens: int, room: int) -> None:
        self.call_tokens, self.room = tokens, room
        self.forget()

    def forget(self) -> None:
        """Remember nothing of the sequence."""
        self.begin([])

    def begin(self, prompt: List[int]) -> None:
        """Take the tokens of a prompt."""
        self.guesser, self.calls, self.kept_rows = Guesser(), [0, 0], 0
        self.tokens, self.start, self.used, self.rows = [], 0, 0, None
        for token in prompt:
            self.guesser.add(token)

    def kept(self, token: int, position: int) -> Optional[torch.Tensor]:
        """The row [1, 1, V] of a token at a position, if the last call computed it."""
        at = position - self.start
        if self.rows is None or at != self.used or self.tokens[at : at + 1] != [token]:
            self.rows = None
            return None
        self.guesser.add(token)
        self.used, self.kept_rows = self.used + 1, self.kept_rows + 1
        return self.rows[:, at : at + 1]

    def guesses(self, token: int, position: int) -> List[int]:
        """Take a token at a position; guess what follows, as far as the cache has room."""
        known = position == len(self.guesser.text)
        if known:
            self.guesser.add(token)
        found: List[int] = []
        if known and position + self.call_tokens <= self.room:
            with contextlib.suppress(Exception):  # a fault here costs guesses, no token
                found = self.guesser.guess(self.call_tokens - 1)
        self.calls[bool(found)] += 1
        return found

    def keep(self, tokens: List[int], position: int, rows: torch.Tensor) -> torch.Tensor:
        """Keep the rows of a call; the first one is its answer."""
        self.tokens, self.start, self.used, self.rows = tokens, position, 1, rows
        return rows[:, :1]


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------

StateDict = Dict[str, torch.Tensor]
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # projections, by their names
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


def layouts_of_ranks(shares: Iterable[torch.Tensor]) -> torch.Tensor:
    """The kernel layouts of every rank's share [N, K], one after another."""
    return torch.cat([kernel_layout(share) for share in shares])


def times_gain(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Multiply a weight [N, H] by the gain [H] of the norm before it. Each element is rounded once,
    where PyTorch rounds each normed feature."""
    return (weight.to(torch.float32) * gain.to(torch.float32)).to(weight.dtype)


def attention_for_kernels(
    state: StateDict, attention: str, gain: torch.Tensor, sizes: Sizes
) -> None:
    """Replace a layer's projections in ``state`` by kernel weights, with the norm's ``gain``."""
    *qkv, out = (state.pop(f"{attention}{name}.weight") for name in ATTENTION_TARGETS)
    rank, tp, group = sizes.of_rank, sizes.tp, sizes.of_rank.group
    state[f"{attention}qkv_proj.weight"] = layouts_of_ranks(
        in_runs(torch.cat((rank.order(q, group), rank.order(k, 1), v)), 1)
        for q, k, v in zip(*(times_gain(weight, gain).chunk(tp) for weight in qkv))
    )
    state[f"{attention}o_proj.weight"] = layouts_of_ranks(
        in_runs(rank.order(share.t(), group).t(), 0) for share in out.chunk(tp, 1)
    )


def mlp_for_kernels(state: StateDict, mlp: str, gain: torch.Tensor, tp: int) -> None:
    """Replace a layer's MLP in ``state`` by kernel weights, with the ``gain`` of its norm."""
    for name in MLP_TARGETS:
        key = f"{mlp}{name}.weight"
        if name == "down_proj":
            shares = [in_runs(share, 0) for share in state[key].chunk(tp, 1)]
        else:
            shares = [in_runs(share, 1) for share in times_gain(state[key], gain).chunk(tp)]
        state[key] = layouts_of_ranks(shares)


def head_for_kernels(state: StateDict, head: str, gain: torch.Tensor, tp: int) -> None:
    """Replace the head in ``state`` by its kernel weight, with the ``gain`` of the last norm."""
    shares = times_gain(state[f"{head}.weight"], gain).chunk(tp)
    state[f"{head}.weight"] = layouts_of_ranks(in_runs(in_runs(x, 0), 1) for x in shares)


def add_ranks(state: StateDict, config: InferenceConfig) -> None:
    """Add the numbers of the ranks to ``state``; the loader gives each rank its own."""
    ranks = torch.arange(config.neuron_config.tp_degree, dtype=torch.int32)
    state["rank_util.rank"] = ranks
    if config.neuron_config.vocab_parallel:
        state["embed_tokens.rank_util.rank"] = ranks.clone()


class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):
    """The model that the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    def __init__(self, model_path: str, config: Any = None, *more: Any, **given: Any) -> None:
        """NxDI's arguments; ValueError for what this file does not cover."""
        why = getattr(config, "uncovered", str)()  # of something else, the base class says more
        if why:
            raise ValueError(why)
        super().__init__(model_path, config, *more, **given)
        tokens, room = self.neuron_config.speculation_length, self.neuron_config.max_length
        self.ahead = LookAhead(tokens, room) if option(self.config, "looks_ahead") else None
        if aside := call_tokens(self.config)[1]:
            logging.warning("One token a call: llama.py looks ahead, but not with %s.", aside)

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        """Keep the single-token graph, which NxDI 0.2 and later leave out."""
        super().enable_speculation(*args, **kwargs)
        if option(self.config, "looks_ahead") and not hasattr(self, "token_generation_model"):
            self.enable_token_generation()

    @contextlib.contextmanager
    def plain_steps(self) -> Iterator[None]:
        """Take one token a call within, to compare calls with those of another model."""
        ahead, self.ahead = self.ahead, None
        try:
            yield
        finally:
            self.ahead = ahead

    def reset(self) -> None:
        """Begin a new sequence: nothing of the last one is remembered."""
        super().reset()
        if self.ahead is not None:
            self.ahead.forget()

    def _construct_output(self, logits: Any, *more: Any) -> Any:
        """NxDI's, of a row that is asked for in fp32; other rows stay as they came."""
        asked = self.ahead is not None and logits.shape[1] == 1
        return super()._construct_output(logits.float() if asked else logits, *more)

    def forward(self, input_ids=None, seq_ids=None, attention_mask=None, position_ids=None, **more):
        """NxDI's, which takes a token and gives its logits [1, 1, V]. With look-ahead they may be a
        row of an earlier call, and a call may have guesses behind its token."""
        given = dict(more, seq_ids=seq_ids, attention_mask=attention_mask)
        ahead, whole = self.ahead, dict(given, input_ids=input_ids, position_ids=position_ids)
        if ahead is None or len(input_ids) > 1 or position_ids is None or attention_mask is None:
            return super().forward(**whole)
        seen = int(attention_mask.sum())
        if input_ids.shape[1] > 1:
            text = input_ids[0, :seen].tolist()
            ahead.begin(text)
            long = seen > self.neuron_config.max_context_length
            return self.long_prompt(text, position_ids, given) if long else super().forward(**whole)
        token, position = int(input_ids), int(position_ids)
        row = ahead.kept(token, position)
        if row is not None:
            return self._construct_output(row)
        guesses = ahead.guesses(token, position) if seen == position else []
        if not guesses:
            return super().forward(**whole)
        tokens = [token, *guesses]
        output = self.call(tokens, position, position_ids, given)
        return self._construct_output(ahead.keep(tokens, position, output.logits))

    def call(self, tokens: List[int], position: int, like: torch.Tensor, given: Dict[str, Any]):
        """NxDI's forward of up to ``speculation_length`` tokens behind so many in the cache; ids
        and positions are of the type of ``like``."""
        size = self.neuron_config.speculation_length
        numbers = torch.arange(position, position + size)[None]
        ids = torch.tensor([tokens + [0] * (size - len(tokens))])
        known = dict(given, attention_mask=given["attention_mask"][:, :position])
        return super().forward(
            **known, input_ids=ids.to(like.dtype), position_ids=numbers.to(like.dtype)
        )

    def long_prompt(self, text: List[int], positions: torch.Tensor, given: Dict[str, Any]) -> Any:
        """Take a prompt that no graph holds: its first tokens as a prompt, the others as calls of
        several. The last call may begin earlier, where the cache ends, and repeat some."""
        first, size = self.neuron_config.max_context_length, self.neuron_config.speculation_length
        beginning = dict(given, attention_mask=given["attention_mask"][:, :first])
        ids = torch.tensor([text[:first]], dtype=positions.dtype)
        super().forward(**beginning, input_ids=ids, position_ids=positions[:, :first])
        for at in range(first, len(text), size):
            begin = min(at, self.ahead.room - size)
            output = self.call(text[begin : begin + size], begin, positions, given)
        return self._construct_output(output.logits[:, len(text) - begin - 1 :][:, :1])

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's.

        Runs before the SDK ties the head to the embedding, so a tied head is made here: for the
        kernels it has its own layout.
        """
        state, convert = dict(state_dict), modeling_llama.NeuronLlamaForCausalLM
        if not is_nki_enabled(config):
            state = convert.convert_hf_to_neuron_state_dict(state, config)
            add_ranks(state, config)  # NxDI 0.1 has int64 numbers for the embedding
            return state
        if config.neuron_config.torch_dtype is torch.float32:
            # a norm's gain times a weight in bf16 has more digits than that
            state = {name: tensor.float() for name, tensor in state.items()}
        sizes = Sizes.of(config)
        for layer in (f"layers.{number}." for number in range(config.num_hidden_layers)):
            gain = state.pop(f"{layer}input_layernorm.weight")
            attention_for_kernels(state, f"{layer}self_attn.", gain, sizes)
            gain = state.pop(f"{layer}post_attention_layernorm.weight")
            mlp_for_kernels(state, f"{layer}mlp.", gain, sizes.tp)
        state.setdefault("lm_head.weight", state["embed_tokens.weight"])
        head_for_kernels(state, "lm_head", state.pop("norm.weight"), sizes.tp)
        add_ranks(state, config)
        return state

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """Tie a plain head to the embedding; a head in kernel layout is there already."""
        if "lm_head.weight" not in state_dict:
            state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
