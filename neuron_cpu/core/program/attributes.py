"""Constants of an instruction: the questions of every consumer, and equality."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from ..device.spec import Engine

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from .program import Instruction
else:

    def dataclass_transform(**_: Any) -> Callable:
        """Who checks types asks; typing has it from Python 3.11 on, and core needs numpy alone."""
        return lambda made: made


A = TypeVar("A", bound="Attrs")
T = TypeVar("T")


def among(values: Iterable[Any], default: Any = MISSING) -> Any:
    """A field whose value, or each item of whose tuple, is one of ``values``."""
    return field(default=default, metadata={"among": frozenset(values)})


# `constants` repeats these for derived classes; mypy needs them by name here, for `replace`.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Attrs:
    """The constants of one instruction; entries with further constants derive from it.

    Nobody changes one after it was recorded: a Program shares one object between all instructions
    with the same ``key``.

    Attributes:
        engine: the engine that the kernel chose, where it had a choice and made it.
        mask: elements of the first result that are written ([its shape] booleans), where a mask
            leaves something else than a box.
        raw: stored elements are moved as they are, without a way through fp32.
        bits: operands are bit patterns of integers, not numbers.
        start: a product that begins an accumulation group: it overwrites what PSUM holds.
        accumulate: the result is added to what the destination holds.
        skip: rows that data put out of bounds are left as they are instead of being an error.
        reduce_axes: last axes of the first result over which the second one reduces it, or 0.
        issuer: whose queue of hardware a transfer's descriptors come from: ``sync``, ``scalar``,
            ``any`` where the kernel leaves that open, none without that hardware.
    """

    engine: Engine | None = None
    mask: np.ndarray | None = None
    raw: bool = False
    bits: bool = False
    start: bool = False
    accumulate: bool = False
    skip: bool = False
    reduce_axes: int = 0
    issuer: str = among(("", "any", "sync", "scalar"), "")
    _key: tuple | None = field(default=None, init=False)
    _in_group: tuple[Attrs, Attrs] | None = field(default=None, init=False)

    @classmethod
    def of(cls: type[A], instruction: Instruction) -> A:
        """The attributes of an instruction whose entry has this class of them."""
        attrs = instruction.attrs
        assert isinstance(attrs, cls), (instruction.op.name, type(attrs))
        return attrs

    def misfit(self) -> str:
        """Which constant lies outside of its domain (`among`), in words; empty where none does."""
        for one in fields(self):
            allowed = one.metadata.get("among")
            given = getattr(self, one.name)
            values = given if isinstance(given, tuple) else (given,)
            if allowed is not None and not allowed.issuperset(values):
                return f"{one.name} {given!r}, expected one of {sorted(allowed)}"
        return ""

    @property
    def group(self) -> str:
        """Place in an accumulation: ``start``, ``add`` or none."""
        return "start" if self.start else "add" if self.accumulate else ""

    def grouped(self: A, first: bool) -> A:
        """The same instruction as the first or a later one of an accumulation group."""
        pair = self._in_group
        if pair is None:
            pair = replace(self, start=True), replace(self, start=False, accumulate=True)
            object.__setattr__(self, "_in_group", pair)
        return cast(A, pair[0] if first else pair[1])

    def cut(self: A, box: tuple[slice, ...]) -> A:
        """The attributes of the part that a mask leaves, for attributes that hold an array."""
        return self

    def key(self) -> tuple:
        """Equal for equal constants only, the place in an accumulation left out.

        0, 0.0, -0.0 and False differ, NaN equals itself, and arrays count by content.
        """
        if self._key is not None:
            return self._key
        values = self._constants()
        types = tuple(map(type, values))  # tell 1 from True and 1.0, faster than one by one
        if np.ndarray in types:  # their bytes are too many to keep
            return (type(self), types, *map(_exact, values))
        if float in types or tuple in types:
            values = tuple(map(_exact, values))
        found = (type(self), types, values)
        object.__setattr__(self, "_key", found)
        return found

    def identity(self) -> tuple | None:
        """The key by which a Program shares attributes; None where arrays make the look-up slow."""
        if self._key is None and np.ndarray in map(type, self._constants()):
            return None
        return (self.start, self.accumulate, self.key())

    def timed(self) -> tuple:
        """Equal for constants with which an instruction takes as long: of a number that elements
        are computed with it only matters whether it is 0."""
        return (self.start, self.accumulate, *map(_rough, self._constants()))

    def _constants(self) -> tuple:
        """All fields that ``key`` compares; asked for every instruction, so by one C call."""
        kind = type(self)
        getter = _getters.get(kind)
        if getter is None:
            names = (f.name for f in fields(kind) if f.name not in _APART)
            getter = _getters[kind] = attrgetter(*names)
        return getter(self)

    def __repr__(self) -> str:
        told = (f for f in fields(self) if f.init)
        pairs = ((f.name, getattr(self, f.name), f.default) for f in told)
        shown = [f"{name}={value!r}" for name, value, default in pairs if value is not default]
        return f"{{{', '.join(shown)}}}"


@dataclass_transform(
    frozen_default=True, kw_only_default=True, eq_default=False, field_specifiers=(field, among)
)
def constants(kind: type[T]) -> type[T]:
    """A class derived from ``Attrs``: the constants of an entry, frozen and given by keyword."""
    return dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(kind)


_APART = ("start", "accumulate", "_key", "_in_group")
_getters: dict[type[Attrs], Callable[[Attrs], tuple]] = {}  # of all other fields


def _exact(value: Any) -> Any:
    """A hashable stand-in that is equal for the same bits only."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, tuple):
        return tuple([(type(item), _exact(item)) for item in value])
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    return value


def _rough(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rough, value))
    return bool(np.all(value == 0)) if isinstance(value, (float, np.ndarray)) else value


# Of a copy that casts and one that does not: most instructions have one of these.
CAST, RAW = Attrs(), Attrs(raw=True)
