"""Enumerations of ``nki.isa`` (aws-neuron-sdk v2.32.0, nki/api/nki/isa/__init__.py)."""

from enum import Enum, IntEnum
from typing import Any

from ..device.errors import refuse
from ..device.spec import Engine, in_force
from ..device.target import chosen
from ..program import trace


class engine(Enum):
    """Engines of a core; ``unknown`` leaves the choice to the compiler."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


tensor_engine, vector_engine = engine.tensor, engine.vector
scalar_engine, gpsimd_engine = engine.scalar, engine.gpsimd
unknown_engine = engine.unknown

_ENGINES: dict[engine, Engine | None] = {
    engine.unknown: None,
    engine.tensor: Engine.TENSOR,
    engine.scalar: Engine.SCALAR,
    engine.gpsimd: Engine.GPSIMD,
    engine.vector: Engine.VECTOR,
    engine.dma: Engine.DMA,
}


class reduce_cmd(Enum):
    """What an instruction does with its engine's accumulators."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who makes the descriptors of a DMA: GpSimdE, a block of hardware, or the host in advance."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with run-time indices out of bounds."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Faster modes of TensorE."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):
    """Generations, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Which DMA an exchange between cores uses."""

    dma = 1
    gpsimd_dma = 2


def get_nc_version() -> nc_version:
    """The generation that the kernel is built for."""
    core = in_force() if trace.active() is not None else chosen()
    return nc_version(core.number)


def get_nc_sub_version() -> int:
    """Revision of the silicon: 0, the documented default."""
    return 0


def choose(given: Any, what: str, allowed: tuple[Engine, ...]) -> Engine | None:
    """The engine of an ``engine=`` argument, None where it leaves the choice open."""
    if given is engine.unknown:
        return None
    if not isinstance(given, engine):
        raise refuse(
            "sim_engine",
            f"{what} with engine={type(given).__name__}, expected a member of nisa.engine",
        )
    found = _ENGINES.get(given)
    if found not in allowed:
        names = " or ".join(f"nisa.engine.{e.value[:-1].lower()}" for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {given}, expected {names}; drop engine=")
    return found
