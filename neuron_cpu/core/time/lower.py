"""What the vendor's compiler makes of a kernel before it arranges it in time.

A Program says what the kernel writes. Between that and the instructions that a device runs, the
compiler changes the program without changing its results, and kernels that are written without a
thought of it are several times faster than their text. Each pass here stands for one such change
that published times show (docs/cost_model.md names the kernels):

* ``rename``: the values that a reused buffer holds one after the other alternate between two
  buffers, so that a load need not wait for the last reader of the value before;
* ``hoist``: what every iteration of a loop computes or loads again is computed or loaded once.

Passes take a list of instructions and return one; they never change an Instruction in place, since
the kernel's own Program is executed and reported as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from ..device.spec import Engine
from ..program.program import Instruction, Program
from ..program.storage import Frame, Source, Storage
from ..program.view import View
from .depend import Box, box_of, contains

Key = tuple


def lower(program: Program) -> Program:
    """The program that the schedule arranges; storages may be new, the results are the same."""
    work = _Work(program)
    work.instructions = rename(work)
    work.instructions = hoist(work)
    return work.finish()


class _Work:
    """A program in transformation: its instructions and the storages made on the way."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions = program.instructions
        self.storages = list(program.storages)
        self.next_id = 1 + max((s.id for s in program.storages), default=-1)

    def block(self, storage: Storage) -> Storage:
        """A new storage like one block of another one."""
        shape = storage.shape[storage.paxis :]
        made = Storage(self.next_id, shape, storage.dtype, storage.buffer, storage.role)
        made.name, made.source, made.frame = storage.name, storage.source, storage.frame
        self.storages.append(made)
        self.next_id += 1
        return made

    def finish(self) -> Program:
        program = self.program
        if self.instructions is program.instructions:
            return program
        made = Program(program.name, program.grid, program.function)
        made.instructions, made.storages = self.instructions, self.storages
        made.inputs, made.outputs = program.inputs, program.outputs
        made.output_shapes = program.output_shapes
        made.direct_allocation = program.direct_allocation
        return made


def _with_views(
    instruction: Instruction, dst: tuple[View, ...], src: tuple[View, ...]
) -> Instruction:
    return Instruction(
        instruction.op, dst, src, instruction.attrs, instruction.frame, instruction.source
    )


def _automatic(storage: Storage) -> bool:
    """Whether the compiler chose, and may change, the place of an on-chip storage."""
    return storage.on_chip and storage.address is None


# --- rename ---------------------------------------------------------------------------------------
Part = tuple[int, int]  # storage and block of it


class _Access(NamedTuple):
    """One access to one block of a storage: its box, and whether it can begin a new value."""

    at: int
    box: Box
    reads: bool
    begins: bool


def rename(work: _Work) -> list[Instruction]:
    """Let the values of a reused buffer alternate between it and a twin.

    A write begins a new value where nothing that is read of the block afterwards, until the next
    such write, lies outside of what it wrote. Iterations of ``sequential_range`` keep a buffer that
    was made outside of the loop: the loop says that they depend on each other.
    """
    begins = _beginnings(work.instructions)
    if not begins:
        return work.instructions
    twins: dict[Part, Storage] = {}
    current: dict[Part, Storage] = {}  # blocks whose value lies in the twin at the moment
    result = []
    for at, instruction in enumerate(work.instructions):
        src = tuple([_current(v, current) for v in instruction.src])
        part = begins.get(at)
        if part is not None and current.pop(part, None) is None:
            if part not in twins:
                twins[part] = work.block(instruction.dst[0].storage)
            current[part] = twins[part]
        dst = tuple([_current(v, current) for v in instruction.dst])
        changed = any(a is not b for a, b in zip((*src, *dst), _operands(instruction)))
        result.append(_with_views(instruction, dst, src) if changed else instruction)
    return result


def _operands(instruction: Instruction) -> tuple[View, ...]:
    return (*instruction.src, *instruction.dst)


