"""``neuronxcc.nki.isa.constants``: public kernels import the DMA enumerations from here."""

from neuron_cpu.core.instructions.arguments import dge_mode, oob_mode, reduce_cmd

__all__ = ["dge_mode", "oob_mode", "reduce_cmd"]
