"""The baseline Mistral: a Llama with a sliding window.

The name is that of NxDI's module for this type of model, in the versions that have one.
"""

from ..llama.modeling_llama import LlamaInferenceConfig as MistralInferenceConfig  # noqa: F401
from ..llama.modeling_llama import NeuronLlamaForCausalLM as NeuronMistralForCausalLM  # noqa: F401
