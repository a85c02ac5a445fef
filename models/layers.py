"""Layers of llama.py with every addition: adapters, scales, biases, norms over heads.

Kernels take these operands after llama.py's, each None where a model has none. They come one by
one: nothing public shows tensors inside of tuples, dicts or classes as arguments of SDK 2.21.

  qkv_b_hbm     [1, tiles * 128]           biases of Q, K and V
  gains_hbm     [128, 2]                   of norms over query and key heads
  scales_hbm    [128, columns]             fp32, of quantised weights, in the order of their use
  a_hbm, b_hbm  [128, K/128 * R], [R, N]   adapters of all projections side by side
  chosen_hbm    [R, T]                     ones for the ranks that are a token's
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed_inference.models.config import InferenceConfig

import models.weights
from llama import (
    PIECE_BYTES,
    PROMPT_BYTES,
    P_MAX,
    AttentionLayer,
    Columns,
    Hbm,
    HeadShape,
    Hidden,
    Linear,
    NormScales,
    Piece,
    Projection,
    PromptAttention,
    PromptPlan,
    Sbuf,
    StateDict,
    Tokens,
    causal_mask,
    gated_mlp,
    is_nki_enabled,
    multiply_rows,
    norm_scales,
    option,
    psum,
    token_blocks,
    token_chunk,
    weight_pieces,
    whole_tiles,
)
from models.adapters import (
    AdaptedAttention,
    AdaptedMLP,
    Adapters,
    add_terms,
    convert_adapters,
    split_adapters,
)
from models.families import (
    FamilyAttention,
    HeadGains,
    HeadNorm,
    medusa_heads,
    post_norm,
    qkv_biases,
    shows_hidden_states,
)
from models.quantised import (
    EVEN_TURNS,
    SOFTMAX_TURNS,
    Gain,
    QuantisedAttention,
    QuantisedHead,
    QuantisedMLP,
    convert_scales,
    in_bfloat16,
    quantised_pieces,
    scale_columns,
    times_features,
)
from models.queries import ADAPTER_BYTES, attend_prompt

# hidden_act of config.json -> the function of ScalarE
ACTIVATIONS = {"silu": nl.silu, "gelu_pytorch_tanh": nl.gelu_apprx_tanh}


class AnyLinear(NamedTuple):
    """A Linear of llama.py with a weight of any type, scales, a gain and adapters.

    Scales [128, N/128] fp32 @ SBUF of a quantised weight multiply its products; the Gain of the
    norm before it multiplies the hidden states. The inputs of ``added`` adapters are ``made`` once
    for each Block, by its first token. Integers are converted in ``turns``, see ``in_bfloat16``.
    ``itemsize`` is that of a weight that is loaded in step with it, or None. ``head_gains`` and
    ``terms`` belong to an AnyLayer.
    """

    weight_hbm: Hbm
    k_tiles: int
    scale_sb: Optional[Sbuf]
    gain: Optional[Gain]
    added: Sequence[Adapters]
    made: Dict[int, List[Any]]
    turns: str = EVEN_TURNS
    itemsize: Optional[int] = None
    head_gains: Optional[HeadGains] = None
    terms: Optional[QkvTerms] = None

    tiles = Linear.tiles  # type: ignore[misc]

    def pieces(self, tokens, last=False, tiles=None, row_bytes=PIECE_BYTES):
        """The pieces, as ``Linear.pieces`` has them."""
        itemsize, tiles = self.itemsize or self.weight_hbm.itemsize, tiles or self.tiles
        if itemsize == 1:
            return quantised_pieces(tiles, self.k_tiles, tokens, last, row_bytes)
        return weight_pieces(tiles, itemsize * self.k_tiles * P_MAX, tokens, last, row_bytes)

    def load(self, first, tiles):
        """The AnyPiece of some tiles, in a type that TensorE takes."""
        weight_sb = Linear.load(self, first, tiles).weight_sb
        if self.weight_hbm.dtype == nl.int8:
            weight_sb = in_bfloat16(weight_sb, self.turns)
        rows = [row_sb for term in self.added for row_sb in term.rows(first, tiles)]
        return AnyPiece(self, first, weight_sb, rows)

    def inputs(self, tokens):
        """The inputs of the adapters, for Tokens [128, K/128, T]."""
        start = tokens.block.start
        if start not in self.made:
            every = [term.inputs(tokens.x_sb, start) for term in self.added]
            self.made[start] = [inputs_sb for inputs in every for inputs_sb in inputs]
        return self.made[start]


class AnyPiece(NamedTuple):
    """A Piece of an AnyLinear, with the rows of its adapters."""

    linear: AnyLinear
    first: int
    weight_sb: Sbuf
    rows: List[Any]

    def product(self, bank, tokens):
        """Multiply as ``Piece.product`` does; with scales, the result is fp32 @ SBUF."""
        (tile, tiles, at, _), linear = bank, self.linear
        gained = tokens if linear.gain is None else linear.gain.of(tokens)
        out_psum = Piece.product(self, bank, gained)
        add_terms(out_psum, self.rows, linear.inputs(tokens), tile, at)
        if linear.scale_sb is None:
            return out_psum
        return times_features(out_psum, linear.scale_sb[:, nl.ds(self.first + tile, tiles)])


class AnyLayer(AttentionLayer):
    """An AttentionLayer of llama.py with AnyLinears. The one of Q, K and V may have norms over
    heads and terms that are added to its results."""

    def projection(self, tokens, tiles):
        """The AnyProjection of Tokens."""
        (block, x_sb), gains, heads, head_norm = tokens, self.qkv.head_gains, self.heads, None
        scales, columns = norm_scales(x_sb, self.norm, tiles), nl.ds(block.start, block.count)
        tables = [nl.load(table_hbm[:, columns]) for table_hbm in (self.cos_hbm, self.sin_hbm)]
        if gains is None:
            tables = [nisa.tensor_tensor(x, scales.along_sb, nl.multiply) for x in tables]
        else:
            head_norm = gains.loaded(self.norm, heads)
        qk_sb = nl.ndarray((P_MAX, heads.q_tiles + heads.stacks, block.count), x_sb.dtype)
        v_sb = [nl.ndarray((size, heads.kv_features), x_sb.dtype) for _, size in tiles]
        terms = self.qkv.terms.of_tokens(x_sb, scales, block.start)
        made = tiles, qk_sb, v_sb, head_norm, terms
        return AnyProjection(self, tokens, scales, *tables, *made)


class AnyProjection(NamedTuple):
    """A Projection of llama.py with a norm of heads, or None. ``added`` has the rows and inputs, as
    for ``add_terms``, for queries, keys and values."""

    layer: AnyLayer
    tokens: Tokens
    scales: NormScales
    cos_sb: Sbuf
    sin_sb: Sbuf
    tiles: List[Tuple[int, int]]
    qk_sb: Sbuf
    v_sb: List[Sbuf]
    head_norm: Optional[HeadNorm]
    added: List[Tuple[List[Any], List[Any]]]

    context_sb, rope = Projection.context_sb, Projection.rope  # type: ignore[misc]
    store_keys = Projection.store_keys  # type: ignore[misc]

    def project(self, piece, at):
        """Project as ``Projection.project`` does."""
        heads, tile = self.layer.heads, at - piece.first
        values = heads.q_tiles + heads.stacks
        if at >= values:
            self.project_values(piece, tile, (at - values) * P_MAX)
            return
        which = int(at >= heads.q_tiles)
        x_psum = piece.product((tile, 1, 0, self.tokens.block.count), self.tokens)
        add_terms(x_psum, *self.added[which], at - which * heads.q_tiles, 0)
        x = x_psum[:, 0, :]
        if self.head_norm is not None:
            x = self.head_norm.normed(x, self.scales.along_sb, which, self.qk_sb.dtype)
        self.rope(x, at, not which)

    def project_values(self, piece, tile, start):
        """Project to a tile of V's features, times their scales, from feature ``start`` on."""
        layer, heads, x = self.layer, self.layer.heads, self.tokens
        gained_sb = (x if layer.qkv.gain is None else layer.qkv.gain.of(x)).x_sb
        width = min(P_MAX, heads.kv_features - start)
        columns = nl.ds(start, width)
        for (at, size), norm_sb, rows_sb in zip(self.tiles, self.scales.down_sb, self.v_sb):
            acc_psum, tokens = psum((size, width)), nl.ds(at, size)
            for k in nl.affine_range(gained_sb.shape[1]):
                acc_psum[...] += nisa.nc_matmul(
                    gained_sb[:, k, tokens], piece.weight_sb[:, tile, k, 0:width]
                )
            for b_sb, inputs_sb in zip(*self.added[2]):
                acc_psum[...] += nisa.nc_matmul(inputs_sb[:, tokens], b_sb[:, columns])
            if layer.qkv.scale_sb is None:
                rows_sb[:, columns] = nisa.tensor_scalar(acc_psum, nl.multiply, norm_sb)
                continue
            rows_sb[:, columns] = nisa.scalar_tensor_tensor(
                data=acc_psum,
                op0=nl.multiply,
                operand0=norm_sb,
                op1=nl.multiply,
                operand1=layer.qkv.scale_sb[
                    0:size, nl.ds(heads.q_tiles + heads.stacks + start, width)
                ],
            )


