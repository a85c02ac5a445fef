"""Whole kernels of the current language against float64 references that know nothing of it."""

from __future__ import annotations

import importlib

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import NkiError, NkiWarning
from tests.warned import allows

BF16 = np.dtype(ml_dtypes.bfloat16)


def normal(seed, shape, dtype=np.float32, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


@nki.jit
def norm_project(x, gain, w, eps=1e-5):
    """RMSNorm of 128-row tiles, and a projection: tails are smaller tiles."""
    T, H = x.shape
    D = w.shape[1]
    out = nl.ndarray((T, D), dtype=x.dtype, buffer=nl.shared_hbm)
    g = nl.ndarray((128, H), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=g, src=gain.broadcast(0, 128))
    ident = nl.shared_identity_matrix(128, dtype=x.dtype)
    e = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=e, value=eps)
    for t in range((T + 127) // 128):
        n = min(128, T - t * 128)
        xt = nl.ndarray((n, H), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=xt, src=x[t * 128 : t * 128 + n, :])
        y = normalised(xt, g[0:n, :], e[0:n, :])
        yt = transposed(y, ident)
        for c in range((D + 511) // 512):
            m = min(512, D - c * 512)
            acc = nl.ndarray((n, m), dtype=nl.float32, buffer=nl.psum)
            for k in range(H // 128):
                wk = nl.ndarray((128, m), dtype=w.dtype, buffer=nl.sbuf)
                nisa.dma_copy(wk, w[k * 128 : (k + 1) * 128, c * 512 : c * 512 + m])
                nisa.nc_matmul(dst=acc, stationary=yt[k], moving=wk, accumulate=(k > 0))
            o = nl.ndarray((n, m), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=o, src=acc)
            nisa.dma_copy(out[t * 128 : t * 128 + n, c * 512 : c * 512 + m], o)
    return out


def normalised(xt, g, e):
    n, H = xt.shape
    sq = nl.ndarray((n, H), dtype=nl.float32, buffer=nl.sbuf)
    ss = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    command = nisa.reduce_cmd.reset_reduce
    nisa.activation(sq, nl.square, xt, reduce_op=nl.add, reduce_res=ss, reduce_cmd=command)
    r = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=r, op=nl.rsqrt, data=ss, scale=1.0 / H, bias=e)
    y = nl.ndarray((n, H), dtype=xt.dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(y, xt, nl.multiply, r, nl.multiply, g)
    return y


def transposed(y, ident):
    n, H = y.shape
    blocks = []
    for k in range(H // 128):
        pt = nl.ndarray((128, n), dtype=nl.float32, buffer=nl.psum)
        block = y[:, k * 128 : (k + 1) * 128]
        nisa.nc_matmul(dst=pt, stationary=block, moving=ident[0:n, 0:n])
        s = nl.ndarray((128, n), dtype=y.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=s, src=pt, engine=nisa.engine.vector)
        blocks.append(s)
    return blocks


# --- accumulation in PSUM -------------------------------------------------------------------------
def products(flags, between=None, cuts=((0, 64),)):
    """(sum of products, operands) of a kernel that multiplies once for each flag into ``cuts``."""

    @nki.jit
    def kernel(a, b):
        out = nl.ndarray((64, 64), nl.float32, buffer=nl.shared_hbm)
        left, right = nl.load(a), nl.load(b)
        acc = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
        if between is not None:
            nisa.memset(acc, between)
        for k in range(len(flags)):
            flag = flags[k]
            low, high = cuts[k % len(cuts)]
            nisa.nc_matmul(acc[:, low:high], left, right[:, low:high], accumulate=flag)
        kept = nl.ndarray((64, 64), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(kept, acc)
        nisa.dma_copy(out, kept)
        return out

    a, b = normal(4, (32, 64)), normal(5, (32, 64))
    return kernel(a, b), a.T.astype(np.float64) @ b


@allows("sim_lost_product")
@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ([False, True, True], 3),
        ([None, None, None], 3),
        ([None, False, None], 2),
        ([False, None], 2),
        ([False, False], 1),
    ],
)
def test_accumulation_flags(flags, times):
    found, one = products(flags)
    assert np.allclose(found, times * one, atol=1e-4)


def test_first_write_is_tracked_by_region():
    """The second product covers what the first began and 16 columns more."""
    found, one = products([None, None], cuts=((0, 48), (32, 64)))
    times = np.array([1] * 32 + [2] * 16 + [1] * 16)
    assert np.allclose(found, one * times, atol=1e-4)


def test_zeros_before_an_open_flag_are_added_to():
    found, one = products([None, None], between=0.0)
    assert np.allclose(found, 2 * one, atol=1e-4)


def test_adding_to_what_no_product_wrote_is_doubtful():
    with pytest.warns(NkiWarning, match="no product has written"):
        products([True], between=3.0)


def test_adding_to_psum_that_nobody_wrote_is_undefined():
    with pytest.raises(NkiError, match="undefined"):
        products([True])


# --- calling --------------------------------------------------------------------------------------
@nki.jit
def add_into(cache, update):
    """Adds ``update`` to the first rows of ``cache``, in place, and returns both."""
    rows = update.shape[0]
    tile, more = nl.load(cache[0:rows, :]), nl.load(update)
    nisa.tensor_tensor(tile, tile, more, nl.add)
    nisa.dma_copy(cache[0:rows, :], tile)
    doubled = nl.ndarray(update.shape, update.dtype, buffer=nl.shared_hbm)
    nisa.tensor_scalar(more, more, nl.multiply, 2.0)
    nl.store(doubled, more)
    return [cache, (doubled,)]


@pytest.mark.parametrize("eager", ["0", "1"])
def test_inputs_are_updated_in_place_and_results_nest(monkeypatch, eager):
    monkeypatch.setenv("NKI_CPU_EAGER", eager)
    cache, update = torch.ones(4, 8), torch.full((2, 8), 3.0)
    first, (doubled,) = add_into(cache, update)
    assert first.data_ptr() == cache.data_ptr()
    assert torch.equal(cache, torch.tensor([[4.0]] * 2 + [[1.0]] * 2).expand(4, 8))
    assert torch.equal(doubled, torch.full((2, 8), 6.0))


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


@pytest.mark.parametrize("grid", [(1, 2), 3, 0, True])
def test_grids_are_gone(grid):
    with pytest.raises(NkiError, match="1 or 2"):
        norm_project[grid]


def test_lists_and_missing_arguments_are_refused():
    with pytest.raises(NkiError, match="tuple"):
        add_into([normal(1, (2, 2))], normal(1, (2, 2)))
    with pytest.raises(NkiError, match="without arguments"):
        add_into()


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


def test_indices_count_along_the_axes_that_a_reshape_gave():
    @nki.jit
    def kernel(x, i):
        out = nl.ndarray((3, 4), x.dtype, buffer=nl.shared_hbm)
        rows = x.reshape((6, 4)).ap([[4, 3], [1, 4]], vector_offset=nl.load(i), indirect_dim=0)
        nisa.dma_copy(out, rows)
        return out

    x, at = normal(7, (2, 12)), np.array([[5], [0], [3]], np.int32)
    assert np.array_equal(kernel(x, at), x.reshape(6, 4)[at[:, 0]])


def test_two_cores_need_a_chip_that_joins_them():
    with pytest.raises(NkiError, match="gen3 on"):
        norm_project[2](normal(1, (4, 128)), normal(1, (1, 128)), normal(1, (128, 8)))


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
