"""``neuronxcc.nki.isa.constants``: public kernels import the DMA enumerations from here."""

# Written by stubs/generate.py.
from enum import Enum, IntEnum
from typing import Any


class dge_mode(Enum):
    """Who makes the descriptors of a DMA: GpSimdE, a block of hardware, which NeuronCore-v2 lacks,
    or the host in advance (SDK 2.23)."""
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3
class oob_mode(Enum):
    """A DMA's treatment of run-time indices out of bounds (SDK 2.23)."""
    error = 0
    skip = 1
class reduce_cmd(Enum):
    """An instruction's use of ScalarE's running sums (SDK 2.22)."""
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
