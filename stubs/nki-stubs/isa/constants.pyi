"""``nki.isa.constants``: AWS's library imports the enumerations from here."""

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
class dma_engine(Enum):
    """Which DMA an exchange between cores uses."""
    dma = 1
    gpsimd_dma = 2
class engine(Enum):
    """Engines of a core; ``unknown`` leaves the choice to the compiler."""
    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6
class matmul_perf_mode(Enum):
    """Faster modes of TensorE."""
    none = 'none'
    double_row = 'double_row'
class nc_version(IntEnum):
    """NeuronCore generations, in order."""
    gen2 = 2
    gen3 = 3
    gen4 = 4
class oob_mode(Enum):
    """A DMA's treatment of run-time indices out of bounds (SDK 2.23)."""
    error = 0
    skip = 1
class reduce_cmd(Enum):
    """An instruction's use of its engine's accumulators."""
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4
