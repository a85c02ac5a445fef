"""How far a kernel computes what its reference computes: which values both have on their way.

Every expression of the reference's text is evaluated, and every result of the kernel's lines is
looked for among the values. Only numbers count, so tiles, turned tiles and parts are found alike.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import Program
from ..core.program.storage import Storage
from ..core.run import compare
from . import repairs
from .cases import Arguments
from .library import WRITTEN
from .names import function_of, read
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


class Theirs(NamedTuple):
    """What a reference computes on its way.

    Attributes:
        values: sorted, of each expression, and of its result (RESULT).
        lines: of each expression; 0 in a function of the library.
        parts: expressions that each one takes.
    """

    values: dict[str, np.ndarray]
    lines: dict[str, int]
    parts: dict[str, set[str]]

    def next(self, known: str, made: Callable[[np.ndarray], bool]) -> str:
        """An expression that takes a known one, or what is equal, and is not made yet."""
        wanted = self.values.get(known, ())
        same = {text for text, one in self.values.items() if np.array_equal(one, wanted)}
        for text, parts in self.parts.items():
            if parts & same and text in self.values and not made(self.values[text]):
                return f"`{text}`" + f" (line {self.lines[text]})" * bool(self.lines[text])
        return ""


class _Seen(ast.NodeTransformer):
    """Each expression hands over its value on the way; functions of the library are written out."""

    def __init__(self, theirs: Theirs, first: int) -> None:
        self.theirs, self.first, self.within = theirs, first, [set[str]()]

    def visit(self, node: Any) -> Any:
        text = ast.unparse(node)
        self.within.append(set())
        made: Any = super().generic_visit(node)
        parts = self.within.pop()
        kinds = (ast.BinOp, ast.Call, ast.Subscript, ast.UnaryOp, ast.Name)
        if not isinstance(node, kinds) or isinstance(getattr(node, "ctx", None), ast.Store):
            self.within[-1] |= parts
            return made
        self.within[-1].add(text)
        self.theirs.lines[text] = self.first and node.lineno
        self.theirs.parts.setdefault(text, set()).update(parts)
        name = function_of(node)
        if name in WRITTEN and isinstance(made.func, ast.Attribute):
            taken = [ast.Constant(name), made.func.value, *made.args]
            made = ast.Call(read("__written"), taken, made.keywords)
        return ast.Call(read("__seen"), [ast.Constant(text), made], [])


def steps_of(reference: Reference, arguments: Arguments) -> Theirs:
    """What a reference computes on its way."""
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    theirs = Theirs({}, {}, {})

    def note(text: str, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            flat = np.array(value, np.float64).reshape(-1)
            if sum(map(len, found[text])) + len(flat) < MOST:
                found[text].append(flat)
        return value

    def written(name: str, owner: Any, *args: Any, **more: Any) -> Any:
        args = args if isinstance(owner, ModuleType) else (owner, *args)
        return seen(WRITTEN[name], 0)(*args, **more)

    def seen(function: Callable, first: int = 1) -> Callable:
        source = repairs.Source(function, Signs())
        source.known = {**source.known, "__seen": note, "__written": written}
        for file, tree in source.trees:
            tree.body = [
                ast.fix_missing_locations(_Seen(theirs, first).visit(one)) for one in tree.body
            ]
            source.code[id(tree)] = repairs.compiled(file, tree)
        return source.build() if source.trees else function

    for result in Reference(seen(reference.function), reference.library).exact(*arguments):
        note(RESULT, result)
    found = {RESULT: found.pop(RESULT), **found}
    theirs.values.update({t: np.sort(np.concatenate(some)) for t, some in found.items() if some})
    return theirs


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


def _large(values: np.ndarray) -> np.ndarray:
    """Some of the values that tell one tensor from another."""
    flat = values[np.isfinite(values) & (np.abs(values) < 1e29)]
    flat = flat[np.abs(flat) > 1e-3 * np.sqrt(np.mean(flat**2))] if len(flat) else flat
    return flat[:: len(flat) // SOME | 1]


def way(
    program: Program, inputs: Sequence[torch.Tensor], reference: Reference, arguments: Arguments
) -> Way:
    """How far a kernel goes its reference's way, on values of arguments."""
    theirs = steps_of(reference, arguments)
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
    met = {line: _met(np.concatenate(some), theirs.values, sizes) for line, some in own.items()}
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
    every = np.sort(np.concatenate([one for some in own.values() for one in some]))

    def made(values: np.ndarray) -> bool:
        return _met(values, {"": every}, sizes) is not None

    return Way(lines, _said(first, wrong, met, feeds, theirs, made))


def _said(
    first: set[int],
    wrong: set[int],
    met: dict[int, str | None],
    feeds: dict[int, set[int]],
    theirs: Theirs,
    made: Callable[[np.ndarray], bool],
) -> str:
    """Where the kernel leaves the way, in words; "" where nothing is known."""
    line = min(first, default=0)
    if wrong:
        said = f"line {line} is the first whose values the reference has nowhere on its way"
        before = max((one for one in feeds[line] if met.get(one)), default=0)
        known = met.get(before)
        if not known:
            return said
        goes = theirs.next(known, made)
        return f"{said}; line {before} still is its `{known}`" + (
            f", of which it makes {goes}, and no line of the kernel does" * bool(goes)
        )
    stored = met.get(line)
    if stored == RESULT:
        return "all values are the reference's, at other places: look at slices, indices and loops"
    return f"line {line} stores the reference's `{stored}`, not its result" * bool(stored)


def _met(values: np.ndarray, theirs: dict[str, np.ndarray], sizes: set[float]) -> str | None:
    """The expression of which all are values, or multiples or inverses; "" of constants."""
    flat = _large(values)
    if len(set(flat)) < 4:
        return ""
    for one in [flat, -flat, 1 / flat, *(flat / n for n in sizes), *(flat * n**0.5 for n in sizes)]:
        for text, others in theirs.items():
            if _is_part(one, others) is not False:
                return text
    return None
