"""Enumerations of ``nki.isa`` (aws-neuron-sdk v2.32.0, nki/api/nki/isa/__init__.py)."""

from enum import Enum
from typing import Any

from ..device.errors import refuse
from ..device.spec import Engine, in_force
from ..device.target import chosen
from ..device.unknown import Listed
from ..instructions.constants import dge_mode, nc_version, oob_mode  # noqa: F401 - as they are
from ..program import trace
from .releases import isa


class engine(Enum, metaclass=Listed):
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


class reduce_cmd(Enum, metaclass=Listed):
    """An instruction's use of its engine's accumulators."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class matmul_perf_mode(Enum, metaclass=Listed):
    """Faster modes of TensorE."""

    none = "none"
    double_row = "double_row"


class dma_engine(Enum, metaclass=Listed):
    """Which DMA an exchange between cores uses."""

    dma = 1
    gpsimd_dma = 2


@isa(None)
def get_nc_version() -> nc_version:
    """The generation that the kernel is built for."""
    core = in_force() if trace.active() is not None else chosen()
    return nc_version(core.number)


@isa(None, came="2.31")
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
    found = Engine.__members__.get(given.name.upper())
    if found not in allowed:
        names = " or ".join(f"nisa.engine.{e.value[:-1].lower()}" for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {given}, expected {names}; drop engine=")
    return found
