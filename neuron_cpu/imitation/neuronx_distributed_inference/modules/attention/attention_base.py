"""Attention as NxDI computes it in plain PyTorch: prefill, and decode over the cache.

Numbers are rounded where a device rounds them: scores in the activations' dtype, softmax in fp32,
probabilities and their product with V in the activations' dtype.
"""

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from neuronx_distributed.keywords import refuse_others
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.utils import divide
from neuronxcc.nki._private_kernels.attention import attention_isa_kernel
from torch import nn
from torch_neuronx.xla_impl.ops import nki_jit

from neuron_cpu.runtime.ranks import Group

from ...contract import ENVIRONMENT_VARIABLE, contract
from .gqa import GroupQueryAttention_O, GroupQueryAttention_QKV, Input, group_or_all
from .utils import apply_rotary_pos_emb, manual_softmax, move_heads_front, repeat_kv

# The closed prefill kernel under the name that model files import; it refuses when called.
_flash_fwd_call = nki_jit()(attention_isa_kernel)

# From this prompt length on, `attn_kernel_enabled` asks for the closed prefill kernel.
_FLASH_MINIMUM = 512


class FlashAttentionStrategy(enum.Enum):
    """The prefill kernel: none, the closed one on one core, or the closed one split over two."""

    NONE = 0
    UNSHARDED_KERNEL = 1
    SHARDED_KERNEL = 2


class EPDispatchOption(enum.Enum):
    """Collectives around experts on several nodes; only the first exists here."""

    AR_AG = "AR_AG"
    RS_AG = "RS_AG"
    AG_AR = "AG_AR"


@dataclass(frozen=True)
class NeuronAttentionBaseOutput:
    """Attention's result in NxDI 0.6: it unpacks as four items and indexes as five."""

    hidden_states: torch.Tensor
    present_key_value: tuple[torch.Tensor, torch.Tensor]
    cos_cache: Input = None
    sin_cache: Input = None
    residual: Input = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.hidden_states, self.present_key_value, self.cos_cache, self.sin_cache))

    def __getitem__(self, index: int) -> Any:
        return (*self, self.residual)[index]


# Arguments of both projections, and of later constructors.
_OF_BOTH = (
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "sequence_parallel_enabled",
    "sequence_dimension",
)
_LATER = dict.fromkeys(
    ("attention_chunk_size", "sliding_window", "q_layernorm", "k_layernorm", "rope_theta",
     "qk_norm_placement", "learned_sinks_size"), None
) | {"use_qk_norm": False, "use_scaled_rope": False, "o_proj_layer_name": "o_proj"}  # fmt: skip


