"""Where assigned results go: moved into the destination, copied, accumulated, or given back."""

import warnings

import numpy as np
import pytest
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError, NkiWarning
from tests.core.test_isa import assert_close, data
from tests.core.test_refusals import kernel_of


def names(kernel, *args):
    return [i.op.name for i in kernel.trace(*args)]


@kernel_of
def exponential(x):
    kept = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)
    kept[...] = nl.exp(nl.load(x))
    return kept


def test_a_fresh_result_moves_into_its_destination():
    x = data(1, (128, 64))
    assert names(exponential, x) == ["dma_copy", "activation", "dma_copy"]
    assert_close(exponential(x), np.exp(x), "float32", 8)


@pytest.mark.parametrize("kind", ["tile", "view", "used again"])
def test_copies_between_equal_types_keep_every_bit(kind):
    """Integers beyond 2^24, which fp32 would round."""

    @kernel_of
    def kernel(x):
        loaded, kept = (nl.ndarray((128, 64), nl.int32) for _ in range(2))
        loaded[...] = nl.load(x)
        if kind == "tile":
            kept[...] = loaded
        elif kind == "view":
            kept[0:128, 0:64] = loaded[0:128, 0:64]
        else:
            moved = nl.bitwise_or(loaded, 0)
            kept[...] = moved
            kept[...] = nl.bitwise_or(kept, moved)
        return kept

    x = (np.arange(128 * 64, dtype=np.int32) * 262139 + 1).reshape(128, 64)
    assert np.array_equal(kernel(x), x)


@kernel_of
def used_twice(x, rows):
    """The result is read after it was moved and its destination was overwritten."""
    kept = nl.zeros((128, 64), nl.float32, buffer=nl.sbuf)
    result = nl.exp(nl.load(x[0:rows]))
    kept[0:rows, :] = result
    kept[...] = nisa.memset((128, 64), 7.0, nl.float32)
    kept[0:rows, :] = nisa.tensor_tensor(kept[0:rows, :], result, op=nl.add)
    return kept


@pytest.mark.parametrize("rows", [128, 32])
def test_a_moved_result_that_is_used_again_gets_its_tile_back(rows):
    x = data(1, (128, 64))
    expected = np.full((128, 64), 7.0, np.float32)
    expected[:rows] += np.exp(x[:rows])
    assert_close(used_twice(x, rows), expected, "float32", 8)


@kernel_of
def accumulated(a, b, groups, again):
    left, right = nl.load(a), nl.load(b)
    total = nl.zeros((128, 128), nl.float32, buffer=nl.psum)
    for _ in nl.static_range(groups):
        total += nisa.nc_matmul(right, right)
    result = nisa.nc_matmul(left, right)
    total += result
    summed = nisa.tensor_copy(total)
    if again:
        summed = nl.add(summed, nisa.tensor_copy(result))
    return summed


def test_a_result_that_began_a_group_can_be_read_again():
    a, b = data(1, (128, 128)), data(2, (128, 128))
    assert_close(accumulated(a, b, 0, True), 2 * a.T @ b, "float32", 32)


def test_a_result_that_was_added_to_a_group_cannot():
    a, b = data(1, (128, 128)), data(2, (128, 128))
    assert_close(accumulated(a, b, 2, False), a.T @ b + 2 * b.T @ b, "float32", 32)
    with pytest.raises(NkiError, match="sim_accumulated_result"):
        accumulated.trace(a, b, 2, True)


@kernel_of
def written_first(a, b, how):
    left, right = nl.load(a), nl.load(b)
    total = nl.zeros((128, 128), nl.float32, buffer=nl.psum)
    if how == "constant":
        total[...] = 1.0
    elif how == "copy":
        total[...] = nisa.tensor_copy(left)
    elif how == "copy in the middle":
        total += nisa.nc_matmul(left, right)
        total[...] = nisa.tensor_copy(left)
    elif how == "matmul":
        total[...] = nisa.nc_matmul(left, right)
    elif how == "matmul over a copy":
        total[...] = nisa.tensor_copy(left)
        total[...] = nisa.nc_matmul(left, right)
    total += nisa.nc_matmul(left, right)
    return nisa.tensor_copy(total)


@pytest.mark.parametrize("how", ["constant", "copy", "copy in the middle"])
def test_accumulating_onto_what_no_matmul_wrote_is_told(how):
    """aws-neuron-sdk 2.32: undefined on NeuronCore-v2, where the tile came from nl.zeros, too."""
    a, b = data(1, (128, 128)), data(2, (128, 128))
    with pytest.warns(NkiWarning, match="no matmul has written last.*sim_accumulation_start"):
        written_first.trace(a, b, how)


@pytest.mark.parametrize("how", ["nothing", "matmul", "matmul over a copy"])
def test_accumulating_onto_a_matmul_is_not(how):
    a, b = data(1, (128, 128)), data(2, (128, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        got = written_first(a, b, how)
    assert_close(got, (1 if how == "nothing" else 2) * a.T @ b, "float32", 32)
