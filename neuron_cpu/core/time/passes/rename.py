"""Values that a reused buffer holds one after the other alternate between two buffers.

A kernel that loads into one tile again and again would wait for the last reader each time. The
compiler knows from which write on nothing older is read, and rotates the buffer there.
"""

from typing import NamedTuple

from ...program.program import Instruction
from ...program.regions import Box, box_of, contains
from ...program.storage import Storage
from ...program.view import View
from .work import Work, automatic, with_views

Part = tuple[int, int]  # storage and block of it


class _Access(NamedTuple):
    """One access to one block of a storage: its box, and whether it can begin a new value."""

    at: int
    box: Box
    reads: bool
    begins: bool


def rename(work: Work) -> list[Instruction]:
    """Let the values of a reused buffer alternate between it and a twin.

    A write begins a new value where nothing that is read of the block afterwards, until the next
    such write, lies outside of what it wrote. Iterations of ``sequential_range`` keep a buffer that
    was made outside of the loop: the loop says that they depend on each other. A kernel with
    ``skip_middle_end_transformations`` has no loops left when buffers get their places: there each
    value is a tile of its own, whatever the loop is called.
    """
    apart = work.program.skips_middle_end
    begins = _beginnings(work.instructions, apart)
    if not begins:
        return work.instructions
    twins: dict[Part, Storage] = {}
    current: dict[Part, Storage] = {}  # blocks whose value lies in the twin at the moment
    result = []
    for at, instruction in enumerate(work.instructions):
        src = tuple([_current(v, current) for v in instruction.src])
        # A new value goes where the block's last one is not: to the twin, or back.
        part = begins.get(at)
        if part is not None and (current.pop(part, None) is None or apart):
            if part not in twins or apart:
                twins[part] = work.block(instruction.dst[0].storage)
            current[part] = twins[part]
        dst = tuple([_current(v, current) for v in instruction.dst])
        changed = any(a is not b for a, b in zip((*src, *dst), _operands(instruction)))
        result.append(with_views(instruction, dst, src) if changed else instruction)
    return result


def _operands(instruction: Instruction) -> tuple[View, ...]:
    return (*instruction.src, *instruction.dst)


def _part(view: View) -> Part | None:
    """The block that a view lies in; None where it spans several."""
    blocks = view.blocks()
    return (view.storage.id, blocks.start) if len(blocks) == 1 else None


def _current(view: View, current: dict[Part, Storage]) -> View:
    part = _part(view) if current else None
    if part is None or part not in current:
        return view
    storage = current[part]
    return View(
        storage, view.offset - part[1] * storage.size, view.shape, view.strides, view.dt, view.paxis
    )


def _beginnings(instructions: list[Instruction], apart: bool) -> dict[int, Part]:
    """Which instruction begins a new value of which block, the first value of each left out."""
    found = {}
    for part, accesses in _rewritten(instructions, apart).items():
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


def _rewritten(instructions: list[Instruction], apart: bool) -> dict[Part, list[_Access]]:
    """Accesses to each block that more than one instruction could begin a value of."""
    several = _overwritten_several_times(instructions, apart)
    if not several:
        return {}
    accesses: dict[Part, list[_Access]] = {}
    candidates: dict[Part, int] = {}
    fixed: set[int] = set()  # storages that somebody accesses as several blocks or by data
    filled: dict[int, _Access] = {}  # the first write of a storage where it covers several blocks
    used: set[int] = set()  # storages of which one block has been accessed
    for at, instruction in enumerate(instructions):
        own = {v.storage.id for v in instruction.src}
        for view in instruction.src:
            if view.by_data is not None:
                fixed.add(view.by_data[0].storage.id)
        for number, view in enumerate(_operands(instruction)):
            storage = view.storage
            if storage.id not in several or storage.id in fixed:
                continue
            part = _part(view)
            reads = number < len(instruction.src)
            begins = not reads and storage.id not in own
            begins = begins and _overwrites(instruction, view, apart)
            if part is None and begins and storage.id not in filled and storage.id not in used:
                filled[storage.id] = _Access(at, box_of(view), False, True)
                continue
            if view.by_data is not None or part is None:
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


def _overwritten_several_times(instructions: list[Instruction], apart: bool) -> set[int]:
    """Storages that can hold more than one value; most tiles of a loop hold one."""
    once: set[int] = set()
    several: set[int] = set()
    for instruction in instructions:
        for view in instruction.dst:
            storage = view.storage
            if automatic(storage) and _overwrites(instruction, view, apart):
                (several if storage.id in once else once).add(storage.id)
    return several


def _overwrites(instruction: Instruction, view: View, apart: bool) -> bool:
    """Whether a result owes nothing to what its buffer held, nor to an earlier iteration unless
    iterations are apart."""
    if len(instruction.dst) != 1 or instruction.attrs.mask is not None:
        return False
    if instruction.attrs.accumulate:
        return False
    if apart:
        return True
    frame, outside = instruction.frame, view.storage.frame
    depth = 0 if outside is None else outside.depth
    while frame is not None and frame.depth > depth:
        if frame.loop.kind == "sequential" and frame.loop.n > 1:
            return False
        frame = frame.parent
    return True
