"""The baseline Llama: plain PyTorch on NxD layers, no kernels of its own.

Written from the interface of NxDI 0.1.0's module of the same name; later versions by contract.py.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...modules.attention.attention_base import NeuronAttentionBase
from ...modules.attention.utils import RotaryEmbedding
from ...modules.custom_calls import CustomRMSNorm
from ...small import get_tp_group
from ..application_base import refuse_options
from ..config import InferenceConfig, NeuronConfig
from ..model_base import NeuronBaseForCausalLM, NeuronBaseModel

_LLAMA_MODULE_MAP: dict[str, type] = {}
StateDict = dict[str, torch.Tensor]
# Options by which NxDI's modules call closed kernels; these modules have nothing in their place.
_CLOSED_KERNEL_OPTIONS = (
    "attn_kernel_enabled",
    "qkv_kernel_enabled",
    "qkv_kernel_fuse_residual_add",
    "mlp_kernel_enabled",
)


def register_module(key: str) -> Callable[[type], type]:
    """Class decorator that makes an attention class available as `NeuronConfig(attn_cls=key)`."""

    def register(cls: type) -> type:
        _LLAMA_MODULE_MAP[key] = cls
        return cls

    return register


def get_rmsnorm_cls() -> type[nn.Module]:
    """The compiler's norm on ranks, Hugging Face's elsewhere."""
    if parallel_state.model_parallel_is_initialized():
        return CustomRMSNorm
    return transformers.models.llama.modeling_llama.LlamaRMSNorm  # loaded where it is asked for


def convert_state_dict_to_fused_qkv(llama_state_dict: StateDict, cfg: InferenceConfig) -> StateDict:
    """Replace q, k and v of every layer by `Wqkv`: q's rows, then k's, then v's."""
    for layer in range(cfg.num_hidden_layers):
        prefix = f"layers.{layer}.self_attn"
        for kind in ("weight", "bias"):
            names = [f"{prefix}.{name}_proj.{kind}" for name in "qkv"]
            if names[0] in llama_state_dict:
                fused = torch.cat([llama_state_dict.pop(name) for name in names])
                llama_state_dict[f"{prefix}.Wqkv.{kind}"] = fused
    return llama_state_dict


class LlamaInferenceConfig(InferenceConfig):
    """A Llama's configuration; attributes have Hugging Face's names."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1  # more under flash decoding

    def get_required_attributes(self) -> list[str]:
        return [
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "pad_token_id",
            "vocab_size",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "hidden_act",
        ]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig


def model_type(config: InferenceConfig) -> str:
    """The type in Llama's family: llama, mistral, qwen2, qwen3 or qwen3_moe."""
    return getattr(config, "model_type", "llama")


def window_of(config: InferenceConfig) -> int | None:
    """Tokens that a query sees, itself included; None where the cache holds no more."""
    if getattr(config, "use_sliding_window", False):
        raise NotImplementedError(
            "use_sliding_window gives some layers a window and others none, expected False; it is "
            "not modelled."
        )
    window = getattr(config, "sliding_window", None) if model_type(config) == "mistral" else None
    return None if window is None or window >= config.neuron_config.seq_len else window


