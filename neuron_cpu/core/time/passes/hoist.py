"""Work that a loop repeats unchanged runs once."""

from dataclasses import dataclass

from ...device.spec import CORE, Engine
from ...program.program import Instruction
from ...program.storage import Frame, Source, Storage
from ...program.view import View
from .work import Work, automatic, with_views

Key = tuple


@dataclass(slots=True, eq=False)
class _Seen:
    """The latest run of one line of a kernel: what it computed, where, and what varied so far.

    Attributes:
        key: what determines the result.
        frame: the iteration that it ran in.
        varied: depth of the deepest loop in which the key changed from one run to the next.
        storage: where the first run of this key left its result.
    """

    key: Key
    frame: Frame | None
    storage: Storage
    varied: int = 0


def hoist(work: Work) -> list[Instruction]:
    """Run once what a loop repeats unchanged.

    A compiler moves an instruction out of a loop where nothing that it reads changes in the loop;
    in the unrolled program that is an instruction of the same line with the same operands as in
    the iteration before, if no loop further inside changes them either. Only results that nothing
    else writes can be shared, and only from HBM that the kernel does not write.
    """
    pure = single_results(work.instructions)
    pure -= _too_many_for_psum(work.instructions)
    steady = unwritten_hbm(work.instructions)
    seen: dict[tuple[Source | None, str, int], _Seen] = {}
    same: dict[int, Storage] = {}  # a dropped result -> the one that stands for it
    nth: dict[tuple[Frame | None, Source | None, str], int] = {}
    result = []
    for instruction in work.instructions:
        if same:
            instruction = reading(instruction, same)
        if not shareable(instruction, pure, steady):
            result.append(instruction)
            continue
        # One line may record several instructions of a kind in an iteration: they are numbered.
        target = instruction.dst[0]
        position = (instruction.frame, instruction.source, instruction.op.name)
        count = nth[position] = nth.get(position, -1) + 1
        line = (instruction.source, instruction.op.name, count)
        now = key(instruction)
        last = seen.get(line)
        if last is None:
            seen[line] = _Seen(now, instruction.frame, target.storage)
            result.append(instruction)
            continue
        # The loop at this depth went on since the line's last run. If neither that loop nor one
        # inside it has ever changed an operand, the first run's result serves.
        depth = _parting(last.frame, instruction.frame)
        if now != last.key:
            last.varied = max(last.varied, depth)
        elif last.varied < depth:
            same[target.storage.id] = last.storage
            last.frame = instruction.frame
            continue
        last.key, last.frame, last.storage = now, instruction.frame, target.storage
        result.append(instruction)
    return result if len(result) < len(work.instructions) else work.instructions


def reading(instruction: Instruction, same: dict[int, Storage]) -> Instruction:
    """The instruction with operands from the results that stand for dropped ones."""
    if not any(v.storage.id in same for v in instruction.src):
        return instruction
    src = []
    for view in instruction.src:
        storage = same.get(view.storage.id)
        if storage is not None:
            view = View(storage, view.offset, view.shape, view.strides, view.dt, view.paxis)
        src.append(view)
    return with_views(instruction, instruction.dst, tuple(src))


def single_results(instructions: list[Instruction]) -> set[int]:
    """Storages that one instruction writes, once and as a whole."""
    written: dict[int, int] = {}
    whole: set[int] = set()
    for instruction in instructions:
        for view in instruction.dst:
            storage = view.storage
            written[storage.id] = written.get(storage.id, 0) + 1
            if view.size == storage.size and automatic(storage) and view.by_data is None:
                whole.add(storage.id)
    return {k for k in whole if written[k] == 1}


def _too_many_for_psum(instructions: list[Instruction]) -> set[int]:
    """Results in PSUM of lines that make more of them in one iteration than it can keep beside
    others: half of it."""
    made: dict[tuple[Frame | None, Source | None], list[Storage]] = {}
    seen: set[int] = set()
    for instruction in instructions:
        for view in instruction.dst:
            storage = view.storage
            if storage.buffer == "psum" and storage.id not in seen:
                seen.add(storage.id)
                made.setdefault((instruction.frame, instruction.source), []).append(storage)
    limit = CORE.psum_banks * CORE.psum_bank_bytes // 2
    return {
        storage.id
        for storages in made.values()
        if sum(s.tile_bytes for s in storages) > limit
        for storage in storages
    }


def unwritten_hbm(instructions: list[Instruction]) -> set[int]:
    """HBM storages that no instruction writes."""
    read: set[int] = set()
    written: set[int] = set()
    for instruction in instructions:
        if instruction.op.engine is Engine.DMA:
            read.update(v.storage.memory.id for v in instruction.src if not v.storage.on_chip)
            written.update(v.storage.memory.id for v in instruction.dst)
    return read - written


def shareable(instruction: Instruction, pure: set[int], steady: set[int]) -> bool:
    """Whether another run of the same line may read this one's result."""
    if len(instruction.dst) != 1 or instruction.dst[0].storage.id not in pure:
        return False
    if instruction.attrs.accumulate or instruction.attrs.mask is not None:
        return False
    for view in instruction.src:
        known = pure if view.storage.on_chip else steady
        if view.storage.memory.id not in known or view.by_data is not None:
            return False
    return True


def key(instruction: Instruction) -> Key:
    """The key that determines the result of an instruction."""
    target = instruction.dst[0]
    sources = tuple(
        [(v.storage.id, v.offset, v.shape, v.strides, v.dt.name) for v in instruction.src]
    )
    constants = instruction.attrs.start, instruction.attrs.key()
    return (target.shape, target.strides, target.dt.name, target.storage.buffer, sources, constants)


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
