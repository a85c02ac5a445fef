"""The baseline Mistral: a Llama with a sliding window.

The name is that of NxDI's module for this type of model, in the versions that have one.
"""

from typing import Any, Type

from torch import nn
from transformers import MistralForCausalLM

from ..config import InferenceConfig
from ..llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM


class MistralInferenceConfig(LlamaInferenceConfig):
    """Configuration of a Mistral; Hugging Face's attributes under their own names."""


class NeuronMistralForCausalLM(NeuronLlamaForCausalLM):
    """The application around a traced Llama that reads what differs from its configuration."""

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> nn.Module:
        return MistralForCausalLM.from_pretrained(model_path, **kwargs)

    @classmethod
    def get_config_cls(cls) -> Type[InferenceConfig]:
        return MistralInferenceConfig