class QkvTerms(NamedTuple):
    """Terms that are added to queries, keys and values: for each the rows of adapters @ SBUF with
    the Adapters, one or none, and the biases @ HBM."""

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


def prompt_plans(layer, length):
    """The PromptPlans that fit beside the additional tiles of an AnyLayer."""
    x_hbm, heads = layer.hidden.x_hbm, layer.heads
    (features, tokens), itemsize = x_hbm.shape, x_hbm.itemsize
    if heads.head_dim not in (64, P_MAX):
        return []
    k_tiles, most = features // P_MAX, PROMPT_BYTES - (ADAPTER_BYTES if layer.out.added else 0)
    gained = 0 if layer.qkv.gain is None else 2 * itemsize * k_tiles  # for each token of a block
    return [
        plan
        for plan in PromptPlan.fitting(features, heads, tokens, length, itemsize)
        if plan.bytes(k_tiles, heads, itemsize) + gained * plan.blocks[0].count <= most
    ]


def layer_of(hidden, norm, heads, weights, tables, terms, scales_hbm, adapters):
    """The AnyLayer, all @ HBM: Hidden states, ``weights`` of Q, K and V and of the output,
    ``tables`` of cos and sin; ``terms`` are the bias of Q, K and V and the gains of their heads'
    norms; ``adapters`` as for ``split_adapters``."""
    k_tiles, (bias_hbm, gains_hbm) = hidden.x_hbm.shape[0] // P_MAX, terms
    columns = heads.q_tiles + heads.stacks + heads.kv_features, k_tiles, k_tiles
    qkv_scale_sb, gain_sb, out_scale_sb = scale_columns(scales_hbm, columns)
    tiles = heads.q_tiles, heads.stacks, whole_tiles(heads.kv_features), k_tiles
    *split, of_out = split_adapters(adapters, [k_tiles] * 3 + [heads.q_tiles], tiles)
    of_qkv = [
        ([row_sb for term in each for row_sb in term.rows(0, count)], each)
        for each, count in zip(split, tiles)
    ]
    gain = None if gain_sb is None else Gain(gain_sb, {})
    qkv = weights[0], k_tiles, qkv_scale_sb, gain, (), {}
    out = weights[1], heads.q_tiles, out_scale_sb, None, of_out, {}, SOFTMAX_TURNS
    head_gains = None if gains_hbm is None else HeadGains(gains_hbm)
    terms = QkvTerms(of_qkv, bias_hbm, heads)
    qkv, out = AnyLinear(*qkv, head_gains=head_gains, terms=terms), AnyLinear(*out)
    return AnyLayer.of(hidden, norm, heads, qkv, out, *tables)


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
    gain = None if gain_sb is None else Gain(gain_sb, {})
    linear = AnyLinear(weight_hbm, k_tiles, scale_sb, gain, (), {})
    multiply_rows(x_hbm, linear, norm, out_hbm)
    return out_hbm


