"""Eager mode: every instruction runs as it is recorded, so values can be looked at."""

from __future__ import annotations

import numpy as np
import pytest
from neuronxcc import nki
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError

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


def test_eager_mode_verifies_too(eager):
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.ndarray(x.shape, x.dtype))
        return out

    with pytest.raises(NkiError, match="sim_undefined_data"):
        nki.jit(kernel)(X)
