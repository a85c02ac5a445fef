"""All changes of a kernel's functions, the likeliest first, and what points to their places."""

import ast
import inspect
import linecache
import math
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

from ..core.program.source import tree_of
from .aims import Aim
from .edits import Body, Edit, Guard, short
from .kinds import constants, in_place
from .moves import (
    SIMPLE,
    around_loops,
    carried,
    everywhere,
    kept,
    made_in,
    orders,
    pairs,
    rescaled,
    strides,
    turned,
)
from .names import Names, function_of, names_in


class Signs(NamedTuple):
    """What points to the place of a mistake.

    Attributes:
        lines: a refusal names them, or they touch what is unread.
        steps: how near others are to where the reference's way is left (`steps.Way`).
        names: of what nobody reads.
        shapes: of tensors by name.
        numbers, words: of the reference, its operations by names of `nl`.
        aims: lines that would give what the reference computes.
    """

    lines: frozenset[int] = frozenset()
    steps: dict[int, float] = {}
    names: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = {}
    numbers: tuple[float, ...] = ()
    words: frozenset[str] = frozenset()
    aims: tuple[Aim, ...] = ()

    def near(self, tree: ast.AST, inside: Set[str] = frozenset()) -> dict[int, float]:
        """First lines of statements: 1.5 where they point to it, 1 where it returns or calls one of
        the functions `inside` of which they point, 0.5 where it makes what such a one reads, or
        what makes that."""
        kinds = (ast.Expr, ast.Assign, ast.AugAssign, ast.For, ast.Return)
        found: dict[int, float] = {}
        reads: dict[str, None] = {}
        heads = [(one, _head(one)) for one in ast.walk(tree) if isinstance(one, kinds)]
        for one, parts in heads:
            last = max(getattr(part, "end_lineno", one.lineno) for part in parts)
            if not self.lines.isdisjoint(range(one.lineno, last + 1)):
                found[one.lineno] = 1.5
                reads |= names_in(ast.Load, *parts)
            elif isinstance(one, ast.Return) or inside & names_in(ast.Load, *parts).keys():
                found[one.lineno] = 1.0
            steps = max(self.steps.get(line, 0.0) for line in range(one.lineno, last + 1))
            found |= {one.lineno: steps} if steps > found.get(one.lineno, 0.0) else {}
            reads |= names_in(ast.Load, *parts) if steps > 1 else {}
        for _ in range(2):
            for one, parts in heads:
                if one.lineno not in found and reads.keys() & names_in(ast.Store, *parts):
                    found[one.lineno] = 0.5
            for one, parts in heads:
                reads |= names_in(ast.Load, *parts) if found.get(one.lineno) == 0.5 else {}
        return found


def _head(statement: Any) -> list[ast.AST]:
    """A statement, of a loop what stands before the colon."""
    return [statement.target, statement.iter] if isinstance(statement, ast.For) else [statement]


# What does in a kernel what an operation of a reference does.
WORDS = {
    "Add": "add", "Sub": "subtract", "Mult": "multiply", "Div": "multiply reciprocal",
    "Pow": "square", "sum": "add", "where": "multiply",
    "sqrt": "sqrt rsqrt", "max": "maximum max", "amax": "maximum max",
    "maximum": "maximum relu", "mean": "multiply mean", "USub": "subtract negative",
    "clip": "minimum maximum", "clamp": "minimum maximum", "abs": "abs maximum",
    "min": "minimum", "std": "sqrt rsqrt square", "var": "square",
    "norm": "sqrt rsqrt",
}  # fmt: skip


