"""llama.py with every file beside it: the driver takes this file where a setting asks for more.

    llama.py       Llama of the contest: prompts, a token at a time; read it first
    adapters.py    low-rank adapters, several in a batch
    quantised.py   quantised weights, caches in fp8
    families.py    Qwen's biases and norms, heads that guess (Medusa, EAGLE)
    weights.py     how a checkpoint with these becomes weights of the ranks
    layers.py      linear layers and kernels with all of these
    queries.py     prompts of any length and size of heads, windows
    cached.py      several tokens over a cache, blocks, chunks that sequences share, windows
    ranks.py       flash decoding, context and sequence parallelism

Features combine: a graph may have adapters over a cache of blocks under a window.
"""

from __future__ import annotations

import logging
from typing import Any, List, Optional, Type

import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import llama
import models.cached
import models.ranks
from llama import P_MAX, is_nki_enabled, option
from models.weights import SharedSizes
from models.adapters import (
    AdaptedLayer,
    adapter_ranks,
    add_adapters,
    add_idle_layer,
    check_adapters,
    keep_numbers,
    spread_adapters,
)
from models.families import (
    NormOfColumns,
    add_heads,
    as_llama,
    attention_biases,
    check_family,
    number_layers,
    outside_of_kernels,
    set_norms,
    shows_hidden_states,
    window_of,
)
from models.quantised import as_integers, as_quantised, check_quantised, quantise_kernel_weights
from models.layers import ACTIVATIONS, AnyHead, convert_heads, convert_mlp
from models.cached import CachedConfig as NeuronConfigNKI


# Options that NxD Inference itself ends in an error with, and the last release 0.x that does so
# (tests/real/matrix.py --crosses).
_APART = (
    ("flash_decoding_enabled", "is_block_kv_layout", 9),
    ("quantized", "enable_fused_speculation", 9),
    ("lora_config", "enable_fused_speculation", 9),
    ("kv_cache_quant", "is_block_kv_layout", 7),
    ("lora_config", "is_block_kv_layout", 7),
    ("quantized", "lora_config", 7),
    ("flash_decoding_enabled", "is_continuous_batching", 1),
    ("flash_decoding_enabled", "speculation_length", 3),
    ("kv_cache_quant", "enable_fused_speculation", 1),
    ("vocab_parallel", "quantized", 1),
    ("async_mode", "async_mode", 1),
)


def check_pairs(neuron_config: Any) -> None:
    """ValueError for options that the release does not have together."""
    first = hasattr(neuron_config, "quantized_kernel_lower_bound")  # 0.1 alone has it
    later = 7 if hasattr(neuron_config, "chunked_prefill_config") else 3
    release = 1 if first else 9 if hasattr(neuron_config, "kv_quant_config") else later
    for one, other, last in _APART:
        asked = getattr(neuron_config, one, None) and getattr(neuron_config, other, None)
        if asked and release <= last:
            raise ValueError(
                f"{' beside '.join(dict.fromkeys((one, other)))} ends in an error of this release "
                "of NxD Inference, expected it to be off; leave one of them out."
            )


