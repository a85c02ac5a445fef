"""The wider family of Llama for llama.py: the additions of Qwen, EAGLE and Medusa.

They are biases on queries, keys and values (Qwen2.5), norms over query and key heads (Qwen3), and
heads that guess further tokens (Medusa, EAGLE). Layers in PyTorch stand here, too; they round where
the device's reference rounds. NxDI's own layers, which llama.py runs without kernels, lack these.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.lora_serving.lora_module import is_lora_module
from torch import nn

from llama import (
    ATTENTION_TARGETS,
    P_MAX,
    Hbm,
    HeadShape,
    LlamaRotaryEmbedding,
    NeuronLlamaAttention,
    PlainMLP,
    Sbuf,
    StateDict,
    in_lanes,
    is_nki_enabled,
    option,
    pad_tiles,
    whole_tiles,
)
from models.weights import KernelRows, SharedSizes, heads_in_tiles


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


# --- In modules -----------------------------------------------------------------------------------

CACHED = "past_key_value", "attention_mask", "active_mask"  # what NxDI gives a layer of a cache


def model_type(config: InferenceConfig) -> str:
    """The family: llama, mistral, qwen2 or qwen3."""
    return getattr(config, "model_type", "llama")


def attention_biases(config: InferenceConfig) -> Tuple[bool, bool]:
    """Whether Q, K and V have biases, and the output; Qwen2's config has no field for it."""
    every = bool(getattr(config, "attention_bias", False))
    return every or model_type(config) == "qwen2", every


def has_head_norms(config: InferenceConfig) -> bool:
    """Whether queries and keys have RMSNorms of their own over each head, as in Qwen3."""
    return model_type(config) == "qwen3"


def slots_of(heads: HeadShape) -> int:
    """Tiles of a head: a head of 256 has two, a half each. All first halves come before all second
    halves, as if these were stacks of their own."""
    return whole_tiles(heads.depth)


def tiles_of(heads: HeadShape, kv_head: int) -> List[Tuple[int, slice]]:
    """``place`` of each tile of a KV head."""
    (stack, lanes), slots = heads.place(kv_head), slots_of(heads)
    return [(stack + slot * heads.stacks // slots, lanes) for slot in range(slots)]


def medusa_heads(config: InferenceConfig) -> int:
    return config.neuron_config.num_medusa_heads if option(config, "is_medusa") else 0


def shows_hidden_states(config: InferenceConfig) -> bool:
    """Whether EAGLE's draft or Medusa's heads (`medusa_heads` of them) read normalised hidden
    states beside the head."""
    return bool(option(config, "enable_eagle_speculation")) or medusa_heads(config) > 0


class FamilyMLP(PlainMLP):
    """NxDI's MLP with adapters, of a whole sequence, where NxDI's would be sharded."""

    def __init__(self, config: InferenceConfig) -> None:
        whole = copy.copy(config)
        whole.neuron_config = copy.copy(config.neuron_config)
        whole.neuron_config.sequence_parallel_enabled = False
        super().__init__(whole)

    def forward(self, hidden: torch.Tensor, norm: nn.Module, given: Dict[str, Any]) -> torch.Tensor:
        product = modeling_llama.NeuronLlamaMLP.forward
        return hidden + product(self, norm(hidden), adapter_ids=given.get("adapter_ids"))[0]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, heads, S, D] with cos, sin [B, S, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class FamilyAttention(NeuronLlamaAttention):
    """Attention with biases and norms over heads; in PyTorch without kernels."""

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        """``ranks`` that split the heads, and their group as layers take it; None: all."""
        nn.Module.__init__(self)
        self.config, self.sizes = config, SharedSizes.of(config, ranks)
        self.nki_enabled = is_nki_enabled(config)
        self.rotary_emb = LlamaRotaryEmbedding(config, self.sizes.head_dim)
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
        self.register_parameter("head_gains", gains if has_head_norms(self.config) else None)

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
        normed = has_head_norms(config)
        self.q_norm, self.k_norm = (
            CustomRMSNorm(dim, config.rms_norm_eps) if normed else nn.Identity() for _ in "qk"
        )

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Tuple[Any, ...]:
        """hidden + attention(norm(hidden)), [B, S, H] or Columns, then (K, V), cos and sin."""
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        if cos is None:
            dtype = hidden.stream.dtype if self.nki_enabled else hidden.dtype
            cos, sin = self.rotary_emb(given["position_ids"], dtype)
        attend = self.attend_with_kernels if self.nki_enabled else self.attend_with_torch
        output, present = attend(hidden, norm, (cos, sin), given)
        return output, present, cos, sin

    def attend_with_kernels(self, hidden, norm, tables, given):
        """Residual sum, norm, QKV, RoPE, attention and output projection, then an all-reduce."""
        partial, k, v, *stream = self.kernel_results(hidden, norm, tables, given)
        present = tuple(self.heads(rows, hidden.shape[0]) for rows in (k, v))
        return hidden.after(partial, stream), present

    def attend_with_torch(self, hidden, norm, tables, given):
        """The same in PyTorch, rounding where the device's reference rounds."""
        past, mask, active_mask = (given.get(name) for name in CACHED)
        q, k, v = self.project(norm(hidden), self.halves(tables, len(hidden)), given)
        visible = [(k, v, mask)]
        if past is not None:
            if active_mask is None:
                active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
            # a comparison of both paths gives this path the kernels' cache, which may be fp8
            visible = [(*(x.to(q.dtype) for x in past), mask), (k, v, active_mask)]
        merged = self.attend(q, visible).transpose(1, 2).flatten(2)
        return hidden + self.product(self.o_proj, merged, given), (k, v)

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
            hidden = torch.finfo(product.dtype).min
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
