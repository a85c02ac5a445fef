"""``neuronxcc.nki`` as its users see it; importing it gives tensors their operators."""

from .arithmetic import attach

attach()
