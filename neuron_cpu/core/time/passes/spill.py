"""Tiles that SBUF or PSUM cannot hold go out and come back.

Where more tiles live than a memory has room for, the compiler keeps a kernel running: it writes a
tile to HBM after one use and reads it again before the next; tiles that hold nothing but what one
load brought are loaded again. Of PSUM a tile is copied to SBUF, and read there. Which tile goes is
chosen as the optimal page replacement does, the one whose next use is farthest (Belady 1966): a
compiler that sees loops instead of their iterations can only do worse.
"""

from collections import Counter, defaultdict
from heapq import heappop, heappush
from typing import NamedTuple

from ...device.spec import CORE
from ...instructions.copies import DMA_COPY, TENSOR_COPY, copy_attrs
from ...program.attributes import RAW
from ...program.program import Instruction, Program
from ...program.storage import SPILL, Source, Storage
from ...program.view import View
from .work import Work, automatic, with_views

Key = tuple[int, int]  # a tile: its tensor and its block, WHOLE where blocks are accessed together
WHOLE = -1


def spill(
    program: Program,
    sbuf_bytes: int = CORE.sbuf_usable_bytes,
    psum_bytes: int = CORE.psum_banks * CORE.psum_bank_bytes,
) -> Program:
    """The program with what goes out and comes back, where tiles exceed a memory.

    Args:
        sbuf_bytes, psum_bytes: bytes per partition that each memory has for tiles.
    """
    work = Work(program)
    for buffer, room in (("psum", psum_bytes), ("sbuf", sbuf_bytes)):
        memory = _Memory(work, buffer)
        absences = memory.absences(room)
        if absences:
            work.instructions = _Rewriting(memory, absences).run()
    return work.finish()


class _Access(NamedTuple):
    """One instruction's use of a tile."""

    at: int
    writes: bool
    begins: bool  # what the tile held before is not needed


class _Absence(NamedTuple):
    """A tile is away between two uses, because the instruction at ``line`` needs room."""

    key: Key
    last: _Access
    next: _Access
    line: Source | None


class _Memory:
    """One memory: its tiles and who uses them.

    Attributes:
        tiles: tensor and bytes per partition of each tile.
        accesses: of each tile, in program order.
        used: tiles that each instruction uses.
    """

    def __init__(self, work: Work, buffer: str) -> None:
        self.work, self.buffer = work, buffer
        self.together = {
            view.storage.id
            for instruction in work.instructions
            for _, view in instruction.accesses()
            if view.storage.buffer == buffer and len(view.blocks()) > 1
        }
        self.tiles: dict[Key, tuple[Storage, int]] = {}
        self.accesses: dict[Key, list[_Access]] = defaultdict(list)
        self.used: list[list[Key]] = []
        for at, instruction in enumerate(work.instructions):
            mine = self._accesses_of(at, instruction)
            for key, access in mine.items():
                self.accesses[key].append(access)
            self.used.append(list(mine))

    def key(self, view: View) -> Key | None:
        """The tile that a view lies in; None in other memories and where the kernel placed it."""
        storage = view.storage
        if storage.buffer != self.buffer or not automatic(storage):
            return None
        return storage.id, WHOLE if storage.id in self.together else view.blocks().start

    def _accesses_of(self, at: int, instruction: Instruction) -> dict[Key, _Access]:
        mine: dict[Key, _Access] = {}
        for writes, view in instruction.accesses():
            key = self.key(view)
            if key is None:
                continue
            if key not in self.tiles:
                self.tiles[key] = view.storage, self._bytes(view.storage, key)
            begins = writes and _replaces(instruction, view, key)
            known = mine.get(key)
            if known is not None:
                writes, begins = known.writes or writes, known.begins and begins
            mine[key] = _Access(at, writes, begins)
        return mine

    def _bytes(self, storage: Storage, key: Key) -> int:
        size = storage.tile_bytes * (storage.tiles if key[1] == WHOLE else 1)
        if self.buffer == "psum":
            # tiles share a bank; those whose sizes are powers of two leave no room unused
            return 1 << (size - 1).bit_length()
        return size

    def absences(self, room: int) -> list[_Absence]:
        """Which tiles are away when, by the optimal replacement, where the memory has ``room``."""
        found = []
        free = room
        held: set[Key] = set()
        seen: Counter[Key] = Counter()
        farthest: list[tuple[int, Key]] = []  # (-next use, tile): the last one first
        for at, keys in enumerate(self.used):
            needed = sum(self.tiles[key][1] for key in keys if key not in held)
            while free < needed and not held.issubset(keys):
                victim = _first_of_the_farthest(farthest, held)
                last, following = self.accesses[victim][seen[victim] - 1 : seen[victim] + 1]
                found.append(_Absence(victim, last, following, self.work.instructions[at].source))
                held.remove(victim)
                free += self.tiles[victim][1]
            free -= needed
            held.update(keys)
            for key in keys:
                seen[key] += 1
                if seen[key] == len(self.accesses[key]):
                    held.remove(key)
                    free += self.tiles[key][1]
                else:
                    heappush(farthest, (-self.accesses[key][seen[key]].at, key))
        return found