# PyTorch's functions of several steps, written out.
WRITTEN = {
    "softmax": "lambda input, dim=-1: (exp := torch.exp(input - input.amax(dim, True)))"
    " / exp.sum(dim, True)",
    "log_softmax": "lambda input, dim=-1: (shifted := input - input.amax(dim, True))"
    " - torch.log(torch.exp(shifted).sum(dim, True))",
    "logsumexp": "lambda input, dim, keepdim=False: torch.log(torch.exp(input - (largest :="
    " input.amax(dim, True))).sum(dim, keepdim)) + (largest if keepdim else largest.squeeze(dim))",
    "silu": "lambda input: input * torch.sigmoid(input)",
    "gelu": "lambda input, approximate='none': 0.5 * input * (1.0 + ("
    "torch.erf(input * 0.7071067811865476) if approximate == 'none' else"
    " torch.tanh(0.7978845608028654 * (input + 0.044715 * input**3))))",
    "layer_norm": "lambda input, shape, weight=None, bias=None, eps=1e-5:"
    " (centred := input - input.mean(-1, True))"
    " / torch.sqrt((centred * centred).mean(-1, True) + eps)"
    " * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)",
    "var": "lambda input, dim=None, unbiased=True, keepdim=False, axis=None, keepdims=False,"
    " ddof=0, correction=1: (total := ((apart := input - input.mean(axis=dim if axis is None else"
    " axis, keepdims=True)) * apart).sum(axis=dim if axis is None else axis, keepdims=keepdim or"
    " keepdims)) / (input.reshape(-1).shape[0] / total.reshape(-1).shape[0] - (correction *"
    " unbiased if isinstance(input, torch.Tensor) else ddof))",
    "norm": "lambda input, ord=2, dim=None, keepdim=False, axis=None, keepdims=False, p=2: (input"
    " * input).sum(axis=dim if axis is None else axis, keepdims=keepdim or keepdims) ** 0.5",
    "vector_norm": "lambda *args, **kwargs: torch.norm(*args, **kwargs)",
    "std": "lambda input, *args, **kwargs: input.var(*args, **kwargs) ** 0.5",
    "cross_entropy": "lambda input, target, reduction='mean', label_smoothing=0.0: (lambda"
    " each: each if reduction == 'none' else getattr(each, reduction)())(torch.logsumexp(input, 1)"
    " - (1 - label_smoothing) * input.gather(1, target[:, None])[:, 0]"
    " - label_smoothing * input.mean(1))",
    "cosine_similarity": "lambda x1, x2, dim=1, eps=1e-8: (x1 * x2).sum(dim)"
    " / (torch.sqrt((x1 * x1).sum(dim)).clamp(min=eps)"
    " * torch.sqrt((x2 * x2).sum(dim)).clamp(min=eps))",
    "normalize": "lambda input, p=2.0, dim=1, eps=1e-12:"
    " input / torch.sqrt((input * input).sum(dim, True)).clamp(min=eps)",
    "glu": "lambda input, dim=-1: (halves := input.chunk(2, dim))[0] * torch.sigmoid(halves[1])",
    "rms_norm": "lambda input, shape, weight=None, eps=2.0**-52:"
    " input / torch.sqrt((input * input).mean(-1, True) + eps)"
    " * (1.0 if weight is None else weight)",
}


def asked_of(function: Callable) -> tuple[tuple[float, ...], frozenset[str]]:
    """Numbers in a function's text, with pi what is often taken of it; and its operations."""
    tree = tree_of(inspect.unwrap(function)) if inspect.isroutine(function) else None
    nodes: list[Any] = [*ast.walk(tree)] if tree else []
    for one in nodes:  # which grows
        written = WRITTEN.get(function_of(one))
        nodes += ast.walk(ast.parse(written)) if written else []
    values = [one.value for one in nodes if isinstance(one, ast.Constant)]
    turns = (1, 2, 0.5) if any(getattr(one, "attr", "") == "pi" for one in nodes) else ()
    found = [one for one in values if type(one) is float] + [math.pi * one for one in turns]
    named = [getattr(one, "attr", type(getattr(one, "op", None)).__name__) for one in nodes]
    words = " ".join(WORDS.get(one, one) for one in named)
    return tuple(dict.fromkeys(found)), frozenset(words.split())


def ranked(
    trees: Sequence[tuple[str, ast.FunctionDef]], known: dict[str, Any], signs: Signs
) -> list[tuple[str, Any, Edit]]:
    """Each change with its file and tree.

    Args:
        trees: files and functions; the first is the kernel.
        known: values of their global names, which a change changes.
    """
    found: list[tuple[str, Any, Edit]] = []
    inside = {
        tree.name
        for _, tree in trees
        if not signs.lines.isdisjoint(range(tree.lineno, (tree.end_lineno or 0) + 1))
    }
    for file, tree in trees:
        near = signs.near(tree, inside)
        names = Names(tree, known, signs.numbers, signs)
        for one in chain(_aimed(tree, names, signs), _edits(tree, names, near)):
            less = near.get(one.statement, 0.0) + _same(one, signs)
            aside = bool(signs.lines or signs.steps) and not less
            found.append((file, tree, one._replace(rank=one.rank - 2 * less, aside=aside)))
    for file in dict.fromkeys(file for file, _ in trees):
        lines = "".join(linecache.getlines(file))
        found += [(file, trees[0][1], one) for one in _of_globals(lines, known, signs.numbers)]
    return sorted(found, key=lambda one: (one[2].rank, one[2].size))


