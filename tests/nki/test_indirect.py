"""Tensor indirection (gen4): columns that data choose are read and written."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(128, 64)).astype(np.float32)
BF16 = X.astype(ml_dtypes.bfloat16)


def chosen(each, count):
    """(index, offsets): lists of 64 columns for every ``each`` partitions, read partition first."""
    lists = np.array([RNG.permutation(64)[:count] for _ in range(128 // each)])
    index = np.zeros((128, -(-count // each)), np.int32)
    for k in range(count):
        index[k % each :: each, k // each] = lists[:, k]
    return index, lists.repeat(each, 0)


def loaded(*arrays):
    tiles = [nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf) for a in arrays]
    for tile, array in zip(tiles, arrays, strict=True):
        nisa.dma_copy(tile, array)
    return tiles


def kernel_of(body, shape, dtype=nl.float32):
    """A kernel whose ``body`` gets tiles of its arguments and fills a tile of ``shape``."""

    @nki.jit
    def kernel(*arrays):
        tile = nl.ndarray(shape, dtype, buffer=nl.sbuf)
        body(tile, *loaded(*arrays))
        out = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    return kernel


@pytest.fixture(autouse=True)
def gen4(target):
    target("trn3")


@pytest.mark.parametrize("count", [1, 16, 24, 32])
def test_columns_are_gathered(count):
    index, at = chosen(16, count)
    kernel = kernel_of(lambda o, x, i: nisa.tensor_copy(o, x.indirect(i, count)), (128, count))
    assert np.array_equal(kernel(X, index), np.take_along_axis(X, at, 1))


def test_columns_are_scattered():
    index, at = chosen(16, 24)

    def body(o, x, i):
        nisa.memset(o, 0)
        nisa.tensor_scalar(o.indirect(i, 24), x[:, 0:24], nl.add, 1.0)

    want = np.zeros((128, 64), np.float32)
    np.put_along_axis(want, at, X[:, :24] + 1, 1)
    assert np.array_equal(kernel_of(body, (128, 64))(X, index), want)


def test_products_read_lists_of_32_partitions():
    index, at = chosen(32, 40)

    def body(o, x, i):
        product = nl.ndarray((64, 40), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(product, x, x.indirect(i, 40))
        nisa.tensor_copy(o, product)

    wide = BF16.astype(np.float64)
    found = kernel_of(body, (64, 40))(BF16, index)
    assert np.allclose(found, wide.T @ np.take_along_axis(wide, at, 1), atol=1e-4)


WRONG = {
    "more than there are": lambda o, x, i: nisa.tensor_copy(o, x.indirect(i, 64)),
    "part of the columns": lambda o, x, i: nisa.tensor_copy(x.indirect(i, 16)[:, 0:8], o[:, 0:8]),
    "index of floats": lambda o, x, i: nisa.tensor_copy(o, x.indirect(x, 64)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_sources_leave_out_is_refused(name):
    with pytest.raises(NkiError, match="sim_tensor_indirection"):
        kernel_of(WRONG[name], (128, 64))(X, np.zeros((128, 1), np.int32))
