"""Addresses of tiles that a kernel places itself, tiles that share memory, memory of two types."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device.dtypes import UINT8, UINT16, UINT32, DType, Shape
from ..device.errors import refuse
from . import trace
from .program import Program
from .storage import Storage
from .view import View


class Tile:
    """Where one tile of a tensor lies.

    Attributes:
        block: its number in row-major order of the block axes.
        partition, partitions: first partition and how many.
        start, stop: bytes per partition, counted through all banks in PSUM.
        core: whose memory it is, where two run the kernel.
    """

    __slots__ = ("block", "core", "partition", "partitions", "start", "stop", "storage")

    def __init__(
        self, storage: Storage, block: int, partition: int, start: int, core: int = 0
    ) -> None:
        self.storage, self.block = storage, block
        self.partition, self.partitions = partition, storage.shape[storage.paxis]
        self.start, self.core = start, core
        self.stop = start + storage.free_size * storage.dtype.itemsize

    def overlaps(self, other: Tile) -> bool:
        """True when both occupy some byte of some partition of the same memory."""
        return (
            self.storage.buffer == other.storage.buffer
            and self.core == other.core
            and self.start < other.stop
            and other.start < self.stop
            and self.partition < other.partition + other.partitions
            and other.partition < self.partition + self.partitions
        )

    def reach(self, view: View) -> tuple[range, range]:
        """Partitions, and bytes of each, of the bounding box of a view of this tile."""
        inside = view.offset % (self.partitions * self.storage.free_size)
        row, column = divmod(inside, self.storage.free_size)
        last = column + sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:]))
        item = self.storage.dtype.itemsize
        first = self.partition + row
        return (
            range(first, first + view.shape[0]),
            range(self.start + column * item, self.start + (last + 1) * item),
        )

    def hit_by(self, writer: Tile, view: View) -> tuple[Any, ...] | None:
        """Index [block, partitions, free elements] of elements that a write through ``view``
        destroys.

        ``view`` belongs to the tensor whose tile is ``writer``; its bounding box counts.
        """
        if view.offset // (writer.partitions * writer.storage.free_size) != writer.block:
            return None
        # What of the view's box lies in this tile, in partitions and bytes from the memory's start.
        rows, places = writer.reach(view)
        first_row = max(rows.start, self.partition)
        last_row = min(rows.stop, self.partition + self.partitions)
        start, stop = max(places.start, self.start), min(places.stop, self.stop)
        if first_row >= last_row or start >= stop:
            return None
        # Types may differ: an element of this tile is destroyed where one of its bytes is.
        own = self.storage.dtype.itemsize
        return (
            self.block,
            slice(first_row - self.partition, last_row - self.partition),
            slice((start - self.start) // own, -(-(stop - self.start) // own)),
        )


def overlapping(program: Program) -> dict[int, list[tuple[Tile, Tile]]]:
    """Pairs of tiles that share memory while both are in use, by the id of the first one's storage.

    A kernel may place a thousand tiles one after the other at one address: these are no pairs.
    """
    memories = {s.memory.id: s.memory for s in program.storages if s.memory.address}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, instruction in enumerate(program.instructions):
        for view in (*instruction.dst, *instruction.src):
            for one in (view, view.by_data[0]) if view.by_data is not None else (view,):
                at = one.storage.memory.id
                first.setdefault(at, k)
                last[at] = k
    found: dict[int, list[tuple[Tile, Tile]]] = {}
    alive: list[Tile] = []
    for at in sorted(memories.keys() & first.keys(), key=first.__getitem__):
        alive = [tile for tile in alive if last[tile.storage.id] >= first[at]]
        for tile in memories[at].address:
            for other in alive:
                if tile.overlaps(other):
                    found.setdefault(at, []).append((tile, other))
                    found.setdefault(other.storage.id, []).append((other, tile))
            alive.append(tile)
    return found


UNITS = {1: UINT8, 2: UINT16, 4: UINT32}


# --- one memory that a kernel reads as types of several sizes -------------------------------------
# Each type has a storage of its own, in whose elements views count. Comparisons of accesses use
# ``View.grounded``: the bytes of all types in common elements.
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


def scaled(storage: Storage, dt: DType) -> Shape:
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