class LlamaInferenceConfig(llama.LlamaInferenceConfig):
    """Any configuration that the files beside this one cover."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        if option(self, "k_cache_transposed"):
            raise ValueError(
                "k_cache_transposed changes the data that the layers of this file get, expected "
                "False; leave it out."
            )
        if option(self, "is_eagle_draft"):  # PyTorch runs one layer without its first norm
            self.neuron_config.nki_enabled = False
        check_pairs(self.neuron_config)
        check_family(self)
        models.ranks.check_ranks(self)
        check_adapters(self)
        check_quantised(self)
        models.cached.check_window(self)

    def uncovered(self) -> Optional[str]:
        lacking = self.lacking() if is_nki_enabled(self) else []
        if not lacking:
            return None
        return (
            f"The kernels do not cover {lacking[0]}, expected SiLU or Gemma's GELU, biases on "
            "queries, keys and values only, heads of an even number of features, and a batch of "
            "at most 128; run without --enable-nki."
        )

    def lacking(self) -> List[str]:
        sizes, neuron_config = SharedSizes.of(self), self.neuron_config
        q_heads, batch, dim = sizes.of_rank.q_heads, neuron_config.max_batch_size, sizes.head_dim
        qkv_bias, out_bias = attention_biases(self)
        quantised, narrow = option(self, "quantized"), option(self, "kv_cache_quant")
        precise = neuron_config.torch_dtype is torch.float32  # TensorE pairs fp32 with fp32
        # a table names the rows
        named = option(self, "is_block_kv_layout") or window_of(self) is not None
        lora, outside = neuron_config.lora_config is not None, outside_of_kernels(self)
        found = {
            "attention_bias": out_bias,
            f"head_dim {dim}": dim % 2 > 0,
            f"adapters or quantised weights where {outside}": outside and (lora or quantised),
            f"{q_heads} query heads per rank": q_heads > P_MAX,
            f"a batch of {batch}": batch > P_MAX,
            "adapters with quantised weights": lora and quantised,
            **models.cached.chunks_too_large(self),
            "fp8 blocks, or a window of an fp8 cache, in float32": precise and narrow and named,
            "biases behind quantised weights": qkv_bias and quantised,
            "quantised weights in a model of float32": precise and quantised,
            "mlp_bias": bool(getattr(self, "mlp_bias", False)),
            f"hidden_act {self.hidden_act}": self.hidden_act not in ACTIVATIONS,
        }
        return [what for what, wrong in found.items() if wrong]

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


class ExtendedLayer(models.ranks.SharedLayer, AdaptedLayer):
    """The decoder layer with every attention and MLP. A sharded sequence is gathered first, as
    adapters are chosen for all of its tokens."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        set_norms(self, config)


class ExtendedModel(models.ranks.SharedModel, models.cached.CachedModel):
    """The model with further heads, quantised weights, adapters, and caches of blocks."""

    layer_cls, head_cls = ExtendedLayer, AnyHead

    def __init__(self, config: InferenceConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if adapter_ranks(config):
            keep_numbers(self) if is_nki_enabled(config) else spread_adapters(self, config)

    def init_model(self, config: InferenceConfig) -> None:
        super().init_model(config)
        number_layers(self, config)
        add_heads(self, config)
        if is_nki_enabled(config) and config.neuron_config.quantized:
            quantise_kernel_weights(self, config.neuron_config)
        if is_nki_enabled(config) and adapter_ranks(config):
            add_idle_layer(self, config)

    def final_norm(self, config: InferenceConfig) -> nn.Module:
        if is_nki_enabled(config) and shows_hidden_states(config):
            return NormOfColumns(config.hidden_size, config.rms_norm_eps)
        return super().final_norm(config)


class NeuronLlamaForCausalLM(llama.NeuronLlamaForCausalLM):
    """The model that the driver compiles, loads and generates with."""

    _model_cls = ExtendedModel

    def __init__(self, model_path: str, config: Any = None, *more: Any, **given: Any) -> None:
        super().__init__(model_path, config, *more, **given)
        why = outside_of_kernels(self.config) if is_nki_enabled(self.config) else None
        if why is not None:
            logging.warning("Attention runs in PyTorch, outside of NKI: %s.", why)

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(model_path, **kwargs)

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        """Keep the single-token graph, which NxDI 0.2 and later leave out: generation needs it."""
        super().enable_speculation(*args, **kwargs)
        if option(self, "prompt_in_chunks") and not hasattr(self, "token_generation_model"):
            self.enable_token_generation()

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: llama.StateDict, config: InferenceConfig
    ) -> llama.StateDict:
        state = as_integers(state_dict)
        if is_nki_enabled(config) and config.neuron_config.torch_dtype is torch.float32:
            state = {name: tensor.float() for name, tensor in state.items()}
        if is_nki_enabled(config) and adapter_ranks(config):
            add_adapters(state, config)
        state = as_llama(state, config)
        for prefix in (f"layers.{number}." for number in range(config.num_hidden_layers)):
            models.ranks.convert_attention(state, prefix, config)
            convert_mlp(state, prefix, config)
        convert_heads(state, config)
        llama.add_ranks(state, config)
        return as_quantised(state, config.neuron_config)

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
