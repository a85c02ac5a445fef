"""What may stand in the place of an expression: a function's changes, each with a rank.

The likeliest come first: an argument too many (-1), instructions, flags and exchanged arguments
(0), constants, indices and accumulation (1), sizes and what stands in like places, statements
elsewhere (2), other tensors and shifted bounds (3).
"""

import ast
import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations, permutations, product
from typing import Any

from ..core.instructions.alu import ACTIVATIONS, ARITHMETIC
from .edits import exchanged, with_
from .names import Names, function_of, name_of, names_in, read, uses

Groups = tuple[tuple[Any, ...], ...]
# Names that stand for each other by mistake.
NEIGHBOURS: Groups = (
    (*ARITHMETIC, "divide"),
    (*ACTIVATIONS, "negative", "cos"),
    ("max", "min", "sum", "mean", "prod", "var", "std"),
    ("zeros", "ones"),
    ("argmax", "argmin"),
    ("load", "load_transpose2d"),
    ("dma_copy", "dma_transpose"),
    ("reset", "reset_reduce", "reduce"),
)
OPERATORS: Groups = ((ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv), (ast.FloorDiv, ast.Mod))
COMPARED: Groups = ((ast.Lt, ast.LtE, ast.Gt, ast.GtE), (ast.Eq, ast.NotEq))
TYPES = frozenset({"float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8"})
# Arguments that are exchanged with each other, beside those whose names end in other digits.
PAIRS = (("stationary", "moving"), ("scale", "bias"), ("dst", "src"), ("dst", "data"))
NEEDED = frozenset({"buffer", "dtype", "dst", "data", "src"})
NUMBERS = frozenset({"scale", "bias", "operand0", "operand1", "value", "initial"})
RANGES = frozenset({"range", "affine_range", "sequential_range", "static_range"})

_plus, _times, _less, _over, _whole = (
    lambda a, b, op=op: ast.BinOp(a, op(), b)
    for op in (ast.Add, ast.Mult, ast.Sub, ast.Div, ast.FloorDiv)
)

Found = Iterator[tuple[int, ast.AST]]  # what may stand in a place, each with its rank
_negated = functools.partial(ast.UnaryOp, ast.USub())


def in_place(holder: ast.AST, node: ast.AST, names: Names) -> Found:
    """What may stand in the place of a node that a holder has, each with its rank."""
    for rank, new in chain(_others(node, names), _placed(holder, node, names)):
        if not _does_nothing(holder, node, new):
            yield rank, new


def _does_nothing(holder: Any, child: ast.AST, node: ast.AST) -> bool:
    """Whether it adds 0, is a factor of 1, or compares or computes something with itself."""
    operator, value = getattr(holder, "op", None), getattr(node, "value", None)
    sides = [getattr(holder, "left", None), getattr(holder, "right", None)]
    sides += getattr(holder, "comparators", [])
    return (
        (isinstance(operator, (ast.Add, ast.Sub)) and value == 0)
        or (isinstance(operator, ast.Mult) and value == 1)
        or any(one and one is not child and ast.dump(one) == ast.dump(node) for one in sides)
    )


