"""Changes of whole statements: another order or place, and what becomes of a result."""

import ast
import copy
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

from .edits import Body, Edit, Guard, Together, short, with_
from .kinds import NEIGHBOURS, renamed
from .names import Names, makes_tensor, name_of, names_in


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


def _written(statement: ast.AST) -> str:
    """The name of the tile that an instruction writes; its own text for others."""
    for key in getattr(getattr(statement, "value", None), "keywords", ()):
        if key.arg == "dst":
            return name_of(key.value)
    targets = getattr(statement, "targets", ())
    return name_of(targets[0]) or ast.unparse(statement) if targets else ast.unparse(statement)


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
            both = {_written(one), _written(after[0])}
            yield 1 + (len(both) > 1), at, Body([*before, after[0], one, *after[1:]], behind)
        if isinstance(one, simple) and len(statements) > 1:
            again = any(ast.dump(one) == ast.dump(other) for other in after[:1])
            yield 0 if again else 2, at, Body([*before, *after], f"{said} left out")


def added(statements: list, at: int, names: Names, every: bool) -> Iterator[tuple[float, Body]]:
    """An operation of the reference on a tile that a statement reads, before it, or writes, behind
    it: `every`, or with what nothing reads."""
    one: Any = statements[at]
    call: Any = getattr(one, "value", None)
    own = short(one)
    for key in call.keywords if isinstance(call, ast.Call) and isinstance(one, ast.Expr) else ():
        behind = at + (key.arg == "dst")
        module = "".join(ast.unparse(call.func).rpartition(".")[:2])  # "" of a function by its name
        for rank, text in _in_place(key.value, names):
            if rank and not every:
                continue
            text = module + text
            said = f"`{text}` {'behind' if behind > at else 'before'} `{own}`"
            new = ast.parse(text).body[0]
            yield rank, Body([*statements[:behind], new, *statements[behind:]], said)


def _in_place(tile: ast.expr, names: Names) -> Iterator[tuple[float, str]]:
    """Calls that change a tile in place: 0 with what nothing reads."""
    shapes, words = names.shapes, names.words
    lost = {*names.lost, *names.unused}
    part = ast.unparse(tile)
    name = name_of(tile)
    shape = shapes.get(name, ())
    if name not in names.tensors or len(shape) != 2:
        return
    rows = f"[{part.split('[')[1].split(',')[0]}, :]" if "," in part else ""
    alike = [one for one in names.tensors if one != name and shapes.get(one) == shape]
    columns = [n for n in names.tensors if n != name and shapes.get(n) == (shape[0], 1)]
    whole = f"{part}, axis=1, keepdims=True)"
    reduced = [f"nl.{one}({whole}" for one in ("max", "mean") if one in words]
    roots = ("", *[" ** 0.5"] * ("sqrt" in words))
    sizes = [f"1.0 / {ast.unparse(one)}{root}" for one in names.sizes for root in roots]
    for op in sorted(words & {"add", "subtract", "multiply", "maximum", "minimum"}):
        for one in alike:
            whole = part.replace(name, one, 1)
            text = f"tensor_tensor(dst={part}, data1={part}, data2={whole}, op=nl.{op})"
            yield 2 * (one not in lost), text
        for one in columns + [*names.unused, *map(str, names.others), *sizes * (op == "multiply")]:
            rank = 0 if one in lost else 2 if one in columns else 1
            value = one + rows * (one in columns)
            yield rank, f"tensor_scalar(dst={part}, data={part}, op0=nl.{op}, operand0={value})"
        for one in reduced if op == "subtract" and shape[1] > 1 else ():
            yield 1, f"tensor_scalar(dst={part}, data={part}, op0=nl.{op}, operand0={one})"
    for op in sorted(words & {*NEIGHBOURS[1]}):
        yield 1, f"activation(dst={part}, op=nl.{op}, data={part})"
    for a, b in names.copies if shape[1] == 1 and "exp" in words else ():
        gap = f"nl.exp(nl.subtract({a}, {b}))"  # of a maximum and the next one
        yield 1, f"tensor_tensor(dst={part}, data1={part}, data2={gap}, op=nl.multiply)"
    if "reciprocal" in words:
        yield 1, f"reciprocal(dst={part}, data={part})"


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


MOST_SLICES = 24  # that are exchanged with each other


def everywhere(edits: list[Edit]) -> Iterator[Edit]:
    """One change of a slice at all places of several lines where it stands."""
    alike: dict[tuple[str, str], list[Edit]] = {}
    for one in edits:
        if isinstance(one.new, ast.Slice):
            alike.setdefault((ast.unparse(one.trail[-1]), ast.unparse(one.new)), []).append(one)
    for (before, after), some in alike.items():
        lines = dict.fromkeys(str(one.line) for one in some)
        if len(lines) > 1:
            said = f"`{after}` in place of `{before}` at lines {', '.join(lines)}"
            new = Body([one.new for one in some], said)
            yield some[0]._replace(
                rank=some[0].rank + 0.5, holder=Together(some), key="order", new=new
            )


