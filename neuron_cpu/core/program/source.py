"""The source of a kernel: its syntax tree, the names that it refers to, its calls.

Only the source has annotations of local variables, and Python that single tracing would change.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple


def reachable(function: Callable) -> list[tuple[FunctionType, type | None]]:
    """``function`` and the functions that it reaches in its module, each with its class if it is a
    method.

    ``anything.name`` reaches the methods of that name of the classes reached: the type of
    ``anything`` is not known here.
    """
    root = _plain(function)
    if root is None:
        return []
    found: list[tuple[FunctionType, type | None]] = [(root, None)]
    seen, named = {root.__code__}, {"__init__"}
    classes: dict[type, list[tuple[str, FunctionType]]] = {}

    def add(one: FunctionType, owner: type | None) -> None:
        if one.__module__ == root.__module__ and one.__code__ not in seen:
            seen.add(one.__code__)
            found.append((one, owner))

    for one, _ in found:  # grows while it is walked
        before = len(named), len(classes)
        named |= _uses_of(one).attributes
        for value in _references(one):
            if not isinstance(value, type):
                add(value, None)
            elif value.__module__ == root.__module__ and value not in classes:
                classes[value] = list(methods_of(value))
        if (len(named), len(classes)) != before:
            for owner, methods in classes.items():
                for name, method in methods:
                    if name in named:
                        add(method, owner)
    return found


def methods_of(owner: type) -> Iterator[tuple[str, FunctionType]]:
    """Methods and properties of a class, including those that it inherits within its module."""
    for base in owner.__mro__:
        if base.__module__ == owner.__module__:
            for name, value in vars(base).items():
                value = value.fget if isinstance(value, property) else value
                value = getattr(value, "__func__", value)
                if isinstance(value, FunctionType):
                    yield name, value


# By code object: a kernel is traced for every shape and a helper is reached by many kernels.
_trees: dict[CodeType, ast.FunctionDef | None] = {}


def _plain(value: Any) -> FunctionType | None:
    """The Python function behind a kernel object or decorator."""
    value = inspect.unwrap(value) if callable(value) else value
    value = inspect.getattr_static(value, "function", value)  # names of nl answer with a sentence
    return value if isinstance(value, FunctionType) else None


def tree_of(function: FunctionType) -> ast.FunctionDef | None:
    """Syntax tree with the file's own line numbers; None where there is no source to read."""
    code = function.__code__
    if code not in _trees:
        try:
            lines, _ = inspect.findsource(function)
            functions = _functions(code.co_filename, lines)
            _trees[code] = functions.get((code.co_name, code.co_firstlineno))
        except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
            _trees[code] = None
    return _trees[code]


# By file, with the lines that were read: what a file holds is parsed once, and again once it has
# changed, as cells of a notebook or a submission that is edited between two runs.
_files: dict[str, tuple[list[str], dict[tuple[str, int], ast.FunctionDef]]] = {}


def _functions(file: str, lines: list[str]) -> dict[tuple[str, int], ast.FunctionDef]:
    """Every function of a file by name and first line; decorators count."""
    known, functions = _files.get(file, (None, {}))
    if known is not lines:
        functions = {}
        found: list[ast.AST] = [ast.parse("".join(lines))]
        for node in found:  # grows; expressions, most of a file, hold no function with a name
            below = ast.iter_child_nodes(node)
            found += [one for one in below if not isinstance(one, ast.expr)]
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                functions[node.name, first] = node
        _files[file] = lines, functions
    return functions


@functools.lru_cache(4096)  # many checks walk a function, and each is reached by many kernels
def nodes_of(tree: ast.AST | None) -> tuple[ast.AST, ...]:
    """All nodes of a syntax tree; none where there is no source."""
    return () if tree is None else tuple(ast.walk(tree))


def callee(node: ast.AST) -> str:
    """The last name of the function that an expression calls; "" where it calls none."""
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "attr", getattr(called, "id", "")))


def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets of an assignment, each with its value, None where that cannot be seen."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for one, its in zip(target.elts, values, strict=True):
        yield from pairs(one, its)


def names_of(function: FunctionType) -> dict[str, Any]:
    """Values of the global and closure names that the function refers to."""
    return {**function.__globals__, **_closure_of(function)}


def _closure_of(function: FunctionType) -> dict[str, Any]:
    known = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # a closure variable that is not bound yet
            continue
    return known


class _Uses(NamedTuple):
    """The names in a function's source.

    Attributes:
        names: bare names that are called, passed on or whose attributes are read, each with
            whether it is passed on; once each, in the order of the source.
        attributes: names of attributes that are read.
    """

    names: tuple[tuple[str, bool], ...]
    attributes: frozenset[str]


# By code object, as the trees are: to walk a tree takes longer than to look its names up.
_uses: dict[CodeType, _Uses] = {}


def _uses_of(function: FunctionType) -> _Uses:
    code = function.__code__
    if code not in _uses:
        names: dict[tuple[str, bool], None] = {}
        attributes = set()
        for node in nodes_of(tree_of(function)):
            used: list[tuple[ast.expr, bool]] = []
            if isinstance(node, ast.Call):
                passed = [*node.args, *(k.value for k in node.keywords)]
                used = [*((one, True) for one in passed), (node.func, False)]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                attributes.add(node.attr)
                used = [(node.value, False)]
            names.update({(one.id, at): None for one, at in used if isinstance(one, ast.Name)})
        _uses[code] = _Uses(tuple(names), frozenset(attributes))
    return _uses[code]


def _references(function: FunctionType) -> Iterator[FunctionType | type]:
    """Functions that are called or passed on and classes whose attributes or calls are used.

    A function that is passed on will be called; a class that is passed is only a type.
    """
    closure = _closure_of(function)
    for name, passed in _uses_of(function).names:
        value = closure[name] if name in closure else function.__globals__.get(name)
        if not isinstance(value, type):
            value = None if value is None else _plain(value)
        elif passed:
            continue
        if value is not None:
            yield value
