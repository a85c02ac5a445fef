"""Which changes of a refused kernel's lines, one after the other, make it right?

A refusal is answered by what its message writes out and by rows of `rewrites.json`. What refuses
the kernel then is answered next, and nothing is told that does not end in a right kernel.
"""

import ast
import builtins
import contextlib
import difflib
import functools
import inspect
import json
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..core.device import written as lines
from ..core.program.source import reachable
from .edits import with_
from .names import function_of, name_of, names_in, uses
from .repairs import Enough

MOST, TRIES = 8, 60  # changes of one kernel, and kernels that are tried
MORE = 12  # kernels that are tried for one without warnings
FILE = "<followed>"
LIBRARIES = ("np", "numpy", "torch", "jnp", "math")
Found = dict[str, Any]
Places = list[tuple[Any, str]]  # what stands there instead


@functools.cache
def _rows() -> list[tuple[list[ast.stmt], str, str]]:
    """Patterns, which are expressions or statements, what stands in their place, and where."""
    data = json.loads(Path(__file__).with_name("rewrites.json").read_text(encoding="utf-8"))
    return [(ast.parse(old).body, new, "".join(where)) for old, new, *where in data["rows"]]


class Chain:
    """A function of one file, whose text is changed.

    Attributes:
        doubts: of a changed function: None where it is wrong, else its warnings. It raises what
            the function does, or `Enough` where no more are to be tried.
    """

    def __init__(self, function: Callable, doubts: Callable[[Callable], list[str] | None]) -> None:
        self.doubts, self.tried = doubts, set[str]()
        self.least: tuple[int, str, list[str]] | None = None
        inner = inspect.unwrap(function)
        self.root = getattr(inner, "__name__", "")
        self.wanted = {one.__name__ for one, owner in reachable(function) if owner is None}
        self.known = dict(getattr(inner, "__globals__", {}))
        code = getattr(inner, "__code__", None)
        self.text = "".join(linecache.getlines(code.co_filename)) if code else ""

    def told(self, what: str) -> list[str]:
        """The changed lines, with the least warnings, behind what the kernel is with them; none
        where no chain ends in such a one."""
        self.most = TRIES
        with contextlib.suppress(Enough):
            self._follow(self.text, self._error(self.text), 0)
        if self.least is None:
            return []
        _, text, doubts = self.least
        lines = [*changed(self.text, text)]
        but = f", with a warning ({doubts[0].partition(': ')[2]})" if doubts else ""
        way = "with" if any("+" in one[:7] for one in lines) else "without"
        return [f"{way} these lines the kernel is {what}{but}:", *lines]

    def _error(self, text: str) -> BaseException | None:
        """What refuses the function of a text, or warns of it; None where it is wrong or done."""
        self.tried.add(text)
        try:
            doubts = self.doubts(self.build(text))
        except Enough:
            raise
        except (Exception, SystemExit) as error:
            return error
        if doubts is not None:
            one = len(doubts), text, doubts
            self.least = min(self.least or one, one)
            self.most = min(self.most, len(self.tried) + MORE) if doubts else 0
        return UserWarning(doubts[0]) if doubts else None

    def build(self, text: str) -> Callable:
        """The function as a text has it."""
        linecache.cache[FILE] = len(text), None, text.splitlines(keepends=True), FILE
        kept: list[Any] = [
            one
            for one in ast.parse(text).body
            if isinstance(one, ast.FunctionDef) and one.name in self.wanted
        ]
        for one in kept:
            one.decorator_list = []
        names = dict(self.known)
        exec(compile(ast.Module(kept, []), FILE, "exec"), names)
        return names[self.root]

    def _follow(self, text: str, error: BaseException | None, depth: int) -> bool:
        """Whether no more changes are to be tried: what leads to a later line is followed at once,
        another refusal of the same line when all else was tried."""
        later = []
        for new in self._candidates(text, error) if error and depth < MOST else ():
            if new in self.tried:
                continue
            if len(self.tried) > self.most:
                return True
            other = self._error(new)
            if other is not None and _said(other, new) != _said(error, text):
                if _line(other) <= _line(error):
                    later.append((new, other))
                elif self._follow(new, other, depth + 1):
                    return True
        return any(self._follow(new, other, depth + 1) for new, other in later)

    def _candidates(self, text: str, error: Any) -> Iterator[str]:
        """Texts in which what is refused is written otherwise, the likeliest first."""
        linecache.cache[FILE] = len(text), None, text.splitlines(keepends=True), FILE
        tree, said = ast.parse(text), str(error)
        nodes = _nodes(error)
        statements = [*nodes[-1:], *self._named(tree, said, nodes[-1:])]
        known = {*names_in(ast.Load, tree), *names_in(ast.Store, tree), *self.known, *dir(builtins)}
        known |= {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)}
        to = (k.value for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg == "dst")
        given = {n for value in to for n in ast.walk(value)}
        read = {one.id for one in uses(ast.Load, tree) if one not in given}
        unread = [one for one in names_in(ast.Store, tree) if one not in read]
        lacks = re.findall(r"write (return \w+)", said)
        ends = [
            f.body[-1]
            for f in ast.walk(tree)
            if isinstance(f, ast.FunctionDef) and f.name == self.root
        ]
        added = [[(one, f"{ast.unparse(one)}\n{text}")] for text in lacks for one in ends]
        limit = re.search(r"tensor (\w+) .*dimension (\d+): .*dimension size (\d+)", said)
        known_as = {}
        if limit:
            size = f"{limit[1]}.shape[{limit[2]}]" if limit[1] in known else limit[3]
            known_as["_limit"] = ast.parse(size, mode="eval").body
        own, others = statements[: len(nodes[-1:])], statements[len(nodes[-1:]) :]
        around = [one for one in others if isinstance(one, (ast.For, ast.If))]
        rows = [[*_rewritten(said, tree, some, known_as)] for some in (around, own, others)]
        written = _written(said, nodes, statements, known, unread, self._takes)
        for places in (*added, *rows[0], *rows[1], *written, *rows[2]):
            try:
                new = _with(text, places)
                ast.parse(new)
            except SyntaxError:
                continue
            yield new

    def _takes(self, call: ast.Call, some: dict[str, Any]) -> dict[str, Any]:
        """Those of some keywords that a called function has."""
        first, *more = ast.unparse(call.func).split(".")
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            called: Any = functools.reduce(getattr, more, self.known.get(first))
            named = inspect.signature(called).parameters
            return {one: value for one, value in some.items() if one in named}
        return {}

    def _named(self, tree: ast.AST, said: str, refused: list[Any]) -> list[Any]:
        """Statements whose lines a message names, those that make what it or the refused line
        names, and where a result is refused those that return one."""
        lines = {*map(int, re.findall(rf"{FILE}:(\d+)", said))}
        names = {*re.findall(r"[A-Za-z_]\w*", said)}, {*names_in(ast.Load, *refused)}
        kinds = (ast.Assign, ast.Expr, ast.AugAssign, ast.For, ast.If, ast.Return)
        every = [
            one
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name in self.wanted
            for one in ast.walk(function)
            if isinstance(one, kinds)
        ]
        makes = {one: names_in(ast.Store, *getattr(one, "targets", ())).keys() for one in every}
        inside = [at for one in refused[-1:] for at in _lines([one])]
        found = [
            one
            for one in every
            if one.lineno in lines
            or isinstance(one, (ast.For, ast.If))
            and any(one.lineno < at <= (one.end_lineno or 0) for at in inside)
        ]
        found += [one for words in names for one in every if words & makes[one]]
        found += [one for one in every if not refused and isinstance(one, ast.Return)]
        return [one for one in dict.fromkeys(found) if one.lineno not in _lines(refused)]


