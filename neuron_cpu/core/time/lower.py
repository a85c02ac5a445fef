"""The vendor compiler's changes to a kernel before it arranges it in time.

A Program says what the kernel writes. Between that and the instructions that a device runs, the
compiler changes the program without changing its results, and kernels that are written without a
thought of it are several times faster than their text. Each pass stands for one such change that
published times show; its module says which, docs/cost_model.md names the kernels.
"""

from ..device.spec import CORE, Engine
from ..program.program import Instruction, Program
from .passes.broadcast import broadcast
from .passes.fills import fills
from .passes.hoist import hoist, unwritten_hbm
from .passes.join import join
from .passes.keep import keep
from .passes.rename import rename
from .passes.transpose import transpose
from .passes.work import Work


def lower(program: Program, keeps: bool = True) -> Program:
    """The program that the schedule arranges; storages may be new, the results are the same.

    Args:
        keeps: tiles that are loaded again stay on chip where there is room.
    """
    work = Work(program)
    for change in (fills, transpose, broadcast, join, rename, hoist, *([keep] if keeps else [])):
        work.instructions = change(work)
    return work.finish()


def as_written(program: Program) -> Program:
    """The program as it is written, but for zeros that the first product of a group overwrites and,
    of `nki`, tiles that are loaded again while they fit (NeuronCore-v2) or the order of loads."""
    work = Work(program)
    for change in (fills, *([keep if CORE.today_keeps else first_use] if program.today else [])):
        work.instructions = change(work)
    return work.finish()


def first_use(work: Work) -> list[Instruction]:
    """Put each load of HBM that nobody writes in front of the first instruction that needs it: DMA
    serves what is ready in this order, and a load waits for nothing that says when it is needed."""
    steady = unwritten_hbm(work.instructions)
    needed: dict[int, float] = {}  # of a storage: its next access that is no such load
    places: list[float] = []
    for at, one in reversed(list(enumerate(work.instructions))):
        place, views = float(at), (*one.src, *one.dst)
        plain = all(v.storage.memory.id in steady and not v.by_data for v in one.src)
        if plain and one.op.engine is Engine.DMA and one.dst[0].storage.on_chip:
            place, views = needed.get(one.dst[0].storage.memory.id, at) - 0.5, one.src
        needed.update((v.storage.memory.id, at) for v in views)
        places.append(place)
    order = sorted(range(len(places)), key=places[::-1].__getitem__)
    return [work.instructions[at] for at in order]
