"""``neuronxcc.nki`` as its users see it; importing it gives tensors their operators."""

from . import compute, copies, products
from .elementwise import attach

__all__ = ["compute", "copies", "products"]  # they enter the forms of instructions

attach()