def _lines(nodes: list[Any]) -> list[int]:
    return [getattr(one, "lineno", 0) for one in nodes]


def _said(error: Any, text: str) -> str:
    """What is refused: the words, and the line with them."""
    line = "".join(text.splitlines()[_line(error) - 1 :][:1])
    return re.sub(r"\d+", "", str(error)) + line


def _line(error: Any) -> int:
    """The line of a changed function that is refused; a large number behind its last one."""
    at, line = error.__traceback__, 0
    while at is not None:
        code = at.tb_frame.f_code  # the kernel as a whole is refused at a line of no function
        own = code.co_filename == FILE and code.co_name != "<module>"
        line = at.tb_lineno if own else line
        at = at.tb_next
    return line or 1 << 30


def _nodes(error: BaseException) -> list[Any]:
    """The expression that is refused, what it stands in, and its statement."""
    at, last = error.__traceback__, None
    while at is not None:
        last = at if at.tb_frame.f_code.co_filename == FILE else last
        at = at.tb_next
    nodes: list[Any] = [] if last is None else lines.nodes(last.tb_frame, last.tb_lasti)
    return [*(one for one in nodes if isinstance(one, ast.expr)), *nodes[-1:]]


# --- what a message writes out --------------------------------------------------------------------
_START = re.compile(r"(?<![\w.)\]=])(?:(\w+)( ?)= ?)?(?=[\w(\[])")
_PART = re.compile(r"\.?\w+|[\[(]|[*/+-]+")


