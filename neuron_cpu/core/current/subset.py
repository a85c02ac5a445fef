"""Finds Python in a kernel's source that the compiler's parser refuses.

The compiler reads the source of a kernel and of everything that it calls; the simulator runs it, so
all of Python works here. Every construct below is refused there, whether its branch is taken or not
(messages of the published parser, leanprover/KLR, KLR/NKI/Simplify.lean and interop/klr/gather.c;
keys of dictionaries: foxl-ai/kiln, docs/neuron-notes.md). The tracer that SDK 2.32 offers beside
the parser, and 2.33 in its place, takes all of Python, so these are warnings, and none from 2.33
on. Bodies of nl.fori_loop and nl.while_loop may be inner functions, with a warning: the
documentation writes them so, and the parser of SDK 2.32 has refused some.
"""

import ast
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

from ..device.errors import warn
from ..device.release import TRACED, nki_since
from ..program.source import callee, nodes_of, reachable, tree_of

LOOP_BODIES = frozenset({"fori_loop", "while_loop"})
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
DECORATORS = frozenset({"dataclass", "jit", "staticmethod"})
# node: what it is called, what to write instead
REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Raise: ("raise", "use assert for fatal errors"),
    **dict.fromkeys((ast.Try, getattr(ast, "TryStar", ast.Try)), ("try", "check before")),
    ast.Import: ("import", "import at the top of the module"),
    ast.ImportFrom: ("import", "import at the top of the module"),
    ast.Global: ("global", "pass values as arguments"),
    ast.Nonlocal: ("nonlocal", "pass values as arguments"),
    ast.Delete: ("del", "let the name go out of use"),
    ast.ClassDef: ("a class in a function", "move it to the module"),
    **dict.fromkeys(ASYNC, ("async", "use a plain function")),
    ast.Lambda: ("lambda", "write a function of the module"),
    ast.Yield: ("yield", "return a list"),
    ast.YieldFrom: ("yield", "return a list"),
    ast.NamedExpr: ("':='", "assign before"),
    ast.Match: ("match", "use if and elif"),
    ast.Starred: ("a star expression", "write the values out"),
    ast.Set: ("a set", "use a list"),
    **{kind: ("a comprehension", "use a loop and append") for kind in COMPREHENSIONS},
}
CALLS = {"repr": ("repr()", "use str(x)"), **dict.fromkeys(("set", "frozenset"), REFUSED[ast.Set])}
PARTS = (ast.Subscript, ast.Attribute)
INNER_BODY, NEGATIVE_DIVISOR = "the body of a device loop", "a negative divisor"


class Finding(NamedTuple):
    """A construct that the parser refuses, or about which sources disagree (``OPEN``)."""

    line: int
    what: str
    mend: str


def lint(function: Callable | None) -> None:
    """Warn of constructs outside of the compiler's subset, with their lines; 2.33 has no parser."""
    if function is None or nki_since(TRACED):
        return
    name = getattr(function, "__name__", "kernel")
    for one, owner in reachable(function):
        tree = tree_of(one)
        # of a kernel the framework's decorators, of classes properties have run on devices
        around = _decorators(tree) if owner is None and one.__name__ != name else ()
        for finding in [*_of_function(one.__code__, tree), *around, *_of_names(one, tree)]:
            place = f"{name} ({one.__code__.co_filename}:{finding.line})"
            if finding.what in OPEN:
                OPEN[finding.what](place)
                continue
            warn(
                "sim_parser_subset",
                f"{finding.what} is not supported by the compiler's parser, expected Python that "
                f"it knows; {finding.mend}",
                place,
            )


def _warn_of_body(place: str) -> None:
    warn(
        "sim_inner_body",
        "a function in a function is the body of a device loop: the documentation of SDK 2.32 "
        "writes it so, and a report has its parser refuse it, expected the tracer there; "
        "move it to the module where a device refuses it",
        place,
        advice=True,
    )


def _warn_of_divisor(place: str) -> None:
    warn(
        "sim_negative_divisor",
        "// or % with a negative divisor: Python rounds quotients down, the published parser "
        "leaves remainders that are not negative, expected a positive divisor; here it is Python's",
        place,
    )


OPEN = {INNER_BODY: _warn_of_body, NEGATIVE_DIVISOR: _warn_of_divisor}
_findings: dict[CodeType, list[Finding]] = {}


def _of_function(code: CodeType, tree: ast.FunctionDef | None) -> list[Finding]:
    found = _findings.get(code)
    if found is None:
        found = _findings[code] = [] if tree is None else list(_walk(tree))
    return found


