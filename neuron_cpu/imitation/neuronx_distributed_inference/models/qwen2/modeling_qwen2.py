"""The baseline Qwen2: a Llama with biases on queries, keys and values.

The name is that of NxDI's module for this type of model, in the versions that have one.
"""

from ..llama.modeling_llama import LlamaInferenceConfig as Qwen2InferenceConfig  # noqa: F401
from ..llama.modeling_llama import NeuronLlamaForCausalLM as NeuronQwen2ForCausalLM  # noqa: F401
