"""A kernel that computes what a reference does, written from the reference's own operations.

The reference runs on one block of its arguments with values of `operations` in their place, and
what it does to them becomes a kernel's lines, in loops over the blocks of the results. Nobody's
lines are mended here: it is for kernels of which no change makes a right one.
"""

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.program.source import tree_of
from .cases import Arguments
from .operations import MOVING, PARTITIONS, Axis, Cannot, Value, divisor, in_hbm, new, on_chip
from .references import Reference

FILE = "<draft>"
LONGEST, INLINE = 60, 44  # lines of a draft, and letters of what is written into another call
DTYPES = {"float64": "float32", "int64": "int32", "bool": "uint8"}
WAYS, SLOW = 64, 0.2  # to give axes of arguments to a loop; seconds of a reference that is tried
Of = tuple[int, int]  # an axis of an argument, and turns that an element of it serves


def told(
    kernel: Callable,
    reference: Reference,
    arguments: Arguments,
    doubts: Callable[[Callable], list[str] | None],
) -> list[str]:
    """The lines of a kernel that computes what a reference does, none where none is found.

    Args:
        kernel: whose name and parameters it has.
        arguments: of the reference.
        doubts: of a function: None where it is wrong, else its warnings; raises what it does.
    """
    with contextlib.suppress(Exception, SystemExit):
        for text in texts(kernel, reference, arguments):
            with contextlib.suppress(Exception, SystemExit):
                if doubts(built(kernel, text)) == []:
                    said = "this kernel computes the reference, right on all values that were tried"
                    return [f"written otherwise, {said}:", *text.splitlines()]
    return []


def built(kernel: Callable, text: str) -> Callable:
    """The function of a text, with the names of a kernel's file."""
    kernel = inspect.unwrap(kernel)
    linecache.cache[FILE] = len(text), None, text.splitlines(keepends=True), FILE
    names = {
        name: importlib.import_module(module)
        for name, module in (("nl", "nki.language"), ("nisa", "nki.isa"))
    } | kernel.__globals__
    exec(compile(text, FILE, "exec"), names)
    return names[kernel.__name__]


class Cut(NamedTuple):
    """How an axis of the results is taken in blocks.

    Attributes:
        block, loop: elements of a turn, and its index.
        of: axes of arguments that go with it.
    """

    axis: int
    block: int
    loop: str
    of: tuple[Of | None, ...]


class Asked(NamedTuple):
    """What a draft has to compute.

    Attributes:
        tree: of the kernel whose name and parameters it has.
        function: of numpy or PyTorch.
        arguments: tensors in float64 and constants; `casts`: those whose tiles become float32.
        results, dtypes: of the function, and their types in `nl`.
        flat: which arguments, and the results of `shape`, had one axis.
    """

    tree: ast.FunctionDef
    function: Callable
    arguments: Sequence[Any]
    casts: Sequence[bool]
    results: list[Any]
    dtypes: Sequence[str]
    flat: Sequence[bool] = ()
    shape: tuple[int, ...] = ()


def texts(kernel: Callable, reference: Reference, given: Arguments) -> Iterator[str]:
    """Texts of kernels that may compute what a reference does."""
    kernel = inspect.unwrap(kernel)
    tree = tree_of(kernel)  # type: ignore[arg-type]
    function = functools.partial(reference.function, **given[1])
    reference.plain(*given)
    dtypes = [DTYPES.get(one, one) for one in reference.types] or ["float32"]
    casts = [getattr(one, "dtype", None) is not torch.float32 for one in given[0]]
    arguments = [reference.widened(one) for one in given[0]]
    results = _listed(function(*map(copy.copy, arguments)))
    begun = time.thread_time()  # the first call may load a library
    function(*map(copy.copy, arguments))
    if tree is None or time.thread_time() - begun > SLOW:
        return
    asked = Asked(tree, function, arguments, casts, results, dtypes)
    own = asked._replace(function=functools.partial(_with_own(reference.function), **given[1]))
    plans = [(one, plan) for plan in _plans(asked) for one in (asked, own)]
    if np.ndim(results[0]) == 1:
        plans.insert(0, (_in_rows(asked), []))
    for one, plan in plans:
        with contextlib.suppress(Exception):  # the reference does what is not written here
            yield _written(one, plan)


def _listed(results: Any) -> list[Any]:
    several = [*results] if isinstance(results, (tuple, list)) else [results]
    return [
        one if np.ndim(one) or isinstance(one, Value) else np.reshape(one, (1, 1))
        for one in several
    ]


