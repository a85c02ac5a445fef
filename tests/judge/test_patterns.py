"""Wrong results are described by what they look like, and unread parts of kernels are named."""

import types

import numpy as np
import pytest
import torch

import neuron_cpu
from neuron_cpu.judge import patterns
from neuron_cpu.judge.accuracy import measure
from neuron_cpu.judge.references import library_of

neuron_cpu.ensure_sdk()
import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

SQUARE = np.random.default_rng(0).standard_normal((24, 24))
LONG = np.random.default_rng(1).standard_normal((16, 40))
ROW = np.random.default_rng(2).standard_normal(40)
ACROSS, DOWN = np.indices((24, 24))[::-1]
FILLED = np.where(ACROSS <= DOWN, SQUARE, -9984.0)


def put(values, where, value):
    made = values.copy()
    made[where] = value
    return made


# what is expected, what comes out, and words of the description
LOOKS = {
    "columns": (LONG, put(LONG, np.s_[:, 20:30], LONG[:, 20:30] ** 3), "columns 20:30 only"),
    "every second row": (LONG, put(LONG, np.s_[::2], LONG[::2] ** 3), "rows 0:15:2 only"),
    "zeros": (LONG, put(LONG, np.s_[4:], 0.0), "each of them is 0"),
    "a factor": (LONG, LONG * 2, "times 2"),
    "a sign": (LONG, -LONG, "times -1"),
    "rows by factors": (LONG, LONG * ROW[:16, None], "each row is the expected one times"),
    "columns by factors": (LONG, LONG * ROW, "each column is the expected one times"),
    "no mask": (FILLED, SQUARE, "above the diagonal only, -9984 is expected"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_difference_is_described(name):
    right, got, words = LOOKS[name]
    made, known = (torch.tensor(np.ascontiguousarray(one)) for one in (got, right))
    said = measure(made, known, torch.float32, 1e-4).pattern
    assert any(one in said for one in words.split("|")), said


def test_noise_and_right_results_are_not_described():
    noise = torch.tensor(np.random.default_rng(3).standard_normal((16, 40)))
    for got in (noise, torch.tensor(LONG), torch.full((16, 40), torch.nan)):
        assert not measure(got, torch.tensor(LONG), torch.float32, 1e-4).pattern


@nki.jit
def half_read(x, y):
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in range(2):
        acc = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=acc, src=x[i : i + 128])
        res = nl.add(acc, 1.0)
        rest = nl.add(res, 1.0)  # of a last tile that is smaller
        nisa.tensor_copy(dst=res[0:96], src=rest[0:96])
    nisa.dma_copy(dst=out, src=res)
    return out


def test_what_is_never_read_is_named():
    program = half_read.trace(np.ones((256, 64), np.float32), np.ones((4, 4), np.float32))
    said = " ".join(patterns.unread(program))
    assert "x[129:256, 0:64] is never read (an argument)" in said
    assert "y[0:4, 0:4] is never read" in said and "rest" not in said


@nki.jit
def gathered(table):
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = nl.ndarray((8, 1), dtype=nl.int32, buffer=nl.sbuf)
    picked = table.ap([[4, 8], [1, 4]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(dst=out, src=picked)
    return out


def test_indices_that_nobody_writes_are_told():
    with pytest.raises(neuron_cpu.core.NkiError, match="load or compute rows first"):
        gathered.trace(np.ones((16, 4), np.float32))


def sums(x):
    return x.sum(axis=1, keepdims=True)


def test_a_reference_of_methods_alone_is_of_what_its_file_imports():
    for known, library in (
        ((np,), "numpy"),
        ((torch,), "torch"),
        ((np, torch), "numpy"),
        ((), "numpy"),
    ):
        function = types.FunctionType(sums.__code__, {one.__name__: one for one in known})
        assert library_of(function) == library
    assert library_of(lambda x: x.max(1)) == "torch"
