"""Names that NKI does not have, answered with those that it has.

Whoever comes from numpy, PyTorch or CUDA writes ``nl.dot``, ``tile.T`` or ``np.mean(tile)``, and so
does every language model. One sentence refuses each and names the call that does it. An answer
holds for both languages unless it is a pair: for ``neuronxcc.nki`` first, for ``nki`` second.
"""

import difflib
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import EnumMeta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import written
from .errors import NkiError, current_place, users_line

Answer = str | list[str]
_ALIKE = 0.7  # of difflib: at 0.6 dot_general is like not_equal
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class UnknownName(NkiError, AttributeError):
    """A name that a module or a tile of NKI lacks; an AttributeError, so ``hasattr`` is False."""


class ForeignCall(NkiError, TypeError):
    """A tile handed to an operator or to a function of another library."""


DATA = Path(__file__).with_name("unknown.json")


def _read() -> dict[str, Any]:
    """The tables: names, separated by blanks, and what to use."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    known = {f"={name}": found for name, found in data["answers"].items()}
    for room in ("names", "isa", "gone", "launch", "types", "package", "calls"):
        data[room] = {
            name: known.get(found, found) if isinstance(found, str) else found
            for names, found in data[room].items()
            for name in names.split()
        }
    return data


_DATA = _read()
# Of `nisa` apart: there the arithmetic of an instruction is an argument. GONE has what only one of
# the two languages has, and what the other one has for it.
ANSWERS: Mapping[str, Answer] = _DATA["names"]
ISA_ANSWERS: Mapping[str, Answer] = _DATA["isa"]
GONE: Mapping[str, Answer] = _DATA["gone"]
_OWN: Mapping[str, Mapping[str, Answer]] = {
    "nl": _DATA["types"],
    "nisa": ISA_ANSWERS,
    "nki": _DATA["package"],
}
KEYWORDS: Mapping[str, str] = _DATA["keywords"]  # of other languages: those of this one
EXAMPLES: Mapping[str, str] = _DATA["examples"]  # of arguments that a call lacks
CALLS: Mapping[str, str] = _DATA["calls"]  # of keywords and functions: what mends their call
LAUNCH: Mapping[str, str] = _DATA["launch"]  # what calls of kernels have in other languages
PYTHONS: Mapping[str, str] = _DATA["python"]  # of Python's own errors: what mends them
DUNDERS: Mapping[str, str] = _DATA["dunders"]  # of Python's operators: functions of nl
_SHARED = frozenset(_DATA["shared"].split())  # functions of both languages, methods elsewhere
_VAGUE = [_DATA["answers"][name] for name in ("new", "values")]
_RENAMED = {word: found.split()[0] for word, found in KEYWORDS.items()}
# functions of Python, of one argument or of several: those of nl that do so with tiles
_PYTHONS_OWN = {("max", True): "maximum", ("min", True): "minimum", ("pow", True): "power",
                ("any", False): "max", ("sorted", False): "sort"}  # fmt: skip


def answer(name: str, current: bool, alias: str = "") -> str | None:
    """The advice instead of ``name`` in one of the two languages; None where no advice is known."""
    lower = _HUMP.sub("_", name).lower()  # atomicAdd
    for table in (_OWN.get(alias, {}), ANSWERS, GONE):
        found = table.get(name, table.get(lower))
        text = found[current] if isinstance(found, list) else found
        if text:
            return text
    return None


def _of_a_word(name: str, current: bool, alias: str) -> str | None:
    """The advice for a word of a name: dot_general is a product, warp_reduce_sum reduces."""
    first, *more = _HUMP.sub("_", name).lower().split("_")
    for word in (first, *reversed(more)):
        found = answer(word, current, alias) or of_function(word)
        if found and found not in _VAGUE:  # tensor_..., get_...
            return found
    return None


def of_module(
    alias: str, names: Mapping[str, Any], current: bool, **known: Callable[[], Any]
) -> Callable[[str], Any]:
    """A module's ``__getattr__``: refuses a name that it lacks. ``alias`` is nl, nisa or nki.

    ``known``: names whose values are found when they are asked for.
    """

    def missing(name: str) -> Any:
        __tracebackhide__ = True  # notebooks and pytest leave this entry out
        if name in known:
            return known[name]()
        if name.startswith("_"):
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        use = answer(name, current, alias)
        other, room = ("nisa", "isa") if alias == "nl" else ("nl", "language")
        package = names["__name__"]
        package = package if alias == "nki" else package.rpartition(".")[0]
        operator = (
            alias == "nisa" and written.nodes()[1:2] and written.function() != name
        )  # op=nisa.add
        if (use is None or operator) and name in vars(
            sys.modules.get(f"{package}.{room}", difflib)
        ):
            use = f"{other}.{name}"
        if name not in ANSWERS and name.lower() in names:
            use = f"{alias}.{name.lower()}"
        if use is None:
            public = [each for each in names if not each.startswith("_")]
            close = difflib.get_close_matches(name, public, 3, _ALIKE)
            use = " or ".join(f"{alias}.{each}" for each in close)
            use = use or _of_a_word(name, current, alias)
        use = use and written.filled(use, name)
        mend = f"use {use}" if use else f"dir({alias}) lists what there is"
        error = UnknownName(
            "sim_unknown_name",
            f"{alias}.{name} does not exist, expected a name of {names['__name__']}; {mend}",
            current_place(),
        )
        raise error if error.source else error.with_traceback(users_line())

    return missing


class Listed(EnumMeta):
    """An enumeration that answers names and values which it lacks with those it has."""

    def __getattr__(cls, name: str) -> NoReturn:
        __tracebackhide__ = True
        if name.startswith("_"):
            raise AttributeError(name)
        raise no_member(f"nisa.{cls.__name__}", f".{name}", cls.__members__)


def no_member(owner: str, asked: str, members: Iterable[str]) -> UnknownName:
    """The error of a name that an enumeration or a table of limits lacks."""
    known = [one for one in members if not one.startswith("_")]
    close = difflib.get_close_matches(asked, known, 3, 0.4) or known
    error = UnknownName(
        "sim_unknown_name",
        f"{owner}{asked} does not exist, expected one of its {len(known)} names; use "
        + " or ".join(f"{owner}.{one}" for one in close),
        current_place(),
    )
    return error if error.source else error.with_traceback(users_line())


class Affine:
    """What index expressions and masks answer to attributes that arrays have."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownName(
            "sim_unknown_name",
            f"index expressions and masks have no .{name}, expected integer arithmetic, "
            "comparisons and [:, None]; use nisa.iota for a tile of the numbers, and give each "
            "nl.arange its own axis",
            current_place(),
        )


