"""``neuronxcc.nki.isa``: the names of the simulator's instruction module."""

from neuron_cpu.core.isa import *  # noqa: F403
