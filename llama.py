"""Llama for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

One file to upload: it imports torch, transformers and the Neuron SDK, nothing else. Read it
from top to bottom: limits of the core, the weight layout, tile helpers, kernels in model order, the
modules, and how a Hugging Face checkpoint becomes the weights of this model.

Axis letters used throughout:

    T  tokens of one call (batch times sequence)     H  hidden size
    K  contraction size of a product                 N  output features of a product
    P  partitions of a tile (at most 128)            F  intermediate size of the MLP
    D  head dimension                                B, S  batch, sequence length

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Kernels take and return HBM tensors; the
helpers above them work on tiles that are already on chip. Interfaces follow NxD Inference 0.1 to
0.6 (github.com/aws-neuron/neuronx-distributed-inference), the kernel language SDK 2.21.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    NeuronBaseForCausalLM,
    NeuronBaseModel,
)
from torch import nn
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN

# --- Limits of a NeuronCore-v2 (aws-neuron-sdk v2.21.1, general/nki/programming_model.rst) --------

P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
MOVING_MAX = 512  # free size of the moving matmul operand; one PSUM bank of fp32

# --- Choices of these kernels ---------------------------------------------------------------------

BLOCK_ROW_BYTES = 16384  # bf16 bytes per partition of a weight block: four of them take 64 KiB
BLOCK_UNIT = 64  # a block is that many features, or several times: heads of 64 stay whole
TOKEN_CHUNK = 512  # tokens per pass over a weight: 512 FLOP per weight byte, above the core's 340
CHUNK_BYTES = 72 * 1024  # SBUF per partition for what is kept of those tokens
RESIDENT_BYTES = 64 * 1024  # keys and values of a sequence stay in SBUF up to this many
PRELOAD_BYTES = 32 * 1024  # cached keys and values are loaded ahead up to this many
KEY_CHUNK = 2048  # cached keys per decode block: 8 KiB of fp32 scores per partition
SCORE_ROWS_BYTES = 16384  # SBUF per partition for the weights of several heads' score rows
MASKED = -1.5e38  # added to scores that do not count: exp gives 0, and twice it is finite
MASKED_FP16 = -3.0e4  # the same for float16, which ends at 65504
DTYPES = {torch.bfloat16: nl.bfloat16, torch.float16: nl.float16, torch.float32: nl.float32}
PI_BELOW = 3.1415925  # the fp32 number below pi: arguments of ScalarE's sine stay inside


# --- Weight layout --------------------------------------------------------------------------------
#
#   tensor               shape per rank              partition axis   written by
#   HF weight            [N, K]                      -                checkpoint
#   kernel weight (HBM)  [blocks, 128, k_tiles, nb]  the 128          block_weight(), at load time
#   kernel weight (SBUF) [128, k_tiles, nb]          contraction      load_weight_block()
#
# A block holds nb <= 512 output features in rows of at most 16 KiB per partition (of 128 features
# where K is beyond 8192): element [b, p, k, n] is W[b * nb + n, k * 128 + p]. One load brings a
# whole block, and each partition reads k_tiles * nb elements that are contiguous in HBM. DMA wants
# 2 KiB or more per row: Llama-3.2-1B has 16 KiB at degree 2, the smallest product of SmolLM2-135M
# 3.1 KiB at degree 1. Prefill and decode use the same blocks, so no weight is on the device twice.


class BlockLayout(NamedTuple):
    """How an [N, K] weight is cut: ``blocks`` of ``nb`` features, ``k_tiles`` of 128 inputs."""

    n: int
    k: int
    blocks: int
    nb: int
    k_tiles: int

    @classmethod
    def of(cls, n: int, k: int) -> BlockLayout:
        k_tiles = math.ceil(k / P_MAX)
        widest = min(MOVING_MAX, max(P_MAX, BLOCK_ROW_BYTES // (2 * k_tiles)))
        fewest = math.ceil(n / (widest // BLOCK_UNIT * BLOCK_UNIT))
        blocks = fewest
        nb = least = cls.width(n, fewest)
        # more blocks where the fewest are padded by over 4 %; small weights stay padded
        while blocks * nb > 1.04 * n and 2 * k_tiles * nb >= 2048 and blocks < 2 * fewest:
            blocks += 1
            nb = cls.width(n, blocks)
        if blocks * nb > 1.04 * n or 2 * k_tiles * nb < 2048:
            nb = least
        return cls(n, k, math.ceil(n / nb), nb, k_tiles)

    @staticmethod
    def width(n: int, blocks: int) -> int:
        """Features of a block, a multiple of BLOCK_UNIT, where ``blocks`` hold n."""
        return math.ceil(n / blocks / BLOCK_UNIT) * BLOCK_UNIT

    @property
    def block_size(self) -> int:
        return P_MAX * self.k_tiles * self.nb


def block_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [blocks, 128 * k_tiles * nb], zero-padded at both edges."""
    layout = BlockLayout.of(*weight.shape)
    rows, columns = layout.blocks * layout.nb, layout.k_tiles * P_MAX
    padded = weight.new_zeros(rows, columns)
    padded[: layout.n, : layout.k] = weight
    tiled = padded.view(layout.blocks, layout.nb, layout.k_tiles, P_MAX)
    return tiled.permute(0, 3, 2, 1).reshape(layout.blocks, layout.block_size)


