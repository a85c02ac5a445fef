"""Merged execution equals instruction-by-instruction execution, and both equal numpy.

Loop nests are generated: affine loops around loads, element-wise work, reductions and accumulating
products, with tails, strided views and tensors created at every level.
"""

from __future__ import annotations

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronxcc import nki

from neuron_cpu.core.run import execute


def both(kernel, *args, **kwargs):
    """Outputs of merged and of unmerged execution, and the number of operations of the former."""
    program = kernel.trace(*args, **kwargs)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    merged = execute.Plan(program, merge_loops=True)
    plain = execute.Plan(program, merge_loops=False)
    first = merged.run(tensors)
    again = merged.run(tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "a second run differs"
    return first, plain.run(tensors), len(merged.ops)


def spans(length: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(step, length - at)) for at in range(0, length, step)]


@nki.jit
def product(a_hbm, b_hbm):
    """a.T @ b with a tail on every axis."""
    (k, m), n = a_hbm.shape, b_hbm.shape[1]
    out_hbm = nl.ndarray((m, n), nl.float32, buffer=nl.shared_hbm)
    for m0, mc in spans(m, 64):
        for block in nl.affine_range(n // 48):
            acc_psum = nl.zeros((mc, 48), nl.float32, buffer=nl.psum)
            for tile in nl.affine_range(k // 32):
                rows = nl.ds(tile * 32, 32)
                a_sb = nl.load(a_hbm[rows, nl.ds(m0, mc)])
                b_sb = nl.load(b_hbm[rows, nl.ds(block * 48, 48)])
                acc_psum[...] += nisa.nc_matmul(a_sb, b_sb)
            if k % 32:
                rows = nl.ds(k // 32 * 32, k % 32)
                a_sb = nl.load(a_hbm[rows, nl.ds(m0, mc)])
                acc_psum[...] += nisa.nc_matmul(a_sb, nl.load(b_hbm[rows, nl.ds(block * 48, 48)]))
            nl.store(out_hbm[nl.ds(m0, mc), nl.ds(block * 48, 48)], nl.copy(acc_psum))
    return out_hbm


@nki.jit
def accumulating(x_hbm):
    """In-place accumulation in SBUF inside an affine loop: legal, but never all at once."""
    out_hbm = nl.ndarray(x_hbm.shape[1:], nl.float32, buffer=nl.shared_hbm)
    total_sb = nl.ndarray(x_hbm.shape[1:], nl.float32, buffer=nl.sbuf)
    total_sb[...] = nisa.memset(x_hbm.shape[1:], 0.0, nl.float32)
    for i in nl.affine_range(x_hbm.shape[0]):
        total_sb[...] = nl.add(total_sb, nl.load(x_hbm[i]))
    nl.store(out_hbm, total_sb)
    return out_hbm


def test_shadow_execution_rounds_nothing() -> None:
    x = torch.full((4, 4), 1.0 + 2.0**-7, dtype=torch.bfloat16)

    @nki.jit
    def square_twice(x_hbm):
        out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
        square_sb = nisa.activation(nl.square, nl.load(x_hbm))  # rounded to bf16
        nl.store(out_hbm, nisa.activation(nl.square, square_sb, dtype=nl.float32))
        return out_hbm

    program = square_twice.trace(x)
    (rounded,) = execute.Plan(program).run([x])
    (exact,) = execute.Plan(program, shadow=True).run([x])
    assert (exact - (1 + 2.0**-7) ** 4).abs().max() < 1e-6
    assert (rounded - exact).abs().max() > 1e-4
