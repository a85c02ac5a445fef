"""Small changes of a function's source, one at a time: what its author may have meant.

An `Edit` changes a syntax tree in place and is undone. Kinds come in the order of their likelihood:
an argument too many (-1), instructions, flags and exchanged arguments (0), constants, indices and
accumulation (1), sizes and what stands in like places, statements elsewhere (2), other tensors and
shifted bounds (3).
"""

import ast
import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from ..core.instructions.alu import ACTIVATIONS, ARITHMETIC
from .patterns import LIMITS

# Names that stand for each other by mistake.
NEIGHBOURS: tuple[tuple[Any, ...], ...] = (
    (*ARITHMETIC, "divide"),
    (*ACTIVATIONS, "negative", "cos"),
    ("max", "min", "sum", "mean", "prod", "var", "std"),
    ("zeros", "ones"),
    ("argmax", "argmin"),
    ("load", "load_transpose2d"),
)
OPERATORS: tuple[tuple[Any, ...], ...] = ((ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv),)
COMPARED: tuple[tuple[Any, ...], ...] = ((ast.Lt, ast.LtE, ast.Gt, ast.GtE), (ast.Eq, ast.NotEq))
TYPES = frozenset({"float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8"})
# Arguments that are exchanged with each other, beside those whose names end in other digits.
PAIRS = (("stationary", "moving"), ("scale", "bias"), ("dst", "src"), ("dst", "data"))
ADDED = {
    "tensor_reduce": ("negate=True",),
    "tensor_scalar": ("reverse0=True", "reverse1=True"),
    "scalar_tensor_tensor": ("reverse0=True", "reverse1=True"),
    "activation": ("scale=-1.0",),
    "matmul": ("transpose_x=True",),
}
NEEDED = frozenset({"buffer", "dtype", "dst", "data", "src"})
NUMBERS = frozenset(
    {"scale", "bias", "operand0", "operand1", "value", "initial", "scalar", "imm0", "imm1"}
)
MOST = 16  # formulas and slices that are put in like places
RANGES = frozenset({"range", "affine_range", "sequential_range", "static_range"})
NO_TILES = frozenset({"ds", "arange", "mgrid", "affine_range", "sequential_range", "program_id"})


class Edit(NamedTuple):
    """One change.

    Attributes:
        rank: of its likelihood, the least first.
        line: where it is made.
        holder, key: a node and a field of it, a list and an index, or global names and one of them.
        new: what stands there instead.
        trail: nodes from the statement down to what is replaced, for words.
    """

    rank: float
    line: int
    holder: Any
    key: Any
    new: Any
    trail: tuple[ast.AST, ...]

    @property
    def size(self) -> int:
        """How many parts it adds, twice, and takes away; a statement counts as a few."""
        if not isinstance(self.new, ast.expr):
            return 4
        before, after = (Counter(map(_part, ast.walk(one))) for one in (self.trail[-1], self.new))
        return sum((before - after).values()) + 2 * sum((after - before).values())

    @property
    def statement(self) -> int:
        """The line of the statement that it changes."""
        return getattr(self.trail[0], "lineno", self.line) if self.trail else self.line

    def swap(self, value: Any) -> Any:
        """Put a value in the place; what stood there."""
        if isinstance(self.holder, (list, dict)):
            before, self.holder[self.key] = self.holder[self.key], value
            return before
        before = getattr(self.holder, self.key)
        setattr(self.holder, self.key, value)
        return before

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Inside the block the change is in place."""
        before = self.swap(self.new)
        try:
            yield
        finally:
            self.swap(before)

    def words(self) -> str:
        """The change as the author would write it."""
        if isinstance(self.holder, dict):
            return f"`{self.key} = {self.new:g}` in place of `{ast.unparse(self.trail[-1])}`"
        if isinstance(self.new, Body):
            return self.new.said
        if isinstance(self.new, list):
            return f"parameters {' and '.join(map(ast.unparse, self.trail))} exchanged"
        fits = [one for one in self.trail if len(ast.unparse(one)) <= 48]
        whole = fits[0] if fits else self.trail[-1]
        inside = whole is not self.trail[-1]
        old, before = self.trail[-1], ast.unparse(whole)
        with self.made():
            after = ast.unparse(whole if inside else self.new)
        if not inside and isinstance(old, ast.Call) and isinstance(self.new, ast.Call):
            pairs = [_parts(one) for one in (self.new, old)]
            after, before = (", ".join(a for a in x if a not in y) for x, y in (pairs, pairs[::-1]))
        if not after:
            return f"`{before or ast.unparse(whole)}` left out"
        return f"`{after}`" + (f" in place of `{before}`" if before else " added")


class Guard(ast.Expr):
    """A statement at the start of each loop's body that counts its turns; no edit touches it."""


