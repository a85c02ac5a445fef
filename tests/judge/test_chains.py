"""A refused kernel is told the lines, of which there may be several, with which it is right."""

import functools
import importlib.util

import numpy as np
import pytest
import torch

import neuron_cpu
from neuron_cpu.__main__ import main
from neuron_cpu.judge import verdict
from neuron_cpu.judge.cases import case
from neuron_cpu.judge.references import Reference

neuron_cpu.ensure_sdk()
import nki  # noqa: E402

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


def _judged(tmp_path, body: str, reference: str, arguments: str, grid=()) -> verdict.Verdict:
    path = tmp_path / "kernel.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{HEAD}{lines}{TAIL}    return {reference}\n")
    spec = importlib.util.spec_from_file_location("chained", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = case(arguments)
    settings = verdict.Settings(grid, ("random",))
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
    (
        "r = nl.ndarray((32,), nl.float32, buffer=nl.sbuf)\n"
        "nisa.tensor_reduce(dst=r, op=nl.add, data=a, axis=1)",
        "x.sum(1, keepdims=True)",
        TWO,
        "+ r = nl.ndarray((32, 1), nl.float32, buffer=nl.sbuf)",
    ),
    ("r = nl.exp(nl.cumsum(a, axis=1))", "np.exp(x.cumsum(1))", TWO, "+ r = nl.exp(made)"),
    (
        "r = nl.concatenate([nl.exp(a), nl.add(b, 1)], axis=1)",
        "np.concatenate([np.exp(x), y + 1], axis=1)",
        TWO,
        "+ nisa.tensor_copy(dst=r[:, 0:a_sb.shape[1]], src=a_sb)",
    ),
    (
        "r = nl.ndarray((64, 32), nl.float32, buffer=nl.sbuf)\n"
        "nisa.nc_transpose(dst=r, data=a, engine=nisa.engine.tensor)",
        "x.T",
        TWO,
        "+ nisa.tensor_copy(dst=r, src=turned)",
    ),
    ("r = nl.multiply(a[0:40], 2.0)", "2 * x", TWO, "a[0:min(40, a.shape[0])]"),
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
    found = _judged(tmp_path, body, "np.sort(np.cos(x), 1)", TWO)
    assert found.places == []
    assert "; " in found.refusal, "the message keeps its advice"


def test_without_a_reference_lines_are_told_that_are_accepted(tmp_path, capsys):
    _judged(tmp_path, "r = a * b + a", "x", TWO)
    told = []
    for arguments in (TWO.split(), TWO.split()[:1]):
        given = [part for one in arguments for part in ("--arg", one)]
        assert main(["check", f"{tmp_path}/kernel.py:kernel", *given]) == 2
        told.append(capsys.readouterr().err)
    assert "accepted (--ref" in told[0] and "+ r = nl.add(nl.multiply(a, b), a)" in told[0]
    assert "accepted" not in told[1], "the call is wrong, not the kernel"


def test_every_row_is_python():
    from neuron_cpu.judge import chains

    assert all(len(pattern) == 1 for pattern, _, _ in chains._rows())
    for _, new, _ in chains._rows():
        compile(new.lstrip("!").replace("return", "pass;"), "row", "exec")


# What the reference returns, and arguments: kernels are written from it where no line is mended.
DRAFTS = [
    ("np.maximum(x, 0.1 * x) + y", "200x64:f32 64:f32"),  # rows in blocks, one row for all
    ("torch.softmax(x, -1) * y.unsqueeze(1)", "256x64:f32 256:f32"),
    ("(x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * y", TWO),
    ("x.T @ y", "256x160:f32 256x700:f32"),
    ("np.exp(x @ y.T / 8).sum(0)", "96x640:f32 48x640:f32"),
    ("np.where(np.tril(np.ones(x.shape), 3) > 0, x, -1e9) + y", TWO),
    ("x * np.triu(np.ones((32, 64)), 2) + np.arange(64)[None] * y", TWO),
    ("np.concatenate([-x[:, 32:], y[:, :32]], axis=1) + x[:, ::2].max()", TWO),
    ("np.pad(x, ((0, 0), (3, 0)))[:, 1:65] * y[:, 5:6] + np.cumsum(y, 1)", TWO),
    ("np.clip(np.round(x * 16), -127, 127) / 16 + y ** 3", TWO),
    ("y[(x[:, 0] + 9) % 64] + y[x[:, 0]]", "32x1:i32:0..63 64x64:f32"),
    ("x.reshape(8, 4, 2, 6, 2).max(axis=(2, 4)) + y", "8x8x12:f32 8x4x6:f32"),
    (
        "np.matmul(x.transpose(0, 2, 1), np.repeat(y, len(x) // len(y), axis=0))",
        "8x32x64:f32 2x32x96:f32",
    ),
    ("np.einsum('hdq,hdk->hkq', x, y)", "2x32x64:f32 2x32x96:f32"),
    ("np.maximum(x, 0) ** 2 + y", "10000:f32 10000:f32"),
    ("(x.reshape(4, 64, 32).sum(0), y[:, :8].argmax(1))", "256x32:f32 64x32:f32"),
    ("np.stack([x * 2, y - 1], axis=2).reshape(32, -1)", TWO),
    ("np.linalg.norm(np.triu(x - y, 1)) * np.asarray(np.split(x, 2)[1]).max()", TWO),  # one number
    ("x[:, : int(y[0, 0])].sum(1, keepdims=True) / y.item()", "32x64:f32 1x1:i32:1..60"),
    ("torch.conv1d(x[None], y[:, None], padding=1, groups=32)[0]", "32x64:f32 32x3:f32"),
    ("torch.nn.functional.max_pool2d(x, 2) * y", "8x16x24:f32 8x8x12:f32"),
    ("torch.nn.functional.linear(x, y).relu()", "200x24:f32 16x24:f32"),
    (
        "torch.nn.functional.scaled_dot_product_attention(x, x, y, is_causal=True)",
        "2x128x64:f32 2x128x64:f32",
    ),
    ("x[np.arange(len(x)), y[:, 0]] * 2", "200x64:f32 200x1:i32:0..63"),
    ("(lambda a, b: torch.nn.functional.silu(a) * b + y)(*x.chunk(2, -1))", "32x64:f32 32x32:f32"),
    (  # blocks of rows of what the reference sees whole, and what is kept of them
        "np.where(np.tril(np.ones((256, 256))) > 0, x @ (x @ y).T, 9.0) - x.max(0).sum()",
        "256x64:f32 64x64:f32",
    ),
    (
        "(x - x.max(1, keepdims=True)) / np.exp(y).sum() + y.argmax(1)[:, None]",
        "4x17000:f32 4x17000:f32",
    ),  # long rows
    ("x.max(1, keepdim=True).values + torch.logsumexp(y, 1).unsqueeze(1)", TWO),
    ("np.where(x >= np.sort(x, axis=1)[:, -9][:, None], x[:, ::-1], np.roll(y, 3, axis=1))", TWO),
    ("[h := x[:, 0]] and np.stack([h := h / 2 + x[:, t] * y[:, t] for t in range(64)], 1)", TWO),
    ("(x // 7 + (x & 6), x % (y + 1))", "32x64:i32:0..99 32x64:i32:0..9"),
    ("torch.nn.functional.conv2d(x, y, stride=2, padding=1)", "1x16x8x8:f32 24x16x3x3:f32"),
    ("torch.nn.functional.huber_loss(torch.nn.functional.selu(x), y, reduction='sum')", TWO),
]


@pytest.mark.filterwarnings("ignore:.*sim_expansion")
@pytest.mark.parametrize("reference, arguments", DRAFTS)
def test_a_kernel_is_written_from_its_reference(tmp_path, reference, arguments):
    found = _judged(tmp_path, "r = nl.nothing(a, b)", reference, arguments)
    assert "; " in found.refusal, "the message keeps its advice"
    said, *lines = found.places
    assert said.startswith("written otherwise, this kernel computes the reference")
    names = dict.fromkeys(["kernel"])
    exec("\n".join(["import nki, nki.isa as nisa, nki.language as nl", *lines]), names)
    values = [torch.from_numpy(one) for one in _numbers(arguments)]
    own = eval(f"lambda x, y: {reference}", {"np": np, "torch": torch})
    if "torch" not in reference:
        own = functools.partial(lambda f, *some: f(*(one.numpy() for one in some)), own)
    got, right = nki.simulate(nki.jit(names["kernel"]))(*values), own(*values)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, right))):
        assert np.shape(one) == (np.shape(other) or (1, 1))
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), 1e-3, 1e-3)


