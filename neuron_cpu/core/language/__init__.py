"""``neuronxcc.nki`` as its users see it; importing it gives tensors their operators."""

from . import compute, copies, products, transfers
from .arithmetic import attach

__all__ = ["compute", "copies", "products", "transfers"]  # they enter the forms of instructions

attach()
