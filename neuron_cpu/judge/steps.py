"""How far a kernel computes what its reference computes: which values both have on their way.

Every expression of the reference's text is evaluated, and every result of the kernel's lines is
looked for among the values. Only numbers count, so tiles, turned tiles and parts are found alike.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import Program
from ..core.program.storage import Storage
from ..core.run import compare
from . import repairs
from .aims import Aim, Named, aims
from .cases import Arguments
from .names import function_of, read
from .ranking import WRITTEN, Signs, asked_of
from .references import Reference

MOST, SOME = 400_000, 400  # values of the reference, and of a line, that are looked at
RESULT = "result"
PLACES = "all values are the reference's, at other places: look at slices, indices and loops"
PARTS = (0.1, 0.25, 0.5, 0.75, 0.9)  # quantiles in which dense values are alike
PROBES = 12  # values by which most are told not to be the reference's
NEAR, SAME = 1e-5, 0.95  # relative error of equal values; share of a line's that have to be


class Way(NamedTuple):
    """How far a kernel goes the reference's way.

    Attributes:
        lines: 1.5 for those whose results the reference does not have, of operands that it has;
            where it has all, for those that store the kernel's results; 1 for what follows, and for
            what made the operands, 0.5 for what made theirs.
        said: the same in words.
        aims: lines that would give what the reference computes next.
    """

    lines: dict[int, float] = {}
    said: str = ""
    aims: tuple[Aim, ...] = ()


class Theirs(NamedTuple):
    """What a reference computes on its way.

    Attributes:
        values: sorted, of each expression, and of its result (RESULT).
        lines: of each expression; 0 in what a function of PyTorch is written out as.
        parts: expressions that each one takes.
    """

    values: dict[str, np.ndarray]
    lines: dict[str, int]
    parts: dict[str, set[str]]

    def next(self, known: str, have: Set[str]) -> str:
        """An expression that takes a known one, or what is equal, and is not one of those made."""
        wanted = self.values.get(known, ())
        same = {text for text, one in self.values.items() if np.array_equal(one, wanted)}
        for text, parts in self.parts.items():
            if parts & same and text in self.values and text not in have:
                return f"`{text}`" + f" (line {self.lines[text]})" * bool(self.lines[text])
        return ""


class _Seen(ast.NodeTransformer):
    """Each expression hands over its value on the way; functions of the library are written out."""

    def __init__(self, theirs: Theirs) -> None:
        self.theirs, self.within = theirs, [set[str]()]

    def visit(self, node: Any) -> Any:
        text = ast.unparse(node)
        self.within.append(set())
        made: Any = super().generic_visit(node)
        parts = self.within.pop()
        kinds = (ast.BinOp, ast.Call, ast.Subscript, ast.UnaryOp, ast.Name)
        inner = isinstance(node, ast.Name) and not node.lineno  # a parameter of what is written out
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if inner or stored or not isinstance(node, kinds):
            self.within[-1] |= parts
            return made
        self.within[-1].add(text)
        self.theirs.lines[text] = node.lineno
        self.theirs.parts.setdefault(text, set()).update(parts)
        written = WRITTEN.get(function_of(node))
        if written and isinstance(made.func, ast.Attribute):
            if text.split(".")[0] not in ("torch", "F", "nn", "np", "numpy"):  # a method
                made.args.insert(0, made.func.value)
            made.func = ast.increment_lineno(ast.parse(written, mode="eval"), -1).body
            self.visit(made.func)
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

    source = repairs.Source(reference.function, Signs())
    source.known = {**source.known, "__seen": note, "torch": torch}
    for file, tree in source.trees:
        tree.body = [ast.fix_missing_locations(_Seen(theirs).visit(one)) for one in tree.body]
        source.code[id(tree)] = repairs.compiled(file, tree)
    function = source.build() if source.trees else reference.function
    for result in Reference(function, reference.library).exact(*arguments):
        note(RESULT, result)
    found = {RESULT: found.pop(RESULT), **found}
    theirs.values.update({t: np.sort(np.concatenate(some)) for t, some in found.items() if some})
    return theirs


def _share(values: np.ndarray, of: np.ndarray, near: float, apart: int = 0) -> float:
    """The share of values that others are near to; of values that are so many errors apart."""
    size = near * (np.abs(values) + np.sqrt(np.mean(values**2)))
    wanted = values + apart * size
    at = np.searchsorted(of, wanted).clip(1, len(of) - 1) if len(of) > 1 else np.zeros(1, int)
    least = np.minimum(np.abs(of[at] - wanted), np.abs(of[at - 1] - wanted))
    return float(np.mean(least <= size))


def _is_part(values: np.ndarray, of: np.ndarray) -> bool | None:
    """Whether values are among others; None where they are so by chance, too, and lie otherwise."""
    if _share(values, of, NEAR) < SAME:
        return False
    if _share(values, of, NEAR, 7) <= 0.5:
        return True
    most = of[np.abs(of) >= np.abs(values).min()]
    apart = np.quantile(values, PARTS) - np.quantile(most, PARTS) if len(most) else np.inf
    return True if np.all(np.abs(apart) < 0.2 * of.std()) else None


def _large(values: np.ndarray) -> np.ndarray:
    """Some of the values that tell one tensor from another."""
    flat = values[np.isfinite(values) & (np.abs(values) < 1e29)]
    flat = flat[np.abs(flat) > 1e-3 * np.sqrt(np.mean(flat**2))] if len(flat) else flat
    return flat[:: len(flat) // SOME | 1]


def _results(
    program: Program, inputs: Sequence[torch.Tensor]
) -> tuple[dict[int, dict[Any, np.ndarray]], dict[int, set[int]], dict[int, int]]:
    """Results of each line by where they are, the lines that it takes from, and its elements."""
    own: dict[int, dict[Any, np.ndarray]] = defaultdict(dict)
    feeds: dict[int, set[int]] = defaultdict(set)
    count: dict[int, int] = defaultdict(int)
    wrote: dict[Storage, dict[int, None]] = defaultdict(dict)
    for _, instruction, view, result in compare.results(program, list(inputs), True):
        line = instruction.source.line if instruction.source else 0
        for written, one in instruction.accesses():
            feeds[line] |= set() if written else wrote[one.storage].keys() - {line}
        if view.size == view.storage.size and not instruction.op.multiplies:
            wrote[view.storage].clear()
        wrote[view.storage][line] = None
        if not instruction.src:  # the same in every kernel
            continue
        flat = result.to(torch.float64).reshape(-1).numpy()
        count[line] += len(flat)
        target, taken = view.storage, {one.storage for one in instruction.src}
        # What the line itself takes is on its way; of what grows in place the last counts.
        kept = {k: one for k, one in own[line].items() if k[0] not in taken - {target}}
        grows = instruction.op.multiplies or target in taken
        own[line] = kept | {(target, 0 if grows else len(kept)): flat[:: len(flat) // SOME | 1]}
    return own, feeds, count


def way(
    found: Named, inputs: Sequence[torch.Tensor], reference: Reference, arguments: Arguments
) -> Way:
    """How far a kernel goes its reference's way, on values of arguments."""
    program = found.program
    theirs = steps_of(reference, arguments)
    outputs = set(program.outputs)
    sizes = {float(n) for t in inputs for n in t.shape}
    own, feeds, count = _results(program, inputs)
    met: dict[int, str | None] = {}
    for line, some in own.items():
        named: dict[str, list[np.ndarray]] = defaultdict(list)
        for (storage, _), values in some.items():
            named[storage.name].append(values)
        texts = [_met(np.concatenate(one), theirs.values, sizes) for one in named.values()]
        met[line] = None if None in texts else texts[-1]
    right = {line for line, text in met.items() if text is not None}
    for _ in own:  # what leads to a result that is right is right
        right |= {one for line in right if met.get(line) != "" for one in feeds[line]}
    wrong = own.keys() - right
    ends = {i.source for i in program if outputs.intersection(v.storage for v in i.dst)}
    last = {one.line for one in ends if one}
    first = {line for line in wrong if not feeds[line] & wrong} or {*sorted(wrong)[:1]} or last
    near = {one for line in first for one in feeds[line]}
    lines = {one: 0.5 for line in near for one in feeds[line]}
    lines |= dict.fromkeys(near | wrong, 1.0) | dict.fromkeys(first, 1.5)
    lines = lines if wrong else dict.fromkeys(own, 0.5) | lines
    taken = [np.sort(one.double().numpy().ravel()) for one in inputs]
    have, given, exact = set[str](), dict[int, str](), set[int]()
    for line, one in ((line, one) for line, some in own.items() for one in some.values()):
        for text in _are(one, theirs):
            exact.add(line)
            if 4 * count[line] > len(theirs.values[text]):
                have.add(text)
                made = not any(_is_part(_large(one), values) for values in taken)
                given |= {line: text} if made and theirs.lines.get(text) else {}
    lines |= {one: 1.0 for one, text in met.items() if text and not {one} & (exact | lines.keys())}
    missing = {text: one for text, one in theirs.values.items() if text not in have}
    every = np.sort(np.concatenate([np.zeros(1), *missing.values()]))

    def wanted(values: np.ndarray) -> int:
        some = _large(values)
        some = some[:: len(some) // PROBES | 1]
        if not len(some) or np.ptp(some) <= NEAR * np.abs(some).max():
            return 0
        likely = _share(some, every, 2 * NEAR) >= SAME
        flat = np.sort(values.ravel())  # as many as there are have to be all of them
        met = [
            text
            for text in (_are(values, theirs) if likely else ())
            if text in missing
            and (len(flat) < len(missing[text]) or _is_part(_large(missing[text]), flat))
        ]
        return bool(met) + (RESULT in met)

    numbers, words = asked_of(reference.function)
    told = aims(found, inputs, lines, wanted, words, numbers)
    line, stored, said = min(first, default=0), "", ""
    before = max((one for one in feeds[line] if one in given), default=0)
    if not wrong:
        stored = RESULT if met.get(line) == RESULT else given.get(line, "")
        said = f"line {line} stores the reference's `{stored}`, not its result" * bool(stored)
    elif before:  # what follows may be right and go another way
        goes = theirs.next(given[before], have)
        said = f"the values of line {before} are the reference's `{given[before]}`"
        said += f", of which it makes {goes}" * bool(goes)
    return Way(lines, PLACES if stored == RESULT else said, told)


def _are(values: np.ndarray, theirs: Theirs) -> Iterator[str]:
    """Expressions of which all are values."""
    flat = _large(values)
    if len(set(flat)) > 3:
        yield from (text for text, others in theirs.values.items() if _is_part(flat, others))


def _met(values: np.ndarray, theirs: dict[str, np.ndarray], sizes: set[float]) -> str | None:
    """The expression of which all are values, or multiples or inverses; "" of constants, and where
    they may be so by chance."""
    flat = _large(values)
    if len(set(flat)) < 4:
        return ""
    dense = None
    for one in [flat, -flat, 1 / flat, *(flat / n for n in sizes), *(flat * n**0.5 for n in sizes)]:
        for text, others in theirs.items():
            part = _is_part(one, others)
            if part:
                return text
            dense = "" if part is None else dense
    return dense
