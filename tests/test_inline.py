"""`kernel.profile` and `kernel.check` in a notebook; what kernels and tiles say of themselves."""

from __future__ import annotations

import html
import re

import neuronxcc.nki as old_nki
import neuronxcc.nki.language as old_nl
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import rich.console
import rich.jupyter
import torch
from torch_neuronx import nki_op

from neuron_cpu import inline
from neuron_cpu.core import NkiError
from neuron_cpu.errors import UsageError
from neuron_cpu.judge import assert_kernel

SAID: list[str] = []


@nki.jit
def doubled(x, factor=2.0):
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    SAID.append(repr(tile))
    nisa.dma_copy(dst=out, src=tile)
    return out


@old_nki.jit
def doubled_before(x, factor=2.0):
    out = old_nl.ndarray(x.shape, x.dtype, buffer=old_nl.shared_hbm)
    old_nl.store(out, old_nl.load(x) * factor)
    return out


def reference(x, factor=2.0):
    return x * factor


@pytest.mark.parametrize("kernel", [doubled, doubled_before], ids=["nki", "neuronxcc"])
@pytest.mark.parametrize(
    "x", [torch.ones(64, 8), np.ones((64, 8), np.float32), "64x8:f32"], ids=["torch", "numpy", "t"]
)
def test_a_call_is_judged_and_timed_by_its_shapes(kernel, x, tmp_path):
    judged = kernel.check(reference, x, factor=3.0)
    assert "64x8:f32 factor=3.0" in str(judged) and "correct" in str(judged)
    timed = kernel.profile(x)
    assert f"{kernel.name}: " in str(timed) and "µs" in str(timed)
    assert max(map(len, str(timed).splitlines())) <= inline.WIDTH
    for shown in (judged, timed):
        shown.save(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert html.escape(page) in shown._repr_html_() and kernel.name in page


def test_a_notebook_shows_the_result_alone(monkeypatch):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *_: pytest.fail("shown below the cell"))
    assert "µs" in str(doubled.profile("64x8:f32"))


def test_what_is_wrong_is_told(monkeypatch):
    wrong = doubled.check(lambda x: x + 1, "64x8:f32")
    assert "first wrong element" in str(wrong)
    refused = doubled.check(reference, "200x8:f32")
    assert "refused" in str(refused) and "err_num_partition_exceed_arch_limit" in str(refused)
    assert "correct" in str(doubled.check(reference, (64, 8), dtype=np.float32))
    beside = doubled.profile("64x8:bf16", baseline=doubled_before)
    assert "doubled_before" in beside.page
    for call, said in (
        (lambda: doubled.check("64x8:f32"), "expected a function of numpy or PyTorch"),
        (lambda: doubled.check("64x8:f32", reference), r"write doubled.check\(reference, x\)"),
        (lambda: doubled.check(lambda x: None, "64x8:f32"), "a return is missing"),
        (lambda: doubled.profile("64,8"), "a tensor is 64x8:bf16"),
        (lambda: doubled.profile("64x8:f32", baseline="old"), "give the kernel itself"),
        (
            lambda: assert_kernel(reference, doubled, "64x8:f32"),
            r"write assert_kernel\(doubled, reference, ",
        ),
        (lambda: assert_kernel(doubled, reference, a=[(64, 8), [4]]), "write '64x8:f32 4:f32'"),
        (lambda: assert_kernel(doubled, reference, "64x8:f32", seeds=3), r"seeds=\(0, 1\)"),
        (lambda: assert_kernel(doubled, reference, "64x8:f32", tolerance="1"), "=0.01"),
        (lambda: doubled(3.0), "pass a tensor as x of doubled: it is a float"),
        (lambda: doubled(torch.ones(64, 8), factr=3.0), "write factor="),
        (lambda: doubled(input=torch.ones(64, 8)), "write x="),
        (lambda: doubled(torch.ones(64, 8), torch.tensor(3.0)), "write factor.item"),
        (lambda: doubled["2"], r"\['2'\]"),
        (lambda: nki.simulate(doubled, np.ones((64, 8))), r"nki.simulate\(kernel\)\(arg"),
        (lambda: nki_op("alone", reference), "write 'mine::alone'"),
    ):
        with pytest.raises((UsageError, AttributeError, TypeError, NkiError, ValueError)) as told:
            call()
        assert re.search(said, str(told.value)), told.value
