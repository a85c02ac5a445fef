"""``neuronxcc.nki.isa``: one function per device instruction, engines and enumerations.

Source of names: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py.
"""

from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.instructions.arguments import (
    dge_mode, dma_engine, engine, fp32, gpsimd_engine, nc_version, oob_mode, reduce_cmd,
    scalar_engine, tensor_engine, unknown_engine, vector_engine,
)  # fmt: skip
from neuron_cpu.core.language.operands import exported as _exported

globals().update(_exported())

__all__ = [name for name in globals() if not name.startswith("_")]

__getattr__ = _unknown.of_module("nisa", globals(), current=False)