def _part(node: ast.AST) -> tuple[Any, ...]:
    return (
        type(node),
        *(getattr(node, name, None) for name in ("id", "attr", "arg")),
        getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
    )


def _parts(call: ast.Call) -> list[str]:
    return [ast.unparse(one) for one in (*call.args, *call.keywords)]


def _short(statement: ast.AST) -> str:
    if hasattr(statement, "body"):
        statement = _with(statement, body=[ast.Pass()])
    return ast.unparse(statement).splitlines()[0].removesuffix(":")[:80]


# --- names ----------------------------------------------------------------------------------------
class _Names:
    """The names of a function by what they hold: loop indices, numbers and tensors."""

    def __init__(self, tree: ast.FunctionDef, known: dict[str, Any]) -> None:
        self.loops: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.tensors = dict.fromkeys(one.arg for one in tree.args.args)
        bounds = [n for n in ast.walk(tree) if isinstance(n, ast.Slice) or _function(n) == "ds"]
        inside = {name for one in bounds for name in names_in(ast.Load, one)}
        self.numbers |= dict.fromkeys(one for one in self.tensors if one in inside)
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                self.loops |= dict.fromkeys(names_in(ast.Store, node.target))
            elif isinstance(node, ast.Assign):
                kind = self.tensors if _makes_tensor(node.value) else self.numbers
                for target in node.targets:
                    kind.update(dict.fromkeys(names_in(ast.Store, target)))
        used = names_in(ast.Load, tree)
        self.numbers.pop("_", None)
        self.numbers |= {one: None for one in used if type(known.get(one)) in (int, float)}
        literal = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        texts = [*self.numbers, *(str(n) for n in literal if type(n) is int and n > 1)]
        self.sizes = [ast.parse(text, mode="eval").body for text in texts]
        self.slices = _distinct(n for n in ast.walk(tree) if isinstance(n, ast.Slice))
        self.formulas = _distinct(n for n in ast.walk(tree) if self.is_formula(n))
        self.counts = {
            node.target.id: node.iter.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
            if isinstance(node.iter, ast.Call) and len(node.iter.args) == 1
        }

    def is_formula(self, node: ast.AST) -> bool:
        """Whether it is a sum, product or quotient of numbers."""
        known = {*self.loops, *self.numbers}
        parts = (ast.BinOp, ast.Name, ast.Constant, ast.operator, ast.expr_context)
        return isinstance(node, ast.BinOp) and all(
            isinstance(one, parts)
            and getattr(one, "id", "") in {"", *known}
            and type(getattr(one, "value", 0)) is int
            for one in ast.walk(node)
        )

    def is_number(self, node: ast.AST) -> bool:
        """Whether it is a formula, a number's name or a whole number."""
        named = getattr(node, "id", None)
        whole = isinstance(node, ast.Constant) and type(node.value) is int
        return whole or named in self.numbers or named in self.loops or self.is_formula(node)

    def like(self, name: str) -> list[tuple[int, str]]:
        """Names that may stand for a name, each with a rank: less of those of one other letter."""
        for rank, kind in ((1, self.loops), (2, self.numbers), (3, self.tensors)):
            if name in kind:
                return [(rank - _alike(one, name), one) for one in kind if one != name]
        return []


