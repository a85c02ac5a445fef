"""Changes of whole statements: another order or place, and what becomes of a result."""

import ast
import copy
import re
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

from .edits import Body, Edit, Guard, Together, exchanged, short, with_
from .kinds import NEIGHBOURS, renamed
from .names import Names, function_of, makes_tensor, name_of, names_in

SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign)
FRESH = ("zeros", "full", "memset", "ndarray")  # what begins an accumulator


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


def _written(statement: Any) -> str:
    """The name of the tile that a statement writes; its own text for others."""
    return _target(statement).partition("[")[0] or ast.unparse(statement)


def made_in(node: ast.AST) -> dict[str, None]:
    """What statements in a node write."""
    return dict.fromkeys(_written(one) for one in ast.walk(node) if isinstance(one, SIMPLE))


def orders(statements: list) -> Iterator[tuple[int, int, Body]]:
    """Statements exchanged or left out: rank, where, and the new list."""
    for at, one in enumerate(statements):
        if isinstance(one, Guard) or not isinstance(one, (*SIMPLE, ast.For, ast.If)):
            continue
        before, after = statements[:at], statements[at + 1 :]
        said = f"`{short(one)}`"
        if after and isinstance(after[0], (*SIMPLE, ast.For)):
            behind = f"{said} moved behind `{short(after[0])}`"
            both = {_written(one), _written(after[0])}
            yield 1 + (len(both) > 1), at, Body([*before, after[0], one, *after[1:]], behind)
        if isinstance(one, SIMPLE) and len(statements) > 1:
            again = any(ast.dump(one) == ast.dump(other) for other in after[:1])
            yield 0 if again else 2, at, Body([*before, *after], f"{said} left out")


def rescaled(statements: list, at: int, names: Names) -> Iterator[Body]:
    """Calls before a statement that keep sums of exponentials right where a maximum grows, and
    products of what it adds to by a column."""
    statement: Any = statements[at]
    call: Any = getattr(statement, "value", None)
    top, reads = _target(statement), [*_operands(call, names)]
    grows = top in reads and "maximum" in ast.unparse(call)
    gap = f"nl.exp(nl.subtract({top}, nl.maximum({', '.join(reads)})))"
    rows, *_ = (*names.shapes.get(top, ()), 0)
    columns = [n for n in names.tensors if n != top and names.shapes.get(n) == (rows, 1)]
    grown = [n for n in names.copies if {names.shapes.get(one) for one in n} == {(rows, 1)}]
    columns += [f"nl.exp(nl.subtract({old}, {new}))" for old, new in grown]
    adds = top in names.sums and "nl.add" in ast.unparse(call)
    factors = [(n, gap) for n in names.sums] if grows else [(top, n) for n in columns if adds]
    for total, by in factors:
        text = f"{total} = nl.multiply({total}, {by})"
        if names.module is not None:
            text = f"{names.module}tensor_scalar(dst={total}, data={total}, op0=nl.multiply, "
            text += f"operand0={by})"
        new = ast.parse(text).body[0]
        said = f"`{text}` added before `{short(statement)}`"
        yield Body([*statements[:at], new, *statements[at:]], said)


def _carried(statement: Any, loop: Any) -> Iterator[tuple[list[ast.stmt], str]]:
    """A scan of a part of each row that begins where the last turn's ended."""
    call = getattr(statement, "value", None)
    given = {one.arg: one.value for one in getattr(call, "keywords", ())}
    first, turn = given.get("initial"), getattr(loop.target, "id", "")
    if (
        not isinstance(first, ast.Constant)
        or not isinstance(given.get("dst"), ast.Name)
        or not turn
    ):
        return
    to = ast.unparse(given["dst"])
    begins = "0" if len(loop.iter.args) < 2 else ast.unparse(loop.iter.args[0])
    new = f"{ast.unparse(first)} if {turn} == {begins} else carry"
    keeps = f"carry = {to}[:, {to}.shape[1] - 1:{to}.shape[1]]"
    scan = copy.deepcopy(statement)
    for one in scan.value.keywords:
        if one.arg == "initial":
            one.value = ast.parse(new, mode="eval").body
    said = (
        f"`initial={new}` in place of `initial={ast.unparse(first)}` and `{keeps}` added behind it"
    )
    yield [scan, *ast.parse(keeps).body], said