def _aimed(tree: ast.FunctionDef, names: Names, signs: Signs) -> Iterator[Edit]:
    """Lines that give what the reference computes, each also with a wrong one left out."""
    holders = [n for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]
    for holder, aim in product(holders, signs.aims):
        body: list[Any] = [*holder.body]  # type: ignore[attr-defined]
        for at, one in enumerate(body):
            target = aim.plain.partition(" ")[0]
            loop = isinstance(one, ast.For) and not aim.instead and target not in made_in(one)
            simple = isinstance(one, SIMPLE) and not isinstance(one, Guard)
            if not (simple or loop) or not one.lineno <= aim.line <= one.end_lineno:
                continue
            plain = isinstance(one, ast.Assign) or names.module is None
            text = aim.plain if plain else f"{names.module}{aim.text}"
            said = f"`{text}` {'in place of' if aim.instead else 'before'} `{short(one)}`"
            made = [*body[:at], ast.parse(text).body[0], *body[at + aim.instead :]]
            yield Edit(-9, one.lineno, holder, "body", Body(made, said), (one,))
            wrong = (n for n in made if signs.steps.get(getattr(n, "lineno", 0), 0) >= 1)
            for other in wrong if signs.steps.get(aim.line, 0) > 1 else ():
                if (
                    isinstance(other, SIMPLE)
                    and other in body
                    and (aim.instead or other is not one)
                ):
                    rest = [n for n in made if n is not other]
                    more = f"{said} and `{short(other)}` (line {other.lineno}) left out"
                    yield Edit(-5, one.lineno, holder, "body", Body(rest, more), (one,))


def _same(edit: Edit, signs: Signs) -> float:
    """More for a name that nobody reads, or of the same shape; less for one of another."""
    new, old = (getattr(one, "id", "") for one in (edit.new, [None, *edit.trail][-1]))
    shapes = [signs.shapes.get(one) if one else None for one in (new, old)]
    likely = 0.0 if None in shapes else 1.0 if shapes[0] == shapes[1] else -1.0
    return likely + 4.0 * (new in signs.names)


def _edits(tree: ast.FunctionDef, names: Names, near: dict[int, float]) -> Iterator[Edit]:
    """All changes of a function."""
    single = [*_in_statements(tree, names, near)]
    yield from single
    yield from everywhere(single)
    yield from pairs(tree, names)
    yield from strides(tree)


def _in_statements(node: Any, names: Names, near: dict[int, float]) -> Iterator[Edit]:
    for field in ("body", "orelse"):
        statements = getattr(node, field, [])
        for rank, at, order in orders(statements):
            yield Edit(rank, statements[at].lineno, node, field, order, ())
        for at, (one, other) in enumerate(pairwise(statements)):
            if not isinstance(one, Guard):
                for both in turned(one, other, names):
                    body = Body([*statements[:at], *both, *statements[at + 2 :]], both.said)
                    yield Edit(1, one.lineno, node, field, body, (one,))
        for at, one in enumerate(statements):
            yield from around_loops(node, field, at, one)
            yield from carried(node, field, at, one, names)
            for order in rescaled(statements, at, names):
                yield Edit(-3, one.lineno, node, field, order, (one,))
            if isinstance(one, (ast.For, ast.While, ast.If, ast.With)):
                yield from _in_statements(one, names, near)
            if not isinstance(one, Guard):
                yield from _in(one, names, (one,))
            for rank, new in kept(one, names):
                yield Edit(rank, one.lineno, statements, at, new, (one,))


def _in(node: ast.AST, names: Names, trail: tuple) -> Iterator[Edit]:
    for field, value in ast.iter_fields(node):
        listed = isinstance(value, list)
        for at, child in enumerate(value if listed else [value]):
            if not isinstance(child, (ast.expr, ast.keyword)):
                continue
            here = (*trail, child)
            holder, key = (value, at) if listed else (node, field)
            for rank, new in in_place(node, child, names):
                yield Edit(rank, child.lineno, holder, key, new, here)
            if not _negative(child):
                yield from _in(child, names, here)


def _negative(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _of_globals(lines: str, known: dict[str, Any], numbers: Sequence[float]) -> Iterator[Edit]:
    """Numbers that a file's own statements give to global names.

    Args:
        lines: the file's.
        known: the global names, which a change changes.
        numbers: that may stand there.
    """
    empty = ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), [], [])
    for one in ast.parse(lines).body:
        name = getattr(one.targets[0], "id", "") if isinstance(one, ast.Assign) else ""
        value = getattr(one, "value", None)
        if name in known and isinstance(value, ast.Constant):
            for _, other in constants(value, Names(empty, {}, numbers)):
                new = getattr(other, "value", None)
                yield Edit(3, one.lineno, known, name, new, (one,))