def _in_rows(asked: Asked) -> Asked:
    """The same with tensors of one axis as rows of a tile."""
    shape = tuple(asked.results[0].shape)
    rows = divisor(shape[0], PARTITIONS)
    flat = [np.shape(one) == shape for one in asked.arguments]
    some = [one.reshape((rows, -1)) if is_ else one for one, is_ in zip(asked.arguments, flat)]
    results = [one.reshape((rows, -1)) for one in asked.results]
    return asked._replace(arguments=some, results=results, flat=flat, shape=shape)


class _Library:
    """A library whose new tensors are values."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        if name not in ("zeros", "empty", "ones", "full"):
            return real
        return lambda *args, **kwargs: new(real(*args, **kwargs))


def _with_own(function: Any) -> Callable:
    """A function that makes its new tensors with `_Library`."""
    function = inspect.unwrap(function)
    known = function.__globals__
    own = {name: _Library(one) for name, one in known.items() if one is np or one is torch}
    rest = function.__name__, function.__defaults__, function.__closure__
    return types.FunctionType(function.__code__, {**known, **own}, *rest)


# --- blocks ---------------------------------------------------------------------------------------
def _plans(asked: Asked) -> Iterator[list[Cut]]:
    """Ways to take the results in blocks, those with the fewest loops first."""
    shape = tuple(asked.results[0].shape)
    plan: list[Cut] = []
    if len(shape) > 2 and shape[0] <= PARTITIONS:
        yield []
    for axis in range(len(shape) - 1 or 1):
        leads = axis < len(shape) - 2
        block = 1 if leads else divisor(shape[axis], PARTITIONS)
        if block < shape[axis]:
            plan = [*plan, *_cut(asked, plan, axis, block, f"i_{axis}" if leads else "i_row")]
    yield plan
    for most in (MOVING, PARTITIONS) if len(shape) > 1 else ():
        block = divisor(shape[-1], most)
        if block < shape[-1]:
            yield from (
                [*plan, one] for one in _cut(asked, plan, len(shape) - 1, block, "i_column")
            )


def _cut(asked: Asked, plan: list[Cut], axis: int, block: int, loop: str) -> list[Cut]:
    """Parts of most arguments that give the same parts of the results, if there are."""
    arguments, results = _turn(asked, plan)
    size = results[0].shape[axis]
    every = []
    for one in arguments:
        sizes = [*enumerate(np.shape(one))]
        alike = [(i, 1) for i, n in sizes if n == size]
        less = [(i, size // n) for i, n in sizes if block == 1 < n < size and size % n == 0]
        every.append([None, *alike, *less])
    for of in sorted(itertools.product(*every), key=lambda one: one.count(None))[:WAYS]:
        cut = Cut(axis, block, loop, of)
        asks = asked._replace(arguments=arguments, results=results)
        with contextlib.suppress(Exception):
            if any(of) and all(_same(asks, cut, turn) for turn in {0, size // block - 1}):
                return [cut]
    return []


def _turn(asked: Asked, plan: list[Cut], turn: int = 0) -> tuple[list[Any], list[Any]]:
    """Arguments and results of a turn."""
    arguments, results = [*asked.arguments], asked.results
    for cut in plan:
        arguments = [_part(one, of, cut.block, turn) for one, of in zip(arguments, cut.of)]
        results = [_part(one, (cut.axis, 1), cut.block, turn) for one in results]
    return arguments, results


def _part(value: Any, of: Of | None, block: int, turn: int) -> Any:
    if of is None:
        return value
    first = turn * block // of[1]
    return value[(*[slice(None)] * of[0], slice(first, first + block))]


def _same(asked: Asked, cut: Cut, turn: int) -> bool:
    """Whether the function of a turn's parts gives the parts of the results."""
    arguments, results = _turn(asked, [cut], turn)
    return all(
        one.shape == other.shape and np.allclose(one, other, 1e-6, 1e-9, equal_nan=True)
        for one, other in zip(_listed(asked.function(*arguments)), results)
    )