@nki.jit
def attention_prefill_kernel(
    x_hbm,
    delta_hbm,
    norm,
    qkv_w_hbm,
    out_w_hbm,
    cos_hbm,
    sin_hbm,
    heads,
    batch,
    bias_hbm=None,
    qkv_b_hbm=None,
    gains_hbm=None,
    scales_hbm=None,
    a_hbm=None,
    b_hbm=None,
    chosen_hbm=None,
    window=None,
):
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
        Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm),
        norm,
        heads,
        (qkv_w_hbm, out_w_hbm),
        (cos_hbm, sin_hbm),
        (qkv_b_hbm, gains_hbm),
        scales_hbm,
        (a_hbm, b_hbm, chosen_hbm),
    )
    length, rows_hbm = tokens // batch, (keys_hbm, values_hbm)
    plans = prompt_plans(layer, length) if window is None and bias_hbm is None else []
    if plans:
        PromptAttention(layer, plans[0], causal_mask(P_MAX, dtype), {}, *rows_hbm).run()
    else:
        attend_prompt(layer, token_blocks(features, tokens, length), bias_hbm, window, rows_hbm)
    results = out_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def swiglu_mlp_kernel(
    x_hbm,
    delta_hbm,
    norm,
    gate_hbm,
    up_hbm,
    down_hbm,
    scales_hbm=None,
    length=None,
    a_hbm=None,
    b_hbm=None,
    chosen_hbm=None,
    act="silu",
):
    """``swiglu_mlp_kernel`` of llama.py, with one of the ACTIVATIONS. Scales: columns of gate and
    up, F/128 each, of the norm and of down, H/128 each; adapters of the three."""
    shape, dtype = x_hbm.shape, x_hbm.dtype
    out_hbm = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    weights, k_tiles = (gate_hbm, up_hbm, down_hbm), shape[0] // P_MAX
    tiles = gate_hbm.shape[1] // (k_tiles * P_MAX)
    gate_sb, up_sb, gain_sb, down_sb = scale_columns(scales_hbm, (tiles, tiles, k_tiles, k_tiles))
    contracted, features = (k_tiles, k_tiles, tiles), (tiles, tiles, k_tiles)
    added = split_adapters((a_hbm, b_hbm, chosen_hbm), contracted, features)
    gain = None if gain_sb is None else Gain(gain_sb, {})
    each = zip(weights, contracted, (gate_sb, up_sb, down_sb), (gain, gain, None), added)
    inner = min(gate_hbm.itemsize, up_hbm.itemsize)  # both are loaded in step
    linears = [AnyLinear(*given, {}, itemsize=n) for given, n in zip(each, (inner, inner, None))]
    # each token has silu(gate) * up, x, and x times the gain
    kept = tiles + k_tiles * (1 if gain is None else 2)
    most = token_chunk(x_hbm.itemsize * kept)
    hidden = Hidden(x_hbm, delta_hbm, stream_hbm, out_hbm)
    gated_mlp(hidden, norm, linears, length, most, ACTIVATIONS[act])
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)


