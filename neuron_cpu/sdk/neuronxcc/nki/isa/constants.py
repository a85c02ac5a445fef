"""``neuronxcc.nki.isa.constants``: where public kernels import the DMA enumerations from."""

from neuron_cpu.core.instructions.constants import dge_mode, oob_mode, reduce_cmd

__all__ = ["dge_mode", "oob_mode", "reduce_cmd"]