def _placed(holder: ast.AST, node: Any, names: Names) -> Found:
    """What stands in like places, for a bound, a number of turns or a size."""
    counts, assigned = function_of(holder) in RANGES, isinstance(holder, ast.Assign)
    bound = counts or isinstance(holder, (ast.Slice, ast.Compare)) or function_of(holder) == "ds"
    bound = bound or getattr(holder, "arg", "") == "offset" or isinstance(holder, ast.Subscript)
    if (bound or assigned) and names.is_number(node):
        yield from ((2, one) for one in names.formulas)
        yield from ((-1, _plus(one, node)) for one in names.idle)
        for size in names.sizes if counts else ():
            yield 2, _whole(node, size)
    shifted = counts or assigned and isinstance(node, (ast.Name, ast.BinOp))
    for operator in (ast.Add, ast.Sub) if shifted else ():
        yield 1, ast.BinOp(node, operator(), ast.Constant(1))
    if assigned and isinstance(node, ast.BinOp):
        for (outer, inner), size in product(permutations(names.loops, 2), names.sized):
            yield -3, _plus(_times(read(outer), size), read(inner))
    if bound and not counts or assigned and shifted:
        for name in map(read, names.loops):
            yield 2, _plus(node, name)
            for size in names.sizes:
                yield 3, _plus(_times(name, size), node)
    if isinstance(node, ast.Slice):
        for one in names.slices:  # the likeliest has an index that is missing
            yield 2 - 2 * bool(_indices(one, names) - _indices(node, names)), one
    if isinstance(holder, (ast.keyword, ast.Call, ast.Assign)):
        told = getattr(holder, "arg", "") == "dst" or node in getattr(holder, "targets", ())
        yield from () if told else _turned(node, names)
        tile = None if told else getattr(node, "id", None)
        yield from ((1, one) for one in names.parts if tile == name_of(one))
    if isinstance(node, ast.keyword):
        for value in names.given.get((function_of(holder), str(node.arg)), ()):
            if not isinstance(value, ast.Name):
                yield 1, with_(node, value=value)


def _turned(node: ast.AST, names: Names) -> Found:
    """A square tile turned."""
    name = getattr(node, "id", "")
    shape = names.shapes.get(name, ())
    if name in names.tensors and len(shape) == 2 and shape[0] == shape[1] > 1:
        yield -2, ast.parse(f"nl.copy(nl.transpose({name}))", mode="eval").body


def _others(node: ast.AST, names: Names) -> Found:
    """What may stand in the place of an expression, each with its rank."""
    if isinstance(node, ast.Attribute):
        for group in NEIGHBOURS:
            for other in group if node.attr in group else ():
                strange = names.words and group in NEIGHBOURS[:2] and other not in names.words
                yield bool(strange), with_(node, attr=other)
        if node.attr in TYPES:
            others = (*["float8_e4m3"] * node.attr.endswith("int8"), "float32", "int32")
            wide = node.attr.endswith("16")  # rounding is mended by float32
            for other in others:
                yield not (wide and other == "float32"), with_(node, attr=other)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for rank, other in names.like(node.id):
            yield rank, with_(node, id=other)
        if node.id in names.loops:
            yield 2, _plus(node, ast.Constant(1))
        for size in names.sizes if node.id in names.loops else ():
            yield 1, _times(node, size)
        yield from ((1, one) for one in names.formulas if node.id in names_in(ast.Load, one))
    elif isinstance(node, ast.Constant):
        yield from constants(node, names)
    elif isinstance(node, ast.BinOp):
        rank = 2 if names.is_formula(node) else 1  # sizes are seldom turned
        yield from ((1, side) for side in (node.left, node.right))
        yield rank, with_(node, left=node.right, right=node.left)
        if isinstance(node.op, ast.FloorDiv):  # rounded up
            less = with_(node, left=_negated(node.left))
            yield 0, _negated(less)
        if isinstance(node.op, ast.Div):
            yield 1, with_(node, right=ast.BinOp(node.right, ast.Pow(), ast.Constant(0.5)))
            yield 1, with_(node, right=_less(node.right, ast.Constant(1)))
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            yield from ((2, _whole(node.left, size)) for size in names.sized)
            for size, other in permutations(names.sized, 2):
                yield 2, _whole(node.left, _whole(size, other))
        one = getattr(node.right, "value", 0) == 1
        for group in OPERATORS:
            for other in group[:2] if one else group:
                if isinstance(node.op, group):
                    yield rank, with_(node, op=other())
    elif isinstance(node, ast.UnaryOp):
        yield 0, node.operand
        of: Any = node.operand
        value = getattr(of, "value", None)
        if type(value) is int:
            yield from ((1, ast.Constant(one)) for one in (0, 1 - value))
        for rank, new in constants(of, names) if type(value) is float else ():
            yield rank, with_(node, operand=new)
    elif isinstance(node, ast.Compare):
        for group in COMPARED:
            for other in group if isinstance(node.ops[0], group) else ():
                yield 1, with_(node, ops=[other()])
    elif isinstance(node, ast.Subscript):
        yield from ((0, read(one)) for one in names.lost & names.tensors.keys())
    elif isinstance(node, ast.Call):
        yield from _calls(node, names)
    elif isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
        for a, b in combinations(range(len(node.elts)), 2):
            yield 1, with_(node, elts=exchanged(node.elts, a, b))
    elif isinstance(node, ast.Slice):
        yield from _slices(node, names)
    elif isinstance(node, ast.keyword) and node.arg in NUMBERS and not names.is_tile(node.value):
        yield 2, with_(node, value=_over(ast.Constant(1.0), node.value))
        yield 2, with_(node, value=_negated(node.value))


