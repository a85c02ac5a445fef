"""Values as JSON, where others may write: what is read are instances of known classes, and data.

A pickle runs code of whoever has written it, and changes what it names. Nothing of what this reads
calls a function or a constructor, and nothing that it names is changed: an instance gets the fields
of its class, and no others.
"""

import base64
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

_HELD: dict[str, Callable[[Any], Any]] = {
    "list": list, "set": set, "dict": dict, "slice": lambda parts: slice(*parts),
    "bytes": base64.b64decode, "Path": Path,
}  # fmt: skip


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """What an instance holds, but for what it remembers of itself."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = [name for one in kind.__mro__ for name in one.__dict__.get("__slots__", ())]
    return tuple(name for name in names if not name.startswith("_"))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class Form:
    """What values may consist of, beside numbers, text, arrays and what holds them.

    Args:
        allowed: whether the instances of a class may be written and made.
        named: what goes by its name: the class, and the values by name, for each word.
    """

    def __init__(
        self,
        allowed: Callable[[type], bool],
        named: Mapping[str, tuple[type, Mapping[str, Any]]] = {},
    ) -> None:
        self.allowed, self.named = allowed, named

    def dumps(self, value: Any) -> bytes:
        """One line of JSON; a TypeError about a value of another class."""
        writer = _Writer(self)
        whole = writer.plain(value)
        rows = [[writer.plain(getattr(o, n)) for n in _fields(type(o))] for o in writer.met]
        names = [_name(type(one)) for one in writer.met]  # as many as the fields have shown
        return json.dumps([whole, names, rows]).encode()

    def loads(self, data: bytes) -> Any:
        """What was written; a ValueError about anything else."""
        try:
            whole, names, rows = json.loads(data)
            reader = _Reader(self, names)
            for one, values in zip(reader.met, rows, strict=True):
                for name, value in zip(_fields(type(one)), values, strict=True):
                    object.__setattr__(one, name, reader.made(value))
            return reader.made(whole)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            raise ValueError(f"no record ({type(error).__name__}: {error})") from error


class _Writer:
    """Instances are numbered as they are met, and their fields follow in that order."""

    def __init__(self, form: Form) -> None:
        self._form, self.met, self._numbers = form, list[Any](), dict[int, int]()

    def plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple:
            return [self.plain(one) for one in value]
        for word, (of, _) in self._form.named.items():
            if isinstance(value, of):
                return {word: value.name}  # type: ignore[attr-defined]
        if kind in (list, set):
            return {kind.__name__: [self.plain(one) for one in value]}
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
        if isinstance(value, tuple):
            return {"of": [_name(kind), *map(self.plain, value)]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.met)
            self.met.append(value)
        return {"object": self._numbers[id(value)]}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Reader:
    def __init__(self, form: Form, names: list[str]) -> None:
        self._form = form
        self.met = [object.__new__(self._kind(name)) for name in names]

    def _kind(self, name: str) -> Any:
        module, _, own = name.partition(":")
        found = getattr(sys.modules.get(module), own, None)  # nothing is imported
        if not (isinstance(found, type) and _name(found) == name and self._form.allowed(found)):
            raise ValueError(f"{name!r:.80} is no class of such a record")
        return found

    def made(self, found: Any) -> Any:
        if isinstance(found, list):
            return tuple([self.made(one) for one in found])
        if not isinstance(found, dict):
            return found
        ((word, content),) = found.items()
        if word == "object":
            return self.met[content]
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