def _first_of_the_farthest(farthest: list[tuple[int, Key]], held: set[Key]) -> Key:
    """Take out the tile whose next use comes last; of several, the one that ``held`` gives first.

    What was used or taken out meanwhile has left the front: its use is over, or comes no later.
    """
    use, victim = heappop(farthest)
    tied = {victim}
    while farthest and farthest[0][0] == use:
        tied.add(heappop(farthest)[1])
    if len(tied) > 1:
        victim = next(key for key in held if key in tied)
        for key in tied - {victim}:
            heappush(farthest, (use, key))
    return victim


def _replaces(instruction: Instruction, view: View, key: Key) -> bool:
    """Whether nothing that the tile held before remains."""
    size = view.storage.size // (1 if key[1] == WHOLE else view.storage.tiles)
    attrs = instruction.attrs
    return view.size == size and attrs.mask is None and not attrs.accumulate


class _Rewriting:
    """The program with tiles that go out after a use and come back before the next."""

    def __init__(self, memory: _Memory, absences: list[_Absence]) -> None:
        self.memory, self.work = memory, memory.work
        self.loads = _only_loads(memory)
        self.leaving: dict[int, list[_Absence]] = defaultdict(list)
        self.returning: dict[int, list[_Absence]] = defaultdict(list)
        for absence in absences:
            if not absence.next.begins:
                self.returning[absence.next.at].append(absence)
                if absence.key not in self.loads:
                    self.leaving[absence.last.at].append(absence)
        self.current: dict[Key, Storage] = {}  # tiles that are not where the kernel put them
        self.saved: dict[Key, Storage] = {}  # where the latest value lies outside
        self.result: list[Instruction] = []

    def run(self) -> list[Instruction]:
        for at, instruction in enumerate(self.work.instructions):
            for absence in self.returning.get(at, ()):
                self._reload(absence, instruction)
            self.result.append(self._moved(instruction))
            for view in instruction.dst:
                key = self.memory.key(view)
                if key is not None:
                    self.saved.pop(key, None)  # what lies outside is no longer the value
            for absence in self.leaving.get(at, ()):
                if absence.key not in self.saved:
                    self._save(absence, instruction)
        return self.result

    def _save(self, absence: _Absence, near: Instruction) -> None:
        inside = self._tile(absence.key)
        if self.memory.buffer == "psum":
            home = self._like(absence.key, "sbuf")
            outside = View.blocks_last(home)
        else:
            home = self._storage(inside.shape, inside.storage, "hbm")
            outside = View.whole(home)
        home.role = SPILL
        self.saved[absence.key] = home
        self.result.append(_copied(outside, inside, near, absence))

    def _reload(self, absence: _Absence, near: Instruction) -> None:
        key = absence.key
        home = self.saved.get(key)
        later = self.memory.accesses[key]
        if (
            home is not None
            and home.on_chip
            and not any(access.writes for access in later if access.at >= absence.next.at)
        ):
            self.current[key] = home  # whoever reads PSUM can read SBUF
            return
        made = self.current[key] = self._like(key, self.memory.buffer)
        load = self.loads.get(key)
        if load is not None:
            made.role = SPILL
            to = self._moved(load).dst
            again = Instruction(load.op, to, load.src, load.attrs, near.frame, absence.line)
            self.result.append(again)
            return
        assert home is not None, "a tile comes back that was never saved"
        inside = View.blocks_last(made)
        outside = View.blocks_last(home) if home.on_chip else View.whole(home)
        self.result.append(_copied(inside, outside, near, absence))

    # --- where tiles lie --------------------------------------------------------------------------
    def _tile(self, key: Key) -> View:
        """View all of a tile."""
        storage = self.current.get(key)
        if storage is not None:
            return View.blocks_last(storage)
        storage = self.memory.tiles[key][0]
        return View.blocks_last(storage) if key[1] == WHOLE else View.block(storage, key[1])

    def _like(self, key: Key, buffer: str) -> Storage:
        """Another place for a tile."""
        tile = self.memory.tiles[key][0]
        shape = tile.shape if key[1] == WHOLE else tile.shape[tile.paxis :]
        made = self._storage(shape, tile, buffer)
        made.lay_out(tile.paxis if key[1] == WHOLE else 0)
        return made

    def _storage(self, shape: tuple[int, ...], of: Storage, buffer: str) -> Storage:
        made = self.work.tile(shape, of.dtype, buffer, of.frame)
        made.name, made.source = of.name, of.source
        return made

    def _moved(self, instruction: Instruction) -> Instruction:
        """The instruction with tiles where they lie now."""
        if not self.current:
            return instruction
        src = tuple([self._view(v) for v in instruction.src])
        return with_views(instruction, tuple([self._view(v) for v in instruction.dst]), src)

    def _view(self, view: View) -> View:
        indirect = view.by_data
        if indirect is not None:
            indirect = (self._view(indirect[0]), *indirect[1:])
        key = self.memory.key(view)
        storage = self.current.get(key) if key is not None else None
        if key is None or storage is None:
            storage, start = view.storage, 0
        else:
            start = 0 if key[1] == WHOLE else key[1] * storage.size
        return View(
            storage,
            view.offset - start,
            view.shape,
            view.strides,
            view.dt,
            view.paxis,
            view.oob,
            indirect,
        )