def strides(tree: ast.FunctionDef) -> Iterator[Edit]:
    """Halves of an axis in place of every second element, and the other way, of one tile and of
    all."""
    parts: dict[tuple[str, int], list[ast.Slice]] = {}
    for node in (n for statement in tree.body for n in ast.walk(statement)):
        keys = getattr(getattr(node, "slice", None), "elts", ())
        for axis, key in enumerate(keys):
            if isinstance(key, ast.Slice) and key.lower and key.upper:
                parts.setdefault((name_of(node), axis), []).append(key)
    both = [*filter(None, map(_strided, parts.values()))]
    for some in [*both, *[[one for more in both for one in more]] * (len(both) > 1)]:
        edits = [Edit(0, 0, old, "__dict__", new.__dict__, ()) for old, new in some]
        olds, news = (
            " and ".join(dict.fromkeys(f"`{ast.unparse(p[k])}`" for p in some)) for k in (0, 1)
        )
        lines = ", ".join(dict.fromkeys(str(old.lineno) for old, _ in some))
        said = Body([], f"{news} in place of {olds} at lines {lines}")
        yield Edit(1, some[0][0].lineno, Together(edits), "order", said, ())


def _strided(slices: list[ast.Slice]) -> list[tuple[Any, ast.Slice]]:
    """Slices of two halves with those of every second element, or the other way; or none."""
    texts = {tuple(ast.unparse(n) for n in (one.lower, one.upper, one.step) if n) for one in slices}
    if len(texts) != 2:
        return []
    (a, b, *step), (c, d, *other) = sorted(texts, key=lambda one: one[0] != "0")
    if a == "0" and step == other == ["2"] and c == "1" and b == d:
        half = str(int(b) // 2) if b.isdigit() else f"{b} // 2"
        news = {a: f"0:{half}", c: f"{half}:{b}"}
    elif a == "0" and not step and not other and b == c:
        news = {a: f"0:{d}:2", c: f"1:{d}:2"}
    else:
        return []
    made = {key: ast.parse(f"x[{one}]", mode="eval").body.slice for key, one in news.items()}  # type: ignore
    return [(one, made[ast.unparse(one.lower)]) for one in slices]  # type: ignore


def turned(first: Any, second: Any, names: Names) -> Iterator[Body]:
    """Two statements, of which the second reads what the first makes, with exchanged operations."""
    made, last = _written(first), _written(second)
    reads = names_in(ast.Load, second)
    if made not in names.tensors or made not in reads or last not in names.tensors:
        return
    for one in names_in(ast.Load, first):
        if one in names.tensors and one != made:
            ahead = _renamed(second, {made: one, last: made})
            behind = _renamed(first, {one: made, made: last})
            said = f"`{short(ahead)}` and then `{short(behind)}` in place of the two lines"
            yield Body([ahead, behind], said)


def _renamed(statement: ast.stmt, names: dict[str, str]) -> ast.stmt:
    made = copy.deepcopy(statement)
    for one in ast.walk(made):
        if isinstance(one, ast.Name):
            one.id = names.get(one.id, one.id)
    return made


def _exchange(one: ast.AST, other: ast.AST) -> Edit:
    """Two nodes exchange what they hold."""
    words = [f"`{ast.unparse(n)}` of line {n.lineno}" for n in (one, other)]  # type: ignore
    both = [
        Edit(0, 0, node, "__dict__", new.__dict__, ()) for node, new in ((one, other), (other, one))
    ]
    said = Body([], f"{' and '.join(words)} exchanged")
    return Edit(0, one.lineno, Together(both), "order", said, ())  # type: ignore


def pairs(tree: ast.FunctionDef, names: Names) -> Iterator[Edit]:
    """Two operations, numbers, tiles of one shape or slices that have changed places."""
    every: list[Any] = [n for statement in tree.body for n in ast.walk(statement)]
    numbers = [n for n in every if isinstance(n, ast.Constant) and type(n.value) is float]
    named = [n for n in every if getattr(n, "attr", "") in (*NEIGHBOURS[0], *NEIGHBOURS[1])]
    slices = [n for n in every if isinstance(n, ast.Slice) and (n.lower or n.upper)]
    shapes = names.shapes
    values = [k.value for n in every for k in getattr(n, "keywords", ()) if k.arg != "dst"]
    alike = [n for n in values if isinstance(n, ast.Name) and n.id in shapes]
    same = (p for p in combinations(alike, 2) if shapes[p[0].id] == shapes[p[1].id])
    ranks = ((1, chain(combinations(numbers, 2), combinations(named, 2))), (2, same))
    for rank, both in (*ranks, (2, combinations(slices[:MOST_SLICES], 2))):
        for one, other in both:
            if ast.dump(one) != ast.dump(other):
                yield _exchange(one, other)._replace(rank=rank)
