"""Index expressions, masks and subscripts against numpy's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from neuron_cpu.core.device.dtypes import FLOAT32
from neuron_cpu.core.language.tensor import Tile as Tensor
from neuron_cpu.core.program import trace
from neuron_cpu.core.program.program import Program

some = settings(max_examples=40, deadline=None, derandomize=True)
many = settings(max_examples=80, deadline=None, derandomize=True)


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


@pytest.mark.parametrize(
    "spoil",
    [lambda i: i * i, lambda i: i % 2, lambda i: i // 2, lambda i: i // -1, lambda i: i / 2],
)
def test_products_and_remainders_are_not_affine(spoil):
    with pytest.raises(NkiError, match="err_unsupported_expression_in_mask"):
        spoil(nl.arange(4)[:, None])


@some
@given(
    n=st.integers(1, 12),
    start=st.integers(-5, 40),
    step=st.integers(1, 6),
    divisor=st.integers(1, 12),
)
def test_quotients_and_remainders_of_one_piece_are_affine(n, start, step, divisor):
    index = nl.arange(n)[:, None] * step + start
    values = start + step * np.arange(n)[:, None]
    if step % divisor and start // divisor != int(values[-1, 0]) // divisor:
        with pytest.raises(NkiError, match="err_unsupported_expression_in_mask"):
            index // divisor
        with pytest.raises(NkiError, match="err_unsupported_expression_in_mask"):
            index % divisor
        return
    assert np.array_equal((index // divisor).values(), values // divisor)
    assert np.array_equal((index % divisor).values(), values % divisor)


# --- subscripts -----------------------------------------------------------------------------------
def chip(shape):
    """A tile in SBUF with the same element numbers as ``hbm`` gives."""
    tracer = trace.Tracer(Program("test", (), None))
    tensor = Tensor.whole(tracer.storage(shape, FLOAT32, "sbuf"))
    return tensor, np.arange(int(np.prod(shape))).reshape(shape)


@st.composite
def slices(draw, size):
    """A slice of an axis, as kernels write it, and numpy's meaning of it."""
    start = draw(st.integers(0, size - 1))
    stop = draw(st.integers(start + 1, size))
    step = draw(st.integers(1, 3))
    form = draw(st.sampled_from(["plain", "open", "ds", "negative start", "negative stop"]))
    if form == "open":
        return slice(start, None, step), slice(start, None, step)
    if form == "ds":
        return nl.ds(start, stop - start), slice(start, stop)
    if form == "negative start":
        return slice(start - size, None, step), slice(start - size, None, step)
    if form == "negative stop" and stop < size:
        return slice(start, stop - size, step), slice(start, stop - size, step)
    return slice(start, stop, step), slice(start, stop, step)


@st.composite
def basic_keys(draw, shape):
    """Subscripts of some of the axes, an ellipsis among them or not: (ours, numpy's)."""
    count = draw(st.integers(1, len(shape)))
    at_end = draw(st.booleans())
    axes = range(len(shape) - count, len(shape)) if at_end else range(count)
    keys = []
    for axis in axes:
        whole = st.integers(-shape[axis], shape[axis] - 1).map(lambda k: (k, k))
        keys.append(draw(st.one_of(whole, slices(shape[axis]))))
    mine, theirs = (tuple(k) for k in zip(*keys))
    if at_end:
        return (..., *mine), (..., *theirs)
    if draw(st.booleans()):
        return (*mine, ...), (*theirs, ...)
    return mine, theirs


@many
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_basic_subscripts(data, shape):
    tensor, reference = hbm(tuple(shape))
    mine, theirs = data.draw(basic_keys(shape))
    once, expected = tensor[mine], reference[theirs]
    assert np.array_equal(numbers(once), expected)
    if once.ndim:  # slices of slices, integers of what is left
        mine, theirs = data.draw(basic_keys(once.shape))
        assert np.array_equal(numbers(once[mine]), expected[theirs])


@many
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_basic_subscripts_of_tiles(data, shape):
    """As numpy's, but the partition axis stays and there are at least two axes."""
    tensor, reference = chip(tuple(shape))
    mine, theirs = data.draw(basic_keys(shape))
    expected = reference[theirs]
    written = [k for k in theirs if k is not ...]
    named = theirs[0] is not ... or len(written) == len(shape)
    partition = written[0] if named else slice(None)
    if isinstance(partition, int):
        expected = expected[None]
    while expected.ndim < 2:
        expected = expected[..., None]
    assert np.array_equal(numbers(tensor[mine]), expected)


