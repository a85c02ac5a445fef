"""Stand-in for the part of NeuronX Distributed that tensor-parallel inference uses.

Ranks are threads of one process, or processes of torchrun. Names are those of the NxD of SDK 2.21
(0.10).
"""

from neuron_cpu.imitation import name_modules

_PARALLEL = f"{__name__}.parallel_layers"
_EXPERTS = f"{__name__}.experts"
name_modules(
    __name__,
    {
        "modules.moe.expert_mlps": {"ExpertMLPs": _EXPERTS, "Experts": _EXPERTS},
        "modules.moe.model": {"MoE": _EXPERTS},
        "modules.moe.moe_parallel_layers": {
            "ExpertFusedColumnParallelLinear": _EXPERTS,
            "ExpertFusedRowParallelLinear": _EXPERTS,
        },
        "modules.moe.routing": {"RouterTopK": _EXPERTS},
        "parallel_layers.pad": {"get_number_of_extra_heads": f"{_PARALLEL}.utils"},
        "parallel_layers.random": {"model_parallel_xla_manual_seed": f"{_PARALLEL}.utils"},
        "quantization.dequantize": {"direct_cast_dequantize": f"{__name__}.quantization.quantize"},
    },
)

from . import parallel_layers, utils  # noqa: E402 - one of them needs the names

__all__ = ["parallel_layers", "utils"]
