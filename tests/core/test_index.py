"""Index expressions, masks and subscripts against numpy's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from neuron_cpu.core.device.dtypes import FLOAT32
from neuron_cpu.core.language.tensor import Tensor
from neuron_cpu.core.program import trace
from neuron_cpu.core.program.index import DynamicIndex
from neuron_cpu.core.program.program import Program
from neuron_cpu.core.program.view import compose, contiguous, reshaped_strides

some = settings(max_examples=60, deadline=None, derandomize=True)


def hbm(shape):
    """A tensor of a program, and numpy's element numbers of the same shape."""
    tracer = trace.Tracer(Program("test", (), None))
    tensor = Tensor.whole(tracer.storage(shape, FLOAT32, "hbm", "input"))
    return tensor, np.arange(int(np.prod(shape))).reshape(shape)


def numbers(view):
    """Element numbers that a view touches."""
    total = np.full(view.shape, view.offset)
    for axis, stride in enumerate(view.strides):
        line = [1] * len(view.shape)
        line[axis] = view.shape[axis]
        total = total + (np.arange(view.shape[axis]) * stride).reshape(line)
    return total


# --- expressions ----------------------------------------------------------------------------------
@some
@given(n=st.integers(1, 9), m=st.integers(1, 9), k=st.tuples(*[st.integers(-5, 5)] * 3))
def test_affine_expressions(n, m, k):
    i, j = nl.arange(n)[:, None], nl.arange(m)[None, :]
    expression = k[0] * i - j * k[1] + k[2]
    a, b = np.ogrid[:n, :m]
    reference = np.broadcast_to(k[0] * a - b * k[1] + k[2], (n, m))
    assert np.array_equal(expression.values(), reference)
    assert expression.bounds() == (reference.min(), reference.max())
    assert np.array_equal((-expression).values(), -reference)
    assert np.array_equal((7 - expression).values(), 7 - reference)


def test_mgrid_names_its_axes():
    grid = nl.mgrid[0:3, 2:6, 0:8:2]
    p, x, y = grid
    assert grid.p is p and grid.x is x and grid.y is y
    reference = np.mgrid[0:3, 2:6, 0:8:2]
    for mine, theirs in zip((p, x, y), reference):
        assert np.array_equal(mine.values(), theirs)


def test_arange_forms():
    assert nl.arange(4).values().tolist() == [0, 1, 2, 3]
    assert nl.arange(2, 5).values().tolist() == [2, 3, 4]
    assert nl.arange(2, 9, 3).values().tolist() == [2, 5, 8]
    assert nl.ds(3, 4) == slice(3, 7)


@pytest.mark.parametrize("spoil", [lambda i: i * i, lambda i: i % 2, lambda i: i // 2,
                                   lambda i: i / 2])  # fmt: skip
def test_products_and_remainders_are_not_affine(spoil):
    with pytest.raises(NkiError, match="err_unsupported_expression_in_mask"):
        spoil(nl.arange(4)[:, None])


# --- masks ----------------------------------------------------------------------------------------
@some
@given(
    n=st.integers(1, 8), m=st.integers(1, 8), a=st.integers(-3, 9), b=st.integers(-3, 9),
    k=st.integers(-2, 2),
)  # fmt: skip
def test_masks_leave_boxes_or_arrays(n, m, a, b, k):
    i, j = nl.mgrid[0:n, 0:m]
    x, y = np.ogrid[:n, :m]
    mask, reference = (i + k * j < a) & (j >= b - 4), (x + k * y < a) & (y >= b - 4)
    cut = trace.region(mask, (n, m))
    kept = np.zeros((n, m), bool)
    if cut is None:
        kept[...] = True
    elif isinstance(cut, tuple):
        kept[cut] = True
    elif cut is not trace.EMPTY:
        kept |= cut
    assert np.array_equal(kept, np.broadcast_to(reference, (n, m)))


@some
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 999))
def test_boxes_cover_a_mask_exactly_once(a, b, c, seed):
    keep = np.random.default_rng(seed).random((a, b, c)) < 0.6
    count = np.zeros(keep.shape, int)
    for box in trace.boxes(keep):
        count[box] += 1
    assert np.array_equal(count, keep)