def _code(said: str) -> Iterator[tuple[str, bool, ast.expr]]:
    """Calls and names with dots among the words of a message, with what they are given to ("" for
    nothing), and whether that is an argument."""
    end = 0
    for found in _START.finditer(said):
        if found.start() < end:
            continue  # a part of what came before
        end = found.end()
        while word := _PART.match(said, end):
            end, depth = word.end(), int(word[0] in "[(")
            while depth and end < len(said):
                depth += (said[end] in "([") - (said[end] in ")]")
                end += 1
        with contextlib.suppress(SyntaxError, ValueError):
            value = ast.parse(said[found.end() : end].rstrip("."), mode="eval").body
            plain = isinstance(value, (ast.Name, ast.Constant, ast.Tuple))
            called = getattr(getattr(value, "func", None), "id", "")  # range(n), min(a, b)
            if found[1] or not plain and not hasattr(builtins, called):
                yield found[1] or "", bool(found[1]) and not found[2], value


def _given(call: ast.Call, more: dict, out: Any = (), to: dict = {}) -> Places:  # noqa: B006
    """A call with other keywords."""
    kept = [k for k in call.keywords if k.arg not in (*out, *more)]
    kept = [with_(k, arg=to.get(k.arg, k.arg)) for k in kept]
    kept += map(ast.keyword, more, more.values())
    return [(call, ast.unparse(with_(call, keywords=kept)))]