_NO_VALUES = "values, which a tile has none of while a kernel is traced"


class Foreign:
    """What tiles answer to attributes, operators and functions that other libraries have."""

    __slots__ = ()
    current_language = False

    label: Callable[[], str]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        use = answer(name, self.current_language) or of_function(name, True)
        if use is None:
            close = difflib.get_close_matches(name, [*vars(type(self)), "shape", "ndim"], 1, 0.75)
            use = f".{close[0]}" if close else "functions of nl and nisa"
        use = written.filled(use, name, True)
        raise UnknownName(
            "sim_unknown_name",
            f"a tile has no .{name} (of {self.label()}), expected what tiles have (shape, dtype, "
            f"slices, reshape); use {use}",
            current_place(),
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Any:
        python = getattr(operator, _DATA["ufuncs"].get(ufunc.__name__, ufunc.__name__), None)
        scalar = len(inputs) == 2 and isinstance(inputs[0], np.generic)
        if method == "__call__" and scalar and python is not None:
            return python(inputs[0].item(), inputs[1])  # np.float32(2) * tile
        raise self._refused(f"np.{ufunc.__name__}", ufunc.__name__)

    def __array_function__(self, func: Any, *_: Any) -> NoReturn:
        raise self._refused(f"np.{func.__name__}", func.__name__)

    def __jax_array__(self) -> NoReturn:
        error = self._refused("a function of JAX", "jax")
        raise NkiError(error.identifier, error.message, error.source)  # JAX hides a TypeError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func)).strip("_")
        given = [*args, *(kwargs or {}).values()]
        given += [v for value in given if isinstance(value, (list, tuple)) for v in value]
        tile = next(value for value in given if isinstance(value, Foreign))
        raise tile._refused(f"torch's {name}", name)

    def _refused(self, what: str, name: str, expected: str = _NO_VALUES) -> ForeignCall:
        """The error of a function or operator that takes no tile."""
        use = answer(name, self.current_language) or of_function(name)
        use = written.filled(use or "functions of nl and nisa", name)
        return ForeignCall(
            "sim_foreign_call",
            f"{what} got {self.label()}, expected {expected}; use {use}",
            current_place(),
        )


def of_function(name: str, method: bool = False) -> str | None:
    """The function of nl by the same name, which both languages have, as the line has it."""
    return written.rewritten(name, _RENAMED, method) if name in _SHARED else None


def of_call(current: bool) -> str | None:
    """What the function has in NKI that the user's line hands a tile: Python's, math's."""
    name = written.function()
    several = len(getattr(written.call(), "args", ())) > 1
    name = _PYTHONS_OWN.get((name, several), name)
    return None if name in _DATA["kinds"].split() else of_function(name) or answer(name, current)


def _operator(symbol: str, name: str) -> Callable[..., NoReturn]:
    def refuse_it(self: Foreign, *_: Any) -> NoReturn:
        raise self._refused(f"operator {symbol}", name, "an operator that tiles have")

    return refuse_it


# Operators of Python that neither language has: how they are written, and whose answer they get.
for _name, (_symbol, _asked) in _DATA["operators"].items():
    for _side in ("", "r"):  # __rabs__ is nothing to Python
        setattr(Foreign, f"__{_side}{_name}__", _operator(_symbol, _asked))
