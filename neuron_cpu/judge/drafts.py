"""A kernel that computes what a reference does, written from the reference's own operations.

The reference runs with values of `operations` in place of its arguments, and what it does to them
becomes a kernel's lines, in loops over blocks of what does not lie on chip whole. Nobody's lines
are mended here: it is for kernels of which no change makes a right one.
"""

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.program.source import tree_of
from .cases import Arguments
from .loops import rolled
from .operations import LEADS, PARTITIONS, Axis, Cannot, Value, divisor, in_hbm, known, new, on_chip
from .references import Reference

FILE = "<draft>"
LONGEST, INLINE = 60, 44  # lines of a draft, and letters of what is written into another call
DTYPES = {"float64": "float32", "int64": "int32", "bool": "uint8"}
DEEP = 20_000
SLOW = 2.0  # seconds of a reference that is tried
LOOPS = re.compile(r"\bi_(?:row|column|\d+)\b")


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
    sys.setrecursionlimit(max(DEEP, sys.getrecursionlimit()))  # of steps of a recurrence
    with contextlib.suppress(Exception, SystemExit):
        for text in texts(kernel, reference, arguments):
            with contextlib.suppress(Exception, SystemExit):
                if doubts(built(kernel, text)) == []:
                    said = f"this kernel computes the reference for {_fixed(text)}"
                    said = f"written otherwise, {said}, right on all values that were tried:"
                    return [said, *text.splitlines()]
    return []


def _fixed(text: str) -> str:
    """Which of a kernel's arguments its text has as numbers."""
    tree: Any = ast.parse(text).body[0]
    read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
    names = [one.arg for one in (*tree.args.args, *tree.args.kwonlyargs) if one.arg not in read]
    return " and this ".join(["these sizes", *names])


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


class Asked(NamedTuple):
    """What a draft has to compute.

    Attributes:
        tree: of the kernel whose name and parameters it has.
        function: of numpy or PyTorch.
        arguments: tensors in float64 and constants; `casts`: types, where tiles become float32.
        results, dtypes: of the function, and their types in `nl`.
        flat: which arguments, and the results of `shape`, had one axis.
    """

    tree: ast.FunctionDef
    function: Callable
    arguments: Sequence[Any]
    casts: Sequence[str]
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
    given_as = dict(zip((one.arg for one in tree.args.args) if tree else (), given[0]))
    dtypes = [own or one for own, one in zip(_returned(tree, given_as, len(dtypes)), dtypes)]
    casts = [str(getattr(one, "dtype", "")).replace("torch.float32", "") for one in given[0]]
    arguments = [reference.widened(one) for one in given[0]]
    results = _listed(function(*map(copy.copy, arguments)))
    begun = time.thread_time()  # the first call may load a library
    function(*map(copy.copy, arguments))
    took = time.thread_time() - begun
    if tree is None or took > SLOW:
        return
    asked = Asked(tree, function, arguments, casts, results, dtypes)
    own = asked._replace(function=functools.partial(_with_own(reference.function), **given[1]))
    ways = [(one, leads) for leads in (False, True) for one in (asked, own)]
    if np.ndim(results[0]) == 1:
        ways.insert(0, (_in_rows(asked), False))
    for one, leads in ways:
        token = LEADS.set(leads)
        try:
            with contextlib.suppress(Exception):  # the reference does what is not written here
                yield _written(one)
        finally:
            LEADS.reset(token)


def _returned(tree: ast.FunctionDef | None, given: dict[str, Any], count: int) -> list[str]:
    """The types that a kernel's text gives to what it returns, as `nl` calls them; else ""."""
    made, returned = dict[str, ast.expr](), list[str]()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Return) and node.value is not None:
            several = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            returned = [getattr(one, "id", "") for one in several]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            named = [one.value for one in node.value.keywords if one.arg == "dtype"]
            for one in (named or node.value.args[1:2])[:1]:
                made |= {to.id: one for to in node.targets if isinstance(to, ast.Name)}
    types = [made.get(name) for name in returned] if len(returned) == count else [None] * count
    names = []
    for given_type in types:
        name = given_type.attr if isinstance(given_type, ast.Attribute) else ""
        of = given.get(getattr(getattr(given_type, "value", None), "id", ""))
        name = str(getattr(of, "dtype", "")).removeprefix("torch.") if name == "dtype" else name
        names.append(name if hasattr(torch, name) else "")
    return names


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
        makes = {"eye": known, "arange": known} | dict.fromkeys(
            ("zeros", "empty", "ones", "full"), new
        )
        if name in ("array", "asarray"):
            return lambda one, *args, **named: (
                one if isinstance(one, Value) else real(one, *args, **named)
            )
        if name not in makes:
            return real
        return lambda *args, **kwargs: makes[name](real(*args, **kwargs))


