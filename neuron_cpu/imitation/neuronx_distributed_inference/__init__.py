"""Stand-in for the part of NeuronX Distributed Inference that Llama models and drivers use.

Interfaces are those of NxDI 0.1.0, or of 0.6 where `NEURON_CPU_NXDI` says so (contract.py). A model
that is written for them runs here and on a device unchanged.
"""

from neuron_cpu.closed import name_modules

_SMALL = f"{__name__}.small"
_LLAMA = f"{__name__}.models.llama.modeling_llama"
name_modules(
    __name__,
    {
        "models.layer_boundary_marker": {
            "ModuleMarkerStartWrapper": _SMALL,
            "ModuleMarkerEndWrapper": _SMALL,
        },
        # a Llama with a sliding window, and one with biases: the configuration says which
        "models.mistral.modeling_mistral": {
            "MistralInferenceConfig": f"{_LLAMA}:LlamaInferenceConfig",
            "NeuronMistralForCausalLM": f"{_LLAMA}:NeuronLlamaForCausalLM",
        },
        "models.qwen2.modeling_qwen2": {
            "Qwen2InferenceConfig": f"{_LLAMA}:LlamaInferenceConfig",
            "NeuronQwen2ForCausalLM": f"{_LLAMA}:NeuronLlamaForCausalLM",
        },
        "modules.eagle.utils": {"tiled_all_gather_matmul": _SMALL},
        "modules.flashdecode.utils": {"calculate_num_cores_per_group": _SMALL},
        "modules.lora_serving": {"LoraServingConfig": _SMALL},
        "modules.lora_serving.lora_module": {"is_lora_module": _SMALL},
        "utils.argparse_utils": {"StringOrIntegers": _SMALL, "AUTO": _SMALL},
        "utils.constants": {"BENCHMARK_REPORT_FILENAME": _SMALL},
        "utils.distributed": {"get_tp_group": _SMALL},
        "utils.random": {"set_random_seed": _SMALL},
    },
)