def constants(node: ast.Constant, names: Names) -> Found:
    value = node.value
    if isinstance(value, bool):
        yield 0, ast.Constant(not value)
    elif isinstance(value, (int, float)):
        others: list[float] = [value + 1, value - 1, value * 2, value / 2, value * 4, value / 4]
        if isinstance(value, float):
            others = [*names.others, -value, *others, 0, 1, value**2, -3.4e38, 3.4e38]
        elif value < 8:
            others += [0, 1, -value]
        for other in dict.fromkeys(others):
            if other != value:
                whole = isinstance(value, int) and other == int(other)
                yield (
                    1 + (whole and value >= 32) + (isinstance(value, int) and not whole),
                    ast.Constant(int(other) if whole else float(f"{other:.12g}")),
                )
        yield from ((1, read(one)) for one in names.lost if one in names.tensors)
        for name in names.loops if isinstance(value, int) else ():
            yield 1, read(name)
            for size in names.sizes if value == 0 else ():
                yield 2, _times(read(name), size)
        yield from ((2, size) for size in names.sizes if isinstance(size, ast.Name))
        for size in names.sizes if isinstance(value, float) else ():
            yield 1, ast.BinOp(ast.Constant(1.0), ast.Div(), size)


def _calls(node: ast.Call, names: Names) -> Found:
    """Arguments exchanged, added and left out, and the call left out."""
    keywords = {one.arg: at for at, one in enumerate(node.keywords) if one.arg}
    pairs = [
        (a, b)
        for a, b in combinations(keywords, 2)
        if a[:-1] == b[:-1] and a[-1:].isdigit() or {a, b} in map(set, PAIRS)
    ]
    digits = [(a, b) for a, b in pairs if a[-1:].isdigit()]
    rest = [one for one in combinations(keywords, 2) if one not in pairs]
    for some in [*([one] for one in pairs), digits[:2], digits, *([one] for one in rest)]:
        values = [one.value for one in node.keywords]
        for a, b in some:
            values = exchanged(values, keywords[a], keywords[b])
        made = [with_(k, value=v) for k, v in zip(node.keywords, values)]
        yield 3 if some[:1] in [[one] for one in rest] else 0, with_(node, keywords=made)
    turns = [one for one in node.keywords if one.arg in ("pattern", "channel_multiplier")]
    if len(turns) == 2:  # the other side of a diagonal
        yield 1, _Turned().visit(copy.deepcopy(node))
    for at in range(len(node.args) - 1):
        yield 0, with_(node, args=exchanged(node.args, at, at + 1))
    for name, value in _added(node, names):
        if name not in keywords:
            rank = 0 if getattr(value, "value", 0) is True else 1
            yield rank, with_(node, keywords=[*node.keywords, ast.keyword(name, value)])
    for one in node.keywords:
        flag = isinstance(one.value, (ast.Constant, ast.Compare)) and one.arg not in NUMBERS
        yield (
            2 if flag or one.arg in NEEDED else -1,
            with_(node, keywords=[k for k in node.keywords if k is not one]),
        )
    inner: Any = node.args[0] if node.args else None
    if isinstance(inner, ast.Call) and inner.args:  # the other one first
        first = with_(node, args=[inner.args[0], *node.args[1:]])
        yield 1, with_(inner, args=[first, *inner.args[1:]])
    if len(node.args) == 1:
        yield 2, node.args[0]
        of = node.args[0]
        if function_of(node) in RANGES:
            yield 2, with_(node, args=[ast.Constant(1), of])
            if isinstance(of, ast.BinOp):
                yield 1, with_(node, args=[ast.Constant(0), of.left, of.right])


