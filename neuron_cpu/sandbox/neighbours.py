"""What a stranger's Python file imports beside it, found in its text; nothing of it runs."""

import ast
import contextlib
import functools
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_OWN_PACKAGES = ("harness", "neuron_cpu", "tests")


def root_of(path: Path) -> Path:
    """The folder that a file's absolute imports begin in: above the packages around it."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def files(path: Path) -> list[Path]:
    """The file, then every file of its own that it imports: files below its root, and all of
    a package in which it does not lie. Files of this project or of an environment do not count."""
    root, found, waiting = root_of(path), [], [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for name in sorted(_imported_names(file, root)):
            first, *rest = name.split(".")
            if root == REPOSITORY and first in _OWN_PACKAGES:
                continue
            if (root / first).is_dir() and root / first not in path.parents:
                waiting += sorted((root / first).rglob("*.py"))
                continue
            places = [root.joinpath(first, *rest[:n]) for n in range(len(rest) + 1)]
            beside = [place.with_name(f"{place.name}.py") for place in places]
            inside = [place / "__init__.py" for place in places]
            waiting += [place for place in (*beside, *inside) if place.is_file()]
    return [found[0], *sorted(found[1:])]


def _imported_names(file: Path, root: Path) -> set[str]:
    """Modules, and what they give that may be one, that a file imports anywhere in it, or names to
    import_module."""
    found = set()
    for level, name in _imports(_text(file)):
        above = file.parents[level - 1].relative_to(root).parts if level else ()
        found.add(".".join([*above, name]))
    return {name for name in found if name.partition(".")[0]}


@functools.lru_cache(256)
def _imports(text: bytes) -> frozenset[tuple[int, str]]:
    """How many folders up each name of a text begins, and the name."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, [node.module, alias.name])) for alias in node.names]
            found |= {(node.level, name) for name in names}
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "attr", ""),
            getattr(node.func, "id", ""),
        ):
            found |= {(0, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant)}
    return frozenset(found)


def _text(file: Path) -> bytes:
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


def tree(file: Path) -> ast.AST:
    """The syntax tree; empty where a file is no Python."""
    return _parsed(_text(file))


def _parsed(text: bytes) -> ast.AST:
    try:
        with contextlib.suppress(SystemError):  # CPython 3.11, where another thread parses, too
            return ast.parse(text)
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])