def around_loops(holder: Any, field: str, at: int, loop: ast.stmt) -> Iterator[Edit]:
    """A statement of a loop before or behind it, and the neighbours of a loop inside of it."""
    if not isinstance(loop, ast.For):
        return
    outer, guard, inner = getattr(holder, field), loop.body[:1], loop.body[1:]
    before, after = outer[:at], outer[at + 1 :]

    def made(rank: int, some: list, where: str, body: list, parts: list) -> Edit:
        within = with_(loop, body=[*guard, *body])
        moved = (within if part is loop else part for part in parts)
        said = f"{' and '.join(f'`{short(one)}`' for one in some)} moved {where} `{short(loop)}`"
        return Edit(rank, some[0].lineno, holder, field, Body(moved, said), (some[0], loop))

    for k, one in enumerate(inner):
        for scan, said in _carried(one, loop):
            within = with_(loop, body=[*guard, *inner[:k], *scan, *inner[k + 1 :]])
            new = Body([*before, within, *after], said)
            yield Edit(0, one.lineno, holder, field, new, (one, loop))
        rest = [*inner[:k], *inner[k + 1 :]]
        if rest and isinstance(one, (ast.Expr, ast.Assign)):
            yield made(1, [one], "before", rest, [*before, one, loop, *after])
        if rest and isinstance(one, (ast.Expr, ast.Assign, ast.Return)):
            yield made(2, [one], "behind", rest, [*before, loop, one, *after])
    for some, body, parts in (
        *((before[-k:], [*before[-k:], *inner], [*before[:-k], loop, *after]) for k in (1, 2, 3)),
        (after[:1], [*inner, *after[:1]], [*before, loop, *after[1:]]),
    ):
        moves = (isinstance(s, (ast.Expr, ast.Assign)) and not isinstance(s, Guard) for s in some)
        if some and all(moves):
            fresh = all(function_of(getattr(one, "value", one)) in FRESH for one in some)
            yield made(0 if fresh else 2, some, "inside of", body, parts)


def carried(holder: Any, field: str, at: int, loop: ast.stmt, names: Names) -> Iterator[Edit]:
    """A column that a loop reads and never writes takes at its end what a turn has made last."""
    made = made_in(loop)
    shapes = {one: shape for one, shape in names.shapes.items() if len(shape) == 2}
    for column in names_in(ast.Load, *getattr(loop, "body", ())):
        known = column in made or shapes.get(column, (0, 0))[1] != 1
        for one in () if known else (one for one in made if one in shapes):
            last = f"[:, {one}.shape[1] - 1:{one}.shape[1]]" * (shapes[one][1] > 1)
            if shapes[one][0] == shapes[column][0]:
                text = f"{names.module}tensor_copy(dst={column}, src={one}{last})"
                within = with_(loop, body=[*loop.body, ast.parse(text).body[0]])  # type: ignore
                parts = exchanged([*getattr(holder, field), within], at, -1)[:-1]
                said = f"`{text}` at the end of `{short(loop)}`"
                body: Any = Body(parts, said)
                line = loop.body[-1].lineno  # type: ignore[attr-defined]
                yield Edit(-3, line, holder, field, body, (loop,))


def everywhere(edits: list[Edit]) -> Iterator[Edit]:
    """One change of a slice or an index at all places of several lines where it stands."""
    alike: dict[tuple[str, str], list[Edit]] = {}
    for one in edits:
        quotient = isinstance(getattr(one.new, "op", None), ast.FloorDiv)
        if isinstance(one.new, ast.Slice) or quotient and one.trail:
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
        yield Edit(-2, some[0][0].lineno, Together(edits), "order", said, ())


# Slices of halves, and of every second element, in each other's place.
HALVES = (
    (r"0:([^:]+) \1:([^:]+)", r"0:\2:2", r"1:\2:2"),
    (r"0:([^:]+):2 1:\1:2", r"0:\1 // 2", r"\1 // 2:\1"),
)


