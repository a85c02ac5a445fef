"""Which small change of a kernel's source makes its results the reference's?

Each change of `edits` is traced and run on the failing values, with the functions of the kernel's
file as its author wrote them; one counts that is legal and right on all values that are tried. Of
several those stay that are right at most sizes, and leave the least unread.
"""

import ast
import contextlib
import copy
import io
import linecache
import warnings
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from ..core.program.source import names_of, reachable, tree_of
from .edits import Edit, Guard
from .names import names_in, read
from .ranking import Signs, ranked

MOST, KEPT = 3, 8  # lines that are named, and that are looked for
CHANCE = ", perhaps by chance: check it at other sizes"
TURNS = 512  # of loops beyond four times the kernel's own


class Enough(Exception):
    """No more changes are to be tried."""


class _TooLong(Exception):
    """A change makes loops run far more often than the kernel's."""


class Change(NamedTuple):
    """A change that makes a function right.

    Attributes:
        faults: how many signs there are that it is right by chance.
        fails: other sizes at which it is refused or wrong, less those at which it is right.
        rank, size: of the change.
        place, words: FILE:LINE, and what stands in place of what.
        but: where it is wrong, or that it may be right by chance, in words; empty else.
    """

    faults: int
    fails: int
    rank: float
    size: int
    place: str
    words: str
    but: str = ""

    @property
    def sure(self) -> bool:
        return not self.faults and self.fails < 0


class Source:
    """The functions that a function reaches in its module, as trees that can be changed."""

    def __init__(self, function: Callable, signs: Signs) -> None:
        self.root = getattr(function, "__name__", "")
        self.trees: list[tuple[str, ast.FunctionDef]] = []
        self.code: dict[int, CodeType] = {}
        self.known: dict[str, Any] = {}
        self.turns, self.own, self.limit, self.signs = 0, 0, 1 << 30, signs
        for one, owner in reachable(function):
            tree = tree_of(one) if owner is None else None
            if tree is not None:
                tree = copy.deepcopy(tree)
                tree.decorator_list = []
                _guard(ast.fix_missing_locations(tree))
                self.trees.append((one.__code__.co_filename, tree))
                self.known = {**names_of(one), **self.known}
        if self.trees:
            self.root = self.trees[0][1].name
        self.code = {id(tree): compiled(file, tree) for file, tree in self.trees}

    def build(self, changed: ast.AST | None = None) -> Callable:
        """The function as it stands in the trees, of which one has changed."""
        names = {**self.known, "__turn": self._turn}
        for file, tree in self.trees:
            exec(compiled(file, tree) if tree is changed else self.code[id(tree)], names)
        self.turns = 0
        return names[self.root]

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > self.limit:
            raise _TooLong

    def changed(self) -> Iterator[tuple[Edit, str, Callable]]:
        """Each change, the file, and the function that has it."""
        self.own, self.limit = self.turns, 4 * self.turns + TURNS
        seen: set[tuple] = set()
        for file, tree, edit in ranked(self.trees, self.known, self.signs):
            key = id(edit.holder), str(edit.key), _text(edit.new)
            if key in seen:
                continue
            seen.add(key)
            if not isinstance(edit.holder, dict):
                _place(edit)
            try:
                with edit.made():
                    made = self.build(tree)
            except Exception:  # no legal Python, or a default that is not known here
                continue
            yield edit, file, made

    def strict(self) -> Callable:
        """The function as it stands in the trees, with a source of its own for checks that read it;
        a bound of a slice that is negative by a formula is an error."""
        names = {**self.known, "__bound": _bound}
        text = "\n".join(ast.unparse(_Bounds().visit(copy.deepcopy(t))) for _, t in self.trees)
        linecache.cache[_CHANGED] = len(text), None, text.splitlines(keepends=True), _CHANGED
        exec(compile(text, _CHANGED, "exec"), names)
        return names[self.root]

    def loose(self) -> int:
        """How many names are given a value of their own that nothing reads."""
        count = 0
        for _, tree in self.trees:
            given = (one.targets[0] for one in ast.walk(tree) if isinstance(one, ast.Assign))
            known = names_in(ast.Load, tree).keys()
            count += len({getattr(one, "id", None) for one in given} - known - {None})
        return count


_CHANGED = "<changed>"


def _text(new: Any) -> str:
    return getattr(new, "said", "") or (ast.dump(new) if isinstance(new, ast.AST) else repr(new))


class _Bounds(ast.NodeTransformer):
    """Bounds of slices are looked at; guards go."""

    def visit_Guard(self, node: Guard) -> None:
        return None

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            if isinstance(bound, (ast.BinOp, ast.Name)):
                setattr(node, name, ast.Call(read("__bound"), [bound], []))
        return node


def _bound(value: Any) -> Any:
    if isinstance(value, int) and value < 0:
        raise IndexError(value)
    return value


def _guard(tree: ast.FunctionDef) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            guard = ast.copy_location(Guard(ast.Call(read("__turn"), [], [])), node.body[0])
            node.body.insert(0, ast.fix_missing_locations(guard))


def compiled(file: str, tree: ast.FunctionDef) -> CodeType:
    return compile(ast.Module([tree], []), file, "exec")


def _place(edit: Edit) -> None:
    """Give what is new its line."""
    for one in edit.new if isinstance(edit.new, list) else [edit.new]:
        for node in ast.walk(one):
            if not hasattr(node, "lineno"):
                node.lineno = node.end_lineno = edit.line  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]


def repairs(
    function: Callable,
    right: Callable[[Callable], bool],
    faults: Callable[[Callable], tuple[int, int, str]] = lambda _: (0, -1, ""),
    signs: Signs = Signs(),  # noqa: B008 - has no state
) -> list[Change]:
    """Changes of a function that make it right, the likeliest first.

    Args:
        right: whether a changed function is. It may raise what the function does, or `Enough` where
            no more are to be tried.
        faults: how many signs there are that one that is right is so by chance, at how many more
            other sizes it is not right than right, and where it is wrong; raises what the function
            does.
        signs: where to begin.
    """
    source = Source(function, signs)
    found: dict[tuple[str, int], Change] = {}
    unseen = None  # True where only the source shows the mistake, None where it is refused
    with quiet():
        with contextlib.suppress(Exception, SystemExit):
            unseen = right(source.build())
        for edit, file, made in source.changed():
            place = file, edit.statement
            sure = [one.rank for one in found.values() if one.sure]
            if sure and edit.rank > min(sure) or len(found) == KEPT:
                break
            known = found.get(place)
            try:
                if not (known and known.sure) and (unseen or right(made)):
                    with edit.made():
                        strict, loose = source.strict(), source.loose()
                    if unseen and not right(strict):
                        continue
                    # a loop of one step hides that its index is missing
                    hides = unseen is False and not source.own <= source.turns <= 4 * source.own
                    many, fails, but = faults(strict)
                    many, where = many + hides + loose, f"{file}:{edit.line}"
                    but = but or CHANCE * bool(hides + loose)
                    if many and edit.aside or hides and isinstance(edit.holder, dict):
                        continue
                    one = Change(many, fails, edit.rank, edit.size, where, edit.words(), but)
                    found[place] = min(one, known or one)
            except Enough:
                break
            except (Exception, SystemExit):
                continue  # no legal kernel
    least = min(found.values(), default=None)
    some = (one for one in found.values() if least and one[:3] == least[:3])
    return sorted(some)[:MOST]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is tried warns and prints nothing."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
