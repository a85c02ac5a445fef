"""The map at the head of llama.py: every kernel is there, and calls what stands beside it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import llama
import models.step
import models.today
from neuron_cpu.core import Kernel


def told() -> dict[str, list[str]]:
    """What each function of the map calls; a line without a function goes on with the last."""
    text = llama.__doc__.partition("phase by phase:\n\n")[2].partition("\n\nAxis letters")[0]
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, words = re.fullmatch(r" {4}(\S*) +(.+)", line).groups()
        own = found.setdefault(name or [*found][-1], [])
        own += [
            w for w in re.findall(r"[\w.]+", words) if re.search("[._]", w) or hasattr(llama, w)
        ]
    return found


def called(tree: ast.Module, name: str) -> set[str]:
    """Names that the body of a function or method has."""
    body: list[ast.AST] = [tree]
    for part in name.split("."):
        body = [node for node in body[0].body if getattr(node, "name", None) == part]
    names = {node.id for node in ast.walk(body[0]) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(body[0]) if isinstance(node, ast.Attribute)}


def test_the_map_is_true() -> None:
    kernels = {name for name, value in vars(llama).items() if isinstance(value, Kernel)}
    assert kernels <= set(told())
    tree = ast.parse(Path(llama.__file__).read_text(encoding="utf-8"))
    for name, callees in told().items():
        assert callees, name
        names = called(tree, name)
        for callee in callees:
            owner, _, method = callee.rpartition(".")
            assert hasattr(getattr(llama, owner) if owner else llama, method), callee
            assert method in names, (name, callee)


@pytest.mark.parametrize("module", [llama, models.today, models.step])
def test_what_comments_name_is_in_the_code(module) -> None:
    """The buffers and functions of examples, tables and docstrings are those of the code."""
    text, code, told = Path(module.__file__).read_text(encoding="utf-8"), set(), ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        code |= {token.string} if token.type == tokenize.NAME else set()
        told += token.string if token.type in (tokenize.COMMENT, tokenize.STRING) else ""
    named = set(re.findall(r"\b([a-z]\w*_(?:sb|psum|hbm))\b|\b([A-Za-z_]+)\(\)", told))
    assert named
    assert {buffer or function for buffer, function in named} <= code
