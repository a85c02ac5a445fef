"""A refused kernel is told the lines, of which there may be several, with which it is right."""

import importlib.util

import pytest

import neuron_cpu
from neuron_cpu.judge import verdict
from neuron_cpu.judge.cases import case
from neuron_cpu.judge.references import Reference

neuron_cpu.ensure_sdk()

HEAD = """
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import torch

@nki.jit
def kernel(x, y):
    a = nl.load(x)
    b = nl.load(y)
"""
TAIL = """
    out = nl.ndarray(r.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, r)
    return out

def reference(x, y):
"""


def _judged(tmp_path, body: str, reference: str, arguments: str) -> verdict.Verdict:
    path = tmp_path / "kernel.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{HEAD}{lines}{TAIL}    return {reference}\n")
    spec = importlib.util.spec_from_file_location("chained", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = case(arguments)
    settings = verdict.Settings(kinds=("random",))
    return verdict.judge(module.kernel, Reference(module.reference), found, settings)


TWO = "32x64:f32 32x64:f32"
# The kernel's lines, what the reference returns, arguments, and the lines that are told.
ROWS = [
    ("r = a * b + a", "x * y + x", TWO, "r = nl.add(nl.multiply(a, b), a)"),
    (
        "r = (a - np.maximum(b, 0)).astype(nl.float32)",
        "x - np.maximum(y, 0)",
        TWO,
        "r = nl.copy(nl.subtract(a, nl.maximum(b, 0)), dtype=nl.float32)",
    ),
    ("r = nl.softmax(a, dim=-1)", "torch.softmax(x, -1)", TWO, "r = nl.softmax(a, axis=-1)"),
    ("r = np.dot(a.T, b)", "x.T @ y", TWO, "r = nl.matmul(a, b, transpose_x=True)"),
    ("r = a[0:8, :] @ b.T", "x[:8] @ y.T", TWO, "nl.copy(nl.transpose("),
    ("i = nl.arange(32)[:, None]\nr = nl.exp(a[i])", "np.exp(x)", TWO, "i = nl.ds(0, 32)"),
    (
        "r = nisa.tensor_reduce(np.max, a, axis=1)",
        "x.max(1, keepdims=True)",
        TWO,
        "r = nl.ndarray((32, 1), nl.float32, buffer=nl.sbuf)",
    ),
    ("a[a < 0] = 0\nr = a", "np.maximum(x, 0)", TWO, "a = nl.where(nl.less(a, 0), 0, a)"),
    ("a = a.at[:, 0:8].set(b[:, 0:8])\nr = a[:, 0:8]", "y[:, :8]", TWO, "a[:, 0:8] = b[:, 0:8]"),
    ("nl.barrier()\nr = nl.add(a, b)", "x + y", TWO, "- nl.barrier()"),
    ("r = nl.multiply(a[0:40], 2.0)", "2 * x", TWO, "a[0:min(40, 32)]"),
    ("r = a / (1 + nl.exp(-a))", "x / (1 + np.exp(-x))", TWO, "nl.add(1, nl.exp(nl.negative(a)))"),
    ("r = nl.add(b, a.pow(2))", "x * x + y", TWO, "nl.square(a)"),  # nl.power has a warning
    ("n = a.shape()[0]\nr = nl.multiply(a, n)", "32 * x", TWO, "n = a.shape[0]"),  # Python's own
    (  # what moves left is a changed line, too
        "if a > b:\n    nisa.activation(dst=a, op=nl.exp, data=a)\nr = a",
        "np.exp(x)",
        TWO,
        "+ nisa.activation(dst=a",
    ),
]


@pytest.mark.parametrize("body, reference, arguments, told", ROWS)
def test_the_lines_that_make_a_refused_kernel_right(tmp_path, body, reference, arguments, told):
    found = _judged(tmp_path, body, reference, arguments)
    assert found.refusal and "; " not in found.refusal, "what was tried stands in its place"
    assert "the kernel is right" in found.places[0]
    assert any(told in place for place in found.places), found.places


@pytest.mark.parametrize("body", ["r = a * b", "r = a.T.relu()", "r = nl.whatever(a, b)"])
def test_what_ends_in_no_right_kernel_is_not_told(tmp_path, body):
    found = _judged(tmp_path, body, "np.cos(x)", TWO)
    assert found.places == []
    assert "; " in found.refusal, "the message keeps its advice"


def test_every_row_is_python():
    from neuron_cpu.judge import chains

    assert all(len(pattern) == 1 for pattern, _, _ in chains._rows())
    for _, new, _ in chains._rows():
        compile(new.lstrip("!").replace("return", "pass;"), "row", "exec")
