"""Comparing two runs of a kernel finds the line that loses precision, and only such a line."""

from __future__ import annotations

import textwrap

import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki import typing as nt

from neuron_cpu.__main__ import main
from neuron_cpu.core.device import dtypes
from neuron_cpu.core.run import compare


def random_inputs(program, seed=0):
    """Seeded inputs of a program: normal floats, integers from 0 to 99."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for storage in program.inputs:
        if storage.dtype.is_float:
            values = torch.randn(storage.shape, generator=generator)
        else:
            values = torch.randint(0, 100, storage.shape, generator=generator)
        made.append(dtypes.encode(values, storage.dtype))
    return made


def line_of(function, text):
    """Line number of the only line of ``function`` that holds ``text``."""
    import inspect

    lines, start = inspect.getsourcelines(function)
    return next(start + k for k, line in enumerate(lines) if text in line)


def cancelling(x):
    """(x + 4096) rounded to bf16 and - 4096: the rounding swallows x."""
    out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    fine = nl.multiply(tile, 2.0)
    coarse = nl.add(fine, 4096.0, dtype=nl.bfloat16)
    nl.store(out, nl.subtract(coarse, 4096.0))
    return out


def product(x, w):
    out = nl.ndarray((256, w.shape[1]), nl.bfloat16, buffer=nl.shared_hbm)
    for m in nl.affine_range(2):
        acc = nl.zeros((128, w.shape[1]), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(3):
            rows = nl.ds(k * 128, 128)
            acc += nisa.nc_matmul(nl.load(x[rows, nl.ds(m * 128, 128)]), nl.load(w[rows, :]))
        nl.store(out[nl.ds(m * 128, 128), :], nl.copy(acc, dtype=nl.bfloat16))
    return out


def traced(function, *shapes, dtype=torch.bfloat16):
    return nki.jit(function).trace(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes))


def test_first_line_that_loses_precision():
    program = traced(cancelling, (64, 30), dtype=torch.float32)
    inputs = random_inputs(program)
    # relative to 4096 the rounding is small; after the subtraction it is everything
    found = compare.compare(program, inputs, 0.1).parts
    assert found is not None
    assert found.instruction.source.line == line_of(cancelling, "nl.subtract(coarse")
    finer = compare.compare(program, inputs, 1e-4).parts
    assert finer.instruction.source.line == line_of(cancelling, "coarse = ")
    assert f":{finer.instruction.source.line}: instruction {finer.number} " in str(finer)
    value = float(inputs[0][finer.place])
    assert finer.expected == pytest.approx(2 * value + 4096, rel=1e-6)
    assert abs(finer.got - finer.expected) > 4096 * 1e-4


def test_a_wrong_merged_run_is_found(monkeypatch):
    from neuron_cpu.core.run import execute

    real = execute.make_step

    def wrong(op, arena):
        step = real(op, arena)
        if op.spec.name != "tensor_copy" or not op.batch:
            return step
        view = arena.view(op.dst[0])

        def spoiled():
            step()
            view.add_(1.0)

        return spoiled

    monkeypatch.setattr(execute, "make_step", wrong)
    program = traced(product, (384, 256), (384, 96))
    found = compare.compare(program, random_inputs(program), 0.01, "unmerged").parts
    assert found is not None and found.instruction.op.name == "tensor_copy"


def test_unknown_reference_is_refused():
    program = traced(cancelling, (4, 4))
    with pytest.raises(ValueError, match="against 'device'"):
        list(compare.differences(program, [], "device"))


KERNEL = """
from neuronxcc import nki
from neuronxcc.nki import language as nl

@nki.jit
def kernel(x, shift):
    out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
    moved = nl.add(nl.load(x), shift, dtype=nl.bfloat16)
    nl.store(out, nl.subtract(moved, shift))
    return out
"""


def test_command_names_the_line(tmp_path, capsys):
    path = tmp_path / "shifting.py"
    path.write_text(textwrap.dedent(KERNEL))
    arguments = ["compare", f"{path}:kernel", "--arg", "64x8:fp32", "--arg"]
    assert main([*arguments, "512.0"]) == 1
    printed = "".join(capsys.readouterr().out.split())  # a long path is folded
    assert f"{path}:9:instruction" in printed and "reference" in printed
    assert main([*arguments, "0.0"]) == 0
    assert "agree with the shadow run within 0.02" in capsys.readouterr().out
    assert main([*arguments, "512.0", "--against", "unmerged"]) == 0


@pytest.mark.parametrize("against", compare.AGAINST[:2])
def test_both_runs_begin_with_the_inputs_as_they_were(against):
    """A cache that the kernel updates in place must not be updated twice, nor the caller's own."""

    @nki.jit
    def kernel(x, cache: nt.mutable_tensor):
        for k in nl.affine_range(2):
            rows = nl.ds(64 * k, 64)
            total = nisa.tensor_tensor(nl.load(cache[rows]), nl.load(x[rows]), nl.add)
            nl.store(cache[rows], nisa.tensor_scalar(total, nl.multiply, 3.0))
        return cache

    program = kernel.trace(*(torch.empty(128, 8, device="meta") for _ in range(2)))
    inputs = random_inputs(program)
    before = [x.clone() for x in inputs]
    found = list(compare.differences(program, inputs, against))
    assert found and not any(d.error for d in found)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))
