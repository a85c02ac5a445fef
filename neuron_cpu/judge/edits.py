"""One small change of a function's source: made, undone and said in words."""

import ast
import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """One change.

    Attributes:
        rank: of its likelihood, the least first.
        line: where it is made.
        holder, key: a node and a field of it, a list and an index, or global names and one of them.
        new: what stands there instead.
        trail: nodes from the statement down to what is replaced, for words.
        aside: whether all that points to a place points elsewhere.
    """

    rank: float
    line: int
    holder: Any
    key: Any
    new: Any
    trail: tuple[ast.AST, ...]
    aside: bool = False

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
            return f"`{self.key} = {self.new:.12g}` in place of `{ast.unparse(self.trail[-1])}`"
        if isinstance(self.new, Body):
            return self.new.said
        fits = [one for one in self.trail if len(ast.unparse(one)) <= 48]
        whole = fits[0] if fits else self.trail[-1]
        inside = whole is not self.trail[-1]
        old, before = self.trail[-1], ast.unparse(whole)
        with self.made():
            after = ast.unparse(whole if inside else self.new)
        same = getattr(old, "func", None) is getattr(self.new, "func", 0)
        if not inside and same and isinstance(old, ast.Call) and isinstance(self.new, ast.Call):
            pairs = [_parts(one) for one in (self.new, old)]
            after, before = (", ".join(a for a in x if a not in y) for x, y in (pairs, pairs[::-1]))
        if not after:
            return f"`{before or ast.unparse(whole)}` left out"
        return f"`{after}`" + (f" in place of `{before}`" if before else " added")


class Body(list):
    """Statements in another order, and the change in words."""

    def __init__(self, statements: Iterable, said: str) -> None:
        super().__init__(statements)
        self.said = said


class Together:
    """Several changes that are made, and undone, whenever `order` is set."""

    def __init__(self, edits: list[Edit]) -> None:
        self.edits, self.values = edits, [one.new for one in edits]

    @property
    def order(self) -> None:
        return None

    @order.setter
    def order(self, _: Any) -> None:
        self.values = [one.swap(value) for one, value in zip(self.edits, self.values)][::-1]
        self.edits.reverse()  # of two at one place the last is undone first


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


def short(statement: ast.AST) -> str:
    if hasattr(statement, "body"):
        statement = with_(statement, body=[ast.Pass()])
    text = ast.unparse(statement).splitlines()[0].removesuffix(":")
    return text if len(text) <= 80 else f"{text[:78]} …"


def with_(node: Any, **fields: Any) -> Any:
    """The node with other fields; it shares all others."""
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def exchanged(items: list, a: int, b: int) -> list:
    made = list(items)
    made[a], made[b] = made[b], made[a]
    return made
