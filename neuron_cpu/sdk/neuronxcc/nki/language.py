"""``neuronxcc.nki.language``: the names of the simulator's language module."""

from neuron_cpu.core.language import *  # noqa: F403
