"""The space of a search: keyword arguments of a kernel and constants of modules.

A name is a keyword argument if the kernel has it, otherwise a constant at the top of the kernel's
file. ``module.NAME`` is a constant of a module that the file imports. Constants are replaced in
their assignment, so values computed from them follow.
"""

import ast
import importlib.util
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest

Point = dict[str, Any]  # a value for every name
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?::(\d+))?")
DECLARED = "SPACE"  # the dict at the top of a kernel's file: name to values
MOST = 10_000  # values of one name


def parse(texts: Sequence[str], flag: str = "--space", usual: str = "NAME") -> dict[str, list[Any]]:
    """Values by name of ``tile=128,256,512``, ``rows=64..512:64`` and ``order=rows,columns``.

    Args:
        usual: the name of values that have none.

    Raises:
        UsageError: a text is none of these.
    """
    found: dict[str, list[Any]] = {}
    for i, text in enumerate(texts):
        name, equals, values = text.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")) or not values:
            words = texts[i:] if text.isidentifier() else texts[max(i - 1, 0) :]
            raise UsageError(
                f"{flag} {text!r}, expected NAME=VALUE,VALUE,... or NAME=FIRST..LAST:STEP; write "
                f"it as {flag} {_named(words, usual)}."
            )
        bare = re.sub(r"[\[\]() ]", "", values) if values[0] in "[(" else values
        bare = re.sub(r"^range\((\d+), ?(\d+)(?:, ?(\d+))?\)$", r"\1:\2:\3", bare).rstrip(":")
        bare = re.sub(r"^(\d+)[:-](\d+)(:\d+)?$", r"\1..\2\3", bare)
        match = re.fullmatch(r"(\d+)\.\.(\d+)", bare)
        if match and bare != values:  # sizes of tiles double
            times = int(match[2]) // max(int(match[1]), 1)
            sizes = [int(match[1]) << k for k in range(times.bit_length())]
            bare = ",".join(map(str, sizes)) if sizes[1:] and sizes[-1] == int(match[2]) else bare
        if bare != values:
            told = "NAME=VALUE,VALUE,... or NAME=FIRST..LAST:STEP"
            raise UsageError(f"{flag} {text}, expected {told}; write {flag} {name}={bare}.")
        found[name] = _values(values, f"{flag} {text}")
    return found


def _named(texts: Sequence[str], usual: str) -> str:
    """Words without an equals sign as a name and values."""
    words = [w.strip(":") for w in re.findall(r"[A-Za-z_]\w*|[\d.:-]+", " ".join(texts))]
    name, *values = words if words and words[0].isidentifier() else [usual, *words]
    return f"{name}={','.join(filter(None, values)) or '128,256,512'}"


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
        taken = [
            inspect.signature(one)
            for one in vars(module).values()
            if callable(one) and hasattr(one, "function")
        ]
        whole = [
            (n, p.default)
            for one in taken
            for n, p in one.parameters.items()
            if type(p.default) is int
        ]
        mend = [f"write --space {n}={d // 2},{d},{2 * d}" for n, d in whole] or ["add one"]
        raise UsageError(
            f"nothing is declared to be searched, expected --space NAME=VALUE,... or a dict "
            f"{DECLARED} in {module.__file__}; {mend[0]}."
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


# --- a kernel at a point --------------------------------------------------------------------------
class Source:
    """A kernel's file, and its text at a point.

    Attributes:
        path: the file.
        kernel: name of the kernel in it.
        module: the imported file.
    """

    def __init__(self, path: Path, kernel: str, module: types.ModuleType) -> None:
        self.path, self.kernel, self.module = path.resolve(), kernel, module
        found = getattr(module, kernel)
        self._parameters = inspect.signature(getattr(found, "function", found)).parameters

    def at(self, point: Point) -> dict[str, Any]:
        """The kernel with the constants of a point, and its tuned keyword arguments, as the oracle
        takes them (`oracle.forms.Code`).

        Raises:
            UsageError: there is no such argument, constant or module.
        """
        words, constants = [], dict[str, Point]({"": {}})
        for name, value in point.items():
            if name in self._parameters:
                words.append(f"{name}={self._written(name, value)}")
            else:
                module, _, constant = name.rpartition(".")
                constants.setdefault(module, {})[constant] = repr(value)
        texts = {
            module: _with(_file_of(module) if module else self.path, those)
            for module, those in constants.items()
        }
        made = {"name": self.kernel, "file": str(self.path), "source": texts.pop("")}
        return {**made, "modules": texts, "arguments": ", ".join(words)}

    def _written(self, name: str, value: Any) -> str:
        """A value as Python, which an object of the file's own space is by its place there."""
        try:
            if ast.literal_eval(repr(value)) == value:
                return repr(value)
        except (ValueError, SyntaxError):
            pass
        number = list(vars(self.module)[DECLARED][name]).index(value)
        return f"list({DECLARED}[{name!r}])[{number}]"

    def current(self, space: Mapping[str, Sequence[Any]]) -> Point:
        """The values that the files have now; an argument without a default has its first one."""
        found: Point = {}
        for name, values in space.items():
            module, _, constant = name.rpartition(".")
            if name in self._parameters:
                default = self._parameters[name].default
                found[name] = values[0] if default is inspect.Parameter.empty else default
            elif meant := [
                one
                for one in self._parameters
                if one.lower() in (low := name.lower(), *low.split("_"))
            ]:
                raise UsageError(f"--space names '{name}', expected {meant[0]}; write {meant[0]}=.")
            elif "." not in name and not hasattr(self.module, name):
                constants = [*filter(str.isupper, vars(self.module))]
                add = f"give the kernel an argument {name}={values[0]!r}, and use it there"
                raise UsageError(
                    f"--space names '{name}', expected an argument of the kernel "
                    f"({', '.join(self._parameters)}) or a constant of its file "
                    f"({', '.join(constants) or 'none'}); "
                    f"{nearest(name, [*self._parameters, *constants], add)}."
                )
            else:
                path = _file_of(module) if module else self.path
                _assignment(ast.parse(path.read_text(encoding="utf-8")), constant, path)
                found[name] = getattr(sys.modules[module] if module else self.module, constant)
        return found


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


def _with(path: Path, constants: Point) -> str:
    """The text of a file with other values for some constants; its lines keep their numbers."""
    text = path.read_text(encoding="utf-8")
    lines, tree = text.encode().splitlines(keepends=True), ast.parse(text)
    for constant, written in constants.items():
        value = _assignment(tree, constant, path).value
        assert value is not None and value.end_lineno is not None
        first, last = value.lineno - 1, value.end_lineno - 1
        rest = lines[last][value.end_col_offset :]
        lines[first] = lines[first][: value.col_offset] + written.encode() + rest
        lines[first + 1 : last + 1] = [b"\n"] * (last - first)
    return b"".join(lines).decode()


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
