"""Llama for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

One file to upload: it imports numpy, torch, transformers and the Neuron SDK, nothing else. From top
to bottom: limits of the core and choices, layouts, sizes known while tracing, tile helpers, the
parts of attention, kernels in model order, configuration, modules, and how a Hugging Face
checkpoint becomes the weights of this model. To learn the language, read in this order: "Layouts";
``linear_kernel`` and ``swiglu_mlp_kernel`` with what they call; ``attention_decode_kernel``; then
"Attention of many queries", and of the others what differs.

What calls what, phase by phase:

    linear_kernel                residual_sum, norm_scales, load_weight, products, token_rows
    swiglu_mlp_kernel            residual_sum, norm_scales, InnerTokens.gated, store_product
    attention_prefill_kernel     Prompt.of, then attend_side_by_side or attend_one_by_one
    attention_decode_kernel      residual_sum, projection, project_qkv, store_product; between them
                                 cached_sequences and attend_cached, or, of a cache of blocks,
                                 named_sequences and attend_named
    attention_chunk_kernel       project_blocks, Chunk.groups, attend_groups, store_product
    attention_projection_kernel  project_blocks
    attention_share_kernel       new_keys, cache_blocks, attend_groups
    attention_output_kernel      store_product

    TokenBlock.of                residual_sum, projection, qkv_tiles
    TokenBlock.run               project_tile, TokenBlock.store_output
    project_qkv                  project_tile
    project_tile                 rotated_span for queries and keys, value_tile
    attend_groups                attend_few for up to 128 queries, MaximaPass and attend for more
    attend_side_by_side          Prompt.start, Prefill.begin, attend_block, TokenBlock.store_keys
    attend_one_by_one            the same: Prompt.start, Prefill.begin, attend_block
    attend_block                 MaximaPass, attend beside the work of other blocks
    attend                       MaximaPass.run and WeightsPass.run, which take turns
    MaximaPass.run               MaximaPass.score_rows, MaximaPass.mark
    WeightsPass.run              WeightsPass.add_weighted, WeightsPass.add_turned, bank_contexts

    convert_layer                spread_heads, then attention_for_kernels and mlp_for_kernels
    attention_for_kernels        KernelProjections.converted, layouts_of_ranks

Axis letters used throughout:

    T  tokens of one call (batch times sequence)     H  hidden size, padded to whole tiles of 128
    K  contraction size of a product                 N  output features of a product
    P  partitions of a tile (at most 128)            F  intermediate size of the MLP
    D  head dimension                                B, S  batch, sequence length
    L  keys of a cache                               n  new tokens of a sequence over a cache
    R  rows of all adapters' ranks together

Words that mean one thing here:

    tile     up to 128 features or tokens on partitions, or what an instruction makes @ SBUF, PSUM
    piece    tiles of a weight that are loaded at once
    run      neighbours in HBM that one partition holds
    block    tokens that lie together in hidden states; of a cache: tokens that a table names
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

import json
import math
import re
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
)

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
)
from neuronx_distributed.parallel_layers.mappings import (
    _reduce_scatter_along_dim,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    NeuronBaseForCausalLM,
    NeuronBaseModel,
)
from neuronx_distributed_inference.modules.checkpoint import load_file
from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group
from neuronx_distributed_inference.modules.lora_serving.lora_module import is_lora_module
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
LAST_STEP_BYTES = 1536  # between its last pieces where they are quantised
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
EVEN_TURNS, SOFTMAX_TURNS = "gs", "gsgssgss"  # at integers: as many, and beside a softmax
DECODE_KEYS = 2048  # cached keys up to which a decode step has them all in SBUF at once
MASKED = -1.5e38  # added to scores that do not count: exp gives 0, and twice it is finite
MASKED_FP16 = -3.0e4  # the same for float16, which ends at 65504


ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # what adapters may change
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
IDLE_TARGET = "idle_adapter"  # what NxDI finds to change where the kernels' adapters are ours

QUANTISED_DTYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn}  # NxDI's names


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
#
# Quantised weights stay int8 or fp8 in HBM, and their products are scaled. All scales of a kernel
# are one tensor [128, sum of columns] in fp32, in the kernel's order of use: for features in PSUM a
# column a tile, for those of V, in rows, their own on each partition. A norm's gain, which no
# longer is in the weights, has the columns of a hidden state.


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


def chunk_tokens(features, heads, itemsize, quantised=False):
    """The same for attention, where x, Q and K of each token stay, with room for another Q, and x
    times the norm's gain where weights are quantised; behind them Q, K, V and new keys."""
    tiles = features // P_MAX * (2 if quantised else 1)
    projected = itemsize * (tiles + 2 * heads.q_tiles + heads.stacks)
    values = itemsize * heads.kv_heads * heads.head_dim + key_bytes(P_MAX, heads, MARKS, itemsize)
    own = itemsize * (heads.q_tiles + heads.stacks) + math.ceil(values / P_MAX)
    return token_chunk(max(projected, own))