def _part(view: View) -> Part | None:
    """The block that a view lies in; None where it spans several."""
    storage = view.storage
    size = storage.size if not storage.paxis else storage.shape[storage.paxis] * storage.free_size
    block, offset = divmod(view.offset, size)
    last = offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides))
    return (storage.id, block) if last < size else None


def _current(view: View, current: dict[Part, Storage]) -> View:
    part = _part(view) if current else None
    if part is None or part not in current:
        return view
    storage = current[part]
    return View(
        storage, view.offset - part[1] * storage.size, view.shape, view.strides, view.dt, view.paxis
    )  # fmt: skip


def _beginnings(instructions: list[Instruction]) -> dict[int, Part]:
    """Which instruction begins a new value of which block, the first value of each left out."""
    found = {}
    for part, accesses in _rewritten(instructions).items():
        needed: set[Box] = set()  # what is read later, up to the next beginning
        begun = []
        for access in reversed(accesses):
            if access.begins and all(contains(access.box, box) for box in needed):
                begun.append(access.at)
                needed = set()
            elif access.reads:
                needed.add(access.box)
        for at in begun[:-1]:
            found[at] = part
    return found


def _rewritten(instructions: list[Instruction]) -> dict[Part, list[_Access]]:
    """Accesses to each block that more than one instruction could begin a value of."""
    accesses: dict[Part, list[_Access]] = {}
    candidates: dict[Part, int] = {}
    fixed: set[int] = set()  # storages that somebody accesses as several blocks or by data
    filled: dict[int, _Access] = {}  # the first write of a storage where it covers several blocks
    used: set[int] = set()  # storages of which one block has been accessed
    for at, instruction in enumerate(instructions):
        own = {v.storage.id for v in instruction.src}
        for view in instruction.src:
            if view.indirect is not None:
                fixed.add(view.indirect[0].storage.id)
        for number, view in enumerate(_operands(instruction)):
            storage = view.storage
            if not _automatic(storage) or storage.id in fixed:
                continue
            part = _part(view)
            reads = number < len(instruction.src)
            begins = not reads and storage.id not in own and _overwrites(instruction, view)
            if part is None and begins and storage.id not in filled and storage.id not in used:
                filled[storage.id] = _Access(at, box_of(view), False, True)
                continue
            if view.indirect is not None or part is None:
                fixed.add(storage.id)
                continue
            used.add(storage.id)
            if part not in accesses:
                accesses[part] = [filled[storage.id]] if storage.id in filled else []
                candidates[part] = len(accesses[part])
            candidates[part] += begins
            accesses[part].append(_Access(at, box_of(view), reads, begins))
    return {
        part: accesses[part]
        for part, count in candidates.items()
        if count > 1 and part[0] not in fixed
    }


def _overwrites(instruction: Instruction, view: View) -> bool:
    """Whether a result owes nothing to what its buffer held, nor to an earlier iteration."""
    if len(instruction.dst) != 1 or instruction.attrs.mask is not None:
        return False
    if instruction.attrs.accumulate:
        return False
    frame, outside = instruction.frame, view.storage.frame
    depth = 0 if outside is None else outside.depth
    while frame is not None and frame.depth > depth:
        if frame.loop.kind == "sequential" and frame.loop.n > 1:
            return False
        frame = frame.parent
    return True


# --- hoist ----------------------------------------------------------------------------------------
class _Seen:
    """The latest run of one line of a kernel: what it computed, where, and what varied so far.

    Attributes:
        key: what determines the result.
        frame: the iteration that it ran in.
        varied: depth of the deepest loop in which the key changed from one run to the next.
        storage: where the first run of this key left its result.
    """

    __slots__ = ("frame", "key", "storage", "varied")

    def __init__(self, key: Key, frame: Frame | None, storage: Storage) -> None:
        self.key, self.frame, self.storage = key, frame, storage
        self.varied = 0


