"""Merged execution equals instruction-by-instruction execution, and both equal numpy.

Loop nests are generated: affine loops around loads, element-wise work, reductions and accumulating
products, with tails, strided views and tensors created at every level.
"""

from __future__ import annotations

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


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


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 100), st.integers(1, 130), st.integers(1, 4), st.integers(0, 3))
def test_products_of_any_size(k: int, m: int, blocks: int, seed: int) -> None:
    a, b = random(k, m, seed=seed), random(k, 48 * blocks, seed=seed + 1)
    (merged,), (plain,), _ = both(product, a, b)
    exact = a.double().t() @ b.double()
    torch.testing.assert_close(merged, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.double(), exact, rtol=1e-4, atol=1e-4)


@nki.jit
def nested(x_hbm, outer, inner, width):
    """Element-wise work at two levels, a tensor from outside, strided and reduced views."""
    out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
    sums_hbm = nl.ndarray((outer, x_hbm.shape[1], inner), nl.float32, buffer=nl.shared_hbm)
    scale_sb = nl.ndarray((x_hbm.shape[1], 1), nl.float32, buffer=nl.sbuf)
    scale_sb[...] = nisa.memset((x_hbm.shape[1], 1), 0.5, nl.float32)
    for i in nl.affine_range(outer):
        row_sb = nl.load(x_hbm[i])
        half_sb = nl.multiply(row_sb, scale_sb, dtype=nl.float32)
        collected_sb = nl.ndarray((x_hbm.shape[1], inner), nl.float32, buffer=nl.sbuf)
        for j in nl.affine_range(inner):
            piece = half_sb[:, nl.ds(j * width, width)]
            exp_sb = nisa.activation(nl.exp, piece)
            collected_sb[:, nl.ds(j, 1)] = nisa.tensor_reduce(nl.add, exp_sb, axis=1)
            nl.store(out_hbm[i, :, nl.ds(j * width, width)], exp_sb)
        nl.store(sums_hbm[i], collected_sb)
    return out_hbm, sums_hbm


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 128))
def test_nested_loops(outer: int, inner: int, width: int, partitions: int) -> None:
    x = random(outer, partitions, inner * width)
    merged, plain, operations = both(nested, x, outer, inner, width)
    assert all(torch.equal(a, b) for a, b in zip(merged, plain))
    exact = torch.exp(x.float() * 0.5)
    torch.testing.assert_close(merged[0], exact, rtol=1e-6, atol=0)
    wanted = exact.reshape(outer, partitions, inner, width).sum(-1)
    torch.testing.assert_close(merged[1], wanted, rtol=1e-5, atol=1e-5)
    assert operations <= 8, "loops were not merged"


@nki.jit
def running(x_hbm):
    """A sequential loop: its order must be kept."""
    out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
    state_sb = nl.ndarray((x_hbm.shape[1], 1), nl.float32, buffer=nl.sbuf)
    state_sb[...] = nisa.memset((x_hbm.shape[1], 1), 0.0, nl.float32)
    for i in nl.sequential_range(x_hbm.shape[0]):
        row_sb = nl.load(x_hbm[i])
        state_sb[...] = nisa.tensor_scalar(state_sb, nl.multiply, 0.5)
        state_sb[...] = nisa.tensor_tensor(state_sb, row_sb, nl.add)
        nl.store(out_hbm[i], state_sb)
    return out_hbm


def test_sequential_loops_keep_their_order() -> None:
    x = random(7, 5, 1).float()
    (merged,), (plain,), _ = both(running, x)
    state, wanted = torch.zeros(5, 1), []
    for row in x:
        state = state * 0.5 + row
        wanted.append(state)
    assert torch.equal(merged, plain)
    torch.testing.assert_close(merged, torch.stack(wanted))


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


def test_accumulation_in_sbuf() -> None:
    x = random(9, 4, 6).float()
    (merged,), (plain,), _ = both(accumulating, x)
    assert torch.equal(merged, plain)
    torch.testing.assert_close(merged, x.sum(0))


@nki.jit
def masked(x_hbm):
    """Masks that are boxes, masks that are not, and one that selects nothing."""
    out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
    i_p, i_f = nl.arange(x_hbm.shape[1])[:, None], nl.arange(x_hbm.shape[2])[None, :]
    for i in nl.affine_range(x_hbm.shape[0]):
        row_sb = nl.load(x_hbm[i])
        work_sb = nl.ndarray(x_hbm.shape[1:], nl.float32, buffer=nl.sbuf)
        work_sb[...] = nisa.tensor_copy(row_sb, dtype=nl.float32)
        work_sb[...] = nisa.tensor_scalar(work_sb, nl.multiply, 2.0, mask=(i_p >= i_f))
        work_sb[...] = nisa.tensor_scalar(work_sb, nl.add, 1.0, mask=(i_f < i))
        nl.store(out_hbm[i], work_sb)
    return out_hbm


def test_masks() -> None:
    x = random(4, 6, 5).float()
    (merged,), (plain,), _ = both(masked, x)
    p, f = np.indices((6, 5))
    wanted = x.numpy() * np.where(p >= f, 2.0, 1.0)
    wanted = np.stack([w + (f < i) for i, w in enumerate(wanted)]).astype(np.float32)
    assert torch.equal(merged, plain)
    np.testing.assert_allclose(merged.numpy(), wanted, rtol=1e-6)


@nki.jit
def over_grid(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    i, j = nl.program_id(0), nl.program_id(1)
    tile_sb = nl.load(x_hbm[i, j])
    nl.store(out_hbm[i, j], nl.multiply(tile_sb, np.float32(3), dtype=x_hbm.dtype))
    return out_hbm


def test_grid_instances_run_at_once() -> None:
    x = random(3, 4, 16, 8)
    (merged,), (plain,), operations = both(over_grid[3, 4], x)
    assert torch.equal(merged, plain)
    assert torch.equal(merged, (x.float() * 3).to(torch.bfloat16))
    assert operations == 2


@nki.jit
def doubled(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.add(nl.load(x_hbm), nl.load(x_hbm)))
    return out_hbm


@pytest.mark.parametrize("merge", ["0", "1"])
def test_inputs_may_be_views(merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contiguous view with an offset, and a transposed one, are read from the right place."""
    monkeypatch.setenv("NKI_CPU_MERGE", merge)
    x = random(64, 32)
    for view in (x[16:48], x.t(), x[::2]):
        assert torch.equal(doubled(view), view + view)


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
