"""Races between instances of a launch grid that are seen only where they run.

Two cores of a kernel of `nki` that write the same elements with nothing between them are compared:
kernels write on both what they do not divide, alike, and only other values are an error.
``check/races.py`` refuses what the recorded addresses prove. Where an index tile or a scalar offset
chooses rows, as in a paged cache, addresses are known at run time; what then meets is a warning,
since a device runs it, and the result is that of whoever comes last.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ..device.errors import refuse, warn
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Frame, Loop, Storage
from .memory import Arena, gather_index, rows_inside
from .merge import Op, Ref

NOBODY, SEVERAL = 0, -1


class InstanceRows:
    """Records who touched which element of tensors whose rows data choose, during one run.

    It records blocks: as many neighbours as every access takes whole.
    """

    def __init__(self, watched: frozenset[Storage]) -> None:
        self.watched = watched
        self.blocks = {storage: storage.size for storage in watched}
        self.marks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.open: list[tuple[Ref, torch.Tensor, torch.Tensor, Callable[[], None]]] = []

    def prepare(self, ops: Iterable[Op]) -> None:
        """Size the blocks by the accesses of the program's operations."""
        for op in ops:
            for ref in (*op.dst, *op.src):
                storage = ref.memory.storage
                if storage in self.watched:
                    self.blocks[storage] = math.gcd(self.blocks[storage], _block(op, ref))

    def start(self) -> None:
        """Forget the last run."""
        self.marks.clear()

    def note(self, op: Op, arena: Arena, program: Program) -> None:
        """Before ``op`` runs: compare its elements with those of other instances."""
        frame = grid_frame(op.instruction)
        if frame is None:
            return
        for ref, writes in [*((r, False) for r in op.src), *((r, True) for r in op.dst)]:
            if ref.memory.storage in self.watched:
                self._meet(op, ref, frame, writes, arena, program)

    def settle(self, arena: Arena) -> None:
        """After the operation: report writes that changed another instance's elements."""
        for ref, at, before, tell in self.open:
            if not torch.equal(self._values(ref, arena)[at], before):
                tell()
        self.open.clear()

    def _meet(
        self, op: Op, ref: Ref, frame: Frame, writes: bool, arena: Arena, program: Program
    ) -> None:
        storage, own = ref.memory.storage, frame.i + 1
        at = _elements(op, _in_blocks(ref, self.blocks[storage]), arena)
        key = frame.loop.id, storage.id
        if key not in self.marks:
            zeros = torch.zeros(storage.size // self.blocks[storage], dtype=torch.int8)
            self.marks[key] = zeros, zeros.clone()
        writers, readers = self.marks[key]
        found = [(writers[at], "write")]
        if writes and not op.attrs.accumulate:  # sums come out the same in either order
            found.append((readers[at], "read"))
        for marks, does in found:
            foreign = (marks != NOBODY) & (marks != own)
            if foreign.any() and not (writes and op.attrs.accumulate):
                other, told = int(marks[foreign][0]), (op.instruction, ref, frame.i, writes)
                tell = functools.partial(_tell, *told, other, does, program)
                if not writes:
                    tell()
                else:  # the same value again is no race
                    lost = at[foreign]
                    self.open.append((ref, lost, self._values(ref, arena)[lost], tell))
                break
        table = writers if writes else readers
        mine = table[at]
        table[at] = torch.where((mine == NOBODY) | (mine == own), own, SEVERAL).to(torch.int8)

    def _values(self, ref: Ref, arena: Arena) -> torch.Tensor:
        storage = ref.memory.storage
        return arena.of(ref.memory)[: storage.size].view(-1, self.blocks[storage])


def _block(op: Op, ref: Ref) -> int:
    """How many neighbours an access takes at once, from a multiple of their number on."""
    if op.attrs.mask is not None or not ref.shape or ref.strides[-1] != 1:
        return 1
    steps = [step for size, step in zip(ref.shape[:-1], ref.strides) if size > 1]
    steps += [] if ref.by_data is None else [ref.by_data[1]]
    return math.gcd(ref.offset, ref.shape[-1], *steps)


def _in_blocks(ref: Ref, block: int) -> Ref:
    """The numbers of the blocks that an access takes, as an access to them."""
    if block == 1:
        return ref
    shape = (*ref.shape[:-1], ref.shape[-1] // block)
    strides = (*(step // block for step in ref.strides[:-1]), 1)
    data = ref.by_data and (ref.by_data[0], ref.by_data[1] // block, *ref.by_data[2:])
    return Ref(ref.memory, ref.offset // block, shape, strides, ref.dt, data)


@dataclass
class _Both:
    """The writes of two cores to one tensor since they last met.

    Attributes:
        owner: 1 + the core that wrote an element last, 0: nobody.
        first: the tensor as the first core left it, and which elements it wrote.
        writer: the instruction of the second core, for the message.
    """

    loop: Loop
    owner: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    writer: Instruction | None = None


@dataclass(eq=False)
class WrittenByBoth:
    """Compares the values that two cores write to the same elements between two meetings.

    Args:
        storages: tensors that both write; None: any in HBM.
    """

    program: Program
    storages: set[Storage] | None
    _open: dict[Storage, tuple[_Both, torch.Tensor]] = field(default_factory=dict)

    def watching(self, step: Callable[[], None], op: Op, arena: Arena) -> Callable[[], None]:
        """The same step, which records its writes."""
        frame = grid_frame(op.instruction)
        refs = [r for r in op.dst if self._watched(r.memory.storage)]
        if frame is None or not refs:
            return step

        def noted() -> None:
            for ref in refs:
                self._before(ref, frame, op, arena)
            step()

        return noted

    def _watched(self, storage: Storage) -> bool:
        if self.storages is not None:
            return storage in self.storages
        return not storage.on_chip and storage.frame is None

    def _before(self, ref: Ref, frame: Frame, op: Op, arena: Arena) -> None:
        storage, flat = ref.memory.storage, arena.of(ref.memory)
        if storage in self._open and self._open[storage][0].loop is not frame.loop:
            self._settle(storage)
        if storage not in self._open:
            owner = torch.zeros(flat.numel(), dtype=torch.int8)
            self._open[storage] = (_Both(frame.loop, owner), flat)
        both = self._open[storage][0]
        if both.first is None and frame.i and bool(both.owner.any()):
            both.first = flat.clone(), both.owner != NOBODY
            both.owner.zero_()
        both.writer = op.instruction
        both.owner[_elements(op, ref, arena)] = frame.i + 1

    def _settle(self, storage: Storage) -> None:
        both, flat = self._open.pop(storage)
        if both.first is None or both.writer is None:
            return
        values, written = both.first
        shared = written & (both.owner != NOBODY)
        if not bool(shared.any()):
            return
        now, then = flat[shared], values[shared]
        differ = (now != then) & ~((now != now) & (then != then))
        count, line = int(differ.sum()), place(self.program, both.writer)
        if count:
            raise refuse(
                "err_unexpected_output_dependencies",
                f"both cores of {self.program.name} write {int(shared.sum())} elements of "
                f"{storage.label()} with no core_barrier between them, and {count} get other "
                "values, expected equal ones: the result depends on who comes last; give each core "
                "its own part",
                line,
            )
        warn(
            "sim_cores_write_alike",
            f"both cores of {self.program.name} write {int(shared.sum())} elements of "
            f"{storage.label()} with equal values, expected each to take its part; divide the work "
            "by nl.program_id",
            line,
            advice=True,
        )

    def finish(self) -> None:
        """Compare the remaining writes at the end of a run.

        Raises:
            NkiError: the cores wrote other values.
        """
        for storage in list(self._open):
            self._settle(storage)


def instance_rows(program: Program) -> InstanceRows | None:
    """A watch over the tensors that need one; most programs have none."""
    written: set[Storage] = set()
    chosen: set[Storage] = set()
    for instruction in program.instructions:
        if grid_frame(instruction) is None:
            continue
        for view in (*instruction.dst, *instruction.src):
            if view.by_data is not None and view.storage.frame is None:
                chosen.add(view.storage)
        written.update(v.storage for v in instruction.dst if v.storage.frame is None)
    watched = frozenset(s for s in written & chosen if not s.on_chip)
    return InstanceRows(watched) if watched else None


def grid_frame(instruction: Instruction) -> Frame | None:
    """The instance of a launch grid of several that recorded the instruction."""
    frame = instruction.frame
    while frame is not None and frame.parent is not None:
        frame = frame.parent
    several = frame is not None and frame.loop.kind == "grid" and frame.loop.n > 1
    return frame if several else None


def _elements(op: Op, ref: Ref, arena: Arena) -> torch.Tensor:
    """Numbers of the elements that the operand touches, rows that are skipped left out."""
    at = gather_index(ref, arena, skip=op.attrs.skip)
    if op.attrs.skip:
        return at[rows_inside(ref, arena).expand(ref.shape)]
    mask = op.attrs.mask
    if mask is not None and mask.shape == at.shape:
        return at[torch.from_numpy(mask.copy())]
    return at.reshape(-1)


def _tell(
    instruction: Instruction,
    ref: Ref,
    instance: int,
    writes: bool,
    other: int,
    does: str,
    program: Program,
) -> None:
    whose = f"several instances {does}" if other == SEVERAL else f"instance {other - 1} {does}s"
    warn(
        "sim_race_of_chosen_rows",
        f"instance {instance} of the launch grid {'writes' if writes else 'reads'} rows of "
        f"{ref.memory.storage.label()} that data choose and that {whose}, with nothing that "
        "orders them, expected rows of its own: the result depends on who comes first; put "
        "core_barrier between them, or give every instance rows of its own",
        place(program, instruction),
    )
