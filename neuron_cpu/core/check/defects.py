"""Recognises shapes in a kernel's source that some compilers got wrong, and warns of them.

``device/refusals.json`` has the issues, their releases and the workarounds of their threads. The
pass reads names, not values, as lint.py does: it knows tiles by the calls that make them.
"""

import ast
import functools
from collections.abc import Callable, Iterable, Iterator

from ..device.errors import warn
from ..device.refusals import defect
from ..program.source import callee, nodes_of, reachable, tree_of

LOOPS = frozenset({"affine_range", "sequential_range"})
MAKERS = frozenset({"ndarray", "zeros", "empty", "full"})
Found = Iterator[tuple[int, str]]  # line, name of the tile


def lint(function: Callable | None) -> None:
    """Warn of every shape of a known defect in what a kernel reaches in its module."""
    known = [(*row[1:], issue.told()) for row in SHAPES if (issue := defect(row[0])) is not None]
    if function is None or not known:
        return
    name = getattr(function, "__name__", "kernel")
    for one, _ in reachable(function):
        tree = tree_of(one)
        for find, tell, told in known:
            for line, tile in _found(find, tree) if tree is not None else ():
                tell(tile, told, f"{name} ({one.__code__.co_filename}:{line})")


@functools.lru_cache(4096)  # many kernels reach a helper
def _found(
    find: Callable[[ast.FunctionDef], Found], tree: ast.FunctionDef
) -> list[tuple[int, str]]:
    return list(find(tree))


def _base(node: ast.AST | None) -> str:
    """The name of which a subscript takes a part."""
    return str(getattr(node.value, "id", "")) if isinstance(node, ast.Subscript) else ""


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _bound(tree: ast.AST, makers: frozenset[str]) -> dict[str, ast.Call]:
    """Names that assignments bind to a call of one of the functions."""
    return {
        one.targets[0].id: one.value
        for one in nodes_of(tree)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        if isinstance(one.value, ast.Call) and callee(one.value) in makers
    }


def _loads(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Tiles of which assignments fill a part with the result of a load, and these parts."""
    for one in nodes:
        if isinstance(one, ast.Assign) and callee(one.value) == "load":
            yield _base(one.targets[0]), one.targets[0]


def _staged(tree: ast.FunctionDef) -> Found:
    """Tiles made outside of a loop, loaded in it and read by assignments of loops inside of it."""
    loops = [node for node in nodes_of(tree) if isinstance(node, ast.For)]
    inside = {id(n) for loop in loops for n in nodes_of(loop)}
    made = [n for n, call in _bound(tree, MAKERS).items() if id(call) not in inside]
    for loop in loops if made else ():
        if callee(loop.iter) not in LOOPS:
            continue
        index = _names(loop.target)
        for tile, target in _loads(loop.body):
            if tile in made and not index & _names(target):
                inner = [n for n in nodes_of(loop) if isinstance(n, ast.For) and n is not loop]
                reads = (n for part in inner for n in ast.walk(part) if _base(n) == tile)
                if any(isinstance(n.ctx, ast.Load) for n in reads):  # type: ignore[attr-defined]
                    yield target.lineno, tile


def _blocks(shape: ast.expr | None) -> bool:
    """Whether a shape has block axes: its partition axis is not the first."""
    axes = shape.elts if isinstance(shape, (ast.Tuple, ast.List)) else []
    return any(callee(axis) == "par_dim" for axis in axes[1:])


def _moved_blocks(tree: ast.FunctionDef) -> Found:
    """Tiles with block axes that loads filled, reshaped into other block axes."""
    made = {n for n, call in _bound(tree, MAKERS).items() if call.args and _blocks(call.args[0])}
    loaded = {tile for tile, _ in _loads(nodes_of(tree))}
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and callee(node) == "reshape" and node.args:
            tile = str(getattr(getattr(node.func, "value", None), "id", ""))
            if tile in made & loaded and _blocks(node.args[0]):
                yield node.lineno, tile


def _sliced_reshapes(tree: ast.FunctionDef) -> Found:
    """Functions of ScalarE on ``r[:, k, :]`` of ``r = tile.reshape(...)`` with three axes."""
    reshaped = _bound(tree, frozenset({"reshape"}))
    for node in nodes_of(tree):
        if callee(node) != "activation":
            continue
        assert isinstance(node, ast.Call)
        for part in (*node.args, *(k.value for k in node.keywords)):
            sliced = isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple)
            axes = part.slice.elts if sliced and _base(part) else []  # type: ignore[attr-defined]
            if len(axes) == 3 and not isinstance(axes[1], ast.Slice) and _base(part) in reshaped:
                yield node.lineno, _base(part)


# Issue of aws-neuron-sdk, what finds its shape, and what warns of it.
SHAPES: tuple[tuple[str, Callable[[ast.FunctionDef], Found], Callable], ...] = (
    (
        "1045",
        _staged,
        lambda tile, told, place: warn(
            "sim_staged_tile", f"'{tile}' stages loads of a loop: {told}", place
        ),
    ),
    (
        "1051",
        _moved_blocks,
        lambda tile, told, place: warn(
            "sim_moved_blocks", f"'{tile}' is reshaped so that blocks move: {told}", place
        ),
    ),
    (
        "1255",
        _sliced_reshapes,
        lambda tile, told, place: warn(
            "sim_sliced_reshape", f"activation on a slice of the reshaped '{tile}': {told}", place
        ),
    ),
)
