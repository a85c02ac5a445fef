"""The wider family of Llama for llama.py: what FAMILIES says, and what EAGLE and Medusa add.

A family differs from a Llama by a row of kinds.py. Factors go into the weights when a checkpoint is
read, so that neither kernels nor layers know them. Layers in PyTorch stand here, too; they round
where the device's reference rounds. NxDI's own layers, which llama.py runs without kernels, lack
these.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.lora_serving.lora_module import is_lora_module
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import llama
from llama import (
    ATTENTION_TARGETS,
    P_MAX,
    Columns,
    Hbm,
    Hidden,
    LlamaRotaryEmbedding,
    NeuronLlamaAttention,
    Norm,
    PlainMLP,
    Sbuf,
    StateDict,
    block_tiles,
    in_lanes,
    in_runs,
    is_nki_enabled,
    norm_scales,
    option,
    pad_tiles,
    rope_frequencies,
    spans,
    token_blocks,
    whole_tiles,
)
from models.kinds import FAMILIES, PLACES, Family, Scales
from models.weights import KernelRows, SharedSizes, heads_in_tiles, spread_kv, spread_queries


# --- What the table says --------------------------------------------------------------------------

# Settings of NxDI under which tests hold these four; of the others they hold the rest alone.
_EVERY_SETTING = "llama", "mistral", "qwen2", "qwen3"


def family_of(config: InferenceConfig) -> Family:
    """The row of the configuration's model_type; that of Llama for others."""
    return FAMILIES.get(getattr(config, "model_type", "llama"), FAMILIES["llama"])


def given(config: InferenceConfig, name: str) -> Any:
    """A field that the family reads; None where it has none."""
    return getattr(config, name, None) if name in family_of(config).reads else None


def varies(config: InferenceConfig) -> bool:
    """Whether layers, or weights as they are read, differ by more than names of settings."""
    return getattr(config, "model_type", "llama") not in _EVERY_SETTING


def check_family(config: InferenceConfig) -> None:
    """Name Gemma's activation as Llama's is named; ValueError for settings that are not tried with
    the family, and for angles that change with a text's length."""
    config.hidden_act = getattr(config, "hidden_activation", None) or config.hidden_act
    if hasattr(config, "cache_implementation"):
        config.cache_implementation = None  # transformers' for Gemma; here it is NxDI's
    kind = getattr(config, "model_type", "llama")
    asked = [
        name
        for name in (*llama.LlamaInferenceConfig.beyond, "vocab_parallel")
        if option(config, name) and name != "speculation_length"
    ]
    asked += ["cp_degree"] if option(config, "cp_degree", 1) > 1 else []
    if kind not in FAMILIES:
        raise ValueError(
            f"A {kind} differs from a Llama by more than a row of models/kinds.py, expected one "
            f"of {', '.join(FAMILIES)}; --mode swap puts a kernel into any model of transformers."
        )
    if varies(config) and asked:
        raise ValueError(
            f"A {kind} runs without {asked[0]} here, expected a setting of plain generation; leave "
            f"out --{asked[0].replace('_', '-').replace('quantized', 'quantize')}."
        )
    if varies(config):
        family_frequencies(config, SharedSizes.of(config).head_dim, 0)


def window_of(config: InferenceConfig, number: Optional[int] = None) -> Optional[int]:
    """Tokens that a query of a layer sees, itself included, or of some layer without a ``number``;
    None where the cache holds no more anyway."""
    window, windows = getattr(config, "sliding_window", None), family_of(config).windows
    numbers = range(config.num_hidden_layers) if number is None else (number,)
    if window is None or window >= config.neuron_config.seq_len:
        return None
    return window if any(windows(config, at) for at in numbers) else None


def outside_of_kernels(config: InferenceConfig) -> Optional[str]:
    """Why attention is PyTorch's also beside kernels; None where kernels compute it."""
    sizes, norms = SharedSizes.of(config), family_of(config).head_norms
    if option(config, "cp_degree", 1) > 1:
        return "groups of ranks have parts of a prompt"
    if given(config, "attn_logit_softcapping"):
        return "scores have a soft cap"
    if norms == "all":
        return "one norm takes the heads of all ranks together"
    if sizes.head_dim > P_MAX:
        return f"heads have {sizes.head_dim} features, more than a tile of {P_MAX}"
    return None


