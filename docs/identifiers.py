"""The identifiers of all refusals and warnings, with their messages, read from the sources.

A message is written where it is raised and nowhere else; the list shows the first of each
identifier, with what varies in it in italics.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

IDENTIFIER = re.compile(r"(?:err|sim)_[a-z0-9_]+")
WORDS = {
    "dst": "result", "src": "operand", "self": "tensor", "dt": "type", "lineno": "line",
    "paxis": "axis", "ndim": "rank", "id": "name",
}  # fmt: skip


@dataclass
class Rule:
    """One identifier, its first message, and its kinds: error, warning, or both."""

    identifier: str
    message: str
    kinds: set[str] = field(default_factory=set)


def rules(folder: Path) -> list[Rule]:
    """Every identifier that a Python file below ``folder`` names, sorted.

    Raises:
        ValueError: an identifier without a message beside it.
    """
    found: dict[str, Rule] = {}
    # The old language's wording, where both have one: its identifiers are the documented ones.
    for path in sorted(folder.rglob("*.py"), key=lambda p: ("current" in p.parts, p)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for identifier, message, kind in _messages(node):
                if message is None:
                    raise ValueError(f"{path}: {identifier} has no message beside it")
                found.setdefault(identifier, Rule(identifier, message)).kinds.add(kind)
    return [found[name] for name in sorted(found)]


def _messages(node: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    """(identifier, message, kind) of a call, or of a tuple that one will be made of."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        items = node.args
    elif isinstance(node, ast.Tuple):
        items, name = node.elts, ""
    else:
        return
    for at, item in enumerate(items):
        message = next(filter(None, map(_text, items[at + 1 :])), None)
        for identifier in _identifiers(item):
            # The lint reports both kinds; what other functions tell is refused.
            doubt = name == "warn" or (name == "_report" and identifier.startswith("sim_"))
            yield identifier, message, "warning" if doubt else "error"


def _identifiers(node: ast.expr) -> Iterator[str]:
    """A constant identifier, or the two of a conditional expression."""
    if isinstance(node, ast.IfExp):
        yield from (*_identifiers(node.body), *_identifiers(node.orelse))
    elif isinstance(node, ast.Constant) and IDENTIFIER.fullmatch(str(node.value)):
        yield str(node.value)


def _text(node: ast.expr) -> str:
    """A string as the list shows it; '' for what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"*{_word(node.value)}*"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = _text(node.left), _text(node.right)
        return "".join(p or "..." for p in parts) if any(parts) else ""
    return ""


def _word(node: ast.expr) -> str:
    """A short name for a value that a message shows."""
    if isinstance(node, ast.Name):
        return WORDS.get(node.id, node.id.lower().replace("_", " "))
    if isinstance(node, ast.Attribute):
        if node.attr in ("name", "__name__"):
            return _word(node.value)
        return WORDS.get(node.attr, node.attr.replace("_", " "))
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in ("label", "max", "min"):
            return _word(called.value)
        return _word(node.args[-1]) if node.args else "..."
    return "..."
