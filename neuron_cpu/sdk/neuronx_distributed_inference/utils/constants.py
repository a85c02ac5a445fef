"""Model types that NxDI's command line knows, by name."""

from __future__ import annotations

from ..models.llama.modeling_llama import NeuronLlamaForCausalLM

MODEL_TYPES = {"llama": {"causal-lm": NeuronLlamaForCausalLM}}
TEST_PROMPT = "I believe the meaning of life is"
