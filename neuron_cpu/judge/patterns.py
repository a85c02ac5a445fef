"""What wrong results look like beside the expected ones, and what a kernel leaves unread.

A pattern is told where it holds for 98 % of the wrong elements, within the error that was accepted
or one part in a thousand; the first that holds is told.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core import Program
from ..core.program import regions
from ..core.program.storage import Storage
from ..core.program.view import View

MOST = 2_000_000  # elements of a result that is looked at, and of a tensor
MOST_INSTRUCTIONS = 4_000
LIMITS = (127.0, 240.0, 255.0, 448.0, 32767.0, 57344.0, 65504.0, 2.0**31 - 1)


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

    def like(value: np.ndarray, other: np.ndarray = r) -> bool:
        value, other = (np.broadcast_to(v, r.shape)[wrong] for v in (value, other))
        size = np.abs(other) + np.quantile(np.abs(other), 0.1)
        return bool(np.mean(np.abs(value - other) <= bound * size) > 0.98)

    values = np.abs(g[wrong])
    first = float(values[0])
    if np.mean(values == first) > 0.98 and (len(values) > 1 or not first):
        if first in LIMITS:
            yield f"each of them is {first:g}, the largest of a type: it is saturated"
        told = ": nothing is computed there, or a factor is 0"
        if not first and ((r[wrong] < 0).all() or (r[wrong] > 0).all()):
            told = (
                f", expected {'negative' if r[wrong][0] < 0 else 'positive'} numbers: it is cut off"
            )
        yield f"each of them is {g[wrong][0]:.6g}{'' if first else told}"
    yield from _masked(g[wrong], r[wrong])
    if g.shape[0] == g.shape[1] > 1 and like(g.T):
        yield "the result is the expected one transposed"
    if 1 not in g.shape and like(g.reshape(g.shape[::-1]).T):
        yield "the result has the expected elements in the order of the transpose"
    kinds = len(np.unique(g))
    if kinds <= 256 and len(np.unique(r)) > 20 * kinds:
        yield (
            f"the result has {kinds} different values only: a tile of an integer or 8-bit type "
            "holds it on the way"
        )
    yield from _factors(g, r, wrong, like)


def _masked(g: np.ndarray, r: np.ndarray) -> Iterator[str]:
    """A value that stands where others are expected, and the other way round."""
    values, counts = np.unique(r, return_counts=True)
    fill = values[np.argmax(counts)]
    if counts.max() > 0.1 * len(r) > 1:
        if np.all((g == fill) != (r == fill)) and (g == fill).any():
            yield (
                f"{fill:.6g} stands where other values are expected, and they where it is: the "
                "condition is the wrong way round"
            )
        elif np.all(r == fill):
            yield f"{fill:.6g} is expected in each of them: a mask leaves them out"


def _factors(
    g: np.ndarray, r: np.ndarray, wrong: np.ndarray, like: Callable[..., bool]
) -> Iterator[str]:
    """A factor or an offset, one for all elements, or one for each row or column."""
    x, y = np.where(wrong, g, 0.0), np.where(wrong, r, 0.0)
    count = np.maximum(wrong.sum(), 1)
    for axis, each in ((None, ""), (1, "row"), (0, "column")):
        if axis is not None and r.shape[axis] < 3:
            continue
        factor = (x * y).sum(axis, keepdims=True) / (y * y).sum(axis, keepdims=True)
        offset = (x - y).sum(axis, keepdims=True)
        offset = offset / (np.maximum(wrong.sum(axis, keepdims=True), 1) if each else count)
        for number, made, said in ((factor, r * factor, "times"), (offset, r + offset, "plus")):
            if not like(g, made) or not np.abs(number).max():
                continue
            known = number[np.isfinite(number)].reshape(-1)
            same = not each or known.std() < 0.2 * abs(known.mean())
            value = float(known.mean() if same else known[0])
            if not each:
                yield f"each of them is the expected one {said} {value:.6g}"
            yield (
                f"each {each} is the expected one {said} a number of its own, "
                + (f"about {value:.4g}" if same else f"{value:.4g} in the first")
                + f": look at what is one number for each {each}"
            )


def signs(program: Program) -> tuple[frozenset[int], frozenset[str]]:
    """Lines that read what is read in part, or write a result in part; names of what is unread."""
    lost = {storage for storage, flags in _lost(program)[0].items() if flags.any()}
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
    return frozenset(touched), frozenset(one.name for one in lost)


def unread(program: Program) -> list[str]:
    """Parts of arguments that no instruction reads, and tiles that are computed for nobody."""
    lost, made = _lost(program)
    told = [
        f"{regions.box_text(flags, storage)} is never read ({made[storage][1]}): look at what "
        "should take it"
        for storage, flags in lost.items()
        if flags.any()
    ]
    return list(dict.fromkeys(told))[:2]


def _lost(program: Program) -> tuple[dict[Storage, np.ndarray], dict[Storage, Any]]:
    """Which elements of arguments and tiles no instruction reads; and all that are written, with
    words."""
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
            if view.storage.on_chip and view.storage.name and view.storage.size <= MOST:
                line = instruction.source.line if instruction.source else 0
                known = made.get(view.storage, (np.zeros(view.storage.size, bool), ""))[0]
                known[_elements(view)] = True
                made[view.storage] = known, f"line {line} writes it"
    lost = {
        storage: flags & ~read.get(storage, np.zeros(len(flags), bool))
        for storage, (flags, _) in made.items()
        if storage not in program.outputs and not program.aliases
    }
    return lost, made


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