def _with_own(function: Any) -> Callable:
    """A function that makes its new tensors with `_Library`."""
    function = inspect.unwrap(function)
    known = function.__globals__
    own: dict[str, Any] = {
        name: _Library(one) for name, one in known.items() if one is np or one is torch
    }
    own["int"] = lambda *args: args[0] if isinstance(args[0], Value) else int(*args)
    rest = function.__name__, function.__defaults__, function.__closure__
    return types.FunctionType(function.__code__, {**known, **own}, *rest)


@contextlib.contextmanager
def _converting() -> Iterator[None]:
    """Take values where a reference turns arrays into tensors."""
    reals = {name: getattr(torch, name) for name in ("as_tensor", "tensor", "from_numpy")}

    def own(name: str, one: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(one, Value):
            return one.seen(reals["as_tensor"](one.number))
        return reals[name](one, *args, **kwargs)

    try:
        for name in reals:
            setattr(torch, name, functools.partial(own, name))
        yield
    finally:
        for name, real in reals.items():
            setattr(torch, name, real)


# --- lines ----------------------------------------------------------------------------------------
def _written(asked: Asked) -> str:
    """The text of a kernel."""
    names = [one.arg for one in asked.tree.args.args]
    arguments = [*asked.arguments]
    as_rows = f".reshape({tuple(asked.results[0].shape)})"
    for number, one in enumerate(arguments):
        if np.ndim(one):
            text = names[number] + as_rows * any(asked.flat[number : number + 1])
            axes = tuple(Axis(size, size) for size in one.shape)
            casts = asked.casts[number]
            arguments[number] = Value(one, text, (), names[number], axes=axes, casts=casts)
    lines = Lines({*names, "i_row", "i_column"})
    made, stores = [], list[tuple[Value, Value]]()
    with _converting():
        found = _listed(asked.function(*arguments))
    for result, whole, dtype in zip(found, asked.results, asked.dtypes):
        if not isinstance(result, Value):
            raise Cannot
        tile, name = on_chip(result), lines.named("result_hbm")
        if dtype != "float32":
            tile = tile.seen(whole, make=f"nl.copy({{0}}, dtype=nl.{dtype})", parts=(tile,))
        axes = tuple(Axis(size, size) for size in whole.shape)
        text = name + as_rows * bool(asked.flat)
        stores.append((Value(whole, text, (), name, result.column, axes), tile))
        shape = asked.shape or tuple(whole.shape)
        made.append(f"{name} = nl.ndarray({shape}, dtype=nl.{dtype}, buffer=nl.shared_hbm)")
        lines.count(tile)
    for _, some in itertools.groupby(stores, lambda one: one[1].turns):
        lines.store([*some])
    made += rolled(lines.closed())
    made.append(f"return {', '.join(to.hint for to, _ in stores)}")
    if len(made) > LONGEST:
        raise Cannot
    head = f"def {asked.tree.name}({ast.unparse(asked.tree.args)}):"
    text = "\n    ".join([head, *made]) + "\n"
    kept = dict.fromkeys(re.findall(r"\bkept\d+_hbm\b", text))
    for number, one in enumerate(kept):
        text = text.replace(one, f"kept{number + 1}_hbm")
    return text


class Lines:
    """The lines that make values, each once; those of a loop inside of others.

    Attributes:
        said: so far, and the lines of loops between them.
        loop, turns: whose lines they are.
    """

    def __init__(self, taken: set[str], outer: "Lines | None" = None) -> None:
        self.said: list[str | Lines] = []
        self.outer, self.loop, self.turns = outer, "", 1
        self.names = dict[int, str]()
        self.taken = taken
        root = outer or self
        if outer is None:
            self.uses: Counter[int] = Counter()
            self.keys: dict[int, tuple[int, Value]] = {}  # with the value, else its id is another's
            self.numbers: dict[Any, int] = {}
            self.loops: dict[int, frozenset[str]] = {}
        else:
            self.uses, self.keys, self.numbers, self.loops = (
                root.uses,
                root.keys,
                root.numbers,
                root.loops,
            )

    def inside(self, loop: str, turns: int) -> "Lines":
        """The lines of a loop, which `end` puts here."""
        inner = Lines(self.taken, self)
        inner.loop, inner.turns = loop, turns
        return inner

    def end(self, to: "Lines") -> None:
        """Put loops inside of others up to `to`, behind what was made before them."""
        if self is not to and self.outer is not None:
            self.outer.said.append(self)
            self.outer.end(to)

    def closed(self) -> list[str]:
        """All lines so far."""
        made = []
        for one in self.said:
            if isinstance(one, str):
                made += one.splitlines()
            elif one.said:
                made.append(f"for {one.loop} in range({one.turns}):")
                made += ["    " + line for line in one.closed()]
        return made

    def store(self, stores: Sequence[tuple[Value, Value]]) -> None:
        """Store tiles of the same loops to HBM."""
        inner = self
        for loop, turns in stores[0][1].turns.items():
            inner = inner.inside(loop, turns)
        texts = [inner.text(tile) for _, tile in stores]
        inner.said += [f"nl.store({in_hbm(to)}, {text})" for (to, _), text in zip(stores, texts)]
        inner.end(self)

    def count(self, value: Value) -> None:
        """See how often each value is taken, before any line is written."""
        key = self._key(value)
        self.uses[key] += 1
        if self.uses[key] == 1:
            often = "\nfor " in value.make  # a loop takes it often
            for one in value.parts[value.hint == "stage" :] * (2 if often else 1):
                self.count(one)

    def _key(self, value: Value) -> int:
        """The same number for what is made alike, but for what changes in place."""
        if id(value) not in self.keys:
            alike = id(value.tile) if value.hint == "new" else 0
            made = value.make, tuple(map(self._key, value.parts)), alike, value.over
            self.keys[id(value)] = self.numbers.setdefault(made, len(self.numbers)), value
        return self.keys[id(value)][0]

    def _depends(self, value: Value) -> frozenset[str]:
        """The loops of which a value is another in each turn."""
        key = self._key(value)
        if key not in self.loops:
            parts = value.parts[1:] if value.hint == "stage" else value.parts
            found = {*LOOPS.findall(value.make)}.union(*map(self._depends, parts))
            ends = {*parts[0].turns} if value.hint == "stage" else {value.loop[0]}
            self.loops[key] = frozenset(found - ends)
        return self.loops[key]

    def _home(self, value: Value) -> "Lines":
        """The lines among which a value is made: those of the innermost loop of which it is."""
        home: Lines = self
        if value.hint == "new" or value.make.startswith("nisa."):  # in place
            return self
        while home.outer is not None and home.loop not in self._depends(value):
            home = home.outer
        return home

    def text(self, value: Value) -> str:
        """The name or expression of a value, whose lines are said before."""
        key, level = self._key(value), self
        while key not in level.names and level.outer is not None:
            level = level.outer
        return level.names[key] if key in level.names else self._home(value)._made(key, value)

    def _made(self, key: int, value: Value) -> str:
        if value.hint == "stage":
            to, tile, *before = value.parts
            for one in before:
                self.text(one)
            self.said += [value.make] * bool(value.make)
            self.store([(to, tile)])
            self.names[key] = ""
            return ""
        if value.over:
            name = self.named(value.hint + "_sb")
            self.said.append(value.make.replace("{to}", name))
            inner = self.inside(*value.loop)
            text = inner.text(value.parts[0])
            inner.said.append(value.over.replace("{to}", name).format(text))
            inner.end(self)
            self.names[key] = name
            return name
        parts = [self.text(one) for one in value.parts]
        text = value.make.format(*parts, to="{to}")
        if value.make.startswith("nisa."):  # in place
            self.said.append(text)
            text = parts[0]
        elif not value.make.startswith(("{0}[", "{0}.")) and value.make != "{0}":
            short = (
                self.uses[key] == 1
                and len(re.sub(r"\d+", "#", text)) < INLINE
                and "{to}" not in text
            )
            if short and value.hint != "new":
                return text
            hint = value.hint + "_sb" * (not value.hint.endswith("_psum"))
            name = self.named(hint)
            text = text if "{to}" in text else f"{{to}} = {text}"
            self.said.append(text.replace("{to}", name))
            text = name
        self.names[key] = text
        return text

    def named(self, base: str) -> str:
        """A name that nothing has yet."""
        every = itertools.chain([base], (f"{base}{n}" for n in itertools.count(2)))
        name = next(one for one in every if one not in self.taken)
        self.taken.add(name)
        return name
