"""``nki.isa``: where the two cores of a logical one meet (gen3 and later)."""

from __future__ import annotations

from typing import Any

from ..device.target import needs
from .enums import dma_engine, engine
from .operands import NkiInstruction


def core_barrier(
    data: Any, cores: Any = (0, 1), engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Both cores reach it before either goes on; ``data`` is the shared tensor it protects."""
    needs("core_barrier", 3)
    raise NotImplementedError("nki.isa.core_barrier")


def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Exchange of SBUF tiles between the two cores."""
    needs("sendrecv", 3)
    raise NotImplementedError("nki.isa.sendrecv")
