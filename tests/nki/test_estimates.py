"""Estimates follow the order that a kernel is written in; products in slices of wider tiles."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.lower import as_written
from neuron_cpu.core.time.schedule import COMPILER_ORDER, PROGRAM_ORDER, schedule

LINKS = 32


@nki.jit
def two_chains(x, beside: bool):
    """Two chains of dependent instructions, written side by side or one after the other."""
    out = nl.ndarray((2, 128, 64), nl.float32, buffer=nl.shared_hbm)
    tiles = [nl.load(x), nl.load(x)]
    order = [k for _ in range(LINKS) for k in (0, 1)] if beside else [0] * LINKS + [1] * LINKS
    for k in order:
        made = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=made, op=nl.exp, data=tiles[k])
        tiles[k] = made
    for k in (0, 1):
        nisa.dma_copy(dst=out[k], src=tiles[k])
    return out


def test_writing_two_chains_side_by_side_pays():
    x = np.zeros((128, 64), np.float32)
    programs = {beside: two_chains.trace(x, beside) for beside in (True, False)}
    times = {beside: schedule(program) for beside, program in programs.items()}
    assert {one.order for one in times.values()} == {PROGRAM_ORDER}
    assert times[True].total < 0.8 * times[False].total
    asked = {
        beside: schedule(program, order=COMPILER_ORDER) for beside, program in programs.items()
    }
    assert asked[True].total == pytest.approx(asked[False].total, rel=0.02)


@pytest.mark.parametrize("read_between", [False, True])
def test_zeros_that_a_product_replaces_are_no_instruction(read_between):
    @nki.jit
    def kernel(a, b):
        out = nl.ndarray((2, 128, 64), nl.float32, buffer=nl.shared_hbm)
        left, right = nl.load(a), nl.load(b)
        for k in range(2):
            total = nl.ndarray((128, 64), nl.float32, buffer=nl.psum)
            copied = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)
            nisa.memset(total, 0.0)
            if read_between:
                nisa.tensor_copy(dst=copied, src=total)
            for _ in range(2):
                nisa.nc_matmul(dst=total, stationary=left, moving=right)
            nisa.tensor_copy(dst=copied, src=total)
            nisa.dma_copy(dst=out[k], src=copied)
        return out

    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((128, 128), (128, 64)))
    program = kernel.trace(a, b)
    made = as_written(program)
    left = sum(i.op.name == "memset" for i in made.instructions)
    assert left == (2 if read_between else 0)
    found = Plan(made, merge_loops=False).run([torch.from_numpy(a), torch.from_numpy(b)])[0]
    assert np.array_equal(found.numpy(), kernel(a, b))