@st.composite
def affine(draw, shape, axes):
    """An index into an axis of each size of ``shape``, over a common grid of ``axes`` axes.

    Gives the grid's shape and, for each axis of the tensor, (ours, numpy's): sums of multiples of
    aranges that stand on one axis of the grid each, constants and integers. Sizes of 1 anywhere.
    """
    grid = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    indices = []
    for size in shape:
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, size - 1))
            indices.append((at, at))
            continue
        mine, theirs, room = 0, 0, size - 1
        for axis in draw(st.permutations(range(axes))):
            n = draw(st.sampled_from([1, grid[axis]]))
            coef = draw(st.integers(0, room // (n - 1))) if n > 1 else draw(st.integers(-5, 5))
            place = tuple(slice(None) if a == axis else None for a in range(axes))
            first = draw(st.integers(0, room - coef * (n - 1))) if n > 1 else 0
            mine = mine + coef * nl.arange(n)[place] + first
            theirs = theirs + coef * np.arange(n)[place] + first
            room -= first + (coef * (n - 1) if n > 1 else 0)
        indices.append((mine, theirs))
    return indices


@many
@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_index_grids(data, shape):
    tensor, reference = hbm(tuple(shape))
    count = data.draw(st.integers(1, len(shape)))
    indices = data.draw(affine(shape[:count], data.draw(st.integers(1, 3))))
    mine, theirs = zip(*indices)
    if all(isinstance(k, int) for k in mine):
        return
    assert np.array_equal(numbers(tensor[mine]), reference[theirs])


@many
@given(data=st.data(), shape=st.tuples(*[st.integers(1, 6)] * 2), over=st.integers(0, 3))
def test_masks_bring_a_grid_back_inside(data, shape, over):
    """A grid that reaches outside selects what its mask leaves; without the mask it is refused."""
    tensor, reference = hbm(shape)
    i, j = nl.arange(shape[0])[:, None], nl.arange(shape[1] + over)[None, :]
    start = data.draw(st.integers(0, shape[1] - 1))
    view = tensor[i, start + j]
    box = (slice(0, shape[0]), slice(0, shape[1] - start))
    inside = view.slice_box(box)
    inside.check_bounds()
    assert np.array_equal(numbers(inside), reference[:, start:])
    assert np.array_equal(numbers(tensor[i, start + j, start + j < shape[1]]), reference[:, start:])
    if start + over:
        with pytest.raises(NkiError, match="err_tensor_access_out_of_bound"):
            view.check_bounds()


CHANGES = {
    "index grid": lambda v: v[nl.arange(v.shape[0])[:, None], nl.arange(v.shape[1])[None, :]],
    "slices": lambda v: v[0 : v.shape[0], 0 : v.shape[1]],
    "reshape": lambda v: v.reshape((v.shape[0], 1, v.shape[1])),
    "joined axes": lambda v: v.reshape((v.shape[0] * v.shape[1],)),
    "expand": lambda v: v.widened((3, *v.shape)),
    "expand_dims": lambda v: v.expand_dims(1),
    "other type": lambda v: v.view(nl.int32),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_every_change_of_a_view_keeps_what_lies_outside(change):
    """The third row does not exist, whatever is made of the view."""
    tensor, _ = hbm((2, 4))
    columns = nl.arange(4)[None, :]
    with pytest.raises(NkiError, match="err_tensor_access_out_of_bound"):
        change(tensor[nl.arange(3)[:, None], columns]).check_bounds()
    change(tensor[nl.arange(2)[:, None], columns]).check_bounds()


def test_rows_chosen_by_data_stay_with_their_view():
    table, _ = hbm((50, 8))
    index, _ = chip((16, 1))
    rows = table[index, nl.arange(8)[None, :]]
    assert rows.by_data[0].shape == (16, 1)
    assert rows[4:8].by_data[0].key() == index[4:8].key()
    assert rows.reshape((16, 2, 4)).by_data == rows.by_data
    assert rows.view(nl.int32).by_data == rows.by_data
    with pytest.raises(NkiError, match="sim_reshape"):
        rows.reshape((128,))
    with pytest.raises(NkiError, match="err_indirect_indices_free_dim"):
        rows[nl.arange(4)[:, None], nl.arange(8)[None, :]]


def test_what_is_no_index_is_refused():
    tensor, _ = hbm((4, 5))
    rows = nl.arange(4)[:, None]
    assert tensor[rows, 1] is tensor[rows, 1]  # kept, and 1.0 is no 1
    for key in (("0", rows), (rows, 1.5), (rows, 1.0), ("0", 1), (1.5, 1)):
        with pytest.raises(NkiError, match="sim_index_type"):
            tensor[key]
    for key in (0, slice(1, 2), "0"):
        with pytest.raises(NkiError, match="sim_index_type"):
            rows[key]


def test_operand_mask_after_other_indices():
    tensor, reference = hbm((6, 9))
    i, j = nl.mgrid[0:6, 0:9]
    assert np.array_equal(numbers(tensor[i, j, j < 4]), reference[:, :4])
    assert np.array_equal(numbers(tensor[(i < 2) & (j >= 7)]), reference[:2, 7:])
    with pytest.raises(NkiError, match="sim_operand_mask"):
        tensor[i < j]


# --- programs -------------------------------------------------------------------------------------


def inside(size, starts, step, shape, corner, module):
    """(row, column, mask) of a transfer, for nl or numpy."""
    i, j = module.arange(size[0])[:, None], module.arange(size[1])[None, :]
    row, column = i + starts[0], step * j + starts[1]
    mask = (row < shape[0]) & (column < shape[1])
    return (
        row,
        column,
        mask if corner is None else mask & (corner[0] * i + corner[1] * j <= corner[2]),
    )