class NeuronAttentionBase(nn.Module):
    """Grouped-query attention over tensor-parallel projections.

    In NxDI 0.1 the constructor takes the rank group only; a subclass sets the attributes that
    `init_gqa_properties` reads, and calls it. In 0.6 the constructor takes the configuration and
    the sizes, and calls it.
    """

    is_causal = True
    num_heads: int | None = None
    num_key_value_groups: int | None = None
    num_key_value_heads: int | None = None
    bias = qkv_bias = o_bias = False
    o_proj_layer_name = "o_proj"
    clip_qkv: float | None = None
    fused_qkv = False
    rms_norm_eps: float | None = None
    rpl_reduce_dtype: torch.dtype | None = None
    sequence_parallel_enabled = False
    sequence_dimension: int | None = None
    qk_layernorm = False
    attn_kernel_enabled: bool | None = False
    k_cache_transposed = is_prefix_caching = False
    logical_neuron_cores = logical_nc_config = 1

    def __init__(
        self, config: Any = None, *, tensor_model_parallel_group: Group | None = None, **sizes: Any
    ) -> None:
        super().__init__()
        self.contract = contract()
        if isinstance(config, Group):  # 0.1 passes the group by position
            config, tensor_model_parallel_group = None, config
        self.tensor_model_parallel_group = group_or_all(tensor_model_parallel_group)
        self.rank_util: SPMDRank | None = None
        if self.tensor_model_parallel_group is not None:
            self.rank_util = SPMDRank(world_size=self.tensor_model_parallel_group.size())
        self.rotary_emb: Any = None
        self.o_proj: Any = None
        self.qkv_proj: Any = None
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config is not None:
            self._configure(config, **sizes)
            self.softmax_scale = math.sqrt(self.head_dim)  # what scores are divided by
            self.ep_dispatch_cc_option = EPDispatchOption.AR_AG
        elif self.contract.attention_takes_config:
            raise TypeError(
                f"NeuronAttentionBase of NxDI {self.contract.version} needs the config as its "
                "first argument, expected config, hidden_size and the head counts, got none of "
                f"them; pass them, or set {ENVIRONMENT_VARIABLE} to 0.1 for a file of "
                "that time."
            )

    def _configure(
        self,
        config: Any,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int | None = None,
        rotary_emb: nn.Module | None = None,
        rms_norm_eps: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        clip_qkv: float | None = None,
        num_cores_per_group: int = 1,
        **later: Any,
    ) -> None:
        """Set every attribute from the arguments (NxDI 0.6), then the projections.
        NotImplementedError for a later argument that is on: its feature would do nothing here."""
        refuse_others("NeuronAttentionBase", later, **_LATER)
        neuron_config = config.neuron_config
        del num_cores_per_group  # of flash decoding
        self.config, self.neuron_config = config, neuron_config
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rotary_emb, self.rms_norm_eps, self.clip_qkv = rotary_emb, rms_norm_eps, clip_qkv
        self.bias, self.qkv_bias, self.o_bias = qkv_bias or o_bias, qkv_bias, o_bias
        self.padding_side = neuron_config.padding_side
        for name in ("torch_dtype", "tp_degree", "fused_qkv", "rpl_reduce_dtype"):
            setattr(self, name, getattr(neuron_config, name))
        self.init_gqa_properties()

    def init_gqa_properties(self) -> None:
        """Build qkv_proj and o_proj, and replace the head counts by one rank's."""
        width = self.head_dim * self.num_attention_heads
        if self.contract.heads_fill_hidden_size and width != self.hidden_size:
            raise ValueError(
                f"hidden_size must be divisible by num_heads (got hidden_size={self.hidden_size}, "
                f"num_heads={self.num_attention_heads}, head_dim={self.head_dim})."
            )
        group = self.tensor_model_parallel_group
        self.qkv_proj, self.o_proj = self._projections(self.tp_degree, group)
        qkv_proj = self.get_qkv_proj()
        shards = 1 if group is None else qkv_proj.tp_degree
        self.num_heads = divide(qkv_proj.get_num_attention_heads(), shards)
        self.num_key_value_heads = divide(qkv_proj.get_num_key_value_heads(), shards)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        if self.qk_layernorm:
            self.q_layernorm = nn.LayerNorm(self.head_dim)
            self.k_layernorm = nn.LayerNorm(self.head_dim)
        self.attn_kernel_enabled = self.neuron_config.attn_kernel_enabled

    def _projections(
        self, tp_degree: int, group: Group | None
    ) -> tuple[GroupQueryAttention_QKV, GroupQueryAttention_O]:
        """The input and the output projection over a group's ranks."""
        common = {name: getattr(self, name) for name in _OF_BOTH}
        common |= dict(
            tp_degree=tp_degree, dtype=self.torch_dtype, tensor_model_parallel_group=group
        )
        named = self.qkv_bias or self.o_bias  # each by itself; else one word for both
        qkv_proj = GroupQueryAttention_QKV(
            gather_output=False,
            bias=self.qkv_bias if named else self.bias,
            fused_qkv=self.fused_qkv,
            clip_qkv=self.clip_qkv,
            rms_norm_eps=self.rms_norm_eps,
            qkv_kernel_enabled=self.neuron_config.qkv_kernel_enabled,
            **common,
        )
        o_proj = GroupQueryAttention_O(
            input_is_parallel=True,
            bias=self.o_bias if named else self.bias,
            layer_name=self.o_proj_layer_name,
            rpl_reduce_dtype=self.rpl_reduce_dtype,
            **common,
        )
        return qkv_proj, o_proj

    def get_qkv_proj(self) -> Any:
        """The input projections."""
        return self.qkv_proj

    def get_o_proj(self) -> Any:
        """The output projection."""
        return self.o_proj

    def scaled_qk(self, Q: torch.Tensor, K: torch.Tensor, attention_mask: Input) -> torch.Tensor:
        """Scores Q K^T / sqrt(D) in the activations' dtype; its minimum where the mask is False."""
        scores = torch.matmul(Q, K.transpose(2, 3)) / math.sqrt(self.head_dim)
        if attention_mask is None:
            return scores
        return torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)

    def prep_qkv_tensors(
        self,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        past_key_value: Any,
        adapter_ids: Input = None,
        cos_cache: Input = None,
        sin_cache: Input = None,
        rmsnorm: nn.Module | None = None,
        skip_rope: bool = False,
        residual: Input = None,
        use_polar_compatible_rope: bool = False,
    ) -> tuple[Any, ...]:
        """Q (B, heads, S, D) and K, V (B, kv heads, S, D) after RoPE, and their angles. Returns (Q,
        K, V, cos, sin), and the residual behind them in NxDI 0.6."""
        projections = self.get_qkv_proj()
        later = {"residual": residual} if self.contract.passes_residual else {}
        given = {"rmsnorm": rmsnorm, "adapter_ids": adapter_ids, **later}
        Q, K, V = projections(hidden_states=hidden_states, **given)[:3]
        batch, length, _ = Q.shape  # the whole sequence, also under sequence parallelism
        layout = (batch, length)
        Q = move_heads_front(Q, *layout, self.num_heads, self.head_dim, self.q_layernorm)
        K = move_heads_front(K, *layout, self.num_key_value_heads, self.head_dim, self.k_layernorm)
        V = move_heads_front(V, *layout, self.num_key_value_heads, self.head_dim)
        if self.rotary_emb is not None and not skip_rope:
            tables = cos_cache, sin_cache, use_polar_compatible_rope
            Q, K, cos_cache, sin_cache = self.apply_rotary_embedding(Q, K, V, position_ids, *tables)
        result = (Q, K, V, cos_cache, sin_cache)
        return (*result, residual) if self.contract.passes_residual else result

    def apply_rotary_embedding(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        position_ids: torch.Tensor,
        cos_cache: Input,
        sin_cache: Input,
        use_polar_compatible_rope: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Rotate Q and K (B, heads, S, D) to their positions; returns Q, K, cos and sin."""
        if use_polar_compatible_rope:
            raise NotImplementedError("use_polar_compatible_rope is not modelled; leave it off.")
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids)
        return (*apply_rotary_pos_emb(Q, K, cos_cache, sin_cache), cos_cache, sin_cache)

    def get_learned_sinks(self) -> None:
        """None: no score is without a key here."""

    def perform_prefill(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        q_len: int,
        bsz: int,
        attention_mask: Input,
    ) -> tuple[torch.Tensor, FlashAttentionStrategy]:
        """The prompt's causal attention to itself: (B, heads, S, D)."""
        K = repeat_kv(K, self.num_key_value_groups)
        V = repeat_kv(V, self.num_key_value_groups)
        strategy = self.get_flash_attention_strategy(q_len, attention_mask is not None)
        if strategy is not FlashAttentionStrategy.NONE:
            _flash_fwd_call(Q, K, V, 1.0, torch.empty_like(Q))
        scores = self.scaled_qk(Q, K, attention_mask)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(Q.dtype)
        return torch.matmul(weights, V), FlashAttentionStrategy.NONE

    def get_flash_attention_strategy(
        self, q_len: int, has_attention_mask: bool = True
    ) -> FlashAttentionStrategy:
        """The closed kernel where `attn_kernel_enabled` asks for it, from 512 tokens on. NxDI takes
        it unasked from 4096 tokens on; plain attention gives the same, and runs here."""
        del has_attention_mask  # decides between kernels of two-core setups (NxDI 0.6)
        if self.attn_kernel_enabled and q_len >= _FLASH_MINIMUM:
            return FlashAttentionStrategy.UNSHARDED_KERNEL
        return FlashAttentionStrategy.NONE

    def attention_context_encode(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        q_len: int,
        bsz: int,
        attention_mask: Input,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
        active_mask: Input = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prefill with the heads moved back: (B, S, heads, D), and this rank's K and V."""
        del past_key_value, active_mask  # of a prompt behind a cached prefix
        output, _ = self.perform_prefill(Q, K, V, q_len, bsz, attention_mask)
        return output.transpose(1, 2).contiguous(), K, V

    def attention_tokengen(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        attention_mask: Input,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor],
        active_mask: Input,
        **_later: Any,
    ) -> torch.Tensor:
        """Attention over a cache: (B, heads, S, D)."""
        masks = attention_mask, active_mask
        return self.compute_for_token_gen(Q, K, V, position_ids, past_key_value, *masks)

    def compute_for_token_gen(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Input,
        active_mask: Input,
        is_prefix_caching: bool = False,
    ) -> torch.Tensor:
        """The new tokens' attention to cache and themselves: (B, heads, S, D)."""
        del is_prefix_caching
        speculating = position_ids.shape[-1] > 1
        groups = self.num_key_value_groups
        past_keys, past_values = (repeat_kv(past, groups) for past in past_key_value)
        prior = self.scaled_qk(Q, past_keys, attention_mask)
        K, V = repeat_kv(K, groups), repeat_kv(V, groups)
        active = self.scaled_qk(Q, K, active_mask if speculating else None)
        prior_weights, active_weights = manual_softmax(prior, active, speculating)
        from_past = torch.matmul(prior_weights.to(Q.dtype), past_values)
        return from_past + torch.matmul(active_weights.to(Q.dtype), V)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Input = None,
        position_ids: Input = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
        active_mask: Input = None,
        adapter_ids: Input = None,
        cos_cache: Input = None,
        sin_cache: Input = None,
        rmsnorm: nn.Module | None = None,
        *,
        residual: Input = None,
        **later: Any,
    ) -> Any:
        """(B, S, H) -> output, this step's (K, V) (B, kv heads, S, D), cos, sin."""
        if later and not self.contract.attention_takes_config:
            raise TypeError(
                f"NeuronAttentionBase.forward of NxDI 0.1 takes no keywords {sorted(later)}, "
                "expected only those of its signature; drop the rest before calling it, or set "
                f"{ENVIRONMENT_VARIABLE} to 0.6 for a file written for that version."
            )
        Q, K, V, cos_cache, sin_cache = self.prep_qkv_tensors(
            position_ids, hidden_states, past_key_value, adapter_ids, cos_cache, sin_cache, rmsnorm
        )[:5]
        batch, _, length, _ = Q.shape
        if past_key_value is None:
            prefix = (past_key_value, active_mask) if self.contract.attention_takes_config else ()
            output, K, V = self.attention_context_encode(
                Q, K, V, length, batch, attention_mask, *prefix
            )
        else:
            output = self.attention_tokengen(
                Q, K, V, attention_mask, position_ids, past_key_value, active_mask, **later
            ).transpose(1, 2)
        output = output.reshape(batch, length, self.num_heads * self.head_dim)
        output = self.get_o_proj()(output, adapter_ids=adapter_ids)
        if self.contract.passes_residual:
            return NeuronAttentionBaseOutput(output, (K, V), cos_cache, sin_cache, residual)
        return output, (K, V), cos_cache, sin_cache
