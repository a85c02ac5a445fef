"""Changes of whole statements: another order or place, and what becomes of a result."""

import ast
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

from .edits import Body, Edit, Guard, short, with_
from .kinds import NEIGHBOURS, renamed
from .names import Names, makes_tensor, names_in


def kept(node: Any, names: Names) -> Iterator[tuple[int, ast.stmt]]:
    """A statement that accumulates or keeps a result, or uses another name throughout."""
    value: Any = getattr(node, "value", None)
    target: Any = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.Call) and target or isinstance(target, ast.Subscript):
        yield 0, ast.AugAssign(target, ast.Add(), value)
    if isinstance(node, ast.AugAssign):
        yield 0, ast.Assign([node.target], value)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call) and makes_tensor(value):
        for name in names_in(ast.Load, value):
            if name in names.tensors:
                yield 1, ast.Assign([ast.Name(name, ast.Store())], value)
    if not isinstance(node, (ast.Expr, ast.Assign)) or isinstance(node, Guard):
        return
    yield from renamed(node, names)


def orders(statements: list) -> Iterator[tuple[int, int, Body]]:
    """Statements exchanged or left out: rank, where, and the new list."""
    simple = (ast.Expr, ast.Assign, ast.AugAssign)
    for at, one in enumerate(statements):
        if isinstance(one, Guard) or not isinstance(one, (*simple, ast.For, ast.If)):
            continue
        before, after = statements[:at], statements[at + 1 :]
        said = f"`{short(one)}`"
        if after and isinstance(after[0], (*simple, ast.For)):
            behind = f"{said} behind `{short(after[0])}`"
            yield 2, at, Body([*before, after[0], one, *after[1:]], behind)
        if isinstance(one, simple) and len(statements) > 1:
            again = any(ast.dump(one) == ast.dump(other) for other in after[:1])
            yield 0 if again else 2, at, Body([*before, *after], f"{said} left out")


def around_loops(holder: Any, field: str, at: int, loop: ast.stmt) -> Iterator[Edit]:
    """A statement of a loop before or behind it, and the neighbours of a loop inside of it."""
    if not isinstance(loop, ast.For):
        return
    outer, guard, inner = getattr(holder, field), loop.body[:1], loop.body[1:]
    before, after = outer[:at], outer[at + 1 :]

    def made(rank: int, one: ast.stmt, where: str, body: list, parts: list) -> Edit:
        within = with_(loop, body=[*guard, *body])
        moved = (within if part is loop else part for part in parts)
        said = f"`{short(one)}` {where} `{short(loop)}`"
        return Edit(rank, one.lineno, holder, field, Body(moved, said), (one, loop))

    for k, one in enumerate(inner):
        rest = [*inner[:k], *inner[k + 1 :]]
        if rest and isinstance(one, (ast.Expr, ast.Assign)):
            yield made(1, one, "before", rest, [*before, one, loop, *after])
        if rest and isinstance(one, (ast.Expr, ast.Assign, ast.Return)):
            yield made(2, one, "behind", rest, [*before, loop, one, *after])
    for one, body, parts in (
        (before[-1:], [*before[-1:], *inner], [*before[:-1], loop, *after]),
        (after[:1], [*inner, *after[:1]], [*before, loop, *after[1:]]),
    ):
        if one and isinstance(one[0], (ast.Expr, ast.Assign)) and not isinstance(one[0], Guard):
            yield made(2, one[0], "inside of", body, parts)


class _Pair:
    """Two nodes that exchange what they hold whenever `order` is set."""

    def __init__(self, one: ast.AST, other: ast.AST) -> None:
        self.nodes = one, other

    @property
    def order(self) -> None:
        return None

    @order.setter
    def order(self, _: Any) -> None:
        one, other = self.nodes
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def pairs(tree: ast.FunctionDef) -> Iterator[Edit]:
    """Two operations, or two numbers, that have changed places."""
    every: list[Any] = [n for statement in tree.body for n in ast.walk(statement)]
    numbers = [n for n in every if isinstance(n, ast.Constant) and type(n.value) is float]
    named = [n for n in every if getattr(n, "attr", "") in (*NEIGHBOURS[0], *NEIGHBOURS[1])]
    for one, other in chain(combinations(numbers, 2), combinations(named, 2)):
        if ast.dump(one) != ast.dump(other):
            words = [f"`{ast.unparse(n)}` of line {n.lineno}" for n in (one, other)]
            said = f"{' and '.join(words)} exchanged"
            yield Edit(1, one.lineno, _Pair(one, other), "order", Body([], said), ())