class HeadShape(NamedTuple):
    """Heads of one rank: ``group`` query heads share a KV head."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads


# --- Sizes known while tracing --------------------------------------------------------------------
#
# The compiler turns Python's range into a loop that it traces once; where a body needs real numbers
# stand lists and nl.static_range.


def spans(length, step):
    """(start, size) of the pieces of at most ``step`` that cover ``length``."""
    pieces, start = [], 0
    while start < length:
        pieces.append((start, min(step, length - start)))
        start += step
    return pieces


def token_chunk(bytes_per_token):
    """Tokens of one pass over a weight, of which each keeps so many bytes per partition."""
    fitting = CHUNK_BYTES // bytes_per_token // P_MAX * P_MAX
    return max(P_MAX, min(TOKEN_CHUNK, fitting))


# --- Tile helpers: everything here works on SBUF and PSUM tiles -----------------------------------


def load_tile(x_hbm):
    """A region [P, F] @ HBM -> the same @ SBUF."""
    x_sb = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.sbuf)
    x_sb[...] = nl.load(x_hbm)
    return x_sb


def load_weight_block(weight_hbm, block, layout):
    """Block ``block`` of a kernel weight -> [128, k_tiles, nb] @ SBUF, one contiguous row each."""
    blocked_hbm = weight_hbm.reshape((layout.blocks, P_MAX, layout.k_tiles, layout.nb))
    return load_tile(blocked_hbm[block])


def broadcast_row(pieces, partitions):
    """[1, n] views @ SBUF -> [partitions, their widths] fp32 @ SBUF.

    A product with ones copies each (of at most 512 columns) to every partition: exactly for bf16
    and fp16, as exactly as TensorE multiplies fp32 for others.
    """
    ones_sb = nl.ndarray((1, partitions), pieces[0].dtype, buffer=nl.sbuf)
    ones_sb[...] = nisa.memset((1, partitions), 1.0, pieces[0].dtype)
    width = sum(piece.shape[1] for piece in pieces)
    full_sb = nl.ndarray((partitions, width), nl.float32, buffer=nl.sbuf)
    start = 0
    for piece in pieces:
        piece_psum = nl.ndarray((partitions, piece.shape[1]), nl.float32, buffer=nl.psum)
        piece_psum[...] = nisa.nc_matmul(ones_sb, piece)
        full_sb[:, nl.ds(start, piece.shape[1])] = nisa.tensor_copy(piece_psum)
        start += piece.shape[1]
    return full_sb


def load_broadcast(row_hbm, partitions):
    """[1, n] @ HBM -> [partitions, n] fp32 @ SBUF."""
    row_sb = load_tile(row_hbm)
    pieces = [row_sb[:, nl.ds(at, size)] for at, size in spans(row_hbm.shape[1], MOVING_MAX)]
    return broadcast_row(pieces, partitions)


def zeroed(shape, dtype):
    """A tile of zeros @ SBUF."""
    tile_sb = nl.ndarray(shape, dtype, buffer=nl.sbuf)
    tile_sb[...] = nisa.memset(shape, 0.0, dtype)
    return tile_sb


def constant_column(partitions, value):
    """[partitions, 1] fp32 @ SBUF: ScalarE takes its bias as a tile, not as a number."""
    column_sb = nl.ndarray((partitions, 1), nl.float32, buffer=nl.sbuf)
    column_sb[...] = nisa.memset((partitions, 1), value, nl.float32)
    return column_sb


def rmsnorm_tile(x_sb, gain_sb, eps):
    """RMSNorm of [T, H] @ SBUF, T on partitions -> the same shape and type.

    fp32 throughout, one rounding at the end, as the reference does (Zhang and Sennrich 2019).
    """
    tokens, hidden = x_sb.shape
    eps_sb = constant_column(tokens, eps)
    squares_sb = nl.ndarray((tokens, hidden), nl.float32, buffer=nl.sbuf)
    total_sb = nl.ndarray((tokens, 1), nl.float32, buffer=nl.sbuf)
    squares_sb[...] = nisa.activation_reduce(
        nl.square, x_sb, reduce_op=nl.add, reduce_res=total_sb, dtype=nl.float32
    )
    rstd_sb = nl.ndarray((tokens, 1), nl.float32, buffer=nl.sbuf)
    rstd_sb[...] = nisa.activation(nl.rsqrt, total_sb, bias=eps_sb, scale=1.0 / hidden)
    out_sb = nl.ndarray((tokens, hidden), x_sb.dtype, buffer=nl.sbuf)
    out_sb[...] = nisa.scalar_tensor_tensor(
        data=x_sb, op0=nl.multiply, operand0=rstd_sb,
        op1=nl.multiply, operand1=gain_sb[0:tokens, :],
    )  # fmt: skip
    return out_sb


def transpose_into(xt_sb, x_sb, column):
    """[T, K] @ SBUF -> columns of ``xt_sb`` [128, k_tiles, T'] from ``column`` on, K on partitions.

    Rows past K of the last k tile are zero: they meet the zero rows of a padded weight. A transpose
    keeps its type in PSUM, as the vendor's samples have it; fp32 there costs a cast.
    """
    tokens, k = x_sb.shape
    columns = nl.ds(column, tokens)
    for tile in nl.affine_range(k // P_MAX):
        tile_psum = nl.ndarray((P_MAX, tokens), x_sb.dtype, buffer=nl.psum)
        tile_psum[...] = nisa.nc_transpose(x_sb[:, nl.ds(tile * P_MAX, P_MAX)])
        xt_sb[:, tile, columns] = nisa.tensor_copy(tile_psum)
    if k % P_MAX:
        full, tail = k // P_MAX, k % P_MAX
        xt_sb[:, full, columns] = nisa.memset((P_MAX, tokens), 0.0, xt_sb.dtype)
        tail_psum = nl.ndarray((tail, tokens), x_sb.dtype, buffer=nl.psum)
        tail_psum[...] = nisa.nc_transpose(x_sb[:, nl.ds(full * P_MAX, tail)])
        xt_sb[0:tail, full, columns] = nisa.tensor_copy(tail_psum)


def transposed(x_sb):
    """[P, F] @ SBUF, F at most 128 -> [F, P] @ SBUF."""
    rows, columns = x_sb.shape
    out_psum = nl.ndarray((columns, rows), x_sb.dtype, buffer=nl.psum)
    out_psum[...] = nisa.nc_transpose(x_sb)
    out_sb = nl.ndarray((columns, rows), x_sb.dtype, buffer=nl.sbuf)
    out_sb[...] = nisa.tensor_copy(out_psum)
    return out_sb


def accumulate(acc_psum, stationary_sb, moving_sb):
    """``acc += stationary.T @ moving`` @ PSUM over K, which lies on partitions tile by tile.

    stationary [128, k_tiles, M] and moving [128, k_tiles, N] @ SBUF; where K ends within the last
    tile, the rest of it is zero. Accumulating in PSUM takes a tile of zeros, an affine loop and
    nothing but products (known issues of SDK 2.22), so there is no ``+=`` outside of the loop.
    """
    for tile in nl.affine_range(stationary_sb.shape[1]):
        acc_psum[...] += nisa.nc_matmul(stationary_sb[:, tile, :], moving_sb[:, tile, :])


def project_block(xt_sb, columns, weight_sb, size):
    """One block of ``x @ W.T`` for the tokens in ``columns`` of xt_sb -> [T, size] fp32 @ PSUM.

    Tokens are stationary: the result has tokens on partitions, ready to be stored in rows.
    """
    acc_psum = nl.zeros((columns.stop - columns.start, size), nl.float32, buffer=nl.psum)
    accumulate(acc_psum, xt_sb[:, :, columns], weight_sb[:, :, 0:size])
    return acc_psum


def for_each_block(layout, body):
    """``body(block, size)`` for every weight block: a loop over the full ones, then the rest."""
    last = layout.n - (layout.blocks - 1) * layout.nb
    full = layout.blocks if last == layout.nb else layout.blocks - 1
    for block in nl.affine_range(full):
        body(block, layout.nb)
    if full < layout.blocks:
        body(full, last)


def project(xt_sb, weight_hbm, layout, put):
    """``x @ W.T`` for the tokens of a chunk, in one pass over W.

    ``put(tokens, columns, acc_psum)`` takes each result tile: tokens and columns are slices of the
    product, acc_psum [tokens, columns] fp32 @ PSUM.
    """
    pieces = spans(xt_sb.shape[2], P_MAX)

    def one_block(block, size):
        weight_sb = load_weight_block(weight_hbm, block, layout)
        columns = nl.ds(block * layout.nb, size)
        for start, count in pieces:
            tokens = slice(start, start + count)
            put(tokens, columns, project_block(xt_sb, tokens, weight_sb, size))

    for_each_block(layout, one_block)


def project_rows(xt_sb, weight_hbm, out_hbm, row, layout):
    """``x @ W.T`` for the tokens of a chunk, stored in rows of out_hbm from ``row`` on."""

    def put(tokens, columns, acc_psum):
        out_sb = nl.ndarray(acc_psum.shape, out_hbm.dtype, buffer=nl.sbuf)
        out_sb[...] = nisa.tensor_copy(acc_psum)
        nl.store(out_hbm[nl.ds(row + tokens.start, acc_psum.shape[0]), columns], out_sb)

    project(xt_sb, weight_hbm, layout, put)


def project_tiles(xt_sb, weight_hbm, layout):
    """``x @ W.T`` for the tokens of a chunk -> one tile [tokens, n] @ SBUF per 128 tokens."""
    tiles = [
        nl.ndarray((count, layout.n), xt_sb.dtype, buffer=nl.sbuf)
        for _, count in spans(xt_sb.shape[2], P_MAX)
    ]

    def put(tokens, columns, acc_psum):
        tiles[tokens.start // P_MAX][:, columns] = nisa.tensor_copy(acc_psum)

    project(xt_sb, weight_hbm, layout, put)
    return tiles


def project_heads(xt_sb, weight_hbm, layout, head_dim):
    """``x @ W.T`` of few tokens -> [D, n / D, T] @ SBUF, the head dimension on partitions.

    Here the weights are stationary and the tokens move: a pass takes the time of 64 columns instead
    of 512, and the result needs no transpose before the scores. Blocks hold pieces of 64 features.
    """
    tokens, rows = xt_sb.shape[2], min(head_dim, BLOCK_UNIT)
    pieces_sb = nl.ndarray((rows, layout.n // rows, tokens), xt_sb.dtype, buffer=nl.sbuf)

    def one_block(block, size):
        weight_sb = load_weight_block(weight_hbm, block, layout)
        for piece in nl.affine_range(size // rows):
            features = nl.ds(piece * rows, rows)
            acc_psum = nl.zeros((rows, tokens), nl.float32, buffer=nl.psum)
            accumulate(acc_psum, weight_sb[:, :, features], xt_sb)
            place = block * (layout.nb // rows) + piece
            pieces_sb[:, place, :] = nisa.tensor_copy(acc_psum)

    for_each_block(layout, one_block)
    if rows == head_dim:
        return pieces_sb
    heads_sb = nl.ndarray((head_dim, layout.n // head_dim, tokens), xt_sb.dtype, buffer=nl.sbuf)
    for head in nl.affine_range(layout.n // head_dim):  # the second half moves to partition 64
        heads_sb[0:rows, head, :] = nisa.tensor_copy(pieces_sb[:, 2 * head, :])
        heads_sb[rows:head_dim, head, :] = nisa.tensor_copy(pieces_sb[:, 2 * head + 1, :])
    return heads_sb


def normed_chunk(x_hbm, row, count, gain_sb, eps):
    """RMSNorm of ``count`` rows of x [T, H] @ HBM -> transposed, [128, k_tiles, count] @ SBUF.

    Without ``gain_sb`` the rows are taken as they are.
    """
    hidden = x_hbm.shape[1]
    shape = (P_MAX, math.ceil(hidden / P_MAX), count)
    xt_sb = nl.ndarray(shape, x_hbm.dtype, buffer=nl.sbuf)
    for start, size in spans(count, P_MAX):
        x_sb = load_tile(x_hbm[nl.ds(row + start, size), :])
        normed_sb = x_sb if gain_sb is None else rmsnorm_tile(x_sb, gain_sb, eps)
        transpose_into(xt_sb, normed_sb, start)
    return xt_sb


def gated_product(xt_sb, columns, gate_hbm, up_hbm, product_sb, layout):
    """silu(x @ gate.T) * (x @ up.T) of the token tiles in ``columns`` -> one ``product_sb`` each.

    gate and up are rounded to x's type before SiLU and before the product, as in the reference.
    """
    dtype = xt_sb.dtype

    def one_block(block, size):
        gate_w_sb = load_weight_block(gate_hbm, block, layout)
        up_w_sb = load_weight_block(up_hbm, block, layout)
        for tokens, out_sb in zip(columns, product_sb):
            count = tokens.stop - tokens.start
            gate_psum = project_block(xt_sb, tokens, gate_w_sb, size)
            gate_sb = nl.ndarray((count, size), dtype, buffer=nl.sbuf)
            gate_sb[...] = nisa.tensor_copy(gate_psum)
            silu_sb = nl.ndarray((count, size), dtype, buffer=nl.sbuf)
            silu_sb[...] = nisa.activation(nl.silu, gate_sb)
            up_psum = project_block(xt_sb, tokens, up_w_sb, size)
            up_sb = nl.ndarray((count, size), dtype, buffer=nl.sbuf)
            up_sb[...] = nisa.tensor_copy(up_psum)
            out_sb[:, nl.ds(block * layout.nb, size)] = nisa.tensor_tensor(
                silu_sb, up_sb, nl.multiply
            )

    for_each_block(layout, one_block)


# --- Rotary position embedding --------------------------------------------------------------------

# 2 pi in three parts (Cody and Waite 1980): the first has 8 significant bits and the second 11, so
# that multiples up to 2^13 of either are exact in fp32; positions to 131072 make fewer turns than
# 2^15, where the first product is still exact and the second errs by less than 1e-7.
TWO_PI_PARTS = (6.28125, 0.0019350051879882812, 3.0199159819577e-07)


def reduced_sine(angle_sb, shift):
    """sin(angle + shift) of a fp32 tile; ScalarE's sine is valid within [-pi, pi] only.

    Whole turns are subtracted first. Whether fp32 -> int32 rounds or truncates is not documented
    for every release, so a remainder may lie within two pi: there one more turn is taken off.
    """
    shape = angle_sb.shape
    turned_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    turned_sb[...] = nisa.tensor_scalar(
        angle_sb, nl.multiply, 1.0 / (2 * math.pi), op1=nl.add, operand1=shift / (2 * math.pi)
    )
    turns_sb = nl.ndarray(shape, nl.int32, buffer=nl.sbuf)
    turns_sb[...] = nisa.tensor_copy(turned_sb, dtype=nl.int32)
    rest_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    rest_sb[...] = nisa.tensor_copy(angle_sb)
    part_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    for part in TWO_PI_PARTS:
        part_sb[...] = nisa.tensor_scalar(turns_sb, nl.multiply, part, dtype=nl.float32)
        rest_sb[...] = nisa.tensor_tensor(rest_sb, part_sb, nl.subtract)
    rest_sb[...] = nisa.tensor_scalar(rest_sb, nl.add, shift)
    for beyond, turn in ((nl.greater, -2 * math.pi), (nl.less, 2 * math.pi)):
        limit = math.pi if turn < 0 else -math.pi
        part_sb[...] = nisa.tensor_scalar(
            rest_sb, beyond, limit, op1=nl.multiply, operand1=turn, dtype=nl.float32
        )
        rest_sb[...] = nisa.tensor_tensor(rest_sb, part_sb, nl.add)
    inside_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    inside_sb[...] = nisa.tensor_scalar(
        rest_sb, nl.minimum, PI_BELOW, op1=nl.maximum, operand1=-PI_BELOW
    )
    sine_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    sine_sb[...] = nisa.activation(nl.sin, inside_sb, bias=constant_column(shape[0], 0.0))
    return sine_sb


def rope_tile(x_sb, cos_sb, sin_sb, heads):
    """RoPE, half-rotation convention, of [T, heads * D] @ SBUF -> the same shape and type.

    cos and sin are [T, D / 2]. Products and sums are rounded to x's type one by one, as the
    reference computes them.
    """
    tokens, dtype = x_sb.shape[0], x_sb.dtype
    half = cos_sb.shape[1]
    out_sb = nl.ndarray(x_sb.shape, dtype, buffer=nl.sbuf)
    for head in nl.affine_range(heads):
        low, high = nl.ds(2 * head * half, half), nl.ds((2 * head + 1) * half, half)
        for own, other, op in ((low, high, nl.subtract), (high, low, nl.add)):
            straight_sb = nl.ndarray((tokens, half), dtype, buffer=nl.sbuf)
            straight_sb[...] = nisa.tensor_tensor(x_sb[:, own], cos_sb, nl.multiply)
            crossed_sb = nl.ndarray((tokens, half), dtype, buffer=nl.sbuf)
            crossed_sb[...] = nisa.tensor_tensor(x_sb[:, other], sin_sb, nl.multiply)
            out_sb[:, own] = nisa.tensor_tensor(straight_sb, crossed_sb, op)
    return out_sb


# --- Attention ------------------------------------------------------------------------------------
#
#              keys and values                       softmax
#   prefill    in SBUF (PrefillSequence.resident)    of complete rows     attend_rows
#              blocks of 512 from HBM                running              attend_block
#   decode     up to KEY_CHUNK cached keys           of complete rows     attend_rows
#              blocks of KEY_CHUNK                   running              attend_blocks
#
# Complete rows are rounded as the reference rounds them. The running softmax keeps the maximum and
# the sum so far and rescales them when the maximum grows (Milakov and Gimelshein 2018).


class RunningSoftmax:
    """State of a query tile, all fp32 @ SBUF, queries on partitions, one column (or row) per head.

    neg_max_sb [Q, heads] negated scaled maximum, sum_sb [Q, heads], out_sb [Q, heads, D] unscaled.
    """

    def __init__(self, queries, heads, head_dim):
        self.queries, self.scale = queries, 1.0 / math.sqrt(head_dim)
        neg_max_sb = nl.ndarray((queries, heads), nl.float32, buffer=nl.sbuf)
        sum_sb = nl.ndarray((queries, heads), nl.float32, buffer=nl.sbuf)
        out_sb = nl.ndarray((queries, heads, head_dim), nl.float32, buffer=nl.sbuf)
        self.neg_max_sb, self.sum_sb, self.out_sb = neg_max_sb, sum_sb, out_sb

    def weigh(self, head, scores_sb, dtype, first):
        """Take a block of scores [Q, keys] fp32 -> its weights exp(scale * (s - max)) in dtype.

        Everything kept so far is rescaled to the new maximum.
        """
        column = nl.ds(head, 1)
        block_max_sb = nl.ndarray((self.queries, 1), nl.float32, buffer=nl.sbuf)
        block_max_sb[...] = nisa.tensor_reduce(nl.max, scores_sb, axis=1, negate=True)
        new_max_sb = nl.ndarray((self.queries, 1), nl.float32, buffer=nl.sbuf)
        new_max_sb[...] = nisa.tensor_scalar(block_max_sb, nl.multiply, self.scale)
        block_sum_sb = nl.ndarray((self.queries, 1), nl.float32, buffer=nl.sbuf)
        if not first:
            new_max_sb[...] = nisa.tensor_tensor(new_max_sb, self.neg_max_sb[:, column], nl.minimum)
        weights_sb = nl.ndarray(scores_sb.shape, dtype, buffer=nl.sbuf)
        weights_sb[...] = nisa.activation_reduce(
            nl.exp, scores_sb, bias=new_max_sb, scale=self.scale,
            reduce_op=nl.add, reduce_res=block_sum_sb, dtype=dtype,
        )  # fmt: skip
        if first:
            self.sum_sb[:, column] = nisa.tensor_copy(block_sum_sb)
        else:
            self.rescale(head, new_max_sb, block_sum_sb)
        self.neg_max_sb[:, column] = nisa.tensor_copy(new_max_sb)
        return weights_sb

    def rescale(self, head, new_max_sb, block_sum_sb):
        """Sum and output times exp(old maximum - new maximum), plus the block's sum."""
        column = nl.ds(head, 1)
        factor_sb = nl.ndarray((self.queries, 1), nl.float32, buffer=nl.sbuf)
        factor_sb[...] = nisa.activation(
            nl.exp, self.neg_max_sb[:, column], bias=new_max_sb, scale=-1.0
        )
        self.sum_sb[:, column] = nisa.tensor_scalar(
            self.sum_sb[:, column], nl.multiply, factor_sb, op1=nl.add, operand1=block_sum_sb
        )
        self.out_sb[:, head, :] = nisa.tensor_scalar(
            self.out_sb[:, head, :], nl.multiply, factor_sb
        )

    def take(self, head, product_psum, first):
        """Add a block's weighted values [Q, D] fp32 @ PSUM."""
        if first:
            self.out_sb[:, head, :] = nisa.tensor_copy(product_psum)
        else:
            self.out_sb[:, head, :] = nisa.tensor_tensor(
                self.out_sb[:, head, :], product_psum, nl.add
            )

    def finish(self, head, dtype):
        """The attention output [Q, D] of a head in ``dtype``."""
        inverse_sb = nl.ndarray((self.queries, 1), nl.float32, buffer=nl.sbuf)
        inverse_sb[...] = nisa.reciprocal(self.sum_sb[:, nl.ds(head, 1)])
        result_sb = nl.ndarray((self.queries, self.out_sb.shape[2]), dtype, buffer=nl.sbuf)
        result_sb[...] = nisa.tensor_scalar(self.out_sb[:, head, :], nl.multiply, inverse_sb)
        return result_sb


def transposed_weights(weights_sb):
    """[Q, keys] @ SBUF -> [128, keys / 128, Q] @ SBUF: keys on partitions, like the values."""
    queries, keys = weights_sb.shape
    shape = (P_MAX, math.ceil(keys / P_MAX), queries)
    weights_t_sb = nl.ndarray(shape, weights_sb.dtype, buffer=nl.sbuf)
    transpose_into(weights_t_sb, weights_sb, 0)
    return weights_t_sb


def zero_last_rows(values_sb, keys):
    """Zeros behind the last key of values [128, keys / 128, N] @ SBUF, before they are written."""
    if keys % P_MAX:
        shape = (P_MAX, values_sb.shape[2])
        values_sb[:, keys // P_MAX, :] = nisa.memset(shape, 0.0, values_sb.dtype)


def weighted_values(weights_sb, values_sb):
    """Weights [Q, keys] times values [128, keys / 128, D] @ SBUF -> [Q, D] fp32 @ PSUM."""
    acc_psum = nl.zeros((weights_sb.shape[0], values_sb.shape[2]), nl.float32, buffer=nl.psum)
    accumulate(acc_psum, transposed_weights(weights_sb), values_sb)
    return acc_psum


def causal_tile(size, masked):
    """[size, size] fp32 @ SBUF to add to scores: 0 where key <= query, ``masked`` elsewhere.

    The one place where a kernel depends on ``nl.arange``: ``affine_select`` takes its predicate so.
    """
    tile_sb = nl.ndarray((size, size), nl.float32, buffer=nl.sbuf)
    i_query, i_key = nl.arange(size)[:, None], nl.arange(size)[None, :]
    tile_sb[...] = nisa.affine_select(
        i_query >= i_key, zeroed((size, size), nl.float32), on_false_value=masked
    )
    return tile_sb


def score_block(qt_sb, key_sb, bias_sb, scores_sb):
    """Unscaled scores of queries [D, Q] against keys [D, n <= 512] into ``scores_sb`` [Q, n].

    ``bias_sb`` [Q, n] is added where it is given.
    """
    scores_psum = nl.ndarray(scores_sb.shape, nl.float32, buffer=nl.psum)
    scores_psum[...] = nisa.nc_matmul(qt_sb, key_sb)
    if bias_sb is None:
        scores_sb[...] = nisa.tensor_copy(scores_psum)
    else:
        scores_sb[...] = nisa.tensor_tensor(scores_psum, bias_sb, nl.add)


def softmax_rows(scores_sb, head_dim, weights_sb):
    """Softmax of complete rows of unscaled scores [Q, keys] @ SBUF into ``weights_sb``.

    Rounded where the reference rounds: the product, the product times the scale, the weights. A
    scale that is a power of two (D = 64) rounds nothing, and ``exp`` applies it on the way.
    """
    queries, dtype = scores_sb.shape[0], scores_sb.dtype
    scale = 1.0 / math.sqrt(head_dim)
    if math.frexp(scale)[0] != 0.5:
        scaled_sb = nl.ndarray(scores_sb.shape, dtype, buffer=nl.sbuf)
        scaled_sb[...] = nisa.tensor_scalar(scores_sb, nl.multiply, scale)
        scores_sb, scale = scaled_sb, 1.0
    row_max_sb = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
    row_max_sb[...] = nisa.tensor_reduce(nl.max, scores_sb, axis=1)
    neg_max_sb = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
    neg_max_sb[...] = nisa.tensor_scalar(row_max_sb, nl.multiply, -scale)
    sum_sb = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
    exps_sb = nl.ndarray(scores_sb.shape, nl.float32, buffer=nl.sbuf)
    exps_sb[...] = nisa.activation_reduce(
        nl.exp, scores_sb, bias=neg_max_sb, scale=scale,
        reduce_op=nl.add, reduce_res=sum_sb, dtype=nl.float32,
    )  # fmt: skip
    inverse_sb = nl.ndarray((queries, 1), nl.float32, buffer=nl.sbuf)
    inverse_sb[...] = nisa.reciprocal(sum_sb)
    weights_sb[...] = nisa.tensor_scalar(exps_sb, nl.multiply, inverse_sb)


def rotated_qkv(qkv_sb, cos_hbm, sin_hbm, shape):
    """A tile of projected rows -> rotated q and k, and v as it is: [T, heads * D] @ SBUF each."""
    d, q_heads, kv_heads = shape.head_dim, shape.q_heads, shape.kv_heads
    cos_sb, sin_sb = load_tile(cos_hbm), load_tile(sin_hbm)
    q_sb = rope_tile(qkv_sb[:, 0 : q_heads * d], cos_sb, sin_sb, q_heads)
    k_sb = rope_tile(qkv_sb[:, nl.ds(q_heads * d, kv_heads * d)], cos_sb, sin_sb, kv_heads)
    return q_sb, k_sb, qkv_sb[:, nl.ds((q_heads + kv_heads) * d, kv_heads * d)]


class PrefillSequence:
    """Keys and values of one sequence; token tiles are attended to in order.

    Short sequences keep them in SBUF: keys_sb [D, kv_heads, S], values_sb [128, key tiles,
    kv_heads * D]. Longer ones put the transposed keys into HBM, keys_hbm [D, kv_heads, S], and read
    blocks of 512 keys back; their values are rows of values_hbm from ``row`` on, which the caller
    writes or has written. The compiler orders such a load after the stores that it depends on.
    bias_hbm [1, S] hides keys (left padding).
    """

    def __init__(self, length, shape, values_hbm, row, bias_hbm=None):
        d, kv_heads, dtype = shape.head_dim, shape.kv_heads, values_hbm.dtype
        self.shape, self.values_hbm, self.row, self.dtype = shape, values_hbm, row, dtype
        tiles = math.ceil(length / P_MAX)
        kept = values_hbm.itemsize * kv_heads * (length + tiles * d)
        rows = (
            4 + 4 * values_hbm.itemsize
        ) * length  # scores, scaled, exponentials, weights and their transpose
        self.resident = kept <= RESIDENT_BYTES and kept + rows <= 2 * RESIDENT_BYTES
        if self.resident:
            keys_sb = nl.ndarray((d, kv_heads, length), dtype, buffer=nl.sbuf)
            values_sb = nl.ndarray((P_MAX, tiles, kv_heads * d), dtype, buffer=nl.sbuf)
            zero_last_rows(values_sb, length)
            self.keys, self.values_sb = keys_sb, values_sb
        else:
            keys_hbm = nl.ndarray((d, kv_heads, length), dtype, buffer=nl.hbm)
            self.keys = keys_hbm
        masked = MASKED_FP16 if dtype == nl.float16 else MASKED
        self.causal_sb = causal_tile(min(length, P_MAX), masked)
        self.bias_sb = None
        if bias_hbm is not None:
            self.bias_sb = load_broadcast(bias_hbm, min(length, P_MAX))

    def append(self, k_sb, v_sb, start):
        """Keep rotated keys and values [T, kv_heads * D] @ SBUF of the tokens from ``start`` on."""
        d, kv_heads = self.shape.head_dim, self.shape.kv_heads
        tokens = k_sb.shape[0]
        if self.resident:
            self.values_sb[0:tokens, start // P_MAX, :] = nisa.tensor_copy(v_sb)
            kt_sb = self.keys[:, :, nl.ds(start, tokens)]
        else:
            kt_sb = nl.ndarray((d, kv_heads, tokens), self.dtype, buffer=nl.sbuf)
        for head in nl.affine_range(kv_heads):
            kt_sb[:, head, :] = nisa.tensor_copy(transposed(k_sb[:, nl.ds(head * d, d)]))
        if not self.resident:
            nl.store(self.keys[:, :, nl.ds(start, tokens)], kt_sb)

    def block(self, start, size):
        """Keys [D, kv_heads, size] and values [128, size / 128, kv_heads * D] @ SBUF of a block."""
        part = nl.ds(start, size)
        if self.resident:
            first = start // P_MAX
            return self.keys[:, :, part], self.values_sb[:, first : first + math.ceil(size / P_MAX)]
        width = self.values_hbm.shape[1]
        shape = (P_MAX, math.ceil(size / P_MAX), width)
        values_sb = nl.ndarray(shape, self.dtype, buffer=nl.sbuf)
        zero_last_rows(values_sb, size)
        for key, count in spans(size, P_MAX):
            rows = nl.ds(self.row + start + key, count)
            values_sb[0:count, key // P_MAX, :] = nl.load(self.values_hbm[rows, :])
        return load_tile(self.keys[:, :, part]), values_sb

    def attend(self, q_sb, start):
        """Causal attention of queries [Q, q_heads * D] from ``start`` on -> the same shape @ SBUF.

        Key blocks that begin above the diagonal are never computed; blocks that come from HBM are
        read once for all heads, with a running softmax.
        """
        shape, d = self.shape, self.shape.head_dim
        queries, dtype = q_sb.shape[0], q_sb.dtype
        qt_sb = nl.ndarray((d, shape.q_heads, queries), dtype, buffer=nl.sbuf)
        for head in nl.affine_range(shape.q_heads):
            qt_sb[:, head, :] = nisa.tensor_copy(transposed(q_sb[:, nl.ds(head * d, d)]))
        context_sb = nl.ndarray(q_sb.shape, dtype, buffer=nl.sbuf)
        if self.resident:
            self.attend_rows(context_sb, qt_sb, start)
            return context_sb
        state = RunningSoftmax(queries, shape.q_heads, d)
        for block, size in spans(start + queries, MOVING_MAX):
            keys_sb, values_sb = self.block(block, size)
            self.attend_block(state, qt_sb, keys_sb, values_sb, block, start - block)
        for head in nl.affine_range(shape.q_heads):
            context_sb[:, nl.ds(head * d, d)] = nisa.tensor_copy(state.finish(head, dtype))
        return context_sb

    def hide_later_keys(self, scores_sb):
        """Adds the causal mask to the scores [Q, Q] of a query tile against its own keys."""
        queries = scores_sb.shape[0]
        own_sb = self.causal_sb[0:queries, 0:queries]
        scores_sb[...] = nisa.tensor_tensor(scores_sb, own_sb, nl.add)

    def bias(self, queries, keys):
        """The padding bias of a slice of keys for so many queries, or None."""
        return None if self.bias_sb is None else self.bias_sb[0:queries, keys]

    def attend_rows(self, context_sb, qt_sb, start):
        """With all keys in SBUF a row of scores is complete before its softmax: no rescaling.

        All heads of a group are scored before their values are weighed, so that TensorE computes
        the scores of one while the softmax of another is under way.
        """
        shape, d, queries = self.shape, self.shape.head_dim, qt_sb.shape[2]
        keys = start + queries
        at_once = shape.group if 2 * keys * shape.group <= SCORE_ROWS_BYTES else 1
        for kv_head in nl.affine_range(shape.kv_heads):
            values_sb = self.values_sb[:, :, nl.ds(kv_head * d, d)]
            for first, count in spans(shape.group, at_once):
                weights_sb = nl.ndarray((queries, count, keys), self.dtype, buffer=nl.sbuf)
                head = kv_head * shape.group + first
                for member in nl.affine_range(count):
                    query_sb = qt_sb[:, head + member, :]
                    self.weigh_row(query_sb, kv_head, start, weights_sb[:, member, :])
                for member in nl.affine_range(count):
                    product_psum = weighted_values(weights_sb[:, member, :], values_sb)
                    columns = nl.ds((head + member) * d, d)
                    context_sb[:, columns] = nisa.tensor_copy(product_psum)

    def weigh_row(self, qt_sb, kv_head, start, weights_sb):
        """Softmax weights of queries [D, Q] from ``start`` on into ``weights_sb`` [Q, keys]."""
        queries = qt_sb.shape[1]
        scores_sb = nl.ndarray((queries, start + queries), self.dtype, buffer=nl.sbuf)
        for block, size in spans(start + queries, MOVING_MAX):
            part = nl.ds(block, size)
            key_sb = self.keys[:, kv_head, part]
            score_block(qt_sb, key_sb, self.bias(queries, part), scores_sb[:, part])
        self.hide_later_keys(scores_sb[:, nl.ds(start, queries)])
        softmax_rows(scores_sb, self.shape.head_dim, weights_sb)

    def attend_block(self, state, qt_sb, keys_sb, values_sb, block, ahead):
        """One key block for every head; the queries begin ``ahead`` positions after the block."""
        shape, d = self.shape, self.shape.head_dim
        queries, size = qt_sb.shape[2], keys_sb.shape[2]
        bias_sb = self.bias(queries, nl.ds(block, size))
        for kv_head in nl.affine_range(shape.kv_heads):
            for member in nl.affine_range(shape.group):
                head = kv_head * shape.group + member
                scores_sb = nl.ndarray((queries, size), nl.float32, buffer=nl.sbuf)
                score_block(qt_sb[:, head, :], keys_sb[:, kv_head, :], bias_sb, scores_sb)
                if ahead < size:  # the block holds the queries' own keys
                    self.hide_later_keys(scores_sb[:, nl.ds(ahead, queries)])
                weights_sb = state.weigh(head, scores_sb, self.dtype, block == 0)
                columns = nl.ds(kv_head * d, d)
                product_psum = weighted_values(weights_sb, values_sb[:, :, columns])
                state.take(head, product_psum, block == 0)


# --- Decode attention: heads in slots of partitions -----------------------------------------------
#
# One new token per sequence has few rows of scores: as many as a KV head serves query heads (4 for
# Llama-3.2-1B). Engines work on 128 partitions in the time of one, and may move results between
# quadrants of 32 partitions; so four KV heads share a tile, each in a slot of 32 partitions of
# which it uses the first ``group``. The rows between are zero.


class Slot(NamedTuple):
    """Where a KV head's queries lie in a tile of scores: ``rows`` is a slice of partitions."""

    kv_head: int
    rows: slice

    @classmethod
    def fill(cls, shape) -> List[List[Slot]]:
        """All KV heads of a rank, as many to a tile as quadrants (or halves) allow."""
        size = 32 if shape.group <= 32 else 64 if shape.group <= 64 else P_MAX
        return [
            [cls(first + i, slice(at, at + shape.group)) for i, (at, _) in enumerate(
                spans(count * size, size)
            )]
            for first, count in spans(shape.kv_heads, P_MAX // size)
        ]  # fmt: skip


class CacheBlock(NamedTuple):
    """Which keys of a cache: tiles of 128 from tile ``first`` on, ``keys`` in all."""

    first: int
    tiles: int
    keys: int


class CachedKeys:
    """A block of one KV head's cache in SBUF: keys_t_sb [D, n] and values_sb [128, n / 128, D].

    From tiles [128, n / 128, D] of ``keys`` keys each; the last tile may be partial.
    """

    def __init__(self, keys_sb, values_sb, keys):
        d, self.values_sb = keys_sb.shape[2], values_sb
        keys_t_sb = nl.ndarray((d, keys), keys_sb.dtype, buffer=nl.sbuf)
        full, tail = keys // P_MAX, keys % P_MAX
        for tile in nl.affine_range(full):
            columns = nl.ds(tile * P_MAX, P_MAX)
            keys_t_sb[:, columns] = nisa.tensor_copy(transposed(keys_sb[:, tile, :]))
        if tail:
            columns = nl.ds(full * P_MAX, tail)
            keys_t_sb[:, columns] = nisa.tensor_copy(transposed(keys_sb[0:tail, full, :]))
        self.keys_t_sb = keys_t_sb

    def score(self, q_view, scores_sb):
        """Unscaled scores of queries [D, group] into ``scores_sb`` [group, n]."""
        for start, size in spans(self.keys_t_sb.shape[1], MOVING_MAX):
            keys = nl.ds(start, size)
            score_block(q_view, self.keys_t_sb[:, keys], None, scores_sb[:, keys])


class KeyCache:
    """Cached keys and values [B, kv_heads, L, D] @ HBM and the mask's bias [B, L] fp32.

    They are read in tiles of 128 keys. Where 128 divides L, partition p takes the L / 128 keys from
    p * L / 128 on, which lie next to each other in HBM: n tiles are rows of n * D elements, and
    tile t holds the keys t, t + L / 128, ... Sums over keys do not mind the order, as long as the
    mask has the same. For other lengths tile t holds 128 successive keys, in rows of D elements.
    """

    def __init__(self, keys_hbm, values_hbm, bias_hbm):
        self.keys_hbm, self.values_hbm, self.bias_hbm = keys_hbm, values_hbm, bias_hbm
        self.length = keys_hbm.shape[2]
        self.loaded = {}

    def blocks(self):
        """The cache in blocks of at most KEY_CHUNK keys."""
        return [
            CacheBlock(start // P_MAX, math.ceil(keys / P_MAX), keys)
            for start, keys in spans(self.length, KEY_CHUNK)
        ]

    def load(self, cache_hbm, b, kv_head, block):
        """A block of one KV head's keys or values -> [128, tiles, D] @ SBUF."""
        batch, kv_heads, length, d = cache_hbm.shape
        if length % P_MAX == 0:
            runs_hbm = cache_hbm.reshape((batch, kv_heads, P_MAX, length // P_MAX, d))
            return load_tile(runs_hbm[b, kv_head, :, nl.ds(block.first, block.tiles), :])
        tile_sb = nl.ndarray((P_MAX, block.tiles, d), cache_hbm.dtype, buffer=nl.sbuf)
        zero_last_rows(tile_sb, block.keys)
        for at, keys in spans(block.keys, P_MAX):
            rows = nl.ds(block.first * P_MAX + at, keys)
            tile_sb[0:keys, at // P_MAX, :] = nl.load(cache_hbm[b, kv_head, rows, :])
        return tile_sb

    def fetch(self, b, kv_head, block):
        """A block of one KV head's cache -> CachedKeys."""
        if (b, kv_head) in self.loaded:
            return self.loaded[b, kv_head]
        keys_sb = self.load(self.keys_hbm, b, kv_head, block)
        return CachedKeys(keys_sb, self.load(self.values_hbm, b, kv_head, block), block.keys)

    def preload(self):
        """Load short caches before anything else, so that their keys are transposed in time.

        That is done while the weights of the new tokens' projection still stream.
        """
        batch, kv_heads, length, d = self.keys_hbm.shape
        row_bytes = self.keys_hbm.itemsize * (length + 2 * math.ceil(length / P_MAX) * d)
        if length > KEY_CHUNK or batch * kv_heads * row_bytes > PRELOAD_BYTES:
            return
        (block,) = self.blocks()
        for b in nl.static_range(batch):
            for kv_head in nl.static_range(kv_heads):
                self.loaded[b, kv_head] = self.fetch(b, kv_head, block)

    def bias(self, b, block, partitions):
        """The mask's bias for a block -> [partitions, keys] fp32 @ SBUF, keys in its order."""
        row, length = nl.ds(b, 1), self.length
        if length % P_MAX:
            keys = nl.ds(block.first * P_MAX, block.keys)
            return load_broadcast(self.bias_hbm[row, keys], partitions)
        runs_hbm = self.bias_hbm.reshape((self.bias_hbm.shape[0], P_MAX, length // P_MAX))
        runs_sb = load_tile(runs_hbm[row, :, nl.ds(block.first, block.tiles)])
        tiles = [runs_sb[:, :, at // P_MAX] for at, _ in spans(block.keys, P_MAX)]
        return broadcast_row(tiles, partitions)


def rope_columns(table_hbm, upper):
    """[B, D / 2] @ HBM -> [D, B] fp32 @ SBUF, the upper half times ``upper``."""
    table_t_sb = transposed(load_tile(table_hbm))
    half, batch = table_t_sb.shape
    columns_sb = nl.ndarray((2 * half, batch), nl.float32, buffer=nl.sbuf)
    columns_sb[0:half, :] = nisa.tensor_copy(table_t_sb)
    columns_sb[half : 2 * half, :] = nisa.tensor_scalar(table_t_sb, nl.multiply, upper)
    return columns_sb


class DecodeBatch:
    """Attention of one new token per sequence.

    From its projection qkv_t_sb [D, q_heads + 2 * kv_heads, B], head dimension on partitions.
    """

    def __init__(self, qkv_t_sb, cos_hbm, sin_hbm, shape):
        self.shape, self.dtype = shape, qkv_t_sb.dtype
        d, both, batch = shape.head_dim, shape.q_heads + shape.kv_heads, qkv_t_sb.shape[2]
        values_t_sb = nl.ndarray((d, shape.kv_heads, batch), nl.float32, buffer=nl.sbuf)
        values_t_sb[...] = nisa.tensor_copy(qkv_t_sb[:, nl.ds(both, shape.kv_heads), :])
        qk_t_sb = nl.ndarray((d, both, batch), self.dtype, buffer=nl.sbuf)
        self.values_t_sb, self.qk_t_sb = values_t_sb, qk_t_sb
        cos_sb, sin_sb = rope_columns(cos_hbm, 1.0), rope_columns(sin_hbm, -1.0)
        for b in nl.affine_range(batch):
            self.rotate(qkv_t_sb[:, 0:both, b], cos_sb[:, nl.ds(b, 1)], sin_sb[:, nl.ds(b, 1)], b)

    def rotate(self, x_sb, cos_sb, sin_sb, b):
        """RoPE of all heads of one token, [D, heads] @ SBUF: the halves of D change partitions.

        Products and sums are rounded one by one, as the reference computes them.
        """
        half = x_sb.shape[0] // 2
        low, high = slice(0, half), slice(half, 2 * half)
        straight_sb = nl.ndarray(x_sb.shape, self.dtype, buffer=nl.sbuf)
        straight_sb[...] = nisa.tensor_scalar(x_sb, nl.multiply, cos_sb)
        crossed_sb = nl.ndarray(x_sb.shape, self.dtype, buffer=nl.sbuf)
        crossed_sb[low, :] = nisa.tensor_scalar(x_sb[high, :], nl.multiply, sin_sb[high, :])
        crossed_sb[high, :] = nisa.tensor_scalar(x_sb[low, :], nl.multiply, sin_sb[low, :])
        self.qk_t_sb[:, :, b] = nisa.tensor_tensor(straight_sb, crossed_sb, nl.add)

    def store_new(self, columns_sb, out_hbm):
        """New keys or values [D, kv_heads, B] @ SBUF -> rows [B, kv_heads * D] @ HBM."""
        d, kv_heads, batch = columns_sb.shape
        heads_hbm = out_hbm.reshape((batch, kv_heads, d))
        for b in nl.affine_range(batch):
            nl.store(heads_hbm[b], transposed(columns_sb[:, :, b]))

    def new_keys(self):
        return self.qk_t_sb[:, nl.ds(self.shape.q_heads, self.shape.kv_heads), :]

    def queries(self, b, kv_head):
        """The rotated queries of one KV head's group, [D, group] @ SBUF."""
        return self.qk_t_sb[:, nl.ds(kv_head * self.shape.group, self.shape.group), b]

    def score_own(self, b, slots, scores_sb):
        """Unscaled scores of each query with the new token's own key into [rows, 1] @ SBUF."""
        for kv_head, rows in slots:
            key_sb = self.qk_t_sb[:, self.shape.q_heads + kv_head, nl.ds(b, 1)]
            score_block(self.queries(b, kv_head), key_sb, None, scores_sb[rows, :])

    def own_values(self, b, slots):
        """The new token's value for every query, [rows, D] @ SBUF."""
        spread_sb = zeroed((self.shape.head_dim, slots[-1].rows.stop), self.dtype)
        for kv_head, rows in slots:
            spread_sb[:, rows] = nisa.tensor_scalar(
                spread_sb[:, rows], nl.add, self.values_t_sb[:, kv_head, nl.ds(b, 1)]
            )
        return transposed(spread_sb)

    def weigh(self, weights_sb, heads, slots, dtype):
        """Weights [rows, keys] @ SBUF times the values of each slot's head -> [rows, D] @ SBUF."""
        rows, shape = weights_sb.shape[0], (self.shape.group, self.shape.head_dim)
        weights_t_sb = transposed_weights(weights_sb)
        out_sb = zeroed((rows, self.shape.head_dim), dtype)
        for cached, (_, part) in zip(heads, slots):
            acc_psum = nl.zeros(shape, nl.float32, buffer=nl.psum)
            accumulate(acc_psum, weights_t_sb[:, :, part], cached.values_sb)
            out_sb[part, :] = nisa.tensor_copy(acc_psum)
        return out_sb

    def attend(self, b, cache):
        """(slots, context [D, rows] @ SBUF) of sequence ``b`` for each tile of slots."""
        attend_slots = self.attend_rows if cache.length <= KEY_CHUNK else self.attend_blocks
        return [
            (slots, transposed(attend_slots(b, slots, cache))) for slots in Slot.fill(self.shape)
        ]

    def attend_rows(self, b, slots, cache):
        """One softmax over the cached keys and the own one -> context [rows, D] @ SBUF.

        Rounded as the reference rounds; the weighted sums of both are rounded before they are
        added, too.
        """
        rows, length, (block,) = slots[-1].rows.stop, cache.length, cache.blocks()
        cached, own = nl.ds(0, length), nl.ds(length, 1)
        heads = [cache.fetch(b, slot.kv_head, block) for slot in slots]
        scores_sb = zeroed((rows, length + 1), self.dtype)
        for keys, (kv_head, part) in zip(heads, slots):
            keys.score(self.queries(b, kv_head), scores_sb[part, cached])
        self.score_own(b, slots, scores_sb[:, own])
        bias_sb = cache.bias(b, block, rows)
        scores_sb[:, cached] = nisa.tensor_tensor(scores_sb[:, cached], bias_sb, nl.add)
        weights_sb = nl.ndarray(scores_sb.shape, self.dtype, buffer=nl.sbuf)
        softmax_rows(scores_sb, self.shape.head_dim, weights_sb)
        own_weight_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
        own_weight_sb[...] = nisa.tensor_copy(weights_sb[:, own])
        values_sb = self.own_values(b, slots)
        active_sb = nl.ndarray(values_sb.shape, self.dtype, buffer=nl.sbuf)
        active_sb[...] = nisa.tensor_scalar(values_sb, nl.multiply, own_weight_sb)
        prior_sb = self.weigh(weights_sb[:, cached], heads, slots, self.dtype)
        context_sb = nl.ndarray(values_sb.shape, self.dtype, buffer=nl.sbuf)
        context_sb[...] = nisa.tensor_tensor(prior_sb, active_sb, nl.add)
        return context_sb

    def attend_blocks(self, b, slots, cache):
        """Long caches: blocks of KEY_CHUNK keys with a running softmax, the own key first."""
        rows = slots[-1].rows.stop
        state = RunningSoftmax(rows, 1, self.shape.head_dim)
        own_sb = zeroed((rows, 1), nl.float32)
        self.score_own(b, slots, own_sb)
        state.weigh(0, own_sb, self.dtype, first=True)  # one key: its weight is exp(0) = 1
        state.take(0, self.own_values(b, slots), first=True)
        for block in cache.blocks():
            heads = [cache.fetch(b, slot.kv_head, block) for slot in slots]
            bias_sb = cache.bias(b, block, rows)
            scores_sb = zeroed(bias_sb.shape, nl.float32)
            for keys, (kv_head, part) in zip(heads, slots):
                keys.score(self.queries(b, kv_head), scores_sb[part, :])
            scores_sb[...] = nisa.tensor_tensor(scores_sb, bias_sb, nl.add)
            weights_sb = state.weigh(0, scores_sb, self.dtype, first=False)
            state.take(0, self.weigh(weights_sb, heads, slots, nl.float32), first=False)
        return state.finish(0, self.dtype)


# --- Kernels, in the order of the model -----------------------------------------------------------


@nki.jit
def rmsnorm_kernel(x_hbm, gain_hbm, eps):
    """RMSNorm: x [T, H], gain [1, H] -> [T, H], type of x."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    tokens = x_hbm.shape[0]
    gain_sb = load_broadcast(gain_hbm, min(tokens, P_MAX))
    for start, size in spans(tokens, P_MAX):
        x_sb = load_tile(x_hbm[nl.ds(start, size), :])
        nl.store(out_hbm[nl.ds(start, size), :], rmsnorm_tile(x_sb, gain_sb, eps))
    return out_hbm


@nki.jit
def linear_kernel(x_hbm, weight_hbm, n, gain_hbm=None, eps=0.0):
    """Linear layer, after RMSNorm where ``gain_hbm`` [1, K] is given.

    x [T, K], kernel weight of [n, K] -> [T, n], type of x. QKV projection (norm; q, k and v rows in
    one weight), output projection (no norm) and LM head (final norm). One pass over the weight for
    every TOKEN_CHUNK tokens.
    """
    tokens, k = x_hbm.shape
    out_hbm = nl.ndarray((tokens, n), x_hbm.dtype, buffer=nl.shared_hbm)
    layout = BlockLayout.of(n, k)
    gain_sb = None if gain_hbm is None else load_broadcast(gain_hbm, min(tokens, P_MAX))
    for start, size in spans(tokens, token_chunk(x_hbm.itemsize * layout.k_tiles)):
        xt_sb = normed_chunk(x_hbm, start, size, gain_sb, eps)
        project_rows(xt_sb, weight_hbm, out_hbm, start, layout)
    return out_hbm


@nki.jit
def rope_tables_kernel(position_hbm, inv_freq_hbm, dtype):
    """cos and sin of the rotary angles: position [T, 1] fp32, inv_freq [128, D / 2] -> [T, D / 2].

    Angle and range reduction in fp32, one rounding to ``dtype``. inv_freq is the same in all rows.
    """
    tokens, half = position_hbm.shape[0], inv_freq_hbm.shape[1]
    cos_hbm = nl.ndarray((tokens, half), dtype, buffer=nl.shared_hbm)
    sin_hbm = nl.ndarray((tokens, half), dtype, buffer=nl.shared_hbm)
    freq_sb = load_tile(inv_freq_hbm)
    for start, size in spans(tokens, P_MAX):
        rows = nl.ds(start, size)
        position_sb = load_tile(position_hbm[rows, :])
        angle_sb = nl.ndarray((size, half), nl.float32, buffer=nl.sbuf)
        angle_sb[...] = nisa.tensor_scalar(freq_sb[0:size, :], nl.multiply, position_sb)
        for table_hbm, shift in ((cos_hbm, math.pi / 2), (sin_hbm, 0.0)):
            rounded_sb = nl.ndarray((size, half), dtype, buffer=nl.sbuf)
            rounded_sb[...] = nisa.tensor_copy(reduced_sine(angle_sb, shift))
            nl.store(table_hbm[rows, :], rounded_sb)
    return cos_hbm, sin_hbm


@nki.jit
def rope_kernel(x_hbm, cos_hbm, sin_hbm):
    """RoPE of x [T, heads * D] with cos and sin [T, D / 2] -> the same shape and type."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    tokens, width = x_hbm.shape
    heads = width // (2 * cos_hbm.shape[1])
    for start, size in spans(tokens, P_MAX):
        rows = nl.ds(start, size)
        cos_sb, sin_sb = load_tile(cos_hbm[rows, :]), load_tile(sin_hbm[rows, :])
        x_sb = load_tile(x_hbm[rows, :])
        nl.store(out_hbm[rows, :], rope_tile(x_sb, cos_sb, sin_sb, heads))
    return out_hbm


@nki.jit
def attention_prefill_kernel(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads, bias_hbm=None):
    """RoPE and causal flash attention of all new tokens (Dao et al. 2022), grouped heads.

    qkv [B * S, (q_heads + 2 * kv_heads) * D], cos and sin [B * S, D / 2], bias [B, S] fp32 (0 for
    keys that count, MASKED for left padding) -> context [B * S, q_heads * D] and the rotated keys
    [B * S, kv_heads * D], type of qkv.
    """
    tokens, dtype = qkv_hbm.shape[0], qkv_hbm.dtype
    shape = HeadShape(q_heads, kv_heads, qkv_hbm.shape[1] // (q_heads + 2 * kv_heads))
    d, length = shape.head_dim, tokens // batch
    context_hbm = nl.ndarray((tokens, q_heads * d), dtype, buffer=nl.shared_hbm)
    rotated_hbm = nl.ndarray((tokens, kv_heads * d), dtype, buffer=nl.shared_hbm)
    for b in nl.affine_range(batch):
        own_bias_hbm = None if bias_hbm is None else bias_hbm[nl.ds(b, 1), :]
        values_hbm = qkv_hbm[:, nl.ds((q_heads + kv_heads) * d, kv_heads * d)]
        sequence = PrefillSequence(length, shape, values_hbm, b * length, own_bias_hbm)
        for start, size in spans(length, P_MAX):
            rows = nl.ds(b * length + start, size)
            qkv_sb = load_tile(qkv_hbm[rows, :])
            q_sb, k_sb, v_sb = rotated_qkv(qkv_sb, cos_hbm[rows, :], sin_hbm[rows, :], shape)
            nl.store(rotated_hbm[rows, :], k_sb)
            sequence.append(k_sb, v_sb, start)
            nl.store(context_hbm[rows, :], sequence.attend(q_sb, start))
    return context_hbm, rotated_hbm


@nki.jit
def attention_decode_kernel(
    qkv_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm, q_heads, kv_heads
):
    """RoPE and attention of one new token per sequence over the cache and itself, grouped heads.

    qkv [B, (q_heads + 2 * kv_heads) * D], cos and sin [B, D / 2], cached keys and values
    [B, kv_heads, L, D], bias [B, L] fp32 (0 for keys that count, MASKED otherwise) -> context
    [B, q_heads, D] and new keys (rotated) and values [B, kv_heads * D]. Cached keys and values are
    read once per KV head, in blocks of KEY_CHUNK with a running softmax.
    """
    batch, d, dtype = qkv_hbm.shape[0], keys_hbm.shape[3], qkv_hbm.dtype
    context_hbm = nl.ndarray((batch, q_heads, d), dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((batch, kv_heads * d), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((batch, kv_heads * d), dtype, buffer=nl.shared_hbm)
    shape = HeadShape(q_heads, kv_heads, d)
    cache = KeyCache(keys_hbm, values_hbm, bias_hbm)
    qkv_sb = load_tile(qkv_hbm)
    qkv_t_sb = nl.ndarray((d, qkv_hbm.shape[1] // d, batch), dtype, buffer=nl.sbuf)
    for head in nl.affine_range(qkv_hbm.shape[1] // d):
        qkv_t_sb[:, head, :] = nisa.tensor_copy(transposed(qkv_sb[:, nl.ds(head * d, d)]))
    new = DecodeBatch(qkv_t_sb, cos_hbm, sin_hbm, shape)
    new.store_new(new.new_keys(), new_keys_hbm)
    new.store_new(qkv_t_sb[:, nl.ds(q_heads + kv_heads, kv_heads), :], new_values_hbm)
    for b in nl.static_range(batch):
        for slots, context_t_sb in new.attend(b, cache):
            for kv_head, rows in slots:
                heads = nl.ds(kv_head * shape.group, shape.group)
                nl.store(context_hbm[b, heads, :], transposed(context_t_sb[:, rows]))
    return context_hbm, new_keys_hbm, new_values_hbm


@nki.jit
def attention_prefill_block_kernel(
    x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads,
    bias_hbm=None,
):  # fmt: skip
    """Everything between two all-reduces of a prefill: norm, QKV, RoPE, attention, output.

    x [B * S, H], gain [1, H], kernel weights of QKV and output, cos and sin [B * S, D / 2], bias
    [B, S] fp32 or None -> partial output [B * S, H], rotated keys and values [B * S, kv_heads * D].
    Q and the context never leave SBUF. One pass over the weights for every TOKEN_CHUNK tokens of a
    sequence.
    """
    tokens, hidden = x_hbm.shape
    dtype, length = x_hbm.dtype, tokens // batch
    shape = HeadShape(q_heads, kv_heads, 2 * cos_hbm.shape[1])
    d = shape.head_dim
    qkv_layout = BlockLayout.of((q_heads + 2 * kv_heads) * d, hidden)
    out_layout = BlockLayout.of(hidden, q_heads * d)
    out_hbm = nl.ndarray((tokens, hidden), dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, kv_heads * d), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, kv_heads * d), dtype, buffer=nl.shared_hbm)
    gain_sb = load_broadcast(gain_hbm, min(tokens, P_MAX))
    # per token: its columns of x and of the context, its row of Q, K and V
    kept = qkv_layout.k_tiles + out_layout.k_tiles + math.ceil(qkv_layout.n / P_MAX)
    step = min(length, token_chunk(x_hbm.itemsize * kept))
    for b in nl.affine_range(batch):
        own_bias_hbm = None if bias_hbm is None else bias_hbm[nl.ds(b, 1), :]
        sequence = PrefillSequence(length, shape, values_hbm, b * length, own_bias_hbm)
        for chunk, count in spans(length, step):
            first = b * length + chunk
            xt_sb = normed_chunk(x_hbm, first, count, gain_sb, eps)
            context_t_sb = nl.ndarray((P_MAX, out_layout.k_tiles, count), dtype, buffer=nl.sbuf)
            for tile, qkv_sb in enumerate(project_tiles(xt_sb, qkv_w_hbm, qkv_layout)):
                start = tile * P_MAX
                rows = nl.ds(first + start, qkv_sb.shape[0])
                q_sb, k_sb, v_sb = rotated_qkv(qkv_sb, cos_hbm[rows, :], sin_hbm[rows, :], shape)
                nl.store(keys_hbm[rows, :], k_sb)
                nl.store(values_hbm[rows, :], v_sb)
                sequence.append(k_sb, v_sb, chunk + start)
                transpose_into(context_t_sb, sequence.attend(q_sb, chunk + start), start)
            project_rows(context_t_sb, out_w_hbm, out_hbm, first, out_layout)
    return out_hbm, keys_hbm, values_hbm


@nki.jit
def attention_decode_block_kernel(
    x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm,
    q_heads, kv_heads,
):  # fmt: skip
    """Everything between two all-reduces of a decode step: norm, QKV, RoPE, attention, output.

    x [B, H], gain [1, H], kernel weights of QKV and output, cos and sin [B, D / 2], cached keys and
    values [B, kv_heads, L, D], bias [B, L] fp32 -> partial output [B, H], new keys (rotated) and
    values [B, kv_heads * D].
    """
    batch, hidden = x_hbm.shape
    d, dtype = keys_hbm.shape[3], x_hbm.dtype
    shape = HeadShape(q_heads, kv_heads, d)
    out_hbm = nl.ndarray((batch, hidden), dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((batch, kv_heads * d), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((batch, kv_heads * d), dtype, buffer=nl.shared_hbm)
    qkv_layout = BlockLayout.of((q_heads + 2 * kv_heads) * d, hidden)
    out_layout = BlockLayout.of(hidden, q_heads * d)
    cache = KeyCache(keys_hbm, values_hbm, bias_hbm)
    cache.preload()
    xt_sb = normed_chunk(x_hbm, 0, batch, load_broadcast(gain_hbm, batch), eps)
    qkv_t_sb = project_heads(xt_sb, qkv_w_hbm, qkv_layout, d)
    new = DecodeBatch(qkv_t_sb, cos_hbm, sin_hbm, shape)
    new.store_new(new.new_keys(), new_keys_hbm)
    new.store_new(qkv_t_sb[:, nl.ds(q_heads + kv_heads, kv_heads), :], new_values_hbm)
    context_t_sb = nl.ndarray((P_MAX, out_layout.k_tiles, batch), dtype, buffer=nl.sbuf)
    zero_last_rows(context_t_sb, q_heads * d)
    for b in nl.static_range(batch):
        for slots, heads_sb in new.attend(b, cache):
            for kv_head, rows in slots:
                for member in nl.static_range(shape.group):
                    tile, start = divmod((kv_head * shape.group + member) * d, P_MAX)
                    context_t_sb[start : start + d, tile, nl.ds(b, 1)] = nisa.tensor_copy(
                        heads_sb[:, nl.ds(rows.start + member, 1)]
                    )
    project_rows(context_t_sb, out_w_hbm, out_hbm, 0, out_layout)
    return out_hbm, new_keys_hbm, new_values_hbm


@nki.jit
def swiglu_mlp_kernel(x_hbm, gate_hbm, up_hbm, down_hbm, f, gain_hbm=None, eps=0.0):
    """SwiGLU MLP (Shazeer 2020), after RMSNorm where ``gain_hbm`` is given.

    x [T, H]; kernel weights of gate and up [f, H] and of down [H, f] -> [T, H], type of x:
    down(silu(gate(x)) * up(x)). One pass over the weights for every TOKEN_CHUNK tokens.
    """
    tokens, hidden = x_hbm.shape
    out_hbm = nl.ndarray((tokens, hidden), x_hbm.dtype, buffer=nl.shared_hbm)
    wide, narrow = BlockLayout.of(f, hidden), BlockLayout.of(hidden, f)
    gain_sb = None if gain_hbm is None else load_broadcast(gain_hbm, min(tokens, P_MAX))
    # per token: its column of x, then the product as a row of a tile and as a column
    kept = x_hbm.itemsize * (wide.k_tiles + 2 * narrow.k_tiles)
    for start, size in spans(tokens, token_chunk(kept)):
        xt_sb = normed_chunk(x_hbm, start, size, gain_sb, eps)
        pieces = spans(size, P_MAX)
        columns = [slice(at, at + count) for at, count in pieces]
        products_sb = [nl.ndarray((count, f), x_hbm.dtype, buffer=nl.sbuf) for _, count in pieces]
        gated_product(xt_sb, columns, gate_hbm, up_hbm, products_sb, wide)
        product_t_sb = nl.ndarray((P_MAX, narrow.k_tiles, size), x_hbm.dtype, buffer=nl.sbuf)
        for (at, _), product_sb in zip(pieces, products_sb):
            transpose_into(product_t_sb, product_sb, at)
        project_rows(product_t_sb, down_hbm, out_hbm, start, narrow)
    return out_hbm


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood.
    """

    def __init__(self, **kwargs: Any) -> None:
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        super().__init__(**kwargs)


class LlamaInferenceConfig(InferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        neuron_config = self.neuron_config
        for name in ("flash_decoding_enabled", "k_cache_transposed"):
            if getattr(neuron_config, name, False):
                raise ValueError(
                    f"{name} changes the data that the layers of this file get, expected False; "
                    "leave it out."
                )
        # Left padding: NxDI 0.3 and later read the wrong row. A parallel vocabulary: releases
        # differ in who sums the embedding.
        left = neuron_config.padding_side == "left"
        if neuron_config.sequence_parallel_enabled and (left or neuron_config.vocab_parallel):
            raise ValueError(
                "sequence_parallel_enabled takes prompts padded on the right and a whole "
                f"vocabulary, got padding_side {neuron_config.padding_side!r} and vocab_parallel "
                f"{neuron_config.vocab_parallel}; leave these out."
            )

    def get_required_attributes(self) -> List[str]:
        return [
            "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
            "pad_token_id", "vocab_size", "max_position_embeddings", "rope_theta",
            "rms_norm_eps", "hidden_act",
        ]  # fmt: skip

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


class Sizes(NamedTuple):
    """Sizes that modules and checkpoint conversion share; ``*_rank`` are per tensor-parallel rank.

    Each KV head is replicated as often as the degree holds their number, and a replica serves its
    part of the head's queries, as in NxDI. What the degree still does not divide is padded with
    zero heads (and zero query heads), which changes no result: a zero head's output meets zero
    columns of the output weight.
    """

    head_dim: int
    replicas: int
    group: int  # query heads per replica of a KV head
    kv_heads: int
    q_heads: int
    kv_rank: int
    q_rank: int
    f_rank: int
    vocab_rank: int

    @classmethod
    def of(cls, config: InferenceConfig) -> Sizes:
        tp = config.neuron_config.tp_degree
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        replicas = max(1, tp // kv)
        group = math.ceil(heads // kv / replicas)
        for name, size in (("intermediate_size", config.intermediate_size),
                           ("vocab_size", config.vocab_size)):  # fmt: skip
            if size % tp:
                raise ValueError(
                    f"{name} {size} is not divisible by the tensor-parallel degree {tp}; choose a "
                    "degree that divides it."
                )
        kv_padded = math.ceil(kv * replicas / tp) * tp
        return cls(
            head_dim, replicas, group, kv_padded, kv_padded * group, kv_padded // tp,
            kv_padded * group // tp, config.intermediate_size // tp, config.vocab_size // tp,
        )  # fmt: skip


def is_nki_enabled(config: InferenceConfig) -> bool:
    return bool(getattr(config.neuron_config, "nki_enabled", False))


# --- Modules --------------------------------------------------------------------------------------


class SequenceLayout(NamedTuple):
    """How a module's tokens lie on the ranks: whole, or parallel, S / tp rows of each prompt here.

    Only prefill shards the sequence: NxDI switches it off in the other sub-models' configurations.
    """

    parallel: bool

    @classmethod
    def of(cls, config: InferenceConfig) -> SequenceLayout:
        return cls(bool(getattr(config.neuron_config, "sequence_parallel_enabled", False)))

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S or S / tp, H] -> [B, S, H]."""
        return gather_from_sequence_parallel_region(hidden, 1) if self.parallel else hidden

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Partial sums [B, S, H] of the ranks -> their sum, [B, S or S / tp, H]."""
        if self.parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, 1)
        return reduce_from_tensor_model_parallel_region(partial)


class NeuronLlamaRMSNorm(nn.Module):
    """RMSNorm over the last axis; fp32 inside, one rounding to the input's type."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, nki_enabled: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.nki_enabled = nki_enabled

    def gain(self) -> Tuple[torch.Tensor, float]:
        """What a kernel that normalises by itself needs: gain [1, H] and epsilon."""
        return self.weight.reshape(1, -1), self.eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.nki_enabled:
            rows = hidden.reshape(-1, hidden.shape[-1])
            return rmsnorm_kernel(rows, *self.gain()).reshape(hidden.shape)
        x = hidden.to(torch.float32)
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * rstd * self.weight.to(torch.float32)).to(hidden.dtype)


class BlockedWeight(ColumnParallelLinear):
    """A weight in kernel layout, [blocks, block_size] per rank.

    It is a ColumnParallelLinear so that the SDK's loader cuts it for the ranks: the full tensor is
    the ranks' blocks one after another, whichever way the product itself is parallel.
    """

    def __init__(self, n: int, k: int, tp_degree: int, dtype: torch.dtype) -> None:
        layout = BlockLayout.of(n, k)
        super().__init__(
            layout.block_size,
            layout.blocks * tp_degree,
            bias=False,
            gather_output=False,
            dtype=dtype,
        )
        self.n = n

    def project(self, rows: torch.Tensor, norm: Optional[NeuronLlamaRMSNorm] = None) -> Any:
        """rows [T, K] -> [T, n]: this rank's share (column) or partial sum (row parallel)."""
        if norm is None:
            return linear_kernel(rows, self.weight, self.n)
        return linear_kernel(rows, self.weight, self.n, *norm.gain())


def column_linear(config: InferenceConfig, k: int, n: int, bias: bool = False) -> nn.Module:
    """Plain column-parallel layer in the model's type; its output stays sharded."""
    return ColumnParallelLinear(
        k, n, bias=bias, gather_output=False, dtype=config.neuron_config.torch_dtype
    )


def row_linear(config: InferenceConfig, k: int, n: int, bias: bool = False) -> nn.Module:
    """Plain row-parallel layer: sharded input, output summed over the ranks."""
    neuron_config, parallel = config.neuron_config, SequenceLayout.of(config).parallel
    return RowParallelLinear(
        k, n, bias=bias, input_is_parallel=True, dtype=neuron_config.torch_dtype,
        sequence_parallel_enabled=parallel, sequence_dimension=1 if parallel else None,
        reduce_dtype=getattr(neuron_config, "rpl_reduce_dtype", None) or neuron_config.torch_dtype,
    )  # fmt: skip


class NeuronLlamaMLP(nn.Module):
    """SwiGLU MLP: one kernel per rank and a sum over the ranks, or three parallel layers."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        sizes, hidden = Sizes.of(config), config.hidden_size
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        bias = bool(getattr(config, "mlp_bias", False))
        self.nki_enabled, self.sequence = is_nki_enabled(config), SequenceLayout.of(config)
        self.f_rank = sizes.f_rank
        if self.nki_enabled:
            _refuse_for_kernels(bias, "mlp_bias")
            _refuse_for_kernels(config.hidden_act != "silu", f"hidden_act {config.hidden_act}")
            self.gate_proj = BlockedWeight(sizes.f_rank, hidden, tp, dtype)
            self.up_proj = BlockedWeight(sizes.f_rank, hidden, tp, dtype)
            self.down_proj = BlockedWeight(hidden, sizes.f_rank, tp, dtype)
        else:
            self.act_fn = ACT2FN[config.hidden_act]
            self.gate_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.up_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.down_proj = row_linear(config, config.intermediate_size, hidden, bias)

    def forward(self, hidden: torch.Tensor, norm: NeuronLlamaRMSNorm) -> torch.Tensor:
        """[B, S or S / tp, H] -> the same: the MLP of the normalised input."""
        if not self.nki_enabled:
            normed = self.sequence.whole(norm(hidden))
            return self.down_proj(self.act_fn(self.gate_proj(normed)) * self.up_proj(normed))
        whole = self.sequence.whole(hidden)
        partial = swiglu_mlp_kernel(
            whole.reshape(-1, whole.shape[-1]),
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            self.f_rank,
            *norm.gain(),
        )
        return self.sequence.summed(partial.reshape(whole.shape))


def _refuse_for_kernels(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(
            f"The kernels do not cover {what}, expected a Llama with SiLU, no biases, heads of 64 "
            "or 128 and a batch of at most 128; run without --enable-nki."
        )


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of the rotary position embedding, half-rotation convention (Su et al. 2021).

    Frequencies are a Python list: the loader casts every buffer to the model's type, which would
    cost bf16 models their positions. Scaling "llama3" and "linear" follow the Hugging Face config.
    """

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.inv_freq = _inverse_frequencies(config, Sizes.of(config).head_dim)
        self.nki_enabled = is_nki_enabled(config)

    def get_inv_freqs(self, device: Optional[torch.device] = None) -> torch.Tensor:
        return torch.tensor(self.inv_freq, dtype=torch.float32, device=device)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """position_ids [B, S] -> cos, sin [B, S, D / 2] in ``dtype``, angles in fp32."""
        inv_freq = self.get_inv_freqs(position_ids.device)
        positions = position_ids.to(torch.float32)
        if self.nki_enabled:
            rows = inv_freq.expand(P_MAX, -1).contiguous()
            tables = rope_tables_kernel(positions.reshape(-1, 1), rows, DTYPES[dtype])
            return tuple(table.reshape(*position_ids.shape, -1) for table in tables)
        angles = positions[:, :, None] * inv_freq[None, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _inverse_frequencies(config: InferenceConfig, dim: int) -> List[float]:
    """1 / theta^(2i/D), scaled as ``rope_scaling`` says (transformers, modeling_rope_utils)."""
    base = [config.rope_theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    scaling = getattr(config, "rope_scaling", None)
    if scaling is None:
        return base
    scaling = dict(scaling) if isinstance(scaling, dict) else vars(scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor", 1.0)
    if kind == "default":
        return base
    if kind == "linear":
        return [f / factor for f in base]
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind}, expected llama3, linear or default.")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # rotations within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return frequency * (smooth + (1 - smooth) / factor)

    return [scaled(f) for f in base]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, heads, S, D] with cos, sin [B, S, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class NeuronLlamaAttention(nn.Module):
    """Grouped-query attention; returns the new tokens' K and V for the base class's cache."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.sizes = sizes = Sizes.of(config)
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        hidden, dim = config.hidden_size, sizes.head_dim
        bias = bool(getattr(config, "attention_bias", False))
        self.nki_enabled, self.sequence = is_nki_enabled(config), SequenceLayout.of(config)
        self.left_padding = config.neuron_config.padding_side == "left"
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.split = [heads * dim for heads in (sizes.q_rank, sizes.kv_rank, sizes.kv_rank)]
        if self.nki_enabled:
            batch = config.neuron_config.max_batch_size
            _refuse_for_kernels(bias, "attention_bias")
            _refuse_for_kernels(dim not in (64, 128), f"head_dim {dim}")
            _refuse_for_kernels(sizes.group > P_MAX, f"{sizes.group} query heads per KV head")
            _refuse_for_kernels(batch > P_MAX, f"a batch of {batch}")
            self.qkv_proj = BlockedWeight(sum(self.split), hidden, tp, dtype)
            self.o_proj = BlockedWeight(hidden, sizes.q_rank * dim, tp, dtype)
        else:
            self.q_proj = column_linear(config, hidden, sizes.q_heads * dim, bias)
            self.k_proj = column_linear(config, hidden, sizes.kv_heads * dim, bias)
            self.v_proj = column_linear(config, hidden, sizes.kv_heads * dim, bias)
            self.o_proj = row_linear(config, sizes.q_heads * dim, hidden, bias)

    def heads(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[B * S, n * D] (or [B, S, n * D]) -> [B, n, S, D]."""
        return rows.reshape(
            batch, -1, rows.shape[-1] // self.sizes.head_dim, self.sizes.head_dim
        ).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        norm: NeuronLlamaRMSNorm,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        active_mask: Optional[torch.Tensor] = None,
        cos_cache: Optional[torch.Tensor] = None,
        sin_cache: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Attention of the normalised input [B, S or S / tp, H].

        Masks are bool, True for keys that count; they and the positions are those of all S tokens.
        """
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(position_ids, hidden_states.dtype)
        tables = cos_cache, sin_cache
        attend = self.attend_with_kernels if self.nki_enabled else self.attend_with_torch
        output, present = attend(
            hidden_states, norm, attention_mask, past_key_value, active_mask, tables
        )
        return output, present, cos_cache, sin_cache

    def attend_with_kernels(self, hidden, norm, mask, past, active_mask, tables):
        """Norm, QKV, RoPE, attention and output projection: one kernel and a sum over the ranks.

        A sharded sequence is gathered before the norm, which the kernel computes behind its
        products; on the shard it would take a kernel of its own.
        """
        batch, sizes, whole = hidden.shape[0], self.sizes, self.sequence.whole(hidden)
        rows = whole.reshape(-1, whole.shape[-1])
        weights = *norm.gain(), self.qkv_proj.weight, self.o_proj.weight
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
        if past is None:
            bias = _mask_bias(mask[:, 0, -1], hidden.dtype) if self.left_padding else None
            partial, k, v = attention_prefill_block_kernel(
                rows, *weights, cos, sin, batch, sizes.q_rank, sizes.kv_rank, bias
            )
        else:
            _refuse_for_kernels(active_mask is not None, "several new tokens per decode call")
            bias = _mask_bias(mask[:, 0, 0], hidden.dtype)
            partial, k, v = attention_decode_block_kernel(
                rows, *weights, cos, sin, *past, bias, sizes.q_rank, sizes.kv_rank
            )
        output = self.sequence.summed(partial.reshape(whole.shape))
        return output, (self.heads(k, batch), self.heads(v, batch))

    def attend_with_torch(self, hidden, norm, mask, past, active_mask, tables):
        """The same in PyTorch, rounding where the device's reference rounds."""
        batch = hidden.shape[0]
        normed = self.sequence.whole(norm(hidden))
        q, k, v = (
            self.heads(proj(normed), batch) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *tables), rotate(k, *tables)
        if past is None:
            context = self.attend_prefill(q, k, v, mask)
        else:
            context = self.attend_decode(q, k, v, past, mask, active_mask)
        merged = context.transpose(1, 2).reshape(*normed.shape[:2], -1)
        return self.o_proj(merged), (k, v)

    def scores(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scaled and masked scores in fp32; the product is rounded to the model's type before."""
        product = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.sizes.head_dim)
        masked = torch.where(mask, product, torch.finfo(product.dtype).min)
        return masked.to(torch.float32)

    def repeat(self, kv: torch.Tensor) -> torch.Tensor:
        """[B, kv_rank, S, D] -> [B, q_rank, S, D]: each KV head serves its group."""
        return kv.repeat_interleave(self.sizes.group, dim=1)

    def attend_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of all new tokens among themselves; mask bool [B, 1, S, S]."""
        weights = torch.softmax(self.scores(q, self.repeat(k), mask), dim=-1).to(q.dtype)
        return torch.matmul(weights, self.repeat(v))

    def attend_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: Tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        active_mask: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Attention over the cache (mask bool [B, 1, S, P]) and the new tokens, one softmax."""
        past_k, past_v = (self.repeat(cache) for cache in past)
        if active_mask is None:
            active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
        prior = self.scores(q, past_k, mask)
        active = self.scores(q, self.repeat(k), active_mask)
        weights = torch.softmax(torch.cat((prior, active), dim=-1), dim=-1).to(q.dtype)
        split = prior.shape[-1]
        return torch.matmul(weights[..., :split], past_v) + torch.matmul(
            weights[..., split:], self.repeat(v)
        )


def _mask_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [B, keys] -> fp32 bias for scores in ``dtype``: 0 where a key counts, else MASKED."""
    masked = MASKED_FP16 if dtype is torch.float16 else MASKED
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, masked)


class NeuronLlamaDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        nki_enabled = is_nki_enabled(config)
        self.self_attn = NeuronLlamaAttention(config)
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = NeuronLlamaRMSNorm(
            config.hidden_size, config.rms_norm_eps, nki_enabled
        )
        self.post_attention_layernorm = NeuronLlamaRMSNorm(
            config.hidden_size, config.rms_norm_eps, nki_enabled
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        past_key_value: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        **kwargs: Any,
    ) -> Tuple[Any, ...]:
        """Hidden states, (K, V), cos, sin; a fifth item where the base passes ``residual``.

        NxDI 0.3 and later hand a ``residual`` keyword to every layer and read five results; before
        that they read exactly four.
        """
        attended, present, cos, sin = self.self_attn(
            hidden_states,
            self.input_layernorm,
            attention_mask,
            position_ids,
            past_key_value,
            kwargs.get("active_mask"),
            kwargs.get("cos_cache"),
            kwargs.get("sin_cache"),
        )
        hidden = hidden_states + attended
        hidden = hidden + self.mlp(hidden, self.post_attention_layernorm)
        results = (hidden, present, cos, sin)
        return (*results, None) if "residual" in kwargs else results


class NeuronLlamaHead(BlockedWeight):
    """Final norm and LM head in one kernel; logits are gathered unless the device samples.

    The base class hands over just the last token of each sequence, so no other row is normalised.
    """

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        sizes, neuron_config = Sizes.of(config), config.neuron_config
        super().__init__(
            sizes.vocab_rank, config.hidden_size, neuron_config.tp_degree, neuron_config.torch_dtype
        )
        self.gather_output = gather_output
        self.norm = NeuronLlamaRMSNorm(config.hidden_size, config.rms_norm_eps, nki_enabled=True)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """[B, S, H] -> logits [B, S, V] (of this rank where the device samples)."""
        rows = x.reshape(-1, x.shape[-1])
        logits = self.project(rows, self.norm).reshape(*x.shape[:-1], self.n)
        return gather_from_tensor_model_parallel_region(logits) if self.gather_output else logits


class NeuronLlamaModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.on_device_sampling = neuron_config.on_device_sampling_config is not None
        self.tp_degree = neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = Sizes.of(config).q_heads
        self.num_key_value_heads = Sizes.of(config).kv_heads
        self.max_batch_size = neuron_config.max_batch_size
        self.buckets = neuron_config.buckets

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
        gather = not self.on_device_sampling
        if is_nki_enabled(config):
            self.lm_head = NeuronLlamaHead(config, gather)
            self.norm = nn.Identity()  # the head normalises
        else:
            self.norm = NeuronLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = ColumnParallelLinear(
                config.hidden_size, config.vocab_size, bias=False, gather_output=gather,
                dtype=neuron_config.torch_dtype, pad=True,
            )  # fmt: skip
        self.layers = nn.ModuleList(
            NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------

StateDict = Dict[str, torch.Tensor]


def pad_heads(weight: torch.Tensor, heads: int, head_dim: int, dim: int) -> torch.Tensor:
    """Zero heads appended along ``dim`` until there are ``heads`` of them."""
    missing = heads * head_dim - weight.shape[dim]
    if missing == 0:
        return weight
    shape = list(weight.shape)
    shape[dim] = missing
    return torch.cat((weight, weight.new_zeros(shape)), dim=dim)


def spread_queries(weight: torch.Tensor, kv: int, sizes: Sizes, dim: int) -> torch.Tensor:
    """Query heads along ``dim`` in the order of the replicas of their ``kv`` KV heads."""
    groups = weight.chunk(kv, dim=dim)
    per_head = sizes.replicas * sizes.group
    padded = [pad_heads(group, per_head, sizes.head_dim, dim) for group in groups]
    return pad_heads(torch.cat(padded, dim=dim), sizes.q_heads, sizes.head_dim, dim)


def spread_kv(weight: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Rows of KV heads, each head once per replica."""
    heads = weight.unflatten(0, (-1, sizes.head_dim))
    replicated = heads.repeat_interleave(sizes.replicas, dim=0).flatten(0, 1)
    return pad_heads(replicated, sizes.kv_heads, sizes.head_dim, 0)


def block_for_ranks(parts: List[torch.Tensor], tp: int, dim: int) -> torch.Tensor:
    """Kernel layout of every rank's share, one after another.

    ``parts`` are [N_i, K] weights whose shares are stacked (q, k, v); ``dim`` is the sharded one.
    """
    shares = zip(*(part.chunk(tp, dim=dim) for part in parts))
    return torch.cat([block_weight(torch.cat(share)) for share in shares])


def convert_layer(
    state: StateDict, prefix: str, kv: int, sizes: Sizes, tp: int, nki_enabled: bool
) -> None:
    """Spread the heads of one layer, and put its weights in kernel layout for the kernels."""
    attention = f"{prefix}self_attn."
    for kind in ("weight", "bias"):
        query = f"{attention}q_proj.{kind}"
        if query in state:
            state[query] = spread_queries(state[query], kv, sizes, 0)
        for key in (f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}"):
            if key in state:
                state[key] = spread_kv(state[key], sizes)
    out = f"{attention}o_proj.weight"
    state[out] = spread_queries(state[out], kv, sizes, 1)
    if not nki_enabled:
        return
    qkv = [state.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
    state[f"{attention}qkv_proj.weight"] = block_for_ranks(qkv, tp, 0)
    state[out] = block_for_ranks([state[out]], tp, 1)
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        key = f"{prefix}mlp.{name}_proj.weight"
        state[key] = block_for_ranks([state[key]], tp, dim)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's.

        Runs before the SDK ties the head to the embedding, so a tied head is made here: for the
        kernels it has its own layout.
        """
        tp, nki_enabled = config.neuron_config.tp_degree, is_nki_enabled(config)
        sizes = Sizes.of(config)
        state = dict(state_dict)
        for layer in range(config.num_hidden_layers):
            convert_layer(
                state, f"layers.{layer}.", config.num_key_value_heads, sizes, tp, nki_enabled
            )
        if nki_enabled:
            head = state.get("lm_head.weight", state["embed_tokens.weight"])
            state["lm_head.weight"] = block_for_ranks([head], tp, 0)
            state["lm_head.norm.weight"] = state.pop("norm.weight")
        state["rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
        if config.neuron_config.vocab_parallel:
            state["embed_tokens.rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
        return state

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """Tie a plain head to the embedding; a head in kernel layout is there already."""
        if "lm_head.weight" not in state_dict:
            state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
