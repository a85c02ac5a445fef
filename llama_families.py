"""The wider family of Llama for llama.py: what Qwen, EAGLE and Medusa have beside it.

Biases on queries, keys and values (Qwen2.5), norms over query and key heads (Qwen3), and heads that
guess further tokens (Medusa, EAGLE).
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from neuronx_distributed_inference.models.config import InferenceConfig
from torch import nn

from llama import (
    ATTENTION_TARGETS, P_MAX, Hbm, HeadShape, NeuronLlamaAttention, NeuronLlamaRMSNorm, Sbuf,
    Sizes, StateDict, depth_of, in_lanes, option, pad_tiles, rotate, whole_tiles,
)  # fmt: skip
from llama_weights import KernelRows, heads_in_tiles


# --- In kernels -----------------------------------------------------------------------------------


def qkv_biases(bias_hbm, heads, scales, dtype):
    """Biases of Q, K and V [1, tiles * 128] @ HBM, or None: each a product of rows ([1, N], [1, T])
    @ SBUF, as for ``add_terms``. What is added in front of the norm's scale has to be divided by
    it."""
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
        mean_sb, depth = nisa.memset((P_MAX, P_MAX), 0.0, nl.float32), depth_of(heads.head_dim)
        for lane in nl.static_range(P_MAX // depth):
            lanes, shape = nl.ds(lane * depth, heads.head_dim), (heads.head_dim, heads.head_dim)
            mean_sb[lanes, lanes] = nisa.memset(shape, 1.0 / heads.head_dim, nl.float32)
        eps_sb = nisa.memset((P_MAX, 1), norm.eps, nl.float32)
        return HeadNorm(nl.load(self.gains_hbm), mean_sb, eps_sb)


class HeadNorm(NamedTuple):
    """An RMSNorm over each query and key head: the gains of both [128, 2], what takes the mean over
    a head's lanes [128, 128], and its epsilon [128, 1] @ SBUF."""

    gains_sb: Sbuf
    mean_sb: Sbuf
    eps_sb: Sbuf

    def normed(self, x, along_sb, which, dtype):
        """A tile of query (``which`` 0) or key heads (1) [128, tokens] times the scale of the norm
        before it [128, tokens], each head divided by its own rms and times its gains. The sum of
        squares over a head's lanes is a product, as it is over features."""
        x_sb = nisa.tensor_tensor(x, along_sb, nl.multiply, dtype=dtype)
        square_sb = nisa.tensor_tensor(x_sb, x_sb, nl.multiply, dtype=nl.float32)
        mean_psum = nisa.nc_matmul(self.mean_sb, square_sb)
        inverse_sb = nisa.activation(nl.rsqrt, mean_psum, bias=self.eps_sb)
        normed_sb = nisa.tensor_tensor(x_sb, inverse_sb, nl.multiply, dtype=dtype)
        return nisa.tensor_scalar(normed_sb, nl.multiply, self.gains_sb[:, nl.ds(which, 1)])


# --- In modules -----------------------------------------------------------------------------------


def model_type(config: InferenceConfig) -> str:
    """Of the family: llama, mistral, qwen2 or qwen3."""
    return getattr(config, "model_type", "llama")


def attention_biases(config: InferenceConfig) -> Tuple[bool, bool]:
    """Whether Q, K and V have biases, and the output; Qwen2 has no word for its own."""
    every = bool(getattr(config, "attention_bias", False))
    return every or model_type(config) == "qwen2", every


def has_head_norms(config: InferenceConfig) -> bool:
    """Whether queries and keys have RMSNorms of their own over each head, as Qwen3's."""
    return model_type(config) == "qwen3"


def slots_of(heads: HeadShape) -> int:
    """Tiles of a head: of 256 two, a half each. Those of all first halves come before those of all
    second ones, as if these were stacks of their own."""
    return whole_tiles(heads.depth)


def tiles_of(heads: HeadShape, kv_head: int) -> List[Tuple[int, slice]]:
    """``place`` of each tile of a KV head."""
    (stack, lanes), slots = heads.place(kv_head), slots_of(heads)
    return [(stack + slot * heads.stacks // slots, lanes) for slot in range(slots)]


def medusa_heads(config: InferenceConfig) -> int:
    return config.neuron_config.num_medusa_heads if option(config, "is_medusa") else 0


def shows_hidden_states(config: InferenceConfig) -> bool:
    """Whether more than the head reads normalised hidden states: EAGLE's draft, or Medusa's heads,
    of which there are `medusa_heads`."""
    return bool(option(config, "enable_eagle_speculation")) or medusa_heads(config) > 0


class FamilyAttention(NeuronLlamaAttention):
    """With biases, and norms over heads."""

    def make_kernel_weights(self, group: Dict[str, Any]) -> None:
        super().make_kernel_weights(group)
        rank, dtype = self.sizes.of_rank, self.config.neuron_config.torch_dtype
        size = (rank.qk_tiles + whole_tiles(rank.kv_features)) * P_MAX
        biased, _ = attention_biases(self.config)
        self.qkv_bias = KernelRows(size, self.sizes.tp, dtype, **group) if biased else None
        # of the norms over query and key heads, a lane of a tile of heads a row
        gains = nn.Parameter(torch.ones(P_MAX, 2, dtype=dtype))
        self.register_parameter("head_gains", gains if has_head_norms(self.config) else None)

    def make_layers(self, group: Dict[str, Any], bias: bool = False) -> None:
        super().make_layers(group, attention_biases(self.config)[0])
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if has_head_norms(self.config):
            dim, eps = self.sizes.head_dim, self.config.rms_norm_eps
            self.q_norm, self.k_norm = NeuronLlamaRMSNorm(dim, eps), NeuronLlamaRMSNorm(dim, eps)

    def project(self, normed, tables, given):
        q, k, v = (
            self.heads(self.product(layer, normed, given), len(normed))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), *tables), rotate(self.k_norm(k), *tables), v


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


class NormOfColumns(NeuronLlamaRMSNorm):
    """The final norm where hidden states are read besides the head: Columns -> [B, S, H]."""

    def forward(self, columns: Any) -> torch.Tensor:
        return super().forward(columns.rows())


def add_heads(model: nn.Module, config: InferenceConfig) -> None:
    """What a draft has in front, and heads that guess beside the head."""
    hidden = config.hidden_size
    if option(config, "is_eagle_draft"):  # it continues hidden states, and has no final norm
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


def convert_terms(state: StateDict, attention: str, sizes: Sizes) -> None:
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
