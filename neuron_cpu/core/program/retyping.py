"""One memory that a kernel reads as types of several sizes.

Each type has a storage of its own, in whose elements views count. Comparisons of accesses use
``View.grounded``: the bytes of all types in common elements.
"""

import numpy as np

from ..device.dtypes import UINT8, UINT16, UINT32, DType
from ..device.errors import refuse
from . import trace
from .placement import Tile
from .storage import Storage

UNITS = {1: UINT8, 2: UINT16, 4: UINT32}


def retyped(storage: Storage, dt: DType) -> Storage:
    """The storage that reads the bytes of another one as type ``dt``; one for each type."""
    tracer = trace.current("NkiTensor.view")
    aliases = tracer.program.aliases
    first = next((base for alias, base in aliases if alias is storage), storage)
    if dt.itemsize == first.dtype.itemsize:
        return first
    held = first.free_size if first.on_chip else first.size
    if held * first.dtype.itemsize % dt.itemsize:
        raise refuse(
            "sim_view_dtype",
            f"view of {first.label()} as {dt}, expected whole elements of {dt.itemsize} bytes in "
            f"{'each partition' if first.on_chip else 'the tensor'}; make the last axis longer",
        )
    for alias, base in aliases:
        if base is first and alias.dtype is dt:
            return alias
    made = tracer.storage(scaled(first, dt), dt, first.buffer, first.role, first.name)
    made.frame, made.birth, made.source = first.frame, first.birth, first.source
    made.mutable = first.mutable
    if first.data is not None:
        bits = np.ascontiguousarray(first.data).reshape(-1).view(np.uint8)
        made.data = bits.view(dt.numpy).reshape(made.shape)
    aliases.append((made, first))
    share_ground(first, [made, *(alias for alias, base in aliases if base is first)])
    if tracer.machine is not None:
        tracer.machine.alias(made, first)
    return made


def scaled(storage: Storage, dt: DType) -> tuple[int, ...]:
    """The shape with the last axis in elements of ``dt``; flattened where they do not fit."""
    old, new = storage.dtype.itemsize, dt.itemsize
    *axes, last = storage.shape
    if axes and last * old % new == 0:
        return (*axes, last * old // new)
    if storage.on_chip:
        return (axes[0], storage.free_size * old // new)
    return (storage.size * old // new,)


def share_ground(first: Storage, others: list[Storage]) -> None:
    """Give all of them one ground, in the smallest of their elements."""
    size = min(s.dtype.itemsize for s in (first, *others))
    ground = first.ground
    known = first.dtype.itemsize if ground is None else ground.dtype.itemsize
    if ground is None or size < known:
        *axes, last = first.shape
        shape = (*axes, last * first.dtype.itemsize // size)
        ground = Storage(-1 - first.id, shape, UNITS[size], first.buffer, first.role)
        ground.name, ground.frame, ground.source = first.name, first.frame, first.source
        if first.address is not None:
            ground.address = [
                Tile(ground, t.block, t.partition, t.start, t.core) for t in first.address
            ]
    for storage in (first, *others):
        storage.ground = ground
        storage.groups = first.groups
    if first.groups is not None and size < known:
        first.groups.refine(known // size)


def grounds(storages: list[Storage]) -> list[Storage]:
    """Memories of a program: one for all types of the same bytes."""
    return list({s.memory.id: s.memory for s in storages}.values())
