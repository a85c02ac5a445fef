"""The baseline Qwen3: a Llama with norms over query and key heads.

Versions of NxDI that know this type of model have the module under the same name.
"""

import torch

from ..config import InferenceConfig
from ..llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM


class Qwen3InferenceConfig(LlamaInferenceConfig):
    """A Qwen3's configuration; attributes have Hugging Face's names."""


class NeuronQwen3ForCausalLM(NeuronLlamaForCausalLM):
    """The application around a traced Llama; the configuration says what differs."""

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, torch.Tensor], config: InferenceConfig
    ) -> dict[str, torch.Tensor]:
        """A Llama's conversion, with the norms over heads under NxDI's names."""
        for layer in range(config.num_hidden_layers):
            for name in ("q", "k"):
                prefix = f"layers.{layer}.self_attn.{name}"
                if f"{prefix}_norm.weight" in state_dict:
                    gain = state_dict.pop(f"{prefix}_norm.weight")
                    state_dict[f"{prefix}_layernorm.weight"] = gain
        return NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return Qwen3InferenceConfig