# --- subscripts -----------------------------------------------------------------------------------
@some
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_basic_subscripts(data, shape):
    tensor, reference = hbm(tuple(shape))
    keys = []
    for size in shape[: data.draw(st.integers(1, len(shape)))]:
        if data.draw(st.booleans()):
            keys.append(data.draw(st.integers(-size, size - 1)))
        else:
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start + 1, size))
            keys.append(slice(start, stop, data.draw(st.integers(1, 3))))
    key = tuple(keys)
    assert np.array_equal(numbers(tensor[key]), reference[key])
    assert np.array_equal(numbers(tensor[(*key, ...)]), reference[(*key, ...)])
    if len(key) == len(shape):
        assert np.array_equal(numbers(tensor[(..., *key)]), reference[(..., *key)])


@some
@given(
    shape=st.tuples(*[st.integers(2, 7)] * 3), at=st.integers(0, 1), steps=st.integers(1, 2),
)  # fmt: skip
def test_advanced_subscripts(shape, at, steps):
    tensor, reference = hbm(shape)
    n, m = shape[0], -(-shape[2] // steps)
    i, j = nl.arange(n)[:, None], nl.arange(m)[None, :]
    a, b = np.ogrid[:n, :m]
    assert np.array_equal(numbers(tensor[i, at, steps * j]), reference[a, at, steps * b])
    assert np.array_equal(numbers(tensor[at, nl.arange(1)[:, None]]), reference[at, [[0]]])


def test_operand_mask_after_other_indices():
    tensor, reference = hbm((6, 9))
    i, j = nl.mgrid[0:6, 0:9]
    assert np.array_equal(numbers(tensor[i, j, j < 4]), reference[:, :4])
    assert np.array_equal(numbers(tensor[(i < 2) & (j >= 7)]), reference[:2, 7:])
    with pytest.raises(NkiError, match="sim_operand_mask"):
        tensor[i < j]


def test_run_time_offsets_add_up():
    tensor, _ = hbm((4, 1))
    index = nl.arange(3)[None, :]
    combined = tensor + index + 2
    assert isinstance(combined, DynamicIndex) and combined.tensor is tensor
    assert combined.index.values().tolist() == [[2, 3, 4]]


# --- views ----------------------------------------------------------------------------------------
@some
@given(data=st.data())
def test_reshape_is_a_view_exactly_where_numpy_makes_one(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    whole = np.zeros(tuple(2 * s for s in shape), np.int8)
    view = whole[tuple(slice(0, s) for s in shape)]
    if data.draw(st.booleans()):
        view = np.zeros(shape, np.int8)
    total = view.size
    new = []
    while total > 1:
        factor = data.draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0]))
        new.append(factor)
        total //= factor
    new = tuple(new) or (1,)
    found = reshaped_strides(view.shape, view.strides, new)
    copied = view.reshape(new)
    is_view = np.shares_memory(copied, view)
    assert (found is not None) == is_view
    if is_view:
        kept = [(s, t) for s, t in zip(new, copied.strides) if s > 1]
        assert [(s, t) for s, t in zip(new, found) if s > 1] == kept


@some
@given(shape=st.tuples(*[st.integers(1, 5)] * 2), data=st.data())
def test_compose_moves_a_box_into_another_view(shape, data):
    inner, _ = hbm(shape)
    outer, reference = hbm((shape[0] + 2, 3, shape[1] + 1))
    box, key = [], []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        box.append(slice(start, stop))
        key.append(slice(start, stop))
    target = outer[1 : shape[0] + 1, 2, 0 : shape[1]]
    moved = compose(inner.slice_box(tuple(box)), target)
    expected = reference[1 : shape[0] + 1, 2, 0 : shape[1]][tuple(key)]
    assert moved is not None and np.array_equal(numbers(moved), expected)


def test_contiguous_strides():
    assert contiguous((2, 3, 4)) == (12, 4, 1) and contiguous(()) == ()
