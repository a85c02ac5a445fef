"""Stand-in for the part of NeuronX Distributed Inference that Llama models and drivers use.

Interfaces are those of NxDI 0.1.0, or of 0.6 where `NEURON_CPU_NXDI` says so (contract.py). A model
that is written for them runs here and on a device unchanged.
"""

from neuron_cpu.closed import name_modules

# a Llama with a sliding window, and one with biases: the configuration says which
name_modules(
    __name__,
    """
models.layer_boundary_marker .small ModuleMarkerStartWrapper ModuleMarkerEndWrapper
models.mistral.modeling_mistral .models.llama.modeling_llama \
    MistralInferenceConfig=LlamaInferenceConfig NeuronMistralForCausalLM=NeuronLlamaForCausalLM
models.qwen2.modeling_qwen2 .models.llama.modeling_llama \
    Qwen2InferenceConfig=LlamaInferenceConfig NeuronQwen2ForCausalLM=NeuronLlamaForCausalLM
modules.eagle.utils .small tiled_all_gather_matmul
modules.flashdecode.utils .small calculate_num_cores_per_group
modules.lora_serving .small LoraServingConfig
modules.lora_serving.lora_module .small is_lora_module
utils.argparse_utils .small StringOrIntegers AUTO
utils.constants .small BENCHMARK_REPORT_FILENAME
utils.distributed .small get_tp_group
utils.random .small set_random_seed
""",
)