def _only_loads(memory: _Memory) -> dict[Key, Instruction]:
    """Tiles that are filled once, by one load from HBM that no instruction writes."""
    written: set[int] = set()
    writes: dict[Key, list[Instruction]] = defaultdict(list)
    for instruction in memory.work.instructions:
        for view in instruction.dst:
            written.add(view.storage.id)
            key = memory.key(view)
            if key is not None:
                writes[key].append(instruction)
    found = {}
    for key, (load, *others) in writes.items():
        source = load.src[0] if load.op is DMA_COPY else None
        if source is None or source.storage.on_chip or source.by_data is not None or others:
            continue
        if memory.accesses[key][0].begins and source.storage.id not in written:
            found[key] = load
    return found


def spilling(instruction: Instruction) -> str | None:
    """``spill_save`` or ``spill_reload`` for an instruction that was added here."""
    if not instruction.op.is_copy:
        return None
    to, of = instruction.dst[0].storage, instruction.src[0].storage
    if to.role == SPILL:
        # of what comes back, only what is loaded again lies in a tile that nothing else writes
        return "spill_reload" if to.on_chip and instruction.op is DMA_COPY else "spill_save"
    if of.role == SPILL and (not of.on_chip or to.buffer == "psum"):
        return "spill_reload"
    return None


def _copied(dst: View, src: View, near: Instruction, absence: _Absence) -> Instruction:
    if dst.storage.on_chip and src.storage.on_chip:
        attrs = copy_attrs(dst.dt, src.dt)
        return Instruction(TENSOR_COPY, (dst,), (src,), attrs, near.frame, absence.line)
    return Instruction(DMA_COPY, (dst,), (src,), RAW, near.frame, absence.line)