def _distinct(nodes: Iterable[Any]) -> list[Any]:
    """Each once, those first that stand at most places."""
    every = list(nodes)
    known = {ast.dump(one): one for one in every}
    counts = Counter(map(ast.dump, every))
    return [known[text] for text, _ in counts.most_common(MOST)]


def _alike(one: str, other: str) -> int:
    """2 for names of which one letter differs, 1 for names of one letter."""
    near = len(one) == len(other) and sum(map(str.__ne__, one, other)) == 1
    return near * min(2, len(one))


def names_in(use: type, *nodes: ast.AST) -> dict[str, None]:
    """Names that are read (ast.Load) or given a value (ast.Store), in their order."""
    every = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return dict.fromkeys(one.id for one in every if isinstance(one.ctx, use))


def _function(node: ast.AST) -> str:
    """The last part of a called name: `nisa.activation` is activation; "" for no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _makes_tensor(value: ast.AST) -> bool:
    """Whether it is a call that returns or writes tiles: a method's, of no module of numbers."""
    of_module = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    module = getattr(getattr(getattr(value, "func", None), "value", None), "id", "")
    return of_module and _function(value) not in NO_TILES and module not in ("math", "np", "numpy")


# --- expressions ----------------------------------------------------------------------------------
def edits(tree: ast.FunctionDef, known: dict[str, Any]) -> Iterator[Edit]:
    """All changes of a function.

    Args:
        known: values of its global names.
    """
    names = _Names(tree, known)
    yield from _in_statements(tree, names)
    yield from _pairs(tree)
    given = tree.args.args
    for a, b in combinations(range(len(given)), 2):
        new = _exchanged(given, a, b)
        yield Edit(1, tree.lineno, tree.args, "args", new, (given[a], given[b]))


def _in_statements(node: Any, names: _Names) -> Iterator[Edit]:
    for field in ("body", "orelse"):
        statements = getattr(node, field, [])
        for rank, at, order in _orders(statements):
            yield Edit(rank, statements[at].lineno, node, field, order, ())
        for at, one in enumerate(statements):
            yield from _in_loop(node, field, at, one)
            if isinstance(one, (ast.For, ast.While, ast.If, ast.With)):
                yield from _in_statements(one, names)
            if not isinstance(one, Guard):
                yield from _in(one, names, (one,))
            for rank, new in _statement(one, names):
                yield Edit(rank, one.lineno, statements, at, new, (one,))


def _in(node: ast.AST, names: _Names, trail: tuple) -> Iterator[Edit]:
    for field, value in ast.iter_fields(node):
        listed = isinstance(value, list)
        for at, child in enumerate(value if listed else [value]):
            if not isinstance(child, (ast.expr, ast.keyword)):
                continue
            here = (*trail, child)
            holder, key = (value, at) if listed else (node, field)
            others = chain(_others(child, names), _placed(node, child, names))
            for rank, new in others:
                if not _does_nothing(node, child, new):
                    yield Edit(rank, child.lineno, holder, key, new, here)
            if not _negative(child):
                yield from _in(child, names, here)


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


