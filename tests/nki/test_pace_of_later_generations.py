"""From gen3 on TensorE ramps up, and short instructions take their start."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core.time.schedule import schedule

COLUMNS = {"trn1": 512 * 1.125 / 2.8, "trn2": (512 + 8) / 2.4}  # ns of a bf16 product of 512


@nki.jit
def products(a, b, count, rest):
    out = nl.ndarray((128, 512), nl.float32, buffer=nl.shared_hbm)
    left, right = nl.ndarray(a.shape, a.dtype), nl.ndarray(b.shape, b.dtype)
    nisa.dma_copy(left, a)
    nisa.dma_copy(right, b)
    total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
    for _ in range(count):
        nisa.nc_matmul(total, left, right)
        for _ in range(rest):  # TensorE waits: its next operand is written anew
            nisa.tensor_copy(left, left)
    tile = nl.ndarray((128, 512), nl.float32)
    nisa.tensor_copy(tile, total)
    nisa.dma_copy(out, tile)
    return out


@pytest.mark.parametrize("name", ["trn1", "trn2"])
@pytest.mark.parametrize("rest", [0, 8], ids=["dense", "with-gaps"])
def test_tensor_engine_ramps_up(name, rest, target):
    target(name)
    a, b = np.zeros((128, 128), nl.bfloat16), np.zeros((128, 512), nl.bfloat16)
    planned = schedule(products.trace(a, b, 32, rest))
    found = [t for t, e in zip(planned.busy, planned.engine) if e == 0]
    halves = 0 if name == "trn1" else 32 if rest else 4  # 3 us / 2 of work at half rate, rounded up
    want = [2 * COLUMNS[name]] * halves + [COLUMNS[name]] * (32 - halves)
    assert found == pytest.approx(want)
