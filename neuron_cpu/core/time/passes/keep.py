"""Data that is loaded again stays on chip where there is room.

A compiler that sees one region of HBM loaded in every iteration of an outer loop keeps the tiles,
if all that the line ever loads fits (docs/cost_model.md names the kernels that show it). A kernel
without loops (``skip_middle_end_transformations``) has no such lines left: there what was
loaded a short while ago is not loaded again, what was used last staying longest.
"""

from itertools import accumulate

from ...device.spec import CORE, Engine
from ...program.program import Instruction
from ...program.storage import Source, Storage
from .hoist import Key, key, reading, shareable, single_results, unwritten_hbm
from .work import Work

LEFT = 44 * 1024  # bytes of a partition of SBUF that kept tiles leave to others


def keep(work: Work) -> list[Instruction]:
    """Load once what is loaded again while its tile can still be there."""
    pure, steady = single_results(work.instructions), unwritten_hbm(work.instructions)
    loads = [
        i for i in work.instructions if i.op.engine is Engine.DMA and shareable(i, pure, steady)
    ]
    room = CORE.sbuf_usable_bytes - LEFT
    if not work.program.skips_middle_end:
        loads = _of_lines_that_fit(loads, room)
    last = {key(i): at for at, i in enumerate(loads)}
    kept: dict[Key, Storage] = {}  # by what was loaded, the one used longest ago first
    same: dict[int, Storage] = {}
    for at, instruction in enumerate(loads):
        what, target = key(instruction), instruction.dst[0].storage
        found = kept.pop(what, None)
        if found is not None:
            same[target.id] = target = found
        else:
            room -= target.tile_bytes
        if last[what] > at:
            kept[what] = target
        else:
            room += target.tile_bytes
        while room < 0:
            room += kept.pop(next(iter(kept))).tile_bytes
    if not same:
        return work.instructions
    dropped = {id(i) for i in loads if i.dst[0].storage.id in same}
    return [reading(i, same) for i in work.instructions if id(i) not in dropped]


def _of_lines_that_fit(loads: list[Instruction], room: int) -> list[Instruction]:
    """The loads of lines whose tiles fit together, each from its first load to its last, most
    repeated lines first."""
    lines: dict[Source | None, dict[Key, list[int]]] = {}
    for at, instruction in enumerate(loads):
        lines.setdefault(instruction.source, {}).setdefault(key(instruction), []).append(at)
    found: set[Source | None] = set()
    repeats = {line: sum(map(len, own.values())) - len(own) for line, own in lines.items()}
    for line in sorted(lines, key=repeats.__getitem__, reverse=True):
        steps = [
            step
            for runs in lines[line].values()
            for size in (loads[runs[0]].dst[0].storage.tile_bytes,)
            for step in ((runs[0], size), (runs[-1] + 0.5, -size))
        ]
        size = max(accumulate(change for _, change in sorted(steps)))
        if repeats[line] and size <= room:
            room -= size
            found.add(line)
    return [i for i in loads if i.source in found]
