"""Layers of llama.py with all that they may have: adapters, scales, biases, norms over heads.

Kernels take these one by one behind the operands of those of llama.py, each None where a model has
none; of SDK 2.21 nothing public shows tensors inside of tuples, dicts or classes as arguments:

  qkv_b_hbm     [1, tiles * 128]           biases of Q, K and V
  gains_hbm     [128, 2]                   of norms over query and key heads
  scales_hbm    [128, columns]             fp32, of quantised weights, in the order of their use
  a_hbm, b_hbm  [128, K/128 * R], [R, N]   adapters of all projections side by side
  chosen_hbm    [R, T]                     ones for the ranks that are a token's
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed_inference.models.config import InferenceConfig

from llama import (
    P_MAX, AttentionLayer, Columns, Hbm, HeadShape, Linear, Sbuf, gated_mlp, multiply_rows,
    option, token_blocks, weight_pieces, whole_tiles,
)  # fmt: skip
from llama_queries import Prompt, attend_prompt
from llama_adapters import AdaptedAttention, AdaptedMLP, Adapters, split_adapters
from llama_quantised import (
    EVEN_TURNS, QuantisedAttention, QuantisedHead, QuantisedMLP, in_bfloat16, quantised_pieces,
    scale_columns,
)  # fmt: skip
from llama_families import FamilyAttention, HeadGains, qkv_biases, shows_hidden_states


class AnyLinear(NamedTuple):
    """A Linear of llama.py of any weight. Integers are converted in ``turns``, see
    ``in_bfloat16``; ``itemsize`` is that of the weight, or of one that is loaded in step with it;
    in ``room_sb`` [128, n], if any, stands what of the weight has so much room there."""

    weight_hbm: Hbm
    k_tiles: int
    scale_sb: Optional[Sbuf] = None
    added: Sequence[Any] = ()
    turns: str = EVEN_TURNS
    itemsize: int = 2
    room_sb: Optional[Sbuf] = None

    tiles, scales, piece = Linear.tiles, Linear.scales, Linear.piece
    rows, inputs = Linear.rows, Linear.inputs

    def pieces(self, tokens, last=False, tiles=None, row_bytes=None):
        """As those of Linear."""
        given = tiles or self.tiles, self.k_tiles, tokens, last
        if self.itemsize == 1:
            return quantised_pieces(*given, row_bytes)
        return weight_pieces(*given, self.itemsize, row_bytes)

    def room(self, place, tiles):
        """The same; of ``room_sb`` the part from tile ``place`` on."""
        shape, each = (P_MAX, tiles, self.k_tiles, P_MAX), self.k_tiles * P_MAX
        if self.room_sb is None or (place + tiles) * each > self.room_sb.shape[1]:
            return nl.ndarray(shape, self.weight_hbm.dtype)
        return self.room_sb[:, nl.ds(place * each, tiles * each)].reshape(shape)

    def ready(self, weight_sb):
        """In a type that TensorE takes."""
        return in_bfloat16(weight_sb, self.turns) if self.weight_hbm.dtype == nl.int8 else weight_sb


def itemsize_of(weight_hbm):
    """Bytes of an element; None where a kernel has no such weight."""
    return 2 if weight_hbm is None else weight_hbm.itemsize


class QkvTerms(NamedTuple):
    """What is added to queries, keys and values: of each the rows of adapters @ SBUF and the
    Adapters themselves, one or none, and the biases @ HBM."""

    adapters: List[Tuple[List[Any], Sequence[Adapters]]]
    bias_hbm: Hbm
    heads: HeadShape

    def of_tokens(self, x_sb, scales, token):
        """Rows and inputs, of each of the three as for ``add_terms``, of tokens x_sb [128, H/128,
        T] from number ``token`` on."""
        biases = qkv_biases(self.bias_hbm, self.heads, scales, x_sb.dtype)
        found = []
        for (rows, terms), (bias, inverse) in zip(self.adapters, biases):
            inputs = [row_sb for term in terms for row_sb in term.inputs(x_sb, token)]
            found.append((rows + bias, inputs + inverse))
        return found


def layer_of(hidden, norm, heads, weights, tables, terms, scales_hbm, adapters, turns=EVEN_TURNS):
    """The AttentionLayer, all @ HBM: ``hidden``, ``weights`` and ``tables`` as for
    ``AttentionLayer.of``; ``terms`` are the bias of Q, K and V and the gains of their heads' norms;
    ``adapters`` as for ``split_adapters``; ``turns`` of the output's weight."""
    k_tiles, (bias_hbm, gains_hbm) = hidden[0].shape[0] // P_MAX, terms
    columns = heads.qk_tiles + heads.kv_features, k_tiles, k_tiles
    qkv_scale_sb, gain_sb, out_scale_sb = scale_columns(scales_hbm, columns)
    tiles = heads.q_tiles, heads.stacks, whole_tiles(heads.kv_features), k_tiles
    *split, of_out = split_adapters(adapters, [k_tiles] * 3 + [heads.q_tiles], tiles)
    of_qkv = [
        ([row_sb for term in each for row_sb in term.rows(0, count)], each)
        for each, count in zip(split, tiles)
    ]
    qkv = AnyLinear(weights[0], k_tiles, qkv_scale_sb, itemsize=itemsize_of(weights[0]))
    out = AnyLinear(weights[1], heads.q_tiles, out_scale_sb, of_out, turns, itemsize_of(weights[1]))
    head_norm = None if gains_hbm is None else HeadGains(gains_hbm)
    added = QkvTerms(of_qkv, bias_hbm, heads)
    return AttentionLayer(*hidden, norm, heads, qkv, out, *tables, gain_sb, head_norm, added)