def _written(
    said: str,
    nodes: list[Any],
    statements: list[Any],
    known: set[str],
    unread: list[str],
    takes: Callable[[ast.Call, dict], dict],
) -> Iterator[Places]:
    """What the message has in place of parts of the statements."""
    said = said.partition("; ")[2] or said
    refused = statements[:1] if nodes else []
    own = [*_own(*refused)]
    calls = [n for n in (*nodes[:2], *_own(*statements)) if isinstance(n, ast.Call)]
    to = {old: new for new, old in re.findall(r"(\w+)= for (\w+)=", said)}
    out = re.findall(r"leave (\w+)= out", said)
    yield from (_given(call, {}, out, to) for call in calls * bool(to or out))
    for new, old in re.findall(r"write ([\w.]+) for ([\w.]+\w)", said):
        yield from ([(n, new)] for n in own if _text(n) == old)
    for part, name in re.findall(r"take (\[[^\]]*\]) of (\w+)", said):
        yield from ([(n, name + part)] for n in own if _text(n) == name)
    named: dict[str, ast.expr] = {}
    lacks = ""
    for target, argument, value in sorted(_code(said), key=lambda one: not one[0] or one[1]):
        unknown, text = names_in(ast.Load, value).keys() - known, ast.unparse(value)
        if argument:
            named |= {} if unknown else {target: value}
            continue
        same = [n for n in calls if _text(getattr(value, "func", None)) == _text(n.func)]
        if unknown or target == "" and isinstance(value, ast.Call) and same:
            told = {k.arg: k.value for k in getattr(value, "keywords", ())}
            given = {k: v for k, v in told.items() if names_in(ast.Load, v).keys() <= known}
            yield from (_given(n, given) for n in same if given)
        if unknown:
            continue
        if target and "before" in said:
            lacks = f"{target} = {text}\n"
        elif isinstance(value, ast.Attribute):
            foreign = (n for n in own if _is_text(n) or name_of(n) in LIBRARIES)
            attributes = (n for n in nodes[:1] if isinstance(n, ast.Attribute))
            yield from ([(n, text)] for n in (*attributes, *foreign))
        else:
            last = refused[0] if refused and not target else None
            if lacks and isinstance(last, ast.Assign):
                yield [(last, lacks + text)]
            again = function_of(value) in map(function_of, nodes[:2])
            again = again or isinstance(nodes and nodes[0], (ast.BinOp, ast.Compare, ast.UnaryOp))
            parts = [n for n in ast.walk(value) if n is not value]
            inside = {ast.dump(n) for n in parts if name_of(n) not in ("", "nl", "nisa")}
            inside -= inside if again else set()
            called = [n for n in nodes[1:2] if isinstance(n, ast.Call) and n.func is nodes[0]]
            alone = any(isinstance(n, ast.Expr) for n in nodes[1:2]) and text[:5] != "nisa."
            whole = [(n, text) for n in called or nodes[: 1 - alone]]
            inner = [(n, text) for n in own if ast.dump(n) in inside and not _is_text(n)]
            made = [(n, text) for n in same if not nodes or n not in nodes]
            every = inner or whole if target else made + whole + inner
            every.sort(key=lambda one: isinstance(one[0], ast.Call) and one not in made)
            yield from ([one] for one in every)
    every = [named, *({name: value} for name, value in named.items())]
    added = re.findall(r"\badd (\w+)=", said)
    every += [{name: ast.Name(text)} for name in added for text in unread]
    both = ((call, takes(call, some)) for some in every for call in calls)
    yield from (_given(call, given) for call, given in both if given)


