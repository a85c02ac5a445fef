"""``nki.isa``: one function per instruction, destinations first.

Source of names: aws-neuron-sdk v2.32.0, nki/api/nki/isa/__init__.py.
"""

from neuron_cpu.core.current.operands import (
    dge_mode, dma_engine, engine, gpsimd_engine, matmul_perf_mode, nc_version, oob_mode,
    reduce_cmd, scalar_engine, tensor_engine, unknown_engine, vector_engine,
)  # fmt: skip
from neuron_cpu.core.current.operands import NkiInstruction
from neuron_cpu.core.current.control import VirtualRegister
from neuron_cpu.core.current.releases import exported as _exported
from neuron_cpu.core.device import unknown as _unknown
from neuron_cpu.core.device.errors import NkiError as NkiValidationError

globals().update(_exported("nki.isa"))

__all__ = [name for name in globals() if not name.startswith("_")]

__getattr__ = _unknown.of_module("nisa", globals(), current=True)
