"""The vendor compiler's changes to a kernel before it arranges it in time.

A Program says what the kernel writes. Between that and the instructions that a device runs, the
compiler changes the program without changing its results, and kernels that are written without a
thought of it are several times faster than their text. Each pass stands for one such change that
published times show (docs/cost_model.md names the kernels):

* ``transpose``: loads and stores that would move single elements go through TensorE;
* ``broadcast``: an operator that stretches a row over partitions reads the product with ones;
* ``join``: what a short loop does to a few elements at a time is one instruction;
* ``rename``: the values that a reused buffer holds one after the other alternate between two
  buffers, so that a load need not wait for the last reader of the value before;
* ``fills``: zeros that the first product of a group replaces are never written;
* ``hoist``: what every iteration of a loop computes or loads again is computed or loaded once;
* ``keep``: what is loaded again stays on chip where all of it fits.
"""

from ..device.spec import CORE
from ..program.program import Program
from .passes.broadcast import broadcast
from .passes.fills import fills
from .passes.hoist import hoist
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
    of `nki` on NeuronCore-v2, tiles that are loaded again while they fit."""
    work = Work(program)
    for change in (fills, *([keep] if program.today and CORE.today_keeps else [])):
        work.instructions = change(work)
    return work.finish()