def head_dim_of(config: InferenceConfig) -> int:
    """The size of one head, as given, else derived."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class NeuronLlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up column-parallel, down row-parallel."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        neuron_config = config.neuron_config
        self.config, self.neuron_config = config, neuron_config
        self.act_fn = ACT2FN[config.hidden_act]
        self.sequence_parallel_enabled = neuron_config.sequence_parallel_enabled
        self.sequence_dimension = None
        common = dict(
            bias=getattr(config, "mlp_bias", False),
            dtype=neuron_config.torch_dtype,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )
        sizes = (config.hidden_size, config.intermediate_size)
        if parallel_state.model_parallel_is_initialized():
            column = dict(common, gather_output=False)
            self.gate_proj: nn.Module = ColumnParallelLinear(*sizes, **column)
            self.up_proj: nn.Module = ColumnParallelLinear(*sizes, **column)
            self.down_proj: nn.Module = RowParallelLinear(
                *sizes[::-1],
                input_is_parallel=True,
                reduce_dtype=neuron_config.rpl_reduce_dtype,
                **common,
            )
        else:
            self.gate_proj = nn.Linear(*sizes, bias=common["bias"])
            self.up_proj = nn.Linear(*sizes, bias=common["bias"])
            self.down_proj = nn.Linear(*sizes[::-1], bias=common["bias"])

    def forward(
        self,
        x: torch.Tensor,
        rmsnorm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
        adapter_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, S, H) -> the same, None."""
        del rmsnorm, residual, adapter_ids  # the private kernels', and adapters'
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), None


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Rotary angles in Llama 3's scaling: low frequencies are divided, a smooth step lies
    between."""

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 131072,
        base: float = 500000.0,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_position_embeddings: int = 8192,
    ) -> None:
        super().__init__(dim, max_position_embeddings, base)
        self.factor = factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.old_context_len = original_max_position_embeddings

    def get_inv_freqs(self, device: torch.device | None = None) -> torch.Tensor:
        """Frequencies, fp32 (dim/2,): unchanged above the high band, divided below the low one."""
        plain = super().get_inv_freqs(device)
        wavelength = 2 * math.pi / plain
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.old_context_len / wavelength - self.low_freq_factor) / span
        blend = smooth.clamp(0.0, 1.0)  # 0: divided, 1: unchanged
        return (1 - blend) * plain / self.factor + blend * plain


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Rotary angles as transformers scales them for a whole prompt (modeling_rope_utils).

    "dynamic" changes angles with each token beyond the trained positions: a cache that reaches
    there is refused.
    """

    def __init__(self, kind: str, config: InferenceConfig, **sizes: Any) -> None:
        super().__init__(**sizes)
        if kind == "dynamic" and config.neuron_config.seq_len > config.max_position_embeddings:
            raise ValueError(
                f"rope_scaling 'dynamic' reaches max_position_embeddings "
                f"{config.max_position_embeddings}, got seq_len {config.neuron_config.seq_len}; "
                "choose a shorter seq_len."
            )
        names = ("rope_theta", "rope_scaling", "max_position_embeddings", "hidden_size")
        values = {name: getattr(config, name) for name in (*names, "num_attention_heads")}
        asked = SimpleNamespace(**values, head_dim=head_dim_of(config))
        frequencies, self.amplitude = ROPE_INIT_FUNCTIONS[kind](asked, None)
        self.frequencies = frequencies.tolist()  # no buffer: the loader would round it

    def get_inv_freqs(self, device: torch.device | None = None) -> torch.Tensor:
        """Frequencies, fp32 (dim/2,)."""
        return torch.tensor(self.frequencies, dtype=torch.float32, device=device)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's cos and sin times the scaling's amplitude."""
        cos, sin = super().forward(x.float(), position_ids)
        return (cos * self.amplitude).to(x.dtype), (sin * self.amplitude).to(x.dtype)


def make_rotary_embedding(config: InferenceConfig) -> RotaryEmbedding:
    """The rotary module that the configuration asks for; ValueError for a scaling not modelled."""
    scaling = getattr(config, "rope_scaling", None)
    common = dict(
        dim=head_dim_of(config),
        max_position_embeddings=config.max_position_embeddings,
        base=config.rope_theta,
    )
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default"):
        return RotaryEmbedding(**common)
    if kind in ("yarn", "dynamic"):
        return ScaledRotaryEmbedding(kind, config, **common)
    if kind == "llama3":
        names = "factor low_freq_factor high_freq_factor original_max_position_embeddings"
        return Llama3RotaryEmbedding(**common, **{name: scaling[name] for name in names.split()})
    raise ValueError(
        f"rope_scaling type {kind!r} is not modelled, expected none, 'llama3', 'yarn' or "
        "'dynamic'; use a checkpoint with one of these."
    )


@register_module("NeuronLlamaAttention")
class NeuronLlamaAttention(NeuronAttentionBase):
    """Llama's attention on the shared base, as the version in force has it."""

    def __init__(
        self, config: InferenceConfig, tensor_model_parallel_group: Any | None = None
    ) -> None:
        group = tensor_model_parallel_group or get_tp_group(config)
        bias = getattr(config, "attention_bias", False)
        given = dict(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim_of(config),
            rotary_emb=make_rotary_embedding(config),
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=bias or model_type(config) == "qwen2",  # which has no word for it
            o_bias=bias,
        )
        if config.neuron_config.contract.attention_takes_config:
            super().__init__(config, tensor_model_parallel_group=group, **given)
        else:  # as a file for 0.1 sets its attributes
            super().__init__(tensor_model_parallel_group=group)
            self._configure(config, **given)
        if model_type(config) in ("qwen3", "qwen3_moe"):
            norm = get_rmsnorm_cls()
            self.q_layernorm = norm(self.head_dim, eps=config.rms_norm_eps)
            self.k_layernorm = norm(self.head_dim, eps=config.rms_norm_eps)


class NeuronLlamaDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.window = window_of(config)
        own, self.contract = config.neuron_config, config.neuron_config.contract
        if self.window is not None and own.speculation_length:
            raise NotImplementedError(
                f"sliding_window {self.window} meets several tokens a step, expected a cache that "
                "fits it; choose a shorter seq_len, or feed the prompt at once."
            )
        self.self_attn = _LLAMA_MODULE_MAP[config.neuron_config.attn_cls](
            config=config, tensor_model_parallel_group=get_tp_group(config)
        )
        self.mlp = NeuronLlamaMLP(config)
        norm = get_rmsnorm_cls()
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def _within_window(
        self, mask: torch.Tensor, position_ids: Any, past_key_value: Any
    ) -> torch.Tensor:
        """The mask without keys that lie `window` tokens or more before a query. Prompts are padded
        on the right."""
        keys = torch.arange(mask.shape[-1], device=mask.device)
        queries = keys[None] if past_key_value is None else position_ids
        return mask & (queries[:, None, :, None] - keys < self.window)

    def mlp_output(self, normed: torch.Tensor, given: Any) -> torch.Tensor:
        norm = None if self.contract.passes_residual else self.post_attention_layernorm
        return self.mlp(normed, rmsnorm=norm, adapter_ids=given.get("adapter_ids"))[0]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """(B, S, H) -> hidden, new (K, V), cos, sin; and the residual where one is passed in."""
        with_residual = "residual" in kwargs
        if self.window is not None and attention_mask is not None:
            attention_mask = self._within_window(attention_mask, position_ids, past_key_value)
        attention = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            rmsnorm=None if self.contract.attention_takes_config else self.input_layernorm,
            **kwargs,
        )
        output, present_key_value, cos_cache, sin_cache = attention[:4]
        residual = hidden_states + output
        output = self.mlp_output(self.post_attention_layernorm(residual), kwargs)
        outputs = (residual + output, present_key_value, cos_cache, sin_cache)
        return (*outputs, None) if with_residual else outputs


class NeuronLlamaModel(NeuronBaseModel):
    """The traced Llama, or a model that differs by its layers only."""

    decoder_layer_cls: type[nn.Module] = NeuronLlamaDecoderLayer

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets

    def init_model(self, config: InferenceConfig) -> None:
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        neuron_config = config.neuron_config
        dtype = neuron_config.torch_dtype
        if parallel_state.model_parallel_is_initialized():
            self.embed_tokens: nn.Module = ParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                self.padding_idx,
                dtype=dtype,
                shard_across_embedding=not neuron_config.vocab_parallel,
                pad=True,
                tensor_model_parallel_group=get_tp_group(config),
                use_spmd_rank=neuron_config.vocab_parallel,
            )
            self.lm_head: nn.Module = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                gather_output=not self.on_device_sampling,
                dtype=dtype,
                bias=False,
                pad=True,
                tensor_model_parallel_group=get_tp_group(config),
            )
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        layers = [self.decoder_layer_cls(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = get_rmsnorm_cls()(config.hidden_size, eps=config.rms_norm_eps)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """The application: checkpoint conversion around the traced Llama."""

    _model_cls = NeuronLlamaModel

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        super().validate_config(config)
        refuse_options(config.neuron_config, _CLOSED_KERNEL_OPTIONS)

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> nn.Module:
        """Hugging Face's model, of the family that the folder's config names."""
        return transformers.AutoModelForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Fuse q, k and v where asked, and add the tensors that tell a rank its number."""
        neuron_config = config.neuron_config
        if neuron_config.fused_qkv:
            state_dict = convert_state_dict_to_fused_qkv(state_dict, config)
        ranks = torch.arange(neuron_config.tp_degree, dtype=torch.int32)
        if neuron_config.vocab_parallel:
            state_dict["embed_tokens.rank_util.rank"] = ranks.clone()
        for layer in range(config.num_hidden_layers):
            state_dict[f"layers.{layer}.self_attn.rank_util.rank"] = ranks.clone()
        state_dict["rank_util.rank"] = ranks.clone()
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return LlamaInferenceConfig
