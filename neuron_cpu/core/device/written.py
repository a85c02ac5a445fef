"""What the user's line says, for messages that repeat it with its mistake mended."""

import ast
import functools
import itertools
import linecache
import re
from types import FrameType
from typing import Any

from .errors import user_frame

_SIDES = {ast.Lt: "less", ast.LtE: "less", ast.Gt: "greater", ast.GtE: "greater"}
_REDUCING = ("sum", "max", "min", "mean", "prod", "var", "all")


def nodes(frame: FrameType | None = None, last: int | None = None) -> list[ast.AST]:
    """The expression that runs on the user's line, what it stands in, and last its statement.

    Empty where Python does not tell columns (before 3.11) and where the source is not at hand.
    """
    frame = frame or user_frame()
    positions = getattr(frame and frame.f_code, "co_positions", None)
    if frame is None or positions is None:
        return []
    at = (frame.f_lasti if last is None else last) // 2
    place = next(itertools.islice(positions(), at, None), None)
    above, places = _parsed("".join(linecache.getlines(frame.f_code.co_filename)))[1:]
    found = [*places.get(place, ())]
    while found and found[-1] in above and not isinstance(found[-1], ast.stmt):
        found.append(above[found[-1]])
    return found


def tree_of(frame: FrameType) -> ast.Module:
    """The source of the file that a frame runs; empty where it is not at hand."""
    return _parsed("".join(linecache.getlines(frame.f_code.co_filename)))[0]


@functools.lru_cache(4)
def _parsed(text: str) -> tuple[ast.Module, dict[ast.AST, ast.AST], dict[Any, list[ast.AST]]]:
    """A file's tree, what each node stands in, and the nodes of each place."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, SystemError):  # Python 3.11's, of two threads (gh-106905)
        tree = ast.Module([], [])
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    places: dict[Any, list[ast.AST]] = {}
    for node in above:
        places.setdefault(_place(node), []).append(node)
    return tree, above, places


def _place(node: ast.AST) -> tuple[int | None, ...]:
    names = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    return tuple(getattr(node, name, None) for name in names)


def operands(name: str = "") -> list[str]:
    """The texts of what the operator that runs joins; empty where none runs.

    Python asks ``0 < x`` of x as ``greater``: for that name the sides change places.
    """
    one = next(iter(nodes()), None)
    if isinstance(one, ast.UnaryOp):
        return [ast.unparse(one.operand)]
    if isinstance(one, ast.Compare):
        sides = [ast.unparse(one.left), ast.unparse(one.comparators[0])]
        return sides if name.startswith(_SIDES.get(type(one.ops[0]), "")) else sides[::-1]
    if isinstance(one, ast.AugAssign):
        return [ast.unparse(one.target), ast.unparse(one.value)]
    return [ast.unparse(one.left), ast.unparse(one.right)] if isinstance(one, ast.BinOp) else []


def subscripts() -> list[str]:
    """The texts of the subscript that runs; a name for it where none is at hand."""
    index = getattr(next(iter(nodes()), None), "slice", ast.Name("index"))
    return list(map(ast.unparse, index.elts if isinstance(index, ast.Tuple) else [index]))


def assigned(name: str) -> str:
    """What to write for a destination among the arguments where a call returns its result."""
    named = arguments()[1]
    dst = named.get("dst", named.get("out", "tile"))
    told = f"write {dst} = {called(name)}(...) with no destination in it"
    return f"{told}: this language returns the result"


def called(name: str) -> str:
    """The function of the call that runs, as the line names it; ``name`` where none is at hand."""
    return ast.unparse(getattr(call(), "func", ast.Name(name)))


def target() -> tuple[str, bool]:
    """What the call's result is given to, ``tile`` where that is nothing, and whether it is new."""
    found = nodes()
    statement = found[-1] if found else None
    if isinstance(statement, ast.Assign | ast.AugAssign) and statement.value in found[:2]:
        to = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        return ast.unparse(to), isinstance(statement, ast.Assign) and isinstance(to, ast.Name)
    return "tile", True


def expression() -> str:
    """The text of the expression that runs, "" where it is not at hand."""
    one = next(iter(nodes()), None)
    return "" if one is None else ast.unparse(one)


def numbers() -> str:
    """The names of whole numbers in the expression that runs, with their values."""
    frame, one = user_frame(), next(iter(nodes()), None)
    if one is None or frame is None:
        return ""
    names = dict.fromkeys(node.id for node in ast.walk(one) if isinstance(node, ast.Name))
    held = frame.f_locals
    return ", ".join(f"{name}={held[name]}" for name in names if type(held.get(name)) is int)


def call() -> ast.Call | None:
    """The call that runs, or that the attribute is taken for."""
    return next((node for node in nodes()[:2] if isinstance(node, ast.Call)), None)


def arguments() -> tuple[list[str], dict[str, str]]:
    """The texts of the arguments in the call that runs: those in order, those by keyword."""
    one = call()
    named = {k.arg or "**": ast.unparse(k.value) for k in getattr(one, "keywords", ())}
    return [ast.unparse(arg) for arg in getattr(one, "args", ())], named


def argument(name: str) -> str:
    """The argument of the call that runs that is a part of ``name``, or that name."""
    texts, named = arguments()
    return next((text for text in (*texts, *named.values()) if text.startswith(f"{name}[")), name)


def filled(text: str, name: str, method: bool = False) -> str:
    """A text in which x, y and the like are the operands of the call of ``name`` that runs.

    ``method``: x is the tile whose method or attribute that is.
    """
    one = next(iter(nodes()), None)
    texts, named = arguments() if function() == name else (operands(), {})
    part = getattr(one, "func", one)
    if method and isinstance(part, ast.Attribute):
        texts = [ast.unparse(part.value), *texts]
    texts = [one for one in texts if one[0] not in "'\""]  # einsum("ij,jk->ik", x, y)
    words = dict(zip("xyz", texts)) | dict(zip(("low", "high"), texts[1:]))
    words |= {w: named[k] for w, k in (("low", "min"), ("high", "max")) if k in named}
    if texts:
        words["axis"] = f"axis={named.get('axis', named.get('dim', '1'))}, keepdims=True"
    return re.sub(r"\b(x|y|z|low|high|(?<=, )axis)\b(?!=)", lambda m: words.get(m[1], m[1]), text)


def word() -> str:
    """The first word of the user's line, as if or while."""
    frame = user_frame()
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return next(iter(line.split()), "")


def function() -> str:
    """The name of the function in the call that runs, without its module."""
    of = getattr(call(), "func", None)
    return getattr(of, "id", "") or getattr(of, "attr", "")


def rewritten(name: str, keywords: dict[str, str], method: bool = False) -> str:
    """The call that runs as one of ``nl.name``: a method's tile is its first argument.

    ``keywords``: those of other languages, and what they are in this one.
    """
    one, (texts, named) = call(), arguments()
    if one is None:
        return f"nl.{name}(x, ...)"
    if method and isinstance(one.func, ast.Attribute):
        texts.insert(0, ast.unparse(one.func.value))
    named = {keywords.get(word, word): text for word, text in named.items()}
    if name in _REDUCING and len(texts) == 1 and not named.get("axis"):
        named["axis"] = "1"
    return f"nl.{name}({', '.join([*texts, *(f'{word}={text}' for word, text in named.items())])})"