def _added(node: ast.Call, names: Names) -> Iterator[tuple[str, ast.expr]]:
    """Flags that a called function has, and what calls of it have."""
    with contextlib.suppress(TypeError, ValueError):
        called = inspect.signature(names.value_of(node.func)).parameters.values()
        yield from ((one.name, ast.Constant(True)) for one in called if one.default is False)
    for (function, name), values in names.given.items():
        if function == function_of(node) and name not in NEEDED:
            yield from ((name, one) for one in values)


def _slices(node: ast.Slice, names: Names) -> Found:
    """Bounds at another loop's index, times a size, and shifted by one."""
    yield from renamed(node, names)
    lower, upper = node.lower, node.upper
    if lower is not None and upper is not None and not isinstance(lower, ast.Constant):
        yield 1, with_(node, upper=_plus(lower, upper))
    at: Any = getattr(lower, "value", None)
    for by in (1, -1, 2, 3) if lower and upper else ():
        if at + by >= 0 if type(at) is int else by < 2:
            yield 2, ast.Slice(_moved(lower, by), _moved(upper, by))
    if lower and isinstance(upper, ast.BinOp) and ast.dump(upper.left) == ast.dump(lower):
        for step in (ast.Constant(2), *names.sized):
            last = _plus(_times(step, _moved(upper.right, -1)), ast.Constant(1))
            yield 2, ast.Slice(lower, _plus(lower, last), step)
    for name in names.idle if lower and upper else ():
        yield -1, ast.Slice(*(_plus(name, one) for one in (lower, upper)))
    if type(at) is int and upper is not None:
        for name in names.sized:
            yield 2, ast.Slice(_moved(name, -1), _moved(_plus(_moved(upper, -at), name), -1))
    for name in map(read, names.loops if at == 0 and upper else ()):
        yield 0, ast.Slice(name, _plus(name, upper))
        yield 0, ast.Slice(_times(name, upper), _plus(_times(name, upper), upper))
    yield 3, ast.Slice(lower, upper, ast.Constant(2))
    for size in names.sizes if getattr(upper, "value", 0) == 1 else ():
        yield 1, ast.Slice(_less(size, ast.Constant(1)), size)
    for name in map(read, names.loops):
        yield 2, ast.Slice(name, _plus(name, ast.Constant(1)))
        for size in names.sizes:
            begin = _times(name, size)
            yield 2, ast.Slice(begin, _plus(begin, size))


def _indices(node: ast.AST, names: Names) -> set[str]:
    return names.loops.keys() & names_in(ast.Load, node)


def _moved(node: Any, by: int) -> Any:
    """A bound and a number more, with one number in the text."""
    value: Any = getattr(getattr(node, "right", node), "value", None)
    if isinstance(node, ast.Constant):
        return ast.Constant(value + by)
    if isinstance(getattr(node, "op", None), ast.Add) and type(value) is int:
        node, by = node.left, by + value
    return (_plus if by > 0 else _less)(node, ast.Constant(abs(by))) if by else node


class _Turned(ast.NodeTransformer):
    """A pattern's steps and the channel's of the other sign."""

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        steps: list[Any] = getattr(node.value, "elts", [])
        for one in steps if node.arg == "pattern" else ():
            one.elts[0] = _opposite(one.elts[0])
        negated = node.arg == "channel_multiplier"
        return with_(node, value=_opposite(node.value)) if negated else node


def _opposite(node: ast.expr) -> ast.expr:
    return node.operand if isinstance(node, ast.UnaryOp) else _negated(node)


def renamed(node: ast.AST, names: Names) -> Iterator[tuple[int, Any]]:
    """Several uses of a name that are another name's."""
    for name, count in Counter(one.id for one in uses(ast.Load, node)).items():
        some = [s for n in range(2, count + 1) for s in combinations(range(count), n)]
        for (rank, other), places in product(names.like(name), some if count < 5 else some[-1:]):
            made = copy.deepcopy(node)
            same = [one for one in uses(ast.Load, made) if one.id == name]
            for at in places:
                same[at].id = other
            yield rank, made
