"""The source of a kernel: its syntax tree, the names that it refers to, what it calls.

Annotations of local variables and what single tracing makes wrong stand in the source alone; a
recorded program has neither.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any


def reachable(function: Callable) -> list[tuple[FunctionType, type | None]]:
    """``function`` and what it reaches in its module, each with the class whose method it is.

    ``anything.name`` reaches the methods of that name of the classes reached: the type of
    ``anything`` is not known here.
    """
    root = _plain(function)
    if root is None:
        return []
    found: list[tuple[FunctionType, type | None]] = [(root, None)]
    seen, named, classes = {root.__code__}, {"__init__"}, dict[type, None]()

    def add(one: FunctionType | None, owner: type | None) -> None:
        if one is not None and one.__module__ == root.__module__ and one.__code__ not in seen:
            seen.add(one.__code__)
            found.append((one, owner))

    for one, _ in found:  # grows while it is walked
        for value in _references(one, named):
            if not isinstance(value, type):
                add(_plain(value), None)
            elif value.__module__ == root.__module__:
                classes.setdefault(value)
        for owner in classes:
            for name, method in methods_of(owner):
                if name in named:
                    add(method, owner)
    return found


def methods_of(owner: type) -> Iterator[tuple[str, FunctionType]]:
    """Methods and properties of a class, those that it inherits in its module included."""
    for base in owner.__mro__:
        if base.__module__ == owner.__module__:
            for name, value in vars(base).items():
                value = value.fget if isinstance(value, property) else value
                value = getattr(value, "__func__", value)
                if isinstance(value, FunctionType):
                    yield name, value


# By code object: a kernel is traced for every shape and a helper is reached by many kernels, but
# their source is parsed once.
_trees: dict[CodeType, ast.FunctionDef | None] = {}


def _plain(value: Any) -> FunctionType | None:
    """The Python function behind a kernel object or decorator."""
    value = inspect.unwrap(value) if callable(value) else value
    value = getattr(value, "function", value)
    return value if isinstance(value, FunctionType) else None


def tree_of(function: FunctionType) -> ast.FunctionDef | None:
    """Syntax tree with the file's own line numbers; None where there is no source to read."""
    code = function.__code__
    if code not in _trees:
        _trees[code] = None
        try:
            lines, start = inspect.getsourcelines(function)
            module = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            return None
        ast.increment_lineno(module, start - 1)
        node = module.body[0]
        if isinstance(node, ast.FunctionDef):
            _trees[code] = node
    return _trees[code]


def names_of(function: FunctionType) -> dict[str, Any]:
    """Values of the global and closure names that the function refers to."""
    known = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # a closure variable that is not bound yet
            continue
    return known


def _references(function: FunctionType, named: set[str]) -> Iterator[Any]:
    """Functions that are called or passed on and classes whose attributes or calls are used.

    Attribute names that the function reads are added to ``named``.
    """
    tree = tree_of(function)
    if tree is None:
        return
    known = names_of(function)
    for node in ast.walk(tree):
        used: list[ast.expr] = []
        if isinstance(node, ast.Call):
            # A function that is passed on will be called; a class that is passed is only a type.
            passed = [*node.args, *(k.value for k in node.keywords)]
            used = [one for one in passed if not isinstance(_value(one, known), type)]
            used.append(node.func)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            named.add(node.attr)
            used = [node.value]
        yield from (v for v in (_value(one, known) for one in used) if v is not None)


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The function or class that a bare name stands for, otherwise None."""
    value = known.get(node.id) if isinstance(node, ast.Name) else None
    return value if isinstance(value, type) or _plain(value) is not None else None