# --- Kernels --------------------------------------------------------------------------------------


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None, scales_hbm=None):
    """``linear_kernel`` of llama.py; scales [128, N/128] of its features and [128, H/128] of the
    norm."""
    k_tiles = x_hbm.shape[0] // P_MAX
    tiles = weight_hbm.shape[1] // (k_tiles * P_MAX)
    shape = x_hbm.shape[1], tiles * P_MAX
    out_hbm = nl.ndarray(shape, x_hbm.dtype, buffer=nl.shared_hbm)
    scale_sb, gain_sb = scale_columns(scales_hbm, (tiles, k_tiles))
    linear = AnyLinear(weight_hbm, k_tiles, scale_sb, itemsize=weight_hbm.itemsize)
    multiply_rows(x_hbm, linear, norm, out_hbm, gain_sb)
    return out_hbm


@nki.jit
def attention_prefill_kernel(
    x_hbm, delta_hbm, norm, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, heads, batch,
    bias_hbm=None, qkv_b_hbm=None, gains_hbm=None, scales_hbm=None,
    a_hbm=None, b_hbm=None, chosen_hbm=None, window=None,
):  # fmt: skip
    """``attention_prefill_kernel`` of llama.py for heads and lengths of any size.

    bias [B, S] hides left padding. Scales: columns of Q and K, a tile each, of V, a feature each,
    of the norm and of the output, H/128 each; adapters of Q, K, V and output. ``window``: tokens
    that a query sees, itself included, None for all; tiles of keys that none of a tile's queries
    sees are left out.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    layer = layer_of(
        (x_hbm, delta_hbm, stream_hbm, out_hbm), norm, heads, (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm), (qkv_b_hbm, gains_hbm), scales_hbm, (a_hbm, b_hbm, chosen_hbm),
    )  # fmt: skip
    blocks = token_blocks(features, tokens, tokens // batch)
    attend_prompt(Prompt.of(layer, bias_hbm, window, blocks), keys_hbm, values_hbm)
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def swiglu_mlp_kernel(
    x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm, scales_hbm=None, length=None, a_hbm=None,
    b_hbm=None, chosen_hbm=None,
):  # fmt: skip
    """``swiglu_mlp_kernel`` of llama.py. Scales: columns of gate and up, F/128 each, of the norm
    and of down, H/128 each; adapters of the three."""
    shape, dtype = x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    zero_sb = nisa.memset((P_MAX, 1), 0.0, nl.float32)
    weights, k_tiles = (gate_hbm, up_hbm, down_hbm), shape[0] // P_MAX
    tiles = gate_hbm.shape[1] // (k_tiles * P_MAX)
    gate_sb, up_sb, gain_sb, down_sb = scale_columns(scales_hbm, (tiles, tiles, k_tiles, k_tiles))
    contracted, features = (k_tiles, k_tiles, tiles), (tiles, tiles, k_tiles)
    added = split_adapters((a_hbm, b_hbm, chosen_hbm), contracted, features)
    inner = min(gate_hbm.itemsize, up_hbm.itemsize)  # they are loaded in step
    each = zip(weights, contracted, (gate_sb, up_sb, down_sb), added)
    sizes = inner, inner, down_hbm.itemsize
    linears = [AnyLinear(*given, itemsize=size) for given, size in zip(each, sizes)]
    gated_mlp((x_hbm, delta_hbm, stream_hbm, out_hbm), norm, linears, length, zero_sb, gain_sb)
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)


# --- Modules --------------------------------------------------------------------------------------


class AnyMLP(AdaptedMLP, QuantisedMLP):
    """The MLP with adapters and scales."""

    def multiply(self, hidden, norm, weights):
        results = swiglu_mlp_kernel(
            hidden.stream, hidden.delta, norm, *weights, self.down_proj.scale, hidden.shape[1],
            *self.adapters.operands(hidden),
        )  # fmt: skip
        return (results,) if hidden.delta is None else results


class AnyAttention(AdaptedAttention, QuantisedAttention, FamilyAttention):
    """Attention with adapters, scales, biases and norms over heads."""

    def operands(self, hidden: Columns) -> List[Optional[torch.Tensor]]:
        """What kernels take behind the others: bias, gains, scales and adapters, each or None."""
        bias_row = None if self.qkv_bias is None else self.qkv_bias.weight
        return [bias_row, self.head_gains, self.o_proj.scale, *self.adapters.operands(hidden)]


class AnyHead(QuantisedHead):
    """The head with scales; behind hidden states that are normalised, without a norm."""

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        super().__init__(config, gather_output)
        self.last_only = option(config, "prompt_in_chunks")
        if shows_hidden_states(config):
            self.norm = None

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        """Of a chunk of a prompt just the last row."""
        return super().forward(x[:, -1:] if self.last_only else x, *others)

    def multiply(self, columns: torch.Tensor) -> torch.Tensor:
        return linear_kernel(columns, self.weight, self.norm, self.scale)
