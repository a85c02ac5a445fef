"""Names of closed packages that public files import: they stand for something that refuses to run.

A package of the stand-in names with `stand_for` which of its parts it lacks. Modules below them can
be imported, whatever their names, and whatever is imported from them is a `Closed`. `name_modules`
makes modules whose names stand elsewhere in the stand-in.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_PACKAGES: set[str] = set()
NAMED: dict[str, Mapping[str, str]] = {}  # of `name_modules`, by the whole name of the module


class Closed:
    """Stands for a kernel, a type or a constant that only the installed SDK has.

    A kernel refuses to be called. A type, whose name begins with a capital letter, gives a value
    that says as little: settings of kernels are made where files are imported.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> Closed:
        if self.__name__.rpartition(".")[2][:1].isupper():
            return Closed(self.__name__)
        if self.__name__.startswith("nkilib."):
            raise NotImplementedError(
                f"{self.__name__} is a kernel of nki-library, which is not installed; put the "
                "folder of aws-neuron/nki-library that holds `nkilib` on PYTHONPATH."
            )
        raise NotImplementedError(
            f"{self.__name__} is a closed kernel of the Neuron SDK and does not exist in "
            "neuron_cpu; switch off the NeuronConfig option that asks for it, write a kernel of "
            "your own, or take the source where it is public (aws-neuron/nki-samples has flash_fwd "
            "and others)."
        )

    def __getitem__(self, grid: Any) -> Closed:
        return self

    def __getattr__(self, name: str) -> Closed:
        if name.startswith("__"):
            raise AttributeError(name)
        return Closed(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple) -> tuple:
        """Classes that are made from a closed one are classes without it."""
        return ()

    def __repr__(self) -> str:
        return f"<{self.__name__}, closed>"


class _Module(ModuleType):
    __getattr__ = Closed.__getattr__  # type: ignore[assignment]


class _Finder(importlib.abc.Loader):
    """Finds modules of both tables that no other finder has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        named = any(f"{module}.".startswith(f"{name}.") for module in NAMED)
        closed = any(f"{name}.".startswith(f"{package}.") for package in _PACKAGES)
        if not named and not closed:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        named = any(f"{module}.".startswith(f"{spec.name}.") for module in NAMED)
        return None if named else _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, place in NAMED.get(module.__name__, {}).items():
            source, _, other = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(source), other))


_FINDER = _Finder()


def _find() -> None:
    if _FINDER not in sys.meta_path:  # behind all others: what exists goes first
        sys.meta_path.append(_FINDER)


def stand_for(*packages: str) -> None:
    """Make the modules `packages`, and modules below them, importable."""
    _PACKAGES.update(packages)
    _find()


def name_modules(package: str, modules: str) -> None:
    """Make modules below `package` importable that have no file of their own.

    `modules` has a line for each: its name, the module that its names come from (of the package
    where it begins with a dot), and the names, as NAME=OTHER where they are others there.
    """
    for line in modules.strip().splitlines():
        module, home, *names = line.split()
        source = f"{package}{home}".rstrip(".") if home[0] == "." else home
        pairs = (name.partition("=") for name in names)
        places = {name: f"{source}:{other or name}" for name, _, other in pairs}
        NAMED[f"{package}.{module}"] = places
    _find()