def test_a_grid_goes_with_what_is_written(tmp_path):
    found = _judged(tmp_path, "r = nl.add(a, b)", "x + y", TWO, (8,))
    assert "launched without --grid the kernel is right" in found.places[0]
    found = _judged(tmp_path, "r = a + b", "x + y", TWO, (8,))
    assert found.places[0] == "launch it without --grid:" and "nl.add(" in found.places[-1]


def _numbers(arguments: str) -> list[np.ndarray]:
    """Values of another generator than the judge's."""
    draw, found = np.random.default_rng(7), []
    for one in arguments.split():
        shape, _, dtype = one.partition(":")
        size = [int(n) for n in shape.split("x")]
        whole = draw.integers(0, 63, size, np.int32)
        found.append(whole if "i32" in dtype else draw.standard_normal(size, np.float32))
    return found


def test_arguments_in_another_order_are_told_where_the_reference_fails(tmp_path):
    product = "r = nl.copy(nl.matmul(a, b, transpose_x=True))"
    for given, right in (
        ("64x32:f32 32x96:f32", "--arg 32x64:f32 --arg 32x96:f32"),
        ("32x64:f32 200x8:f32", ""),  # with these in no order
    ):
        found = _judged(tmp_path, product, "x.T @ y", given)
        assert not found.legal and right in " ".join(found.places)
        assert bool(right) == ("the reference fails" in " ".join(found.places))


def test_a_right_kernel_with_a_warning_is_told_what_is_right_without(tmp_path):
    turned = "r = nl.ndarray((64, 64), nl.float32, buffer=nl.sbuf)\n"
    turned += "nisa.nc_transpose(dst=r, data=nl.add(a, b), engine=nisa.engine.vector)"
    found = _judged(tmp_path, turned, "(x + y).T", "64x64:f32 64x64:f32")
    assert found.correct and found.doubtful
    assert found.places[0].startswith("without a warning: ")
    never = "r = nl.add(a, b)\nfor i in range(2):\n    if a[0, i] == 0:\n        continue"
    found = _judged(tmp_path, never, "x + y", TWO)
    assert found.correct and "without these lines" in found.places[0]


def test_what_is_missing_is_told_with_a_shape_that_fits(tmp_path, capsys):
    _judged(
        tmp_path, "r = nl.multiply(a, nl.broadcast_to(b, a.shape))", "x * y", "32x64:f32 1x64:f32"
    )
    target = f"{tmp_path / 'kernel.py'}:kernel"
    ref = f"{tmp_path / 'kernel.py'}:reference"
    assert main(["check", target, "--arg", "32x64:bf16", "--ref", ref]) == 2
    assert "add --arg y=1x64:bf16" in capsys.readouterr().err
