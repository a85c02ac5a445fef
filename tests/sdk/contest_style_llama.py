"""A model file in the style of contest entries: NxDI's base classes, many SDK imports, one kernel.

It exists for its imports and for the ways in which it uses the SDK, which llama.py avoids: a
subclass of NeuronAttentionBase, transposed parallel weights, fused gate and up projections that
are interleaved for the ranks, four layer results, and a grid-launched kernel.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
from typing import List, Optional, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import transpose_parallel_linear_layer
from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group
from neuronx_distributed_inference.utils.distributed import get_tp_group
from torch import nn
from torch_neuronx.xla_impl.ops import RmsNorm
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN

logger = logging.getLogger("Neuron")


@nki.jit
def grid_rmsnorm(x_hbm, gain_hbm, eps):
    """One program of the grid per batch row: x (B, S, H) with S at most 128."""
    batch, rows, width = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    row = nl.program_id(0)
    x = nl.load(x_hbm[row], dtype=nl.float32)
    gain = nl.load(gain_hbm.reshape((1, width)), dtype=nl.float32)
    squares = nl.sum(nl.square(x), axis=[1], keepdims=True)
    scale = nl.rsqrt(nl.add(nl.multiply(squares, 1.0 / width), eps))
    scaled = nl.multiply(x, scale)
    nl.store(out_hbm[row], nl.multiply(scaled, gain.broadcast_to((rows, width))))
    return out_hbm


class CustomRMSNorm(nn.Module):
    """The norm with a switch between the compiler's operator and the kernel above."""

    def __init__(self, hidden_size, eps=1e-6, nki_enabled=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.nki_enabled = nki_enabled

    def forward(self, x):
        if self.nki_enabled:
            return grid_rmsnorm[x.shape[0]](x, self.weight, self.variance_epsilon)
        wide = RmsNorm.apply(x.to(torch.float32), self.weight, self.variance_epsilon, x.ndim - 1)
        return wide.to(x.dtype)


class NeuronConfigNKI(NeuronConfig):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.nki_enabled = kwargs.pop("enable_nki", False)


class LlamaInferenceConfig(InferenceConfig):
    def add_derived_config(self):
        self.num_cores_per_group = 1
        if self.neuron_config.flash_decoding_enabled:
            self.num_cores_per_group = calculate_num_cores_per_group(
                self.num_attention_heads, self.num_key_value_heads, self.neuron_config.tp_degree
            )

    def get_required_attributes(self) -> List[str]:
        return ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


class NeuronLlamaMLP(nn.Module):
    """Gate and up as one transposed weight, interleaved so that each rank gets both halves."""

    def __init__(self, config):
        super().__init__()
        dtype = config.neuron_config.torch_dtype
        self.act_fn = ACT2FN[config.hidden_act]
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            2 * config.intermediate_size,
            bias=False,
            gather_output=False,
            dtype=dtype,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )
        self.gate_up_proj.weight = transpose_parallel_linear_layer(self.gate_up_proj.weight)
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            input_is_parallel=True,
            dtype=dtype,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
            reduce_dtype=config.neuron_config.rpl_reduce_dtype,
        )

    def forward(self, x):
        gate, up = (x @ self.gate_up_proj.weight).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class LazyRotary(nn.Module):
    """Angles whose frequencies are made in the first forward, one by one, in Python.

    That is legal on the device although it looks at values: they depend on no input. The factor
    of 1 beyond a wavelength leaves the angles as they are, so that the baseline agrees.
    """

    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", None, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        if self.inv_freq is None:
            exponents = torch.arange(0, self.dim, 2, dtype=torch.int64).float().to(x.device)
            frequencies = []
            for frequency in 1.0 / (self.base ** (exponents / self.dim)):
                factor = 1.0 if 2 * math.pi / frequency > 100 else 1
                frequencies.append(frequency / factor)
            self.inv_freq = torch.tensor(
                frequencies, dtype=torch.float32, device=frequencies[0].device
            )
        freqs = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = (freqs @ position_ids[:, None, :].float()).transpose(1, 2)
            angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype=x.dtype), angles.sin().to(dtype=x.dtype)


class NeuronLlamaAttention(NeuronAttentionBase):
    """The 0.1 way: attributes first, then init_gqa_properties."""

    def __init__(self, config, tensor_model_parallel_group=None):
        super().__init__(tensor_model_parallel_group=tensor_model_parallel_group)
        self.config = config
        self.neuron_config = config.neuron_config
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = self.hidden_size // self.num_attention_heads
        self.padding_side = config.neuron_config.padding_side
        self.torch_dtype = config.neuron_config.torch_dtype
        self.tp_degree = get_tensor_model_parallel_size()
        self.fused_qkv = config.neuron_config.fused_qkv
        self.clip_qkv = None
        self.bias = getattr(config, "attention_bias", False)
        self.rpl_reduce_dtype = config.neuron_config.rpl_reduce_dtype
        self.rms_norm_eps = config.rms_norm_eps
        self.sequence_parallel_enabled = False
        self.sequence_dimension = None
        self.flash_decoding_enabled = False
        self.num_cores_per_group = config.num_cores_per_group
        self.init_gqa_properties()
        self.rotary_emb = LazyRotary(self.head_dim, config.rope_theta)


class NeuronLlamaDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        nki_enabled = config.neuron_config.nki_enabled
        self.self_attn = NeuronLlamaAttention(config, get_tp_group(config))
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps, nki_enabled)
        self.post_attention_layernorm = CustomRMSNorm(
            config.hidden_size, config.rms_norm_eps, nki_enabled
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_value: Optional[Tuple[torch.Tensor]] = None,
        **kwargs,
    ):
        residual = hidden_states
        hidden_states, present, cos_cache, sin_cache = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, present, cos_cache, sin_cache


class NeuronLlamaModel(NeuronBaseModel):
    def setup_attr_for_model(self, config):
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets

    def init_model(self, config):
        assert parallel_state.model_parallel_is_initialized()
        dtype = config.neuron_config.torch_dtype
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=dtype,
            shard_across_embedding=not config.neuron_config.vocab_parallel,
            sequence_parallel_enabled=False,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
            use_spmd_rank=config.neuron_config.vocab_parallel,
        )
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            gather_output=not self.on_device_sampling,
            dtype=dtype,
            bias=False,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )
        self.layers = nn.ModuleList(
            [NeuronLlamaDecoderLayer(copy.copy(config)) for _ in range(config.num_hidden_layers)]
        )
        self.norm = CustomRMSNorm(
            config.hidden_size, config.rms_norm_eps, config.neuron_config.nki_enabled
        )


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path, **kwargs):
        return LlamaForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        degree = config.neuron_config.tp_degree
        ranks = torch.arange(0, degree, dtype=torch.int32)
        for i in range(config.num_hidden_layers):
            mlp = f"layers.{i}.mlp"
            gate = state_dict.pop(f"{mlp}.gate_proj.weight").chunk(degree)
            up = state_dict.pop(f"{mlp}.up_proj.weight").chunk(degree)
            interleaved = [part for pair in zip(gate, up, strict=True) for part in pair]
            state_dict[f"{mlp}.gate_up_proj.weight"] = torch.cat(interleaved)
            state_dict[f"layers.{i}.self_attn.rank_util.rank"] = ranks.detach().clone()
        state_dict["rank_util.rank"] = ranks.detach().clone()
        gc.collect()
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict):
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls):
        return LlamaInferenceConfig

    def get_compiler_args(self):
        return None
