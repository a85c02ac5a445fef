"""Loops that Python unrolled are joined where iterations are independent, and only there.

Inputs are small integers: sums are exact in any order, so results must be equal to the bit.
"""

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronxcc import nki

from neuron_cpu.core.run.execute import Plan


def integers(seed, *shape):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def both(kernel, *inputs):
    """The first output of two runs, equal to that of one instruction after the other."""
    program = kernel.trace(*inputs)
    plan, single = Plan(program, True), Plan(program, False)
    wanted = single.run([x.clone() for x in inputs])
    for run in range(2):
        found = plan.run([x.clone() for x in inputs])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted)), f"run {run} differs"
    return wanted[0], plan


def names(plan):
    return [op.spec.name for op in plan.ops]


# --- what is joined -------------------------------------------------------------------------------
@nki.jit
def columns(x_hbm):
    """Tiles of its own in every iteration, results side by side in one tile."""
    n = x_hbm.shape[1] // 8
    out_hbm = nl.ndarray((x_hbm.shape[0], n), nl.float32, buffer=nl.shared_hbm)
    all_sb = nl.ndarray((x_hbm.shape[0], n), nl.float32, buffer=nl.sbuf)
    x_sb = nl.load(x_hbm)
    for i in nl.static_range(n):
        bias_sb = nisa.memset((x_hbm.shape[0], 1), 2.0, nl.float32)
        shifted_sb = nisa.tensor_scalar(x_sb[:, nl.ds(8 * i, 8)], nl.add, bias_sb)
        all_sb[:, i : i + 1] = nisa.tensor_reduce(nl.add, shifted_sb, axis=1)
    nl.store(out_hbm, all_sb)
    return out_hbm


def test_a_python_loop_is_one_operation_an_instruction():
    x = integers(0, 16, 72)
    found, plan = both(columns, x)
    assert torch.equal(found, (x + 2).reshape(16, 9, 8).sum(-1))
    assert names(plan).count("tensor_reduce") == names(plan).count("tensor_scalar") == 1


# --- what must stay apart -------------------------------------------------------------------------
def chained(kind):
    """Iterations that depend on each other, in one of the ways there are."""

    @nki.jit
    def kernel(x_hbm):
        out_hbm = nl.ndarray((8, 12), nl.float32, buffer=nl.shared_hbm)
        t = nl.load(x_hbm)
        u = nisa.tensor_copy(t)
        for i in nl.static_range(1, 6):
            if kind == "writes what the one before read":
                t[:, i : i + 1] = nisa.tensor_tensor(t[:, i + 1 : i + 2], u[:, i : i + 1], nl.add)
                u[:, i + 1 : i + 2] = nisa.tensor_copy(t[:, i : i + 1])
            elif kind == "steps back":
                t[:, 7 - i : 8 - i] = nisa.tensor_scalar(u[:, i : i + 1], nl.add, 1.0)
            elif kind == "every other column":
                t[:, 2 * i : 2 * i + 1] = nisa.tensor_tensor(
                    t[:, 2 * i - 1 : 2 * i], u[:, i : i + 1], nl.add
                )
                t[:, 2 * i - 1 : 2 * i] = nisa.tensor_copy(u[:, i : i + 1])
            else:
                raise AssertionError(kind)
        nl.store(out_hbm, t)
        return out_hbm

    return kernel


@pytest.mark.parametrize(
    "kind", ["writes what the one before read", "steps back", "every other column"]
)
def test_order_is_kept(kind):
    both(chained(kind), integers(4, 8, 12))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(*[st.integers(0, 2)] * 2, *[st.integers(0, 6)] * 2, *[st.integers(0, 2)] * 2),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 5),
)
def test_random_bodies(steps, count):
    """Random statements over three tiles, columns moving at random rates: any dependence at all."""

    @nki.jit
    def kernel(x_hbm):
        out_hbm = nl.ndarray((3, 4, 20), nl.float32, buffer=nl.shared_hbm)
        tiles = [nl.load(x_hbm[k]) for k in range(3)]
        for i in nl.static_range(count):
            for target, source, to, start, rate, speed in steps:
                value = tiles[source][:, nl.ds(start + rate * i, 2)]
                made = nisa.tensor_scalar(value, nl.add, 1.0)
                tiles[target][:, nl.ds(to + speed * i, 2)] = nisa.tensor_copy(made)
        for k in nl.static_range(3):
            nl.store(out_hbm[k], tiles[k])
        return out_hbm

    both(kernel, integers(5, 3, 4, 20))


# --- what runs once -------------------------------------------------------------------------------
@nki.jit
def masked(x_hbm):
    """A mask from constants alone, and a tile of zeros that data are written over."""
    out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
    ones_sb = nisa.memset(x_hbm.shape, 1.0, nl.float32)
    rows, columns = nl.arange(x_hbm.shape[0])[:, None], nl.arange(x_hbm.shape[1])[None, :]
    mask_sb = nisa.affine_select(rows >= columns, ones_sb, 0.0)
    sum_sb = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.sbuf)
    sum_sb[...] = nisa.memset(x_hbm.shape, 0.0, nl.float32)
    sum_sb[:, 0:3] = nl.load(x_hbm[:, 0:3])
    nl.store(out_hbm, nisa.tensor_tensor(sum_sb, mask_sb, nl.add))
    return out_hbm


def test_constants_are_computed_once_and_mixed_tiles_every_time():
    x = integers(6, 9, 9)
    found, plan = both(masked, x)
    wanted = torch.tril(torch.ones(9, 9))
    wanted[:, :3] += x[:, :3]
    assert torch.equal(found, wanted)
    left_out = len(plan.steps) - len(plan._again)
    assert left_out == 2, [op.spec.name for op in plan.ops]  # ones and mask, not the zeros
    for seed in (7, 8):
        other = integers(seed, 9, 9)
        again = torch.tril(torch.ones(9, 9))
        again[:, :3] += other[:, :3]
        assert torch.equal(plan.run([other])[0], again)