# --- Modules --------------------------------------------------------------------------------------


class AnyMLP(AdaptedMLP, QuantisedMLP):
    """The MLP with adapters and scales, any of the ACTIVATIONS, and a norm behind it."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        self.act, self.post_norm = config.hidden_act, post_norm(config, 3, kernels=True)

    def forward(self, hidden: Columns, norm: Any, given: Dict[str, Any]) -> Columns:
        return self.post_norm(super().forward(hidden, norm, given))

    def kernel_results(self, hidden, norm):
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        results = swiglu_mlp_kernel(
            hidden.stream,
            hidden.delta,
            norm,
            *weights,
            self.down_proj.scale,
            hidden.shape[1],
            *self.adapters.operands(hidden),
            act=self.act,
        )
        return (results,) if hidden.delta is None else results


class AnyAttention(AdaptedAttention, QuantisedAttention, FamilyAttention):
    """Attention with adapters, scales, biases and norms over heads."""

    def operands(self, hidden: Columns) -> List[Optional[torch.Tensor]]:
        """The operands of kernels after the others: bias, gains, scales and adapters, each or
        None."""
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
        """Logits; for a chunk of a prompt only of its last row."""
        return super().forward(x[:, -1:] if self.last_only else x, *others)

    def multiply(self, columns: torch.Tensor) -> torch.Tensor:
        return linear_kernel(columns, self.weight, self.norm, self.scale)


# --- In checkpoints -------------------------------------------------------------------------------


class AnyProjections(models.weights.Projections):
    """The projections with scales and adapters."""

    def convert(self) -> None:  # type: ignore[override]
        with_gain = not convert_scales(self)
        convert_adapters(self)
        super().convert(with_gain)


def convert_mlp(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """The MLP of one layer, in kernel layout for the kernels."""
    if is_nki_enabled(config):
        gain = state.pop(f"{prefix}post_attention_layernorm.weight")
        tp = config.neuron_config.tp_degree
        AnyProjections.of_mlp(state, f"{prefix}mlp.", gain, tp).convert()


def convert_heads(state: StateDict, config: InferenceConfig) -> None:
    """The head, and heads that guess further tokens, for the kernels."""
    if not is_nki_enabled(config):
        return
    state.setdefault("lm_head.weight", state["embed_tokens.weight"])
    shown = shows_hidden_states(config)  # the norm is then a module in front
    gain = torch.ones(config.hidden_size) if shown else state.pop("norm.weight")
    for head in ("lm_head", *(f"medusa_head_{i}.1" for i in range(medusa_heads(config)))):
        AnyProjections.of_head(state, head, gain, config.neuron_config.tp_degree).convert()
