"""The baseline Mistral: a Llama with a sliding window.

Versions of NxDI that know this type of model have the module under the same name.
"""

from ..llama.modeling_llama import LlamaInferenceConfig as MistralInferenceConfig  # noqa: F401
from ..llama.modeling_llama import NeuronLlamaForCausalLM as NeuronMistralForCausalLM  # noqa: F401
