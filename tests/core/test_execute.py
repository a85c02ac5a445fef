"""Plans and machines: memory, rounding, repetition, threads. Instructions: test_isa.py."""

from __future__ import annotations

import gc
import threading
import weakref

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch
from neuronxcc import nki

from neuron_cpu.core import NkiError
from neuron_cpu.core.device import dtypes
from neuron_cpu.core.instructions.alu import ACTIVATIONS
from neuron_cpu.core.run import memory, products
from neuron_cpu.core.run.execute import Plan
from tests.core.test_refusals import kernel_of

BOTH = pytest.mark.parametrize("merge", [True, False])


def numbers(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).bfloat16()


@nki.jit
def blocked_products(x, w):
    """``w.T @ x`` [f, 128, n] and ``x.T @ w`` [f, n, 128] for x [128, k, n], w [128, f, k, 128]."""
    _, tiles, depth, _ = w.shape
    n = x.shape[2]
    left = nl.ndarray((tiles, 128, n), dtype=nl.float32, buffer=nl.shared_hbm)
    right = nl.ndarray((tiles, n, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    moving = nl.load(x)
    for f in nl.affine_range(tiles):
        features = nl.zeros((128, n), nl.float32, buffer=nl.psum)
        rows = nl.zeros((n, 128), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(depth):
            weights = nl.load(w[:, f, k, :])
            features += nisa.nc_matmul(weights, moving[:, k, :])
            rows += nisa.nc_matmul(moving[:, k, :], weights)
        nl.store(left[f], value=nisa.tensor_copy(features))
        nl.store(right[f], value=nisa.tensor_copy(rows))
    return left, right


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_fresh_memory_shows(dtype):
    fresh = memory.allocate(7, dtype)
    assert fresh.shape == (7,) and fresh.dtype is dtype.torch
    if dtype.is_float:
        assert bool(torch.isnan(dtypes.decode(fresh, dtype)).all())
    else:
        assert set(fresh.to(torch.int64).tolist()) == {0 if dtype.kind == "b" else 77}


# --- rounding and writing -------------------------------------------------------------------------
@pytest.mark.parametrize("op", sorted(ACTIVATIONS))
def test_a_function_gives_the_same_bits_wherever_its_input_lies(op):
    """Merged iterations change strides and lengths; vector lanes and scalar tails must agree."""
    function = ACTIVATIONS[op]
    x = torch.randn(33, 37, generator=torch.Generator().manual_seed(7)) * 3
    x = x.abs() if op in ("log", "sqrt", "rsqrt") else x
    whole = function(x)
    assert torch.equal(function(x.t()).t(), whole)
    assert torch.equal(function(x[:, 3:10]), whole[:, 3:10])
    assert torch.equal(function(x.reshape(-1)[5::3]), whole.reshape(-1)[5::3])
    assert torch.equal(torch.stack([function(v[None])[0] for v in x[0]]), whole[0])


# --- data-dependent rows --------------------------------------------------------------------------
@kernel_of
def gather(table, index):
    chosen = nl.load(index)
    columns = nl.arange(table.shape[1])[None, :]
    rows = nl.load(table[chosen[nl.arange(index.shape[0])[:, None], 0], columns])
    return rows


@BOTH
@pytest.mark.parametrize("wrong", [-1, 10, 2**31 - 1])
def test_rows_out_of_bounds_are_refused_when_they_are_used(merge, wrong):
    table, index = numbers(4, 10, 6), torch.tensor([[3], [0], [9]], dtype=torch.int32)
    plan = Plan(gather.trace(table, index), merge)
    assert torch.equal(plan.run([table, index])[0], table[[3, 0, 9]])
    index[1] = wrong
    with pytest.raises(NkiError, match=rf"index {wrong} at run time, expected 0 to 9"):
        plan.run([table, index])


# --- eager mode and threads -----------------------------------------------------------------------
@pytest.mark.parametrize("one_dnn", [False, True])
@pytest.mark.parametrize(("tiles", "n"), [(21, 34), (12, 64), (9, 100)])
def test_large_products_take_some_of_k_after_others(monkeypatch, tiles, n, one_dnn):
    """Parts of K, on both sides; whole numbers, of which fp32 knows every sum."""
    if one_dnn and not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch without oneDNN multiplies with BLAS")
    linear = torch.ops.mkldnn._linear_pointwise if one_dnn else None
    monkeypatch.setattr(products, "_LINEAR", linear)
    monkeypatch.setattr(products, "CHUNK", 1 << 15)
    x, w = numbers(4, 128, 3, n), numbers(5, 128, tiles, 3, 128)
    plan = Plan(blocked_products.trace(x, w))
    for seed in (4, 6):
        x = numbers(seed, 128, 3, n)
        left, right = plan.run([x, w])
        wanted = torch.einsum("pkn,pfkm->fmn", x.double(), w.double())
        assert torch.equal(left.double(), wanted)
        assert torch.equal(right.double(), wanted.transpose(1, 2))


def test_plans_end_with_their_kernel_and_with_their_thread():
    """A notebook defines a kernel again and again: its plans hold megabytes each."""

    def define():
        def kernel(x):
            out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
            nl.store(out, value=nisa.tensor_scalar(nl.load(x), nl.add, 1.0))
            return out

        return nki.jit(kernel)

    def use(kernel):
        x = numbers(7, 16, 8)
        assert torch.equal(kernel(x), x + 1)
        plans = kernel.trace(x).plans
        thread = threading.Thread(target=lambda: (kernel(x), found.append(len(plans))))
        thread.start()
        thread.join()
        return weakref.ref(*plans.values())

    found: list[int] = []
    kernel = define()
    plan = use(kernel)
    assert found == [2] and plan() is not None
    del kernel
    gc.collect()
    assert plan() is None


@pytest.mark.parametrize(
    "shape", [(128, 300), (1, 4099), (7, 3, 65), (1, 1), (1, 8), (8, 2, 4), (128, 8), (128, 9)]
)
def test_sums_of_tensor_reduce_are_in_order(shape):
    """A trn1 gave the bits of a sequential fp32 sum in 16,384 published rows."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3 - 1
    axes = tuple(range(1, len(shape)))

    @kernel_of
    def kernel(x):
        total = nisa.tensor_reduce(np.add, nl.load(x), axis=axes, keepdims=True)
        return total.reshape((shape[0], 1))

    want = np.add.accumulate(x.reshape(shape[0], -1).numpy(), axis=1)[:, -1:]
    assert np.array_equal(kernel(x).numpy(), want)


def test_shadow_execution_rounds_nothing():
    x = torch.full((4, 4), 1.0 + 2.0**-7, dtype=torch.bfloat16)

    @nki.jit
    def square_twice(x_hbm):
        out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
        square_sb = nisa.activation(nl.square, nl.load(x_hbm))  # rounded to bf16
        nl.store(out_hbm, nisa.activation(nl.square, square_sb, dtype=nl.float32))
        return out_hbm

    program = square_twice.trace(x)
    (rounded,) = Plan(program).run([x])
    (exact,) = Plan(program, shadow=True).run([x])
    assert (exact - (1 + 2.0**-7) ** 4).abs().max() < 1e-6
    assert (rounded - exact).abs().max() > 1e-4
