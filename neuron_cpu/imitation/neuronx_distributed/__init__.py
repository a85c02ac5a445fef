"""Stand-in for the part of NeuronX Distributed that tensor-parallel inference uses.

Ranks are threads of one process. Names are those of the NxD of SDK 2.21 (0.10).
"""

from neuron_cpu.closed import name_modules

_PARALLEL = f"{__name__}.parallel_layers"
_EXPERTS, _QUANTISED = f"{__name__}.experts", f"{__name__}.quantised"
_QUANTISATION = {
    "dequantize": "direct_cast_dequantize",
    "quantization_config": "QuantizationType QuantizedDtype",
    "quantization_layers": "QuantizedColumnParallel QuantizedRowParallel",
    "quantize": "direct_cast_quantize",
}
name_modules(
    __name__,
    {
        **{
            f"quantization.{module}": dict.fromkeys(names.split(), _QUANTISED)
            for module, names in _QUANTISATION.items()
        },
        "modules.moe.expert_mlps": {"ExpertMLPs": _EXPERTS, "Experts": _EXPERTS},
        "modules.moe.model": {"MoE": _EXPERTS},
        "modules.moe.moe_parallel_layers": {
            "ExpertFusedColumnParallelLinear": _EXPERTS,
            "ExpertFusedRowParallelLinear": _EXPERTS,
        },
        "modules.moe.routing": {"RouterTopK": _EXPERTS},
        "operators.argmax": {"argmax": f"{__name__}.largest"},
        "operators.topk": {"topk": f"{__name__}.largest"},
        "parallel_layers.pad": {"get_number_of_extra_heads": f"{_PARALLEL}.utils"},
        "parallel_layers.random": {"model_parallel_xla_manual_seed": f"{_PARALLEL}.utils"},
    },
)

from . import parallel_layers, utils  # noqa: E402 - one of them needs the names

__all__ = ["parallel_layers", "utils"]
