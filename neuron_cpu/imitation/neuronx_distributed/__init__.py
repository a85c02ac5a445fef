"""Stand-in for the part of NeuronX Distributed that tensor-parallel inference uses.

Ranks are threads of one process. Names are those of the NxD of SDK 2.21 (0.10).
"""

from neuron_cpu.closed import name_modules

name_modules(
    __name__,
    """
quantization.dequantize .quantised direct_cast_dequantize
quantization.quantization_config .quantised QuantizationType QuantizedDtype
quantization.quantization_layers .quantised QuantizedColumnParallel QuantizedRowParallel
quantization.quantize .quantised direct_cast_quantize
modules.moe.expert_mlps .experts ExpertMLPs Experts
modules.moe.model .experts MoE
modules.moe.moe_parallel_layers .experts \
    ExpertFusedColumnParallelLinear ExpertFusedRowParallelLinear
modules.moe.routing .experts RouterTopK
operators.argmax .largest argmax
operators.topk .largest topk
parallel_layers.pad .parallel_layers.utils get_number_of_extra_heads
parallel_layers.random .parallel_layers.utils model_parallel_xla_manual_seed
""",
)

from . import parallel_layers, utils  # noqa: E402 - one of them needs the names

__all__ = ["parallel_layers", "utils"]
