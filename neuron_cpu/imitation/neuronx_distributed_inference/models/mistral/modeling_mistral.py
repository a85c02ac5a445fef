"""The baseline Mistral: a Llama with a sliding window.

The name is that of NxDI's module for this type of model, in the versions that have one.
"""

from typing import Type

from ..config import InferenceConfig
from ..llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM


class MistralInferenceConfig(LlamaInferenceConfig):
    """Configuration of a Mistral; Hugging Face's attributes under their own names."""


class NeuronMistralForCausalLM(NeuronLlamaForCausalLM):
    """The application around a traced Llama that reads what differs from its configuration."""

    @classmethod
    def get_config_cls(cls) -> Type[InferenceConfig]:
        return MistralInferenceConfig
