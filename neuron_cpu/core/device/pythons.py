"""Python's own errors in a kernel's body, with what mends them behind their text."""

import ast
import difflib
import re
from types import FrameType, TracebackType
from typing import Any

from .errors import is_internal
from .unknown import PYTHONS, answer, of_function
from .written import nodes, tree_of


def mended(error: Exception) -> Exception:
    """The error, with what mends it where the line's values or its text tell."""
    text, words = str(error), mend(error)
    if words and len(error.args) < 2:
        error.args = (f"{text}; {words}" if text else words,)
    return error


def mend(error: BaseException) -> str:
    """What mends the error; "" where nothing is known to help."""
    text = str(error)
    return _of_error(error) or next((words for said, words in PYTHONS.items() if said in text), "")


def _of_error(error: BaseException) -> str:
    """What mends Python's own error of a line, where its values tell; "" where they do not."""
    at, after = None, error.__traceback__
    while after is not None:
        at, after = at if is_internal(after.tb_frame.f_code.co_filename) else after, after.tb_next
    if at is None:
        return ""
    found = nodes(at.tb_frame, at.tb_lasti)
    one, statement = (found[0], found[-1]) if found else (None, None)
    one = one.value if isinstance(one, ast.Expr) else one  # a call that is a line stands there, too
    of: Any = getattr(one, "value", None)
    if isinstance(error, UnboundLocalError):
        return _of_unbound(str(error).split("'")[1], at)
    if type(error) is NameError and error.name:
        return _of_name(error.name, found, at.tb_frame)
    if isinstance(error, AttributeError) and error.name:
        return _of_attribute(error.name, error.obj, at.tb_frame)
    if isinstance(error, TypeError) and isinstance(one, ast.Call) and "argument" in str(error):
        return _of_call(one, at.tb_frame)
    if isinstance(error, ZeroDivisionError) and isinstance(one, ast.BinOp):
        return f"{ast.unparse(one.right)} is 0 here: give other sizes, or divide where it is not 0"
    held = _value(of, at.tb_frame)
    if isinstance(error, KeyError) and isinstance(held, dict):
        return f"{ast.unparse(of)} has the keys {', '.join(map(repr, held))}"
    if isinstance(error, IndexError) and isinstance(held, (list, tuple)):
        if not held:
            return f"{ast.unparse(of)} is empty here: append to it first"
        told = f"{ast.unparse(of)} has {len(held)} elements: count from 0 to {len(held) - 1}"
        told += ", or pass a tensor of more axes" * (getattr(of, "attr", "") == "shape")
        calls = (one for one in _own_nodes(at) if isinstance(one, ast.Call))
        added = [
            one.lineno for one in calls if ast.unparse(one.func) == f"{ast.unparse(of)}.append"
        ]
        return told + "".join(f", or append more often than line {line} runs" for line in added[:1])
    if isinstance(error, ValueError) and isinstance(statement, ast.Assign):
        held, what = _value(statement.value, at.tb_frame), ast.unparse(statement.value)
        told = f"{what} is {held}: take {len(held)} names, or give another shape" if held else ""
        return told if "unpack" in str(error) else ""
    if isinstance(error, AssertionError) and isinstance(statement, ast.Assert):
        return _of_assert(statement.test, at.tb_frame)
    return ""


def _own_nodes(at: TracebackType) -> list[ast.AST]:
    """The nodes of the function that an entry of a traceback runs, in the order of the text."""
    name = at.tb_frame.f_code.co_name
    own = (one for one in ast.walk(tree_of(at.tb_frame)) if getattr(one, "name", "") == name)
    return [node for one in own for node in ast.walk(one)]


def _of_unbound(name: str, at: TracebackType) -> str:
    """Where a name is given first, if that is below the line: by a loop, or by an assignment."""
    lines = [
        one.lineno
        for one in _own_nodes(at)
        if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
    ]
    if not lines or min(lines) < at.tb_lineno:
        return ""
    return (
        f"line {min(lines)}, below, gives {name}: write a name known here, or move the line there"
    )


def _of_name(name: str, found: list[ast.AST], frame: FrameType) -> str:
    """What to write for a name that nobody gave; a module's is answered by what is taken of it."""
    part = next((one.attr for one in found[1:2] if isinstance(one, ast.Attribute)), "")
    for alias in ("nl", "nisa"):
        if name in vars(frame.f_globals.get(alias, ast)) and not part:
            return f"write {alias}.{name}"
    if any(f"'{name}'" in known for known in PYTHONS):
        return ""
    known = [*frame.f_locals, *frame.f_globals]
    if close := difflib.get_close_matches(name, known, 1, 0.8 if part else 0.6):
        return f"write {close[0]} for {name}, or assign {name} above"
    use = answer(part, True) or (f"nl.{part}(...)" if of_function(part) else "")
    return f"import the module {name}{', or use ' * bool(use)}{use}" if part else ""


def _of_attribute(name: str, value: object, frame: FrameType) -> str:
    """What to write for an attribute that a value of Python's own does not have."""
    kind = type(value).__name__
    code = frame.f_code
    passed = [n for n in code.co_varnames[: code.co_argcount] if frame.f_locals.get(n) is value]
    if passed and name in ("shape", "dtype", "ndim"):
        sizes = value if isinstance(value, (tuple, list)) else ["a"]
        told = f", written {'x'.join(map(str, sizes))}:f32 for --arg, .check and .profile"
        told *= all(isinstance(one, int) for one in sizes)
        if form := re.fullmatch(r"([\dx]+):\w+", str(value)):
            told = f", such as np.zeros(({form[1].replace('x', ', ')}), np.float32), or give "
            told += f"{value!r} to {code.co_name}.profile"
        return (
            f"pass a tensor as {passed[0]} of {code.co_name}{told}: it is a {kind}, {value!r:.60}"
        )
    if isinstance(value, (list, dict, set, int, float, str, tuple)):
        return f"leave .{name} out, or take it of a tile: this is a {kind} of Python, {value!r:.60}"
    known = [one for one in dir(value) if not one.startswith("_")]
    own = known[:8] if type(value).__module__ == frame.f_globals.get("__name__") else []
    close = difflib.get_close_matches(name, known, 3, 0.6) or own
    return f"write .{' or .'.join(close)}" if close else ""


def _of_call(one: ast.Call, frame: FrameType) -> str:
    """The parameters of the author's own function, and an argument that has another's place."""
    called = _value(one.func, frame)
    code = getattr(called, "__code__", None)
    if code is None:
        return ""
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = zip(map(ast.unparse, one.args), names[: code.co_argcount])
    moved = (
        f": {text} has the place of {name}" for text, name in given if text in {*names} - {name}
    )
    return f"write it as {called.__name__}({', '.join(names)}){next(moved, '')}"


def _of_assert(test: ast.expr, frame: FrameType) -> str:
    """What did not hold, with the values of both sides where they are sizes or types."""
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
    known = [(ast.unparse(side), _value(side, frame)) for side in sides]
    told = " and ".join(f"{text} is {value}" for text, value in known if value is not None)
    return (
        f"the kernel's own check {ast.unparse(test)} does not hold{told and ': '}{told}; give "
        "arguments for which it does, or mend it"
        + ", where types are those of nl, nl.float32"
        * ("dtype" in ast.unparse(test))
    )


def _value(node: object, frame: FrameType) -> Any:
    """The value of a name, or of a tensor's shape and the like; None where it is neither."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim", "dtype"):
        return getattr(_value(node.value, frame), node.attr, None)
    return None
