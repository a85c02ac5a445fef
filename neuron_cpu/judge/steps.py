"""How far a kernel computes what its reference computes: which values both have on their way.

Every expression of the reference's text is evaluated, and every result of the kernel's lines is
looked for among the values. Only numbers count, so tiles, turned tiles and parts are found alike.
"""

import ast
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import Program
from ..core.program.storage import Storage
from ..core.run import compare
from . import repairs
from .cases import Arguments
from .names import read
from .ranking import Signs
from .references import Reference

MOST, SOME = 400_000, 400  # values of the reference, and of a line, that are looked at
RESULT = "result"
NEAR, SAME = 1e-5, 0.95  # relative error of equal values; share of a line's that have to be


class Way(NamedTuple):
    """How far a kernel goes the reference's way.

    Attributes:
        lines: 1.5 for those whose results the reference does not have, of operands that it has;
            where it has all, for those that store the kernel's results; 1 for what follows, and for
            what made the operands, 0.5 for what made theirs.
        said: the same in words.
    """

    lines: dict[int, float] = {}
    said: str = ""


class _Seen(ast.NodeTransformer):
    """Each expression hands over its value on the way."""

    def visit(self, node: Any) -> Any:
        text = ast.unparse(node)
        made: Any = super().generic_visit(node)
        kinds = (ast.BinOp, ast.Call, ast.Subscript, ast.UnaryOp, ast.Name)
        if not isinstance(node, kinds) or isinstance(getattr(node, "ctx", None), ast.Store):
            return made
        return ast.Call(read("__seen"), [ast.Constant(text), made], [])


def values_of(reference: Reference, arguments: Arguments) -> dict[str, np.ndarray]:
    """The sorted values of each expression of a reference, and of its result ("")."""
    source = repairs.Source(reference.function, Signs())
    found: dict[str, list[np.ndarray]] = defaultdict(list)

    def note(text: str, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            flat = np.array(value, np.float64).reshape(-1)
            if sum(map(len, found[text])) + len(flat) < MOST:
                found[text].append(flat)
        return value

    source.known = {**source.known, "__seen": note}
    function = reference.function
    for _, tree in source.trees:
        tree.body = [ast.fix_missing_locations(_Seen().visit(one)) for one in tree.body]
        function = source.build(tree)
    for result in Reference(function, reference.library).exact(*arguments):
        note(RESULT, result)
    found = {RESULT: found.pop(RESULT), **found}
    return {text: np.sort(np.concatenate(some)) for text, some in found.items() if some}


def _is_part(values: np.ndarray, of: np.ndarray) -> bool | None:
    """Whether values are among others; None where they are so by chance, too."""
    size = NEAR * (np.abs(values) + np.sqrt(np.mean(values**2)))

    def share(wanted: np.ndarray) -> float:
        at = np.searchsorted(of, wanted).clip(1, len(of) - 1) if len(of) > 1 else np.zeros(1, int)
        apart = np.minimum(np.abs(of[at] - wanted), np.abs(of[at - 1] - wanted))
        return float(np.mean(apart <= size))

    if share(values) < SAME:
        return False
    return None if share(values + 7 * size) > 0.5 else True


def way(
    program: Program, inputs: Sequence[torch.Tensor], reference: Reference, arguments: Arguments
) -> Way:
    """How far a kernel goes its reference's way, on values of arguments."""
    theirs = values_of(reference, arguments)
    outputs = set(program.outputs)
    sizes = {float(n) for t in inputs for n in t.shape}
    own: dict[int, list[np.ndarray]] = defaultdict(list)
    feeds: dict[int, set[int]] = defaultdict(set)
    wrote: dict[Storage, dict[int, None]] = defaultdict(dict)
    for _, instruction, result in compare.results(program, list(inputs), True):
        line = instruction.source.line if instruction.source else 0
        for written, view in instruction.accesses():
            feeds[line] |= set() if written else wrote[view.storage].keys() - {line}
        for view in instruction.dst:
            if view.size == view.storage.size and not instruction.op.multiplies:
                wrote[view.storage].clear()
            wrote[view.storage][line] = None
        flat = result.to(torch.float64).reshape(-1).numpy()
        own[line].append(flat[:: len(flat) // SOME | 1])
    met = {line: _met(np.concatenate(some), theirs, sizes) for line, some in own.items()}
    right = {line for line, text in met.items() if text is not None}
    for _ in own:  # what leads to a result that is right is right
        right |= {one for line in right if met[line] != "" for one in feeds[line]}
    wrong = own.keys() - right
    ends = {i.source for i in program if outputs.intersection(v.storage for v in i.dst)}
    last = {one.line for one in ends if one}
    first = {line for line in wrong if not feeds[line] & wrong} if wrong else last
    near = {one for line in first for one in feeds[line]}
    lines = {one: 0.5 for line in near for one in feeds[line]}
    lines |= dict.fromkeys(near | wrong, 1.0) | dict.fromkeys(first, 1.5)
    return Way(lines, _said(first, wrong, met, feeds))


def _said(
    first: set[int], wrong: set[int], met: dict[int, str | None], feeds: dict[int, set[int]]
) -> str:
    """Where the kernel leaves the way, in words; "" where nothing is known."""
    line = min(first, default=0)
    if wrong:
        before = max((one for one in feeds[line] if met.get(one)), default=0)
        known = f"; line {before} still is its `{met[before]}`" * bool(before)
        return f"line {line} is the first whose values the reference has nowhere on its way{known}"
    stored = met.get(line)
    if stored == RESULT:
        return "all values are the reference's, at other places: look at slices, indices and loops"
    return f"line {line} stores the reference's `{stored}`, not its result" * bool(stored)


def _met(values: np.ndarray, theirs: dict[str, np.ndarray], sizes: set[float]) -> str | None:
    """The expression of which all are values, or multiples or inverses; "" of constants."""
    flat = values[np.isfinite(values) & (values != 0) & (np.abs(values) < 1e29)]
    flat = flat[:: len(flat) // SOME | 1]
    if len(set(flat)) < 4:
        return ""
    for one in [flat, -flat, 1 / flat, *(flat / n for n in sizes), *(flat * n**0.5 for n in sizes)]:
        for text, others in theirs.items():
            if _is_part(one, others) is not False:
                return text
    return None