def _text(node: Any) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# --- rows -----------------------------------------------------------------------------------------
def _rewritten(said: str, tree: ast.AST, statements: list[Any], known: Found) -> Iterator[Places]:
    """What rows have in place of parts of the statements."""
    made = {
        one.targets[0].id: one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    for pattern, new, where in _rows():
        if "_limit" in new and not known or not re.search(where, said):
            continue
        one: Any = pattern[0]
        one = one.value if isinstance(one, ast.Expr) and not new.startswith("!") else one
        for statement in statements:
            for node in _own(statement):
                found: Found = {"": made, **known}
                if _match(one, node, found):
                    before = _once(new, found) if isinstance(node, ast.stmt) else ""
                    yield [(node, before + filled(new.lstrip("!"), found))]
            yield from _before(one, new, statement, {"": made, **known})


def _before(pattern: Any, new: str, statement: Any, known: Found) -> Iterator[Places]:
    """A value in the midst of a statement is made before it, as rows make what is assigned."""
    if not isinstance(statement, (ast.Assign, ast.Expr, ast.Return)) or not new.count("_v"):
        return
    if not isinstance(pattern, ast.Assign) or ast.unparse(pattern.targets[0]) != "_v":
        return
    for node in _own(statement):
        found = {**known, "_v": ast.Name("made")}
        inner = isinstance(node, ast.Call) and node is not getattr(statement, "value", None)
        if (inner or isinstance(statement, ast.Return)) and _match(pattern.value, node, found):
            text = ast.unparse(statement).replace(ast.unparse(node), "made")
            yield [(statement, f"{filled(new, found)}\n{text}")]


def _once(new: str, found: Found) -> str:
    """Lines that name tiles which a row's text takes more than once; the names go to `found`."""
    lines = ""
    for name, value in [*found.items()]:
        if isinstance(value, ast.Call) and len(re.findall(rf"\b{name}\b", new)) > 1:
            lines += f"{name[1:]}_sb = {ast.unparse(value)}\n"
            found[name] = ast.Name(f"{name[1:]}_sb")
    return lines


def _own(*statements: Any) -> Iterator[Any]:
    """A statement and its parts; of a loop what stands before the colon."""
    for one in statements:
        loop = isinstance(one, ast.For)
        parts = [ast.Tuple([one.target, one.iter])] if loop else [one]
        yield from [one] * loop
        yield from (node for part in parts for node in ast.walk(part))


def _match(pattern: Any, node: Any, found: Found) -> bool:
    """Whether a node is as a pattern; what its names with a leading line stand for goes to
    `found`."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_"):
        return _bind(pattern.id, node, found)
    if isinstance(pattern, list):
        rest: Any = pattern[-1] if pattern and isinstance(pattern[-1], ast.Starred) else None
        if rest is not None:
            found[rest.value.id] = more = node[len(pattern) - 1 :]
            if rest.value.id == "_c" and more and isinstance(more[0], ast.Tuple):
                return False
            pattern, node = pattern[:-1], node[: len(pattern) - 1]
        return len(pattern) == len(node) and all(map(_match, pattern, node, [found] * len(node)))
    if isinstance(pattern, str) and pattern.startswith("_"):
        return _bind(pattern, node, found)
    if not hasattr(pattern, "_fields"):
        return pattern == node
    if type(pattern) is not type(node):
        node = found[""].get(getattr(node, "id", ""), node)  # what a name stands for
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call):
        given = {k.arg: k.value for k in node.keywords}
        for one in pattern.keywords:
            if one.arg is None:
                found[ast.unparse(one.value)] = [
                    ast.keyword(name, value) for name, value in given.items()
                ]
                given = {}
            elif one.arg not in given or not _match(one.value, given.pop(one.arg), found):
                return False
        if given:
            return False
    fields = [one for one in pattern._fields if one not in ("ctx", "type_comment", "kind")]
    fields = [one for one in fields if one != "keywords"]
    return all(_match(getattr(pattern, f), getattr(node, f), found) for f in fields)


def _bind(name: str, node: Any, found: Found) -> bool:
    if node is None:
        return False  # a bound that a slice leaves out
    if isinstance(node, (ast.Slice, ast.Constant)) and getattr(node, "value", ...) is ...:
        return False  # all of a tensor is no condition and no index
    if name == "_c" and isinstance(node, ast.Tuple):
        return False
    both = (node, found.setdefault(name, node))
    one, other = (ast.unparse(n) if isinstance(n, ast.AST) else n for n in both)
    return one == other


def filled(new: str, found: Found) -> str:
    """A row's text with what its names stand for."""
    return ast.unparse(_Filled(found).visit(ast.parse(new)))


class _Filled(ast.NodeTransformer):
    def __init__(self, found: Found) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> Any:
        return self.found.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.attr = self.found.get(node.attr, node.attr)
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        found = self.found.get(getattr(node.value, "id", ""))
        return found if isinstance(found, list) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        for one in [k for k in node.keywords if k.arg is None]:
            node.keywords.remove(one)
            node.keywords += self.found.get(getattr(one.value, "id", ""), [one])
        return self.generic_visit(node)


# --- texts ----------------------------------------------------------------------------------------
def _with(text: str, places: Places) -> str:
    """The text with something else in some places."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    for node, new in sorted(places, key=lambda one: -one[0].lineno):  # type: ignore[attr-defined]
        at: Any = node
        begin = starts[at.lineno - 1] + at.col_offset
        end = starts[at.end_lineno - 1] + at.end_col_offset
        if isinstance(node, ast.stmt):
            new = (new or "pass").replace("\n", "\n" + " " * at.col_offset)
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()


def changed(before: str, after: str) -> Iterator[str]:
    """Lines that differ, with their numbers before; what is added alone behind which line."""
    old, new = ([*map(str.rstrip, text.splitlines())] for text in (before, after))
    told = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        told += [(f"{a:>4}  ", old[a - 1])] * (tag == "insert")
        paired = tag == "replace" and b - a == d - c
        for n in range(a, b) if tag != "equal" else ():
            told.append((f"{n + 1:>4} -", old[n]))
            told += [("     +", new[c + n - a])] * paired
        told += [("     +", one) for one in new[c:d] if tag != "equal" and not paired]
    texts = textwrap.dedent("\n".join(text for _, text in told)).splitlines()
    yield from (f"{mark} {text}" for (mark, _), text in zip(told, texts) if text.strip() != "pass")
