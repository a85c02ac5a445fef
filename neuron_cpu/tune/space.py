"""What may be changed about a kernel: its keyword arguments and constants of modules.

A name is a keyword argument of the kernel where it has one of that name, a constant at the top of
the kernel's file otherwise; ``module.NAME`` is a constant of a module that the file imports.
Constants are replaced where they are assigned, so what is computed from them follows.
"""

import ast
import importlib.util
import inspect
import itertools
import math
import random
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError

Point = dict[str, Any]  # a value for every name
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::(\d+))?")
DECLARED = "SPACE"  # the dict at the top of a kernel's file: name to values
MOST = 10_000  # values of one name


def parse(texts: Sequence[str], flag: str = "--space") -> dict[str, list[Any]]:
    """Values by name of ``tile=128,256,512``, ``rows=64..512:64`` and ``order=rows,columns``.

    Raises:
        UsageError: a text is none of these.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")) or not values:
            raise UsageError(
                f"{flag} {text}, expected NAME=VALUE,VALUE,... or NAME=FIRST..LAST:STEP such as "
                "tile=128,256,512; correct it."
            )
        found[name] = _values(values, f"{flag} {text}")
    return found


def _values(text: str, whole: str) -> list[Any]:
    match = RANGE.fullmatch(text)
    if match is None:
        return list(dict.fromkeys(_value(word) for word in text.split(",")))
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    values = range(first, last + 1, step) if step else range(0)
    if not 0 < len(values) <= MOST:
        raise UsageError(
            f"{whole} has {len(values)} values, expected 1 to {MOST}; correct the range."
        )
    return list(values)


def _value(word: str) -> Any:
    try:
        found = ast.literal_eval(word)
        hash(found)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return word
    return found


def declared(module: types.ModuleType) -> dict[str, list[Any]]:
    """The values by name that a kernel's file declares itself.

    Raises:
        UsageError: it declares none, or something else than values by name.
    """
    found = getattr(module, DECLARED, None)
    if found is None:
        raise UsageError(
            f"nothing is declared to be searched, expected --space NAME=VALUE,... or a dict "
            f"{DECLARED} in {module.__file__}; add one."
        )
    fits = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(values, (list, tuple, range)) and len(values)
        for name, values in found.items()
    )
    if not fits or not found:
        raise UsageError(
            f"{DECLARED} in {module.__file__} is {found!r}, expected a dict from names to values "
            'such as {"tile": (128, 256)}; correct it.'
        )
    return {name: list(values) for name, values in found.items()}


def size(space: Mapping[str, Sequence[Any]]) -> int:
    """How many points there are."""
    return math.prod(len(values) for values in space.values())


def points(space: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """All points, the last name changing fastest."""
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values))


def drawn(space: Mapping[str, Sequence[Any]], seed: int) -> Iterator[Point]:
    """Points at random, none of them twice."""
    chance, known = random.Random(seed), set()
    while len(known) < size(space):
        point = {name: chance.choice(list(values)) for name, values in space.items()}
        key = tuple(point.values())
        if key not in known:
            known.add(key)
            yield point


_changed: set[str] = set()  # modules that stand in sys.modules with other constants than theirs


# --- a kernel at a point --------------------------------------------------------------------------
class Source:
    """A kernel's file, loaded anew for every point.

    Attributes:
        path: the file.
        kernel: name of the kernel in it.
    """

    def __init__(self, path: Path, kernel: str) -> None:
        self.path, self.kernel = path.resolve(), kernel

    def at(self, point: Point) -> tuple[Any, dict[str, Any]]:
        """The kernel with the constants of a point, and its tuned keyword arguments.

        Raises:
            UsageError: there is no such kernel, argument, constant or module.
        """
        arguments = self._arguments()
        keywords = {name: value for name, value in point.items() if name in arguments}
        constants: dict[str, Point] = {}
        for name, value in point.items():
            if name not in keywords:
                module, _, constant = name.rpartition(".")
                constants.setdefault(module, {})[constant] = value
        for module in _changed - set(constants):  # by an earlier point
            sys.modules.pop(module, None)
        _changed.update(filter(None, constants))
        folder = str(self.path.parent)
        sys.path.insert(0, folder)
        try:
            for module in filter(None, constants):
                _load(module, _file_of(module), constants[module])
            found = _load(self.path.stem, self.path, constants.get("", {}))
        finally:
            sys.path.remove(folder)
        return getattr(found, self.kernel), keywords

    def objects(self) -> Mapping[str, Any]:
        """What the file defines and imports, as it was loaded last."""
        return vars(sys.modules[self.path.stem])

    def current(self, names: Sequence[str]) -> Point:
        """The values that the files have now; names without one are left out."""
        kernel, _ = self.at({})
        parameters = self._arguments(kernel)
        found: Point = {}
        for name in names:
            module, _, constant = name.rpartition(".")
            if name in parameters:
                default = parameters[name].default
                if default is not inspect.Parameter.empty:
                    found[name] = default
            else:
                path = _file_of(module) if module else self.path
                _assignment(ast.parse(path.read_text(encoding="utf-8")), constant, path)
                found[name] = getattr(sys.modules[module or self.path.stem], constant)
        return found

    def _arguments(self, kernel: Any = None) -> Mapping[str, inspect.Parameter]:
        """Parameters of the kernel, found without a point."""
        if kernel is None:
            kernel = getattr(sys.modules.get(self.path.stem), self.kernel, None)
        if kernel is None:
            kernel = getattr(_load(self.path.stem, self.path, {}), self.kernel)
        return inspect.signature(getattr(kernel, "function", kernel)).parameters


def _file_of(module: str) -> Path:
    """The source of a module that is to be changed."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise UsageError(
            f"--space names module '{module}', expected one with a Python file that the kernel's "
            "file imports; correct the name."
        )
    return Path(found.origin)


def _load(name: str, path: Path, constants: Point) -> types.ModuleType:
    """Execute a file as module `name` with other values for some of its constants."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for constant, value in constants.items():
        assignment = _assignment(tree, constant, path)
        assignment.value = ast.copy_location(ast.parse(repr(value), mode="eval").body, assignment)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UsageError(f"{path} is no Python file, expected a name ending in .py; correct it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), vars(module))
    return module


def _assignment(tree: ast.Module, constant: str, path: Path) -> ast.Assign | ast.AnnAssign:
    """The one statement at the top of a file that gives a constant its value."""
    found: list[ast.Assign | ast.AnnAssign] = []
    known = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                known.append(target.id)
                if target.id == constant:
                    assert isinstance(node, (ast.Assign, ast.AnnAssign))
                    found.append(node)
    if len(found) != 1:
        names = ", ".join(name for name in dict.fromkeys(known) if name.isupper()) or "none"
        raise UsageError(
            f"--space names '{constant}', which is no argument of the kernel and is assigned "
            f"{len(found)} times at the top of {path}, expected once; its constants are {names}."
        )
    return found[0]
