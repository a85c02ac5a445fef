"""Who gets SBUF and PSUM, when: the memory that a schedule grants and takes back.

Tiles are served in order of their first use in the program, as soon as enough has been released;
each block of a tensor with block axes is a tile of its own. SBUF is granted by bytes. A PSUM tile
never crosses a bank, but several small tiles share one: two tiles of 128 fp32 columns take half of
a bank together, not two.
"""

from collections.abc import Sequence

from ..device.spec import CORE
from ..program.placement import grounds
from ..program.program import Program
from ..program.storage import Storage


class Pool:
    """SBUF: bytes per partition, wherever they lie.

    Attributes:
        queue: tiles that wait, by number, first use first.
        next: position in the queue.
        short: bytes by which grants had to exceed the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.free, self.short = capacity, 0
        self.queue: list[int] = []
        self.next = 0

    def take(self, tile: int, size: int) -> bool:
        """Grant a tile its bytes, or say that there is no room."""
        if size > self.free:
            return False
        self.free -= size
        return True

    def give(self, tile: int, size: int) -> None:
        """Take a tile's bytes back."""
        self.free += size

    def force(self, size: int) -> None:
        """Make room that does not exist, and remember how much was lacking."""
        self.short += size - self.free
        self.free = size


class Banks(Pool):
    """PSUM: a tile goes into the fullest bank that still has room for it, or takes whole banks."""

    def __init__(self) -> None:
        super().__init__(CORE.psum_banks * CORE.psum_bank_bytes)
        self.left = [CORE.psum_bank_bytes] * CORE.psum_banks
        self.bank: dict[int, int] = {}  # of each tile
        self.banks: dict[int, list[int]] = {}  # of each tile that is larger than one

    def take(self, tile: int, size: int) -> bool:
        left = self.left
        if size > CORE.psum_bank_bytes:
            return self._take_whole(tile, -(-size // CORE.psum_bank_bytes))
        bank = -1
        for k, room in enumerate(left):
            if room >= size and (bank < 0 or room < left[bank]):
                bank = k
        if bank < 0:
            return False
        left[bank] -= size
        self.bank[tile] = bank
        return True

    def _take_whole(self, tile: int, count: int) -> bool:
        free = [k for k, room in enumerate(self.left) if room == CORE.psum_bank_bytes]
        if len(free) < count:
            return False
        self.banks[tile] = free[:count]
        for k in free[:count]:
            self.left[k] = 0
        return True

    def give(self, tile: int, size: int) -> None:
        for k in self.banks.pop(tile, ()):
            self.left[k] = CORE.psum_bank_bytes
        if tile in self.bank:
            self.left[self.bank.pop(tile)] += size

    def force(self, size: int) -> None:
        self.short += size
        self.left += [CORE.psum_bank_bytes] * -(-size // CORE.psum_bank_bytes)


class Memory:
    """Tiles of both pools, who accesses them and who waits for them.

    Attributes:
        size: bytes per partition that each tile needs.
        pool: where each tile lies.
        left: accesses that have not been scheduled yet.
        released: when the last scheduled access is known to be over, and ``releaser``, whose.
        waiters: instructions that cannot start before the grant.
        of: tiles that each instruction accesses.
    """

    def __init__(self, program: Program, pending: list[int]) -> None:
        """Count a grant to wait for in ``pending`` of every instruction that writes a tile."""
        self.sbuf, self.psum = Pool(CORE.sbuf_usable_bytes), Banks()
        self.size: list[int] = []
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
        # tiles of each tensor by block; none of those outside and of those that the kernel placed,
        # for whom waits are dependences through addresses
        known: dict[int, dict[int, int]] = {
            storage.id: {}
            for storage in grounds(program.storages)
            if storage.on_chip and storage.address is None
        }
        for at, instruction in enumerate(program.instructions):
            # Everybody who writes waits for the grant; a reader waits for a writer anyway.
            mine: dict[int, bool] = {}  # the tiles that it accesses, and whether it writes them
            for written, view in instruction.accesses():
                tiles = known.get(view.storage.memory.id)
                if tiles is None:
                    continue
                for block in view.blocks():
                    k = tiles.get(block)
                    if k is None:
                        k = tiles[block] = len(self.size)
                        self._add(view.storage)
                        mine[k] = True
                    elif written or k not in mine:
                        mine[k] = written
            for k, waits in mine.items():
                self.left[k] += 1
                if waits:
                    self.waiters[k].append(at)
            self.of.append(list(mine))

    def _add(self, storage: Storage) -> None:
        self.size.append(storage.tile_bytes)
        self.pool.append(self.sbuf if storage.buffer == "sbuf" else self.psum)
        self.left.append(0)
        self.released.append(0.0)
        self.releaser.append(-1)
        self.waiters.append([])

    def grant(self, pool: Pool) -> int:
        """Serve the next tile of the queue; its number, or -1 where there is no room."""
        if pool.next == len(pool.queue):
            return -1
        k = pool.queue[pool.next]
        if not pool.take(k, self.size[k]):
            return -1
        pool.next += 1
        return k

    def release(self, k: int) -> Pool:
        """Take back what a tile held; the pool to serve from."""
        pool = self.pool[k]
        pool.give(k, self.size[k])
        return pool

    def force(self) -> Pool:
        """The kernel holds more than the memory has: make room for the next tile that waits."""
        for pool in (self.sbuf, self.psum):
            if pool.next < len(pool.queue):
                pool.force(self.size[pool.queue[pool.next]])
                return pool
        raise AssertionError("instructions wait for each other in a circle")
