"""Forms of operands that kernels seldom use, each computed with PyTorch as well."""

from __future__ import annotations

import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import Kernel
from neuron_cpu.core.run.execute import Plan

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")
MODES = pytest.mark.parametrize("mode", ["merged", "single", "eager"])


def compute(mode, function, *inputs):
    """The kernel's first result: loops merged, instruction by instruction, or while tracing."""
    if mode == "eager":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NKI_CPU_EAGER", "1")
            return Kernel(function)(*inputs)
    program = Kernel(function).trace(*(x.to("meta") for x in inputs))
    return Plan(program, merge_loops=mode == "merged").run(list(inputs))[0]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- results that go elsewhere --------------------------------------------------------------------


@MODES
def test_scattered_rows_leave_out_what_the_mask_does(mode):
    def kernel(x, rows):
        out = nl.zeros((100, 16), nl.float32, buffer=nl.shared_hbm)
        at, tile = nl.load(rows), nl.load(x)
        p, f = nl.arange(64)[:, None], nl.arange(16)[None, :]
        nl.store(out[at[p, 0], f], value=tile[p, f], mask=(p < 50) & (f >= p - 40))
        return out

    x, rows = numbers(64, 16), torch.randperm(100)[:64].int()[:, None]
    p, f = torch.arange(64)[:, None], torch.arange(16)[None, :]
    wanted = torch.zeros(100, 16)
    wanted[rows[:, 0]] = torch.where((p < 50) & (f >= p - 40), x, 0.0)
    assert torch.equal(compute(mode, kernel, x, rows), wanted)


# --- sums over a loop -----------------------------------------------------------------------------
REDUCED = {"add": torch.sum, "multiply": torch.prod, "maximum": torch.amax, "minimum": torch.amin}


@MODES
@pytest.mark.parametrize("name", REDUCED)
def test_loop_reduce_over_a_fresh_tile_begins_with_nothing(mode, name):
    operator = getattr(np, name)

    def kernel(x):
        out = nl.ndarray((128, 4), nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 4), nl.float32)
        for k in nl.affine_range(3):
            total[...] = nl.loop_reduce(nl.load(x[k]), op=operator, loop_indices=[k])
        nl.store(out, value=total)
        return out

    x = numbers(3, 128, 4)
    torch.testing.assert_close(compute(mode, kernel, x), REDUCED[name](x, dim=0))
