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

BOTH = pytest.mark.parametrize("merge", [True, False])


@nki.jit
def scaled_product(x, w):
    """``2 (w.T @ x)`` by blocks of 16 rows."""
    out = nl.ndarray((w.shape[1], x.shape[1]), dtype=x.dtype, buffer=nl.shared_hbm)
    for n in nl.affine_range(w.shape[1] // 16):
        columns = nl.ds(n * 16, 16)
        product = nisa.nc_matmul(nl.load(w[:, columns]), nl.load(x))
        doubled = nisa.tensor_scalar(product, nl.multiply, 2.0, dtype=x.dtype)
        nl.store(out[columns, :], value=doubled)
    return out


def numbers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).bfloat16()


@nki.jit
def product_of_columns(x, w):
    """``w.T @ x[:, 512:1024]``, of columns of a wider tile in SBUF, in fp32."""
    out = nl.ndarray((w.shape[1], 512), dtype=x.dtype, buffer=nl.shared_hbm)
    product = nisa.nc_matmul(nl.load(w), nl.load(x)[:, nl.ds(512, 512)])
    nl.store(out, value=product)
    return out


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


@BOTH
def test_inputs_are_bound_without_a_copy(merge):
    """Weights are hundreds of megabytes: a plan reads the caller's memory."""
    x, w = numbers(1, 32, 5), numbers(2, 32, 48)
    plan = Plan(scaled_product.trace(x, w), merge)
    storages = plan.start([x, w])
    addresses = {flat.data_ptr() for flat in plan.arena.flat.values()}
    assert {x.data_ptr(), w.data_ptr()} <= addresses
    plan.finish(storages)
    addresses = {flat.data_ptr() for flat in plan.arena.flat.values()}
    assert not {x.data_ptr(), w.data_ptr()} & addresses  # and lets go of it


def test_tiles_that_do_not_live_together_share_memory():
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        t = nl.load(x)
        for _ in nl.static_range(20):
            t = nisa.tensor_scalar(t, nl.add, 1.0)
        nl.store(out, value=t)
        return out

    x = numbers(3, 16, 8)
    plan = Plan(kernel.trace(x), False)
    (found,) = plan.run([x])
    assert torch.equal(found, x + 20)
    blocks = {flat.untyped_storage().data_ptr() for flat in plan.arena.flat.values()}
    assert len(blocks) <= 3  # of 21 tiles, two at a time are alive


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
def test_fresh_memory_shows(dtype):
    fresh = memory.allocate(7, dtype)
    assert fresh.shape == (7,) and fresh.dtype is dtype.torch
    if dtype.is_float:
        assert bool(torch.isnan(dtypes.decode(fresh, dtype)).all())
    else:
        assert set(fresh.to(torch.int64).tolist()) == {0 if dtype.kind == "b" else 77}


@pytest.mark.skipif(products._LINEAR is None, reason="this PyTorch has no oneDNN")
@BOTH
def test_large_products_read_rows_without_gaps(merge, monkeypatch):
    """oneDNN takes 500 times as long for columns of a wider tile."""
    seen, linear = [], products._LINEAR

    def watched(x, weight, *rest):
        seen.append(weight)
        return linear(x, weight, *rest)

    monkeypatch.setattr(products, "_LINEAR", watched)
    x, w = (numbers(seed, 128, columns).float() for seed, columns in ((0, 1536), (1, 128)))
    (found,) = Plan(product_of_columns.trace(x, w), merge).run([x, w])
    assert torch.equal(found, w.t() @ x[:, 512:1024])
    assert seen, "no product was large enough"
    assert all(weight.t().is_contiguous() or weight.is_contiguous() for weight in seen)


# --- rounding and writing -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [t for t in dtypes.ALL if t.is_int and t.kind != "b"], ids=str)
def test_integers_saturate_and_bit_patterns_wrap(dtype):
    info = np.iinfo(dtype.numpy)
    out = memory.allocate(6, dtype)
    values = torch.tensor([-1e20, 1e20, 2.5, 3.5, -1.0, float("nan")])
    memory.put(out, values, dtype, False, None)
    expected = [info.min, info.max, 2, 4, max(-1, info.min), 0]
    assert out.to(torch.int64).tolist() == expected
    bits = torch.tensor([info.max + 1, 5, 1 << 40], dtype=torch.int64)
    wrapped = memory.allocate(3, dtype)
    memory.put(wrapped, bits, dtype, True, None)
    assert wrapped.to(torch.int64).tolist() == [info.min, 5, 0]


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
@nki.jit
def gather(table, index):
    out = nl.ndarray((index.shape[0], table.shape[1]), dtype=table.dtype, buffer=nl.shared_hbm)
    chosen = nl.load(index)
    columns = nl.arange(table.shape[1])[None, :]
    rows = nl.load(table[chosen[nl.arange(index.shape[0])[:, None], 0], columns])
    nl.store(out, value=rows)
    return out


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


@pytest.mark.skipif(products._LINEAR is None, reason="PyTorch without oneDNN multiplies with BLAS")
@pytest.mark.parametrize(("tiles", "n"), [(21, 34), (12, 64), (9, 100)])
def test_large_products_take_some_columns_after_others(monkeypatch, tiles, n):
    """Blocks of columns, the last one smaller, and parts of K, on both sides; whole numbers, of
    which fp32 knows every sum."""
    monkeypatch.setattr(products, "CHUNK", 1 << 15)
    taken = []
    blocks = products._block_by_block
    monkeypatch.setattr(
        products, "_block_by_block", lambda *args: (taken.append(len(args[4])), blocks(*args))[1]
    )
    x, w = numbers(4, 128, 3, n), numbers(5, 128, tiles, 3, 128)
    plan = Plan(blocked_products.trace(x, w))
    assert taken and min(taken) > 1
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


@pytest.mark.parametrize("shape", [(128, 300), (1, 4099), (7, 3, 65)])
def test_sums_of_tensor_reduce_are_in_order(shape):
    """A trn1 gave the bits of a sequential fp32 sum in 16,384 published rows."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3 - 1
    axes = tuple(range(1, len(shape)))

    @nki.jit
    def kernel(x):
        out = nl.ndarray((shape[0], 1), nl.float32, buffer=nl.shared_hbm)
        total = nisa.tensor_reduce(np.add, nl.load(x), axis=axes, keepdims=True)
        nl.store(out, total.reshape((shape[0], 1)))
        return out

    want = np.add.accumulate(x.reshape(shape[0], -1).numpy(), axis=1)[:, -1:]
    assert np.array_equal(kernel(x).numpy(), want)
