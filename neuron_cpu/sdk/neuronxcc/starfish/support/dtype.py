"""``neuronxcc.starfish.support.dtype``: the numpy type of bf16 arrays."""

from neuron_cpu.core.language.types import bfloat16

__all__ = ["bfloat16"]
