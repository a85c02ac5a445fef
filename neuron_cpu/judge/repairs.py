"""Which small change of a kernel's source makes its results the reference's?

Each change of `edits` is traced and run on the failing values, with the functions of the kernel's
file as its author wrote them; one counts that is legal and right on all values that are tried.
"""

import ast
import contextlib
import copy
import io
import linecache
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Optional

from ..core.program.source import names_of, reachable, tree_of
from .edits import Edit, Guard, edits, of_globals

MOST = 3  # lines that are named
TURNS = 64  # of loops beyond four times the kernel's own


class Enough(Exception):
    """No more changes are to be tried."""


class _TooLong(Exception):
    """A change makes loops run far more often than the kernel's."""


class Source:
    """The functions that a function reaches in its module, as trees that can be changed."""

    def __init__(self, function: Callable) -> None:
        self.root = getattr(function, "__name__", "")
        self.trees: list[tuple[str, ast.FunctionDef]] = []
        self.code: dict[int, CodeType] = {}
        self.known: dict[str, Any] = {}
        self.turns, self.limit = 0, 1 << 30
        for one, owner in reachable(function):
            tree = tree_of(one) if owner is None else None
            if tree is not None:
                tree = copy.deepcopy(tree)
                tree.decorator_list = []
                _guard(tree)
                self.trees.append((one.__code__.co_filename, tree))
                self.known = {**names_of(one), **self.known}
        if self.trees:
            self.root = self.trees[0][1].name
        self.code = {id(tree): _compiled(file, tree) for file, tree in self.trees}

    def build(self, changed: Optional[ast.AST] = None) -> Callable:
        """The function as it stands in the trees, of which one has changed."""
        names = {**self.known, "__turn": self._turn}
        for file, tree in self.trees:
            exec(_compiled(file, tree) if tree is changed else self.code[id(tree)], names)
        self.turns = 0
        return names[self.root]

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > self.limit:
            raise _TooLong

    def changed(self) -> Iterator[tuple[Edit, str, Callable]]:
        """Each change, the file, and the function that has it."""
        self.limit = 4 * self.turns + TURNS
        found = [(f, tree, one) for f, tree in self.trees for one in edits(tree, self.known)]
        for file in dict.fromkeys(file for file, _ in self.trees):
            lines = "".join(linecache.getlines(file))
            found += [(file, self.trees[0][1], one) for one in of_globals(lines, self.known)]
        for file, tree, edit in sorted(found, key=lambda some: some[2].rank):
            before = edit.swap(edit.new)
            if not isinstance(edit.holder, dict):
                _place(edit)
            try:
                made = self.build(tree)
            except Exception:  # no legal Python, or a default that is not known here
                continue
            finally:
                edit.swap(before)
            yield edit, file, made


def _guard(tree: ast.FunctionDef) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            call = ast.Call(ast.Name("__turn", ast.Load()), [], [])
            node.body.insert(0, ast.copy_location(Guard(call), node.body[0]))


def _compiled(file: str, tree: ast.FunctionDef) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Module([tree], [])), file, "exec")


def _place(edit: Edit) -> None:
    """Give what is new its line."""
    for one in edit.new if isinstance(edit.new, list) else [edit.new]:
        for node in ast.walk(one):
            if not hasattr(node, "lineno"):
                node.lineno = node.end_lineno = edit.line  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]


def repairs(function: Callable, right: Callable[[Callable], bool]) -> list[str]:
    """Changes of a function that make it right, each with its place, the likeliest first.

    Args:
        right: whether a changed function is. It may raise what the function does, or `Enough` where
            no more are to be tried.
    """
    source = Source(function)
    found: dict[tuple[str, int], str] = {}
    rank = -1
    with _quiet():
        with contextlib.suppress(Exception, SystemExit):
            right(source.build())
        for edit, file, made in source.changed():
            place = file, edit.statement
            if found and edit.rank > rank or len(found) == MOST:
                break
            try:
                if place not in found and right(made):
                    found[place] = f"{file}:{edit.line}: with {edit.words()}"
                    rank = edit.rank
            except Enough:
                break
            except (Exception, SystemExit):
                continue  # no legal kernel
    return list(found.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
