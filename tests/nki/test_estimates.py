"""Estimates follow the order that a kernel is written in; products in slices of wider tiles."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.lower import as_written


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
