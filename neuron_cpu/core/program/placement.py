"""Addresses of tiles that a kernel places itself, and what shares memory with what."""

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
    """

    __slots__ = ("block", "partition", "partitions", "start", "stop", "storage")

    def __init__(self, storage: Storage, block: int, partition: int, start: int) -> None:
        self.storage, self.block = storage, block
        self.partition, self.partitions = partition, storage.shape[storage.paxis]
        self.start = start
        self.stop = start + storage.free_size * storage.dtype.itemsize

    def overlaps(self, other: Tile) -> bool:
        """True when both occupy some byte of some partition of the same memory."""
        return (
            self.storage.buffer == other.storage.buffer
            and self.start < other.stop
            and other.start < self.stop
            and self.partition < other.partition + other.partitions
            and other.partition < self.partition + self.partitions
        )

    def hit_by(self, writer: Tile, view: View) -> tuple[Any, ...] | None:
        """Index [block, partitions, free elements] of what a write through ``view`` destroys here.

        ``view`` lies in the tile ``writer``; its bounding box counts.
        """
        tile = writer.partitions * writer.storage.free_size
        if view.offset // tile != writer.block:
            return None
        # First and last byte of a partition that the view touches, at the writer's address ...
        row, column = divmod(view.offset % tile, writer.storage.free_size)
        last = column + sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:]))
        item = writer.storage.dtype.itemsize
        # ... and what of it lies in this tile, in partitions and bytes from the memory's start.
        first_row = max(writer.partition + row, self.partition)
        last_row = min(writer.partition + row + view.shape[0], self.partition + self.partitions)
        start = max(writer.start + column * item, self.start)
        stop = min(writer.start + (last + 1) * item, self.stop)
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
    placed = [t for s in program.storages for t in s.address or ()]
    found: dict[int, list[tuple[Tile, Tile]]] = {}
    for a, b in itertools.permutations(placed, 2):
        if a.overlaps(b):
            found.setdefault(a.storage.id, []).append((a, b))
    return found