def _strided(slices: list[ast.Slice]) -> list[tuple[ast.Slice, Any]]:
    """Slices of two halves with those of every second element, or the other way; or none."""
    olds = sorted({ast.unparse(one) for one in slices}, key=lambda text: text[:2] != "0:")
    for pattern, *news in HALVES:
        found = re.fullmatch(pattern, " ".join(olds))
        made = {old: found.expand(new) for old, new in zip(olds, news)} if found else {}
        if made:
            texts = (f"x[{made[ast.unparse(one)]}]" for one in slices)
            parts: list[Any] = [ast.parse(text, mode="eval").body for text in texts]
            return [*zip(slices, (one.slice for one in parts))]
    return []


def turned(first: Any, second: Any, names: Names) -> Iterator[Body]:
    """Two statements, of which the second reads what the first makes, with exchanged operations."""
    made, last = _target(first), _target(second)
    calls = (getattr(one, "value", None) for one in (first, second))
    takes, reads = ([*_operands(call, names)] for call in calls)
    for one in takes if last and made in reads else ():
        if one != made:
            texts = _put(second, last, made, one), _put(first, made, last, made, one)
            try:
                both = [ast.parse(text).body[0] for text in texts]
            except SyntaxError:  # what is read stands where only a name may
                continue
            yield Body(both, f"`{texts[0]}` and then `{texts[1]}` in place of the two lines")


def _put(statement: ast.stmt, own: str, target: str, new: str, old: str = "") -> str:
    """A statement's text with another target, and another operand in the place of an old one."""
    head, mark, rest = re.split(
        rf"(dst={re.escape(own)}(?!\w)|^{re.escape(own)} =)", ast.unparse(statement), maxsplit=1
    )
    return (
        head
        + target.join(mark.rsplit(own, 1))  # dst=t has two of t
        + re.sub(rf"\b{re.escape(old or target)}(?!\w)", lambda _: new, rest)
    )


def _target(statement: Any) -> str:
    """What a statement writes; "" of others."""
    found = re.match(r"[\w.]+\(dst=(\w+(?:\[.*?\])?)(?=[,)])|(\w+) = ", ast.unparse(statement))
    return found[1] or found[2] if found else ""


def _operands(call: Any, names: Names) -> Iterator[str]:
    """Tiles that a call reads."""
    values = (key.value for key in getattr(call, "keywords", ()) if key.arg != "dst")
    for one in chain(getattr(call, "args", ()), values):
        if name_of(one) in names.tensors and isinstance(one, (ast.Name, ast.Subscript)):
            yield ast.unparse(one)


def _exchange(one: ast.AST, other: ast.AST) -> Edit:
    """Two nodes exchange what they hold."""
    words = [f"`{ast.unparse(n)}` of line {n.lineno}" for n in (one, other)]  # type: ignore
    both = [
        Edit(0, 0, node, "__dict__", new.__dict__, ()) for node, new in ((one, other), (other, one))
    ]
    said = Body([], f"{' and '.join(words)} exchanged")
    return Edit(0, one.lineno, Together(both), "order", said, ())  # type: ignore


def pairs(tree: ast.FunctionDef, names: Names) -> Iterator[Edit]:
    """Two operations, numbers or tiles of one shape that have changed places."""
    every: list[Any] = [n for statement in tree.body for n in ast.walk(statement)]
    numbers = [n for n in every if isinstance(n, ast.Constant) and type(n.value) is float]
    named = [n for n in every if getattr(n, "attr", "") in (*NEIGHBOURS[0], *NEIGHBOURS[1])]
    shapes = names.shapes
    given = [k.value for n in every for k in getattr(n, "keywords", ()) if k.arg != "dst"]
    given += [one for n in every if isinstance(n, ast.Call) for one in n.args]
    alike = [n for n in given if isinstance(n, ast.Name) and n.id in shapes]
    near = (p for p in combinations(alike, 2) if abs(p[0].lineno - p[1].lineno) < 4)
    same = (p for p in near if shapes[p[0].id] == shapes[p[1].id])
    for rank, both in ((1, chain(combinations(numbers, 2), combinations(named, 2))), (2, same)):
        for one, other in both:
            if ast.dump(one) != ast.dump(other):
                yield _exchange(one, other)._replace(rank=rank)
