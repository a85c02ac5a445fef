"""Calling kernels: modes, calling conventions, caches, nesting, in-place parameters, observers."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki import typing as nt

from neuron_cpu.core import Kernel, NkiError


def doubled(x):
    """[128, n] -> 2 x."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.multiply(nl.load(x), 2))
    return out


def doubled_into(x, out):
    """Old convention: the output is a parameter."""
    nl.store(out, nl.multiply(nl.load(x), 2))


X = np.arange(12, dtype=np.float32).reshape(3, 4)


# --- modes and conventions ------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["auto", "torchxla", "jax", "baremetal", "simulation", "trace"])
def test_every_mode_computes(mode):
    assert np.array_equal(nki.jit(doubled, mode=mode)(X), 2 * X)
    assert np.array_equal(nki.jit(mode=mode)(doubled)(X), 2 * X)


def test_decorator_forms():
    assert isinstance(nki.jit(doubled), Kernel)
    assert isinstance(nki.jit()(doubled), Kernel)
    assert np.array_equal(nki.baremetal(doubled)(X), 2 * X)
    assert np.array_equal(nki.baremetal(save_neff_name="file.neff")(doubled)(X), 2 * X)
    assert nki.jit(doubled).__name__ == nki.jit(doubled).func_name == "doubled"
    with pytest.raises(ValueError, match="mode 'device'"):
        nki.jit(doubled, mode="device")
    with pytest.raises(ValueError, match="platform_target 'trn9'"):
        nki.jit(doubled, platform_target="trn9")
    assert np.array_equal(nki.jit(doubled, platform_target="trn1")(X), 2 * X)


def test_the_target_is_the_environment_s_then_the_kernel_s_then_trn1(monkeypatch):
    kernel = nki.jit(doubled, platform_target="trn2")
    assert kernel.trace(X).core.name == "gen3"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert kernel.trace(X).core.name == "gen4" and nki.isa.get_nc_version() == 4
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    assert nki.jit(doubled).trace(X).core.name == "gen2" and nki.isa.get_nc_version() == 2


def test_torch_in_torch_out_and_numpy_in_numpy_out():
    kernel = nki.jit(doubled)
    x = torch.from_numpy(X).to(torch.bfloat16)
    assert kernel(x).dtype is torch.bfloat16 and torch.equal(kernel(x), 2 * x)
    y = X.astype(ml_dtypes.bfloat16)
    assert kernel(y).dtype == ml_dtypes.bfloat16
    assert np.array_equal(kernel(y).astype(np.float32), 2 * X)


def test_meta_tensors_are_traced_only():
    made = nki.jit(doubled)(torch.empty(5, 6, device="meta", dtype=torch.bfloat16))
    assert made.is_meta and made.shape == (5, 6) and made.dtype is torch.bfloat16
    with pytest.raises(NkiError, match="err_num_partition_exceed_arch_limit"):
        nki.jit(doubled)(torch.empty(129, 6, device="meta"))


def test_simulate_kernel_in_both_conventions():
    assert np.array_equal(nki.simulate_kernel(doubled, X), 2 * X)
    for kernel in (doubled_into, nki.jit(doubled_into), nki.trace(doubled_into)):
        out = np.zeros_like(X)
        assert nki.simulate_kernel(kernel, X, out) is None
        assert np.array_equal(out, 2 * X)


def test_output_parameters():
    kernel = nki.jit(doubled_into, kernel_return=False)
    out = torch.zeros(3, 4)
    assert kernel(torch.from_numpy(X), out) is None
    assert torch.equal(out, 2 * torch.from_numpy(X))
    strided = torch.zeros(4, 3).t()  # not contiguous: written back element by element
    kernel(torch.from_numpy(X), strided)
    assert torch.equal(strided, 2 * torch.from_numpy(X))
    with pytest.raises(NkiError, match="err_tensor_output_not_written_to"):
        nki.jit(lambda x: nl.load(x), kernel_return=False)(X)