def has_attention_kernels(config: InferenceConfig) -> bool:
    return is_nki_enabled(config) and outside_of_kernels(config) is None


# --- In kernels -----------------------------------------------------------------------------------


def qkv_biases(bias_hbm, heads, scales, dtype):
    """Biases of Q, K and V [1, tiles * 128] @ HBM, or None: each becomes a product of rows ([1, N],
    [1, T]) @ SBUF, as for ``add_terms``. The norm's scale multiplies the sum later, so it divides
    the bias here."""
    if bias_hbm is None:
        return [([], [])] * 3
    inverse_sb = nisa.reciprocal(scales.along_sb[0:1, :], dtype=dtype)
    bias_sb, q_tiles = nl.load(bias_hbm), heads.q_tiles
    starts = 0, q_tiles * P_MAX, (q_tiles + heads.stacks) * P_MAX, bias_sb.shape[1]
    return [([bias_sb[:, a:b]], [inverse_sb]) for a, b in zip(starts, starts[1:])]


class HeadGains(NamedTuple):
    """Gains [128, 2] @ HBM of RMSNorms over each query and key head (Qwen3)."""

    gains_hbm: Hbm

    def loaded(self, norm, heads):
        """The HeadNorm: a product with ``mean_sb`` takes the mean over a head's lanes."""
        mean_sb, depth = nisa.memset((P_MAX, P_MAX), 0.0, nl.float32), heads.depth
        for lane in nl.static_range(P_MAX // depth):
            lanes, shape = nl.ds(lane * depth, heads.head_dim), (heads.head_dim, heads.head_dim)
            mean_sb[lanes, lanes] = nisa.memset(shape, 1.0 / heads.head_dim, nl.float32)
        eps_sb = nisa.memset((P_MAX, 1), norm.eps, nl.float32)
        return HeadNorm(nl.load(self.gains_hbm), mean_sb, eps_sb)


class HeadNorm(NamedTuple):
    """An RMSNorm over each query and key head: the gains of both [128, 2], the operand that takes
    the mean over a head's lanes [128, 128], and epsilon [128, 1] @ SBUF."""

    gains_sb: Sbuf
    mean_sb: Sbuf
    eps_sb: Sbuf

    def normed(self, x, along_sb, which, dtype):
        """Normalise a tile of query (``which`` 0) or key heads (1) [128, tokens]: times the scale
        of the norm before it [128, tokens], each head over its own rms and times its gains. A
        product sums squares over a head's lanes, as it does over features."""
        x_sb = nisa.tensor_tensor(x, along_sb, nl.multiply, dtype=dtype)
        square_sb = nisa.tensor_tensor(x_sb, x_sb, nl.multiply, dtype=nl.float32)
        mean_psum = nisa.nc_matmul(self.mean_sb, square_sb)
        inverse_sb = nisa.activation(nl.rsqrt, mean_psum, bias=self.eps_sb)
        normed_sb = nisa.tensor_tensor(x_sb, inverse_sb, nl.multiply, dtype=dtype)
        return nisa.tensor_scalar(normed_sb, nl.multiply, self.gains_sb[:, nl.ds(which, 1)])


@nki.jit
def norm_kernel(x_hbm, gain_hbm, norm, length):
    """RMSNorm of hidden states x [H, T] of sequences of ``length`` tokens, times the gain [128,
    H/128] @ HBM -> the same, type of x. It follows the all-reduce of a layer's half, where a norm
    stands behind it."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    gain_sb = nl.load(gain_hbm)
    for block in token_blocks(*x_hbm.shape, length):
        x_sb = Hidden(x_hbm).load(block).x_sb
        along_sb = norm_scales(x_sb, norm, spans(block.count, P_MAX)).along_sb
        normed_sb = nl.ndarray(x_sb.shape, x_hbm.dtype)
        for tile in nl.affine_range(x_sb.shape[1]):
            normed_sb[:, tile, :] = nisa.scalar_tensor_tensor(
                data=x_sb[:, tile, :],
                op0=nl.multiply,
                operand0=gain_sb[:, nl.ds(tile, 1)],
                op1=nl.multiply,
                operand1=along_sb,
            )
        nl.store(block_tiles(out_hbm, block, 0, x_sb.shape[1]), normed_sb)
    return out_hbm


# --- In modules -----------------------------------------------------------------------------------

CACHED = "past_key_value", "attention_mask", "active_mask"  # what NxDI gives a layer of a cache


def attention_biases(config: InferenceConfig) -> Tuple[bool, bool]:
    """Whether Q, K and V have biases, and the output; Qwen2's config has no field for it."""
    every = bool(getattr(config, "attention_bias", False))
    return every or family_of(config).qkv_bias, every


def medusa_heads(config: InferenceConfig) -> int:
    return config.neuron_config.num_medusa_heads if option(config, "is_medusa") else 0


def shows_hidden_states(config: InferenceConfig) -> bool:
    """Whether EAGLE's draft or Medusa's heads (`medusa_heads` of them) read normalised hidden
    states beside the head."""
    return bool(option(config, "enable_eagle_speculation")) or medusa_heads(config) > 0


class KernelNorm(nn.Module):
    """A norm behind the all-reduce of a layer's half, by ``norm_kernel``: Columns -> Columns."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        shape, dtype = (P_MAX, whole_tiles(config.hidden_size)), config.neuron_config.torch_dtype
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, columns: Columns) -> Columns:
        delta = norm_kernel(columns.delta, self.weight, self.norm, columns.shape[1])
        return columns._replace(delta=delta)


def post_norm(config: InferenceConfig, place: int, kernels: bool) -> nn.Module:
    """The norm behind attention (``place`` 1) or the MLP (3); nothing where there is none."""
    if family_of(config).norms[place] is None:
        return nn.Identity()
    if kernels:
        return KernelNorm(config)
    return CustomRMSNorm(config.hidden_size, config.rms_norm_eps)


class NormOfAllHeads(KernelRows):
    """An RMSNorm over the features of all heads of all ranks [B, heads, S, D]. Zero heads that pad
    a rank's add nothing, and each of a head's ``replicas`` counts."""

    def __init__(self, config: InferenceConfig, sizes: SharedSizes, of_keys: bool) -> None:
        rank = sizes.of_rank
        heads = rank.kv_heads if of_keys else rank.q_heads
        super().__init__(heads * sizes.head_dim, sizes.tp, config.neuron_config.torch_dtype)
        every = config.num_key_value_heads * sizes.replicas
        self.features = (every if of_keys else config.num_attention_heads) * sizes.head_dim
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        total = reduce_from_tensor_model_parallel_region(wide.square().sum((1, 3), keepdim=True))
        gain = self.weight.to(torch.float32).view(1, x.shape[1], 1, x.shape[3])
        return (wide * torch.rsqrt(total / self.features + self.eps) * gain).to(x.dtype)


def norms_over_heads(config: InferenceConfig, sizes: SharedSizes) -> List[nn.Module]:
    """The norms of queries and of keys in PyTorch."""
    kind, eps = family_of(config).head_norms, config.rms_norm_eps
    if kind == "all":
        return [NormOfAllHeads(config, sizes, of_keys) for of_keys in (False, True)]
    return [CustomRMSNorm(sizes.head_dim, eps) if kind else nn.Identity() for _ in "qk"]


class FamilyRope(LlamaRotaryEmbedding):
    """The rotary embedding of a layer by its number: some layers rotate by other frequencies or not
    at all, and features of a head that are not rotated have the frequency 0."""

    def __init__(self, config: InferenceConfig, head_dim: int, number: int) -> None:
        nn.Module.__init__(self)
        self.head_dim = head_dim
        self.inv_freq, self.amplitude = family_frequencies(config, head_dim, number)
        if rotated_features(config, head_dim) < head_dim:
            self.amplitude = 1.0  # it is in the weights of the features that are rotated


def rotated_features(config: InferenceConfig, head_dim: int) -> int:
    return int(head_dim * (given(config, "partial_rotary_factor") or 1.0))


def family_frequencies(
    config: InferenceConfig, head_dim: int, number: int
) -> Tuple[List[float], float]:
    """Frequencies of a head's pairs of features, and the factor of cos and sin."""
    none, rotated = [0.0] * (head_dim // 2), rotated_features(config, head_dim)
    rotates, local = given(config, "no_rope_layers"), copy.copy(config)
    if rotates and not rotates[number]:
        return none, 1.0
    if given(config, "rope_local_base_freq") and family_of(config).windows(config, number):
        local.rope_theta, local.rope_scaling = config.rope_local_base_freq, None
    scaling = getattr(local, "rope_scaling", None) or {}
    scaling = scaling if isinstance(scaling, dict) else vars(scaling)  # as a saved one comes back
    if scaling.get("rope_type", scaling.get("type")) == "longrope":
        found, amplitude = long_frequencies(config, rotated)
    else:
        found, amplitude = rope_frequencies(local, rotated)
    return found + none[len(found) :], amplitude


def long_frequencies(config: InferenceConfig, dim: int) -> Tuple[List[float], float]:
    """Those of "longrope" for texts up to the length that the model was first trained for; beyond
    it all angles of a text change, and cached keys with them."""
    longest, trained = config.neuron_config.seq_len, config.original_max_position_embeddings
    if longest > trained:
        raise ValueError(
            f"rope_scaling 'longrope' changes a text's angles beyond "
            f"original_max_position_embeddings {trained}, got seq_len {longest}; choose a shorter "
            "seq_len."
        )
    read = PretrainedConfig(
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        max_position_embeddings=config.max_position_embeddings,
        original_max_position_embeddings=trained,
        hidden_size=dim,
        num_attention_heads=1,
    )
    with torch.device("cpu"):
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["longrope"](read, torch.device("cpu"))
    return frequencies.tolist(), amplitude


def set_norms(layer: nn.Module, config: InferenceConfig) -> None:
    """A decoder layer's norms in front of its halves, as each half takes them."""
    kernels = has_attention_kernels(config), is_nki_enabled(config)
    for place, within in zip((0, 2), kernels):
        if family_of(config).norms[place] is None:
            norm: Any = None if within else nn.Identity()
        else:
            norm = (Norm if within else CustomRMSNorm)(config.hidden_size, config.rms_norm_eps)
        setattr(layer, PLACES[place], norm)


def number_layers(model: nn.Module, config: InferenceConfig) -> None:
    """Give each layer the window and the angles of its number, and cap logits."""
    for number, layer in enumerate(model.layers):
        attention = layer.self_attn
        attention.window = window_of(config, number)
        if varies(config):
            dim = attention.sizes.head_dim
            attention.rotary_emb, attention.own_angles = FamilyRope(config, dim, number), True
    if given(config, "final_logit_softcapping"):
        model.lm_head.cap = config.final_logit_softcapping
        model.lm_head.register_forward_hook(cap_logits)


def capped(x: torch.Tensor, cap: Optional[float]) -> torch.Tensor:
    """cap * tanh(x / cap), or x where there is no cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def cap_logits(head: nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
    """A forward hook of the head."""
    return capped(logits.to(torch.float32), head.cap)


def normed(hidden: torch.Tensor, norm: Optional[nn.Module]) -> torch.Tensor:
    """norm(hidden); None is what a kernel takes where a family has no norm."""
    return hidden if norm is None else norm(hidden)


class FamilyMLP(PlainMLP):
    """NxDI's MLP with adapters, of a whole sequence, where NxDI's would be sharded."""

    def __init__(self, config: InferenceConfig) -> None:
        whole = copy.copy(config)
        whole.neuron_config = copy.copy(config.neuron_config)
        whole.neuron_config.sequence_parallel_enabled = False
        super().__init__(whole)
        self.post_norm = post_norm(config, 3, kernels=False)

    def forward(self, hidden: torch.Tensor, norm: nn.Module, given: Dict[str, Any]) -> torch.Tensor:
        product = modeling_llama.NeuronLlamaMLP.forward
        result = product(self, normed(hidden, norm), adapter_ids=given.get("adapter_ids"))[0]
        return hidden + self.post_norm(result)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, heads, S, D] with cos, sin [B, S, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class FamilyAttention(NeuronLlamaAttention):
    """Attention with biases and norms over heads; in PyTorch without kernels, and where none fits.
    With ``own_angles`` it rotates otherwise than other layers."""

    own_angles = False

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        """``ranks`` that split the heads, and their group as layers take it; None: all."""
        nn.Module.__init__(self)
        self.config, self.sizes = config, SharedSizes.of(config, ranks)
        self.nki_enabled = has_attention_kernels(config)
        self.rotary_emb = FamilyRope(config, self.sizes.head_dim, 0)
        self.cap = given(config, "attn_logit_softcapping")
        self.post_norm = post_norm(config, 1, self.nki_enabled)
        if self.nki_enabled:
            self.make_kernel_weights(**group)
        else:
            self.make_layers(group)

    def make_kernel_weights(self, **group: Any) -> None:
        super().make_kernel_weights(**group)
        rank, dtype = self.sizes.of_rank, self.config.neuron_config.torch_dtype
        size = (rank.q_tiles + rank.stacks + whole_tiles(rank.kv_features)) * P_MAX
        biased, _ = attention_biases(self.config)
        self.qkv_bias = KernelRows(size, self.sizes.tp, dtype, **group) if biased else None
        # the weights of norms over query and key heads: a row for each lane of a tile of heads
        gains = nn.Parameter(torch.ones(P_MAX, 2, dtype=dtype))
        normed = bool(family_of(self.config).head_norms)
        self.register_parameter("head_gains", gains if normed else None)

    def make_layers(self, group: Dict[str, Any]) -> None:
        """Parallel layers, and norms over heads or none."""
        config, neuron_config, dim = self.config, self.config.neuron_config, self.sizes.head_dim
        columns = dict(gather_output=False, dtype=neuron_config.torch_dtype, **group)
        columns["bias"], out_bias = attention_biases(config)
        kv_size, q_size = self.sizes.kv_heads * dim, self.sizes.q_heads * dim
        self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, **columns)
        self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, **columns)
        self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, **columns)
        self.o_proj = RowParallelLinear(
            q_size,
            config.hidden_size,
            bias=out_bias,
            input_is_parallel=True,
            dtype=neuron_config.torch_dtype,
            **group,
            reduce_dtype=option(config, "rpl_reduce_dtype") or neuron_config.torch_dtype,
        )
        self.q_norm, self.k_norm = norms_over_heads(config, self.sizes)

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """hidden + attention(norm(hidden)), [B, S, H] or Columns, then (K, V), cos and sin."""
        if isinstance(hidden, Columns) and not self.nki_enabled:
            output, *results = self.forward(hidden.rows(), norm, given)
            return Columns.of(output), *results
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        if cos is None or self.own_angles:
            dtype = hidden.stream.dtype if self.nki_enabled else hidden.dtype
            cos, sin = self.rotary_emb(given["position_ids"], dtype)
        attend = self.attend_with_kernels if self.nki_enabled else self.attend_with_torch
        output, present = attend(hidden, norm, (cos, sin), given)
        return output, present, cos, sin

    def attend_with_kernels(self, hidden, norm, tables, given):
        """Residual sum, norm, QKV, RoPE, attention and output projection, then an all-reduce."""
        partial, k, v, *stream = self.kernel_results(hidden, norm, tables, given)
        present = tuple(self.heads(rows, hidden.shape[0]) for rows in (k, v))
        return self.post_norm(hidden.after(partial, stream)), present

    def attend_with_torch(self, hidden, norm, tables, given):
        """The same in PyTorch, rounding where the device's reference rounds."""
        past, mask, active_mask = (given.get(name) for name in CACHED)
        q, k, v = self.project(normed(hidden, norm), self.halves(tables, len(hidden)), given)
        visible = [(k, v, mask)]
        if past is not None:
            if active_mask is None:
                active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
            # a comparison of both paths gives this path the kernels' cache, which may be fp8
            visible = [(*(x.to(q.dtype) for x in past), mask), (k, v, active_mask)]
        merged = self.attend(q, visible).transpose(1, 2).flatten(2)
        return hidden + self.post_norm(self.product(self.o_proj, merged, given)), (k, v)

    def halves(self, tables: Sequence[torch.Tensor], batch: int) -> Tuple[torch.Tensor, ...]:
        """cos and sin as kernels take them [128, B * S] -> [B, S, D / 2]."""
        rows = (table[: self.sizes.head_dim // 2].t() for table in tables)
        return tuple(x.reshape(batch, -1, x.shape[1]) for x in rows)

    def product(self, layer: nn.Module, x: torch.Tensor, given: Dict[str, Any]) -> torch.Tensor:
        """x times one of the parallel layers, which NxDI may have wrapped for adapters."""
        return layer(x, given.get("adapter_ids")) if is_lora_module(layer) else layer(x)

    def project(self, normed, tables, given) -> Tuple[torch.Tensor, ...]:
        """[B, S, H] -> queries, keys, both rotated, and values [B, heads, S, D]."""
        q, k, v = (
            self.heads(self.product(layer, normed, given), len(normed))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), *tables), rotate(self.k_norm(k), *tables), v

    def attend(
        self, q: torch.Tensor, visible: List[Tuple[torch.Tensor, ...]], softmax: Any = torch.softmax
    ) -> torch.Tensor:
        """One softmax over all (keys, values, mask) that are ``visible``: the cache and new tokens.

        Keys and values [B, kv_rank, keys, D], each KV head for its group of queries, mask bool
        [B, 1, S, keys]. Products are rounded to the model's type, scores are fp32.
        """
        group, root = q.shape[1] // visible[0][0].shape[1], math.sqrt(self.sizes.head_dim)
        scores = []
        for keys, _, mask in visible:
            product = torch.matmul(q, keys.repeat_interleave(group, dim=1).transpose(2, 3)) / root
            product, hidden = capped(product, self.cap), torch.finfo(product.dtype).min
            scores.append(torch.where(mask, product, hidden).to(torch.float32))
        weights = softmax(torch.cat(scores, dim=-1), -1).to(q.dtype)
        parts = weights.split([part.shape[-1] for part in scores], dim=-1)
        context, *more = (
            torch.matmul(part, values.repeat_interleave(group, dim=1))
            for part, (_, values, _) in zip(parts, visible)
        )
        return context + more[0] if more else context


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


class NormOfColumns(CustomRMSNorm):
    """The final norm, Columns -> [B, S, H], for models that read hidden states beside the head."""

    def forward(self, columns: Any) -> torch.Tensor:
        return super().forward(columns.rows())


def add_heads(model: nn.Module, config: InferenceConfig) -> None:
    """Add a draft's input layer, and the heads that guess beside the head."""
    hidden = config.hidden_size
    if option(config, "is_eagle_draft"):  # a draft continues hidden states, and has no final norm
        bias, dtype = getattr(config, "fc_bias", False), config.neuron_config.torch_dtype
        model.fc = DraftInput(2 * hidden, hidden, gather_output=True, bias=bias, dtype=dtype)
        del model.norm
        if not config.neuron_config.enable_eagle_draft_input_norm:
            for layer in model.layers:
                layer.input_layernorm = nn.Identity()
    for index in range(medusa_heads(config)):
        head = nn.Sequential(ResBlock(hidden), model.output_head(config))
        setattr(model, f"medusa_head_{index}", head)


# --- In checkpoints -------------------------------------------------------------------------------


def as_llama(state: StateDict, config: InferenceConfig) -> StateDict:
    """A family's checkpoint under the names of this file's modules: fused tensors are cut, gains
    whole, and factors in the weights, each rounded once."""
    family, scales = family_of(config), family_of(config).scales(config)
    state = dict(state)
    if varies(config) and config.neuron_config.torch_dtype is torch.float32:
        state = {name: tensor.to(torch.float32) for name, tensor in state.items()}
    if scales.embedding != 1.0 or scales.logits != 1.0:
        head = state.setdefault("lm_head.weight", state["embed_tokens.weight"])
        state["lm_head.weight"] = times(head, scales.logits)
        state["embed_tokens.weight"] = times(state["embed_tokens.weight"], scales.embedding)
    if family.less_one:
        for name in [name for name in state if name.endswith("norm.weight")]:
            state[name] = 1.0 + state[name].to(torch.float32)
    for number in range(config.num_hidden_layers):
        prefix = f"layers.{number}."
        if family.fused:
            cut_fused(state, prefix, config)
        found = [state.pop(f"{prefix}{name}.weight", None) for name in family.norms]
        for at, (name, gain) in enumerate(zip(PLACES, found)):
            kernels = has_attention_kernels(config) if at < 2 else is_nki_enabled(config)
            if gain is None and at % 2 == 0 and kernels:
                gain = torch.ones(config.hidden_size)  # kernel weights are multiplied by it
            elif gain is not None and at % 2 and kernels:
                gain = in_runs(gain, 0).reshape(-1, P_MAX).t().contiguous()
            if gain is not None:
                state[f"{prefix}{name}.weight"] = gain
        scale_layer(state, prefix, config, scales)
    return state


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x times a factor, rounded once."""
    return (x.to(torch.float32) * factor).to(x.dtype)


def cut_fused(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """Cut Phi-3's tensors of Q, K and V, and of gate and up."""
    dim, kv = SharedSizes.of(config).head_dim, config.num_key_value_heads
    sizes = [heads * dim for heads in (config.num_attention_heads, kv, kv)]
    qkv = state.pop(f"{prefix}self_attn.qkv_proj.weight").split(sizes)
    for name, weight in zip(ATTENTION_TARGETS, qkv):
        state[f"{prefix}self_attn.{name}.weight"] = weight
    gate, up = state.pop(f"{prefix}mlp.gate_up_proj.weight").chunk(2)
    state |= {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}


def scale_layer(state: StateDict, prefix: str, config: InferenceConfig, scales: Scales) -> None:
    """Multiply the weights of a layer by its factors, and order features that are rotated."""
    attention, dim = f"{prefix}self_attn.", SharedSizes.of(config).head_dim
    if scales.scores is not None:
        last = "norm" if f"{attention}q_norm.weight" in state else "proj"
        name = f"{attention}q_{last}.weight"
        state[name] = times(state[name], scales.scores * math.sqrt(dim))
    if scales.residual != 1.0:
        for name in (f"{attention}o_proj.weight", f"{prefix}mlp.down_proj.weight"):
            state[name] = times(state[name], scales.residual)
    rotated = rotated_features(config, dim)
    if rotated < dim:
        amplitude = family_frequencies(config, dim, 0)[1]
        for name in (f"{attention}{which}_proj.weight" for which in "qk"):
            turned, still = state[name].unflatten(0, (-1, dim)).split([rotated, dim - rotated], 1)
            parts = [*times(turned, amplitude).chunk(2, 1), *still.chunk(2, 1)]
            state[name] = torch.cat([parts[at] for at in (0, 2, 1, 3)], 1).flatten(0, 1)


def convert_norm_of_all_heads(state: StateDict, attention: str, config: InferenceConfig) -> None:
    """The gains of ``NormOfAllHeads``, a row for each rank."""
    if family_of(config).head_norms == "all":
        sizes, kv = SharedSizes.of(config), config.num_key_value_heads
        queries, keys = (f"{attention}{name}_norm.weight" for name in "qk")
        state[queries] = spread_queries(state[queries], kv, sizes, 0).view(sizes.tp, -1)
        state[keys] = spread_kv(state[keys], sizes).view(sizes.tp, -1)


def convert_terms(state: StateDict, attention: str, sizes: SharedSizes) -> None:
    """Biases of queries, keys and values, and gains of norms over heads, as kernels read them."""
    inputs = [f"{attention}{name}" for name in ATTENTION_TARGETS[:3]]
    if f"{inputs[0]}.bias" in state:
        biases = [
            heads_in_tiles(sizes, group)(state.pop(f"{name}.bias")[:, None])
            for name, group in zip(inputs, (sizes.group, 1))
        ]
        biases.append(state.pop(f"{inputs[2]}.bias")[:, None].chunk(sizes.tp))
        rows = [pad_tiles(torch.cat(share), 0).t() for share in zip(*biases)]
        state[f"{attention}qkv_bias.weight"] = torch.cat(rows)
    if f"{attention}q_norm.weight" in state:
        gains = torch.stack([state.pop(f"{attention}{name}_norm.weight") for name in "qk"], 1)
        state[f"{attention}head_gains"] = in_lanes(gains, sizes.head_dim)