def hoist(work: _Work) -> list[Instruction]:
    """Run once what a loop repeats unchanged.

    A compiler moves an instruction out of a loop where nothing that it reads changes in the loop;
    in the unrolled program that is an instruction of the same line with the same operands as in
    the iteration before, if no loop further inside changes them either. Only results that nothing
    else writes can be shared, and only from HBM that the kernel does not write.
    """
    pure = _single_results(work.instructions)
    steady = _unwritten_hbm(work.instructions)
    seen: dict[tuple[Source | None, str, int], _Seen] = {}
    same: dict[int, Storage] = {}  # a dropped result -> the one that stands for it
    nth: dict[tuple[Frame | None, Source | None, str], int] = {}
    result = []
    for instruction in work.instructions:
        if same:
            instruction = _reading(instruction, same)
        if not _shareable(instruction, pure, steady):
            result.append(instruction)
            continue
        target = instruction.dst[0]
        position = (instruction.frame, instruction.source, instruction.op.name)
        count = nth[position] = nth.get(position, -1) + 1
        line = (instruction.source, instruction.op.name, count)
        key = _key(instruction)
        last = seen.get(line)
        if last is None:
            seen[line] = _Seen(key, instruction.frame, target.storage)
            result.append(instruction)
            continue
        depth = _parting(last.frame, instruction.frame)
        if key != last.key:
            last.varied = max(last.varied, depth)
        elif last.varied < depth:
            same[target.storage.id] = last.storage
            last.frame = instruction.frame
            continue
        last.key, last.frame, last.storage = key, instruction.frame, target.storage
        result.append(instruction)
    return result if len(result) < len(work.instructions) else work.instructions


def _reading(instruction: Instruction, same: dict[int, Storage]) -> Instruction:
    """The instruction with operands from the results that stand for dropped ones."""
    if not any(v.storage.id in same for v in instruction.src):
        return instruction
    src = []
    for view in instruction.src:
        storage = same.get(view.storage.id)
        if storage is not None:
            view = View(storage, view.offset, view.shape, view.strides, view.dt, view.paxis)
        src.append(view)
    return _with_views(instruction, instruction.dst, tuple(src))


def _single_results(instructions: list[Instruction]) -> set[int]:
    """Storages that one instruction writes, once and as a whole."""
    written: dict[int, int] = {}
    whole: set[int] = set()
    for instruction in instructions:
        for view in instruction.dst:
            storage = view.storage
            written[storage.id] = written.get(storage.id, 0) + 1
            if view.size == storage.size and _automatic(storage) and view.indirect is None:
                whole.add(storage.id)
    return {k for k in whole if written[k] == 1}


def _unwritten_hbm(instructions: list[Instruction]) -> set[int]:
    """HBM storages that no instruction writes."""
    read: set[int] = set()
    written: set[int] = set()
    for instruction in instructions:
        if instruction.op.engine is Engine.DMA:
            read.update(v.storage.id for v in instruction.src if not v.storage.on_chip)
            written.update(v.storage.id for v in instruction.dst)
    return read - written


def _shareable(instruction: Instruction, pure: set[int], steady: set[int]) -> bool:
    if len(instruction.dst) != 1 or instruction.dst[0].storage.id not in pure:
        return False
    if instruction.attrs.accumulate or instruction.attrs.mask is not None:
        return False
    for view in instruction.src:
        known = pure if view.storage.on_chip else steady
        if view.storage.id not in known or view.indirect is not None:
            return False
    return True


def _key(instruction: Instruction) -> Key:
    target = instruction.dst[0]
    sources = tuple(
        [(v.storage.id, v.offset, v.shape, v.strides, v.dt.name) for v in instruction.src]
    )
    constants = instruction.attrs.start, instruction.attrs.key()
    return (
        target.shape, target.strides, target.dt.name, target.storage.buffer, sources, constants,
    )  # fmt: skip


def _parting(a: Frame | None, b: Frame | None) -> int:
    """Depth of the outermost loop in whose iterations two frames differ; one more than the depth
    where they are the same iteration."""
    if a is b:
        return 1 if a is None else a.depth + 1
    left = [] if a is None else a.path()
    right = [] if b is None else b.path()
    depth = 0
    for x, y in zip(left, right):
        if x is not y:
            break
        depth += 1
    return depth + 1
