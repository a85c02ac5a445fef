"""The names of a function by what they hold, and what stands at its places."""

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 16  # formulas and slices that are put in like places
NO_TILES = frozenset({"ds", "arange", "mgrid", "affine_range", "sequential_range", "program_id"})


class Names:
    """The names of a function by what they hold: loop indices, numbers and tensors.

    Attributes:
        known: values of its global names.
        others: numbers that its author may have meant.
        sizes, sized: numbers by name, and whole numbers; and those by name.
        slices, formulas: that stand in it.
        idle: global whole numbers that it does not read.
        given: values of named arguments, by function and argument.
        sums: tiles to which something is added in place.
        copies: pairs of names, of which the first becomes the second.
        module: of functions with a dst, as `nisa.`, or ""; None where there are none.
        parts: subscripts that are read.
        shapes: of tiles.
        lost: names of tiles that nobody reads.
        words: operations of the reference.
    """

    def __init__(
        self,
        tree: ast.FunctionDef,
        known: dict[str, Any],
        others: Sequence[float] = (),
        signs: Any = None,
    ) -> None:
        self.known, self.others = known, others
        self.shapes: dict[str, tuple[int, ...]] = signs.shapes if signs else {}
        self.lost: frozenset[str] = signs.names if signs else frozenset()
        self.words: frozenset[str] = signs.words if signs else frozenset()
        self.loops: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.tensors = dict.fromkeys(one.arg for one in tree.args.args)
        bounds = [n for n in ast.walk(tree) if isinstance(n, ast.Slice) or function_of(n) == "ds"]
        inside = {name for one in bounds for name in names_in(ast.Load, one)}
        self.numbers |= dict.fromkeys(one for one in self.tensors if one in inside)
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                self.loops |= dict.fromkeys(names_in(ast.Store, node.target))
            elif isinstance(node, ast.Assign):
                parts = [(target, node.value) for target in node.targets]
                if isinstance(node.value, ast.Tuple):
                    parts = [*zip(getattr(node.targets[0], "elts", ()), node.value.elts)]
                for target, value in parts:
                    stored = names_in(ast.Store, target)
                    part = isinstance(value, ast.Subscript) and name_of(value) in self.tensors
                    tiles = part or makes_tensor(value) or not self.shapes.keys().isdisjoint(stored)
                    (self.tensors if tiles else self.numbers).update(stored)
        used = names_in(ast.Load, tree)
        self.numbers.pop("_", None)
        self.idle = [read(n) for n, v in known.items() if type(v) is int and n not in used]
        self.numbers |= {one: None for one in used if type(known.get(one)) in (int, float)}
        literal = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        texts = [*self.numbers, *(str(n) for n in literal if type(n) is int and n > 1)]
        self.sizes = [ast.parse(text, mode="eval").body for text in texts]
        self.sized = [one for one in self.sizes if isinstance(one, ast.Name)]
        self.slices = _distinct(n for n in ast.walk(tree) if isinstance(n, ast.Slice))
        self.formulas = _distinct(n for n in ast.walk(tree) if self.is_formula(n))
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        given = [{k.arg: getattr(k.value, "id", "") for k in one.keywords} for one in calls]
        self.sums = {a["dst"] for a in given if a.get("dst") and a["dst"] == a.get("data1")}
        self.copies = [(a["dst"], a["src"]) for a in given if a.get("dst") and a.get("src")]
        told = [ast.unparse(one.func) for one, a in zip(calls, given) if "dst" in a]
        self.module = "".join(told[0].rpartition(".")[:2]) if told else None
        for one in (n for n in ast.walk(tree) if isinstance(n, ast.Assign)):
            name = getattr(one.targets[0], "id", "")
            if function_of(one.value) == "add" and name in names_in(ast.Load, one.value):
                self.sums.add(name)
            self.copies += [(name, one.value.id)] if isinstance(one.value, ast.Name) else []
        subscripts = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and name_of(n)]
        self.parts = _distinct(n for n in subscripts if isinstance(n.ctx, ast.Load))
        self.given: dict[tuple[str, str], list[ast.expr]] = {}
        for call, one in ((n, k) for n in ast.walk(tree) for k in getattr(n, "keywords", ())):
            values = self.given.setdefault((function_of(call), one.arg), [])
            if ast.dump(one.value) not in map(ast.dump, values):
                values.append(one.value)

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

    def value_of(self, name: ast.AST) -> Any:
        """The global value of a name, or of an attribute of one; None without any."""
        if isinstance(name, ast.Attribute):
            return getattr(self.value_of(name.value), name.attr, None)
        return self.known.get(getattr(name, "id", ""))

    def is_number(self, node: ast.AST) -> bool:
        """Whether it is a formula, a number's name or a whole number."""
        named = getattr(node, "id", None)
        whole = isinstance(node, ast.Constant) and type(node.value) is int
        return whole or named in self.numbers or named in self.loops or self.is_formula(node)

    def is_tile(self, node: ast.AST) -> bool:
        return name_of(node) in self.tensors

    def like(self, name: str) -> list[tuple[int, str]]:
        """Names that may stand for a name, each with a rank: less of those of one other letter."""
        for rank, kind in ((1, self.loops), (2, self.numbers), (2, self.tensors)):
            if name in kind:
                more = [(2, one) for one in self.loops if kind is self.numbers]
                return [(rank - _alike(one, name), one) for one in kind if one != name] + more
        return []


def _distinct(nodes: Iterable[Any]) -> list[Any]:
    """Each once, those first that stand at most places."""
    every = list(nodes)
    known = {ast.dump(one): one for one in every}
    return [known[text] for text, _ in Counter(map(ast.dump, every)).most_common(MOST)]


def _alike(one: str, other: str) -> int:
    """2 for names of which one letter differs, 1 for names of one letter."""
    near = len(one) == len(other) and sum(map(str.__ne__, one, other)) == 1
    return near * min(2, len(one))


def uses(use: type, *nodes: ast.AST) -> list[ast.Name]:
    """Where names are read (ast.Load) or given a value (ast.Store)."""
    every = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name))
    return [one for one in every if isinstance(one.ctx, use)]


def names_in(use: type, *nodes: ast.AST) -> dict[str, None]:
    """Names that are read or given a value, in their order."""
    return dict.fromkeys(one.id for one in uses(use, *nodes))


def read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def name_of(node: Any) -> str:
    """The name of a tile with or without a subscript, of what an attribute is of; or ""."""
    return getattr(getattr(node, "value", node), "id", "")


def function_of(node: ast.AST) -> str:
    """The last part of a called name: `nisa.activation` is activation; "" for no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def makes_tensor(value: ast.AST) -> bool:
    """Whether it is a call that returns or writes tiles: a method's, of no module of numbers."""
    called = getattr(value, "func", None)
    return (
        isinstance(called, ast.Attribute)
        and called.attr not in NO_TILES
        and name_of(called) not in ("math", "np", "numpy")
    )
