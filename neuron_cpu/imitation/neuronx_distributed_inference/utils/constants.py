"""Names that NxDI's command line and reports use."""

from __future__ import annotations

from ..models.llama.modeling_llama import NeuronLlamaForCausalLM
from ..models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    MEDUSA_MODEL_TAG,
    SPECULATION_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
)

MODEL_TYPES = {"llama": {"causal-lm": NeuronLlamaForCausalLM}}
TEST_PROMPT = "I believe the meaning of life is"

# Keys of a benchmark report.
END_TO_END_MODEL = "e2e_model"
CONTEXT_ENCODING_MODEL = CONTEXT_ENCODING_MODEL_TAG
TOKEN_GENERATION_MODEL = TOKEN_GENERATION_MODEL_TAG
SPECULATION_MODEL = SPECULATION_MODEL_TAG
MEDUSA_MODEL = MEDUSA_MODEL_TAG
BENCHMARK_REPORT_FILENAME = "benchmark_report.json"
