"""What wrong results look like beside the expected ones, and what a kernel leaves unread.

A pattern is told where it holds for 98 % of the wrong elements, within the error that was accepted
or one part in a thousand; the first that holds is told.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core import Program
from ..core.program import regions
from ..core.program.storage import Storage
from ..core.program.view import View

MOST = 2_000_000  # elements of a result that is looked at, and of a tensor
MOST_INSTRUCTIONS = 4_000


def pattern(got: np.ndarray, right: np.ndarray, wrong: np.ndarray, bound: float) -> str:
    """Where the wrong elements are and what they are, in words; "" where nothing is seen.

    Args:
        got, right: the result and the expected one, float64 of one shape.
        wrong: which elements are.
        bound: the error that was accepted.
    """
    if not 0 < got.size <= MOST or not np.isfinite(got[wrong]).all() or not wrong.any():
        return ""
    width = got.shape[-1] if got.ndim else 1
    g, r, flags = (one.reshape(-1, width) for one in (got, right, wrong))
    with np.errstate(all="ignore"):
        looks = next(_looks(g, r, flags, max(bound, 1e-3)), "")
    return ", ".join(filter(None, (_where(flags, got.ndim), looks)))


def _where(wrong: np.ndarray, axes: int) -> str:
    """The rows and columns in which all wrong elements lie."""
    rows: np.ndarray = np.any(wrong, axis=1)
    columns: np.ndarray = np.any(wrong, axis=0)
    across, down = np.indices(wrong.shape, sparse=True)[::-1]
    sides = {
        "above the diagonal": across > down,
        "below the diagonal": across < down,
        "on the diagonal": across == down,
        "off the diagonal": across != down,
    }
    for said, side in sides.items() if axes == 2 and min(wrong.shape) > 2 else ():
        if not wrong[~side].any() and wrong.sum() > 0.95 * side.sum():
            return f"wrong {said} only"
    told, above = [], " of all axes but the last" if axes > 2 else ""
    for name, flags, more in (("columns", columns, ""), ("rows", rows, above)):
        if flags.mean() < 0.98 and _spans(flags) != f"0:{len(flags)}" and _spans(flags):
            told.append(f"{name} {_spans(flags)}{more}")
        elif not told and not flags.all() and min(wrong.shape) > 15:
            right = _spans(~flags)
            if right and (right == "0" or ":" in right or right == str(len(flags) - 1)):
                told.append(f"all {name} but {right}{more}")
    return f"wrong in {' of '.join(told)} only" if told else ""


def _spans(flags: np.ndarray) -> str:
    """Which are set: a few, a range or every n-th; "" for others."""
    at = np.flatnonzero(flags)
    steps = np.diff(at)
    if len(at) < 5:
        return ", ".join(map(str, at))
    if at[-1] - at[0] < 1.02 * len(at) + 1:
        return f"{at[0]}:{at[-1] + 1}"
    if len(set(steps)) == 1:
        return f"{at[0]}:{at[-1] + 1}:{steps[0]}"
    return ""


def _looks(g: np.ndarray, r: np.ndarray, wrong: np.ndarray, bound: float) -> Iterator[str]:
    """Sentences that hold for the wrong elements, the plainest first."""
    got, right = g[wrong], r[wrong]
    if np.mean(got == got[0]) > 0.98 and (len(got) > 1 or not got[0]):
        yield f"each of them is {got[0]:.6g}"
    if len(got) > 1 and np.all(right == right[0]):
        yield f"{right[0]:.6g} is expected in each of them"
    x, y = np.where(wrong, g, 0.0), np.where(wrong, r, 0.0)
    size = np.abs(right) + np.quantile(np.abs(right), 0.1)
    for axis, each in ((None, ""), (1, "row"), (0, "column")):
        factor = (x * y).sum(axis, keepdims=True) / (y * y).sum(axis, keepdims=True)
        apart = np.abs(got - (r * factor)[wrong])
        if np.mean(apart <= bound * size) <= 0.98 or not np.abs(factor).max():
            continue
        if np.abs(factor - 1).max() < 8 * bound:  # rounding of few bits looks so, too
            continue
        if not each:
            yield f"each of them is the expected one times {_named(factor.item(), g.shape)}"
        elif wrong.sum(axis).max() > 2:
            yield f"each {each} is the expected one times a number of its own"


def _named(factor: float, shape: tuple[int, ...]) -> str:
    """A factor, as what the sizes of a result make of it where they do."""
    sizes = {n // part for n in shape for part in range(1, 65) if not n % part and n // part > 3}
    named: dict[str, float] = {}
    for n in sizes:
        named |= {f"{n} / {n - 1}": n / (n - 1), f"sqrt({n} / {n - 1})": (n / (n - 1)) ** 0.5}
        named |= {str(n): float(n), f"sqrt({n})": n**0.5} if n in shape else {}
    named |= {f"1 / ({words})": 1 / value for words, value in named.items()}
    words = min(named, key=lambda one: abs(factor / named[one] - 1), default="")
    if not words or abs(factor - named[words]) > 0.005 * abs(named[words] - 1):
        return f"{factor:.6g}"
    return f"{factor:.6g} = {words}" + ", as one of the two divides by n - 1" * (" / " in words[3:])


def signs(program: Program) -> tuple[frozenset[int], frozenset[str], dict[str, tuple[int, ...]]]:
    """Lines that read what is read in part, or write a result in part; names of what is unread;
    shapes of all that is read or written."""
    lost = {*_lost(program)[0]}
    whole = {one: np.zeros(one.size, bool) for one in program.outputs if one.size <= MOST}
    for view in (view for one in program.instructions for view in one.dst):
        if view.storage in whole:
            whole[view.storage][_elements(view)] = True
    lost |= {one for one, flags in whole.items() if not flags.all()}
    touched = {
        one.source.line
        for one in program.instructions
        if one.source and any(view.storage in lost for view in (*one.src, *one.dst[:1]))
    }
    unused = idle(program)
    lost |= {v.storage for one in program.instructions if one.source in unused for v in one.dst}
    views = (view for one in program.instructions for _, view in one.accesses())
    shapes = {view.storage.name: view.storage.shape for view in views}
    return frozenset(touched), frozenset(one.name for one in lost), shapes


def unread(program: Program) -> list[str]:
    """Parts of arguments that no instruction reads, and tiles that are computed for nobody."""
    lost, made = _lost(program)
    told = [
        f"{regions.box_text(flags, storage)} is never read ({made[storage][1]}): look at what "
        "should take it"
        for storage, flags in lost.items()
    ]
    return list(dict.fromkeys(told))[:2]


def _lost(program: Program) -> tuple[dict[Storage, np.ndarray], dict[Storage, Any]]:
    """Arguments and tiles of which elements are read by no instruction, with flags; and all that
    are written, with words."""
    if len(program.instructions) > MOST_INSTRUCTIONS:
        return {}, {}
    read: dict[Storage, np.ndarray] = {}
    made: dict[Storage, tuple[np.ndarray, str]] = {
        one: (np.ones(one.size, bool), "an argument") for one in program.inputs if one.size <= MOST
    }
    for instruction in program.instructions:
        views = (view for written, view in instruction.accesses() if not written)
        for view in (one for one in views if one.storage.size <= MOST):
            flags = read.setdefault(view.storage, np.zeros(view.storage.size, bool))
            flags[_elements(view)] = True
        for view in instruction.dst[-1:]:  # of two results the second is meant
            wide = instruction.op.name.endswith("8")  # max8 and its kin write 8 where 1 is meant
            named = view.storage.on_chip and view.storage.name and not wide
            if named and 1 < view.storage.size <= MOST:
                line = instruction.source.line if instruction.source else 0
                known = made.get(view.storage, (np.zeros(view.storage.size, bool), ""))[0]
                known[_elements(view)] = True
                made[view.storage] = known, f"line {line} writes it"
    lost = {
        storage: flags & ~read.get(storage, np.zeros(len(flags), bool))
        for storage, (flags, _) in made.items()
        if storage not in program.outputs and not program.aliases
    }
    # another core reads its own; a last tile may be smaller than the others
    twins = {one.name for one in read} if program.cores > 1 else set()
    wanted = ((s, f) for s, f in lost.items() if f.any() and s.name not in twins)
    return {s: f for s, f in wanted if not _is_rest(f, s)}, made


def _is_rest(unread: np.ndarray, storage: Storage) -> bool:
    """Whether it is the last partitions of a tile."""
    parts = np.moveaxis(unread.reshape(storage.shape), storage.paxis, 0)
    rows: np.ndarray = np.any(parts.reshape(len(parts), -1), axis=1)
    first = int(rows.argmax())
    return storage.on_chip and first > 0 and bool(rows[first:].all())


def idle(program: Program) -> set[Any]:
    """Lines whose results reach no output."""
    wanted, used = set(program.outputs), set()
    bases = dict(program.aliases)
    wanted |= {bases[one] for one in program.outputs if one in bases}
    for instruction in reversed(program.instructions):
        if any(bases.get(v.storage, v.storage) in wanted for v in instruction.dst):
            used.add(instruction.source)
            wanted |= {bases.get(view.storage, view.storage) for _, view in instruction.accesses()}
    return {one.source for one in program.instructions} - used


def _elements(view: View) -> Any:
    """Element numbers of a view; all where data choose."""
    if view.by_data is not None:
        return slice(None)
    return regions.elements(view, np.ones(view.shape, bool))
