"""Addresses of tiles that a kernel places itself, and tiles that share memory."""

from __future__ import annotations

import itertools
from typing import Any

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
    """Pairs of tiles that share memory, by the id of the first one's storage."""
    # All pairs: kernels place tens of tiles, and few share memory.
    memories = {s.memory.id: s.memory for s in program.storages}
    placed = [t for s in memories.values() for t in s.address or ()]
    found: dict[int, list[tuple[Tile, Tile]]] = {}
    for a, b in itertools.permutations(placed, 2):
        if a.overlaps(b):
            found.setdefault(a.storage.id, []).append((a, b))
    return found
