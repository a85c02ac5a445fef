"""Llama for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

One file to upload, complete by itself: prompts and a token at a time, bf16 or fp32, any degree. It
imports numpy, torch, transformers and the Neuron SDK, nothing else. What other models and servers
ask for stands beside it and is composed by llama_extended.py, for which some layers and modules
here have a place where something is added. From top to bottom: limits of the core and choices,
layouts, sizes known while tracing, tile helpers, the parts of attention, kernels in model order,
configuration, modules, and how a Hugging Face checkpoint becomes the weights of this model.

To learn the language, read in this order: "Layouts"; ``linear_kernel`` and ``swiglu_mlp_kernel``
with what they call; ``attention_decode_kernel``; then "Attention of many queries".

What calls what, phase by phase:

    linear_kernel                multiply_rows
    multiply_rows                residual_sum, norm_scales, load_weight, products, token_rows
    swiglu_mlp_kernel            gated_mlp
    gated_mlp                    residual_sum, norm_scales, InnerTokens.gated, store_product
    attention_prefill_kernel     Prompt.of, attend_prompt
    attend_prompt                attend_side_by_side or attend_one_by_one
    attention_decode_kernel      residual_sum, cached_ahead, decode_step
    decode_step                  projection, project_qkv, attend_cached, store_product

    TokenBlock.of                residual_sum, projection, qkv_tiles
    TokenBlock.run               project_tile, TokenBlock.store_output
    project_qkv                  project_tile
    project_tile                 rotated_span for queries and keys, value_tile
    attend_side_by_side          Prompt.start, Prefill.begin, attend_block, TokenBlock.store_keys
    attend_one_by_one            the same: Prompt.start, Prefill.begin, attend_block
    attend_block                 MaximaPass, attend beside the work of other blocks
    attend                       MaximaPass.run and WeightsPass.run, which take turns
    MaximaPass.run               MaximaPass.score_rows, MaximaPass.mark
    WeightsPass.run              WeightsPass.add_weighted, WeightsPass.add_turned, bank_contexts

    attention_for_kernels        KernelProjections.converted, layouts_of_ranks
    mlp_for_kernels              KernelProjections.converted, layouts_of_ranks

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
    lanes    the partitions of one head in a tile, zero beyond D, or those that a tile of keys takes
    slot     up to 128 rows of a contraction that is longer
    mark     a row behind the D features of a head that scores contract, too
    turned   transposed by TensorE

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Kernels take and return HBM tensors; the
helpers above them work on tiles that are already on chip. Interfaces follow NxD Inference 0.1 to
0.6 (github.com/aws-neuron/neuronx-distributed-inference), the kernel language SDK 2.21.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.mappings import (
    _reduce_scatter_along_dim,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    NeuronBaseForCausalLM,
    NeuronBaseModel,
)
from torch import nn
from torch_xla.core import xla_model as xm
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# --- Limits of a NeuronCore-v2 (aws-neuron-sdk v2.21.1, general/nki/programming_model.rst) --------

P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
QUADRANT = 32  # partitions: an operand begins at one of four
MOVING_MAX = 512  # free size of the moving matmul operand; one PSUM bank of fp32

# --- Choices of these kernels ---------------------------------------------------------------------

PIECE_BYTES = 16384  # per partition of a weight, loaded at once: four pieces take 64 KiB
BLOCK_PIECE_BYTES = 8192  # of attention, beside several blocks of tokens
LONG_PIECE_BYTES = 32768  # of few tokens, which leave more room
FEW_TOKENS = 64  # up to so many need no room for hidden states beside weights
LAST_PIECE_BYTES = 4096  # at the end of a kernel's stream of weights: DMA wants 2 KiB or more
SHORT_ROW_TOKENS = 32  # of which a tile's row is 64 bytes
SHORT_BLOCK = 256  # tokens that lie together in hidden states up to H of SHORT_FEATURES
LONG_BLOCK = 384  # and beyond
SHORT_FEATURES = 2048
WEIGHT_BYTES = 96 * 1024  # SBUF for weights of attention that stay for all blocks
KEPT_BYTES = 188 * 1024  # for them, keys, scores and blocks, which are not there all at once
TWO_KEPT_BYTES = 156 * 1024  # the same of two sequences at once, without their scores
HEAD_BYTES = 64 * 1024  # SBUF for rows of the head, which leave it together
SCORE_BYTES = 72 * 1024  # for keys and values whose scores stay, and these scores
JOINED_BYTES = 120 * 1024  # for tokens and keys of blocks that are one where weights do not stay
BESIDE_BYTES = 88 * 1024  # for blocks on their way where weights do not stay
WHOLE_BYTES = 128 * 1024  # for one, its queries and keys where these come piece by piece
WAITING_BLOCKS = 3  # whose outputs are beside later blocks, where weights stay
SCRATCH_TILES = 16  # tiles of keys that come back from HBM at a time
SCRATCH_BYTES = 16 * 1024  # SBUF for them and their values
TOKEN_CHUNK = 1024  # tokens per pass over a weight: from 340 on TensorE takes longer than DMA
CHUNK_BYTES = 112 * 1024  # SBUF per partition for what is kept of those tokens
RESIDENT_BYTES = 48 * 1024  # keys and values of a sequence stay in SBUF up to this many
ADAPTER_BYTES = 16 * 1024  # less where adapters are beside them
CACHE_BYTES = 64 * 1024  # SBUF for the cache of a tile of sequences in a decode step
CACHES_BYTES = 96 * 1024  # for those of all tiles, which then come before the weights
VALUE_BYTES = 32 * 1024  # for new values in a tile for each sequence; else these come back from HBM
DECODE_KEYS = 2048  # cached keys up to which a decode step has them all in SBUF at once
MASKED = -1.5e38  # added to scores that do not count: exp gives 0, and twice it is finite
MASKED_FP16 = -3.0e4  # the same for float16, which ends at 65504


ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # projections, by their names
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")

# --- Layouts --------------------------------------------------------------------------------------
#
# Features lie on partitions from end to end: every product keeps its weights stationary and lets up
# to 512 tokens move, and leaves the features that the next product contracts on partitions. So a
# layer transposes nothing between its norm and its output but softmax weights and contexts.
#
#   tensor                 shape per rank               partition axis   written by
#   hidden states (HBM)    [H, T], in token_blocks()    -                in_blocks(), the kernels
#   hidden states (SBUF)   [128, H/128, T]              128 runs of H    residual_sum()
#   Q, K (SBUF)            [128, tiles, T]              heads of a tile  rotated_span()
#   V (SBUF)               [tokens, kv heads * D]       tokens           value_tile()
#   context (SBUF)         [128, tiles, T]              heads of a tile  attention of any kind
#   HF weight              [N, K]                       -                checkpoint
#   kernel weight (HBM)    [128, N/128 * K/128 * 128]   contraction      kernel_layout(), once
#   kernel weight (SBUF)   [128, tiles, K/128, 128]     contraction      load_weight()
#
# Partition p of a hidden state holds the H/128 features from p * H/128 on ("in runs"): a block of
# tokens in HBM is the plain transpose of its rows, and a partition's part of it is contiguous.
# Weights are permuted to that order on both sides when they are loaded (in_runs). The tile of a
# head dimension D of 64 holds one query head of each of two KV heads (HeadShape), so that both
# halves do the same work.
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
    """Features along ``dim`` in the order of tiles whose partition p holds the p-th run of them."""
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


def depth_of(head_dim: int) -> int:
    """Rows of a product that contracts a head: whole quadrants of 32, those behind its features
    zeros, as operands may begin at no other partitions."""
    return math.ceil(head_dim / QUADRANT) * QUADRANT


class HeadShape(NamedTuple):
    """Heads of one rank: ``group`` query heads share a KV head, ``stack`` KV heads a tile.

    Tile s * group + g of the queries holds the g-th query head of each KV head of stack s; tile s
    of the keys the KV heads of stack s. Where the last stack is not full, its lanes are zero, and
    so are those that ``depth`` has beyond D. A head of 256 has two tiles, a half each: those of all
    first halves come before those of all second ones, as if these were stacks of their own.
    """

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def depth(self) -> int:
        return depth_of(self.head_dim)

    @property
    def stack(self) -> int:
        return max(1, P_MAX // self.depth)

    @property
    def slots(self) -> int:
        """Tiles of a head."""
        return whole_tiles(self.depth)

    @property
    def stacks(self) -> int:
        return self.slots * math.ceil(self.kv_heads / self.stack)

    @property
    def q_tiles(self) -> int:
        return self.stacks * self.group

    @property
    def qk_tiles(self) -> int:
        """Tiles of queries, and behind them of keys."""
        return self.q_tiles + self.stacks

    @property
    def kv_features(self) -> int:
        """Features of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    def tiles(self, kv_head: int) -> List[Tuple[int, slice]]:
        """(stack, lanes) of each tile of a KV head: which of the keys, and its partitions."""
        stack, lane = divmod(kv_head, self.stack)
        rows = min(self.depth, P_MAX)
        lanes = slice(lane * rows, (lane + 1) * rows)
        return [(stack + slot * self.stacks // self.slots, lanes) for slot in range(self.slots)]

    def place(self, kv_head: int) -> Tuple[int, slice]:
        """The first of these."""
        return self.tiles(kv_head)[0]

    def leaves_lanes(self) -> bool:
        """Whether tiles of heads have lanes without features."""
        return self.kv_heads % self.stack > 0 or self.stack * self.head_dim < P_MAX

    def order(self, weight: torch.Tensor, group: int) -> torch.Tensor:
        """Rows of ``group`` heads per KV head, head by head -> rows of tiles, zeros where empty."""
        d, stack = self.head_dim, self.stack
        padded = pad_to(weight, 0, self.stacks // self.slots * stack * group * d)
        heads = padded.view(-1, stack, group, d, weight.shape[1]).transpose(1, 2)
        tiles = pad_tiles(pad_to(heads, 3, self.depth).flatten(2, 3), 2)
        return tiles.unflatten(2, (self.slots, P_MAX)).permute(2, 0, 1, 3, 4).flatten(0, 3)


# --- Sizes known while tracing --------------------------------------------------------------------
#
# The compiler turns Python's range into a loop that it traces once; where a body needs real numbers
# stand lists and nl.static_range.


def spans(length, most):
    """(start, size) of the pieces of ``most`` that cover ``length``; the last may be smaller."""
    return [(at, min(most, length - at)) for at in range(0, length, most)]


def even_spans(length, most):
    """(start, size) of as few pieces of at most ``most`` as cover ``length``, as equal as can be.

    Sizes are multiples of 64, the columns that TensorE moves in the time of one.
    """
    size = math.ceil(length / math.ceil(length / most) / 64) * 64
    return spans(length, min(most, size))


def token_chunk(bytes_per_token):
    """Tokens of one pass over a weight, of which each keeps so many bytes per partition."""
    return max(P_MAX, min(TOKEN_CHUNK, CHUNK_BYTES // bytes_per_token // P_MAX * P_MAX))


def weight_pieces(tiles, k_tiles, tokens, last=False, itemsize=2, row_bytes=None):
    """(first, count) of the tiles of output features that are loaded at once, of many tokens in
    rows of at most ``row_bytes``, PIECE_BYTES if none are given.

    Many tokens begin with half a piece: their hidden states arrive behind it. The ``last`` weights
    of a kernel end with LAST_PIECE_BYTES, and those before with at most half of the rest: TensorE
    needs a fifth of DMA's time for few tokens, so that little is left to multiply at the end.
    """
    few, tile_bytes = tokens <= FEW_TOKENS, itemsize * k_tiles * P_MAX
    most = max(1, (LONG_PIECE_BYTES if few else row_bytes or PIECE_BYTES) // tile_bytes)
    tail = max(1, LAST_PIECE_BYTES // tile_bytes)
    if last and tiles > tail:
        rest = tiles - tail
        return [*spans(rest, min(most, math.ceil(rest / 2))), (rest, tail)]
    if few:
        return spans(tiles, most)
    first = min(tiles, max(1, most // 2))
    return [(0, first), *((first + at, size) for at, size in spans(tiles - first, most))]


def psum_parts(tiles, tokens):
    """(first tile, tiles, first token, tokens) of the parts of a product that fill a PSUM bank."""
    return [
        (tile, beside, at, size)
        for at, size in even_spans(tokens, MOVING_MAX)
        for tile, beside in spans(tiles, max(1, MOVING_MAX // size))
    ]


class Block(NamedTuple):
    """Tokens of hidden states: ``count`` from ``start`` on, of sequences of ``length`` tokens. They
    lie together @ HBM, or as the Blocks ``inner`` one behind the other."""

    start: int
    count: int
    length: int
    inner: Sequence[Any] = ()

    @classmethod
    def joined(cls, blocks):
        """Of Blocks that follow each other."""
        first, *others = blocks
        if not others:
            return first
        return cls(first.start, sum(block.count for block in blocks), first.length, blocks)

    def in_hbm(self):
        """(column, Block) of the tokens that lie together."""
        return [(block.start - self.start, block) for block in self.inner or (self,)]

    def parts(self):
        """(sequence, position, column, tokens) of its tiles: up to 128 tokens of one sequence."""
        tokens = min(self.count, self.length)  # of one sequence
        return [
            (*divmod(self.start + column + at, self.length), column + at, size)
            for column in range(0, self.count, tokens)
            for at, size in spans(tokens, P_MAX)
        ]


def token_blocks(features, tokens, length):
    """The Blocks of so many tokens, sequences of ``length``: several whole sequences, or whole
    tiles of one, as equal as can be.

    Rows of DMA are as long as a block is large, and what waits for a block waits for all of it.
    Weights of more than 2048 features do not stay in SBUF: they are read again for each block, and
    from 340 tokens on TensorE takes longer than DMA.
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


def grouped(items, most, sizes=None):
    """Lists of Blocks that follow each other, of at most so many tokens each, or of other items of
    such ``sizes``; one at least."""
    found, total = [], 0
    for item, size in zip(items, sizes or [block.count for block in items]):
        if found and total + size <= most:
            found[-1].append(item)
            total += size
        else:
            found.append([item])
            total = size
    return found


# --- Tile helpers: everything here works on SBUF and PSUM tiles -----------------------------------
#
# Instructions return their tile. nl.ndarray makes one, in SBUF if it names no buffer, where several
# instructions fill it, or where a result takes another type than its operands.


def masked(dtype):
    """What is added to scores that do not count, in a type of the kernels or of PyTorch."""
    return MASKED_FP16 if dtype == nl.float16 or dtype is torch.float16 else MASKED


def psum_zeros(shape):
    """Zeros fp32 @ PSUM, to which products are added: that takes zeros, an affine loop and nothing
    but products (known issues of SDK 2.22)."""
    return nl.zeros(shape, nl.float32, buffer=nl.psum)


def psum_tile(shape):
    """An uninitialised tile fp32 @ PSUM, which transposes or single products fill."""
    return nl.ndarray(shape, nl.float32, buffer=nl.psum)


def causal_mask(tokens, dtype):
    """[tokens, tokens] @ SBUF: 0 where a token (row) sees one, itself and those before."""
    row, column = nl.arange(tokens)[:, None], nl.arange(tokens)[None, :]
    return mask_of(row >= column, tokens, dtype)


def mask_of(seen, tokens, dtype):
    """[tokens, tokens] @ SBUF: 0 where a comparison of row and column holds, else MASKED."""
    seen_sb = nisa.memset((tokens, tokens), 0.0, dtype)
    return nisa.affine_select(seen, seen_sb, on_false_value=masked(dtype))


def load_constant(values, dtype):
    """A numpy array of at most 128 rows, part of the compiled graph -> the same @ SBUF."""
    return nl.load(nl.shared_constant(values, dtype=dtype))


class Linear(NamedTuple):
    """A linear layer of a kernel: its weight in kernel layout @ HBM, of ``k_tiles`` tiles of K.

    What the layers of this file have none of: scales [128, N/128] fp32 @ SBUF of a quantised
    weight, by which its products are multiplied, and terms that are ``added`` to these, such as a
    bias or an adapter. Each contracts some rows more: ``rows(tile, tiles)`` gives those of the
    weight, each [rows, tiles * 128] @ SBUF, ``inputs(x_sb, token)`` those of tokens [rows, T].
    """

    weight_hbm: Any
    k_tiles: int
    scale_sb: Any = None
    added: Sequence[Any] = ()

    @property
    def tiles(self):
        """Tiles of 128 output features."""
        return self.weight_hbm.shape[1] // (self.k_tiles * P_MAX)

    def scales(self, first, columns):
        """Some columns of its scales; None for ones."""
        return None if self.scale_sb is None else self.scale_sb[:, nl.ds(first, columns)]

    def pieces(self, tokens, last=False, tiles=None, row_bytes=None):
        """(first, count) of its tiles, or so many, loaded at once, see ``weight_pieces``."""
        itemsize = self.weight_hbm.itemsize
        return weight_pieces(tiles or self.tiles, self.k_tiles, tokens, last, itemsize, row_bytes)

    def room(self, place, tiles):
        """[128, tiles, k_tiles, 128] @ SBUF for some of its tiles; where is the compiler's choice,
        a ``place`` of one's own that of others."""
        return nl.ndarray((P_MAX, tiles, self.k_tiles, P_MAX), self.weight_hbm.dtype)

    def ready(self, weight_sb):
        """What is loaded, in a type that TensorE takes."""
        return weight_sb

    def rows(self, tile, tiles):
        """Rows of some tiles of features that its terms add."""
        return [row_sb for term in self.added for row_sb in term.rows(tile, tiles)]

    def inputs(self, x_sb, token):
        """Inputs of its terms of the tokens x_sb [128, K/128, T] from number ``token`` on."""
        return [low_sb for term in self.added for low_sb in term.inputs(x_sb, token)]

    def piece(self, weight_sb, first, tiles):
        """The Piece of tiles that are loaded."""
        return Piece(weight_sb, self.rows(first, tiles), self.scales(first, tiles))


class Piece(NamedTuple):
    """Some tiles of a Linear @ SBUF: the weight [128, tiles, K/128, 128], the rows of its terms,
    and its scales [128, tiles] or None."""

    weight_sb: Any
    rows_sb: List[Any]
    scale_sb: Any

    def product(self, x_sb, inputs_sb, part):
        """A part of ``psum_parts``: W x, and what terms with these inputs add to it [128, tiles,
        tokens] @ PSUM, and the scales that it still lacks [128, tiles] or None."""
        tile, tiles, at, tokens = part
        out_psum = products(self.weight_sb, tile, tiles, x_sb, at, tokens)
        add_terms(out_psum, self.rows_sb, inputs_sb, tile, at)
        scale_sb = self.scale_sb
        return out_psum, None if scale_sb is None else scale_sb[:, nl.ds(tile, tiles)]


def load_weight(linear, first, tiles, place=0):
    """Tiles of a kernel weight -> [128, tiles, k_tiles, 128] @ SBUF, one contiguous row each, at a
    ``place`` as for ``Linear.room``."""
    weight_hbm, k_tiles = linear.weight_hbm, linear.k_tiles
    tiled_hbm = weight_hbm.reshape((P_MAX, linear.tiles, k_tiles, P_MAX))
    # a lone tile, the last of its weight, in rows of LAST_PIECE_BYTES: half is multiplied before
    halved = tiles == 1 and first + 1 == linear.tiles
    each = max(1, LAST_PIECE_BYTES // (P_MAX * weight_hbm.itemsize)) if halved else k_tiles
    weight_sb = linear.room(place, tiles)
    for at, size in spans(k_tiles, each):
        weight_sb[:, :, nl.ds(at, size), :] = nl.load(
            tiled_hbm[:, nl.ds(first, tiles), nl.ds(at, size), :]
        )
    return linear.ready(weight_sb)


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


def times_features(out_sb, x, features_sb):
    """x [128, tiles, T] times one number a feature, [128, tiles] or None for ones -> out_sb."""
    tiles, tokens = x.shape[1:]
    if features_sb is None:
        out_sb[...] = nisa.tensor_copy(x)
    elif tokens < tiles:
        for token in nl.affine_range(tokens):
            out_sb[:, :, token] = nisa.tensor_tensor(x[:, :, token], features_sb, nl.multiply)
    else:
        for tile in nl.affine_range(tiles):
            out_sb[:, tile, :] = nisa.tensor_scalar(
                x[:, tile, :], nl.multiply, features_sb[:, nl.ds(tile, 1)]
            )


def times_both(x, other_sb, scale_sb, dtype=None):
    """x times a tile of its shape and, where there is one, a scale a partition [P, 1]."""
    if scale_sb is None:
        return nisa.tensor_tensor(x, other_sb, nl.multiply, dtype=dtype)
    return nisa.scalar_tensor_tensor(
        data=x, op0=nl.multiply, operand0=scale_sb, op1=nl.multiply, operand1=other_sb, dtype=dtype
    )


def products(weight_sb, first, tiles, x_sb, start, tokens):
    """``tiles`` tiles of features of ``W @ x`` for a span of tokens -> [128, tiles, tokens] @ PSUM.

    The weights of 128 features are stationary and the tokens move: k_tiles passes of max(64,
    tokens) columns a tile, and the result has features on partitions.
    """
    acc_psum = psum_zeros((P_MAX, tiles, tokens))
    for tile in nl.affine_range(tiles):
        for k in nl.affine_range(x_sb.shape[1]):
            acc_psum[:, tile, :] += nisa.nc_matmul(
                weight_sb[:, first + tile, k, :], x_sb[:, k, nl.ds(start, tokens)]
            )
    return acc_psum


def add_terms(acc_psum, rows, inputs, tile, token):
    """Terms of a Linear added to products [128, tiles, tokens] @ PSUM of tiles from ``tile`` on."""
    for rows_sb, inputs_sb in zip(rows, inputs):
        for at in nl.affine_range(acc_psum.shape[1]):
            acc_psum[:, at, :] += nisa.nc_matmul(
                rows_sb[:, nl.ds((tile + at) * P_MAX, P_MAX)],
                inputs_sb[:, nl.ds(token, acc_psum.shape[2])],
            )


def token_rows(rows_sb, out_psum, norm_sb, feature_sb):
    """Products [128, tiles, T] @ PSUM times the norm's scale of each token [128, T] and, where any,
    a scale a feature [128, tiles] -> rows_sb [128, T, tiles]."""
    for token in nl.affine_range(out_psum.shape[2]):
        row_psum, own_sb = out_psum[:, :, token], norm_sb[:, nl.ds(token, 1)]
        if feature_sb is None:
            rows_sb[:, token, :] = nisa.tensor_scalar(row_psum, nl.multiply, own_sb)
        else:
            rows_sb[:, token, :] = times_both(row_psum, feature_sb, own_sb)


def stored_together(pieces, tokens):
    """Pieces of a weight, grouped by what is stored at once of their results.

    Of many tokens every piece; of up to 128 the last piece is apart, so that little is left to
    store at the end; of up to 32 all at once: DMA takes as long for their rows as for 256 bytes.
    """
    if tokens > P_MAX:
        return [[piece] for piece in pieces]
    if tokens > SHORT_ROW_TOKENS and len(pieces) > 1:
        return [pieces[:-1], pieces[-1:]]
    return [pieces]


def store_product(linear, passed, out_hbm):
    """``W @ x`` of ``passed``, (x_sb [128, k_tiles, count], Block), into out [N, T] @ HBM: one pass
    over the weights. Features lie in runs, so that each partition stores contiguous rows."""
    count = passed[0][0].shape[2]
    inputs = [linear.inputs(x_sb, block.start) for x_sb, block in passed]
    for group in stored_together(linear.pieces(count, last=True), count):
        begin, size = group[0][0], sum(tiles for _, tiles in group)
        outs = [nl.ndarray((P_MAX, size, block.count), out_hbm.dtype) for _, block in passed]
        for first, tiles in group:
            weight_sb = load_weight(linear, first, tiles, first)
            piece = linear.piece(weight_sb, first, tiles)
            for (x_sb, block), inputs_sb, out_sb in zip(passed, inputs, outs):
                for part in psum_parts(tiles, block.count):
                    out_psum, scale_sb = piece.product(x_sb, inputs_sb, part)
                    tile, beside, at, tokens = part
                    rows, columns = nl.ds(first - begin + tile, beside), nl.ds(at, tokens)
                    times_features(out_sb[:, rows, columns], out_psum, scale_sb)
        for (_, block), out_sb in zip(passed, outs):
            nl.store(block_part(out_hbm, block, begin, size), out_sb)


# --- Residual stream and norm ---------------------------------------------------------------------


class Norm(NamedTuple):
    """Constants of an RMSNorm: the features that count (H is padded with zeros), and epsilon."""

    features: int
    eps: float


def block_part(x_hbm, block, tile, tiles):
    """Some tiles of features of a block of hidden states [H, T] @ HBM -> [128, tiles, count]: a
    partition's are contiguous."""
    k_tiles, count = x_hbm.shape[0] // P_MAX, block.count
    rows_hbm = x_hbm.reshape((P_MAX, k_tiles * x_hbm.shape[1]))
    row, at = nl.arange(P_MAX)[:, None, None], nl.arange(tiles)[None, :, None]
    column = k_tiles * block.start + count * (tile + at) + nl.arange(count)[None, None, :]
    return rows_hbm[row, column]


def residual_sum(x_hbm, delta_hbm, sum_hbm, block):
    """x + delta for a block of tokens, [H, T] @ HBM -> [128, H/128, count] @ SBUF, and stored.

    Without delta just x. Many tokens arrive in up to eight parts, so that what follows starts with
    one, in rows of 4 KiB.
    """
    k_tiles, count = x_hbm.shape[0] // P_MAX, block.count
    x_sb = nl.ndarray((P_MAX, k_tiles, count), x_hbm.dtype)
    for column, own in block.in_hbm():
        each = k_tiles if count <= P_MAX else max(math.ceil(k_tiles / 8), 2048 // own.count)
        for first, tiles in spans(k_tiles, each):
            part_sb = x_sb[:, nl.ds(first, tiles), nl.ds(column, own.count)]
            # DMA wants long rows in SBUF, too: what lies in two blocks comes apart, to be added up
            apart = delta_hbm is not None and block.inner
            own_sb = nl.ndarray(part_sb.shape, x_hbm.dtype) if apart else part_sb
            own_sb[...] = nl.load(block_part(x_hbm, own, first, tiles))
            if delta_hbm is not None:
                delta_sb = nl.load(block_part(delta_hbm, own, first, tiles))
                part_sb[...] = nisa.tensor_tensor(own_sb, delta_sb, nl.add)
                nl.store(block_part(sum_hbm, own, first, tiles), part_sb)
    return x_sb


def squared_lengths(x_sb, start, tokens):
    """Sums of squares of up to 128 tokens -> [T, T] fp32 @ SBUF, on the diagonal of zeros.

    TensorE multiplies the tokens with themselves, exactly and in the columns of one product. The
    rest is selected away rather than multiplied by zero: other tokens' products may overflow.
    """
    span = nl.ds(start, tokens)
    gram_psum = psum_zeros((tokens, tokens))
    for k in nl.affine_range(x_sb.shape[1]):
        gram_psum[...] += nisa.nc_matmul(x_sb[:, k, span], x_sb[:, k, span])
    lengths_sb = nisa.tensor_copy(gram_psum)
    if tokens == 1:
        return lengths_sb
    row, column = nl.arange(tokens)[:, None], nl.arange(tokens)[None, :]
    lengths_sb = nisa.affine_select(row >= column, lengths_sb, on_false_value=0.0)
    return nisa.affine_select(row <= column, lengths_sb, on_false_value=0.0)


class NormScales(NamedTuple):
    """1 / rms of tokens, fp32 @ SBUF: along the free axis, [128, T] with all rows equal, and on
    partitions, one [tokens, 1] per tile of tokens."""

    along_sb: Any
    down_sb: List[Any]


def norm_scales(x_sb, norm, parts):
    """1 / sqrt(mean(x^2) + eps) of [128, H/128, T] @ SBUF -> NormScales (Zhang and Sennrich 2019),
    ones where ``norm`` is None.

    A norm's scale is one number per token, so it may wait until behind the product that reads the
    norm: W (x * gain / rms) = (W gain) x / rms. TensorE need not wait for it, and the gain is in
    the weights, unless these are quantised (``with_gain``).
    """
    shape = (P_MAX, x_sb.shape[2])
    if norm is None:
        down_sb = [nisa.memset((size, 1), 1.0, nl.float32) for _, size in parts]
        return NormScales(nisa.memset(shape, 1.0, nl.float32), down_sb)
    along_sb, down_sb, scale = nl.ndarray(shape, nl.float32), [], 1.0 / norm.features
    ones_sb = nisa.memset((P_MAX, P_MAX), 1.0, nl.float32)
    eps_sb = nisa.memset((P_MAX, 1), norm.eps, nl.float32)
    for start, size in parts:
        lengths_sb = squared_lengths(x_sb, start, size)
        # along: a product with ones adds the columns up, on every partition
        total_psum = nisa.nc_matmul(ones_sb[0:size, :], lengths_sb)
        along_sb[:, nl.ds(start, size)] = nisa.activation(
            nl.rsqrt, total_psum, bias=eps_sb, scale=scale
        )
        # down: VectorE adds up the rows, of which each partition has its own
        total_sb = nisa.tensor_reduce(nl.add, lengths_sb, axis=1)
        down_sb.append(nisa.activation(nl.rsqrt, total_sb, bias=eps_sb[0:size, :], scale=scale))
    return NormScales(along_sb, down_sb)


def with_gain(x_sb, gain_sb):
    """x_sb [128, H/128, T], or times a norm's gain [128, H/128]: in a tile of its own, because the
    sum's store, which reads x_sb, stands in line behind the weights."""
    if gain_sb is None:
        return x_sb
    out_sb = nl.ndarray(x_sb.shape, x_sb.dtype)
    times_features(out_sb, x_sb, gain_sb)
    return out_sb


# --- Queries, keys and values ---------------------------------------------------------------------


def select_equal(first, second, shape, dtype):
    """Ones where two affine expressions of the place are equal, else zeros @ SBUF.

    GpSimdE has nothing else to do; a constant would take its turn in the queues of DMA.
    """
    ones_sb = nisa.memset(shape, 1.0, dtype)
    below_sb = nisa.affine_select(first >= second, ones_sb, on_false_value=0.0)
    return nisa.affine_select(first <= second, below_sb, on_false_value=0.0)


def shifted_identity(rows, columns, shift, dtype):
    """[rows, columns] @ SBUF: row p has a one in column p + shift."""
    row, column = nl.arange(rows)[:, None], nl.arange(columns)[None, :]
    return select_equal(row + shift, column, (rows, columns), dtype)


def swapped_halves(head_dim, dtype):
    """[128, 128] @ SBUF: a permutation that swaps the halves of each head in a tile of features."""
    half, depth = head_dim // 2, depth_of(head_dim)
    heads = P_MAX // depth
    row, head = nl.arange(P_MAX)[:, None, None, None], nl.arange(heads)[None, :, None, None]
    second, lane = nl.arange(2)[None, None, :, None], nl.arange(half)[None, None, None, :]
    partner = head * depth + half - second * half + lane  # of column (head, second, lane)
    swap_sb = select_equal(row, partner, (P_MAX, heads, 2, half), dtype)
    if heads * head_dim == P_MAX:
        return swap_sb.reshape((P_MAX, P_MAX))
    swap_sb = swap_sb.reshape((P_MAX, heads, head_dim))
    whole_sb = nisa.memset((P_MAX, P_MAX), 0.0, dtype)
    for at in nl.static_range(heads):
        whole_sb[:, nl.ds(at * depth, head_dim)] = nisa.tensor_copy(swap_sb[:, at, :])
    return whole_sb


class AttentionLayer(NamedTuple):
    """What the passes of an attention kernel share: hidden states, delta and their sum @ HBM, and
    the partial output; constants of the norm; the Linears of Q, K and V together and of the output;
    tables of cos and sin @ HBM.

    What the models of this file have none of: the norm's gain [128, H/128] @ SBUF, which else is in
    the weights; a norm over each query and key head, an object with methods ``loaded`` and
    ``normed``; terms ``added`` to queries, keys and values, an object with a method ``of_tokens``.
    """

    x_hbm: Any
    delta_hbm: Any
    stream_hbm: Any
    out_hbm: Any
    norm: Any
    heads: HeadShape
    qkv: Linear
    out: Linear
    cos_hbm: Any
    sin_hbm: Any
    gain_sb: Any = None
    head_norm: Any = None
    added: Any = None

    @classmethod
    def of(cls, hidden, norm, heads, weights, tables):
        """All @ HBM: ``hidden`` are x, delta, their sum and the output; ``weights`` those of Q, K
        and V and of the output."""
        qkv = Linear(weights[0], hidden[0].shape[0] // P_MAX)
        return cls(*hidden, norm, heads, qkv, Linear(weights[1], heads.q_tiles), *tables)


class Projection(NamedTuple):
    """What the projections to queries, keys and values read of a chunk of tokens @ SBUF.

    x_sb [128, H/128, T], the ``scales`` of its norm, cos and sin [128, T] times these scales (where
    heads have no norm of their own), the identity and the permutation that swaps the halves of each
    head [128, 128], and ``parts``, the tiles of tokens; what the layer has of a ``head_norm`` and
    of terms ``added`` to queries, keys and values, rows and inputs of each as for ``add_terms``.
    """

    layer: AttentionLayer
    x_sb: Any
    scales: NormScales
    cos_sb: Any
    sin_sb: Any
    identity_sb: Any
    swap_sb: Any
    parts: Any
    head_norm: Any
    added: List[Tuple[List[Any], List[Any]]]

    @property
    def heads(self) -> HeadShape:
        return self.layer.heads


def projection(x_sb, layer, first_token, parts):
    """The Projection of the tokens from ``first_token`` on, x_sb [128, H/128, T], tiles ``parts``
    of them."""
    scales, x_sb = norm_scales(x_sb, layer.norm, parts), with_gain(x_sb, layer.gain_sb)
    columns, heads = nl.ds(first_token, x_sb.shape[2]), layer.heads
    tables = [nl.load(table_hbm[:, columns]) for table_hbm in (layer.cos_hbm, layer.sin_hbm)]
    of_heads = None if layer.head_norm is None else layer.head_norm.loaded(layer.norm, heads)
    if of_heads is None:
        tables = [nisa.tensor_tensor(x, scales.along_sb, nl.multiply) for x in tables]
    identity_sb = shifted_identity(P_MAX, P_MAX, 0, x_sb.dtype)
    swap_sb = None if heads.slots > 1 else swapped_halves(heads.head_dim, x_sb.dtype)
    added = [((), ())] * 3
    if layer.added is not None:
        added = layer.added.of_tokens(x_sb, scales, first_token)
    return Projection(layer, x_sb, scales, *tables, identity_sb, swap_sb, parts, of_heads, added)


def rotated_span(p, weight_sb, tile, qk_sb, at, start, size):
    """Tile ``at`` of the query or key heads of a span of tokens, rotated, into qk_sb[:, at].

    VectorE multiplies whole rows by cos and sin; TensorE adds both terms, the second with the
    halves of each head exchanged. Queries are divided by sqrt(D) where that rounds nothing.
    """
    columns, which = nl.ds(start, size), 0 if at < p.heads.q_tiles else 1
    first, scale = (p.heads.q_tiles, 1.0) if which else (0, score_scales(p.heads.head_dim)[0])
    # W x [128, size] @ PSUM, H/128 passes of its columns
    x_psum = products(weight_sb, tile, 1, p.x_sb, start, size)
    add_terms(x_psum, *p.added[which], at - first, start)
    x = x_psum[:, 0, :]
    scale_sb = p.layer.qkv.scales(at, 1)
    if p.head_norm is not None:
        x, scale_sb = p.head_norm.normed(p, x, columns, which, scale_sb), None
    # x cos and x sin, times the norm's scale unless that is in x: they leave PSUM one after another
    terms_sb = nl.ndarray((P_MAX, 2, size), p.x_sb.dtype)
    terms_sb[:, 0, :] = times_both(x, p.cos_sb[:, columns], scale_sb)
    terms_sb[:, 1, :] = times_both(x, p.sin_sb[:, columns], scale_sb)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    if p.heads.slots > 1:
        halves = p.heads.stacks // 2 * (1 if which else p.heads.group)
        second = at - first >= halves
        other = qk_sb[:, at - halves if second else at + halves, columns]
        return add_half(terms_sb, qk_sb[:, at, columns], other, second, scale, zero_sb)
    # their sum [128, size], two passes: x cos as it is, x sin with the halves of heads exchanged
    rotated_psum = psum_zeros((P_MAX, size))
    rotated_psum[...] += nisa.nc_matmul(p.identity_sb, terms_sb[:, 0, :])
    rotated_psum[...] += nisa.nc_matmul(p.swap_sb, terms_sb[:, 1, :])
    qk_sb[:, at, columns] = nisa.activation(nl.copy, rotated_psum, bias=zero_sb, scale=scale)


def add_half(terms_sb, own, other, second, scale, zero_sb):
    """Rotation of a head of two tiles, x cos and x sin of one [128, 2, T] into its ``own`` [128, T]
    and the ``other``'s: the first leaves its terms in both; the ``second``, which comes later, adds
    its own."""
    if not second:
        own[...] = nisa.tensor_copy(terms_sb[:, 0, :])
        other[...] = nisa.tensor_copy(terms_sb[:, 1, :])
        return
    for half, term, op in ((other, 1, nl.subtract), (own, 0, nl.add)):
        sum_sb = nisa.tensor_tensor(half, terms_sb[:, term, :], op, dtype=nl.float32)
        half[...] = nisa.activation(nl.copy, sum_sb, bias=zero_sb, scale=scale)


def value_tile(p, weight_sb, tile, start, v_sb):
    """A tile of features of V of every tile of tokens into the columns from ``start`` on.

    Tokens are stationary here: they land on partitions, where the sums over keys contract them.
    """
    width = min(P_MAX, v_sb[0].shape[1] - start)
    for (at, size), norm_sb, rows_sb in zip(p.parts, p.scales.down_sb, v_sb):
        acc_psum = psum_zeros((size, width))
        for k in nl.affine_range(p.x_sb.shape[1]):
            acc_psum[...] += nisa.nc_matmul(
                p.x_sb[:, k, nl.ds(at, size)], weight_sb[:, tile, k, 0:width]
            )
        for b_sb, low_sb in zip(*p.added[2]):
            acc_psum[...] += nisa.nc_matmul(
                low_sb[:, nl.ds(at, size)], b_sb[:, nl.ds(start, width)]
            )
        scale_sb = p.layer.qkv.scales(p.heads.qk_tiles + start, width)
        if scale_sb is None:
            rows_sb[:, nl.ds(start, width)] = nisa.tensor_scalar(acc_psum, nl.multiply, norm_sb)
        else:
            rows_sb[:, nl.ds(start, width)] = times_both(acc_psum, scale_sb[0:size, :], norm_sb)


def project_tile(p, loaded, at, span, qk_sb, v_sb):
    """Tile ``at`` of queries, keys and values by what is ``loaded``, a weight and the tile's place
    in it: of queries or keys a span of tokens, rotated, of values all tokens."""
    if at < p.heads.qk_tiles:
        rotated_span(p, *loaded, qk_sb, at, *span)
    else:
        value_tile(p, *loaded, (at - p.heads.qk_tiles) * P_MAX, v_sb)


def qkv_tiles(p):
    """Tiles for what is projected @ SBUF: qk_sb [128, query tiles then key tiles, T], and one tile
    [tokens, kv_heads * D] of values per tile of tokens."""
    heads, dtype = p.heads, p.x_sb.dtype
    qk_sb = nl.ndarray((P_MAX, heads.qk_tiles, p.x_sb.shape[2]), dtype)
    return qk_sb, [nl.ndarray((size, heads.kv_features), dtype) for _, size in p.parts]


def project_qkv(p):
    """Q, K and V of a few tokens -> the tiles of ``qkv_tiles``, queries and keys rotated."""
    tokens, (qk_sb, v_sb) = p.x_sb.shape[2], qkv_tiles(p)
    weight = StreamedWeight.of(p.layer.qkv, p.layer.qkv.pieces(tokens))
    for at in nl.static_range(weight.tiles):
        project_tile(p, weight.tile(at), at, (0, tokens), qk_sb, v_sb)
    return qk_sb, v_sb


def key_rows(qk_sb, start, tokens, heads):
    """Keys of a span of tokens, behind their queries -> rows [tokens, kv_heads * D] @ SBUF."""
    d, rows = heads.head_dim, min(heads.depth, P_MAX)
    rows_sb = nl.ndarray((tokens, heads.kv_features), qk_sb.dtype)
    for first, count in spans(heads.kv_heads, heads.stack):
        for slot, (stack, _) in enumerate(heads.tiles(first)):
            rows_psum = psum_tile((tokens, count * rows))
            rows_psum[...] = nisa.nc_transpose(
                qk_sb[0 : count * rows, heads.q_tiles + stack, nl.ds(start, tokens)]
            )
            if d % rows == 0:
                own = nl.ds(first * d + slot * rows, count * rows)
                rows_sb[:, own] = nisa.tensor_copy(rows_psum)
                continue
            for at in nl.static_range(count):
                own = nl.ds((first + at) * d, d)
                rows_sb[:, own] = nisa.tensor_copy(rows_psum[:, nl.ds(at * rows, d)])
    return rows_sb


# --- Attention ------------------------------------------------------------------------------------
#
# Softmax weights are relative to the maximum of their query; their product with a column of ones
# behind the values is their sum.


def score_scales(head_dim):
    """(what queries are multiplied by, what scores are): together 1 / sqrt(D).

    A power of two (D = 64) rounds nothing and goes to the queries; others wait for the exponential,
    whose argument is fp32.
    """
    scale = 1.0 / math.sqrt(head_dim)
    return (scale, 1.0) if math.frexp(scale)[0] == 0.5 else (1.0, scale)


def negated_maximum(scores_sb, scale):
    """The negated maximum of rows of scores [Q, keys] @ SBUF times ``scale`` -> [Q, 1].

    VectorE compares two bf16 numbers a cycle where the result is bf16, too: it is one of them.
    """
    neg_max_sb = nisa.tensor_reduce(nl.max, scores_sb, axis=1, negate=True)
    if scale == 1.0:
        return neg_max_sb
    return nisa.tensor_scalar(neg_max_sb, nl.multiply, scale, dtype=nl.float32)


def divided(values, weight_sum, dtype):
    """Weighted values [Q, n] by the sum of their weights [Q, 1] @ SBUF."""
    return nisa.tensor_scalar(values, nl.multiply, nisa.reciprocal(weight_sum), dtype=dtype)


# --- Attention of many queries --------------------------------------------------------------------
#
# Prompts, their chunks and token trees. Scores are transposed: a tile of up to 128 keys is
# stationary and up to 512 columns of queries move, those of a KV head's group, of several heads
# where tokens are few. So exp leaves the weights with keys on partitions, where the product with
# the values contracts them: weights are stationary, and D + 1 columns of values move. The last one
# is ones, and gives the sum of the weights. What exp subtracts differs from column to column: a
# first pass over all keys, with queries on partitions, finds each query's maximum, and the second
# contracts two marks beside the D features, rows of the array that are idle where D is 64:
#
#   keys (mask, 1, 1, ..)     queries (1, -maximum, ..), of which the first pass contracts the first
#
# Each tile of queries that share a bank has a mark of its own, zero for the others' queries, so
# that one product turns the maxima of all round. Once they are known, no query is ever rescaled;
# they may be rounded, since they are the same for all of a query's keys. Where D is 128 no row is
# idle: as long as all keys stay in SBUF, the scores of the first pass stay, too, and TensorE turns
# their weights round instead of scoring once more.
#
# ScalarE takes scores out of PSUM and VectorE compares copies of them in SBUF, since both at PSUM
# exclude each other. So ScalarE bounds both passes, and TensorE has time for the projections of
# others: the steps of the second pass take turns with those of the next queries' first pass, and
# with other work, in the order in which their tiles of PSUM are wanted.

TILES_AT_ONCE = MOVING_MAX // P_MAX  # tiles of queries whose scores share a bank of PSUM
QUERIES_AT_ONCE = 512  # tokens of a prompt that share a pass over keys of other ranks
MARKS = 1 + TILES_AT_ONCE
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
    def marks(self) -> int:
        """Marks of its queries: the first, and one for each tile of them."""
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
    """(slot, rows) of the products that contract so many features and marks."""
    return [(start // P_MAX, rows) for start, rows in spans(depth, P_MAX)]


class KeyTiles(NamedTuple):
    """``tiles`` tiles of ``lanes`` keys of some KV heads @ SBUF.

    k_sb [128, heads, slots * stride, lanes], features and marks behind them, 128 rows a slot; v_sb
    [128, stride, heads, D + 1], the last column ones, None where nobody asks for values. ``head``
    is the first one there that counts.
    ``mask_sb`` [tokens, lanes], if any, is added to the scores of the last tile, a triangle where
    it is ``causal``. bias_sb [n, tiles, lanes], if any, hides keys from the queries that owners_sb
    [n, rows, tokens] are ones of: of n sequences, or of one, whose marks are no rows of k_sb.
    ``before`` tiles of k_sb and v_sb come first that nobody sees, and ``edges`` are masks of a
    Window for some tiles, (tile, [128, 128] @ SBUF).
    """

    k_sb: Any
    v_sb: Any
    stride: int
    tiles: int
    lanes: int
    head: int = 0
    mask_sb: Any = None
    causal: bool = False
    bias_sb: Any = None
    owners_sb: Any = None
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

    def seen(self, own, tiles):
        """What a tile of queries, the ``own``-th of its sequence, sees of so many tiles: the first,
        and its edges, (tile behind that, mask)."""
        first = max(0, own - self.back)
        edges = [(own - back, mask_sb) for back, mask_sb in self.masks]
        return first, [(tile - first, mask) for tile, mask in edges if first <= tile < tiles]


class NewKeys(NamedTuple):
    """Keys and values of a sequence's new tokens, filled in order: k_sb and v_sb as in KeyTiles,
    zero behind the last key. ``marks`` are the rows behind the features, none where nobody
    contracts them; where the first one ``hides`` keys, queries have a one for it. mask_sb [tokens,
    tokens] is added to the scores of a tile of tokens with each other, a triangle where no mark
    hides any. Of several sequences bias_sb [sequences, tiles * 128] hides each one's keys from the
    others. A Window may hide older ones.
    """

    heads: HeadShape
    k_sb: Any
    v_sb: Any
    mask_sb: Any
    marks: int
    hides: bool
    bias_sb: Any = None
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

    def seen(self, bank):
        """KeyTiles of what the queries of a bank see: whole tiles before them, and their own."""
        lanes = P_MAX if bank.position else bank.tokens
        stride, tiles = self.v_sb.shape[1], bank.position // P_MAX + 1
        mask_sb, bias_sb = self.mask_sb[0 : bank.tokens, 0:lanes], None
        if self.bias_sb is not None:
            shape = self.bias_sb.shape[0], tiles, lanes
            bias_sb = self.bias_sb[:, 0 : tiles * lanes].reshape(shape)
        seen = KeyTiles(
            self.k_sb, self.v_sb, stride, tiles, lanes, bank.head, mask_sb, not self.hides, bias_sb
        )
        if self.window is None:
            return seen
        first, edges = self.window.seen(tiles - 1, tiles)
        return seen._replace(tiles=tiles - first, before=first, edges=edges)


def new_keys(tokens, heads, dtype, mask_sb, marks, hides, bias_hbm=None):
    """NewKeys without keys yet; marks and ones are there.

    bias [1, tokens] @ HBM is 0 for keys that count and MASKED for others; None: all count.
    """
    d, tiles, last = heads.head_dim, whole_tiles(tokens), tokens // P_MAX
    slots, (slot, row) = len(contraction(heads.depth + marks)), divmod(heads.depth, P_MAX)
    k_sb = nl.ndarray((P_MAX, heads.kv_heads, slots * tiles, P_MAX), dtype)
    v_sb = nl.ndarray((P_MAX, tiles, heads.kv_heads, d + 1), dtype)
    if last < tiles:
        for half in nl.static_range(heads.slots):
            own = k_sb[:, :, half * tiles + last, :]
            own[...] = nisa.memset((P_MAX, heads.kv_heads, P_MAX), 0.0, dtype)
        v_sb[:, last, :, :] = nisa.memset((P_MAX, heads.kv_heads, d + 1), 0.0, dtype)
    v_sb[:, :, :, d : d + 1] = nisa.memset((P_MAX, tiles, heads.kv_heads, 1), 1.0, dtype)
    if marks:
        shape, part = (heads.kv_heads, tiles, P_MAX), nl.ds(slot * tiles, tiles)
        k_sb[row : row + MARKS, :, part, :] = nisa.memset((MARKS, *shape), 1.0, dtype)
        k_sb[row : row + 1, :, part, :] = nisa.memset((1, *shape), 0.0, dtype)
    if bias_hbm is not None:
        for head in nl.affine_range(heads.kv_heads):
            for tile, (start, size) in enumerate(spans(tokens, P_MAX)):
                k_sb[row : row + 1, head, slot * tiles + tile, 0:size] = nl.load(
                    bias_hbm[:, nl.ds(start, size)]
                )
    return NewKeys(heads, k_sb, v_sb, mask_sb, marks, hides)


class Constants(NamedTuple):
    """Tiles that the attention of many queries reads: zeros [128, 1] fp32, the identity [128, 128],
    which of n tokens a query is, [n, rows, n], for any number of ``rows`` of queries, and which
    marks are a tile's, the first and its own, [MARKS, TILES_AT_ONCE] fp32."""

    zero_sb: Any
    eye_sb: Any
    which_sb: Any
    own_sb: Any


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


def bank_queries(qk_sb, bank, heads, marks, hides):
    """Queries of a bank [128, slots, rows, tokens] @ SBUF, as the keys of KeyTiles have them, with
    room for so many ``marks``; the first is there where that of the keys ``hides`` some."""
    depth, shape = heads.depth, (bank.rows, bank.tokens)
    slots, (slot, row) = len(contraction(depth + marks)), divmod(depth, P_MAX)
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
    """Products of one tile of keys with a bank's queries, ``depth`` rows of features and marks,
    into scores_psum [lanes, rows, tokens]."""
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
        seen = self.new.seen(bank)
        every = [*((block.tiles, block.lanes) for block in self.blocks), (seen.tiles, seen.lanes)]
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
            return self.new.seen(bank)._replace(owners_sb=owners_sb)
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
        q_sb = [bank_queries(group.qk_sb, bank, new.heads, new.marks, new.hides) for bank in banks]
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
        behind the last, the marks of its queries."""
        (part, span, n, at, step), group = work, self.group
        bank, new, keys = group.banks[n], group.new, group.keys(part, n, self.held, False)
        queries, last = bank.tiles()[at][2] * bank.tokens, len(group.spans(bank)) - 1
        if new.marks:
            scores_sb = nl.ndarray((queries, span[1], keys.lanes), new.k_sb.dtype)
            self.score_rows(n, at, keys, span, scores_sb)
            self.maxima_sb[n][0:queries, at, nl.ds(step, 1)] = nisa.tensor_reduce(
                nl.max, scores_sb, axis=[1, 2]
            )
            if step == last and at + 1 == len(bank.tiles()):
                self.mark(n)
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

    def mark(self, n):
        """Marks of a bank's queries for the second pass [marks, rows, tokens]: 1, and of each
        tile of queries the negated maxima of all parts.

        A product with the identity, 128 columns for all tiles, brings them from partitions to rows;
        ScalarE, alone at SBUF, copies these to each tile's queries.
        """
        bank, constants, q_sb = self.group.banks[n], self.group.constants, self.q_sb[n]
        lowest_sb = nisa.tensor_reduce(nl.max, self.maxima_sb[n], axis=2, negate=True)
        (queries, tiles), count = lowest_sb.shape, bank.marks
        marks_sb = nisa.memset((queries, count), 1.0, q_sb.dtype)
        marks_sb[:, nl.ds(1, tiles)] = nisa.tensor_copy(lowest_sb)
        turned_psum = nisa.nc_matmul(marks_sb, constants.eye_sb[0:queries, 0:queries])
        turned_sb = nisa.tensor_copy(turned_psum, dtype=q_sb.dtype)
        slot, first = divmod(depth_of(self.group.head_dim), P_MAX)
        for at, (_, row, members) in enumerate(bank.tiles()):
            part_sb = turned_sb[:, 0 : members * bank.tokens]
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
                if group.new.marks:
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
            self.add_turned(n, at, keys, span)
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
        depth = depth_of(group.head_dim) + bank.marks
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

    def add_turned(self, n, at, keys, span):
        """The same of one tile of queries, from scores [queries, tiles, lanes] that stayed in SBUF:
        TensorE turns the weights round, 128 keys at a time."""
        (head, _, _), (start, tiles) = self.first.group.banks[n].tiles()[at], span
        scores_sb, lowest_sb = self.first.scores[n][at]
        queries, _, lanes = scores_sb.shape
        weights_sb = nisa.activation(
            nl.exp, scores_sb[:, nl.ds(start, tiles), :], bias=lowest_sb,
            scale=score_scales(self.first.group.head_dim)[1],
        )  # fmt: skip
        turned_psum = psum_tile((lanes, tiles, queries))
        for tile in nl.affine_range(tiles):
            turned_psum[:, tile, :] = nisa.nc_transpose(weights_sb[:, tile, :])
        turned_sb = nisa.tensor_copy(turned_psum, dtype=scores_sb.dtype)
        sums_psum = sum_of(self.sums[n], at, queries)
        for tile in nl.affine_range(tiles):
            v_sb = keys.values(head, start + tile)
            sums_psum[...] += nisa.nc_matmul(turned_sb[:, tile, :], v_sb)


def bank_contexts(banks, sums, heads, context_sb):
    """Divides the sums of a set of heads by those of the weights -> context_sb [128, tiles, T].

    Contexts come with queries on partitions, and turn round for all heads of a stack at once; of
    the heads of a stack the banks follow each other.
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
                turned_psum = psum_tile((P_MAX, bank.members * bank.tokens))
                for (first, count), rows_sb in zip(parts, rows):
                    part = nl.ds(first * bank.tokens, count * bank.tokens)
                    turned_psum[:, part] = nisa.nc_transpose(rows_sb[:, nl.ds(slot * P_MAX, P_MAX)])
                out = bank.part(context_sb, heads, stack)
                out[...] = nisa.tensor_copy(turned_psum.reshape(shape))


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


def value_parts(parts, tokens, heads, itemsize):
    """(start, size) of the tiles of tokens whose values are projected: ``parts``, which attention
    takes one by one, where their tiles have room in SBUF, else 128 tokens each."""
    each = heads.kv_features * itemsize
    return parts if len(parts) * each <= VALUE_BYTES else spans(tokens, P_MAX)


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
    qk_sb: Any
    v_sb: Any
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


def store_turned(k_hbm, k_sb, first=0):
    """Keys turned, with marks, [128, heads, slots * tiles, lanes] @ SBUF -> [heads, depth + MARKS,
    tiles, lanes] @ HBM, there from tile ``first`` on."""
    slots = contraction(k_hbm.shape[1])
    tiles = k_sb.shape[2] // len(slots)
    for head in nl.affine_range(k_hbm.shape[0]):
        for slot, size in slots:
            nl.store(
                k_hbm[head, nl.ds(slot * P_MAX, size), nl.ds(first, tiles), :],
                k_sb[0:size, head, nl.ds(slot * tiles, tiles), :],
            )


def load_turned(k_hbm, head, heads, first, tiles):
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
    """HBM for keys and values of a sequence that is too long for SBUF: k_hbm [kv_heads, D + MARKS,
    tiles, 128], v_hbm [128, tiles, kv_heads, D + 1]."""

    k_hbm: Any
    v_hbm: Any

    @classmethod
    def of(cls, tiles, heads, dtype):
        kv_heads, d = heads.kv_heads, heads.head_dim
        k_hbm = nl.ndarray((kv_heads, heads.depth + MARKS, tiles, P_MAX), dtype, buffer=nl.hbm)
        return cls(k_hbm, nl.ndarray((P_MAX, tiles, kv_heads, d + 1), dtype, buffer=nl.hbm))

    def append(self, tile, new):
        """Store the NewKeys of a block of tokens, which begins with tile ``tile``."""
        store_turned(self.k_hbm, new.k_sb, tile)
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
        k_sb = load_turned(k_hbm, self.head, self.count, self.tile, self.tiles)
        v_sb = nl.load(v_hbm[:, nl.ds(self.tile, self.tiles), heads, :]) if values else None
        return KeyTiles(k_sb, v_sb, self.tiles, self.tiles, P_MAX, edges=self.edges)


def key_bytes(tokens, heads, marks, itemsize):
    """Bytes per partition of keys and values of so many tokens of a sequence."""
    columns = heads.kv_heads * (len(contraction(heads.depth + marks)) * P_MAX + heads.head_dim + 1)
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
            first, edges = window.seen(tiles + banks[0].position // P_MAX, tiles)
        head, count = heads_of(banks)
        itemsize, heads = self.tokens.p.layer.x_hbm.itemsize, self.tokens.p.heads
        of_tile = key_bytes(P_MAX, heads._replace(kv_heads=count), MARKS, itemsize)
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
    ``marks`` keys have, whether keys and values of a sequence stay in SBUF (``short``), both
    StreamedWeights where these stay, None where each block reads them, whether other blocks are on
    their way ``beside`` one, and, where none are, whether all queries come first, as in Prefill."""

    layer: AttentionLayer
    blocks: List[Block]
    bias_hbm: Any
    window: Optional[Window]
    causal_sb: Any
    constants: Constants
    marks: int
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
        # marks where rows of the array are idle, where keys are hidden, where scores do not stay
        most_bytes = RESIDENT_BYTES - (ADAPTER_BYTES if layer.out.added else 0)
        least = key_bytes(length, heads, 0, itemsize)
        # a tile of queries for each of 512 rows or of a group, in both passes
        scores = 2 * itemsize * heads.group * max(1, TILES_AT_ONCE // heads.group) * length
        turned = heads.depth == P_MAX and bias_hbm is None and least <= most_bytes
        marks = 0 if turned and least + scores <= SCORE_BYTES else MARKS
        keys = key_bytes(length, heads, marks, itemsize)
        short = keys <= most_bytes
        # both weights [128, tiles, .., 128] stay in SBUF where they fit; else each block reads them
        weights = attention_weights(layer, block.count)
        bytes_of_weights = sum(2 * w.tiles * w.linear.k_tiles * P_MAX for w in weights)
        if short and blocks[-1].start >= length:  # two sequences are on their way at one time
            kept, most_kept = 2 * keys, TWO_KEPT_BYTES
        else:
            kept, most_kept = min(keys, most_bytes) + (0 if marks else scores), KEPT_BYTES
        kept += bytes_of_weights
        kept += block_bytes(layer, block, min(len(blocks) // 2, WAITING_BLOCKS))
        if bytes_of_weights > WEIGHT_BYTES or kept > most_kept:
            weights = None
            blocks = joined_blocks(layer, blocks, keys) if short else blocks
            block = blocks[0]
        # keys on their way to scratch are there beside the blocks
        own = key_bytes(block.count, heads, marks, itemsize)
        on_way = block_bytes(layer, block, 1) + (0 if short else 2 * own)
        beside = weights is not None or on_way <= BESIDE_BYTES + (0 if short else SCRATCH_BYTES)
        tiles = layer.qkv.k_tiles + heads.q_tiles + heads.stacks
        whole = not beside and itemsize * block.count * tiles + max(own, short * keys) > WHOLE_BYTES
        return cls(
            layer, blocks, bias_hbm, window, causal_sb, constants, marks, short, weights, beside,
            whole,
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
            new_keys(*shape, self.causal_sb, self.marks, bias_hbm is not None, bias_hbm)
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


# --- Decode attention -----------------------------------------------------------------------------
#
# One new token per sequence has few rows of scores, and an instruction on 4 partitions takes as
# long as one on 128. So the query heads of all sequences share the partitions of one tile of
# scores: queries stand block by block in a stationary operand that is zero elsewhere (one slot of
# the contraction per sequence and stack of KV heads), and the slots' products add up in PSUM, and
# with them the mask: a selection of sequences times the bias of their keys.


def cache_runs(length, most=P_MAX):
    """(lanes, runs): how a cache of so many keys lies on at most ``most`` partitions.

    Partition p takes the ``runs`` keys from p * runs on, which lie next to each other in HBM; tile
    t holds the keys t, t + runs, ... Sums over keys do not mind the order, if the mask has it too.
    """
    fewest = math.ceil(length / most)
    runs = next(runs for runs in range(fewest, length + 1) if length % runs == 0)
    return length // runs, runs


class Cache(NamedTuple):
    """Keys and values @ HBM [B, kv_heads, L, D], and bias [B, n] of their first n keys."""

    keys_hbm: Any
    values_hbm: Any
    bias_hbm: Any

    @property
    def length(self) -> int:
        """Keys of a sequence."""
        return self.bias_hbm.shape[1]

    @property
    def itemsize(self) -> int:
        """Bytes of a number in SBUF: fp8 keys stand turned in the type of x."""
        return max(2, self.keys_hbm.itemsize)


def decode_runs(keys_hbm):
    """(lanes, runs) of a decode step's cache [B, kv_heads, L, D]: KV heads share the partitions.

    So a row of DMA is kv_heads times as long, and one product over all partitions serves all heads.
    """
    return cache_runs(keys_hbm.shape[2], P_MAX // keys_hbm.shape[1])


def decode_bytes(length, heads, itemsize):
    """Bytes per partition that a sequence's cache takes in a decode step: keys turned, a row of the
    mask, and values, twice while GpSimdE puts ones behind them."""
    kept = length * (heads.stacks + 1)
    kept += 2 * cache_runs(length, P_MAX // heads.kv_heads)[1] * (heads.head_dim + 1)
    return itemsize * kept


def sequences_at_once(cache, heads):
    """Sequences of a decode step that share a tile of scores."""
    each = decode_bytes(cache.length, heads, cache.itemsize)
    return max(1, min(P_MAX // heads.q_heads, CACHE_BYTES // each))


def caches_stay(cache, heads):
    """Whether turned keys, a row of the mask and values of all sequences of a decode step have room
    in SBUF beside its weights."""
    batch, _, length, d = cache.keys_hbm.shape
    columns = length * (heads.stacks + 1) + decode_runs(cache.keys_hbm)[1] * (d + 1)
    return cache.itemsize * batch * columns <= CACHES_BYTES


class CachedSequences(NamedTuple):
    """The cache of ``count`` sequences from ``first`` on @ SBUF, and room for their new tokens.

    k_sb [128, slots, keys + count]: keys turned, slot b * stacks + s has the heads of stack s of
    sequence b; the columns behind are the new keys', zero for other sequences. mask_sb [count,
    keys + count], added to scores. v_sb [kv_heads * lanes, count, tiles, D + 1]: values, the lanes
    of each head in turn, and a column of ones, which gives the sum of the weights.
    """

    first: int
    count: int
    k_sb: Any
    mask_sb: Any
    v_sb: Any

    @property
    def keys(self) -> int:
        """Cached keys of a sequence."""
        return self.k_sb.shape[2] - self.count


def key_room(shape, heads, dtype):
    """Room for keys in rows [*shape, depth] @ SBUF, zeros where features are fewer."""
    if heads.depth == heads.head_dim:
        return nl.ndarray((*shape, heads.depth), dtype)
    return nisa.memset((*shape, heads.depth), 0.0, dtype)


class CachedRows(NamedTuple):
    """Keys of a sequence's cached tokens @ SBUF, [lanes, heads, tiles, D]."""

    rows_sb: Any

    @property
    def tiles(self) -> int:
        return self.rows_sb.shape[2]

    def tile(self, first, count, tile, features):
        """A tile of ``count`` heads from the ``first`` on, some features: [lanes, count, n]."""
        return self.rows_sb[:, nl.ds(first, count), tile, features]

    def turned(self, first, count, start, tiles, half=0):
        """Of keys ``tiles`` tiles of these heads from ``start`` on -> [count * D, tiles, lanes] @
        PSUM, as many as share a bank: a transpose of all heads for each tile, of D above 128 for
        each ``half``."""
        lanes, *_, depth = self.rows_sb.shape
        rows = min(depth, P_MAX)
        turned_psum = psum_tile((count * rows, tiles, lanes))
        for t in nl.affine_range(tiles):
            tile_sb = self.tile(first, count, start + t, nl.ds(half * rows, rows))
            turned_psum[:, t, :] = nisa.nc_transpose(tile_sb)
        return turned_psum


def stack_keys(k_sb, keys, first_slot, first_column, heads, first_head=0, count=None):
    """Turn ``count`` heads of CachedRows, all of them by default, of which the first is
    ``first_head``, into a sequence's slots of k_sb [128, slots, keys]: as many tiles as share a
    PSUM bank turn round, lanes columns each, and leave it together."""
    lanes = keys.rows_sb.shape[0]
    for head, stacked in spans(count or heads.kv_heads, heads.stack):
        for half, (stack, _) in enumerate(heads.tiles(first_head + head)):
            for at, together in spans(keys.tiles, MOVING_MAX // lanes):
                turned_psum = keys.turned(head, stacked, at, together, half)
                rows, columns = turned_psum.shape[0], together * lanes
                own = nl.ds(first_column + at * lanes, columns)
                k_sb[0:rows, first_slot + stack, own] = nisa.tensor_copy(
                    turned_psum.reshape((rows, columns))
                )


def room_for_keys(bias_hbm, first, count, heads):
    """k_sb and mask_sb of CachedSequences, but for the cached keys: of new keys each token sees its
    own."""
    length, dtype = bias_hbm.shape[1], bias_hbm.dtype
    shape = (P_MAX, count * heads.stacks, length + count)
    k_sb, own = nl.ndarray(shape, dtype), nl.ds(length, count)
    if heads.leaves_lanes():
        k_sb[...] = nisa.memset(shape, 0.0, dtype)
    k_sb[:, :, own] = nisa.memset((P_MAX, count * heads.stacks, count), 0.0, dtype)
    mask_sb = nl.ndarray((count, length + count), dtype)
    mask_sb[:, 0:length] = nl.load(bias_hbm[nl.ds(first, count), :])
    if count == 1:
        mask_sb[:, own] = nisa.memset((1, 1), 0.0, dtype)
    else:
        mask_sb[:, own] = load_constant(masked(dtype) * (1.0 - np.eye(count)), dtype)
    return k_sb, mask_sb


def cached_sequences(cache, first, count, heads):
    """CachedSequences of a decode step.

    TensorE takes fp8 as it is: keys leave PSUM in the type of x, which those of new tokens have,
    values stay as they are.
    """
    (batch, kv_heads, _, d), (lanes, tiles) = cache.keys_hbm.shape, decode_runs(cache.keys_hbm)
    partitions = kv_heads * lanes
    keys_hbm = cache.keys_hbm.reshape((batch, kv_heads, lanes, tiles, d))
    values_hbm = cache.values_hbm.reshape((batch, partitions, tiles, d))
    k_sb, mask_sb = room_for_keys(cache.bias_hbm, first, count, heads)
    together = CACHE_BYTES // (keys_hbm.itemsize * tiles * heads.depth * heads.stack)
    for b in nl.affine_range(count):
        # keys [lanes, some heads, tiles, D], rows of tiles * D
        for start, some in spans(kv_heads, max(1, together) * heads.stack):
            rows_sb = key_room((lanes, some, tiles), heads, keys_hbm.dtype)
            for head in nl.affine_range(some):
                rows_sb[:, head, :, 0:d] = nl.load(keys_hbm[first + b, start + head, :, :, :])
            stack_keys(k_sb, CachedRows(rows_sb), b * heads.stacks, 0, heads, start, some)
    # values, when the rows of keys have left SBUF: one load a sequence, heads and lanes follow each
    # other in HBM; GpSimdE puts ones behind
    v_sb = nisa.memset((partitions, count, tiles, d + 1), 1.0, values_hbm.dtype)
    for b in nl.affine_range(count):
        v_sb[:, b, :, 0:d] = nisa.tensor_copy(
            nl.load(values_hbm[first + b, :, :, :]), engine=nisa.gpsimd_engine
        )
    return CachedSequences(first, count, k_sb, mask_sb, v_sb)


def decode_queries(qk_sb, cache, heads):
    """Queries of the sequences, block by block: [128, slots, rows] @ SBUF, and which rows are a
    sequence's, [B, rows].

    Row b * q_heads + h belongs to head h of sequence b; slot b * stacks + s holds the heads of
    stack s of that sequence in its rows.
    """
    group, count, dtype = heads.group, cache.count, qk_sb.dtype
    rows = count * heads.q_heads
    q_sb = nisa.memset((P_MAX, count * heads.stacks, rows), 0.0, dtype)
    for b in nl.static_range(count):
        for kv_head in nl.static_range(heads.kv_heads):
            own = nl.ds(b * heads.q_heads + kv_head * group, group)
            for stack, lanes in heads.tiles(kv_head):
                q_sb[lanes, b * heads.stacks + stack, own] = nisa.tensor_copy(
                    qk_sb[lanes, nl.ds(stack * group, group), cache.first + b]
                )
    if count == 1:
        return q_sb, nisa.memset((1, rows), 1.0, dtype)
    shape = count, count, heads.q_heads
    sequence, own = nl.arange(count)[:, None, None], nl.arange(count)[None, :, None]
    own = own + 0 * nl.arange(heads.q_heads)[None, None, :]
    return q_sb, select_equal(sequence, own, shape, dtype).reshape((count, rows))


def decode_scores(qk_sb, cache, heads):
    """Masked scores of all rows against cached and new keys [rows, keys + B] @ SBUF."""
    q_sb, which_sb = decode_queries(qk_sb, cache, heads)
    for b in nl.affine_range(cache.count):
        for stack in nl.affine_range(heads.stacks):
            cache.k_sb[:, b * heads.stacks + stack, cache.keys + b] = nisa.tensor_copy(
                qk_sb[:, heads.q_tiles + stack, cache.first + b]
            )
    (_, slots, rows), keys = q_sb.shape, cache.k_sb.shape[2]
    scores_sb = nl.ndarray((rows, keys), q_sb.dtype)
    for at, size in spans(keys, MOVING_MAX):
        part = nl.ds(at, size)
        scores_psum = psum_zeros((rows, size))
        for slot in nl.affine_range(slots):
            scores_psum[...] += nisa.nc_matmul(q_sb[:, slot, :], cache.k_sb[:, slot, part])
        scores_psum[...] += nisa.nc_matmul(which_sb, cache.mask_sb[:, part])
        scores_sb[:, part] = nisa.tensor_copy(scores_psum)
    return scores_sb


def turn_tiles(x_sb, tiles, width):
    """``tiles`` times [Q, width] @ SBUF, side by side -> [width, tiles, Q]: turned round.

    TensorE multiplies by the identity, into fp32 as all its results; as many as share a PSUM bank
    are taken out by one copy.
    """
    queries = x_sb.shape[0]
    out_sb = nl.ndarray((width, tiles, queries), x_sb.dtype)
    for at, count in spans(tiles, MOVING_MAX // queries):
        turned_psum = psum_tile((width, count, queries))
        for t in nl.affine_range(count):
            turned_psum[:, t, :] = nisa.nc_transpose(x_sb[:, nl.ds((at + t) * width, width)])
        out_sb[:, nl.ds(at, count), :] = nisa.tensor_copy(turned_psum)
    return out_sb


def spread_weights(weights_sb, cache, heads):
    """Weights of cached keys [rows, keys] @ SBUF -> [kv_heads * lanes, kv_heads, tiles, B, group].

    TensorE turns them, lanes on partitions, and then copies each KV head's part to that head's
    lanes: a product with an identity that stands there, and is zero at the lanes of other heads.
    """
    (partitions, count, tiles, _), dtype = cache.v_sb.shape, weights_sb.dtype
    kv_heads, group, rows = heads.kv_heads, heads.group, weights_sb.shape[0]
    lanes = partitions // kv_heads
    turned_sb = turn_tiles(weights_sb, tiles, lanes)
    of_heads_sb = turned_sb.reshape((lanes, tiles, count, kv_heads, group))
    place_sb = shifted_identity(lanes, 2 * partitions - lanes, partitions - lanes, dtype)
    spread_sb = nl.ndarray((partitions, kv_heads, tiles, count, group), dtype)
    for at, size in spans(tiles, MOVING_MAX // rows):
        part, columns = nl.ds(at, size), size * count * group
        spread_psum = psum_tile((partitions, kv_heads, columns))
        for head in nl.static_range(kv_heads):
            window = nl.ds(partitions - (head + 1) * lanes, partitions)
            spread_psum[:, head, :] = nisa.nc_matmul(
                place_sb[:, window], of_heads_sb[:, part, :, head, :]
            )
        shape = (partitions, kv_heads, size, count, group)
        spread_sb[:, :, part, :, :] = nisa.tensor_copy(spread_psum.reshape(shape))
    return spread_sb


def own_weights(weights_sb, cache, heads):
    """Weights of the new keys [rows, B] @ SBUF, turned -> [B, kv_heads, rows], zero for the rows of
    other heads than the part's."""
    kv_heads, group, count, rows = heads.kv_heads, heads.group, cache.count, weights_sb.shape[0]
    turned_psum = psum_tile((count, rows))
    turned_psum[...] = nisa.nc_transpose(weights_sb[:, nl.ds(cache.keys, count)])
    of_heads_psum = turned_psum.reshape((count, count, kv_heads, group))
    own_sb = nisa.memset((count, kv_heads, count, kv_heads, group), 0.0, weights_sb.dtype)
    for head in nl.affine_range(kv_heads):
        own_sb[:, head, :, head, :] = nisa.tensor_copy(of_heads_psum[:, :, head, :])
    return own_sb.reshape((count, kv_heads, rows))


def attend_cached(qk_sb, v_sb, cache, heads, context_sb):
    """Attention of some sequences' new tokens over their cache and themselves -> their columns of
    context_sb [128, tiles, B]."""
    count, d, group = cache.count, heads.head_dim, heads.group
    scale = score_scales(d)[1]
    # softmax weights [B * q_heads, keys + B]: 512 keys move a pass, one for each slot and the mask
    scores_sb = decode_scores(qk_sb, cache, heads)
    neg_max_sb = negated_maximum(scores_sb, scale)
    weights_sb = nisa.activation(nl.exp, scores_sb, bias=neg_max_sb, scale=scale)
    # the same with keys on partitions, as values have them: cached ones of all heads, and new ones
    spread_sb = spread_weights(weights_sb, cache, heads)
    own_sb = own_weights(weights_sb, cache, heads)
    own_values_sb = nisa.memset((count, heads.kv_heads, d + 1), 1.0, v_sb.dtype)
    own_values_sb[:, :, 0:d] = nisa.tensor_copy(v_sb.reshape((count, heads.kv_heads, d)))
    # context of each sequence [q_heads, D + 1]: D + 1 columns of values move, a pass for each tile
    # of 128 cached keys and for each head's new keys; divided by the last column, it turns round
    turned = [psum_tile((rows, heads.q_heads, count)) for _, rows in spans(d, P_MAX)]
    for b in nl.affine_range(count):
        out_psum = psum_zeros((heads.q_heads, d + 1))
        for t in nl.affine_range(cache.v_sb.shape[2]):
            out_psum[...] += nisa.nc_matmul(spread_sb[:, :, t, b, :], cache.v_sb[:, b, t, :])
        for head in nl.affine_range(heads.kv_heads):
            rows = nl.ds(b * heads.q_heads, heads.q_heads)
            out_psum[...] += nisa.nc_matmul(own_sb[:, head, rows], own_values_sb[:, head, :])
        rows_sb = divided(out_psum[:, 0:d], out_psum[:, d : d + 1], context_sb.dtype)
        for slot, turned_psum in enumerate(turned):
            own = nl.ds(slot * P_MAX, turned_psum.shape[0])
            turned_psum[:, :, b] = nisa.nc_transpose(rows_sb[:, own])
    # [D, q_heads, B] to the lanes and tiles of the heads, all sequences at once
    for kv_head in nl.static_range(heads.kv_heads):
        for turned_psum, (stack, lanes) in zip(turned, heads.tiles(kv_head)):
            lanes, tiles = nl.ds(lanes.start, turned_psum.shape[0]), nl.ds(stack * group, group)
            context_sb[lanes, tiles, nl.ds(cache.first, count)] = nisa.tensor_copy(
                turned_psum[:, nl.ds(kv_head * group, group), :]
            )


def cached_ahead(cache, heads):
    """(first, count) of sequences whose scores share a tile, and their CachedSequences where those
    of all have room beside the weights, else None."""
    parts = spans(cache.bias_hbm.shape[0], sequences_at_once(cache, heads))
    ahead = caches_stay(cache, heads)
    return [(part, cached_sequences(cache, *part, heads) if ahead else None) for part in parts]


def decode_step(layer, x_sb, cache, loaded, keys_hbm, values_hbm):
    """``attention_decode_kernel`` behind its residual sum x_sb [128, H/128, B]; what is ``loaded``
    of the cache as ``cached_ahead`` says. New keys and values into rows @ HBM."""
    heads, batch, dtype = layer.heads, x_sb.shape[2], x_sb.dtype
    # queries and keys [128, tiles, B], values [B, kv_heads * D]: H/128 passes of 64 columns a tile,
    # a fifth of the time that DMA takes for its weights
    parts = [part for part, _ in loaded]
    tiles = value_parts(parts, batch, heads, layer.x_hbm.itemsize)
    qk_sb, v_sb = project_qkv(projection(x_sb, layer, 0, tiles))
    nl.store(keys_hbm, key_rows(qk_sb, 0, batch, heads))
    for tile, rows_sb in zip(tiles, v_sb):
        nl.store(values_hbm[nl.ds(*tile), :], rows_sb)
    # context [128, tiles, B] while the first output weights arrive; lanes without a head are zero
    context_sb = nl.ndarray((P_MAX, heads.q_tiles, batch), dtype)
    if heads.leaves_lanes():
        context_sb[...] = nisa.memset((P_MAX, heads.q_tiles, batch), 0.0, dtype)
    for n, (part, cached) in enumerate(loaded):
        new_sb = v_sb[n] if tiles == parts else nl.load(values_hbm[nl.ds(*part), :])
        cached = cached or cached_sequences(cache, *part, heads)
        attend_cached(qk_sb, new_sb, cached, heads, context_sb)
    store_product(layer.out, [(context_sb, Block(0, batch, 1))], layer.out_hbm)


# --- MLP ------------------------------------------------------------------------------------------


class InnerTokens(NamedTuple):
    """A block of tokens on its way through the MLP @ SBUF: hidden states [128, H/128, count], the
    scale of their norm [128, count], inputs of the terms of gate and of up, and what down contracts
    [128, F/128, count]."""

    x_sb: Any
    along_sb: Any
    inputs: List[List[Any]]
    inner_sb: Any

    def projected(self, piece, which, part):
        """A part of ``psum_parts`` of gate (``which`` 0) or up (1), normed and scaled @ SBUF."""
        out_psum, scale_sb = piece.product(self.x_sb, self.inputs[which], part)
        out_sb, (_, tiles, at, tokens) = nl.ndarray(out_psum.shape, self.x_sb.dtype), part
        along_sb = self.along_sb[:, nl.ds(at, tokens)]
        for tile in nl.affine_range(tiles):
            feature_sb = None if scale_sb is None else scale_sb[:, nl.ds(tile, 1)]
            out_sb[:, tile, :] = times_both(out_psum[:, tile, :], along_sb, feature_sb)
        return out_sb

    def gated(self, gate, up, first, part, zero_sb):
        """silu(gate) * up of that part of two Pieces, which begin with tile ``first``."""
        tile, tiles, at, tokens = part
        silu_sb = nisa.activation(nl.silu, self.projected(gate, 0, part), bias=zero_sb)
        inner = self.inner_sb[:, nl.ds(first + tile, tiles), nl.ds(at, tokens)]
        inner[...] = nisa.tensor_tensor(silu_sb, self.projected(up, 1, part), nl.multiply)


def gated_mlp(hidden, norm, linears, length, zero_sb, gain_sb=None):
    """``swiglu_mlp_kernel`` of Linears, gate, up and down; ``hidden`` are x, delta, their sum and
    the output @ HBM. One pass over the weights for every ``token_chunk`` of tokens."""
    (x_hbm, delta_hbm, stream_hbm, out_hbm), (*inner, down) = hidden, linears
    (features, tokens), k_tiles = x_hbm.shape, x_hbm.shape[0] // P_MAX
    blocks = token_blocks(features, tokens, length or tokens)
    # a token keeps silu(gate) * up and x, and x times the gain, too
    kept = down.k_tiles + k_tiles * (1 if gain_sb is None else 2)
    for some in grouped(blocks, token_chunk(x_hbm.itemsize * kept)):
        # the first piece of gate and up [128, tiles, H/128, 128] goes before the hidden states
        # [128, H/128, count] of each block, whose first features then are multiplied while the
        # others arrive
        pieces = inner[0].pieces(some[0].count)
        ahead, passed = [load_weight(linear, *pieces[0]) for linear in inner], []
        for block in some:
            x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
            scales = norm_scales(x_sb, norm, spans(block.count, P_MAX))
            x_sb = with_gain(x_sb, gain_sb)
            inputs = [linear.inputs(x_sb, block.start) for linear in inner]
            inner_sb = nl.ndarray((P_MAX, down.k_tiles, block.count), x_hbm.dtype)
            passed.append(InnerTokens(x_sb, scales.along_sb, inputs, inner_sb))
        # silu(gate) * up [128, F/128, count], features on partitions as down contracts them. A PSUM
        # bank at a time: H/128 passes of its tokens for each tile, while DMA loads the next piece
        # and VectorE and ScalarE finish the bank before
        for first, size in pieces:
            loaded = ahead if first == 0 else [load_weight(each, first, size) for each in inner]
            gate, up = (each.piece(sb, first, size) for each, sb in zip(inner, loaded))
            for rows in passed:
                for part in psum_parts(size, rows.x_sb.shape[2]):
                    rows.gated(gate, up, first, part, zero_sb)
        # down [128, H/128, count]: F/128 passes a tile, the last tiles' weights alone at the end
        contexts = [(rows.inner_sb, block) for rows, block in zip(passed, some)]
        store_product(down, contexts, out_hbm)


# --- Kernels, in the order of the model -----------------------------------------------------------
#
# What several of them take, T tokens of B sequences:
#
#   x_hbm, delta_hbm      [H, T]              hidden states, and what is added to them first; the
#                                             first layer's delta is None, and no sum comes out
#   norm                  Norm                None for none
#   qkv_w_hbm, out_w_hbm  kernel weights      of Q, K and V together, and of the output
#   cos_hbm, sin_hbm      [128, T]            of each lane of a tile of heads, the sine signed
#   heads                 HeadShape           of this rank
#   q_hbm, k_hbm,         [128, tiles, T]     queries, new keys and contexts between kernels, as
#   context_hbm                               heads lie in tiles; new values v_hbm in rows
#   keys_hbm, values_hbm  [B, kv heads, L, D] the cache; new ones come out, [T, kv heads * D]
#   bias_hbm              [B, keys]           type of x: 0 for keys that count, MASKED for others
#
# They come one by one: of SDK 2.21 nothing public shows tensors inside of tuples, dicts or classes
# as arguments. Norm and HeadShape hold numbers, constants of a trace. Results @ HBM are made at
# the top level of a kernel, since the compiler refuses those of helpers.


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


def multiply_rows(x_hbm, linear, norm, out_hbm, gain_sb=None):
    """``linear_kernel`` of a Linear into out [T, N] @ HBM."""
    rows_hbm = out_hbm.reshape((x_hbm.shape[1], P_MAX, linear.tiles))
    for block in token_blocks(x_hbm.shape[0], x_hbm.shape[1], 1):
        # hidden states [128, H/128, T] and the scale of their norm: some KiB, before the weights
        x_sb = residual_sum(x_hbm, None, None, block)
        parts = spans(block.count, P_MAX)
        scales, x_sb = norm_scales(x_sb, norm, parts), with_gain(x_sb, gain_sb)
        # W @ x [128, tiles, T] in PSUM, a piece of the weights after another at DMA's pace; VectorE
        # takes it out token by token, scaled, each into a row of its own [128, T, N/128], of many
        # tokens some pieces at a time
        for start, count in parts:
            every, most = linear.pieces(count, last=True), HEAD_BYTES // (count * x_hbm.itemsize)
            for pieces in grouped(every, most, [size for _, size in every]):
                begin, features = pieces[0][0], sum(size for _, size in pieces)
                out_sb = nl.ndarray((P_MAX, count, features), x_hbm.dtype)
                for first, size in pieces:
                    weight_sb = load_weight(linear, first, size)
                    for tile, beside, _, _ in psum_parts(size, count):
                        out_psum = products(weight_sb, tile, beside, x_sb, start, count)
                        own = out_sb[:, :, nl.ds(first - begin + tile, beside)]
                        feature_sb = linear.scales(first + tile, beside)
                        norm_sb = scales.along_sb[:, nl.ds(start, count)]
                        token_rows(own, out_psum, norm_sb, feature_sb)
                # features lie in runs: a partition stores neighbours of a token as one row
                for token in nl.affine_range(count):
                    row_hbm = rows_hbm[block.start + start + token]
                    nl.store(row_hbm[:, nl.ds(begin, features)], out_sb[:, token, :])


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch, bias_hbm=None
):
    """Everything between two all-reduces of a prefill: residual sum, norm, QKV, RoPE, causal flash
    attention of all new tokens (Dao et al. 2022), output projection.

    bias [B, S] hides left padding. -> partial output [H, B * S], rotated keys and values [B * S,
    kv_heads * D], and x + delta. Weights that fit stay in SBUF, others are read for every block of
    tokens.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    hidden, weights = (x_hbm, delta_hbm, stream_hbm, out_hbm), (qkv_w_hbm, out_w_hbm)
    layer = AttentionLayer.of(hidden, norm, heads, weights, (cos_hbm, sin_hbm))
    blocks = token_blocks(features, tokens, tokens // batch)
    attend_prompt(Prompt.of(layer, bias_hbm, None, blocks), keys_hbm, values_hbm)
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_decode_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm,
    bias_hbm, heads,
):  # fmt: skip
    """The same for one new token per sequence: attention over the cache and the token itself.

    bias [B, L], keys in the order of ``decode_runs``. -> partial output [H, B], new keys (rotated)
    and values [B, kv_heads * D], and x + delta.
    """
    (_, batch), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((batch, heads.kv_features), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((batch, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    # hidden states [128, H/128, B], a few KiB, then the cache, before the weights: TensorE turns
    # its keys, 128 a pass, while those stream
    x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, Block(0, batch, 1))
    cache = Cache(keys_hbm, values_hbm, bias_hbm)
    loaded = cached_ahead(cache, heads)
    hidden, weights = (x_hbm, delta_hbm, stream_hbm, out_hbm), (qkv_w_hbm, out_w_hbm)
    layer = AttentionLayer.of(hidden, norm, heads, weights, (cos_hbm, sin_hbm))
    decode_step(layer, x_sb, cache, loaded, new_keys_hbm, new_values_hbm)
    results = out_hbm, new_keys_hbm, new_values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def swiglu_mlp_kernel(x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, length=None):
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Kernel weights of gate and up [F, H] and of down [H, F], ``length`` tokens of a sequence if
    there are several -> partial output [H, T], and x + delta.
    """
    shape, dtype = x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    k_tiles = shape[0] // P_MAX
    gate, up = (Linear(weight_hbm, k_tiles) for weight_hbm in (gate_hbm, up_hbm))
    linears = gate, up, Linear(down_hbm, gate.tiles)
    gated_mlp((x_hbm, delta_hbm, stream_hbm, out_hbm), norm, linears, length, zero_sb)
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood.
    """

    def __init__(self, **kwargs: Any) -> None:
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        super().__init__(**kwargs)


# Settings of NxDI that llama_extended.py, beside this file, adds to it.
ELSEWHERE = (
    "quantized", "kv_cache_quant", "lora_config", "is_block_kv_layout", "is_chunked_prefill",
    "flash_decoding_enabled", "speculation_length", "is_medusa", "enable_eagle_speculation",
    "enable_fused_speculation",
)  # fmt: skip


class LlamaInferenceConfig(InferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        if option(self, "k_cache_transposed"):
            raise ValueError(
                "k_cache_transposed changes the data that the layers of this file get, expected "
                "False; leave it out."
            )
        # Left padding: NxDI 0.3 and later read the wrong row. A parallel vocabulary: releases
        # differ in who sums the embedding.
        neuron_config = self.neuron_config
        left = neuron_config.padding_side == "left"
        if neuron_config.sequence_parallel_enabled and (left or neuron_config.vocab_parallel):
            raise ValueError(
                "sequence_parallel_enabled takes prompts padded on the right and a whole "
                f"vocabulary, got padding_side {neuron_config.padding_side!r} and vocab_parallel "
                f"{neuron_config.vocab_parallel}; leave these out."
            )
        self.check_covered()

    def check_covered(self) -> None:
        """ValueError for what this file alone does not have."""
        asked = [name for name in ELSEWHERE if option(self, name)]
        asked += ["cp_degree"] if option(self, "cp_degree", 1) > 1 else []
        kind = getattr(self, "model_type", "llama")
        if asked or kind != "llama" or getattr(self, "attention_bias", False):
            raise ValueError(
                f"llama.py alone runs Llamas in float, a token a step, got a {kind} with "
                f"{', '.join(asked) or 'biases or windows'}; give llama_extended.py instead."
            )

    def lacking(self) -> List[Tuple[bool, str]]:
        """(whether, what) the kernels of this file do not cover."""
        sizes, neuron_config = Sizes.of(self), self.neuron_config
        heads, batch, keys = sizes.of_rank, neuron_config.max_batch_size, neuron_config.seq_len
        of_cache = decode_bytes(keys, heads, neuron_config.torch_dtype.itemsize)
        return [
            (sizes.head_dim not in (64, 128), f"head_dim {sizes.head_dim}"),
            (heads.q_heads > P_MAX, f"{heads.q_heads} query heads per rank"),
            (batch > P_MAX, f"a batch of {batch}"),
            (keys > DECODE_KEYS or of_cache > CACHES_BYTES, f"a cache of {keys} keys"),
            (bool(getattr(self, "mlp_bias", False)), "mlp_bias"),
            (self.hidden_act != "silu", f"hidden_act {self.hidden_act}"),
        ]

    def get_required_attributes(self) -> List[str]:
        return [
            "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
            "pad_token_id", "vocab_size", "max_position_embeddings", "rope_theta",
            "rms_norm_eps", "hidden_act",
        ]  # fmt: skip

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


def check_kernels(config: LlamaInferenceConfig) -> None:
    """ValueError for a model that the kernels do not cover."""
    for wrong, what in config.lacking():
        if wrong:
            raise ValueError(
                f"The kernels do not cover {what}, expected a Llama with SiLU, biases on queries, "
                "keys and values only, heads of 256 or an even number up to 128 and a batch "
                "of at most 128; run without --enable-nki."
            )


class Sizes(NamedTuple):
    """Sizes of all ranks that modules and checkpoint conversion share.

    Each KV head is replicated as often as the degree holds their number, and a replica serves its
    part of the head's queries, as in NxDI. What the degree still does not divide is padded with
    zero heads (and zero query heads), which changes no result: a zero head's output meets zero
    columns of the output weight.
    """

    tp: int
    head_dim: int
    replicas: int
    group: int  # query heads per replica of a KV head
    kv_heads: int  # replicas and zero heads included
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: InferenceConfig, ranks: Optional[int] = None) -> Sizes:
        """Of as many ranks as split the heads, all by default."""
        tp = ranks or config.neuron_config.tp_degree
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        for name in ("intermediate_size", "vocab_size"):
            size = getattr(config, name)
            if size % tp:
                raise ValueError(
                    f"{name} {size} is not divisible by the tensor-parallel degree {tp}; choose a "
                    "degree that divides it."
                )
        replicas = max(1, tp // kv)
        return cls(
            tp=tp,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            replicas=replicas,
            group=math.ceil(heads // kv / replicas),
            kv_heads=math.ceil(kv * replicas / tp) * tp,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
        )

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def of_rank(self) -> HeadShape:
        return HeadShape(self.q_heads // self.tp, self.kv_heads // self.tp, self.head_dim)


def option(config: InferenceConfig, name: str, default: Any = False) -> Any:
    """A setting of NxDI; one that a release does not know yet has its default."""
    return getattr(config.neuron_config, name, default)


def is_nki_enabled(config: InferenceConfig) -> bool:
    """Whether kernels run."""
    return bool(option(config, "nki_enabled"))


# --- Modules --------------------------------------------------------------------------------------
#
# Classes that a module makes others of are its attributes, and what another model may do in another
# way is a method: llama_extended.py says which.


class Columns(NamedTuple):
    """Hidden states between kernels: transposed, and the last partial result not yet added.

    ``stream`` [H, T], ``delta`` [H, T] or None; ``shape`` is (B, S, H); ``chosen`` is for
    extensions, None here. Layers of the base class hand it on as it is; it becomes [B, S, H] again
    behind the last one (SumOfColumns).
    """

    stream: torch.Tensor
    delta: Optional[torch.Tensor]
    shape: Tuple[int, ...]
    chosen: Optional[torch.Tensor] = None

    @classmethod
    def of(cls, hidden: Any, parallel: bool = False) -> Columns:
        """The embedding [B, S, H], or what the layer before returned.

        A sharded sequence is gathered once, for all layers: the norm of all rows hides behind the
        products, and an all-reduce moves what a reduce-scatter and a gather would.
        """
        if isinstance(hidden, cls):
            return hidden
        whole = gather_from_sequence_parallel_region(hidden, 1) if parallel else hidden
        rows = whole.reshape(-1, whole.shape[-1])
        return cls(in_blocks(rows, whole.shape[1]), None, tuple(whole.shape))

    def rows(self) -> torch.Tensor:
        """[B, S, H]: the sum in the layout of layers in PyTorch."""
        total = self.stream if self.delta is None else self.stream + self.delta
        return from_blocks(total, self.shape[1])[:, : self.shape[-1]].reshape(self.shape)

    def after(self, partial: torch.Tensor, stream: Sequence[torch.Tensor]) -> Columns:
        """Behind a kernel: its result, to be reduced, and the sum that it stored, if any."""
        delta = reduce_from_tensor_model_parallel_region(partial)
        return self._replace(stream=stream[0] if stream else self.stream, delta=delta)


class SumOfColumns(nn.Module):
    """In the place of the final norm, which the head does: Columns -> [B, S or S / tp, H]."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.parallel = option(config, "sequence_parallel_enabled")

    def forward(self, columns: Columns) -> torch.Tensor:
        if not self.parallel:
            return columns.rows()
        # equal on all ranks: the maximum, of which each keeps its rows, as NxDI scatters
        return _reduce_scatter_along_dim(columns.rows(), 1, xm.REDUCE_MAX)


class NeuronLlamaRMSNorm(nn.Module):
    """RMSNorm over the last axis; fp32 inside, one rounding to the input's type."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.to(torch.float32)
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * rstd * self.weight.to(torch.float32)).to(hidden.dtype)


class KernelRows(ColumnParallelLinear):
    """[rows, N] per rank: what a kernel reads as it lies.

    It is a ColumnParallelLinear so that the SDK's loader cuts it for the ranks: the full tensor is
    the ranks' one after another, whichever way the product itself is parallel.
    """

    def __init__(
        self, n: int, tp_degree: int, dtype: torch.dtype, rows: int = 1, **group: Any
    ) -> None:
        size = rows * tp_degree
        super().__init__(n, size, bias=False, gather_output=False, dtype=dtype, **group)
        self.tp_degree = tp_degree


class KernelWeight(KernelRows):
    """A weight in kernel layout, [128, N/128 * K/128 * 128] per rank."""

    def __init__(self, n: int, k: int, tp_degree: int, dtype: torch.dtype, **group: Any) -> None:
        row = whole_tiles(n) * whole_tiles(k) * P_MAX
        super().__init__(row, tp_degree, dtype, P_MAX, **group)


def column_linear(
    config: InferenceConfig, k: int, n: int, bias: bool = False, **group: Any
) -> nn.Module:
    """Plain column-parallel layer in the model's type; its output stays sharded."""
    dtype = config.neuron_config.torch_dtype
    return ColumnParallelLinear(k, n, bias=bias, gather_output=False, dtype=dtype, **group)


def row_linear(
    config: InferenceConfig, k: int, n: int, bias: bool = False, **group: Any
) -> nn.Module:
    """Plain row-parallel layer: sharded input, output summed over the ranks."""
    dtype, parallel = config.neuron_config.torch_dtype, option(config, "sequence_parallel_enabled")
    return RowParallelLinear(
        k, n, bias=bias, input_is_parallel=True, dtype=dtype,
        sequence_parallel_enabled=parallel, sequence_dimension=1 if parallel else None,
        reduce_dtype=option(config, "rpl_reduce_dtype") or dtype,
        **group,
    )  # fmt: skip


class NeuronLlamaMLP(nn.Module):
    """SwiGLU MLP: one kernel per rank and an all-reduce, or three parallel layers."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        sizes, hidden = Sizes.of(config), config.hidden_size
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        bias = bool(getattr(config, "mlp_bias", False))
        self.nki_enabled = is_nki_enabled(config)
        self.parallel = option(config, "sequence_parallel_enabled")
        if self.nki_enabled:
            inner = sizes.intermediate // tp
            self.gate_proj = KernelWeight(inner, hidden, tp, dtype)
            self.up_proj = KernelWeight(inner, hidden, tp, dtype)
            self.down_proj = KernelWeight(hidden, inner, tp, dtype)
        else:
            self.act_fn = ACT2FN[config.hidden_act]
            self.gate_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.up_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.down_proj = row_linear(config, config.intermediate_size, hidden, bias)

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Any:
        """hidden + MLP(norm(hidden)): [B, S or S / tp, H], or Columns with kernels; ``given`` as to
        the decoder layer."""
        if not self.nki_enabled:
            normed = norm(hidden)
            if self.parallel:
                normed = gather_from_sequence_parallel_region(normed, 1)
            gate, up = (self.product(p, normed, given) for p in (self.gate_proj, self.up_proj))
            return hidden + self.product(self.down_proj, self.act_fn(gate) * up, given)
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        partial, *stream = self.multiply(hidden, norm, weights)
        return hidden.after(partial, stream)

    def product(self, layer: nn.Module, x: torch.Tensor, given: Dict[str, Any]) -> torch.Tensor:
        """What one of the parallel layers makes of x."""
        return layer(x)

    def multiply(self, hidden, norm, weights):
        """The kernel's partial output and, where there is a delta, the sum."""
        results = swiglu_mlp_kernel(hidden.stream, hidden.delta, norm, *weights, hidden.shape[1])
        return (results,) if hidden.delta is None else results


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def in_lanes(of_head: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of one head [D, ..] -> those of the lanes of a tile of heads [128, ..]."""
    depth = depth_of(head_dim)
    of_heads = [pad_to(of_head, 0, depth)] * max(1, P_MAX // depth)
    return pad_tiles(torch.cat(of_heads), 0)[:P_MAX]  # of 256 the halves have the same frequencies


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of the rotary position embedding, half-rotation convention (Su et al. 2021).

    Frequencies are a Python list: the loader casts every buffer to the model's type, which would
    cost bf16 models their positions. Scaling follows the Hugging Face config; "dynamic" begins
    beyond the positions that the model was trained for, which no cache here reaches.
    """

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.head_dim = Sizes.of(config).head_dim
        self.inv_freq, self.amplitude = rope_frequencies(config, self.head_dim)
        self.nki_enabled = is_nki_enabled(config)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """position_ids [B, S] -> cos, sin [B, S, D / 2] in ``dtype``, angles in fp32.

        For the kernels [128, B * S], one row per lane of a tile of heads: the second half of each
        head takes its frequencies again, with the negative sine.
        """
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=position_ids.device)
        positions = position_ids.to(torch.float32)
        if self.nki_enabled:
            lanes = in_lanes(torch.cat((inv_freq, -inv_freq)), self.head_dim)
            angles = lanes[:, None] * positions.reshape(1, -1)
        else:
            angles = positions[:, :, None] * inv_freq
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return cos.to(dtype), sin.to(dtype)


def rope_frequencies(config: InferenceConfig, dim: int) -> Tuple[List[float], float]:
    """Frequencies of ``dim`` features, and what cos and sin are multiplied by, as ``rope_scaling``
    says: those of transformers, in fp32 as its models have them."""
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
        rope_theta=config.rope_theta, rope_scaling=scaling, max_position_embeddings=positions,
        head_dim=dim, hidden_size=dim, num_attention_heads=1,
    )  # fmt: skip
    with torch.device("cpu"):  # modules may be made on the meta device
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](read, torch.device("cpu"))
    return frequencies.tolist(), amplitude


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, heads, S, D] with cos, sin [B, S, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class NeuronLlamaAttention(nn.Module):
    """Grouped-query attention; returns the new tokens' K and V for the base class's cache."""

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        """``ranks`` that split the heads, and their group as layers take it; None: all."""
        super().__init__()
        self.config, self.sizes = config, Sizes.of(config, ranks)
        self.nki_enabled = is_nki_enabled(config)
        self.parallel = option(config, "sequence_parallel_enabled")
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if self.nki_enabled:
            self.make_kernel_weights(group)
        else:
            self.make_layers(group)

    def make_kernel_weights(self, group: Dict[str, Any]) -> None:
        hidden, rank = self.config.hidden_size, self.sizes.of_rank
        shared = self.sizes.tp, self.config.neuron_config.torch_dtype
        tiles = rank.qk_tiles + whole_tiles(rank.kv_features)
        self.qkv_proj = KernelWeight(tiles * P_MAX, hidden, *shared, **group)
        self.o_proj = KernelWeight(hidden, rank.q_tiles * P_MAX, *shared, **group)

    def make_layers(
        self, group: Dict[str, Any], biases: Tuple[bool, bool] = (False, False)
    ) -> None:
        """``biases``: whether Q, K and V have them, and the output."""
        config, hidden, dim = self.config, self.config.hidden_size, self.sizes.head_dim
        q_size, kv_size = self.sizes.q_heads * dim, self.sizes.kv_heads * dim
        self.q_proj = column_linear(config, hidden, q_size, biases[0], **group)
        self.k_proj = column_linear(config, hidden, kv_size, biases[0], **group)
        self.v_proj = column_linear(config, hidden, kv_size, biases[0], **group)
        self.o_proj = row_linear(config, q_size, hidden, biases[1], **group)

    def heads(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[B * S, n * D] (or [B, S, n * D]) -> [B, n, S, D]."""
        dim = self.sizes.head_dim
        return rows.reshape(batch, -1, rows.shape[-1] // dim, dim).transpose(1, 2)

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """hidden + attention(norm(hidden)), [B, S, H] or Columns, then (K, V), cos and sin.

        ``given`` by the base class: position_ids [B, S]; attention_mask and active_mask, True where
        keys count; past_key_value, two [B, kv_rank, L, D], and cos_cache and sin_cache of the layer
        before. All but the first two may be None.
        """
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        # a comparison of both paths hands tables of the kernels' layout, [128, B * S], to the other
        if cos is None or (cos.dim() == 2) != self.nki_enabled:
            dtype = hidden.stream.dtype if self.nki_enabled else hidden.dtype
            cos, sin = self.rotary_emb(self.places(given), dtype)
        attend = self.attend_with_kernels if self.nki_enabled else self.attend_with_torch
        past, *masks = self.visible(given)
        output, present = attend(hidden, norm, past, *masks, (cos, sin), given)
        return output, present, cos, sin

    def places(self, given: Dict[str, Any]) -> torch.Tensor:
        """Positions [B, S] of the new tokens, for their rotation."""
        return given["position_ids"]

    def visible(self, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """The cache and the masks of its keys and of new ones among themselves."""
        return given.get("past_key_value"), given["attention_mask"], given.get("active_mask")

    def attend_with_kernels(self, hidden, norm, past, mask, active_mask, tables, given):
        """Residual sum, norm, QKV, RoPE, attention and output projection, then an all-reduce."""
        results = self.kernel_results(hidden, norm, past, mask, active_mask, tables)
        (partial, k, v, *stream), batch = results, hidden.shape[0]
        return hidden.after(partial, stream), (self.heads(k, batch), self.heads(v, batch))

    def kernel_results(self, hidden, norm, past, mask, active_mask, tables) -> Tuple[Any, ...]:
        """Those of the kernel for a prompt, or for a token over the cache ``past``."""
        batch, dtype, rank = hidden.shape[0], hidden.stream.dtype, self.sizes.of_rank
        weights = self.qkv_proj.weight, self.o_proj.weight
        inputs = hidden.stream, hidden.delta, norm, *weights, *tables
        if past is None:
            padded = option(self.config, "padding_side") == "left"
            bias = _mask_bias(mask[:, 0, -1], dtype) if padded else None
            return attention_prefill_kernel(*inputs, rank, batch, bias)
        bias = _mask_bias(mask[:, 0, 0], dtype)
        cache = cache_in_runs(*past, bias, P_MAX // past[0].shape[1])
        return attention_decode_kernel(*inputs, *cache, rank)

    def attend_with_torch(self, hidden, norm, past, mask, active_mask, tables, given):
        """The same in PyTorch, rounding where the device's reference rounds."""
        normed = norm(hidden)
        if self.parallel:
            normed = gather_from_sequence_parallel_region(normed, 1)
        q, k, v = self.project(normed, tables, given)
        seen = [(k, v, mask)]
        if past is not None:
            if active_mask is None:
                active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
            # a comparison of both paths hands the kernels' cache, which may be fp8, to this one
            seen = [(*(x.to(q.dtype) for x in past), mask), (k, v, active_mask)]
        merged = self.attend(q, seen).transpose(1, 2).reshape(*normed.shape[:2], -1)
        return hidden + self.product(self.o_proj, merged, given), (k, v)

    product = NeuronLlamaMLP.product

    def project(self, normed, tables, given) -> Tuple[torch.Tensor, ...]:
        """[B, S, H] -> queries, keys, both rotated, and values [B, heads, S, D]."""
        q, k, v = (
            self.heads(self.product(layer, normed, given), len(normed))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *self.rotated(q, k, tables), v

    def rotated(self, q, k, tables) -> Tuple[torch.Tensor, ...]:
        """Queries and keys [B, heads, S, D] at their places."""
        return rotate(q, *tables), rotate(k, *tables)

    def attend(self, q: torch.Tensor, seen: List[Tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """One softmax over all (keys, values, mask) that are ``seen``: the cache and new tokens.

        Keys and values [B, kv_rank, keys, D], each KV head for its group of queries, mask bool
        [B, 1, S, keys]. Products are rounded to the model's type, scores are fp32.
        """
        group, root = q.shape[1] // seen[0][0].shape[1], math.sqrt(self.sizes.head_dim)
        scores = []
        for keys, _, mask in seen:
            product = torch.matmul(q, keys.repeat_interleave(group, dim=1).transpose(2, 3)) / root
            hidden = torch.finfo(product.dtype).min
            scores.append(torch.where(mask, product, hidden).to(torch.float32))
        weights = self.softmax(torch.cat(scores, dim=-1)).to(q.dtype)
        parts = weights.split([part.shape[-1] for part in scores], dim=-1)
        context, *more = (
            torch.matmul(part, values.repeat_interleave(group, dim=1))
            for part, (_, values, _) in zip(parts, seen)
        )
        return context + more[0] if more else context

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Of scores [B, heads, S, keys] over all keys."""
        return torch.softmax(scores, dim=-1)


def _mask_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [B, keys] -> bias for scores in ``dtype``: 0 where a key counts, else MASKED."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, masked(dtype))


def cache_in_runs(
    keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, most: int = P_MAX
) -> Tuple[torch.Tensor, ...]:
    """Cached keys and values [B, kv_heads, L, D] and bias [B, n], in the order of ``cache_runs``.

    The bias is permuted; keys behind the first n are not read. An n that would leave over half of
    the partitions idle is padded, and the cache with it where it has no more, at the cost of a
    copy; multiples of 128, and numbers up to 128, are not.
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

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.nki_enabled = config, is_nki_enabled(config)
        self.parallel = option(config, "sequence_parallel_enabled")
        if self.nki_enabled:
            check_kernels(config)
        self.self_attn = self.attention_cls(config)
        self.mlp = self.mlp_cls(config)
        # the kernels find the gains in their weights
        norm, size = Norm if self.nki_enabled else NeuronLlamaRMSNorm, config.hidden_size
        self.input_layernorm = norm(size, config.rms_norm_eps)
        self.post_attention_layernorm = norm(size, config.rms_norm_eps)

    def forward(self, hidden_states: Any, **given: Any) -> Tuple[Any, ...]:
        """Hidden states, (K, V), cos, sin; a fifth item where the base passes ``residual``.

        NxDI 0.3 and later hand a ``residual`` keyword to every layer and read five results; before
        that they read exactly four.
        """
        hidden = self.received(hidden_states, given)
        hidden, *results = self.attention(given)(hidden, self.input_layernorm, given)
        hidden = self.mlp(hidden, self.post_attention_layernorm, given)
        return hidden, *results, *([None] if "residual" in given else [])

    def received(self, hidden: Any, given: Dict[str, Any]) -> Any:
        """What the layer takes: [B, S, H], or Columns with kernels."""
        return Columns.of(hidden, self.parallel) if self.nki_enabled else hidden

    def attention(self, given: Dict[str, Any]) -> nn.Module:
        """The attention that a call with these arguments takes."""
        return self.self_attn


class NeuronLlamaHead(KernelWeight):
    """Final norm and LM head in one kernel; logits are gathered unless the device samples.

    The base class hands over just the last token of each sequence, so no other row is normalised.
    """

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        sizes, dtype = Sizes.of(config), config.neuron_config.torch_dtype
        vocabulary = sizes.vocabulary // sizes.tp
        super().__init__(vocabulary, config.hidden_size, sizes.tp, dtype)
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


class NeuronLlamaModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    layer_cls: Type[nn.Module] = NeuronLlamaDecoderLayer
    head_cls: Type[nn.Module] = NeuronLlamaHead

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
        self.lm_head = self.output_head(config)
        self.norm = self.final_norm(config)
        self.layers = nn.ModuleList(self.layer_cls(config) for _ in range(config.num_hidden_layers))

    def output_head(self, config: InferenceConfig) -> nn.Module:
        """Hidden states -> logits: a kernel, or a plain layer behind its norm."""
        gather = not self.on_device_sampling
        if is_nki_enabled(config):
            return self.head_cls(config, gather)
        return ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=gather,
            dtype=config.neuron_config.torch_dtype, pad=True,
        )  # fmt: skip

    def final_norm(self, config: InferenceConfig) -> nn.Module:
        """What stands behind the last layer; the head's kernel normalises."""
        if is_nki_enabled(config):
            return SumOfColumns(config)
        return NeuronLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------

StateDict = Dict[str, torch.Tensor]
OfRanks = Sequence[torch.Tensor]  # what each tensor-parallel rank has of something, in their order


def spread_queries(weight: torch.Tensor, kv: int, sizes: Sizes, dim: int) -> torch.Tensor:
    """Query heads along ``dim`` in the order of the replicas of their ``kv`` KV heads."""
    per_head = sizes.replicas * sizes.group * sizes.head_dim
    padded = [pad_to(group, dim, per_head) for group in weight.chunk(kv, dim=dim)]
    return pad_to(torch.cat(padded, dim=dim), dim, sizes.q_heads * sizes.head_dim)


def spread_kv(weight: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Rows of KV heads, each head once per replica."""
    heads = weight.unflatten(0, (-1, sizes.head_dim))
    replicated = heads.repeat_interleave(sizes.replicas, dim=0).flatten(0, 1)
    return pad_to(replicated, 0, sizes.kv_heads * sizes.head_dim)


def spread_heads(
    state: StateDict, attention: str, kv: int, sizes: Sizes,
    kinds: Sequence[Sequence[str]] = (("weight",), ("weight",)),
) -> None:  # fmt: skip
    """Tensors of one layer's attention for replicated and padded heads: of Q, K and V those
    ``kinds`` that have a row for each feature of a head, of the output those with a column."""
    for name in ATTENTION_TARGETS:
        dim = 1 if name == "o_proj" else 0
        for key in (f"{attention}{name}.{kind}" for kind in kinds[dim]):
            if key not in state or state[key].numel() == 1:  # one number for all rows
                continue
            if name in ("k_proj", "v_proj"):
                state[key] = spread_kv(state[key], sizes)
            else:
                state[key] = spread_queries(state[key], kv, sizes, dim)


def layouts_of_ranks(shares: Iterable[torch.Tensor]) -> torch.Tensor:
    """The kernel layouts of every rank's share [N, K], one after another."""
    return torch.cat([kernel_layout(share) for share in shares])


def times_gain(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A weight [N, H] behind a norm times the norm's gain [H]: one rounding of each element, where
    PyTorch rounds each normed feature."""
    return (weight.to(torch.float32) * gain.to(torch.float32)).to(weight.dtype)


class KernelProjections(NamedTuple):
    """Projections of one kernel in a checkpoint, and how ``tp`` ranks share them.

    All but the ``output`` contract hidden states, behind a norm with ``gain``, and that one makes
    hidden states; all ranks have these, in runs. What else a projection reads or makes is cut:
    ``cuts``, by name and in the kernel's order, give each rank its rows of such features, ordered
    as its kernel has them.
    """

    state: StateDict
    cuts: Dict[str, Callable[[torch.Tensor], OfRanks]]
    output: Optional[str]
    gain: torch.Tensor
    tp: int

    def output_rows(self, name: str, rows: torch.Tensor) -> OfRanks:
        """Rows of what a projection makes, [N, ..]."""
        return [in_runs(rows, 0)] * self.tp if name == self.output else self.cuts[name](rows)

    def input_columns(self, name: str, columns: torch.Tensor) -> OfRanks:
        """Columns of what it contracts, [.., K]."""
        if name != self.output:
            return [in_runs(columns, 1)] * self.tp
        return [rows.t() for rows in self.cuts[name](columns.t())]

    def converted(self, with_gain: bool = True) -> List[OfRanks]:
        """Each projection's weights [N, K], out of the checkpoint, those behind the norm times its
        gain, unless that stays apart."""
        found = []
        for name in self.cuts:
            weight = self.state.pop(f"{name}.weight")
            if name == self.output:
                found.append([in_runs(share, 0) for share in self.input_columns(name, weight)])
                continue
            weight = times_gain(weight, self.gain) if with_gain else weight
            found.append([in_runs(share, 1) for share in self.output_rows(name, weight)])
        return found


def heads_in_tiles(sizes: Sizes, group: int) -> Callable[[torch.Tensor], OfRanks]:
    """A cut of rows of heads, ``group`` for each KV head, which then lie in a rank's tiles."""
    return lambda rows: [sizes.of_rank.order(x, group) for x in rows.chunk(sizes.tp)]


def attention_for_kernels(
    state: StateDict, attention: str, gain: torch.Tensor, sizes: Sizes,
    kind: Type[KernelProjections] = KernelProjections,
) -> None:  # fmt: skip
    """What the attention kernels read of one layer, behind a norm with this ``gain``."""
    names = [f"{attention}{name}" for name in ATTENTION_TARGETS]
    queries, keys = (heads_in_tiles(sizes, group) for group in (sizes.group, 1))
    cuts = dict(zip(names, (queries, keys, lambda rows: rows.chunk(sizes.tp), queries)))
    *qkv, out = kind(state, cuts, names[-1], gain, sizes.tp).converted()
    together = (torch.cat(share) for share in zip(*qkv))
    state[f"{attention}qkv_proj.weight"] = layouts_of_ranks(together)
    state[f"{names[-1]}.weight"] = layouts_of_ranks(out)


def mlp_for_kernels(
    state: StateDict, mlp: str, gain: torch.Tensor, tp: int,
    kind: Type[KernelProjections] = KernelProjections,
) -> None:  # fmt: skip
    """What the MLP's kernel reads of one layer, behind a norm with this ``gain``."""
    names = [f"{mlp}{name}" for name in MLP_TARGETS]
    cuts = dict.fromkeys(names, lambda rows: rows.chunk(tp))
    shares = kind(state, cuts, names[-1], gain, tp).converted()
    for name, of_ranks in zip(names, shares):
        state[f"{name}.weight"] = layouts_of_ranks(of_ranks)


def head_for_kernels(
    state: StateDict, head: str, gain: torch.Tensor, tp: int,
    kind: Type[KernelProjections] = KernelProjections,
) -> None:  # fmt: skip
    """What the kernel of a head reads, behind a norm with this ``gain``."""
    cuts = {head: lambda rows: [in_runs(share, 0) for share in rows.chunk(tp)]}
    (shares,) = kind(state, cuts, None, gain, tp).converted()
    state[f"{head}.weight"] = layouts_of_ranks(shares)


def add_ranks(state: StateDict, config: InferenceConfig) -> None:
    """Numbers of the ranks, of which each gets its own."""
    ranks = torch.arange(config.neuron_config.tp_degree, dtype=torch.int32)
    state["rank_util.rank"] = ranks
    if config.neuron_config.vocab_parallel:
        state["embed_tokens.rank_util.rank"] = ranks.clone()


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's.

        Runs before the SDK ties the head to the embedding, so a tied head is made here: for the
        kernels it has its own layout.
        """
        state, sizes, nki_enabled = dict(state_dict), Sizes.of(config), is_nki_enabled(config)
        if nki_enabled and config.neuron_config.torch_dtype is torch.float32:
            # a norm's gain times a weight in bf16 has more digits than that
            state = {name: tensor.float() for name, tensor in state.items()}
        for layer in (f"layers.{number}." for number in range(config.num_hidden_layers)):
            attention = f"{layer}self_attn."
            spread_heads(state, attention, config.num_key_value_heads, sizes)
            if nki_enabled:
                gain = state.pop(f"{layer}input_layernorm.weight")
                attention_for_kernels(state, attention, gain, sizes)
                gain = state.pop(f"{layer}post_attention_layernorm.weight")
                mlp_for_kernels(state, f"{layer}mlp.", gain, sizes.tp)
        if nki_enabled:
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
