"""Recorded programs as plain data, so that no process but a stranger's own runs a stranger's code.

The form is JSON. Classes, entries of the instruction table, types and generations go by their
names, arrays as bytes. A reader makes instances of classes that a program consists of, sets their
own fields, and calls nothing. What arrives is checked as the recorder checks it: by every entry's
own rules, then whole.
"""

import base64
import functools
import json
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core import Program
from ..core.check import verify
from ..core.device import dtypes
from ..core.device.spec import GENERATIONS, NeuronCore, using
from ..core.instructions import microscaling, ranks
from ..core.instructions.entry import TABLE, OpSpec
from ..core.program.attributes import Attrs
from ..core.program.program import Instruction
from ..core.program.storage import Frame, Loop, Source, Storage
from ..core.program.view import View

_ENTRIES = microscaling, ranks  # not imported by either language, and in the table
_APART = frozenset({"function", "macs", "plans"})  # made anew by whoever takes a program
_CLASSES = (Attrs, Frame, Instruction, Loop, Source, Storage, View)
_NAMED = {"entry": TABLE, "type": {t.name: t for t in (*dtypes.ALL, *dtypes.LATER)}}
_NAMED |= {"generation": GENERATIONS}
_KINDS = (("entry", OpSpec), ("type", dtypes.DType), ("generation", NeuronCore))
_HELD = {"list": list, "set": set, "slice": lambda parts: slice(*parts), "dict": dict}


@functools.cache
def _class(name: str) -> Any:
    module, _, own = name.partition(":")
    found = getattr(sys.modules.get(module), own, None)  # nothing is imported
    if not (isinstance(found, type) and found.__module__.startswith("neuron_cpu.core.")):
        raise ValueError(f"{name!r:.80} is no part of a program")
    return found


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """What an instance holds, but for what attributes remember of themselves."""
    names = (name for one in kind.__mro__ for name in one.__dict__.get("__slots__", ()))
    return tuple(name for name in names if not name.startswith("_"))


class _Writer:
    """Objects are numbered as they are met, and their fields follow in that order."""

    def __init__(self) -> None:
        self.met: list[Any] = []
        self._numbers: dict[int, int] = {}

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple:
            return [self.plain(one) for one in value]
        if isinstance(value, _CLASSES):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.met)
                self.met.append(value)
            return {"object": self._numbers[id(value)]}
        for name, of in _KINDS:
            if isinstance(value, of):
                return {name: value.name}  # type: ignore[attr-defined]
        if kind is dict:
            return {"dict": [[self.plain(k), self.plain(v)] for k, v in value.items()]}
        if kind in (list, set):
            return {kind.__name__: [self.plain(one) for one in value]}
        if kind is slice:
            return {"slice": [self.plain(v) for v in (value.start, value.stop, value.step)]}
        if kind is np.ndarray:
            data = base64.b64encode(value.tobytes()).decode()
            return {"array": [value.dtype.name, list(value.shape), data]}
        if isinstance(value, np.generic):
            return self.plain(value.item())
        name = f"{kind.__module__}:{kind.__qualname__}"
        content = [value.name] if isinstance(value, Enum) else [self.plain(one) for one in value]
        return {"class": [name, *content]}


class _Reader:
    def __init__(self, names: list[str]) -> None:
        kinds = list(map(_class, names))
        if not all(issubclass(kind, _CLASSES) for kind in kinds):
            raise ValueError("objects of other classes than a program has")
        self.objects = [object.__new__(kind) for kind in kinds]

    def made(self, found: Any) -> Any:
        if isinstance(found, list):
            return tuple([self.made(one) for one in found])
        if not isinstance(found, dict):
            return found
        ((form, content),) = found.items()
        if form == "object":
            return self.objects[content]
        if form in _NAMED:
            return _NAMED[form][content]
        if form == "array":
            dtype, shape, data = content
            return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
        if form in _HELD:
            return _HELD[form](self.made(content))
        kind = _class(content[0])
        if issubclass(kind, Enum):
            return kind[content[1]]
        if not issubclass(kind, tuple):
            raise ValueError(f"{content[0]!r:.80} holds no values")
        return tuple.__new__(kind, self.made(content[1:]))


def dumped(content: dict[str, Any]) -> bytes:
    """A dictionary of words and programs."""
    writer = _Writer()
    head = {
        name: {k: writer.plain(v) for k, v in vars(value).items() if k not in _APART}
        if isinstance(value, Program)
        else value
        for name, value in content.items()
    }
    fields = [
        [writer.plain(getattr(one, name)) for name in _fields(type(one))] for one in writer.met
    ]  # which grows meanwhile
    names = [f"{type(one).__module__}:{type(one).__qualname__}" for one in writer.met]
    return json.dumps([head, names, fields]).encode()


def loaded(data: bytes) -> dict[str, Any]:
    """What `dumped` took; programs are still to be made of their fields by `program`.

    Raises whatever bytes of another origin lead to.
    """
    head, names, fields = json.loads(data)
    reader = _Reader(names)
    for one, values in zip(reader.objects, fields, strict=True):
        for name, value in zip(_fields(type(one)), values, strict=True):
            object.__setattr__(one, name, reader.made(value))
    return {
        name: {k: reader.made(v) for k, v in told.items()} if isinstance(told, dict) else told
        for name, told in head.items()
    }


def program(content: dict[str, Any]) -> Program:
    """The program of a dictionary, checked; an NkiError where the device would refuse it."""
    fields = content["program"]
    made = Program("", (), SimpleNamespace(skips_middle_end=fields["skips_middle_end"]))
    if set(fields) != set(vars(made)) - _APART:
        raise ValueError("no program")
    vars(made).update(fields)
    with using(made.core):
        for instruction in made:
            if type(instruction.attrs) is not instruction.op.attrs:
                raise TypeError(f"{instruction.op.name} with {type(instruction.attrs).__name__}")
            _forget_keys(instruction.attrs)
            for _, view in instruction.accesses():
                _check_inside(view)
            instruction.op.check(instruction)
        verify.verify(made)
    return made


def _check_inside(view: View) -> None:
    reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    last = view.offset + sum(part for part in reach if part > 0)
    first = view.offset + sum(part for part in reach if part < 0)
    if view.by_data is None and not 0 <= first <= last < view.storage.size:
        raise IndexError(f"{view.storage.label()} has no elements {first} to {last}")


def _forget_keys(attrs: Attrs) -> None:
    """What attributes remember of themselves is not taken from others."""
    for name in ("_key", "_in_group"):
        object.__setattr__(attrs, name, None)
