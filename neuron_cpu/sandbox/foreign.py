"""Strangers' files as modules, from their text: byte code beside them is neither read nor written.

`__pycache__` may hold byte code of another text, which Python would run in the place of the file.
"""

import difflib
import linecache
import os
import re
import sys
import traceback
import types
import zipfile
from collections.abc import Collection
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

_folders: set[str] = set()  # of strangers
_others: set[str] = set()  # of Python and of packages that are imported; they may lie in a folder


class _Text(SourceFileLoader):
    """The loader of a source file without caches."""

    def get_code(self, name: str) -> Any:
        path = self.get_filename(name)
        try:
            return self.source_to_code(self.get_data(path), path)
        except (MemoryError, RecursionError) as error:
            raise SyntaxError(
                f"{path} is nested too deeply for Python's compiler, expected fewer levels of "
                "brackets or blocks; take it apart"
            ) from error


class _Neighbours:
    """Modules of strangers' folders, for the files of the same folder only, and where nobody else
    has a module of that name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = os.path.dirname(_importer())
        while path is None and folder != os.path.dirname(folder):
            if folder in _folders and _is_strangers(folder):
                return _finder(folder).find_spec(name)
            folder = os.path.dirname(folder)
        return None


def imported(path: Path, name: str, text: str | None = None) -> types.ModuleType:
    """Run a file, or a text in its place, as a module that `sys.modules` knows by the name."""
    loader = _Text(name, str(path))
    if text is not None:
        loader.get_data = lambda path: text.encode()  # type: ignore[method-assign]
        linecache.cache[str(path)] = len(text), None, text.splitlines(True), str(path)
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader, origin=str(path))
    module.__file__, module.__loader__ = str(path), loader
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def place_of(error: BaseException, files: Collection[str]) -> tuple[str, int] | None:
    """(file, line): the innermost of some files in the error's traceback, or where one of them is
    no Python; None where it did not pass there."""
    if isinstance(error, SyntaxError) and error.filename and error.filename in files:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno or 0) for f in frames if f.filename in files]
    return places[-1] if places else None


def put_first(folder: Path) -> None:
    """Look in a stranger's folder first, as in a script's: in a process of the stranger's alone."""
    _know(folder)
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]


def put_last(folder: Path) -> None:
    """Let the files of a folder import each other in this process, which imports none of them."""
    _know(folder)
    if _Neighbours not in sys.meta_path:
        sys.meta_path.append(_Neighbours)  # type: ignore[arg-type]


def _know(folder: Path) -> None:
    _folders.add(str(folder))
    _others.update(one.rstrip("/") for one in sys.path)
    for module in list(sys.modules.values()):
        place = getattr(module, "__dict__", {}).get("__path__")  # getattr may import something
        spec = getattr(module, "__dict__", {}).get("__spec__")  # None of one made by hand
        if type(place) is list and not isinstance(getattr(spec, "loader", None), _Text):
            _others.update(place)
    if _hook not in sys.path_hooks:
        sys.path_hooks.insert(0, _hook)
    for place in [place for place in sys.path_importer_cache if _is_strangers(place)]:
        del sys.path_importer_cache[place]


def _hook(place: str) -> FileFinder:
    if not _is_strangers(place):
        raise ImportError("a place of this program or of Python")
    if os.path.isfile(place) and not zipfile.is_zipfile(place):  # a script, which runpy asks about
        raise ImportError("no folder")
    return _finder(place)


def _finder(place: str) -> FileFinder:
    return FileFinder(place, (_Text, [".py"]))


def _is_strangers(place: str) -> bool:
    """Whether the innermost known place around a folder is a stranger's."""
    around = place
    while around not in _folders and around not in _others and around != os.path.dirname(around):
        around = os.path.dirname(around)
    return around in _folders


def _importer() -> str:
    """The file whose statement imports."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals
        if names is not globals() and not str(names.get("__name__")).startswith("importlib"):
            return os.path.realpath(frame.f_code.co_filename)
        frame = frame.f_back
    return ""


def python_files(folder: Path) -> list[Path]:
    """Those of a folder and of the folders in it."""
    return [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]


def meant(path: Path) -> str:
    """What to write for a path that is no Python file."""
    if "\0" in str(path):
        return "correct it"
    found = python_files(path if path.is_dir() else path.parent)
    if not path.is_dir():
        stem = re.split(r"[./\\]", str(path).removesuffix(".py"))[-1]
        close = difflib.get_close_matches(stem, [p.stem for p in found], 1, 0.7)
        found = [p for p in found if p.stem in close]
    return f"write {' or '.join(map(str, found[:3]))}" if found else "correct it"
