"""The baseline Qwen2: a Llama with biases on queries, keys and values.

Versions of NxDI that know this type of model have the module under the same name.
"""

from ..llama.modeling_llama import LlamaInferenceConfig as Qwen2InferenceConfig  # noqa: F401
from ..llama.modeling_llama import NeuronLlamaForCausalLM as NeuronQwen2ForCausalLM  # noqa: F401
