"""Eager mode: every instruction runs as it is recorded, so values can be looked at."""

from __future__ import annotations

import numpy as np
import pytest
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from tests.core.test_isa import data

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setenv("NKI_CPU_EAGER", "1")


def looking(x, seen):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    seen.append(tile.numpy())
    half = nl.multiply(tile, 0.5)
    seen.append(half[0:2, 1:3].numpy())
    nl.device_print("half", half)
    print(half)
    breakpoint()
    nl.store(out, half)
    return out


def test_values_are_visible_while_tracing(eager, capsys, monkeypatch):
    stops = []
    monkeypatch.setattr("sys.breakpointhook", lambda: stops.append(1))
    seen: list[np.ndarray] = []
    assert np.array_equal(nki.jit(looking)(X, seen), X / 2)
    assert np.array_equal(seen[0], X) and np.array_equal(seen[1], X[0:2, 1:3] / 2)
    assert stops == [1]
    printed = capsys.readouterr().out
    assert printed.count("5.5") == 2 and "tensor (3, 4) float32 in sbuf" in printed


def test_values_are_refused_without_eager_mode():
    def kernel(x):
        return nl.load(x).numpy()

    with pytest.raises(NkiError, match="NKI_CPU_EAGER=1"):
        nki.jit(kernel)(X)


def accumulate(x, w):
    """x.T @ w in PSUM, softmax over the free axis, masked tail."""
    out = nl.ndarray((x.shape[1], w.shape[1]), nl.float32, buffer=nl.shared_hbm)
    total = nl.zeros((x.shape[1], w.shape[1]), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        rows = nl.ds(k * 16, 16)
        total[...] += nisa.nc_matmul(nl.load(x[rows, :]), nl.load(w[rows, :]))
    i, j = nl.mgrid[0 : x.shape[1], 0 : w.shape[1]]
    masked = nisa.affine_select(i >= j, nl.copy(total), -9984.0)
    nl.store(out, nl.softmax(masked, axis=1))
    return out


def test_eager_results_equal_replayed_ones(eager, monkeypatch):
    x, w = data(1, (32, 20), "bfloat16"), data(2, (32, 24), "bfloat16")
    kernel = nki.jit(accumulate)
    at_once = kernel(x, w)
    monkeypatch.delenv("NKI_CPU_EAGER")
    assert np.allclose(at_once, kernel(x, w), atol=1e-6)


def test_eager_mode_verifies_too(eager):
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.ndarray(x.shape, x.dtype))
        return out

    with pytest.raises(NkiError, match="sim_undefined_data"):
        nki.jit(kernel)(X)
