"""Values as JSON, where others may write: what is read are instances of known classes, and data.

A pickle runs its writer's code, and changes objects that it names. Data read here calls no function
or constructor, and changes no named object: an instance gets the fields of its class, and no
others.
"""

import base64
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

_HELD: dict[str, Callable[[Any], Any]] = {
    "list": list, "set": set, "dict": dict, "slice": lambda parts: slice(*parts),
    "bytes": base64.b64decode, "Path": Path,
}  # fmt: skip

_AS_THEY_ARE = frozenset((bool, int, float, str, type(None)))


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The fields of an instance, without cached ones."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [name for one in kind.__mro__ for name in one.__dict__.get("__slots__", ())]
    return tuple(name for name in names if not name.startswith("_"))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


@dataclass(frozen=True, eq=False)
class Form:
    """The classes that values may have, beside numbers, text, arrays and containers.

    Args:
        allowed: whether the instances of a class may be written and made.
        named: what goes by its name: the class, and the values by name, for each word.
        made: fields of classes and of those derived from them that whoever reads makes himself.
    """

    allowed: Callable[[type], bool]
    named: Mapping[str, tuple[type, Mapping[str, Any]]] = field(default_factory=dict)
    made: Mapping[type, frozenset[str]] = field(default_factory=dict)

    def fields(self, kind: type) -> list[str]:
        """The fields of an instance that are written."""
        apart = {name for of, names in self.made.items() if issubclass(kind, of) for name in names}
        return [name for name in _fields(kind) if name not in apart]

    def dumps(self, value: Any) -> bytes:
        """One line of JSON; a TypeError about a value of another class."""
        writer = _Writer(self)
        whole, batches = writer.plain(value), []
        while writer.new:
            kind, numbers = writer.new.popitem()
            met = [writer.met[n] for n in numbers]
            fields = [
                writer.sequence([getattr(o, name) for o in met]) for name in self.fields(kind)
            ]
            batches.append([_name(kind), numbers, fields])
        return json.dumps([whole, batches]).encode()

    def loads(self, data: bytes) -> Any:
        """Read written values back; ValueError for anything else."""
        try:
            whole, batches = json.loads(data)
            return _Reader(self, batches).made(whole)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"no record ({type(error).__name__}: {error})") from error


class _Writer:
    """Instances are numbered as they are met; those of a class follow together, field by field.

    Attributes:
        new: numbers by class of instances whose fields are to be written.
    """

    def __init__(self, form: Form) -> None:
        self._form, self.met, self._numbers = form, list[Any](), dict[int, int]()
        self.new: dict[type, list[int]] = {}
        self._objects: dict[type, bool] = {}

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is tuple:
            return self.sequence(value)
        if self._is_object(kind):
            return {"object": self._number(value)}
        for word, (of, _) in self._form.named.items():
            if isinstance(value, of):
                return {word: value.name}  # type: ignore[attr-defined]
        if kind in (list, set):
            return {kind.__name__: self.sequence(tuple(value))}
        if kind is dict:
            return {"dict": [[self.plain(k), self.plain(v)] for k, v in value.items()]}
        if kind is slice:
            return {"slice": [value.start, value.stop, value.step]}
        if kind is np.ndarray:
            return {"array": [value.dtype.name, list(value.shape), _text(value.tobytes())]}
        if kind is bytes:
            return {"bytes": _text(value)}
        if isinstance(value, Path):
            return {"Path": str(value)}
        if isinstance(value, np.generic):
            return self.plain(value.item())
        if not self._form.allowed(kind):
            raise TypeError(f"a {kind.__name__} is no plain value")
        if isinstance(value, Enum):
            return {"of": [_name(kind), value.name]}
        return {"of": [_name(kind), *map(self.plain, value)]}

    def sequence(self, values: Sequence[Any]) -> Any:
        """The form of a tuple: numbers of instances, or its values."""
        kinds = {*map(type, values)}
        if kinds <= _AS_THEY_ARE:
            return list(values)
        if all(map(self._is_object, kinds)):
            return {"objects": [self._number(one) for one in values]}
        return [self.plain(one) for one in values]

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self.met))
        if number == len(self.met):
            self.met.append(value)
            self.new.setdefault(type(value), []).append(number)
        return number

    def _is_object(self, kind: type) -> bool:
        if kind not in self._objects:
            apart = (tuple, Enum, np.generic, Path, *(of for of, _ in self._form.named.values()))
            self._objects[kind] = not issubclass(kind, apart) and self._form.allowed(kind)
        return self._objects[kind]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Reader:
    def __init__(self, form: Form, batches: list[Any]) -> None:
        self._form = form
        order = [number for _, numbers, _ in batches for number in numbers]
        if sorted(order) != list(range(len(order))):  # else one would get the fields of another
            raise ValueError("instances that are not numbered")
        self._met: list[Any] = [None] * len(order)
        kinds = [self._kind(name) for name, _, _ in batches]
        for kind, (_, numbers, _) in zip(kinds, batches):
            for number in numbers:
                self._met[number] = object.__new__(kind)
        for kind, (_, numbers, columns) in zip(kinds, batches):
            for name, column in zip(self._form.fields(kind), columns, strict=True):
                for number, value in zip(numbers, self.made(column), strict=True):
                    object.__setattr__(self._met[number], name, value)

    def _kind(self, name: str) -> Any:
        module, _, own = name.partition(":")
        found = getattr(sys.modules.get(module), own, None)  # nothing is imported
        if not (isinstance(found, type) and _name(found) == name and self._form.allowed(found)):
            raise ValueError(f"{name!r:.80} is no class of such a record")
        return found

    def made(self, found: Any) -> Any:
        if isinstance(found, list):
            if {*map(type, found)} <= _AS_THEY_ARE:
                return tuple(found)
            return tuple([self.made(one) for one in found])
        if not isinstance(found, dict):
            return found
        ((word, content),) = found.items()
        if word == "object":
            return self._met[content]
        if word == "objects":
            return tuple([self._met[number] for number in content])
        if word in self._form.named:
            return self._form.named[word][1][content]
        if word == "array":
            dtype, shape, data = content
            return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape)
        if word == "of":
            kind = self._kind(content[0])
            if issubclass(kind, Enum):
                return kind[content[1]]
            return tuple.__new__(kind, self.made(content[1:]))
        return _HELD[word](self.made(content))