def _negative(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _placed(holder: ast.AST, node: Any, names: _Names) -> Iterator[tuple[int, ast.AST]]:
    """What stands in like places, for a bound, a number of turns or a size."""
    counts, assigned = _function(holder) in RANGES, isinstance(holder, ast.Assign)
    bound = counts or isinstance(holder, (ast.Slice, ast.Compare)) or _function(holder) == "ds"
    if (bound or assigned) and names.is_number(node):
        yield from ((2, one) for one in names.formulas)
        for size in (*names.sizes, ast.Constant(2)) if counts or assigned else ():
            yield 2, ast.BinOp(node, ast.FloorDiv(), size)
            yield 2, ast.BinOp(size, ast.FloorDiv(), node)
    for operator in (ast.Add, ast.Sub) if counts or assigned and isinstance(node, ast.Name) else ():
        yield 2, ast.BinOp(node, operator(), ast.Constant(1))
    if bound and not counts or assigned and isinstance(node, (ast.Name, ast.BinOp)):
        for name in (ast.Name(one, ast.Load()) for one in names.loops):
            yield 2, ast.BinOp(node, ast.Add(), name)
            for size in names.sizes:
                yield 3, ast.BinOp(ast.BinOp(name, ast.Mult(), size), ast.Add(), node)
    if isinstance(node, ast.Slice):
        yield from ((2, one) for one in names.slices)


def _others(node: ast.AST, names: _Names) -> Iterator[tuple[int, ast.AST]]:
    """What may stand in the place of an expression, each with its rank."""
    if isinstance(node, ast.Attribute):
        for group in NEIGHBOURS:
            for other in group if node.attr in group else ():
                yield 0, _with(node, attr=other)
        if node.attr in TYPES:
            others = (*["float8_e4m3"] * node.attr.endswith("int8"), "float32", "int32")
            yield from ((1, _with(node, attr=other)) for other in others)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for rank, other in names.like(node.id):
            yield rank, _with(node, id=other)
        for size in names.sizes if node.id in names.loops else ():
            yield 1, ast.BinOp(node, ast.Mult(), size)
        if node.id in names.counts:
            last = ast.BinOp(names.counts[node.id], ast.Sub(), ast.Constant(1))
            yield 3, ast.BinOp(last, ast.Sub(), node)
    elif isinstance(node, ast.Constant):
        yield from _constants(node, names)
    elif isinstance(node, ast.BinOp):
        rank = 2 if names.is_formula(node) else 1  # sizes are seldom turned
        yield from ((1, side) for side in (node.left, node.right))
        yield rank, _with(node, left=node.right, right=node.left)
        inner = node.right
        if isinstance(inner, ast.BinOp):  # brackets
            yield rank, _with(inner, left=_with(node, right=inner.left))
        one = getattr(node.right, "value", 0) == 1
        for group in OPERATORS:
            for other in group[:2] if one else group:
                if isinstance(node.op, group):
                    yield rank, _with(node, op=other())
    elif isinstance(node, ast.UnaryOp):
        yield 0, node.operand
        if isinstance(node.operand, ast.Constant) and type(node.operand.value) is int:
            yield from ((1, ast.Constant(value)) for value in (0, 1 - node.operand.value))
    elif isinstance(node, ast.Compare):
        for group in COMPARED:
            for other in group if isinstance(node.ops[0], group) else ():
                yield 1, _with(node, ops=[other()])
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
        inner = _with(node.value, slice=node.slice)
        yield 0, _with(node, value=inner, slice=node.value.slice)
    elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in names.tensors:
        yield from ((3, ast.Name(name, ast.Load())) for name in names.tensors)
    elif isinstance(node, ast.Call):
        yield from _calls(node, names)
    elif isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
        for a, b in combinations(range(len(node.elts)), 2):
            yield 1, _with(node, elts=_exchanged(node.elts, a, b))
        held = [getattr(one, "value", None) for one in node.elts]
        numbers = [value for value in held if type(value) is int]
        if held and numbers == held:
            for begin, end in combinations(range(1, 6), 2):
                yield 2, _with(node, elts=[ast.Constant(axis) for axis in range(begin, end)])
    elif isinstance(node, ast.Slice):
        yield from _slices(node, names)
    elif isinstance(node, ast.keyword) and node.arg in NUMBERS:
        yield from ((2, _with(node, value=new)) for new in _scaled(node.value, names))


def _constants(node: ast.Constant, names: _Names) -> Iterator[tuple[int, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield 0, ast.Constant(not value)
    elif isinstance(value, (int, float)):
        others: list[float] = [value + 1, value - 1, value * 2, value / 2, value * 4, value / 4]
        if isinstance(value, float):
            others = [-value, *others, 0, 1, value**2, -3.4e38, 3.4e38]
        elif value < 8:
            others += [0, 1, -value]
        others += LIMITS if value in LIMITS else ()
        for other in dict.fromkeys(others):
            if other != value:
                whole = isinstance(value, int) and other == int(other)
                yield (
                    1 + (whole and value >= 32),
                    ast.Constant(int(other) if whole else float(f"{other:.6g}")),
                )
        for name in names.loops if isinstance(value, int) else ():
            yield 1, ast.Name(name, ast.Load())
            for size in names.sizes if value == 0 else ():
                yield 2, ast.BinOp(ast.Name(name, ast.Load()), ast.Mult(), size)
        for name in names.tensors if isinstance(value, float) else ():
            yield 3, ast.Name(name, ast.Load())
        yield from ((2, size) for size in names.sizes if isinstance(size, ast.Name))


def _calls(node: ast.Call, names: _Names) -> Iterator[tuple[int, ast.AST]]:
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
            values = _exchanged(values, keywords[a], keywords[b])
        made = [_with(k, value=v) for k, v in zip(node.keywords, values)]
        yield 3 if some[:1] in [[one] for one in rest] else 0, _with(node, keywords=made)
    for at in range(len(node.args) - 1):
        yield 0, _with(node, args=_exchanged(node.args, at, at + 1))
    more = [*ADDED.get(_function(node), ())]
    if _function(node) == "activation":
        more += [f"scale={form}{ast.unparse(one)}" for one in names.sizes for form in ("1.0/", "")]
    for text in more:
        added: Any = ast.parse(f"f({text})", mode="eval").body
        if added.keywords[0].arg not in keywords:
            rank = 0 if "True" in text else 1
            yield rank, _with(node, keywords=[*node.keywords, *added.keywords])
    for at, one in enumerate(node.keywords):
        flag = isinstance(one.value, (ast.Constant, ast.Compare)) and one.arg not in NUMBERS
        yield (
            2 if flag or one.arg in NEEDED else -1,
            _with(node, keywords=[k for k in node.keywords if k is not one]),
        )
        for pair in PAIRS if one.arg in ("scale", "bias") else ():
            for other in set(pair) - set(keywords) if one.arg in pair else ():
                named = [*node.keywords]
                named[at] = _with(one, arg=other)
                yield 0, _with(node, keywords=named)
    if len(node.args) == 1:
        yield 2, node.args[0]
        of = node.args[0]
        if _function(node) in RANGES:
            yield 2, _with(node, args=[ast.Constant(1), of])
            if isinstance(of, ast.BinOp):
                yield 1, _with(node, args=[ast.Constant(0), of.left, of.right])


def _slices(node: ast.Slice, names: _Names) -> Iterator[tuple[int, ast.AST]]:
    """Bounds at another loop's index, times a size, and shifted by one."""
    yield from _renamed(node, names)
    lower, upper = node.lower, node.upper
    if lower is not None and upper is not None:
        if not isinstance(lower, ast.Constant):
            yield 1, _with(node, upper=ast.BinOp(lower, ast.Add(), upper))
        yield 1, _with(node, lower=_Before().visit(copy.deepcopy(upper)))
    yield 3, ast.Slice(lower, upper, ast.Constant(2))
    for name in (ast.Name(one, ast.Load()) for one in names.loops):
        yield 2, ast.Slice(name, ast.BinOp(name, ast.Add(), ast.Constant(1)))
        for size in names.sizes:
            begin = ast.BinOp(name, ast.Mult(), size)
            yield 2, ast.Slice(begin, ast.BinOp(begin, ast.Add(), size))


class _Before(ast.NodeTransformer):
    """The end of a step becomes its begin: (i + 1) * 64 becomes i * 64."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        one = isinstance(node.op, ast.Add) and getattr(node.right, "value", 0) == 1
        return node.left if one else self.generic_visit(node)


def _scaled(value: ast.expr, names: _Names) -> Iterator[ast.expr]:
    """A number times and over the sizes, its reciprocal and its negative."""
    one = ast.Constant(1.0)
    if isinstance(value, ast.Name) and value.id in names.tensors:
        return
    yield ast.BinOp(one, ast.Div(), value)
    yield ast.UnaryOp(ast.USub(), value)
    for size in names.sizes:
        root = ast.BinOp(size, ast.Pow(), ast.Constant(0.5))
        for other in (size, root):
            yield ast.BinOp(value, ast.Div(), other)
            yield ast.BinOp(value, ast.Mult(), other)


def of_globals(lines: str, known: dict[str, Any]) -> Iterator[Edit]:
    """Numbers that a file's own statements give to global names.

    Args:
        lines: the file's.
        known: the global names, which a change changes.
    """
    nothing = _Names(ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), [], []), {})
    for one in ast.parse(lines).body:
        name = getattr(one.targets[0], "id", "") if isinstance(one, ast.Assign) else ""
        value = getattr(one, "value", None)
        if name in known and isinstance(value, ast.Constant):
            for _, other in _constants(value, nothing):
                new = getattr(other, "value", None)
                yield Edit(3, one.lineno, known, name, new, (one,))


# --- statements -----------------------------------------------------------------------------------
def _statement(node: Any, names: _Names) -> Iterator[tuple[int, ast.stmt]]:
    """A statement that accumulates or keeps a result, or uses another name throughout."""
    value: Any = getattr(node, "value", None)
    target: Any = node.targets[0] if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.Call) and target or isinstance(target, ast.Subscript):
        yield 0, ast.AugAssign(target, ast.Add(), value)
    if isinstance(node, ast.AugAssign):
        yield 0, ast.Assign([node.target], value)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call) and _makes_tensor(value):
        for name in names_in(ast.Load, value):
            if name in names.tensors:
                yield 1, ast.Assign([ast.Name(name, ast.Store())], value)
    several = _makes_tensor(value) or isinstance(value, (ast.Tuple, ast.List, ast.Attribute))
    if isinstance(node, ast.Assign) and not several:
        yield from ((2, _with(node, value=new)) for new in _scaled(node.value, names))
    if not isinstance(node, (ast.Expr, ast.Assign)) or isinstance(node, Guard):
        return
    yield from _renamed(node, names)


def _renamed(node: ast.AST, names: _Names) -> Iterator[tuple[int, Any]]:
    """Several uses of a name that are another name's."""
    for name, count in Counter(one.id for one in _uses(node)).items():
        some = [s for n in range(2, count + 1) for s in combinations(range(count), n)]
        for (rank, other), places in product(names.like(name), some if count < 5 else some[-1:]):
            made = copy.deepcopy(node)
            uses = [one for one in _uses(made) if one.id == name]
            for at in places:
                uses[at].id = other
            yield rank, made


def _uses(node: ast.AST) -> list[ast.Name]:
    every = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return [n for n in every if isinstance(n.ctx, ast.Load)]


class Body(list):
    """Statements in another order, and the change in words."""

    def __init__(self, statements: Iterable, said: str) -> None:
        super().__init__(statements)
        self.said = said


def _orders(statements: list) -> Iterator[tuple[int, int, Body]]:
    """Statements exchanged or left out: rank, where, and the new list."""
    simple = (ast.Expr, ast.Assign, ast.AugAssign)
    for at, one in enumerate(statements):
        if isinstance(one, Guard) or not isinstance(one, (*simple, ast.For, ast.If)):
            continue
        before, after = statements[:at], statements[at + 1 :]
        said = f"`{_short(one)}`"
        if after and isinstance(after[0], (*simple, ast.For)):
            behind = f"{said} behind `{_short(after[0])}`"
            yield 2, at, Body([*before, after[0], one, *after[1:]], behind)
        for k in [k for k, other in enumerate(after) if isinstance(other, simple)][:2]:
            for pair, words in _chained(one, after[k]):
                new = [*before, pair[0], *after[:k], pair[1], *after[k + 1 :]]
                yield 0, at, Body(new, words)
        if isinstance(one, simple) and len(statements) > 1:
            again = any(ast.dump(one) == ast.dump(other) for other in after[:1])
            yield 0 if again else 2, at, Body([*before, *after], f"{said} left out")


def _chained(first: Any, second: Any) -> Iterator[tuple[list[ast.stmt], str]]:
    """Two calls of which the second reads what the first writes, the other way round."""
    calls: list[Any] = [copy.deepcopy(getattr(one, "value", None)) for one in (first, second)]
    if not all(isinstance(one, ast.Call) for one in calls):
        return
    a, b = ({k.arg: k for k in one.keywords} for one in calls)
    source, taken = (
        next((one[name] for name in ("data", "data1", "src") if name in one), None)
        for one in (a, b)
    )
    if not source or not taken or "dst" not in a or "dst" not in b:
        return
    middle = a["dst"].value
    if ast.dump(middle).replace("Store", "Load") != ast.dump(taken.value):
        return
    taken.value, source.value = source.value, copy.deepcopy(middle)
    a["dst"].value, b["dst"].value = b["dst"].value, middle
    made = [_with(second, value=calls[1]), _with(first, value=calls[0])]
    yield made, f"the order `{_short(made[0])}` and `{_short(made[1])}`"


def _in_loop(holder: Any, field: str, at: int, loop: ast.stmt) -> Iterator[Edit]:
    """A statement of a loop before or behind it, and the neighbours of a loop inside of it."""
    if not isinstance(loop, ast.For):
        return
    outer, guard, inner = getattr(holder, field), loop.body[:1], loop.body[1:]
    before, after = outer[:at], outer[at + 1 :]

    def made(rank: int, one: ast.stmt, where: str, body: list, parts: list) -> Edit:
        within = _with(loop, body=[*guard, *body])
        moved = (within if part is loop else part for part in parts)
        said = f"`{_short(one)}` {where} `{_short(loop)}`"
        return Edit(rank, one.lineno, holder, field, Body(moved, said), (one, loop))

    for k, one in enumerate(inner):
        rest = [*inner[:k], *inner[k + 1 :]]
        if rest and isinstance(one, (ast.Expr, ast.Assign)):
            yield made(1, one, "before", rest, [*before, one, loop, *after])
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


def _pairs(tree: ast.FunctionDef) -> Iterator[Edit]:
    """Two operations, or two numbers, that have changed places."""
    every: list[Any] = [n for statement in tree.body for n in ast.walk(statement)]
    numbers = [n for n in every if isinstance(n, ast.Constant) and type(n.value) is float]
    named = [n for n in every if getattr(n, "attr", "") in (*NEIGHBOURS[0], *NEIGHBOURS[1])]
    for one, other in chain(combinations(numbers, 2), combinations(named, 2)):
        if ast.dump(one) != ast.dump(other):
            words = [f"`{ast.unparse(n)}` of line {n.lineno}" for n in (one, other)]
            said = f"{' and '.join(words)} exchanged"
            yield Edit(1, one.lineno, _Pair(one, other), "order", Body([], said), ())


def _with(node: Any, **fields: Any) -> Any:
    """The node with other fields; it shares all others."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _exchanged(items: list, a: int, b: int) -> list:
    made = list(items)
    made[a], made[b] = made[b], made[a]
    return made
