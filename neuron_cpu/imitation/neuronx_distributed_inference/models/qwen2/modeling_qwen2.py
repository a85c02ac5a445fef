"""The baseline Qwen2: a Llama with biases on queries, keys and values.

The name is that of NxDI's module for this type of model, in the versions that have one.
"""

from typing import Type

from ..config import InferenceConfig
from ..llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM


class Qwen2InferenceConfig(LlamaInferenceConfig):
    """Configuration of a Qwen2; Hugging Face's attributes under their own names."""


class NeuronQwen2ForCausalLM(NeuronLlamaForCausalLM):
    """The application around a traced Llama that reads what differs from its configuration."""

    @classmethod
    def get_config_cls(cls) -> Type[InferenceConfig]:
        return Qwen2InferenceConfig
