"""Races between instances of a launch grid whose rows data choose: seen only where they run.

``check/races.py`` refuses what the recorded addresses prove. Where an index tile or a scalar offset
chooses rows, as in a paged cache, addresses are known at run time; what then meets is a warning,
since a device runs it, and the result is that of whoever comes last.
"""

from __future__ import annotations

import torch

from ..device.errors import warn
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Frame, Loop, Storage
from .memory import Arena, gather_index, rows_inside
from .merge import Op, Ref

NOBODY, SEVERAL = 0, -1


class InstanceRows:
    """Who touched which element of the tensors whose rows data choose, during one run."""

    def __init__(self, watched: frozenset[Storage]) -> None:
        self.watched = watched
        self.marks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def start(self) -> None:
        """Forget the last run."""
        self.marks.clear()

    def note(self, op: Op, arena: Arena, program: Program) -> None:
        """Before ``op`` runs: compare what it touches with what other instances touched."""
        frame = grid_frame(op.instruction)
        if frame is None:
            return
        for ref, writes in [*((r, False) for r in op.src), *((r, True) for r in op.dst)]:
            if ref.memory.storage in self.watched:
                self._meet(op, ref, frame, writes, arena, program)

    def _meet(
        self, op: Op, ref: Ref, frame: Frame, writes: bool, arena: Arena, program: Program
    ) -> None:
        at = _elements(op, ref, arena)
        writers, readers = self._marks(frame.loop, ref.memory.storage)
        own = frame.i + 1
        found = [(writers[at], "write")]
        if writes and not op.attrs.accumulate:  # sums come out the same in either order
            found.append((readers[at], "read"))
        for marks, does in found:
            others = marks[(marks != NOBODY) & (marks != own)]
            if others.numel() and not (writes and op.attrs.accumulate):
                _tell(op.instruction, ref, frame.i, writes, int(others[0]), does, program)
                break
        table = writers if writes else readers
        mine = table[at]
        table[at] = torch.where((mine == NOBODY) | (mine == own), own, SEVERAL).to(torch.int8)

    def _marks(self, loop: Loop, storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
        key = (loop.id, storage.id)
        if key not in self.marks:
            zeros = torch.zeros(storage.size, dtype=torch.int8)
            self.marks[key] = (zeros, zeros.clone())
        return self.marks[key]


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
