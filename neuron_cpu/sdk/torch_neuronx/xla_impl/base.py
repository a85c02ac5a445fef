"""The place from which NxDI 0.2 to 0.5 import `xla_hlo_call`."""

from neuron_cpu.closed import Closed

from .ops import xla_hlo_call

__all__ = ["xla_call", "xla_hlo_call"]

xla_call = Closed("torch_neuronx.xla_impl.base.xla_call")
