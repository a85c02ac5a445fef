"""The kernel language of SDK 2.29 and later (``import nki``), a front end beside ``language``.

Its functions name their destinations, so they record their arguments and nothing moves afterwards.
Loops are Python's own; a Program of this language is a flat list in program order. Sources:
aws-neuron-sdk v2.32.0, nki/api/nki, nki/get-started, nki/deep-dives; a comment names the source of
any other rule.
"""

from . import collectives, compute, copies, cores, products, selection, transfers

__all__ = [  # they enter the forms of instructions
    "collectives", "compute", "copies", "cores", "products", "selection", "transfers",
]  # fmt: skip