def weight_pieces(tiles, k_tiles, tokens, last=False, itemsize=2, row_bytes=None):
    """(first, count) of the tiles of output features that are loaded at once, of many tokens in
    rows of at most ``row_bytes``, PIECE_BYTES if none are given.

    Many tokens begin with half a piece: their hidden states arrive behind it. The ``last`` weights
    of a kernel end with LAST_PIECE_BYTES, and those before with at most half of the rest: TensorE
    needs a fifth of DMA's time for few tokens, so that little is left to multiply at the end. Of a
    quantised weight (``itemsize`` 1), whose integers stand in bf16 beside their bytes, a sixth is
    the most for few tokens: they take DMA half as long, and what follows waits for a whole piece.
    Its last pieces shrink by LAST_STEP_BYTES each, as DMA may outrun what converts it by no more.
    """
    few, tile_bytes = tokens <= FEW_TOKENS, (3 if itemsize == 1 else itemsize) * k_tiles * P_MAX
    most = max(1, (LONG_PIECE_BYTES if few else row_bytes or PIECE_BYTES) // tile_bytes)
    tail = max(1, LAST_PIECE_BYTES // tile_bytes)
    if itemsize == 1 and few:
        most = min(most, math.ceil(tiles / 6))
        return (
            shrinking(tiles, most, LAST_STEP_BYTES / (k_tiles * P_MAX))
            if last
            else spans(tiles, most)
        )
    if last and tiles > tail:
        rest = tiles - tail
        return [*spans(rest, min(most, math.ceil(rest / 2))), (rest, tail)]
    if few:
        return spans(tiles, most)
    first = min(tiles, max(1, most // 2))
    return [(0, first), *((first + at, size) for at, size in spans(tiles - first, most))]


def shrinking(length, most, step):
    """(start, size) of pieces that cover ``length``, the last ``step`` long (one at least), each
    before it longer by a step, up to ``most``."""
    found, end = [], length
    while end:
        size = max(1, min(most, end, int(step * (len(found) + 1))))
        end -= size
        found.insert(0, (end, size))
    return found


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
    """A linear layer of a kernel: its weight in kernel layout @ HBM, of ``k_tiles`` tiles of K;
    where there are some, the scales of a quantised one [128, N/128] fp32 @ SBUF and its Adapters.
    """

    weight_hbm: Any
    k_tiles: int
    scale_sb: Any = None
    adapters: Any = None

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

    def piece(self, weight_sb, first, tiles):
        """The Piece of tiles that are loaded."""
        ranks_sb = rank_weights(self.adapters, first, tiles)
        return Piece(weight_sb, ranks_sb, self.scales(first, tiles))


class Piece(NamedTuple):
    """Some tiles of a Linear @ SBUF: the weight [128, tiles, K/128, 128], its ``rank_weights``, and
    its scales [128, tiles] or None."""

    weight_sb: Any
    ranks_sb: List[Any]
    scale_sb: Any

    def product(self, x_sb, lows, part):
        """A part of ``psum_parts``: W x, and what adapters with ``low_ranks`` add to it [128,
        tiles, tokens] @ PSUM, and the scales that it still lacks [128, tiles] or None."""
        tile, tiles, at, tokens = part
        out_psum = products(self.weight_sb, tile, tiles, x_sb, at, tokens)
        add_adapted(out_psum, self.ranks_sb, lows, tile, at)
        scale_sb = self.scale_sb
        return out_psum, None if scale_sb is None else scale_sb[:, nl.ds(tile, tiles)]


def room_for(linear, start, tiles, room_sb):
    """[128, tiles, k_tiles, 128] @ SBUF for tiles of a kernel weight: of ``room_sb`` [128, n], if
    any, the part from tile ``start`` on, where it has so much."""
    shape, each = (P_MAX, tiles, linear.k_tiles, P_MAX), linear.k_tiles * P_MAX
    if room_sb is None or (start + tiles) * each > room_sb.shape[1]:
        return nl.ndarray(shape, linear.weight_hbm.dtype)
    return room_sb[:, nl.ds(start * each, tiles * each)].reshape(shape)


def load_weight(linear, first, tiles, turns=EVEN_TURNS, room_sb=None, start=0):
    """Tiles of a kernel weight -> [128, tiles, k_tiles, 128] @ SBUF, one contiguous row each;
    ``turns`` as for ``in_bfloat16``, ``room_sb`` and ``start`` as for ``room_for``."""
    weight_hbm, k_tiles = linear.weight_hbm, linear.k_tiles
    tiled_hbm = weight_hbm.reshape((P_MAX, linear.tiles, k_tiles, P_MAX))
    # a lone tile, the last of its weight, in rows of LAST_PIECE_BYTES: half is multiplied before
    halved = tiles == 1 and first + 1 == linear.tiles
    each = max(1, LAST_PIECE_BYTES // (P_MAX * weight_hbm.itemsize)) if halved else k_tiles
    weight_sb = room_for(linear, start, tiles, room_sb)
    for at, size in spans(k_tiles, each):
        weight_sb[:, :, nl.ds(at, size), :] = nl.load(
            tiled_hbm[:, nl.ds(first, tiles), nl.ds(at, size), :]
        )
    return in_bfloat16(weight_sb, turns) if weight_hbm.dtype == nl.int8 else weight_sb


class StreamedWeight(NamedTuple):
    """A Linear whose weight is loaded piece by piece, where a tile of it is first asked for, into
    ``room_sb`` if given."""

    linear: Linear
    spans: List[Tuple[int, int]]
    loaded: List[Any]
    room_sb: Any

    @classmethod
    def of(cls, linear, spans, room_sb=None):
        return cls(linear, spans, [None for _ in spans], room_sb)

    @property
    def tiles(self) -> int:
        return self.linear.tiles

    def tile(self, at):
        """(the piece that holds a tile of output features, the tile's place in it)."""
        n = next(n for n, (first, count) in enumerate(self.spans) if first <= at < first + count)
        if self.loaded[n] is None:
            self.loaded[n] = load_weight(self.linear, *self.spans[n], room_sb=self.room_sb)
        return self.loaded[n], at - self.spans[n][0]


def in_bfloat16(weight_sb, turns):
    """Integers [128, tiles, k_tiles, 128] @ SBUF in a type that TensorE takes (fp8 it takes as it
    is). ScalarE (s) and GpSimdE (g) take ``turns`` at runs of a tile, and TensorE follows both:
    together they outrun DMA by a quarter. Runs are short as GpSimdE keeps VectorE from SBUF."""
    wide_sb, k_tiles = nl.ndarray(weight_sb.shape, nl.bfloat16), weight_sb.shape[2]
    engines = {"s": nisa.scalar_engine, "g": nisa.gpsimd_engine}
    for tile in nl.affine_range(weight_sb.shape[1]):
        for n, (at, size) in enumerate(spans(k_tiles, math.ceil(4 / len(turns)))):
            wide_sb[:, tile, nl.ds(at, size)] = nisa.tensor_copy(
                weight_sb[:, tile, nl.ds(at, size)],
                dtype=nl.bfloat16,
                engine=engines[turns[n % len(turns)]],
            )
    return wide_sb


def scale_columns(scales_hbm, counts):
    """Scales of a kernel's quantised weights @ HBM -> parts of so many columns @ SBUF, or Nones."""
    if scales_hbm is None:
        return [None] * len(counts)
    scales_sb, starts = nl.load(scales_hbm), [sum(counts[:at]) for at in range(len(counts))]
    return [scales_sb[:, nl.ds(start, count)] for start, count in zip(starts, counts)]


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


def store_product(linear, passed, out_hbm, turns=EVEN_TURNS, room_sb=None):
    """``W @ x`` of ``passed``, (x_sb [128, k_tiles, count], Block), into out [N, T] @ HBM: one pass
    over the weights. Features lie in runs, so that each partition stores contiguous rows.
    ``turns`` as for ``in_bfloat16``, ``room_sb`` as for ``room_for``."""
    count = passed[0][0].shape[2]
    lows = [low_ranks(linear.adapters, x_sb, block.start) for x_sb, block in passed]
    for group in stored_together(linear.pieces(count, last=True), count):
        begin, size = group[0][0], sum(tiles for _, tiles in group)
        outs = [nl.ndarray((P_MAX, size, block.count), out_hbm.dtype) for _, block in passed]
        for first, tiles in group:
            weight_sb = load_weight(linear, first, tiles, turns, room_sb, first)
            piece = linear.piece(weight_sb, first, tiles)
            for (x_sb, block), low_sb, out_sb in zip(passed, lows, outs):
                for part in psum_parts(tiles, block.count):
                    out_psum, scale_sb = piece.product(x_sb, low_sb, part)
                    tile, beside, at, tokens = part
                    rows, columns = nl.ds(first - begin + tile, beside), nl.ds(at, tokens)
                    times_features(out_sb[:, rows, columns], out_psum, scale_sb)
        for (_, block), out_sb in zip(passed, outs):
            nl.store(block_part(out_hbm, block, begin, size), out_sb)


# --- Adapters -------------------------------------------------------------------------------------
#
# W x + B A x (Hu et al. 2021), of several adapters in one batch. Their ranks are rows that lie side
# by side: A x of all adapters is one product, whose rows of others than a token's are set to zero,
# and B contracts all of them into the bank of PSUM that W x fills. So a token without an adapter
# has zeros, and adapters cost TensorE what their ranks together cost.


class Adapters(NamedTuple):
    """Those of one projection @ HBM: A [128, K/128 * ranks] and B [ranks, N], features in the
    orders of the weight, and which ranks are a token's [ranks, T], ones and zeros."""

    a_hbm: Any
    b_hbm: Any
    chosen_hbm: Any


def split_adapters(adapters, k_tiles, n_tiles):
    """Adapters @ HBM of a kernel's projections, side by side in tensors of its own, or three Nones
    -> each projection's, of so many tiles of K and of N; Nones without any."""
    if adapters[0] is None:
        return [None] * len(n_tiles)
    (a_hbm, b_hbm, chosen_hbm), found, a_start, b_start = adapters, [], 0, 0
    for k, n in zip(k_tiles, n_tiles):
        size, width = k * b_hbm.shape[0], n * P_MAX
        a_part, b_part = a_hbm[:, nl.ds(a_start, size)], b_hbm[:, nl.ds(b_start, width)]
        found.append(Adapters(a_part, b_part, chosen_hbm))
        a_start, b_start = a_start + size, b_start + width
    return found


def low_ranks(adapters, x_sb, first_token):
    """A x of tokens from ``first_token`` on, x_sb [128, K/128, T] -> [ranks, T] @ SBUF, up to 128
    ranks each, zero where they are not the token's."""
    if adapters is None:
        return []
    (_, k_tiles, tokens), found = x_sb.shape, []
    ranks = adapters.b_hbm.shape[0]
    a_sb = nl.load(adapters.a_hbm).reshape((P_MAX, k_tiles, ranks))
    for first, count in spans(ranks, P_MAX):
        rows = nl.ds(first, count)
        chosen_sb = nl.load(adapters.chosen_hbm[rows, nl.ds(first_token, tokens)])
        low_sb = nl.ndarray((count, tokens), x_sb.dtype)
        for start, size in spans(tokens, MOVING_MAX):
            columns = nl.ds(start, size)
            low_psum = psum_zeros((count, size))
            for k in nl.affine_range(k_tiles):
                low_psum[...] += nisa.nc_matmul(a_sb[:, k, rows], x_sb[:, k, columns])
            low_sb[:, columns] = nisa.tensor_tensor(low_psum, chosen_sb[:, columns], nl.multiply)
        found.append(low_sb)
    return found


def rank_weights(adapters, tile, tiles):
    """B of some tiles of features -> [ranks, tiles * 128] @ SBUF, up to 128 ranks each."""
    if adapters is None:
        return []
    columns = nl.ds(tile * P_MAX, tiles * P_MAX)
    return [
        nl.load(adapters.b_hbm[nl.ds(*rows), columns])
        for rows in spans(adapters.b_hbm.shape[0], P_MAX)
    ]


def add_adapted(acc_psum, weights, lows, tile, start):
    """B A x added to products [128, tiles, tokens] @ PSUM of the tiles from ``tile`` on."""
    for b_sb, low_sb in zip(weights, lows):
        for at in nl.affine_range(acc_psum.shape[1]):
            acc_psum[:, at, :] += nisa.nc_matmul(
                b_sb[:, nl.ds((tile + at) * P_MAX, P_MAX)],
                low_sb[:, nl.ds(start, acc_psum.shape[2])],
            )


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


class HeadNorm(NamedTuple):
    """An RMSNorm over each query and key head (Qwen3): the gains of both [128, 2], what takes the
    mean over a head's lanes [128, 128], and its epsilon [128, 1] @ SBUF."""

    gains_sb: Any
    mean_sb: Any
    eps_sb: Any


def head_norm(gains_hbm, norm, head_dim):
    """The HeadNorm with gains [128, 2] @ HBM, None without them."""
    if gains_hbm is None:
        return None
    mean_sb = nisa.memset((P_MAX, P_MAX), 0.0, nl.float32)
    for lane in nl.static_range(P_MAX // depth_of(head_dim)):
        lanes = nl.ds(lane * depth_of(head_dim), head_dim)
        mean_sb[lanes, lanes] = nisa.memset((head_dim, head_dim), 1.0 / head_dim, nl.float32)
    eps_sb = nisa.memset((P_MAX, 1), norm.eps, nl.float32)
    return HeadNorm(nl.load(gains_hbm), mean_sb, eps_sb)


class AttentionLayer(NamedTuple):
    """What the passes of an attention kernel share: hidden states, delta and their sum @ HBM, and
    the partial output; constants of the norm; the Linears of Q, K and V together and of the output;
    tables of cos and sin @ HBM.

    Where the model has them, else None: the bias of Q, K and V and the gains of their heads' norms
    @ HBM; of quantised weights the norm's gain [128, H/128] @ SBUF, and scales, of Q and K a column
    a tile, of V its own on each partition; Adapters of Q, K and V behind their ``rank_weights``.
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
    qkv_b_hbm: Any
    gains_hbm: Any
    gain_sb: Any
    qkv_adapters: List[Tuple[List[Any], Optional[Adapters]]]

    @classmethod
    def of(cls, hidden, norm, heads, weights, tables, terms, scales_hbm, adapters):
        """All @ HBM: ``hidden`` are x, delta, their sum and the output; ``weights`` those of Q, K
        and V and of the output, ``terms`` the bias of Q, K and V and the gains of their heads'
        norms; ``adapters`` as for ``split_adapters``."""
        k_tiles = hidden[0].shape[0] // P_MAX
        columns = heads.qk_tiles + heads.kv_features, k_tiles, k_tiles
        qkv_scale_sb, gain_sb, out_scale_sb = scale_columns(scales_hbm, columns)
        tiles = heads.q_tiles, heads.stacks, whole_tiles(heads.kv_features), k_tiles
        *split, of_out = split_adapters(adapters, [k_tiles] * 3 + [heads.q_tiles], tiles)
        of_qkv = [(rank_weights(each, 0, count), each) for each, count in zip(split, tiles)]
        qkv = Linear(weights[0], k_tiles, qkv_scale_sb)
        out = Linear(weights[1], heads.q_tiles, out_scale_sb, of_out)
        return cls(*hidden, norm, heads, qkv, out, *tables, *terms, gain_sb, of_qkv)


class Projection(NamedTuple):
    """What the projections to queries, keys and values read of a chunk of tokens @ SBUF.

    x_sb [128, H/128, T], the ``scales`` of its norm, cos and sin [128, T] times these scales (where
    heads have no norm of their own), the identity and the permutation that swaps the halves of each
    head [128, 128], and ``parts``, the tiles of tokens; a HeadNorm where the model has one. What is
    ``added`` to queries, keys and values are products of rows, those [rows, N] and those [rows, T]
    of each: ``rank_weights`` and ``low_ranks`` of adapters, and a bias, a row of its own.
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


def qkv_biases(layer, scales, dtype):
    """Biases of Q, K and V, each a product of rows ([1, N], [1, T]) @ SBUF: what is added in front
    of the norm's scale has to be divided by it. Empty lists without a bias."""
    if layer.qkv_b_hbm is None:
        return [([], []) for _ in layer.qkv_adapters]
    inverse_sb = nisa.reciprocal(scales.along_sb[0:1, :], dtype=dtype)
    bias_sb, q_tiles = nl.load(layer.qkv_b_hbm), layer.heads.q_tiles
    starts = 0, q_tiles * P_MAX, (q_tiles + layer.heads.stacks) * P_MAX, bias_sb.shape[1]
    return [([bias_sb[:, a:b]], [inverse_sb]) for a, b in zip(starts, starts[1:])]


def projection(x_sb, layer, first_token, parts):
    """The Projection of the tokens from ``first_token`` on, x_sb [128, H/128, T], tiles ``parts``
    of them."""
    scales, x_sb = norm_scales(x_sb, layer.norm, parts), with_gain(x_sb, layer.gain_sb)
    columns, heads = nl.ds(first_token, x_sb.shape[2]), layer.heads
    tables = [nl.load(table_hbm[:, columns]) for table_hbm in (layer.cos_hbm, layer.sin_hbm)]
    of_heads = head_norm(layer.gains_hbm, layer.norm, heads.head_dim)
    if of_heads is None:
        tables = [nisa.tensor_tensor(x, scales.along_sb, nl.multiply) for x in tables]
    identity_sb = shifted_identity(P_MAX, P_MAX, 0, x_sb.dtype)
    swap_sb = None if heads.slots > 1 else swapped_halves(heads.head_dim, x_sb.dtype)
    biases = qkv_biases(layer, scales, x_sb.dtype)
    added = [
        (ranks_sb + bias, low_ranks(adapters, x_sb, first_token) + inverse)
        for (ranks_sb, adapters), (bias, inverse) in zip(layer.qkv_adapters, biases)
    ]
    return Projection(layer, x_sb, scales, *tables, identity_sb, swap_sb, parts, of_heads, added)


def normed_heads(p, x_psum, columns, which, scale_sb):
    """A tile of query (``which`` 0) or key heads (1) [128, tokens], each divided by its own rms and
    times its gains. The sum of squares over a head's lanes is a product, as it is over features.
    ``scale_sb`` are the features' scales of a quantised weight."""
    dtype = p.x_sb.dtype
    x_sb = times_both(x_psum, p.scales.along_sb[:, columns], scale_sb, dtype)
    square_sb = nisa.tensor_tensor(x_sb, x_sb, nl.multiply, dtype=nl.float32)
    mean_psum = nisa.nc_matmul(p.head_norm.mean_sb, square_sb)
    inverse_sb = nisa.activation(nl.rsqrt, mean_psum, bias=p.head_norm.eps_sb)
    normed_sb = nisa.tensor_tensor(x_sb, inverse_sb, nl.multiply, dtype=dtype)
    return nisa.tensor_scalar(normed_sb, nl.multiply, p.head_norm.gains_sb[:, nl.ds(which, 1)])


def rotated_span(p, weight_sb, tile, qk_sb, at, start, size):
    """Tile ``at`` of the query or key heads of a span of tokens, rotated, into qk_sb[:, at].

    VectorE multiplies whole rows by cos and sin; TensorE adds both terms, the second with the
    halves of each head exchanged. Queries are divided by sqrt(D) where that rounds nothing.
    """
    columns, which = nl.ds(start, size), 0 if at < p.heads.q_tiles else 1
    first, scale = (p.heads.q_tiles, 1.0) if which else (0, score_scales(p.heads.head_dim)[0])
    # W x [128, size] @ PSUM, H/128 passes of its columns, and one each for ranks and bias
    x_psum = products(weight_sb, tile, 1, p.x_sb, start, size)
    add_adapted(x_psum, *p.added[which], at - first, start)
    x = x_psum[:, 0, :]
    scale_sb = p.layer.qkv.scales(at, 1)
    if p.head_norm is not None:
        x, scale_sb = normed_heads(p, x, columns, which, scale_sb), None
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


def project_qkv(p, room_sb=None):
    """Q, K and V of a few tokens -> the tiles of ``qkv_tiles``, queries and keys rotated; weights
    in ``room_sb`` as ``room_for`` says."""
    tokens, (qk_sb, v_sb) = p.x_sb.shape[2], qkv_tiles(p)
    weight = StreamedWeight.of(p.layer.qkv, p.layer.qkv.pieces(tokens), room_sb)
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
    StreamedWeights of both projections. ``lows`` are the output's ``low_ranks``, filled with
    its first tiles."""

    block: Block
    p: Projection
    qk_sb: Any
    v_sb: Any
    qkv: StreamedWeight
    out: StreamedWeight
    lows: List[Any]

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
            self.lows[:] = low_ranks(out.adapters, self.context_sb, self.block.start)
        ranks_sb = rank_weights(out.adapters, first, tiles)
        out_sb = nl.ndarray((P_MAX, tiles, count), self.context_sb.dtype)
        for n in nl.static_range(tiles):
            weight_sb, tile = self.out.tile(first + n)
            out_psum = products(weight_sb, tile, 1, self.context_sb, 0, count)
            add_adapted(out_psum, ranks_sb, self.lows, n, 0)
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


def project_blocks(blocks, layer):
    """TokenBlocks of some Blocks with queries, keys and values, one pass over the weights: H/128
    passes of a block's tokens for every tile of features."""
    weights = attention_weights(layer, blocks[0].count)
    passed = [TokenBlock.of(block, layer, weights, apart=False) for block in blocks]
    for at in nl.static_range(layer.qkv.tiles):
        for rows in passed:
            rows.run((at, 0, rows.block.count))
    return passed


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
        most_bytes = RESIDENT_BYTES - (0 if layer.out.adapters is None else ADAPTER_BYTES)
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
    """Keys and values @ HBM [B, kv_heads, L, D], and bias [rows, n] of their first n keys.

    Of a cache of blocks keys and values are [rows, run, kv_heads, D], or [rows, run, D] where heads
    lie apart, and rows_sb [lanes, B * parts (* kv_heads)] @ SBUF tells which rows lie on the
    partitions of each part of a sequence.
    """

    keys_hbm: Any
    values_hbm: Any
    bias_hbm: Any
    rows_sb: Any = None

    @property
    def length(self) -> int:
        """Keys of a sequence."""
        return self.bias_hbm.shape[1]

    @property
    def itemsize(self) -> int:
        """Bytes of a number in SBUF: fp8 keys stand turned in the type of x."""
        return max(2, self.keys_hbm.itemsize)

    @property
    def lanes(self) -> int:
        """Partitions of a head's keys; of a decode step without a table see ``decode_runs``."""
        return cache_runs(self.length)[0] if self.rows_sb is None else self.rows_sb.shape[0]

    @property
    def by_token(self) -> bool:
        """Whether rows that a table names have a token's heads side by side."""
        return self.rows_sb is not None and len(self.keys_hbm.shape) == 4


def decode_runs(keys_hbm):
    """(lanes, runs) of a decode step's cache [B, kv_heads, L, D]: KV heads share the partitions.

    So a row of DMA is kv_heads times as long, and one product over all partitions serves all heads.
    """
    return cache_runs(keys_hbm.shape[2], P_MAX // keys_hbm.shape[1])


def decode_bytes(length, heads, itemsize, lanes=None):
    """Bytes per partition that a sequence's cache takes in a decode step; of a cache of blocks keys
    lie on so many ``lanes``."""
    kept = length * (heads.stacks + 1)  # keys turned, and a row of the mask
    if lanes is None:
        kept += 2 * cache_runs(length, P_MAX // heads.kv_heads)[1] * (heads.head_dim + 1)  # values
    else:
        kept += length // lanes * heads.kv_heads * heads.depth
    return itemsize * kept


def sequences_at_once(cache, heads):
    """Sequences of a decode step that share a tile of scores."""
    lanes = None if cache.rows_sb is None else cache.lanes
    each = decode_bytes(cache.length, heads, cache.itemsize, lanes)
    return max(1, min(P_MAX // heads.q_heads, CACHE_BYTES // each))


def is_decode_step(batch, length, heads, itemsize, named):
    """Whether the decode kernel takes one new token a sequence over so many keys, which a table may
    have ``named``; the kernel of several reads blocks of a cache instead, for which SBUF has room
    at any length, and outruns it where sequences would come one by one."""
    keys, lanes = whole_tiles(length) * P_MAX, min(length, P_MAX) if named else None
    each = decode_bytes(keys, heads, itemsize, lanes)
    if length > DECODE_KEYS or each > CACHES_BYTES or named and heads.slots > 1:
        return False
    return named or batch == 1 or 2 * each <= CACHE_BYTES


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
    Of a cache of blocks v_sb are CachedRows of each sequence's parts, all heads on a partition.
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
    """Keys or values of some of a sequence's cached tokens @ SBUF: [lanes, heads, tiles, D], or
    ``by_token``, as blocks of a cache have them, [lanes, tiles, heads, D]. The heads that count
    begin with ``head``."""

    rows_sb: Any
    by_token: bool = False
    head: int = 0

    @property
    def tiles(self) -> int:
        return self.rows_sb.shape[1 if self.by_token else 2]

    def tile(self, first, count, tile, features=slice(None)):
        """A tile of ``count`` heads from the ``first`` on that counts: [lanes, count, features]."""
        heads = slice(self.head + first, self.head + first + count)
        at = (tile, heads) if self.by_token else (heads, tile)
        return self.rows_sb[(slice(None), *at, features)]

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
    """CachedSequences of a decode step, from a Cache without a table.

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


# --- Attention of several new tokens over a cache -------------------------------------------------
#
# The same two passes over blocks of the cache, whose keys TensorE turns, and then the new tokens.
# Up to 128 queries of a sequence (attend_few) wait for the cache, not for an engine, and read it
# once. What comes from it is stationary in both products, 128 keys at a time, and the queries of
# all heads of a stack move together: a few columns take as long as 64. Scores leave PSUM in fp32,
# so that exp can wait for their maximum; those of the next block are made meanwhile. Weights are
# relative to the maximum of their block, and sums are rescaled when it grows.

CACHE_ROW_BYTES = 3072  # of a head and partition at a time: DMA is as fast with longer ones
FEW_ROW_BYTES = 4096  # the same of few queries, whose keys need no marks and values no ones
DMA_ROW_BYTES = 2048  # of all heads of a row that a table names: DMA takes as long for shorter ones


class CacheTiles(NamedTuple):
    """Some tiles of a sequence's Cache, of ``count`` KV heads from ``head`` on, and which of the
    rows of its bias, (first, count), are those of its queries.

    ``shared``: queries have different rows, of sequences that stand in one or their own, and the
    bias stays apart. k_hbm [count, depth + MARKS, tiles, lanes], if any, keeps turned keys from
    when they are first loaded to the second time."""

    cache: Cache
    sequence: int
    head: int
    count: int
    tile: int
    tiles: int
    heads: HeadShape
    bias_rows: Tuple[int, int]
    shared: bool
    k_hbm: Any = None

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
        """CachedRows of keys or values: of its heads [lanes, heads, tiles, depth], a load for each
        head, whose row per partition is as long as the tiles, or of all, as ``named_rows``."""
        d, room = self.heads.head_dim, (self.lanes, self.count, self.tiles)
        if self.cache.by_token:
            rows_sb = self.named_rows(cache_hbm, 0)
            if self.heads.depth > d:
                narrow_sb = rows_sb
                rows_sb = key_room(narrow_sb.shape[:3], self.heads, cache_hbm.dtype)
                rows_sb[:, :, :, 0:d] = nisa.tensor_copy(narrow_sb)
            return CachedRows(rows_sb, True, self.head)
        rows_sb = key_room(room, self.heads, cache_hbm.dtype)
        for at in nl.affine_range(self.count):
            rows_sb[:, at, :, 0:d] = self.rows_of(cache_hbm, self.head + at)
        return CachedRows(rows_sb)

    def bias(self):
        """Of its keys [rows, tiles, lanes] @ HBM."""
        rows, length = self.cache.bias_hbm.shape
        runs_hbm = self.cache.bias_hbm.reshape((rows, length // self.lanes, self.lanes))
        return runs_hbm[nl.ds(*self.bias_rows), nl.ds(self.tile, self.tiles), :]

    def turned(self, k_sb):
        """Keys into k_sb. A tile turns for all heads of a stack at once; ScalarE is alone at PSUM
        beside many queries."""
        d, keys = min(self.heads.depth, P_MAX), self.rows(self.cache.keys_hbm)
        each = spans(self.tiles, MOVING_MAX // self.lanes)
        for first, stacked in spans(self.count, self.heads.stack):
            for half, (start, tiles) in [(n, s) for n in range(self.heads.slots) for s in each]:
                part = nl.ds(half * self.tiles + start, tiles)
                turned_psum = keys.turned(first, stacked, start, tiles, half)
                for at in nl.static_range(stacked):
                    k_sb[0:d, first + at, part, :] = nisa.tensor_copy(
                        turned_psum[at * d : (at + 1) * d, :, :], engine=nisa.scalar_engine
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
            k_sb = load_turned(self.k_hbm, 0, self.count, 0, self.tiles)
        else:
            tiles = len(contraction(self.heads.depth + MARKS)) * self.tiles
            k_sb = nl.ndarray((P_MAX, self.count, tiles, self.lanes), bias_hbm.dtype)
            self.turned(k_sb)
            self.mark(k_sb, bias_hbm)
            if self.k_hbm is not None:
                store_turned(self.k_hbm, k_sb)
        bias_sb = nl.load(bias_hbm) if self.shared else None
        v_sb = self.values() if values else None
        return KeyTiles(k_sb, v_sb, self.tiles, self.tiles, self.lanes, bias_sb=bias_sb)

    def mark(self, k_sb, bias_hbm):
        """The rows behind the features of each head: the bias, zero where it stays apart, and
        ones."""
        slot, row = divmod(self.heads.depth, P_MAX)
        ones = np.ones((MARKS, self.tiles, self.lanes), np.float32)
        ones[0] = 0.0
        for at in nl.affine_range(self.count):
            part, first = nl.ds(slot * self.tiles, self.tiles), 0 if self.shared else 1
            if not self.shared:
                k_sb[row : row + 1, at, part, :] = nl.load(bias_hbm)
            rows = k_sb[row + first : row + MARKS, at, part, :]
            rows[...] = load_constant(ones[first:], bias_hbm.dtype)


class Weighted(NamedTuple):
    """Of the queries of a bank and some keys, each [128, columns] fp32, alike on all partitions but
    the last: the negated maximum of scaled scores, the sum of their exp behind it, and the sums of
    weighted values, at the lanes of a column's own head."""

    low_sb: Any
    sum_sb: Any
    values: Any

    def joined(self, other, zero_sb):
        """With other keys: both are rescaled to the larger maximum (Milakov, Gimelshein 2018)."""
        low_sb, factors = nisa.tensor_tensor(self.low_sb, other.low_sb, nl.minimum), []
        for one in (self, other):
            less_sb = nisa.tensor_tensor(low_sb, one.low_sb, nl.subtract)
            factors.append(nisa.activation(nl.exp, less_sb, bias=zero_sb))
        sums = []
        for pair in ((self.sum_sb, other.sum_sb), (self.values, other.values)):
            first_sb, second_sb = (
                nisa.tensor_tensor(x, factor_sb, nl.multiply) for x, factor_sb in zip(pair, factors)
            )
            sums.append(nisa.tensor_tensor(first_sb, second_sb, nl.add))
        return Weighted(low_sb, *sums)


class FewQueries(NamedTuple):
    """Up to 128 queries of a sequence, a bank, on their way over its cache. Column (row, token) of
    q_sb [128, columns] @ SBUF is zero at the lanes of other heads than its own; owners_sb [n, rows,
    tokens] says which rows of the bias are its own. ones_sb [128, 128] fp32."""

    group: QueryGroup
    q_sb: Any
    owners_sb: Any
    ones_sb: Any

    @classmethod
    def of(cls, group):
        (bank,), heads, dtype = group.banks, group.new.heads, group.qk_sb[0].dtype
        q_sb = nisa.memset((P_MAX, bank.rows, bank.tokens), 0.0, dtype)
        for at in nl.static_range(bank.heads):
            stack, lanes = heads.place(bank.head + at)
            own_sb = bank.part(group.qk_sb, heads, stack, lanes)
            q_sb[lanes, bank.own(at), :] = nisa.tensor_copy(own_sb)
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

        128 keys at a time turn round for all heads of a stack, and are stationary again in the
        product with their queries: 64 cycles each, for up to 64 columns.
        """
        lanes, columns = part.lanes, self.columns
        each = spans(part.tiles, MOVING_MAX // columns)
        scores_sb = nl.ndarray((lanes, columns, part.tiles), nl.float32)
        best_sb = nl.ndarray((lanes, columns, len(each)), nl.float32)
        keys, bias_sb = part.rows(part.cache.keys_hbm), nl.load(part.bias())
        for n, (start, tiles) in enumerate(each):
            scores_psum = psum_zeros((lanes, columns, tiles))
            for tile in nl.static_range(tiles):
                scores_psum[:, :, tile] += nisa.nc_matmul(
                    bias_sb[:, start + tile, :], self.owners_sb
                )
            for first, count, features, own in self.stacks():
                for begin, some in spans(tiles, MOVING_MAX // lanes):
                    turned = keys.turned(first, count, start + begin, some)
                    k_sb = nisa.tensor_copy(turned, dtype=self.q_sb.dtype)
                    for t in nl.static_range(some):
                        scores_psum[:, own, begin + t] += nisa.nc_matmul(
                            k_sb[:, t, :], self.q_sb[0:features, own]
                        )
            part_sb = scores_sb[:, :, nl.ds(start, tiles)]
            part_sb[...] = nisa.tensor_copy(scores_psum)
            best_sb[:, :, n] = nisa.tensor_reduce(nl.max, part_sb, axis=2)
        return scores_sb, nisa.tensor_reduce(nl.max, best_sb, axis=2)

    def own_scores(self, keys):
        """The same with KeyTiles of new tokens, head by head."""
        group, (bank,), depth = self.group, self.group.banks, self.group.new.heads.depth
        q_sb = bank_queries(group.qk_sb, bank, group.new.heads, 0, False)
        scores_sb = nl.ndarray((keys.lanes, self.columns, keys.tiles), nl.float32)
        for start, tiles in key_spans(bank, keys.tiles):
            scores_psum = psum_zeros((keys.lanes, bank.rows, bank.tokens, tiles))
            for tile in nl.static_range(tiles):
                part_psum = scores_psum[:, :, :, tile]
                score_tile(q_sb, bank, keys, start + tile, part_psum, depth, group.constants)
            shape = keys.lanes, self.columns, tiles
            scores_sb[:, :, nl.ds(start, tiles)] = nisa.tensor_copy(scores_psum.reshape(shape))
        return scores_sb, nisa.tensor_reduce(nl.max, scores_sb, axis=2)

    def negated_maxima(self, maxima):
        """Of maxima on some partitions [P, columns] each -> negated and scaled, on all [128,
        columns] fp32: TensorE turns them, and multiplies a diagonal by ones."""
        columns = self.columns
        sizes = [best_sb.shape[0] for best_sb in maxima]
        turned_psum = psum_tile((columns, sum(sizes)))
        for n, best_sb in enumerate(maxima):
            turned_psum[:, nl.ds(sum(sizes[:n]), sizes[n])] = nisa.nc_transpose(best_sb)
        low_sb = nisa.tensor_reduce(nl.max, turned_psum, axis=1, negate=True)
        eye_sb = self.group.constants.eye_sb[0:columns, 0:columns]
        each_sb = nisa.tensor_scalar(
            eye_sb, nl.multiply, low_sb, op1=nl.multiply, operand1=self.scale, dtype=nl.float32,
        )  # fmt: skip
        return nisa.tensor_copy(nisa.nc_matmul(self.ones_sb[0:columns, :], each_sb))

    def weights(self, scores_sb, low_sb):
        """exp(scale * score - maximum) [P, columns, tiles] @ SBUF: an instruction a column, or
        where those are more, one a tile and one for all."""
        (lanes, columns, tiles), zero_sb = scores_sb.shape, self.group.constants.zero_sb
        weights_sb, scale = nl.ndarray(scores_sb.shape, self.q_sb.dtype), self.scale
        if tiles >= 32:  # an instruction takes 64 cycles or more
            for column in nl.affine_range(columns):
                weights_sb[:, column, :] = nisa.activation(
                    nl.exp, scores_sb[:, column, :], bias=low_sb[0:lanes, nl.ds(column, 1)],
                    scale=scale,
                )  # fmt: skip
            return weights_sb
        less_sb = nl.ndarray(scores_sb.shape, nl.float32)
        for tile in nl.affine_range(tiles):
            less_sb[:, :, tile] = nisa.scalar_tensor_tensor(
                data=scores_sb[:, :, tile], op0=nl.multiply, operand0=scale,
                op1=nl.add, operand1=low_sb[0:lanes, :],
            )  # fmt: skip
        weights_sb[...] = nisa.activation(nl.exp, less_sb, bias=zero_sb[0:lanes, :])
        return weights_sb

    @property
    def scale(self) -> float:
        return score_scales(self.group.head_dim)[1]

    def attend(self, part, scores, new):
        """Weighted of CacheTiles by their ``scores`` and, behind the last, KeyTiles of ``new``
        tokens."""
        found = [scores, *([] if new is None else [self.own_scores(new)])]
        low_sb = self.negated_maxima([best_sb for _, best_sb in found])
        weights = [self.weights(scores_sb, low_sb) for scores_sb, _ in found]
        sums = [nisa.tensor_reduce(nl.add, x_sb, axis=2, dtype=nl.float32) for x_sb in weights]
        values = part.rows(part.cache.values_hbm)
        # values are stationary, too: 64 cycles for all queries of a stack, whose other heads' lanes
        # nobody reads
        values_psum = psum_zeros((P_MAX, self.columns))
        for first, count, features, own in self.stacks():
            for tile in nl.static_range(part.tiles):
                v_sb = values.tile(first, count, tile)
                values_psum[0:features, own] += nisa.nc_matmul(v_sb, weights[0][:, own, tile])
        if new is not None:
            self.add_own(values_psum, new, weights[1])
        sum_psum = psum_zeros((P_MAX, self.columns))
        for each_sb in sums:
            sum_psum[...] += nisa.nc_matmul(self.ones_sb[0 : each_sb.shape[0], :], each_sb)
        return Weighted(low_sb, sum_psum, values_psum)

    def add_own(self, values_psum, new, weights_sb):
        """Values of KeyTiles of new tokens times their weights, head by head."""
        (bank,), heads = self.group.banks, self.group.new.heads
        queries = bank.members * bank.tokens
        for at in nl.static_range(bank.heads):
            first, own = heads.place(bank.head + at)[1].start, nl.ds(at * queries, queries)
            for tile in nl.static_range(new.tiles):
                v_sb = new.values(at, tile)[:, 0 : heads.head_dim]
                values_psum[nl.ds(first, heads.head_dim), own] += nisa.nc_matmul(
                    v_sb, weights_sb[:, own, tile]
                )

    def finish(self, found):
        """Values divided by the sums of their weights, into the heads' lanes of the context."""
        group, (bank,), heads = self.group, self.group.banks, self.group.new.heads
        for first, _, features, _ in self.stacks():
            if features < P_MAX:  # lanes without a head
                out = bank.part(group.context_sb, heads, heads.place(bank.head + first)[0])
                out[...] = nisa.memset(out.shape, 0.0, out.dtype)
        shape = (P_MAX, bank.rows, bank.tokens)
        scale_sb = nisa.reciprocal(found.sum_sb).reshape(shape)
        values = found.values.reshape(shape)
        for at in nl.static_range(bank.heads):
            stack, lanes = heads.place(bank.head + at)
            own, out = bank.own(at), bank.part(group.context_sb, heads, stack, lanes)
            out[...] = nisa.tensor_tensor(
                values[lanes, own, :], scale_sb[lanes, own, :], nl.multiply
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
            new = group.new.seen(group.banks[0])._replace(owners_sb=few.owners_sb)
        some = few.attend(part, scores, new)
        found = some if found is None else found.joined(some, group.constants.zero_sb)
    few.finish(found)
    return found


def attend_groups(groups):
    """Attention of several groups: the first pass of one beside the second of that before. ->
    (group, Weighted) of those that ``attend_few`` takes. Groups are made, and their keys loaded,
    one ahead of their turn."""
    found, ahead = [], None
    for group in groups:
        if few_queries(group.banks, group.new.heads):
            found.append((group, attend_few(group)))
            continue
        following = MaximaPass.of(group)
        if ahead is None:
            for step in following.steps():
                following.run(step)
        else:
            attend(ahead, following, [])
        ahead = following
    if ahead is not None:
        attend(ahead, None, [])
    return found


def store_weights(weights_hbm, bank, found):
    """The negated maxima of a bank's scores and the sums of their weights, of its Weighted, into
    their places of [kv_heads, queries, 2] fp32 @ HBM."""
    queries = bank.members * bank.tokens
    weights_sb = nl.ndarray((1, bank.heads, queries, 2), nl.float32)
    for n, all_sb in enumerate((found.low_sb, found.sum_sb)):
        row_sb = all_sb[0:1, :].reshape((1, bank.heads, queries))
        weights_sb[:, :, :, n] = nisa.tensor_copy(row_sb)
    for at in nl.static_range(bank.heads):
        nl.store(weights_hbm[nl.ds(bank.head + at, 1), :, :], weights_sb[:, at, :, :])


def query_spans(length):
    """(start, size) of the tokens of a sequence whose keys before them have a mask of their own."""
    return spans(length, QUERIES_AT_ONCE)


def named_sequences(cache, first, count, heads):
    """CachedSequences of blocks, whose keys and values come by the rows of ``CacheTiles``.

    A row has all heads of its tokens, so these share partitions, and values are read as they came.
    """
    run, lanes = cache.keys_hbm.shape[1], cache.lanes
    k_sb, mask_sb = room_for_keys(cache.bias_hbm, first, count, heads)
    each = spans(cache.length // lanes, run)
    every = [
        [CacheTiles(cache, b, 0, heads.kv_heads, *part, heads, (b, 1), False) for part in each]
        for b in range(first, first + count)
    ]
    for b, parts in enumerate(every):
        for part in parts:
            keys, column = part.rows(cache.keys_hbm), part.tile * lanes
            stack_keys(k_sb, keys, b * heads.stacks, column, heads)
    v_sb = [[part.rows(cache.values_hbm) for part in parts] for parts in every]
    return CachedSequences(first, count, k_sb, mask_sb, v_sb)


def attend_named(qk_sb, v_sb, cache, heads, context_sb):
    """``attend_cached`` of a cache of blocks: lanes hold all heads' values, which are stationary,
    so that a product leaves the contexts of a stack of heads on their partitions. Weights are
    divided by their sum before it."""
    count, d, group = cache.count, heads.head_dim, heads.group
    scale = score_scales(d)[1]
    scores_sb = decode_scores(qk_sb, cache, heads)
    neg_max_sb = negated_maximum(scores_sb, scale)
    weights_sb = nisa.activation(nl.exp, scores_sb, bias=neg_max_sb, scale=scale, dtype=nl.float32)
    sums_sb = nisa.tensor_reduce(nl.add, weights_sb, axis=1)
    rounded_sb = divided(weights_sb, sums_sb, scores_sb.dtype)
    # with keys on partitions: cached ones [lanes, tiles, rows], and new ones [B, rows]
    (lanes, *_), rows = cache.v_sb[0][0].rows_sb.shape, scores_sb.shape[0]
    turned_sb = turn_tiles(rounded_sb, cache.keys // lanes, lanes)
    turned_psum = psum_tile((count, rows))
    turned_psum[...] = nisa.nc_transpose(rounded_sb[:, nl.ds(cache.keys, count)])
    own_sb = nisa.tensor_copy(turned_psum, dtype=scores_sb.dtype)
    new_sb = key_room((count, heads.kv_heads), heads, v_sb.dtype)
    new_sb[:, :, 0:d] = nisa.tensor_copy(v_sb.reshape((count, heads.kv_heads, d)))
    # contexts [heads of a stack * D, stacks, rows of a stack, B]: of each head its own rows count
    out_psum = psum_zeros((P_MAX, heads.stacks, heads.stack * group, count))
    for stack, (first, stacked) in enumerate(spans(heads.kv_heads, heads.stack)):
        for b in nl.static_range(count):
            columns = nl.ds(b * heads.q_heads + first * group, stacked * group)
            out = out_psum[0 : stacked * heads.depth, stack, 0 : stacked * group, b]
            out[...] += nisa.nc_matmul(new_sb[:, first : first + stacked, :], own_sb[:, columns])
            for n, values in enumerate(cache.v_sb[b]):
                for t in nl.affine_range(values.tiles):
                    weights_sb = turned_sb[:, n * values.tiles + t, columns]
                    out[...] += nisa.nc_matmul(values.tile(first, stacked, t), weights_sb)
    for kv_head in nl.static_range(heads.kv_heads):
        stack, place = heads.place(kv_head)
        own = nl.ds(kv_head % heads.stack * group, group)
        context_sb[place, nl.ds(stack * group, group), nl.ds(cache.first, count)] = (
            nisa.tensor_copy(out_psum[place, stack, own, :])
        )


def others_bias(owners_sb):
    """From owners [sequences, T] @ SBUF the bias of new keys [sequences, tiles * 128]: 0 for those
    of a sequence, for others MASKED. What stands behind the last key is hidden by the triangle."""
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


def few_queries(banks, heads):
    """Whether ``attend_few`` takes the banks of a set of heads, of a tile each."""
    few = len(banks) == 1 and banks[0].rows * banks[0].tokens <= P_MAX
    return few and heads.slots == 1


def cache_blocks(cache, sequence, banks, heads, bias_rows, shared=False, stay=True):
    """The CacheTiles of a sequence, whose queries may have different ``bias_rows``, for the heads
    of some banks; as KeyTiles where all fit and may ``stay``. Which of its keys count say these
    rows."""
    (head, count), few = heads_of(banks), few_queries(banks, heads)
    # of few queries fp8 keys do not stand turned in the type of x
    size = FEW_ROW_BYTES // cache.keys_hbm.itemsize if few else CACHE_ROW_BYTES // cache.itemsize
    each = size // heads.head_dim if cache.rows_sb is None else cache.keys_hbm.shape[1]
    blocks = [
        CacheTiles(cache, sequence, head, count, *block, heads, bias_rows, shared)
        for block in spans(cache.length // cache.lanes, each)
    ]
    rows = heads.depth + MARKS
    columns = count * (len(contraction(rows)) * P_MAX + heads.head_dim + 1)
    if few:
        return blocks
    if stay and cache.length // cache.lanes * cache.itemsize * columns <= RESIDENT_BYTES:
        return [block.load() for block in blocks]
    shapes = [(count, rows, block.tiles, block.lanes) for block in blocks]
    turned_hbm = [nl.ndarray(shape, cache.bias_hbm.dtype, buffer=nl.hbm) for shape in shapes]
    return [block._replace(k_hbm=k_hbm) for block, k_hbm in zip(blocks, turned_hbm)]


class Chunk(NamedTuple):
    """What the attention of several new tokens shares: the Cache; new values [T, kv_heads * D] @
    HBM; which new tokens see each other [B, n, n] @ HBM, or None for the triangle of a tile with
    itself; owners of the tokens [sequences, T] @ SBUF where one chunk is several sequences', and a
    Window, or None; Constants; whether each query has a row of the bias, as under a window."""

    cache: Cache
    new_hbm: Any
    active_hbm: Any
    causal_sb: Any
    owners_sb: Any
    window: Optional[Window]
    constants: Constants
    heads: HeadShape
    by_query: bool

    def groups(self, sequence, length, passed):
        """The queries of a sequence in TokenBlocks over its cache and its new keys: yields a
        QueryGroup for each set of KV heads, and for each tile of queries that has rows of the
        bias."""
        heads, active_sb, shared = self.heads, self.causal_sb, self.owners_sb is not None
        if self.active_hbm is not None:
            active_sb = nl.load(self.active_hbm[sequence])
        new = new_keys(length, heads, self.causal_sb.dtype, active_sb, MARKS, hides=True)
        bias_sb = others_bias(self.owners_sb) if shared else None
        new, parts = new._replace(bias_sb=bias_sb, window=self.window), []
        for n, rows in enumerate(passed):
            for at, (owner, position, column, size) in enumerate(rows.block.parts()):
                if owner == sequence:
                    rows_sb = rows.part_values(at, self.new_hbm)
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
                which_sb = self.constants.which_sb  # each query is its own row's
                owners = [which_sb[0 : b.tokens, 0 : b.rows, 0 : b.tokens] for b in banks]
            # a window's tiles of queries have keys of their own: none stay in SBUF for others
            blocks = cache_blocks(
                self.cache, sequence, banks, heads, bias_rows, shared=owners is not None,
                stay=not self.by_query,
            )  # fmt: skip
            yield QueryGroup(banks, blocks, new, qk_sb, self.constants, context_sb, owners)


# --- MLP ------------------------------------------------------------------------------------------


def mlp_linears(weights_hbm, k_tiles, scales_hbm, adapters):
    """Linears of gate, up and down, and the norm's gain [128, H/128] @ SBUF where weights are
    quantised; ``adapters`` as for ``split_adapters``."""
    tiles = weights_hbm[0].shape[1] // (k_tiles * P_MAX)
    gate_sb, up_sb, gain_sb, down_sb = scale_columns(scales_hbm, (tiles, tiles, k_tiles, k_tiles))
    contracted, features = (k_tiles, k_tiles, tiles), (tiles, tiles, k_tiles)
    of_each = split_adapters(adapters, contracted, features)
    scales = gate_sb, up_sb, down_sb
    return [Linear(*each) for each in zip(weights_hbm, contracted, scales, of_each)], gain_sb


class InnerTokens(NamedTuple):
    """A block of tokens on its way through the MLP @ SBUF: hidden states [128, H/128, count], the
    scale of their norm [128, count], ``low_ranks`` of gate and of up, and what down contracts [128,
    F/128, count]."""

    x_sb: Any
    along_sb: Any
    lows: List[List[Any]]
    inner_sb: Any

    def projected(self, piece, which, part):
        """A part of ``psum_parts`` of gate (``which`` 0) or up (1), normed and scaled @ SBUF."""
        out_psum, scale_sb = piece.product(self.x_sb, self.lows[which], part)
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
#   qkv_b_hbm             [1, tiles * 128]    biases of Q, K and V
#   gains_hbm             [128, 2]            of norms over query and key heads (Qwen3)
#   scales_hbm            [128, columns]      fp32, of quantised weights, in the order of their use
#   a_hbm, b_hbm          [128, K/128 * R], [R, N]  adapters of all projections side by side
#   chosen_hbm            [R, T]              ones for the ranks that are a token's
#
# They come one by one: of SDK 2.21 nothing public shows tensors inside of tuples, dicts or classes
# as arguments. Norm and HeadShape hold numbers, constants of a trace. Results @ HBM are made at
# the top level of a kernel, since the compiler refuses those of helpers.


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None, scales_hbm=None):
    """Linear layer, after RMSNorm where ``norm`` is given: x [H, T] -> [T, N], type of x.

    The LM head: tokens are few and leave the device, so they come out in rows. N is whole tiles.
    Scales of a quantised weight: [128, N/128] of its features and [128, H/128] of the norm.
    """
    k_tiles, tokens = x_hbm.shape[0] // P_MAX, x_hbm.shape[1]
    tiles = weight_hbm.shape[1] // (k_tiles * P_MAX)
    out_hbm = nl.ndarray((tokens, tiles * P_MAX), x_hbm.dtype, buffer=nl.shared_hbm)
    rows_hbm = out_hbm.reshape((tokens, P_MAX, tiles))
    scale_sb, gain_sb = scale_columns(scales_hbm, (tiles, k_tiles))
    linear = Linear(weight_hbm, k_tiles, scale_sb)
    for block in token_blocks(x_hbm.shape[0], tokens, 1):
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
    return out_hbm


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch,
    bias_hbm=None, qkv_b_hbm=None, gains_hbm=None, scales_hbm=None,
    a_hbm=None, b_hbm=None, chosen_hbm=None, window=None,
):  # fmt: skip
    """Everything between two all-reduces of a prefill: residual sum, norm, QKV, RoPE, causal flash
    attention of all new tokens (Dao et al. 2022), output projection.

    bias [B, S] hides left padding. -> partial output [H, B * S], rotated keys and values [B * S,
    kv_heads * D], and x + delta. Weights that fit stay in SBUF, others are read for every block of
    tokens. Scales: columns of Q and K, a tile each, of V, a feature each, of the norm and of the
    output, H/128 each; adapters of Q, K, V and output. ``window``: tokens that a query sees, itself
    included, None for all; tiles of keys that none of a tile's queries sees are left out.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    layer = AttentionLayer.of(
        (x_hbm, delta_hbm, stream_hbm, out_hbm), norm, heads, (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm), (qkv_b_hbm, gains_hbm), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    blocks = token_blocks(features, tokens, tokens // batch)
    prompt = Prompt.of(layer, bias_hbm, window, blocks)
    if prompt.beside:
        attend_side_by_side(prompt, keys_hbm, values_hbm)
    else:
        attend_one_by_one(prompt, keys_hbm, values_hbm)
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_decode_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm,
    bias_hbm, heads, qkv_b_hbm=None, gains_hbm=None, scales_hbm=None,
    a_hbm=None, b_hbm=None, chosen_hbm=None, rows_hbm=None,
):  # fmt: skip
    """The same for one new token per sequence: attention over the cache and the token itself.

    bias [B, L], keys in the order of ``decode_runs``; of a cache of blocks caches, bias and rows as
    ``attention_chunk_kernel`` takes them. -> partial output [H, B], new keys (rotated) and values
    [B, kv_heads * D], and x + delta.
    """
    (_, batch), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    new_keys_hbm = nl.ndarray((batch, heads.kv_features), dtype, buffer=nl.shared_hbm)
    new_values_hbm = nl.ndarray((batch, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    # hidden states [128, H/128, B], a few KiB, then the cache, before the weights: TensorE turns
    # its keys, 128 a pass, while those stream
    block = Block(0, batch, 1)
    x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
    rows_sb = None if rows_hbm is None else nl.load(rows_hbm)
    cache = Cache(keys_hbm, values_hbm, bias_hbm, rows_sb)
    parts = spans(batch, sequences_at_once(cache, heads))
    ahead = rows_hbm is None and caches_stay(cache, heads)
    loaded = [cached_sequences(cache, *part, heads) if ahead else None for part in parts]
    # queries and keys [128, tiles, B], values [B, kv_heads * D]: H/128 passes of 64 columns a tile,
    # a fifth of the time that DMA takes for its weights
    layer = AttentionLayer.of(
        (x_hbm, delta_hbm, stream_hbm, out_hbm), norm, heads, (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm), (qkv_b_hbm, gains_hbm), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    tiles = value_parts(parts, batch, heads, x_hbm.itemsize)
    p, room_sb = projection(x_sb, layer, 0, tiles), None
    if rows_hbm is not None:
        # rows of a cache of blocks are known later than weights, and DMA serves who comes first: so
        # the output's weights wait for the room of the first ones
        _, first = layer.qkv.pieces(batch)[0]
        room_sb = nl.ndarray((P_MAX, first * layer.qkv.k_tiles * P_MAX), layer.qkv.weight_hbm.dtype)
    qk_sb, v_sb = project_qkv(p, room_sb)
    nl.store(new_keys_hbm, key_rows(qk_sb, 0, batch, heads))
    for tile, rows_sb in zip(tiles, v_sb):
        nl.store(new_values_hbm[nl.ds(*tile), :], rows_sb)
    # context [128, tiles, B] while the first output weights arrive; lanes without a head are zero
    context_sb = nl.ndarray((P_MAX, heads.q_tiles, batch), dtype)
    if heads.leaves_lanes():
        context_sb[...] = nisa.memset((P_MAX, heads.q_tiles, batch), 0.0, dtype)
    for n, (part, cached) in enumerate(zip(parts, loaded)):
        new_sb = v_sb[n] if tiles == parts else nl.load(new_values_hbm[nl.ds(*part), :])
        if rows_hbm is None:
            cached = cached or cached_sequences(cache, *part, heads)
            attend_cached(qk_sb, new_sb, cached, heads, context_sb)
        else:
            named = named_sequences(cache, *part, heads)
            attend_named(qk_sb, new_sb, named, heads, context_sb)
    store_product(layer.out, [(context_sb, block)], out_hbm, SOFTMAX_TURNS, room_sb)
    results = out_hbm, new_keys_hbm, new_values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_chunk_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm,
    bias_hbm, active_hbm, heads, qkv_b_hbm=None, gains_hbm=None, scales_hbm=None,
    a_hbm=None, b_hbm=None, chosen_hbm=None, rows_hbm=None, owners_hbm=None, window=None,
):  # fmt: skip
    """The same for several new tokens per sequence: over the cache, and causally over themselves.

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
    layer = AttentionLayer.of(
        (x_hbm, delta_hbm, stream_hbm, out_hbm), norm, heads, (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm), (qkv_b_hbm, gains_hbm), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    rows_sb, most = None if rows_hbm is None else nl.load(rows_hbm), min(length, P_MAX)
    by_query = len(bias_hbm.shape) == 3
    rows_of_bias = math.prod(bias_hbm.shape[:-1]), bias_hbm.shape[-1]
    cache = Cache(keys_hbm, values_hbm, bias_hbm.reshape(rows_of_bias), rows_sb)
    causal_sb = causal_mask(most, dtype)
    window = None if active_hbm is not None else Window.of(window, dtype)
    constants = attention_constants(length, heads, dtype)
    owners_sb = nl.load(owners_hbm) if shared else None
    given = cache, new_values_hbm, active_hbm
    chunk = Chunk(*given, causal_sb, owners_sb, window, constants, heads, by_query)
    most_tokens = chunk_tokens(features, heads, x_hbm.itemsize, scales_hbm is not None)
    blocks = token_blocks(features, tokens, length)
    for some in grouped(blocks, max(1, most_tokens // length) * length):
        # queries and keys [128, tiles, count], values [tokens, kv_heads * D] of some blocks: H/128
        # passes of a block's tokens for every tile of features, one pass over the weights for all
        passed = project_blocks(some, layer)
        for rows in passed:
            rows.store_keys(new_keys_hbm, new_values_hbm)
        # contexts [128, tiles, count]: cached keys and values of some KV heads come in blocks, rows
        # of up to CACHE_ROW_BYTES a partition, and TensorE turns the keys, 128 a pass
        sequences = sorted({part[0] for block in some for part in block.parts()})
        each = (chunk.groups(sequence, length, passed) for sequence in sequences)
        attend_groups(group for groups in each for group in groups)
        # the output [128, H/128, count], a pass for each tile of context, one over the weight
        contexts = [(rows.context_sb, rows.block) for rows in passed]
        store_product(layer.out, contexts, out_hbm)
    results = out_hbm, new_keys_hbm, new_values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_projection_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, cos_hbm, sin_hbm, heads, length, qkv_b_hbm=None,
    gains_hbm=None, scales_hbm=None, a_hbm=None, b_hbm=None, chosen_hbm=None,
):  # fmt: skip
    """What precedes attention, where ranks exchange queries or keys: residual sum, norm, QKV, RoPE.

    Operands as of the others, ``length`` tokens a sequence. -> rotated queries and keys as they lie
    in tiles of heads [128, qk_tiles, T], queries times ``score_scales``, keys and values in
    rows [T, kv_heads * D], and x + delta where there is a delta.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    qk_hbm = nl.ndarray((P_MAX, heads.qk_tiles, tokens), dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    layer = AttentionLayer.of(
        (x_hbm, delta_hbm, stream_hbm, None), norm, heads, (qkv_w_hbm, None),
        (cos_hbm, sin_hbm), (qkv_b_hbm, gains_hbm), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    most_tokens = chunk_tokens(features, heads, x_hbm.itemsize, scales_hbm is not None)
    for some in grouped(token_blocks(features, tokens, length), most_tokens):
        # queries and keys [128, tiles, count], values [tokens, kv_heads * D]: H/128 passes of a
        # block's tokens for every tile of features, one pass over the weights for some blocks
        for rows in project_blocks(some, layer):
            # for the cache TensorE turns keys into rows, 128 tokens a pass; the other ranks take
            # queries and keys as they lie, a row of tiles * count for each partition
            rows.store_keys(keys_hbm, values_hbm)
            nl.store(qk_hbm[:, :, nl.ds(rows.block.start, rows.block.count)], rows.qk_sb)
    results = qk_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_share_kernel(
    q_hbm, k_hbm, v_hbm, keys_hbm, values_hbm, bias_hbm, active_hbm, heads, batch
):
    """Attention by itself, of tokens that are projected already, over keys of several ranks.

    Queries, new keys and values [T, kv_heads * D] as ``attention_projection_kernel`` has them; the
    cache as of ``attention_chunk_kernel``, its bias a row for every ``query_spans`` of a sequence.
    -> context. With active [B, n, n] the keys are a share: up to 128 queries of a KV head, and of
    each, head by head, what weighs it among those of other ranks, the negated maximum of its scores
    and the sum of its weights [B, kv_heads, queries, 2] in fp32. None: tokens of a prompt.
    """
    length, dtype = q_hbm.shape[2] // batch, q_hbm.dtype
    spans_of, most = query_spans(length), min(length, P_MAX)
    context_hbm = nl.ndarray(q_hbm.shape, dtype, buffer=nl.shared_hbm)
    if active_hbm is None:
        causal_sb = causal_mask(most, dtype)
    else:
        shape = (batch, heads.kv_heads, heads.group * length, 2)
        weights_hbm = nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)
    constants = attention_constants(length, heads, dtype)
    cache = Cache(keys_hbm, values_hbm, bias_hbm)
    for row in nl.static_range(batch * len(spans_of)):
        # a span of a sequence's tokens as they lie behind a projection
        sequence, (start, size) = row // len(spans_of), spans_of[row % len(spans_of)]
        first, parts = sequence * length + start, spans(size, P_MAX)
        columns = nl.ds(first, size)
        qk_sb = nl.ndarray((P_MAX, heads.qk_tiles, size), dtype)
        qk_sb[:, 0 : heads.q_tiles, :] = nl.load(q_hbm[:, :, columns])
        qk_sb[:, nl.ds(heads.q_tiles, heads.stacks), :] = nl.load(k_hbm[:, :, columns])
        active_sb = causal_sb if active_hbm is None else nl.load(active_hbm[sequence])
        new = new_keys(size, heads, dtype, active_sb, MARKS, hides=True)
        for at, count in parts:
            new.append(at, qk_sb, at, nl.load(v_hbm[nl.ds(first + at, count), :]))
        # over the keys before them and themselves, a set of KV heads at a time
        context_sb = nl.ndarray((P_MAX, heads.q_tiles, size), dtype)
        sets = score_banks([(0, at, at, count) for at, count in parts], heads, most)
        groups = (
            QueryGroup(
                banks, cache_blocks(cache, sequence, banks, heads, (row, 1)), new, [qk_sb],
                constants, [context_sb],
            )
            for banks in sets
        )  # fmt: skip
        found = attend_groups(groups)
        nl.store(context_hbm[:, :, columns], context_sb)
        if active_hbm is not None:
            for group, weighted in found:
                store_weights(weights_hbm[sequence], group.banks[0], weighted)
    return context_hbm if active_hbm is None else (context_hbm, weights_hbm)


@nki.jit
def attention_output_kernel(
    context_hbm, out_w_hbm, features, length, heads, scales_hbm=None, a_hbm=None, b_hbm=None,
    chosen_hbm=None,
):  # fmt: skip
    """The output projection by itself: context [128, q_tiles, T] -> partial output [H, T], H being
    ``features``, of sequences of ``length`` tokens. Scales and adapters are those of all four
    projections."""
    tokens = context_hbm.shape[2]
    out_hbm = nl.ndarray((features, tokens), context_hbm.dtype, buffer=nl.shared_hbm)
    layer = AttentionLayer.of(
        (out_hbm, None, None, out_hbm), None, heads, (None, out_w_hbm), (None, None),
        (None, None), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    most_tokens = token_chunk(context_hbm.itemsize * heads.q_tiles)
    for some in grouped(token_blocks(features, tokens, length), most_tokens):
        # contexts [128, q_tiles, count] as attention leaves them, then the output [128, H/128,
        # count]: q_tiles passes of a block's tokens for every tile, one pass over the weight
        contexts = [
            (nl.load(context_hbm[:, :, nl.ds(block.start, block.count)]), block) for block in some
        ]
        store_product(layer.out, contexts, out_hbm, SOFTMAX_TURNS)
    return out_hbm


@nki.jit
def swiglu_mlp_kernel(
    x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, scales_hbm=None, length=None, a_hbm=None,
    b_hbm=None, chosen_hbm=None,
):  # fmt: skip
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    Kernel weights of gate and up [F, H] and of down [H, F], ``length`` tokens of a sequence if
    there are several -> partial output [H, T], and x + delta. One pass over the weights for every
    ``token_chunk`` of tokens. Scales: columns of gate and up, F/128 each, of the norm and of down,
    H/128 each; adapters of the three.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    k_tiles = features // P_MAX
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    blocks = token_blocks(features, tokens, length or tokens)
    weights, adapters = (gate_hbm, up_hbm, down_hbm), (a_hbm, b_hbm, chosen_hbm)
    (*inner, down), gain_sb = mlp_linears(weights, k_tiles, scales_hbm, adapters)
    # a token keeps silu(gate) * up and x, and x times the gain, too
    kept = down.k_tiles + k_tiles * (1 if gain_sb is None else 2)
    for some in grouped(blocks, token_chunk(x_hbm.itemsize * kept)):
        # the first piece of gate and up [128, tiles, H/128, 128] goes before the hidden states
        # [128, H/128, count] of each block, whose first features then are multiplied while the
        # others arrive
        itemsize = min(linear.weight_hbm.itemsize for linear in inner)
        pieces = weight_pieces(down.k_tiles, k_tiles, some[0].count, itemsize=itemsize)
        ahead, passed = [load_weight(linear, *pieces[0]) for linear in inner], []
        for block in some:
            x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm, block)
            scales = norm_scales(x_sb, norm, spans(block.count, P_MAX))
            x_sb = with_gain(x_sb, gain_sb)
            lows = [low_ranks(linear.adapters, x_sb, block.start) for linear in inner]
            inner_sb = nl.ndarray((P_MAX, down.k_tiles, block.count), dtype)
            passed.append(InnerTokens(x_sb, scales.along_sb, lows, inner_sb))
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
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood.
    ``prompt_in_chunks``: calls of ``speculation_length`` tokens feed a prompt, whose last token is
    a decode step of its own; so of their logits nobody reads but a last row.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.prompt_in_chunks = bool(kwargs.pop("prompt_in_chunks", False))
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        super().__init__(**kwargs)


class LlamaInferenceConfig(InferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        neuron_config = self.neuron_config
        if option(self, "k_cache_transposed"):
            raise ValueError(
                "k_cache_transposed changes the data that the layers of this file get, expected "
                "False; leave it out."
            )
        if neuron_config.flash_decoding_enabled:
            self.num_cores_per_group = self.cores_of_a_kv_head()
        lora = neuron_config.lora_config
        if lora is not None and not hasattr(lora, "lora_memory_transpose"):
            raise ValueError(
                "lora_config needs NxDI 0.2 or later, where adapters are read and number 0 is none "
                "of them, got an earlier one; leave it out."
            )
        if parts_of_prompt(self) > 1:
            self.check_parts_of_prompt()
        if getattr(self, "use_sliding_window", False):  # Qwen's
            raise ValueError(
                "use_sliding_window gives some layers a window and others none, expected False; no "
                "layer of this file chooses."
            )
        window = window_of(self)
        if window is not None and neuron_config.is_chunked_prefill:
            raise ValueError(
                f"sliding_window {window} counts positions, which a chunk's tiles do not have, "
                "expected no chunked_prefill_config; leave one of them out."
            )
        if window is not None and neuron_config.flash_decoding_enabled:
            raise ValueError(
                f"sliding_window {window} counts rows of a cache, which flash_decoding_enabled "
                "spreads over ranks, expected one of the two; leave flash_decoding_enabled out."
            )
        if window is not None and neuron_config.padding_side == "left":
            raise ValueError(
                f"sliding_window {window} counts from the right here, got padding_side 'left'; pad "
                "on the right."
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

    def cores_of_a_kv_head(self) -> int:
        """Flash decoding: ranks that keep the positions of one KV head among them."""
        heads, tp = self.num_attention_heads, self.neuron_config.tp_degree
        kv = self.num_key_value_heads
        if heads % tp or tp % kv or tp <= kv:
            raise ValueError(
                f"flash_decoding_enabled shares a KV head among ranks, expected a degree above the "
                f"{kv} KV heads that is a multiple of them and divides the {heads} query heads, "
                f"got {tp}; choose another tp_degree or leave it out."
            )
        return calculate_num_cores_per_group(heads, kv, tp)

    def check_parts_of_prompt(self) -> None:
        """Context parallelism: a rank decodes with one of the KV heads that it has in prompts."""
        neuron_config, kv = self.neuron_config, self.num_key_value_heads
        for name in (
            "flash_decoding_enabled",
            "sequence_parallel_enabled",
            "quantized",
            "lora_config",
        ):
            if getattr(neuron_config, name):
                raise ValueError(
                    f"cp_degree {neuron_config.cp_degree} gives groups of ranks parts of a prompt, "
                    f"expected no {name}; leave one of them out."
                )
        tp, heads = neuron_config.tp_degree, self.num_attention_heads
        ranks = tp // neuron_config.cp_degree
        if tp % kv or heads % tp or (ranks % kv and kv % ranks):
            raise ValueError(
                f"cp_degree {neuron_config.cp_degree} takes a degree that is a multiple of the "
                f"{kv} KV heads and divides the {heads} query heads, and groups of ranks that "
                f"share out the KV heads, got {tp} ranks in groups of {ranks}; choose others."
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
    """Whether kernels run; an EAGLE draft, one layer without its first norm, is PyTorch's."""
    return bool(option(config, "nki_enabled")) and not option(config, "is_eagle_draft")


def shows_hidden_states(config: InferenceConfig) -> bool:
    """Whether more than the head reads normalised hidden states: EAGLE's draft, or Medusa's heads,
    of which there are `medusa_heads`."""
    return bool(option(config, "enable_eagle_speculation")) or medusa_heads(config) > 0


def medusa_heads(config: InferenceConfig) -> int:
    return config.neuron_config.num_medusa_heads if option(config, "is_medusa") else 0


def has_head_norms(config: InferenceConfig) -> bool:
    """Whether queries and keys have RMSNorms of their own over each head, as Qwen3's."""
    return model_type(config) == "qwen3"


def model_type(config: InferenceConfig) -> str:
    """Of the family: llama, mistral, qwen2 or qwen3."""
    return getattr(config, "model_type", "llama")


def window_of(config: InferenceConfig) -> Optional[int]:
    """Tokens that a query sees, itself included; None where the cache holds no more anyway."""
    window = getattr(config, "sliding_window", None) if model_type(config) == "mistral" else None
    return None if window is None or window >= config.neuron_config.seq_len else window


def adapter_ranks(config: InferenceConfig) -> int:
    """Rows that the ranks of all adapters take together in the kernels, 0 without any."""
    lora = config.neuron_config.lora_config
    return 0 if lora is None else lora.max_loras * lora.max_lora_rank


def adapter_targets(config: InferenceConfig) -> Set[str]:
    """Names of the projections that some adapter changes."""
    if not adapter_ranks(config):
        return set()
    paths = config.neuron_config.lora_config.lora_ckpt_paths
    return {name for path in paths.values() for name in peft_config(path)["target_modules"]}


def parts_of_prompt(config: InferenceConfig) -> int:
    """Context parallelism: parts of a prompt, each with a group of ranks of its own; 1 without."""
    return option(config, "cp_degree", 1)


# --- Modules --------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """Hidden states between kernels: transposed, and the last partial result not yet added.

    ``stream`` [H, T], ``delta`` [H, T] or None; ``shape`` is (B, S, H); ``chosen`` [ranks, T] tells
    which adapters are a token's, None without any. Layers of the base class hand it on as it is; it
    becomes [B, S, H] again behind the last one (SumOfColumns).
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

    def choose(self, config: InferenceConfig, adapter_ids: Optional[torch.Tensor]) -> Columns:
        """With the adapters of each row of the batch, [B] numbers from 1 on, 0 for none."""
        if self.chosen is not None or not adapter_ranks(config):
            return self
        lora, device = config.neuron_config.lora_config, self.stream.device
        ids = torch.zeros(self.shape[0], device=device) if adapter_ids is None else adapter_ids
        numbers = torch.arange(1, lora.max_loras + 1, device=device)
        rows = numbers.repeat_interleave(lora.max_lora_rank)[:, None] == ids.reshape(1, -1)
        chosen = rows.to(self.stream.dtype).repeat_interleave(self.shape[1], 1)
        return self._replace(chosen=chosen)


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


class NormOfColumns(NeuronLlamaRMSNorm):
    """The final norm where hidden states are read besides the head: Columns -> [B, S, H]."""

    def forward(self, columns: Columns) -> torch.Tensor:
        return super().forward(columns.rows())


class ResBlock(nn.Module):
    """A Medusa head's own part, in front of an output matrix: x + SiLU(linear(x))."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class DraftInput(ColumnParallelLinear):
    """An EAGLE draft's `fc`: embedding and hidden state [B, S, 2H] -> [B, S, H]."""

    def forward_wg(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """How NxDI 0.3 and later call it; sequence parallelism alone would gather the weight."""
        return self.forward(x)


class KernelRows(ColumnParallelLinear):
    """[rows, N] per rank, such as a bias in one row, or parts of adapters.

    It is a ColumnParallelLinear so that the SDK's loader cuts it for the ranks: the full tensor is
    the ranks' one after another, whichever way the product itself is parallel.
    """

    def __init__(
        self, n: int, tp_degree: int, dtype: torch.dtype, rows: int = 1, **group: Any
    ) -> None:
        size = rows * tp_degree
        super().__init__(n, size, bias=False, gather_output=False, dtype=dtype, **group)


class KernelWeight(KernelRows):
    """A weight in kernel layout, [128, N/128 * K/128 * 128] per rank.

    The last weight of a kernel carries the scales of all of them, None where none is quantised.
    """

    def __init__(
        self, n: int, k: int, tp_degree: int, dtype: torch.dtype, columns: int = 0, **group: Any
    ) -> None:
        row = whole_tiles(n) * whole_tiles(k) * P_MAX
        super().__init__(row, tp_degree, dtype, P_MAX, **group)
        self.tp_degree, self.columns = tp_degree, columns
        self.register_parameter("scale", None)

    def hold(self, name: str, columns: int, dtype: torch.dtype) -> None:
        """Give the weight or the scale its type, which the loader cuts for the ranks alike.

        Tags come last: NxD's ``init_on_device`` makes what is set anew, with tags as arguments.
        """
        zeros = torch.zeros(P_MAX, columns, dtype=dtype)
        setattr(self, name, nn.Parameter(zeros, requires_grad=False))
        held, parts = getattr(self, name), self.tp_degree
        set_tensor_model_parallel_attributes(held, True, 0, 1, num_partitions=parts)


def quantise_kernel_weights(model: nn.Module, neuron_config: NeuronConfig) -> None:
    """What NxDI's ``convert`` does to plain layers: weights of one byte, but for modules that are
    to stay, and a scale for every kernel that reads one."""
    stay = getattr(neuron_config, "modules_to_not_convert", None) or ()
    dtype = QUANTISED_DTYPES[neuron_config.quantization_dtype]
    for path, module in model.named_modules():
        if "medusa_head" in path:  # no Hugging Face checkpoint has them, so none is quantised
            continue
        kernel = {n: w for n, w in module.named_children() if isinstance(w, KernelWeight)}
        for name, weight in kernel.items():
            known = f"{path}.{name}".replace("qkv_proj", "q_proj")  # as in the checkpoint
            if any(part in known for part in stay):
                continue
            weight.hold("weight", weight.weight.shape[1], dtype)
            last = [*kernel.values()][-1]
            last.hold("scale", last.columns, torch.float32)


class KernelAdapters(nn.Module):
    """A and B of a kernel's projections as ``split_adapters`` reads them, by sizes of a rank: the
    tiles of K and the features N of each. Nothing where no adapter changes one of ``targets``."""

    def __init__(
        self, config: InferenceConfig, targets: Tuple[str, ...], k_tiles: List[int], n: List[int]
    ) -> None:
        super().__init__()
        self.present = bool(adapter_targets(config) & set(targets))
        if not self.present:
            return
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        ranks, features = adapter_ranks(config), sum(whole_tiles(size) for size in n) * P_MAX
        self.a = KernelRows(sum(k_tiles) * ranks, tp, dtype, P_MAX)
        self.b = KernelRows(features, tp, dtype, ranks)

    def operands(self, columns: Columns) -> Tuple[Optional[torch.Tensor], ...]:
        """What a kernel takes of them behind its other operands."""
        return (self.a.weight, self.b.weight, columns.chosen) if self.present else (None,) * 3


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


def adapted(
    projection: nn.Module, x: torch.Tensor, adapter_ids: Optional[torch.Tensor]
) -> torch.Tensor:
    """The projection of x; one that NxDI has wrapped adds each row's low-rank adapter."""
    return projection(x, adapter_ids) if is_lora_module(projection) else projection(x)


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
            columns = 2 * (whole_tiles(inner) + whole_tiles(hidden))
            self.down_proj = KernelWeight(hidden, inner, tp, dtype, columns)
            tiles = [whole_tiles(hidden)] * 2 + [whole_tiles(inner)]
            self.adapters = KernelAdapters(config, MLP_TARGETS, tiles, [inner, inner, hidden])
        else:
            self.act_fn = ACT2FN[config.hidden_act]
            self.gate_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.up_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.down_proj = row_linear(config, config.intermediate_size, hidden, bias)

    def forward(self, hidden: Any, norm: Any, adapter_ids: Optional[torch.Tensor] = None) -> Any:
        """hidden + MLP(norm(hidden)): [B, S or S / tp, H], or Columns with kernels."""
        if not self.nki_enabled:
            normed = norm(hidden)
            if self.parallel:
                normed = gather_from_sequence_parallel_region(normed, 1)
            gate, up = (adapted(p, normed, adapter_ids) for p in (self.gate_proj, self.up_proj))
            return hidden + adapted(self.down_proj, self.act_fn(gate) * up, adapter_ids)
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        partial, *stream = swiglu_mlp_kernel(
            hidden.stream, hidden.delta, norm, *weights, self.down_proj.scale, hidden.shape[1],
            *self.adapters.operands(hidden),
        )  # fmt: skip
        return hidden.after(partial, stream)


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


def attention_biases(config: InferenceConfig) -> Tuple[bool, bool]:
    """Whether Q, K and V have biases, and the output; Qwen2 has no word for its own."""
    every = bool(getattr(config, "attention_bias", False))
    return every or model_type(config) == "qwen2", every


class NeuronLlamaAttention(nn.Module):
    """Grouped-query attention; returns the new tokens' K and V for the base class's cache."""

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        """``ranks`` that split the heads, and their group as layers take it; None: all."""
        super().__init__()
        self.sizes = sizes = Sizes.of(config, ranks)
        tp, dtype = sizes.tp, config.neuron_config.torch_dtype
        hidden, dim, rank = config.hidden_size, sizes.head_dim, sizes.of_rank
        qkv_bias, out_bias = attention_biases(config)
        self.config, self.window = config, window_of(config)
        self.nki_enabled = is_nki_enabled(config)
        self.parallel = option(config, "sequence_parallel_enabled")
        self.cores_of_kv = config.num_cores_per_group
        if self.cores_of_kv > 1:
            self.rank_util = SPMDRank(tp)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if self.nki_enabled:
            tiles = rank.qk_tiles + whole_tiles(rank.kv_features)
            self.qkv_proj = KernelWeight(tiles * P_MAX, hidden, tp, dtype, **group)
            self.qkv_bias = KernelRows(tiles * P_MAX, tp, dtype, **group) if qkv_bias else None
            # of the norms over query and key heads, a lane of a tile of heads a row
            gains = nn.Parameter(torch.ones(P_MAX, 2, dtype=dtype))
            self.register_parameter("head_gains", gains if has_head_norms(config) else None)
            columns = rank.qk_tiles + rank.kv_features + 2 * whole_tiles(hidden)
            self.o_proj = KernelWeight(hidden, rank.q_tiles * P_MAX, tp, dtype, columns, **group)
            k_tiles = [whole_tiles(hidden)] * 3 + [rank.q_tiles]
            n = [rank.q_tiles * P_MAX, rank.stacks * P_MAX, rank.kv_features, hidden]
            self.adapters = KernelAdapters(config, ATTENTION_TARGETS, k_tiles, n)
        else:
            q_size, kv_size = sizes.q_heads * dim, sizes.kv_heads * dim
            self.q_proj = column_linear(config, hidden, q_size, qkv_bias, **group)
            self.k_proj = column_linear(config, hidden, kv_size, qkv_bias, **group)
            self.v_proj = column_linear(config, hidden, kv_size, qkv_bias, **group)
            self.q_norm: nn.Module = nn.Identity()
            self.k_norm: nn.Module = nn.Identity()
            if has_head_norms(config):
                self.q_norm = NeuronLlamaRMSNorm(dim, config.rms_norm_eps)
                self.k_norm = NeuronLlamaRMSNorm(dim, config.rms_norm_eps)
            self.o_proj = row_linear(config, q_size, hidden, out_bias, **group)

    def heads(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[B * S, n * D] (or [B, S, n * D]) -> [B, n, S, D]."""
        dim = self.sizes.head_dim
        return rows.reshape(batch, -1, rows.shape[-1] // dim, dim).transpose(1, 2)

    def forward(self, hidden: Any, norm: Any, **given: Any) -> Tuple[Any, ...]:
        """hidden + attention(norm(hidden)), [B, S, H] or Columns, then (K, V), cos and sin.

        ``given`` by the base class: position_ids [B, S]; attention_mask and active_mask, True where
        keys count; past_key_value, two [B, kv_rank, L, D], and cos_cache and sin_cache of the layer
        before; adapter_ids [B], where projections have adapters; rotary_position_ids [B, S], where
        tokens stand whose keys lie elsewhere. All but the first two may be None.
        A prompt behind a prefix, in blocks of the cache, has both masks, as several tokens a step.
        """
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        places = given.get("rotary_position_ids")  # of a tree, where rows lie elsewhere
        places = given["position_ids"] if places is None else places
        # a comparison of both paths hands tables of the kernels' layout, [128, B * S], to the other
        if cos is None or (cos.dim() == 2) != self.nki_enabled:
            dtype = hidden.stream.dtype if self.nki_enabled else hidden.dtype
            cos, sin = self.rotary_emb(places, dtype)
        past = given.get("past_key_value")
        masks = given["attention_mask"], given.get("active_mask")
        if self.window is not None:
            masks = self.within_window(*masks, None if past is None else places)
        if given.get("tile_masks") is not None:  # a chunk of several sequences
            in_tiles = self.blocks_of_tiles if self.nki_enabled else self.in_tiles
            past, masks = in_tiles(past, masks[0], given)
        inputs = hidden, norm, past, *masks, (cos, sin)
        if self.nki_enabled:
            output, present = self.attend_with_kernels(*inputs)
        else:
            output, present = self.attend_with_torch(*inputs, given.get("adapter_ids"))
        if past is None and self.cores_of_kv > 1:
            present = self.share_of_prompt(present)
        return output, present, cos, sin

    def share_of_prompt(self, present: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, ...]:
        """Flash decoding: of a prompt's keys and values [B, kv_rank, S, D] the positions that this
        rank keeps, [B, kv_rank, ceil(S / ranks), D]; what lies beyond the prompt nobody sees."""
        length, ranks = present[0].shape[2], self.cores_of_kv
        own = self.rank_util.get_rank().long() % ranks
        places = torch.arange(0, length, ranks, device=own.device) + own
        return tuple(x.index_select(2, places.clamp_max(length - 1)) for x in present)

    def within_window(
        self, mask: torch.Tensor, active_mask: Optional[torch.Tensor], places: Any
    ) -> Tuple[Any, ...]:
        """The masks without what lies ``window`` tokens and more in front of a query; ``places``
        [B, n] of new tokens behind a cache, None where there is no cache."""
        keys = torch.arange(mask.shape[-1], device=mask.device)
        queries = keys[None] if places is None else places  # padded on the right
        mask = mask & (queries[:, None, :, None] - keys < self.window)
        if active_mask is not None:
            new = torch.arange(active_mask.shape[-1], device=mask.device)
            active_mask = active_mask & (new[:, None] - new < self.window)
        return mask, active_mask

    def in_tiles(
        self, caches: Sequence[torch.Tensor], mask: torch.Tensor, given: Dict[str, Any]
    ) -> Tuple[Any, ...]:
        """A chunk's tiles of the caches [blocks, kv_rank, block, D] as keys and values of one
        sequence, and the masks of these and of the chunk with itself.

        NxDI lays the sequences' cached tokens end to end and cuts them, and the chunk, into tiles:
        ``tile_block_tables`` [tiles, blocks] are their keys, a number that no block has standing
        for those of the tile before, ``tile_q_indices`` [tiles] which tile of queries looks at
        them, and ``tile_masks`` [tiles, queries, keys] at which.
        """
        queries, seen = given["tile_q_indices"], given["tile_masks"]
        blocks = named_blocks(given["tile_block_tables"], len(caches[0]))
        past = [cache[blocks].permute(2, 0, 1, 3, 4).flatten(1, 3)[None] for cache in caches]
        length = mask.shape[-1]
        spans_of = torch.arange(math.ceil(length / seen.shape[1]), device=seen.device)
        own = (spans_of[:, None] == queries)[:, None, :, None] & seen.transpose(0, 1)
        return past, (own.flatten(2, 3).flatten(0, 1)[None, None, :length], mask)

    def blocks_of_tiles(
        self, caches: Sequence[torch.Tensor], mask: torch.Tensor, given: Dict[str, Any]
    ) -> Tuple[Any, ...]:
        """The same for the kernels: caches, the blocks of all tiles [1, n], and which tokens are a
        sequence's, bool [sequences + 1, tokens], the last row those of padding; and of the cached
        keys which each of these sees [sequences + 1, 1, 1, keys].

        A sequence sees what its last token does: that of one tile of queries, and no key twice.
        """
        seen, ends = given["tile_masks"], given["num_queries"].cumsum(0)
        places = torch.arange(mask.shape[-1], device=seen.device)
        owner = (places[:, None] >= ends).sum(1)
        owners = owner == torch.arange(len(ends) + 1, device=seen.device)[:, None]
        last = (ends - 1).clamp_min(0)
        tile, row = last // seen.shape[1], last % seen.shape[1]
        of_last = (
            seen[:, row].transpose(0, 1) & (tile[:, None] == given["tile_q_indices"])[..., None]
        )
        keys = nn.functional.pad(of_last.flatten(1), (0, 0, 0, 1))
        blocks = named_blocks(given["tile_block_tables"], len(caches[0]))
        return (*caches[:2], blocks.reshape(1, -1), owners), (keys[:, None, None], None)

    def attend_with_kernels(self, hidden, norm, past, mask, active_mask, tables):
        """Residual sum, norm, QKV, RoPE, attention and output projection, then an all-reduce."""
        batch, dtype, rank = hidden.shape[0], hidden.stream.dtype, self.sizes.of_rank
        weights = self.qkv_proj.weight, self.o_proj.weight
        inputs, own = (hidden.stream, hidden.delta, norm, *weights, *tables), self.operands(hidden)
        if past is None:
            padded = option(self.config, "padding_side") == "left"
            bias = _mask_bias(mask[:, 0, -1], dtype) if padded else None
            cut = None if self.window is None or self.window >= mask.shape[-1] else self.window
            results = attention_prefill_kernel(*inputs, rank, batch, bias, *own, window=cut)
        elif self.cores_of_kv > 1:
            results = self.attend_share(hidden, inputs, past, mask, active_mask, own)
        else:
            sizes = batch, mask.shape[-1], rank, max(2, past[0].dtype.itemsize)
            one = active_mask is None and len(past) < 4
            decode = one and is_decode_step(*sizes, named=len(past) == 3)
            *cache, rows = self.cache_operands(past, mask, active_mask, dtype, decode)
            if decode:
                results = attention_decode_kernel(*inputs, *cache, rank, *own, rows_hbm=rows)
            else:
                active = self.active_bias(active_mask, hidden)
                owners = past[3].to(dtype) if len(past) == 4 else None
                results = attention_chunk_kernel(
                    *inputs, *cache, active, rank, *own,
                    rows_hbm=rows, owners_hbm=owners, window=self.window,
                )  # fmt: skip
        partial, k, v, *stream = results
        return hidden.after(partial, stream), (self.heads(k, batch), self.heads(v, batch))

    def cache_operands(self, past, mask, active_mask, dtype, decode) -> Tuple[Any, ...]:
        """Keys, values, bias and, where a table names them, rows, as the kernels take them: of
        ``past`` keys and values, and of a cache of blocks the table."""
        by_query = self.window is not None and active_mask is not None
        bias = _mask_bias(mask[:, 0] if by_query else mask[:, 0, 0], dtype)
        if len(past) > 2:
            heads_apart = option(self.config, "is_chunked_prefill")
            return blocks_in_runs(*past[:3], bias, heads_apart, self.window)
        if self.window is not None and not decode:  # a sequence is a block
            table = torch.arange(len(bias), device=bias.device)[:, None]
            return blocks_in_runs(*past, table, bias, True, self.window)
        if option(self.config, "prompt_in_chunks") and active_mask is not None:
            # a bucket has room for the chunk itself: so many keys are not cached yet
            cached = whole_tiles(bias.shape[1] - active_mask.shape[-1])
            bias = bias[:, : max(1, cached) * P_MAX]
        most = P_MAX // past[0].shape[1] if decode else P_MAX
        return *cache_in_runs(*past, bias, most), None

    def operands(self, hidden: Columns) -> List[Optional[torch.Tensor]]:
        """What kernels take behind the others: bias, gains, scales and adapters, each or None."""
        bias_row = None if self.qkv_bias is None else self.qkv_bias.weight
        return [bias_row, self.head_gains, self.o_proj.scale, *self.adapters.operands(hidden)]

    def attend_share(self, hidden, inputs, past, mask, active_mask, own):
        """Flash decoding in kernels, as ``attend_shared``: between them queries travel, maxima and
        sums, and the weighted contexts, each rank's heads in fp32 -> results of a decode kernel."""
        ranks, rank = parallel_state.get_kv_shared_group(), self.sizes.of_rank
        x, delta, norm, qkv_weight, out_weight, *tables = inputs
        qk, k, v, *stream = attention_projection_kernel(
            x, delta, norm, qkv_weight, *tables, rank, hidden.shape[1], *own
        )
        q, new_keys = qk.split([rank.q_tiles, rank.stacks], 1)
        q = gather_from_sequence_parallel_region(q, 1, process_group=ranks)
        heads = rank._replace(q_heads=rank.q_heads * ranks.size())
        bias = _mask_bias(mask[:, 0, 0], x.dtype)
        context, weights = attention_share_kernel(
            q, new_keys, v, *cache_in_runs(*past, bias),
            self.active_bias(active_mask, hidden), heads, hidden.shape[0],
        )  # fmt: skip
        context = context * share_of_keys(weights[:, 0], hidden.shape[1], ranks)
        context = _reduce_scatter_along_dim(context, 1, process_group=ranks).to(x.dtype)
        partial = attention_output_kernel(
            context, out_weight, len(x), hidden.shape[1], rank, *own[2:]
        )
        return partial, k, v, *stream

    def active_bias(
        self, active_mask: Optional[torch.Tensor], hidden: Columns
    ) -> Optional[torch.Tensor]:
        """bool [B, 1, n, n] -> bias for the kernel [B, n, n]; None for one token, and for a long
        chunk of a prompt, whose mask is the base class's triangle."""
        if active_mask is None:
            return None
        tokens, dtype = active_mask.shape[-1], hidden.stream.dtype
        queries = tokens * self.sizes.of_rank.q_heads * self.cores_of_kv
        if self.cores_of_kv > 1 and queries > P_MAX:
            raise ValueError(
                f"The kernels take at most {P_MAX} queries of a KV head whose positions several "
                f"ranks share, got {queries}; choose a speculation_length of at most "
                f"{P_MAX * tokens // queries}."
            )
        quantised = self.o_proj.scale is not None
        most = chunk_tokens(len(hidden.stream), self.sizes.of_rank, dtype.itemsize, quantised)
        if tokens > most:
            raise ValueError(
                f"The kernels take at most {most} new tokens a sequence over a cache, got "
                f"{tokens}; choose a speculation_length, and prefill buckets in front of which "
                f"there are prefix_buckets, of at most {most}."
            )
        return None if tokens > P_MAX else _mask_bias(active_mask[:, 0], dtype)

    def attend_with_torch(self, hidden, norm, past, mask, active_mask, tables, adapter_ids):
        """The same in PyTorch, rounding where the device's reference rounds."""
        normed = norm(hidden)
        if self.parallel:
            normed = gather_from_sequence_parallel_region(normed, 1)
        q, k, v = self.project(normed, tables, adapter_ids)
        seen = [(k, v, mask)]
        if past is not None:
            if active_mask is None:
                active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
            # a comparison of both paths hands the kernels' cache, which may be fp8, to this one
            seen = [(*(x.to(q.dtype) for x in past), mask), (k, v, active_mask)]
        shared = past is not None and self.cores_of_kv > 1
        context = self.attend_shared(q, seen) if shared else self.attend(q, seen)
        merged = context.transpose(1, 2).reshape(*normed.shape[:2], -1)
        return hidden + adapted(self.o_proj, merged, adapter_ids), (k, v)

    def project(self, normed, tables, adapter_ids) -> Tuple[torch.Tensor, ...]:
        """[B, S, H] -> queries, keys, both rotated, and values [B, heads, S, D]."""
        q, k, v = (
            self.heads(adapted(proj, normed, adapter_ids), len(normed))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), *tables), rotate(self.k_norm(k), *tables), v

    def attend_shared(self, q: torch.Tensor, seen: List[Tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Flash decoding: ``attend`` where each rank of a KV head has a share of the positions.

        Queries of all those ranks come together, [B, ranks * q_rank, S, D]; each rank weighs its
        own keys and values, and its heads' sums over the ranks come back. The masks, made by the
        base class, show a new token on the rank that will keep it.
        """
        ranks = parallel_state.get_kv_shared_group()
        q = gather_from_sequence_parallel_region(q, 1, process_group=ranks)
        return _reduce_scatter_along_dim(self.attend(q, seen, ranks), 1, process_group=ranks)

    def attend(
        self, q: torch.Tensor, seen: List[Tuple[torch.Tensor, ...]], ranks: Any = None
    ) -> torch.Tensor:
        """One softmax over all (keys, values, mask) that are ``seen``: the cache and new tokens.

        Keys and values [B, kv_rank, keys, D], each KV head for its group of queries, mask bool
        [B, 1, S, keys]. Products are rounded to the model's type, scores are fp32. With ``ranks``
        the softmax is over their keys, too: each rank's maxima and sums travel, [B, heads, S, 1].
        """
        group, root = q.shape[1] // seen[0][0].shape[1], math.sqrt(self.sizes.head_dim)
        scores = []
        for keys, _, mask in seen:
            product = torch.matmul(q, keys.repeat_interleave(group, dim=1).transpose(2, 3)) / root
            hidden = torch.finfo(product.dtype).min
            scores.append(torch.where(mask, product, hidden).to(torch.float32))
        weights = softmax_over(torch.cat(scores, dim=-1), ranks).to(q.dtype)
        parts = weights.split([part.shape[-1] for part in scores], dim=-1)
        context, *more = (
            torch.matmul(part, values.repeat_interleave(group, dim=1))
            for part, (_, values, _) in zip(parts, seen)
        )
        return context + more[0] if more else context


class PromptAttention(NeuronLlamaAttention):
    """Context parallelism (NxDI 0.4 and later): attention of a prompt of which each group of ranks
    has a part. A group splits the heads; ranks with the same heads exchange keys and values.

    Its layers are those of decode steps, cut for fewer ranks, and take from the base class and
    return what those do: whole prompts, keys and values of all heads that the group's rank has.
    """

    def __init__(self, config: InferenceConfig) -> None:
        from neuronx_distributed_inference.modules.attention import (
            attention_process_groups as groups,  # NxDI before 0.4 has none
        )

        tp, parts = config.neuron_config.tp_degree, parts_of_prompt(config)
        groups.init_context_parallel_attention_process_groups(config)
        group = groups.get_context_parallel_attention_tp_group()
        super().__init__(config, tp // parts, tensor_model_parallel_group=group)
        self.group, self.others = group, groups.get_context_parallel_attention_cp_group()
        self.parts, self.rank_util = parts, SPMDRank(tp)

    def own_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's part of a dimension, by a tensor, since all ranks share one graph."""
        size = x.shape[dim] // self.parts
        if x.shape[dim] % self.parts:
            raise ValueError(
                f"A prompt's graph has {x.shape[dim]} tokens, expected a multiple of cp_degree "
                f"{self.parts}; change max_context_length or context_encoding_buckets."
            )
        part = self.rank_util.get_rank().long() // self.sizes.tp
        return x.index_select(dim, part * size + torch.arange(size, device=x.device))

    def exchanged(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All parts, of ranks with the same heads."""
        return gather_from_sequence_parallel_region(x, dim, process_group=self.others)

    def attend_with_torch(self, hidden, norm, past, mask, active_mask, tables, adapter_ids):
        """A part's queries over the keys of all parts; its output joins the others'."""
        cos, sin = (self.own_part(table, 1) for table in tables)
        q, *new = self.project(norm(self.own_part(hidden, 1)), (cos, sin), adapter_ids)
        keys, values = self.exchanged(torch.stack(new), 3)
        context = self.attend(q, [(keys, values, self.own_part(mask, 2))])
        output = self.o_proj(context.transpose(1, 2).flatten(2))
        return hidden + self.exchanged(output, 1), (keys, values)

    def attend_with_kernels(self, hidden, norm, past, mask, active_mask, tables):
        """The same in kernels: each span of queries is a chunk of new tokens, for which the prompt
        before it is a cache, whose other keys have a bias."""
        batch, length, _ = hidden.shape
        rank, own, size = self.sizes.of_rank, self.operands(hidden), length // self.parts
        whole = hidden.stream if hidden.delta is None else hidden.stream + hidden.delta
        rows = from_blocks(whole, length).unflatten(0, (batch, length))
        tables = (self.own_part(x.unflatten(1, (batch, length)), 2).flatten(1) for x in tables)
        x = in_blocks(self.own_part(rows, 1).flatten(0, 1), size)
        qk, *new = attention_projection_kernel(
            x, None, norm, self.qkv_proj.weight, *tables, rank, size, *own
        )
        keys, values = self.exchanged(torch.stack([self.heads(rows, batch) for rows in new]), 3)
        places = torch.arange(length, device=x.device)
        first = self.own_part(places, 0)[[start for start, _ in query_spans(size)]]
        bias = _mask_bias((places < first[:, None]).repeat(batch, 1), x.dtype)
        q, k = qk.split([rank.q_tiles, rank.stacks], 1)
        context = attention_share_kernel(
            q, k, new[1], *cache_in_runs(keys, values, bias), None, rank, batch
        )
        partial = attention_output_kernel(context, self.o_proj.weight, len(x), size, rank, *own[2:])
        partial = reduce_from_tensor_model_parallel_region(partial, self.group)
        rows = self.exchanged(from_blocks(partial, size).unflatten(0, (batch, size)), 1)
        delta = in_blocks(rows.flatten(0, 1), length)
        return hidden._replace(stream=whole, delta=delta), (keys, values)


def softmax_over(scores: torch.Tensor, ranks: Any) -> torch.Tensor:
    """Softmax over the last axis of the scores, of all ``ranks`` where there are any."""
    if ranks is None:
        return torch.softmax(scores, dim=-1)
    maxima = scores.amax(-1, keepdim=True)
    maxima = gather_from_sequence_parallel_region(maxima, 3, process_group=ranks)
    powers = torch.exp(scores - maxima.amax(-1, keepdim=True))
    sums = powers.sum(-1, keepdim=True)
    sums = gather_from_sequence_parallel_region(sums, 3, process_group=ranks)
    return powers / sums.sum(-1, keepdim=True)


def share_of_keys(weights: torch.Tensor, tokens: int, ranks: Any) -> torch.Tensor:
    """What this rank's keys have of each query's softmax, [heads, B * n] fp32: from the negated
    maximum and the sum of the queries' weights there, [B, heads * n, 2], of which all ranks'
    travel."""
    every = gather_from_sequence_parallel_region(weights[None], 0, process_group=ranks)
    lowest = every[..., 0].amin(0)
    total = (torch.exp(lowest - every[..., 0]) * every[..., 1]).sum(0)
    share = torch.exp(lowest - weights[..., 0]) * weights[..., 1] / total
    return share.unflatten(1, (-1, tokens)).transpose(0, 1).flatten(1)


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


def named_blocks(tables: torch.Tensor, blocks: int) -> torch.Tensor:
    """Tables of tiles [tiles, n], of which a number that no block has, of so many, stands for the
    tile before -> all of them."""
    tiles = torch.arange(len(tables), device=tables.device)
    named = torch.where(tables[:, 0] < blocks, tiles, 0)
    return tables[torch.cummax(named, 0).values].long()


def runs_of_window(bias: torch.Tensor, run: int, most: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Numbers [B, most] of the runs of so many keys from that on whose key a first query sees, and
    of bias [B, L] or [B, n, L] what is theirs."""
    length, by_query = bias.shape[-1], bias.reshape(len(bias), -1, bias.shape[-1])
    first = (by_query[:, 0] == 0).to(torch.int32).argmax(1) // run
    first = first.clamp_max(length // run - most)[:, None]
    number = first + torch.arange(most, device=bias.device)
    keys = (number[:, :, None] * run + torch.arange(run, device=bias.device)).flatten(1)
    theirs = by_query.gather(2, keys[:, None].expand(-1, by_query.shape[1], -1))
    return number, theirs.reshape(*bias.shape[:-1], -1)


def blocks_in_runs(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, bias: torch.Tensor,
    heads_apart: bool = False, window: Optional[int] = None,
) -> Tuple[torch.Tensor, ...]:  # fmt: skip
    """Caches of blocks [blocks, .., kv_heads, D], each sequence's blocks [B, n] and bias [B, L], L
    keys of them -> caches [rows, run, kv_heads, D], bias, and which rows, int32 [lanes, B * parts].
    Of ``heads_apart``, [blocks, kv_heads, block, D], [rows, run, D] and [lanes, B * parts * heads].

    Runs of a block's tokens are rows of HBM: as long as 128 partitions hold a whole sequence, not
    shorter than DMA likes, and not longer than SBUF's share for keys of a head. Row r of part p of
    a sequence lies on partition r - p * lanes; the bias is permuted as ``CacheTiles`` has the keys.
    Of a chunk that sequences share, one table of all, the bias has a row for each of them. Of a
    ``window`` only runs from the first key on that a first query sees, bias [B, L] or [B, n, L].
    """
    (*queries, length), (batch, _), dim = bias.shape, table.shape, keys.shape[-1]
    heads = keys.shape[1 if heads_apart else -2]
    block, size = math.prod(keys.shape[1:-1]) // heads, max(2, keys.dtype.itemsize) * dim
    wanted = min(length, window or length) / P_MAX
    wanted = max(wanted, DMA_ROW_BYTES / ((1 if heads_apart else heads) * size))
    run = 2 ** min(math.ceil(math.log2(max(1, wanted))), int(math.log2(CACHE_ROW_BYTES // size)))
    run = math.gcd(run, block)
    number, pieces = torch.arange(length // run, device=table.device)[None], block // run
    most = 1 if window is None else (window + 2 * run - 3) // run + 1  # of W - 1 keys, not aligned
    if window is not None and most < length // run:
        number, bias = runs_of_window(bias, run, most)
    apart, count = heads if heads_apart else 1, number.shape[1]
    named = table.long().gather(1, (number // pieces).expand(batch, -1))
    rows = named * (apart * pieces) + number % pieces
    parts = whole_tiles(count)
    lanes = math.ceil(count / parts)
    missing = parts * lanes - count
    bias = nn.functional.pad(bias, (0, missing * run), value=masked(bias.dtype))
    bias = bias.view(-1, parts, lanes, run).transpose(2, 3).reshape(*queries, -1)
    rows = nn.functional.pad(rows, (0, missing)).view(batch, parts, lanes)
    of_heads = pieces * torch.arange(apart, device=table.device)
    rows = (rows.permute(2, 0, 1)[..., None] + of_heads).reshape(lanes, -1).to(torch.int32)
    shape = (-1, run, dim) if heads_apart else (-1, run, heads, dim)
    return keys.reshape(shape), values.reshape(shape), bias, rows


def chunks_too_large(config: InferenceConfig) -> List[Tuple[bool, str]]:
    """(whether, what) chunks that several sequences share have too much of."""
    neuron_config, rank = config.neuron_config, Sizes.of(config).of_rank
    if not neuron_config.is_chunked_prefill:
        return []
    tokens, features = neuron_config.max_context_length, whole_tiles(config.hidden_size) * P_MAX
    quantised = option(config, "quantized")
    most = chunk_tokens(features, rank, neuron_config.torch_dtype.itemsize, quantised)
    sequences = neuron_config.chunked_prefill_config.max_num_seqs
    return [
        (tokens > most, f"a max_context_length of {tokens} in chunks, but one of at most {most}"),
        (sequences >= P_MAX, f"{sequences} sequences in a chunk, but at most {P_MAX - 1}"),
    ]


def refuse_what_kernels_lack(config: InferenceConfig) -> None:
    """ValueError for a model that the kernels do not cover."""
    sizes, neuron_config = Sizes.of(config), config.neuron_config
    q_heads, batch = sizes.of_rank.q_heads, neuron_config.max_batch_size
    qkv_bias, out_bias = attention_biases(config)
    quantised, narrow = option(config, "quantized"), option(config, "kv_cache_quant")
    precise = neuron_config.torch_dtype is torch.float32  # TensorE multiplies fp32 with fp32 only
    # rows that a table names
    named = option(config, "is_block_kv_layout") or window_of(config) is not None
    wide, in_parts = sizes.head_dim > P_MAX, parts_of_prompt(config) > 1
    lacking = [
        (out_bias, "attention_bias"),
        (wide and sizes.head_dim != 2 * P_MAX, f"head_dim {sizes.head_dim}"),
        (sizes.head_dim % 2, f"head_dim {sizes.head_dim}"),
        (wide and has_head_norms(config), f"norms over heads of {sizes.head_dim}"),
        (wide and neuron_config.flash_decoding_enabled, f"shares of heads of {sizes.head_dim}"),
        (wide and in_parts, f"parts of prompts of heads of {sizes.head_dim}"),
        (q_heads > P_MAX, f"{q_heads} query heads per rank"),
        (batch > P_MAX, f"a batch of {batch}"),
        (neuron_config.lora_config is not None and quantised, "adapters beside quantised weights"),
        *chunks_too_large(config),
        (precise and narrow and named, "fp8 blocks, or a window of an fp8 cache, in float32"),
        # the kernels see just what stands in front of a part
        (in_parts and neuron_config.padding_side == "left", "left padding in parts of a prompt"),
        (in_parts and window_of(config) is not None, "a sliding_window over parts of a prompt"),
        (qkv_bias and quantised, "biases behind quantised weights"),
        (precise and quantised, "quantised weights in a model of float32"),
        (getattr(config, "mlp_bias", False), "mlp_bias"),
        (config.hidden_act != "silu", f"hidden_act {config.hidden_act}"),
    ]
    for wrong, what in lacking:
        if wrong:
            raise ValueError(
                f"The kernels do not cover {what}, expected a Llama with SiLU, biases on queries, "
                "keys and values only, heads of 256 or an even number up to 128 and a batch "
                "of at most 128; run without --enable-nki."
            )


class NeuronLlamaDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.nki_enabled = is_nki_enabled(config)
        self.parallel = option(config, "sequence_parallel_enabled")
        if self.nki_enabled:
            refuse_what_kernels_lack(config)
        self.config = config
        self.self_attn = NeuronLlamaAttention(config)
        if parts_of_prompt(config) > 1:
            self.prompt_attn = PromptAttention(config)
        self.mlp = NeuronLlamaMLP(config)
        # the kernels find the gains in their weights
        norm, size = Norm if self.nki_enabled else NeuronLlamaRMSNorm, config.hidden_size
        self.input_layernorm = norm(size, config.rms_norm_eps)
        self.post_attention_layernorm = norm(size, config.rms_norm_eps)
        draft = option(config, "is_eagle_draft")
        if draft and not config.neuron_config.enable_eagle_draft_input_norm:
            self.input_layernorm = nn.Identity()

    def forward(self, hidden_states: Any, **kwargs: Any) -> Tuple[Any, ...]:
        """Hidden states, (K, V), cos, sin; a fifth item where the base passes ``residual``.

        NxDI 0.3 and later hand a ``residual`` keyword to every layer and read five results; before
        that they read exactly four.
        """
        hidden = hidden_states
        if self.nki_enabled:
            columns = Columns.of(hidden_states, self.parallel)
            hidden = columns.choose(self.config, kwargs.get("adapter_ids"))
        prompt = kwargs.get("past_key_value") is None and parts_of_prompt(self.config) > 1
        attention = self.prompt_attn if prompt else self.self_attn
        hidden, *results = attention(hidden, self.input_layernorm, **kwargs)
        hidden = self.mlp(hidden, self.post_attention_layernorm, kwargs.get("adapter_ids"))
        return hidden, *results, *([None] if "residual" in kwargs else [])


class NeuronLlamaHead(KernelWeight):
    """Final norm and LM head in one kernel; logits are gathered unless the device samples.

    The base class hands over just the last token of each sequence, so no other row is normalised.
    """

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        sizes, neuron_config = Sizes.of(config), config.neuron_config
        vocabulary = sizes.vocabulary // sizes.tp
        columns = whole_tiles(vocabulary) + whole_tiles(config.hidden_size)
        super().__init__(
            vocabulary, config.hidden_size, sizes.tp, neuron_config.torch_dtype, columns
        )
        self.vocabulary, self.gather_output = vocabulary, gather_output
        self.last_only = option(config, "prompt_in_chunks")
        normed = shows_hidden_states(config)
        self.norm = None if normed else Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """[B, S, H] -> logits [B, S, V] (of this rank where the device samples)."""
        if self.last_only:
            x = x[:, -1:]
        shape = x.shape[:-1]
        columns = in_blocks(x.reshape(-1, x.shape[-1]), 1)
        rows = linear_kernel(columns, self.weight, self.norm, self.scale)
        logits = rows[:, : self.vocabulary].reshape(*shape, self.vocabulary)
        return gather_from_tensor_model_parallel_region(logits) if self.gather_output else logits


def output_head(config: InferenceConfig, gather_output: bool) -> nn.Module:
    """Hidden states -> logits: a kernel, or a plain layer behind its norm."""
    if is_nki_enabled(config):
        return NeuronLlamaHead(config, gather_output)
    return ColumnParallelLinear(
        config.hidden_size, config.vocab_size, bias=False, gather_output=gather_output,
        dtype=config.neuron_config.torch_dtype, pad=True,
    )  # fmt: skip


def final_norm(config: InferenceConfig) -> nn.Module:
    """What stands behind the last layer; the head's kernel normalises where nothing else would."""
    if is_nki_enabled(config) and not shows_hidden_states(config):
        return SumOfColumns(config)
    norm = NormOfColumns if is_nki_enabled(config) else NeuronLlamaRMSNorm
    return norm(config.hidden_size, config.rms_norm_eps)


class NeuronLlamaModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.on_device_sampling = neuron_config.on_device_sampling_config is not None
        self.tp_degree = neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = Sizes.of(config).q_heads
        self.num_key_value_heads = Sizes.of(config).kv_heads
        if parts_of_prompt(config) > 1:  # whose replicas the cache's manager counts by itself
            self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = neuron_config.max_batch_size
        self.buckets = neuron_config.buckets
        self.medusa_speculation_length = neuron_config.medusa_speculation_length

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
        self.lm_head = output_head(config, gather)
        if option(config, "is_eagle_draft"):  # it continues hidden states, and has no final norm
            self.fc = DraftInput(
                2 * config.hidden_size, config.hidden_size, gather_output=True,
                bias=getattr(config, "fc_bias", False), dtype=neuron_config.torch_dtype,
            )  # fmt: skip
        else:
            self.norm = final_norm(config)
        for index in range(medusa_heads(config)):
            head = nn.Sequential(ResBlock(config.hidden_size), output_head(config, gather))
            setattr(self, f"medusa_head_{index}", head)
        self.layers = nn.ModuleList(
            NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )
        if is_nki_enabled(config) and neuron_config.quantized:
            quantise_kernel_weights(self, neuron_config)
        if is_nki_enabled(config) and adapter_ranks(config):
            # NxDI hands out the numbers of adapters, and changes layers that have their names
            self.idle_adapter = nn.Linear(1, 1, bias=False, dtype=neuron_config.torch_dtype)
            neuron_config.lora_config.target_modules = [IDLE_TARGET]

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        """The caches; the kernels take fp8 as it is stored, but for a model of float32."""
        super().init_inference_optimization(config)
        narrow = config.neuron_config.torch_dtype is not torch.float32
        if is_nki_enabled(config) and config.neuron_config.kv_cache_quant and narrow:
            self.kv_mgr.dequant_dtype = self.kv_mgr.quant_dtype
        if is_nki_enabled(config) and option(config, "is_block_kv_layout"):
            self.kv_mgr.get_cache = self.blocks_and_table

    def blocks_and_table(self, active_block_table: torch.Tensor, **_: Any) -> List[Any]:
        """Of each layer all blocks of keys and values, and those of each sequence [B, n]: in the
        place of copies that the manager would gather."""
        caches = list(self.kv_mgr.past_key_values)
        return [
            [keys, values, active_block_table] for keys, values in zip(caches[::2], caches[1::2])
        ]


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
    state: StateDict, attention: str, kv: int, sizes: Sizes, shards: Sequence[int] = ()
) -> None:
    """Weights, biases, scales and adapters of one layer's attention for replicated and padded
    heads; ranks take the ``shards`` of these numbers, where there are any."""
    for name in ATTENTION_TARGETS:
        dim = 1 if name == "o_proj" else 0
        for kind in ("weight", "lora_A") if dim else ("weight", "bias", "scale", "lora_B"):
            key = f"{attention}{name}.{kind}"
            if key not in state or state[key].numel() == 1:  # a scale for all rows
                continue
            if name in ("k_proj", "v_proj"):
                state[key] = spread_kv(state[key], sizes)
            else:
                state[key] = spread_queries(state[key], kv, sizes, dim)
            if shards:
                cut = state[key].chunk(len(shards), dim)
                state[key] = torch.cat([cut[shard] for shard in shards], dim)


def layouts_of_ranks(shares: Iterable[torch.Tensor]) -> torch.Tensor:
    """The kernel layouts of every rank's share [N, K], one after another."""
    return torch.cat([kernel_layout(share) for share in shares])


def peft_config(folder: str) -> Dict[str, Any]:
    """What PEFT says of an adapter."""
    content = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    others = set(content["target_modules"]) - {*ATTENTION_TARGETS, *MLP_TARGETS}
    if others:
        raise ValueError(
            f"The adapter {folder} changes {', '.join(sorted(others))}, expected some of "
            f"{', '.join((*ATTENTION_TARGETS, *MLP_TARGETS))}; train it on those."
        )
    return content


def read_adapter(folder: str) -> Iterable[Tuple[str, str, torch.Tensor]]:
    """(projection, "A" or "B", tensor [r, K] or [N, r]) of an adapter as PEFT saves it.

    alpha / r goes to A, or alpha / sqrt(r) where the adapter is rank-stabilised (Kalajdzievski
    2023); NxDI takes 1 for an alpha that is 0.
    """
    content = peft_config(folder)
    alpha, power = content.get("lora_alpha"), 0.5 if content.get("use_rslora") else 1.0
    # NxDI's reader: that of transformers 4.45 takes no file without metadata
    for key, tensor in load_file(str(Path(folder) / "adapter_model.safetensors")).items():
        found = re.search(r"(layers\.\d+\.\w+\.\w+)\.lora_([AB])(\.default)?\.weight$", key)
        if found is None:
            raise ValueError(
                f"The adapter {folder} has a tensor {key}, expected ...lora_A.weight or "
                "...lora_B.weight of layers; train it on those."
            )
        scale = alpha / len(tensor) ** power if alpha and found[2] == "A" else 1.0
        yield found[1], found[2], tensor.float() * scale


def add_adapters(state: StateDict, config: InferenceConfig) -> None:
    """A [ranks, K] and B [N, ranks] of all adapters, beside each weight that one of them changes;
    an adapter of a smaller rank has zeros behind its own."""
    lora, ranks = config.neuron_config.lora_config, adapter_ranks(config)
    for number, folder in enumerate(lora.lora_ckpt_paths.values()):
        for name, kind, tensor in read_adapter(folder):
            weight = state.get(f"{name}.weight")
            rank, features = tensor.shape if kind == "A" else tensor.shape[::-1]
            expected = None if weight is None else weight.shape[1 if kind == "A" else 0]
            if features != expected or rank > lora.max_lora_rank:
                raise ValueError(
                    f"The adapter {folder} has lora_{kind} {list(tensor.shape)} for {name}, "
                    f"expected a rank of at most {lora.max_lora_rank} and {expected} features; "
                    "take one that was trained on this model."
                )
            shape = (ranks, features) if kind == "A" else (features, ranks)
            whole = state.setdefault(f"{name}.lora_{kind}", torch.zeros(shape))
            own = slice(number * lora.max_lora_rank, number * lora.max_lora_rank + rank)
            whole[own if kind == "A" else (slice(None), own)] = tensor


def times_gain(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A weight [N, H] behind a norm times the norm's gain [H]: one rounding of each element, where
    PyTorch rounds each normed feature."""
    return (weight.to(torch.float32) * gain.to(torch.float32)).to(weight.dtype)


def in_columns(scale: torch.Tensor) -> torch.Tensor:
    """[N, 1] in the order of a kernel weight's rows -> [128, N/128]."""
    return pad_tiles(scale, 0).reshape(-1, P_MAX).t()


def of_ranks(*parts: OfRanks) -> torch.Tensor:
    """What each rank has of every part, side by side; ranks below each other."""
    return torch.cat([torch.cat(share, 1) for share in zip(*parts)])


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

    def converted(self, adapters: str) -> List[OfRanks]:
        """Each projection's weights [N, K], out of the checkpoint. What there are of scales and
        adapters stays in it, as the kernel takes them: the scales beside the last projection."""
        with_gain = not self.convert_scales()
        self.convert_adapters(adapters)
        found = []
        for name in self.cuts:
            weight = self.state.pop(f"{name}.weight")
            if name == self.output:
                found.append([in_runs(share, 0) for share in self.input_columns(name, weight)])
                continue
            weight = times_gain(weight, self.gain) if with_gain else weight
            found.append([in_runs(share, 1) for share in self.output_rows(name, weight)])
        return found

    def convert_scales(self) -> bool:
        """Whether a weight is quantised: scales have a row for each output feature, or one in all,
        ones for weights in float, and the norm's gain stands behind those that contract it."""
        scales = {name: self.state.pop(f"{name}.scale", None) for name in self.cuts}
        if all(scale is None for scale in scales.values()):
            return False
        columns = []
        for name, scale in scales.items():
            rows = torch.ones(1, 1) if scale is None else scale.float().reshape(-1, 1)
            every = self.output_rows(name, rows.expand(len(self.state[f"{name}.weight"]), 1))
            # features of V lie in rows: each partition has the scales of all
            across = name.endswith("v_proj")
            columns.append([x.t().expand(P_MAX, -1) if across else in_columns(x) for x in every])
        gains = [in_columns(in_runs(self.gain.float()[:, None], 0))] * self.tp
        columns.insert(len(columns) - (self.output in scales), gains)
        self.state[f"{[*scales][-1]}.scale"] = of_ranks(*columns)
        return True

    def convert_adapters(self, adapters: str) -> None:
        """What KernelAdapters hold: A [R, K] and B [N, R] of all projections side by side, zeros
        where one has none; nothing where none has."""
        some = [name for name in self.cuts if f"{name}.lora_A" in self.state]
        if not some:
            return
        ranks, down, across = len(self.state[f"{some[0]}.lora_A"]), [], []
        for name in self.cuts:
            n, k = self.state[f"{name}.weight"].shape
            a = self.state.pop(f"{name}.lora_A", torch.zeros(ranks, k))
            b = self.state.pop(f"{name}.lora_B", torch.zeros(n, ranks))
            every = self.input_columns(name, a if name == self.output else times_gain(a, self.gain))
            tiled = [pad_tiles(share, 1).unflatten(1, (-1, P_MAX)) for share in every]
            down.append([share.permute(2, 1, 0).flatten(1) for share in tiled])
            across.append([pad_tiles(share, 0).t() for share in self.output_rows(name, b)])
        self.state[f"{adapters}.a.weight"] = of_ranks(*down)
        self.state[f"{adapters}.b.weight"] = of_ranks(*across)


def heads_in_tiles(sizes: Sizes, group: int) -> Callable[[torch.Tensor], OfRanks]:
    """A cut of rows of heads, ``group`` for each KV head, which then lie in a rank's tiles."""
    return lambda rows: [sizes.of_rank.order(x, group) for x in rows.chunk(sizes.tp)]


def attention_for_kernels(
    state: StateDict, attention: str, gain: torch.Tensor, sizes: Sizes
) -> None:
    """What the attention kernels read of one layer, behind a norm with this ``gain``."""
    *inputs, output = names = [f"{attention}{name}" for name in ATTENTION_TARGETS]
    queries, keys = (heads_in_tiles(sizes, group) for group in (sizes.group, 1))
    cuts = dict(zip(names, (queries, keys, lambda rows: rows.chunk(sizes.tp), queries)))
    own = KernelProjections(state, cuts, output, gain, sizes.tp)
    if f"{inputs[0]}.bias" in state:
        biases = [own.output_rows(name, state.pop(f"{name}.bias")[:, None]) for name in inputs]
        rows = [pad_tiles(torch.cat(share), 0).t() for share in zip(*biases)]
        state[f"{attention}qkv_bias.weight"] = torch.cat(rows)
    if f"{attention}q_norm.weight" in state:
        gains = torch.stack([state.pop(f"{attention}{name}_norm.weight") for name in "qk"], 1)
        state[f"{attention}head_gains"] = in_lanes(gains, sizes.head_dim)
    if len({state[f"{name}.weight"].dtype for name in inputs}) > 1:
        raise ValueError(
            "One kernel multiplies with q, k and v: expected all of them or none quantised; name "
            "all three or none in modules_to_not_convert."
        )
    *qkv, out = own.converted(f"{attention}adapters")
    together = (torch.cat(share) for share in zip(*qkv))
    state[f"{attention}qkv_proj.weight"] = layouts_of_ranks(together)
    state[f"{output}.weight"] = layouts_of_ranks(out)


def mlp_for_kernels(state: StateDict, mlp: str, gain: torch.Tensor, tp: int) -> None:
    """What the MLP's kernel reads of one layer, behind a norm with this ``gain``."""
    names = [f"{mlp}{name}" for name in MLP_TARGETS]
    cuts = dict.fromkeys(names, lambda rows: rows.chunk(tp))
    own = KernelProjections(state, cuts, names[-1], gain, tp)
    for name, shares in zip(names, own.converted(f"{mlp}adapters")):
        state[f"{name}.weight"] = layouts_of_ranks(shares)


def convert_layer(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """Spread the heads of one layer, and put its weights in kernel layout for the kernels."""
    attention, sizes, parts = f"{prefix}self_attn.", Sizes.of(config), parts_of_prompt(config)
    kv, attentions, shards = config.num_key_value_heads, {attention: sizes}, []
    if parts > 1:
        own, size = f"{prefix}prompt_attn.", sizes.tp // parts
        attentions[own] = Sizes.of(config, size)
        keys = [key for key in state if key.startswith(attention)]
        state |= {key.replace(attention, own): state[key] for key in keys}
        state[f"{own}rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
        spread_heads(state, own, kv, attentions[own])
        # a rank decodes with keys and values that its group's rank has had, as NxDI orders them
        shards = [rank % size * parts + rank // size for rank in range(sizes.tp)]
    spread_heads(state, attention, kv, sizes, shards)
    if config.num_cores_per_group > 1:
        state[f"{attention}rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
    if is_nki_enabled(config):
        gain = state.pop(f"{prefix}input_layernorm.weight")
        for name, own_sizes in attentions.items():
            attention_for_kernels(state, name, gain, own_sizes)
        gain = state.pop(f"{prefix}post_attention_layernorm.weight")
        mlp_for_kernels(state, f"{prefix}mlp.", gain, sizes.tp)


def heads_for_kernels(state: StateDict, config: InferenceConfig, tp: int) -> None:
    """What the kernel of the LM head reads, tied to the embedding where the checkpoint has none,
    and that of Medusa's heads."""
    state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    apart = shows_hidden_states(config)  # then a norm of its own is in front
    gain = torch.ones(config.hidden_size) if apart else state.pop("norm.weight")
    heads = ["lm_head", *(f"medusa_head_{i}.1" for i in range(medusa_heads(config)))]
    for head in heads:
        cuts = {head: lambda rows: [in_runs(share, 0) for share in rows.chunk(tp)]}
        (shares,) = KernelProjections(state, cuts, None, gain, tp).converted(head)
        state[f"{head}.weight"] = layouts_of_ranks(shares)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        """With the single-token graph, which NxDI 0.2 and later leave out: generation needs it."""
        super().enable_speculation(*args, **kwargs)
        decodes = hasattr(self, "token_generation_model")
        if option(self, "prompt_in_chunks") and not decodes:
            self.enable_token_generation()

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
        sizes, nki_enabled = Sizes.of(config), is_nki_enabled(config)
        # fp8 moves as the bytes that it is: not every release of PyTorch joins or pads it
        state = {
            name: tensor.view(torch.int8) if tensor.dtype is torch.float8_e4m3fn else tensor
            for name, tensor in state_dict.items()
        }
        if nki_enabled and config.neuron_config.torch_dtype is torch.float32:
            # a norm's gain times a weight in bf16 has more digits than that
            state = {name: tensor.float() for name, tensor in state.items()}
        if nki_enabled and adapter_ranks(config):
            state[f"{IDLE_TARGET}.weight"] = torch.zeros(1, 1)
            add_adapters(state, config)
        for layer in range(config.num_hidden_layers):
            convert_layer(state, f"layers.{layer}.", config)
        if nki_enabled:
            heads_for_kernels(state, config, sizes.tp)
        state["rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
        if config.neuron_config.vocab_parallel:
            state["embed_tokens.rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
        dtype = QUANTISED_DTYPES[config.neuron_config.quantization_dtype]
        return {
            name: tensor.view(dtype) if tensor.dtype is torch.int8 else tensor
            for name, tensor in state.items()
        }

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """Tie a plain head to the embedding; a head in kernel layout is there already."""
        if "lm_head.weight" not in state_dict:
            state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