# --- lines ----------------------------------------------------------------------------------------
def _written(asked: Asked, plan: list[Cut]) -> str:
    """The text of a kernel."""
    names = [one.arg for one in asked.tree.args.args]
    arguments, parts = _turn(asked, plan)
    as_rows = f".reshape({tuple(asked.results[0].shape)})"
    for number, one in enumerate(arguments):
        if np.ndim(one):
            text = names[number] + as_rows * any(asked.flat[number : number + 1])
            axes = _axes(asked.arguments[number], one, [(cut, cut.of[number]) for cut in plan])
            casts = asked.casts[number]
            arguments[number] = Value(one, text, (), names[number], axes=axes, casts=casts)
    lines = Lines({*names, *(cut.loop for cut in plan)})
    made, stores = [], list[tuple[Value, Value]]()
    made_by = zip(_listed(asked.function(*arguments)), asked.results, parts, asked.dtypes)
    for result, whole, part, dtype in made_by:
        if not isinstance(result, Value):
            raise Cannot
        tile, name = on_chip(result), lines.named("result_hbm")
        if dtype != "float32":
            tile = tile.seen(part, make=f"nl.copy({{0}}, dtype=nl.{dtype})", parts=(tile,))
        axes = _axes(whole, part, [(cut, (cut.axis, 1)) for cut in plan])
        text = name + as_rows * bool(asked.flat)
        stores.append((Value(part, text, (), name, result.column, axes), tile))
        shape = asked.shape or tuple(whole.shape)
        made.append(f"{name} = nl.ndarray({shape}, dtype=nl.{dtype}, buffer=nl.shared_hbm)")
        lines.count(tile)
    for to, tile in stores:
        lines.said.append(f"nl.store({in_hbm(to)}, {lines.text(tile)})")
    for number, cut in enumerate(plan):
        turns = asked.results[0].shape[cut.axis] // cut.block
        made.append("    " * number + f"for {cut.loop} in range({turns}):")
    made += ["    " * len(plan) + line for one in lines.said for line in one.splitlines()]
    made.append(f"return {', '.join(to.hint for to, _ in stores)}")
    if len(made) > LONGEST:
        raise Cannot
    head = f"def {asked.tree.name}({ast.unparse(asked.tree.args)}):"
    return "\n    ".join([head, *made]) + "\n"


def _axes(whole: Any, part: Any, plan: list[tuple[Cut, Of | None]]) -> tuple[Axis, ...]:
    axes = [Axis(size, all_) for size, all_ in zip(part.shape, whole.shape)]
    for cut, of in plan:
        if of is not None:
            axes[of[0]] = axes[of[0]]._replace(loop=cut.loop, block=cut.block, turns=of[1])
    return tuple(axes)


class Lines:
    """The lines that make values, each once.

    Attributes:
        said: so far.
    """

    def __init__(self, taken: set[str]) -> None:
        self.said: list[str] = []
        self.taken, self.names = taken, dict[int, str]()
        self.uses: Counter[int] = Counter()
        self.keys: dict[int, tuple[int, Value]] = {}  # with the value, else its id is another's
        self.numbers: dict[Any, int] = {}

    def count(self, value: Value) -> None:
        """See how often each value is taken, before any line is written."""
        key = self._key(value)
        self.uses[key] += 1
        if self.uses[key] == 1:
            for one in value.parts * (2 if "\nfor " in value.make else 1):  # a loop takes it often
                self.count(one)

    def _key(self, value: Value) -> int:
        """The same number for what is made alike, but for what changes in place."""
        if id(value) not in self.keys:
            alike = id(value.tile) if value.hint == "new" else 0
            made = value.make, tuple(map(self._key, value.parts)), alike
            self.keys[id(value)] = self.numbers.setdefault(made, len(self.numbers)), value
        return self.keys[id(value)][0]

    def text(self, value: Value) -> str:
        """The name or expression of a value, whose lines are said before."""
        key = self._key(value)
        if key not in self.names:
            parts = [self.text(one) for one in value.parts]
            text = value.make.format(*parts, to="{to}")
            if value.make.startswith("nisa."):  # in place
                self.said.append(text)
                text = parts[0]
            elif not value.make.startswith(("{0}[", "{0}.")) and value.make != "{0}":
                short = self.uses[key] == 1 and len(text) < INLINE and "{to}" not in text
                if short and value.hint != "new":
                    return text
                hint = value.hint + "_sb" * (not value.hint.endswith("_psum"))
                name = self.named(hint)
                text = text if "{to}" in text else f"{{to}} = {text}"
                self.said.append(text.replace("{to}", name))
                text = name
            self.names[key] = text
        return self.names[key]

    def named(self, base: str) -> str:
        """A name that nothing has yet."""
        every = itertools.chain([base], (f"{base}{n}" for n in itertools.count(2)))
        name = next(one for one in every if one not in self.taken)
        self.taken.add(name)
        return name