def _walk(tree: ast.FunctionDef) -> Iterator[Finding]:
    if tree.args.vararg is not None or tree.args.kwonlyargs:
        yield Finding(tree.lineno, "*args or a bare '*' in parameters", "name the parameters")
    bodies = _loop_bodies(tree)
    for node in nodes_of(tree):
        if node is tree:
            continue
        line = getattr(node, "lineno", tree.lineno)
        if isinstance(node, ast.FunctionDef):
            inner = INNER_BODY if node.name in bodies else "a function in a function"
            yield Finding(line, inner, "move it to the module")
        elif any(
            isinstance(by, ast.UnaryOp) and isinstance(by.op, ast.USub) for by in _divisors(node)
        ):
            yield Finding(line, NEGATIVE_DIVISOR, "")
        elif type(node) in REFUSED:
            what, mend = REFUSED[type(node)]
            yield Finding(line, what, mend)
        elif isinstance(node, (ast.For, ast.While)):
            yield from _of_loop(node)
        elif isinstance(node, ast.With):
            yield from _of_with(node)
        elif isinstance(node, ast.Assign):
            if any(map(_unpacks_into_parts, node.targets)):
                yield Finding(line, "unpacking into subscripts or attributes", "unpack into names")
            if sum(isinstance(one, PARTS) for one in node.targets) > 1:
                yield Finding(line, "an assignment to two parts at once", "write one for each")
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            yield Finding(line, "a format in an f-string", "use str(x)")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield Finding(line, "the operator @", "use nisa.nc_matmul")
        elif isinstance(node, ast.Dict) and any(
            isinstance(key, ast.Constant) and not isinstance(key.value, str) for key in node.keys
        ):
            yield Finding(line, "a dictionary with other keys than strings", "use a list")
        elif isinstance(node, ast.Call) and any(k.arg is None for k in node.keywords):
            yield Finding(line, "**keywords in a call", "write the keywords out")
        elif isinstance(node, ast.Call) and callee(node) in CALLS:
            yield Finding(line, *CALLS[callee(node)])
        elif isinstance(node, ast.Call) and callee(node) == "list":
            if any(callee(given) == "range" for given in node.args):
                yield Finding(line, "list(range())", "use a loop and append")


def _of_names(function: Callable, tree: ast.FunctionDef | None) -> Iterator[Finding]:
    """Names that the parser does not resolve: it knows those of the module, but no sets."""
    for name in {*function.__code__.co_freevars} - {"__class__"}:
        line = function.__code__.co_firstlineno
        yield Finding(line, f"'{name}', a name of the function around,", "move it to the module")
    known = {name for name, one in function.__globals__.items() if isinstance(one, set | frozenset)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Name) and node.id in known - {*function.__code__.co_varnames}:
            yield Finding(node.lineno, f"the set '{node.id}'", "make it a tuple")


def _decorators(tree: ast.FunctionDef | None) -> Iterator[Finding]:
    for node in tree.decorator_list if tree is not None else ():
        named = node.func if isinstance(node, ast.Call) else node
        name = getattr(named, "attr", getattr(named, "id", ""))
        if name not in DECORATORS:
            yield Finding(node.lineno, f"the decorator {name}", "call the plain function")


def _unpacks_into_parts(target: ast.expr) -> bool:
    """``s[0], s[1] = f()``, of which the parser says that it expects a pattern."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return False
    return any(isinstance(one, PARTS) or _unpacks_into_parts(one) for one in target.elts)


def _divisors(node: ast.AST) -> list[ast.expr]:
    """The divisors of a node with whole quotients."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(
        node.op, (ast.FloorDiv, ast.Mod)
    ):
        return [node.right if isinstance(node, ast.BinOp) else node.value]
    return node.args[1:] if isinstance(node, ast.Call) and callee(node) == "divmod" else []


def _loop_bodies(tree: ast.FunctionDef) -> set[str]:
    """Names of functions that are handed to a device loop."""
    names = set()
    for node in nodes_of(tree):
        if callee(node) in LOOP_BODIES and isinstance(node, ast.Call):
            passed = [*node.args, *(k.value for k in node.keywords)]
            names |= {a.id for a in passed if isinstance(a, ast.Name)}
    return names


def _of_loop(node: ast.For | ast.While) -> Iterator[Finding]:
    if node.orelse:
        yield Finding(node.lineno, "else behind a loop", "use a flag")
    if isinstance(node, ast.For) and callee(node.iter) == "dynamic_range":
        for left in _leaving(node.body):
            name = type(left).__name__.lower()
            yield Finding(left.lineno, f"{name} in a device loop", "loop while a register holds")
    if isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
        yield Finding(node.lineno, "a loop over several names", "loop over one and index")


def _leaving(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a loop's body that leave it or its iteration; inner loops have their own."""
    for node in body:
        if isinstance(node, (ast.Break, ast.Continue, ast.Return)):
            yield node
        elif isinstance(node, (ast.For, ast.While)):
            yield from (n for n in ast.walk(node) if isinstance(n, ast.Return))
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from _leaving([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def _of_with(node: ast.With) -> Iterator[Finding]:
    for item in node.items:
        if callee(item.context_expr) != "no_reorder" or item.optional_vars is not None:
            yield Finding(node.lineno, "a with other than nl.no_reorder()", "call functions")
