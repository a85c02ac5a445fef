"""Enumerations and constants of ``nki.isa``."""

from enum import Enum, IntEnum

import numpy as np

from ..device import target
from ..device.spec import CORE, Engine
from ..device.unknown import Listed
from ..program import trace
from .entry import form

unknown_engine = None
tensor_engine = Engine.TENSOR
vector_engine = Engine.VECTOR
scalar_engine = Engine.SCALAR
gpsimd_engine = Engine.GPSIMD
dma_engine = Engine.DMA


class engine:
    """``nisa.engine`` of SDK 2.22: the same choices as attributes."""

    unknown = None
    tensor = Engine.TENSOR
    vector = Engine.VECTOR
    scalar = Engine.SCALAR
    gpsimd = Engine.GPSIMD
    dma = Engine.DMA
    sync = Engine.DMA


class nc_version(IntEnum, metaclass=Listed):
    """NeuronCore generations, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class reduce_cmd(Enum, metaclass=Listed):
    """An instruction's use of ScalarE's running sums (SDK 2.22)."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3


class dge_mode(Enum, metaclass=Listed):
    """Who makes the descriptors of a DMA: GpSimdE, a block of hardware, which NeuronCore-v2 lacks,
    or the host in advance (SDK 2.23)."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum, metaclass=Listed):
    """A DMA's treatment of run-time indices out of bounds (SDK 2.23)."""

    error = 0
    skip = 1


class fp32:
    """Range of fp32 (SDK 2.23)."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


@form("neuronxcc.nki.isa", None)
def get_nc_version() -> nc_version:
    """The generation that kernels are traced for; outside of kernels the environment's."""
    core = CORE if trace.active() is not None else target.chosen(target.DEFAULT_BEFORE)
    return nc_version(core.number)