@pytest.mark.parametrize("eager", [False, True])
def test_mutable_parameter_is_updated_in_place(eager, monkeypatch):
    if eager:
        monkeypatch.setenv("NKI_CPU_EAGER", "1")

    @nki.jit
    def append(cache: nt.mutable_tensor, row):
        nl.store(cache[1:2, :], nl.load(row))
        return cache

    cache, row = torch.zeros(3, 4), torch.ones(1, 4)
    made = append(cache, row)
    assert made is cache
    assert cache.sum() == 4 and torch.equal(cache[1:2], row)
    parts = torch.zeros(4, 3).t()
    assert append(parts, row) is parts and torch.equal(parts[1:2], row)


def test_several_results_and_nested_arguments():
    @nki.jit
    def kernel(pair, factor=2, *, add=None):
        outs = []
        a = nl.ndarray(pair[0].shape, nl.float32, buffer=nl.shared_hbm)
        b = nl.ndarray(pair[1].shape, nl.float32, buffer=nl.shared_hbm)
        for tensor, out in zip(pair, (a, b)):
            tile = nl.multiply(nl.load(tensor), factor)
            if add is not None:
                tile = nl.add(tile, nl.load(add))
            nl.store(out, tile)
            outs.append(out)
        return tuple(outs)

    one, two = kernel((X, X + 1), 3)
    assert np.array_equal(one, 3 * X) and np.array_equal(two, 3 * X + 3)
    one, two = kernel([X, X], add=X)
    assert np.array_equal(one, 3 * X)


# --- specialisation -------------------------------------------------------------------------------
def test_threads_replay_one_program():
    kernel = nki.jit(doubled)
    inputs = [torch.full((128, 64), float(k)) for k in range(8)]
    results = {}

    def work(k):
        results[k] = kernel(inputs[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[k], 2 * inputs[k]) for k in range(8))
    assert len(kernel.programs) == 1


# --- nesting --------------------------------------------------------------------------------------
def test_nested_kernel_with_old_convention_writes_its_parameter():
    inner = nki.trace(doubled_into)

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        inner(x, out)
        return out

    assert np.array_equal(kernel(X), 2 * X)


# --- eager mode: every instruction runs as it is recorded -----------------------------------------
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


# --- inside and outside of torch.inference_mode(), with and without gradients ---------------------
GRAD_MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


def sum_of_products(x, w, cache: nt.mutable_tensor):
    """Sums over K in PSUM, times a constant: plan buffers, a constant, scratch and a cache."""
    out = nl.ndarray((128, 64), nl.bfloat16, buffer=nl.shared_hbm)
    identity_sb = nl.load(nl.shared_constant(np.eye(128, dtype=np.float32)))
    sum_psum = nl.zeros((128, 64), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        rows = nl.ds(128 * k, 128)
        sum_psum += nisa.nc_matmul(nl.load(x[rows]), nl.load(w[rows]))
    same_psum = nisa.nc_matmul(identity_sb, nl.copy(sum_psum))
    result_sb = nl.copy(same_psum, dtype=nl.bfloat16)
    nl.store(out, result_sb)
    nl.store(cache, result_sb)
    return out, cache


# Every pair of calls; inputs of every mode meet each mode of the first call and of the second.
ROWS = [
    (first, second, [*GRAD_MODES][(i + j) % 3], (i + j) % 2 == 1)
    for i, first in enumerate(GRAD_MODES)
    for j, second in enumerate(GRAD_MODES)
]


@pytest.mark.parametrize(("first", "second", "made", "eager"), ROWS)
def test_a_kernel_runs_in_one_mode_and_then_in_another(first, second, made, eager):
    """Inputs come from ``made``; results may be changed in place afterwards, in either mode."""
    kernel = nki.jit(sum_of_products, eager=eager)
    generator = torch.Generator().manual_seed(1)
    with GRAD_MODES[made]():
        x = torch.randn(256, 128, generator=generator).bfloat16()
        w = torch.randn(256, 64, generator=generator).bfloat16()
        cache = torch.zeros(128, 64, dtype=torch.bfloat16)
    if made == "grad":
        w.requires_grad_(True)
    expected = (x.float().T @ w.detach().float()).bfloat16()
    for mode in (first, second):
        with GRAD_MODES[mode]():
            out, same = kernel(x, w, cache)
            assert same is cache and out.requires_grad == (mode == made == "grad")
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.1)
            assert torch.equal(cache, out)
            out.add_(1)
    out.add_(1)
    if out.requires_grad:
        with pytest.raises(RuntimeError, match="kernel sum_of_products has no gradient.*no_grad"):
            out.sum().backward()
