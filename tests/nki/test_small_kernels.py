"""Whole kernels of the current language against float64 references that know nothing of it."""

from __future__ import annotations

import importlib

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

BF16 = np.dtype(ml_dtypes.bfloat16)


def normal(seed, shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


# --- calling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nki.meta.tensor", "nki.tensor"])  # the second up to SDK 2.27
def test_constants_have_a_module_of_their_own(name):
    made = importlib.import_module(name)

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        turned = nl.ndarray(x.shape, x.dtype, buffer=nl.psum)
        ident = nl.load(nl.shared_constant(made.identity(8, nl.float32)))
        nisa.nc_matmul(turned, stationary=nl.load(x), moving=ident)
        result = nl.ndarray(x.shape, x.dtype)
        nisa.tensor_copy(result, turned)
        nl.store(out, result)
        return out

    x = normal(7, (8, 8))
    assert np.allclose(kernel(x), x.T, atol=1e-6)


class Config(nl.NKIObject):
    scale: float
    tile: object = None


@pytest.mark.warns("sim_tensors_in_tuple")
def test_objects_and_tuples_carry_tensors():
    @nki.jit
    def kernel(config, pair):
        out = nl.ndarray(pair[0].shape, pair[0].dtype, buffer=nl.shared_hbm)
        a = nl.load(pair[0])
        nisa.scalar_tensor_tensor(a, a, nl.multiply, config.scale, nl.add, nl.load(config.tile))
        nl.store(out, nl.add(a, nl.load(pair[1])))
        return out

    a, b, c = (normal(k, (8, 4)) for k in range(3))
    for scale in (2.0, 2.0, 3.0):
        found = kernel(Config(scale=scale, tile=c), (a, b))
        assert np.allclose(found, scale * a + c + b, atol=1e-6)
    assert len(kernel.programs) == 2


@pytest.mark.warns("sim_dropped_result")
def test_a_number_beside_tensors_is_dropped_with_a_word():
    @nki.jit
    def kernel(a_hbm):
        out_hbm = nl.ndarray(a_hbm.shape, a_hbm.dtype, buffer=nl.shared_hbm)
        nl.store(out_hbm, nl.load(a_hbm))
        return out_hbm, 1.0

    a = normal(0, (8, 4))
    (found,) = kernel(a)
    assert np.array_equal(found, a)


def test_low_precision_may_be_kept_in_fp32(monkeypatch):
    """NKI_PRECISE_FP=0: a sum that bf16 would round away survives until the result."""

    @nki.jit
    def kernel(x, cache):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.add, 2.0**-9)
        nisa.tensor_scalar(tile, tile, nl.subtract, 1.0)
        nl.store(out, tile)
        nisa.dma_copy(cache, tile)
        return out

    x, cache = np.ones((2, 4), BF16), np.zeros((2, 4), BF16)
    assert (kernel(x, cache) == 0).all() and (cache == 0).all()
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    assert (kernel(x, cache).astype(float) == 2.0**-9).all()
    assert (cache.astype(float) == 2.0**-9).all()


@pytest.mark.parametrize("eager", ["0", "1"])
def test_read_only_arrays_are_not_written(monkeypatch, eager):
    """A file that is mapped for reading would end the process."""
    monkeypatch.setenv("NKI_CPU_EAGER", eager)

    @nki.jit
    def kernel(x, writes):
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        out = x if writes else nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    x = np.zeros((4, 8), np.float32)
    x.flags.writeable = False
    with pytest.raises(NkiError, match="sim_read_only_input"):
        kernel(x, True)
    assert not x.any() and kernel(x, False).all()
