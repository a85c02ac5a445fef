"""Recognises shapes in a kernel's source that some compilers got wrong, and warns of them.

``device/refusals.json`` has the issues, their releases and the workarounds of their threads. The
pass reads names, not values, as lint.py does: it knows tiles by the calls that make them.
"""

import ast
from collections.abc import Callable, Iterator

from ..device.errors import warn
from ..device.refusals import defect
from ..program.source import reachable, tree_of

LOOPS = frozenset({"affine_range", "sequential_range"})
MAKERS = frozenset({"ndarray", "zeros", "empty", "full"})
Found = Iterator[tuple[int, str]]  # line, name of the tile


def lint(function: Callable | None) -> None:
    """Warn of every shape of a known defect in what a kernel reaches in its module."""
    known = {issue: defect(issue) for issue in ("1045", "1051", "1255")}
    if function is None or not any(known.values()):
        return
    name = getattr(function, "__name__", "kernel")
    for one, _ in reachable(function):
        tree = tree_of(one)
        if tree is None:
            continue
        file = one.__code__.co_filename
        if known["1045"]:
            for line, tile in _staged(tree):
                said = f"'{tile}' stages loads of a loop: {known['1045'].told()}"
                warn("sim_staged_tile", said, f"{name} ({file}:{line})")
        if known["1051"]:
            for line, tile in _moved_blocks(tree):
                said = f"'{tile}' is reshaped so that blocks move: {known['1051'].told()}"
                warn("sim_moved_blocks", said, f"{name} ({file}:{line})")
        if known["1255"]:
            for line, tile in _sliced_reshapes(tree):
                said = f"activation on a slice of the reshaped '{tile}': {known['1255'].told()}"
                warn("sim_sliced_reshape", said, f"{name} ({file}:{line})")


def _called(node: ast.AST) -> str:
    """The last name of what an expression calls."""
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _target(node: ast.stmt) -> ast.expr | None:
    return node.targets[0] if isinstance(node, ast.Assign) else None


def _base(node: ast.AST | None) -> str:
    """The name of which a subscript takes a part."""
    return str(getattr(node.value, "id", "")) if isinstance(node, ast.Subscript) else ""


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _bound(tree: ast.AST, makers: frozenset[str]) -> dict[str, ast.Call]:
    """Names that assignments bind to a call of one of the functions."""
    return {
        one.targets[0].id: one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if isinstance(one.value, ast.Call) and _called(one.value) in makers
    }


def _staged(tree: ast.FunctionDef) -> Found:
    """Tiles made outside of a loop, loaded in it and read by assignments of loops inside of it."""
    inside = {id(n) for loop in ast.walk(tree) if isinstance(loop, ast.For) for n in ast.walk(loop)}
    made = {
        one.targets[0].id
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if _called(one.value) in MAKERS and id(one) not in inside
    }
    for loop in ast.walk(tree):
        if not (isinstance(loop, ast.For) and _called(loop.iter) in LOOPS):
            continue
        index = _names(loop.target)
        for one in loop.body:
            tile = _base(_target(one))
            loads = isinstance(one, ast.Assign) and _called(one.value) == "load"
            target = _target(one)
            if loads and target and tile in made and not index & _names(target):
                inner = [n for n in ast.walk(loop) if isinstance(n, ast.For) and n is not loop]
                reads = (n for part in inner for n in ast.walk(part) if _base(n) == tile)
                if any(isinstance(n.ctx, ast.Load) for n in reads):  # type: ignore[attr-defined]
                    yield one.lineno, tile


def _blocks(shape: ast.expr | None) -> bool:
    """Whether a shape has block axes: its partition axis is not the first."""
    axes = shape.elts if isinstance(shape, (ast.Tuple, ast.List)) else []
    return any(_called(axis) == "par_dim" for axis in axes[1:])


def _moved_blocks(tree: ast.FunctionDef) -> Found:
    """Tiles with block axes that loads filled, reshaped into other block axes."""
    made = {n for n, call in _bound(tree, MAKERS).items() if call.args and _blocks(call.args[0])}
    loaded = {
        _base(one.targets[0])
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and _called(one.value) == "load"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "reshape" and node.args:
            tile = str(getattr(getattr(node.func, "value", None), "id", ""))
            if tile in made & loaded and _blocks(node.args[0]):
                yield node.lineno, tile


def _sliced_reshapes(tree: ast.FunctionDef) -> Found:
    """Functions of ScalarE on ``r[:, k, :]`` of ``r = tile.reshape(...)`` with three axes."""
    reshaped = _bound(tree, frozenset({"reshape"}))
    for node in ast.walk(tree):
        if _called(node) != "activation":
            continue
        assert isinstance(node, ast.Call)
        for part in (*node.args, *(k.value for k in node.keywords)):
            sliced = isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple)
            axes = part.slice.elts if sliced and _base(part) else []  # type: ignore[attr-defined]
            if len(axes) == 3 and not isinstance(axes[1], ast.Slice) and _base(part) in reshaped:
                yield node.lineno, _base(part)
