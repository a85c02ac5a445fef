"""llama.py with all that stands beside it: what the driver takes where a setting asks for it.

    llama.py            Llama of the contest: prompts, a token at a time; read it first
    llama_adapters.py   low-rank adapters, several in a batch
    llama_quantised.py  weights of one byte, caches in fp8
    llama_families.py   Qwen's biases and norms, heads that guess (Medusa, EAGLE)
    llama_layers.py     linear layers and kernels with all of these
    llama_cached.py     several tokens over a cache, blocks, chunks that sequences share, windows
    llama_ranks.py      flash decoding and context parallelism

Features combine: a graph may have adapters over a cache of blocks under a window.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple, Type

import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from torch import nn

import llama
from llama import (
    P_MAX, Sizes, attention_for_kernels, head_for_kernels, is_nki_enabled, mlp_for_kernels,
    option,
)  # fmt: skip
from llama_adapters import (
    IDLE_TARGET, AdaptedLayer, adapter_ranks, add_adapters, add_idle_layer, convert_adapters,
)  # fmt: skip
from llama_quantised import as_integers, as_quantised, convert_scales, quantise_kernel_weights
from llama_families import (
    DraftInput, NormOfColumns, ResBlock, attention_biases, convert_terms, has_head_norms,
    medusa_heads, shows_hidden_states,
)  # fmt: skip
from llama_layers import AnyHead, AnyMLP
from llama_cached import blocks_and_table, chunks_too_large, window_of
from llama_ranks import (
    PromptAttention, SharedAttention, check_parts_of_prompt, convert_parts, cores_of_a_kv_head,
    parts_of_prompt,
)  # fmt: skip


class NeuronConfigNKI(llama.NeuronConfigNKI):
    """With ``prompt_in_chunks``: calls of ``speculation_length`` tokens feed a prompt, whose last
    token is a decode step of its own; so of their logits nobody reads but a last row."""

    def __init__(self, **kwargs: Any) -> None:
        self.prompt_in_chunks = bool(kwargs.pop("prompt_in_chunks", False))
        super().__init__(**kwargs)


class LlamaInferenceConfig(llama.LlamaInferenceConfig):
    """Any configuration that the files beside this one cover."""

    covered = (
        "a Llama with SiLU, biases on queries, keys and values only, heads of 256 or an even "
        "number up to 128 and a batch of at most 128"
    )

    def check_covered(self) -> None:
        neuron_config, window = self.neuron_config, window_of(self)
        if option(self, "is_eagle_draft"):  # one layer without its first norm is PyTorch's
            neuron_config.nki_enabled = False
        if neuron_config.flash_decoding_enabled:
            self.num_cores_per_group = cores_of_a_kv_head(self)
        if parts_of_prompt(self) > 1:
            check_parts_of_prompt(self)
        lora = neuron_config.lora_config
        if lora is not None and not hasattr(lora, "lora_memory_transpose"):
            raise ValueError(
                "lora_config needs NxDI 0.2 or later, where adapters are read and number 0 is none "
                "of them, got an earlier one; leave it out."
            )
        if getattr(self, "use_sliding_window", False):  # Qwen's
            raise ValueError(
                "use_sliding_window gives some layers a window and others none, expected False; no "
                "layer of this file chooses."
            )
        if window is None:
            return
        for asked, why, mend in (
            (neuron_config.is_chunked_prefill,
             "counts positions, which a chunk's tiles do not have, expected no "
             "chunked_prefill_config", "leave one of them out"),
            (neuron_config.flash_decoding_enabled,
             "counts rows of a cache, which flash_decoding_enabled spreads over ranks, expected "
             "one of the two", "leave flash_decoding_enabled out"),
            (neuron_config.padding_side == "left",
             "counts from the right here, got padding_side 'left'", "pad on the right"),
        ):  # fmt: skip
            if asked:
                raise ValueError(f"sliding_window {window} {why}; {mend}.")

    def lacking(self) -> List[Tuple[bool, str]]:
        sizes, neuron_config = Sizes.of(self), self.neuron_config
        q_heads, batch, dim = sizes.of_rank.q_heads, neuron_config.max_batch_size, sizes.head_dim
        qkv_bias, out_bias = attention_biases(self)
        quantised, narrow = option(self, "quantized"), option(self, "kv_cache_quant")
        precise = neuron_config.torch_dtype is torch.float32  # TensorE takes fp32 with fp32 only
        # rows that a table names
        named = option(self, "is_block_kv_layout") or window_of(self) is not None
        wide, in_parts = dim > P_MAX, parts_of_prompt(self) > 1
        left, lora = neuron_config.padding_side == "left", neuron_config.lora_config is not None
        return [
            (out_bias, "attention_bias"),
            (wide and dim != 2 * P_MAX, f"head_dim {dim}"),
            (dim % 2 > 0, f"head_dim {dim}"),
            (wide and has_head_norms(self), f"norms over heads of {dim}"),
            (wide and neuron_config.flash_decoding_enabled, f"shares of heads of {dim}"),
            (wide and in_parts, f"parts of prompts of heads of {dim}"),
            (q_heads > P_MAX, f"{q_heads} query heads per rank"),
            (batch > P_MAX, f"a batch of {batch}"),
            (lora and quantised, "adapters beside quantised weights"),
            *chunks_too_large(self),
            (precise and narrow and named, "fp8 blocks, or a window of an fp8 cache, in float32"),
            # the kernels see just what stands in front of a part
            (in_parts and left, "left padding in parts of a prompt"),
            (in_parts and window_of(self) is not None, "a sliding_window over parts of a prompt"),
            (qkv_bias and quantised, "biases behind quantised weights"),
            (precise and quantised, "quantised weights in a model of float32"),
            (bool(getattr(self, "mlp_bias", False)), "mlp_bias"),
            (self.hidden_act != "silu", f"hidden_act {self.hidden_act}"),
        ]  # fmt: skip

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


class NeuronLlamaDecoderLayer(AdaptedLayer):
    """With every attention and MLP; a prompt of which groups of ranks have parts has its own."""

    attention_cls, mlp_cls = SharedAttention, AnyMLP

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        if parts_of_prompt(config) > 1:
            self.prompt_attn = PromptAttention(config)
        draft = option(config, "is_eagle_draft")
        if draft and not config.neuron_config.enable_eagle_draft_input_norm:
            self.input_layernorm = nn.Identity()

    def attention(self, given: Dict[str, Any]) -> nn.Module:
        prompt = given.get("past_key_value") is None and parts_of_prompt(self.config) > 1
        return self.prompt_attn if prompt else self.self_attn


class NeuronLlamaModel(llama.NeuronLlamaModel):
    """With further heads, quantised weights, adapters, and caches of blocks."""

    layer_cls, head_cls = NeuronLlamaDecoderLayer, AnyHead

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        super().setup_attr_for_model(config)
        if parts_of_prompt(config) > 1:  # whose replicas the cache's manager counts by itself
            self.num_key_value_heads = config.num_key_value_heads
        self.medusa_speculation_length = config.neuron_config.medusa_speculation_length

    def init_model(self, config: InferenceConfig) -> None:
        super().init_model(config)
        neuron_config, hidden = config.neuron_config, config.hidden_size
        if option(config, "is_eagle_draft"):  # it continues hidden states, and has no final norm
            self.fc = DraftInput(
                2 * hidden, hidden, gather_output=True, bias=getattr(config, "fc_bias", False),
                dtype=neuron_config.torch_dtype,
            )  # fmt: skip
            del self.norm
        for index in range(medusa_heads(config)):
            head = nn.Sequential(ResBlock(hidden), self.output_head(config))
            setattr(self, f"medusa_head_{index}", head)
        if is_nki_enabled(config) and neuron_config.quantized:
            quantise_kernel_weights(self, neuron_config)
        if is_nki_enabled(config) and adapter_ranks(config):
            add_idle_layer(self, config)

    def final_norm(self, config: InferenceConfig) -> nn.Module:
        if is_nki_enabled(config) and shows_hidden_states(config):
            return NormOfColumns(config.hidden_size, config.rms_norm_eps)
        return super().final_norm(config)

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        """The caches; the kernels take fp8 as it is stored, but for a model of float32."""
        super().init_inference_optimization(config)
        narrow = config.neuron_config.torch_dtype is not torch.float32
        if is_nki_enabled(config) and config.neuron_config.kv_cache_quant and narrow:
            self.kv_mgr.dequant_dtype = self.kv_mgr.quant_dtype
        if is_nki_enabled(config) and option(config, "is_block_kv_layout"):
            self.kv_mgr.get_cache = self.blocks_and_table

    def blocks_and_table(self, active_block_table: torch.Tensor, **_: Any) -> List[Any]:
        return blocks_and_table(self.kv_mgr.past_key_values, active_block_table)


class Projections(llama.KernelProjections):
    """With scales and adapters, biases and gains of heads."""

    def converted(self, with_gain: bool = True) -> Any:
        with_gain = not convert_scales(self)
        convert_adapters(self)
        return super().converted(with_gain)


# Tensors of attention that have heads: rows of Q, K and V, and columns of the output.
OF_HEADS = ("weight", "bias", "scale", "lora_B"), ("weight", "lora_A")


def convert_layer(state: llama.StateDict, prefix: str, config: InferenceConfig) -> None:
    """Spread the heads of one layer, and put its weights in kernel layout for the kernels."""
    attentions = convert_parts(state, prefix, config, OF_HEADS)
    if is_nki_enabled(config):
        gain = state.pop(f"{prefix}input_layernorm.weight")
        for name, sizes in attentions.items():
            convert_terms(state, name, sizes)
            attention_for_kernels(state, name, gain, sizes, Projections)
        gain, tp = state.pop(f"{prefix}post_attention_layernorm.weight"), Sizes.of(config).tp
        mlp_for_kernels(state, f"{prefix}mlp.", gain, tp, Projections)


class NeuronLlamaForCausalLM(llama.NeuronLlamaForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        """With the single-token graph, which NxDI 0.2 and later leave out: generation needs it."""
        super().enable_speculation(*args, **kwargs)
        decodes = hasattr(self, "token_generation_model")
        if option(self, "prompt_in_chunks") and not decodes:
            self.enable_token_generation()

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: llama.StateDict, config: InferenceConfig
    ) -> llama.StateDict:
        state, tp, nki_enabled = (
            as_integers(state_dict),
            Sizes.of(config).tp,
            is_nki_enabled(config),
        )
        if nki_enabled and config.neuron_config.torch_dtype is torch.float32:
            state = {name: tensor.float() for name, tensor in state.items()}
        if nki_enabled and adapter_ranks(config):
            state[f"{IDLE_TARGET}.weight"] = torch.zeros(1, 1)
            add_adapters(state, config)
        for layer in range(config.num_hidden_layers):
            convert_layer(state, f"layers.{layer}.", config)
        if nki_enabled:
            state.setdefault("lm_head.weight", state["embed_tokens.weight"])
            apart = shows_hidden_states(config)  # then a norm of its own is in front
            gain = torch.ones(config.hidden_size) if apart else state.pop("norm.weight")
            for head in ("lm_head", *(f"medusa_head_{i}.1" for i in range(medusa_heads(config)))):
                head_for_kernels(state, head, gain, tp, Projections)
        llama.add_ranks(state, config)
        return as_quantised(state, config.neuron_config)

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
