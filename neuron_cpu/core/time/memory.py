"""Who gets SBUF and PSUM, when: the memory that a schedule grants and takes back.

Storages are served in order of their first use in the program, as soon as enough has been released.
SBUF is granted by bytes. A PSUM tile never crosses a bank, but several small tiles share one: two
tiles of 128 fp32 columns take half of a bank together, not two.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..device.spec import GEN2
from ..program.program import Program
from ..program.storage import Storage


class Pool:
    """SBUF: bytes per partition, wherever they lie.

    Attributes:
        queue: storages that wait, by number, first use first.
        next: position in the queue.
        short: bytes by which grants had to exceed the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.free, self.short = capacity, 0
        self.queue: list[int] = []
        self.next = 0

    def take(self, storage: int, tile: int, tiles: int) -> bool:
        """Grant ``tiles`` pieces of ``tile`` bytes to a storage, or say that there is no room."""
        if tile * tiles > self.free:
            return False
        self.free -= tile * tiles
        return True

    def give(self, storage: int, tile: int, tiles: int) -> None:
        """Take a storage's bytes back."""
        self.free += tile * tiles

    def force(self, storage: int, tile: int, tiles: int) -> None:
        """Make room that does not exist, and remember how much was lacking."""
        self.short += tile * tiles - self.free
        self.free = tile * tiles


class Banks(Pool):
    """PSUM: a tile goes into the fullest bank that still has room for it."""

    def __init__(self) -> None:
        super().__init__(GEN2.psum_banks * GEN2.psum_bank_bytes)
        self.left = [GEN2.psum_bank_bytes] * GEN2.psum_banks
        self.held: dict[int, list[tuple[int, int]]] = {}  # (bank, bytes) of each storage

    def take(self, storage: int, tile: int, tiles: int) -> bool:
        left = self.left
        mine: list[tuple[int, int]] = []
        for _ in range(tiles):
            bank = -1
            for k, room in enumerate(left):
                if room >= tile and (bank < 0 or room < left[bank]):
                    bank = k
            if bank < 0:
                for k, size in mine:
                    left[k] += size
                return False
            left[bank] -= tile
            mine.append((bank, tile))
        self.held[storage] = mine
        self.free -= tile * tiles
        return True

    def give(self, storage: int, tile: int, tiles: int) -> None:
        for bank, size in self.held.pop(storage):
            self.left[bank] += size
        self.free += tile * tiles

    def force(self, storage: int, tile: int, tiles: int) -> None:
        self.short += tile * tiles
        self.left.extend([GEN2.psum_bank_bytes] * -(-tile * tiles // GEN2.psum_bank_bytes))


class Memory:
    """Storages of both pools, who accesses them and who waits for them.

    Attributes:
        tile, tiles: bytes and number of the pieces that each storage needs.
        pool: where each storage lies.
        left: accesses that have not been scheduled yet.
        released: when the last scheduled access is known to be over, and ``releaser``, whose.
        waiters: instructions that cannot start before the grant.
        of: storages that each instruction accesses.
    """

    def __init__(self, program: Program, pending: list[int]) -> None:
        """Count a grant to wait for in ``pending`` of every instruction that writes a storage."""
        self.sbuf, self.psum = Pool(GEN2.sbuf_usable_bytes), Banks()
        self.tile: list[int] = []
        self.tiles: list[int] = []
        self.pool: list[Pool] = []
        self.left: list[int] = []
        self.released: list[float] = []
        self.releaser: list[int] = []
        self.waiters: list[list[int]] = []
        self.of: list[Sequence[int]] = []
        self._collect(program)
        for k, waiters in enumerate(self.waiters):
            self.pool[k].queue.append(k)
            for at in waiters:
                pending[at] += 1

    def _collect(self, program: Program) -> None:
        known: dict[int, int] = {}
        for at, instruction in enumerate(program.instructions):
            mine: list[int] = []
            written = {v.storage.id for v in instruction.dst}
            for storage in instruction.on_chip():
                if storage.address is not None:
                    continue  # the kernel placed it: waits are dependences through addresses
                k = known.get(storage.id)
                if k is None:
                    k = known[storage.id] = len(self.tile)
                    self._add(storage)
                    self.waiters[k].append(at)
                elif storage.id in written:
                    self.waiters[k].append(at)
                self.left[k] += 1
                mine.append(k)
            self.of.append(mine)

    def _add(self, storage: Storage) -> None:
        tiles = storage.tiles if storage.buffer == "psum" else 1
        self.tile.append(storage.partition_bytes // tiles)
        self.tiles.append(tiles)
        self.pool.append(self.sbuf if storage.buffer == "sbuf" else self.psum)
        self.left.append(0)
        self.released.append(0.0)
        self.releaser.append(-1)
        self.waiters.append([])

    def grant(self, pool: Pool) -> int:
        """Serve the next storage of the queue; its number, or -1 where there is no room."""
        if pool.next == len(pool.queue):
            return -1
        k = pool.queue[pool.next]
        if not pool.take(k, self.tile[k], self.tiles[k]):
            return -1
        pool.next += 1
        return k

    def release(self, k: int) -> Pool:
        """Take back what a storage held; the pool to serve from."""
        pool = self.pool[k]
        pool.give(k, self.tile[k], self.tiles[k])
        return pool

    def force(self) -> Pool:
        """The kernel holds more than the memory has: make room for the next storage that waits."""
        for pool in (self.sbuf, self.psum):
            if pool.next < len(pool.queue):
                k = pool.queue[pool.next]
                pool.force(k, self.tile[k], self.tiles[k])
                return pool
        raise AssertionError("instructions wait for each other in a circle")
