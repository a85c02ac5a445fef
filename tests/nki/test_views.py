"""Views and access patterns against numpy's, which share nothing with them but the meaning."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_cpu.core import NkiError
from tests.warned import allows

pytestmark = allows("sim_parser_subset", "sim_dma_on_chip")

few = settings(max_examples=30, deadline=None, derandomize=True)


def elements(shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def seen(view, shape, on_chip, *more):
    """What ``view`` of a tensor of ``shape`` holds."""

    @nki.jit
    def kernel(x, *others):
        source = x
        if on_chip:
            source = nl.ndarray(shape, nl.int32)
            nisa.dma_copy(source, x)
        part = view(source, *others)
        out = nl.ndarray(part.shape, nl.int32, buffer=nl.shared_hbm)
        if on_chip:
            copied = nl.ndarray(part.shape, nl.int32)
            nisa.dma_copy(copied, part)  # which begins at any partition
            part = copied
        nisa.dma_copy(out, part)
        return out

    return kernel(elements(shape), *more)


@given(st.data())
@few
def test_subscripts(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    on_chip = data.draw(st.booleans())
    keys, plain = [], []
    for axis, size in enumerate(shape):
        kind = data.draw(st.sampled_from(["int", "slice", "ds", "all"]))
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        step = data.draw(st.integers(1, 3)) if not (on_chip and axis == 0) else 1
        if kind == "int":
            keys.append(start - size if data.draw(st.booleans()) else start)
            plain.append(start)
        else:
            keys.append(
                {
                    "slice": slice(start, stop, step),
                    "ds": nl.ds(start, stop - start),
                    "all": slice(None),
                }[kind]
            )
            plain.append(keys[-1])
    if on_chip and isinstance(plain[0], int):  # a tile never loses its partition axis
        plain[0] = slice(plain[0], plain[0] + 1)
    want = elements(shape)[tuple(plain)]
    while want.ndim < (2 if on_chip else 1):
        want = want[..., None]
    assert np.array_equal(seen(lambda x: x[tuple(keys)], shape, on_chip), want)


CHAINS = {
    "slice": (lambda x: x.slice(1, 1, 4, 2), lambda a: a[:, 1:4:2]),
    "select": (lambda x: x.select(2, 1), lambda a: a[:, :, 1]),
    "permute": (lambda x: x.permute((0, 2, 1)), lambda a: a.transpose(0, 2, 1)),
    "expand": (lambda x: x.expand_dim(2), lambda a: a[:, :, None]),
    "split": (lambda x: x.reshape_dim(1, (2, -1)), lambda a: a.reshape(4, 2, 2, 6)),
    "flatten": (lambda x: x.flatten_dims(1, 2), lambda a: a.reshape(4, 24)),
    "reshape": (lambda x: x.reshape((4, 3, -1)), lambda a: a.reshape(4, 3, 8)),
    "broadcast": (
        lambda x: x[:, :, 2:3].broadcast(2, 3),
        lambda a: np.broadcast_to(a[:, :, 2:3], (4, 4, 3)),
    ),
    "squeeze": (lambda x: x[:, 1:2].squeeze_dim(1), lambda a: a[:, 1]),
    "rearrange": (
        lambda x: x.rearrange(("p", "s", ("h", "d")), ("p", ("h", "s"), "d"), {"h": 3}),
        lambda a: a.reshape(4, 4, 3, 2).transpose(0, 2, 1, 3).reshape(4, 12, 2),
    ),
    "chain": (
        lambda x: x.permute((0, 2, 1)).slice(1, 0, 6, 3).reshape_dim(2, (2, 2)),
        lambda a: a.transpose(0, 2, 1)[:, 0:6:3].reshape(4, 2, 2, 2),
    ),
    "pattern": (
        lambda x: x.ap([[24, 3], [1, 2], [6, 4]], offset=25),
        lambda a: np.array([[[25 + 24 * p + i + 6 * j for j in range(4)] for i in range(2)]
                            for p in range(3)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("on_chip", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_view_methods(name, on_chip):
    if name == "rearrange":  # merging axes that do not follow each other is no view
        with pytest.raises(NkiError, match="no view"):
            seen(CHAINS[name][0], (4, 4, 6), on_chip)
        return
    view, want = CHAINS[name]
    assert np.array_equal(seen(view, (4, 4, 6), on_chip), want(elements((4, 4, 6))))


def test_the_same_bits_as_another_type():
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x.view(nl.float32))
        return out

    bits = np.array([[0x3F800000, 0x7FC00001]], np.int32)
    assert np.array_equal(kernel(bits).view(np.int32), bits)


MEMORIES = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.private_hbm, "output": nl.shared_hbm}
UNSIGNED = {1: nl.uint8, 2: nl.uint16, 4: nl.uint32}


@st.composite
def retyped_writes(draw):
    """A region of 4 x 24 bytes as elements of some size, and a value to fill it with."""
    size = draw(st.sampled_from([1, 2, 4]))
    first = draw(st.integers(0, 24 // size - 1))
    stop = draw(st.integers(first + 1, 24 // size))
    step = draw(st.integers(1, 3))
    return size, slice(first, stop, step), draw(st.integers(0, (1 << 8 * size) - 1))


@pytest.mark.parametrize("eager", ["0", "1"])
@pytest.mark.parametrize("memory", MEMORIES)
@given(st.sampled_from([1, 2, 4]), st.lists(retyped_writes(), min_size=1, max_size=6))
@few
def test_one_memory_as_types_of_several_sizes(memory, eager, own, writes):
    """Fills through views of any size land where numpy's views put them."""

    def kernel(x):
        held = nl.ndarray((4, 24 // own), UNSIGNED[own], buffer=MEMORIES[memory])
        start = nl.load(x)
        copy = nisa.dma_copy if memory in ("hbm", "output") else nisa.tensor_copy
        copy(held, start)
        for size, where, value in writes:
            part = held.view(UNSIGNED[size])[:, where]
            tile = nl.ndarray(part.shape, UNSIGNED[size])
            nisa.memset(tile, value)
            copy(part, tile)
        if memory == "output":
            return held
        out = nl.ndarray(held.shape, UNSIGNED[own], buffer=nl.shared_hbm)
        back = nl.ndarray(held.shape, UNSIGNED[own])
        copy(back, held)
        nisa.dma_copy(out, back)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NKI_CPU_EAGER", eager)
        x = np.random.default_rng(3).integers(0, 256, (4, 24)).astype(np.uint8)
        found = nki.jit(kernel)(x.view(f"u{own}"))
    want = x.copy()
    for size, where, value in writes:
        want.view(f"u{size}")[:, where] = value
    assert np.array_equal(found.view(np.uint8), want)


def test_bits_of_other_sizes_are_followed():
    """Undefined halves and updates in place, each through the type it was not made in."""

    @nki.jit
    def half(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.memset(tile.view(nl.uint16)[:, ::2], 0)  # one half of each element
        nisa.dma_copy(out, tile)
        return out

    with pytest.raises(NkiError, match="sim_undefined_data"):
        half(elements((2, 4)))

    @nki.jit
    def written(x):
        nl.store(x.view(nl.uint8), nl.zeros((2, 8), nl.uint8))
        return x

    held = elements((2, 2))
    assert not written(held).any() and not held.any()  # updated in place
    with pytest.raises(NkiError, match="sim_view_dtype"):
        seen(lambda x: x[:, 1:3].view(nl.int16).view(nl.int8)[:, 1:5].view(nl.int32), (2, 3), True)
    with pytest.raises(NkiError, match="sim_view_dtype"):
        seen(lambda x: x.permute((1, 0)).view(nl.int8), (2, 3), False)


def test_attributes():
    def look(x):
        part = x[1:3, ::2, :]
        assert (part.shape, part.strides, part.offset) == ((2, 2, 6), (24, 12, 1), 24)
        assert part.get_pattern() == [[24, 2], [12, 2], [1, 6]] and not part.is_contiguous()
        assert x.is_contiguous() and not x.is_indirect() and x[0].shape == (4, 6)
        return x

    assert seen(look, (4, 4, 6), False).shape == (4, 4, 6)


PARTS = {  # of 6 rows of 8: rows 1 to 4, columns 4 to 7
    "2.29": lambda part: part.ap([[4, 3], [1, 2]], offset=1),
    "2.33": lambda part: part.ap([[8, 3], [1, 2]], offset=13),
}


@pytest.mark.warns("sim_ap_offset")
@pytest.mark.parametrize("release", PARTS)
def test_a_part_counts_by_itself_up_to_2_30(release, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", release)
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_parser_subset")  # the kernel is made in a function
    got = seen(lambda x: PARTS[release](x[1:5, 4:8]), (6, 8), True)
    assert np.array_equal(got, elements((6, 8))[1:4, 5:7])


def test_a_range_of_a_loop_is_a_slice():
    """As a kernel of aws-neuron/nkipy (b91c980) indexes its inputs, which ran on a trn2."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray((64, 16), x.dtype, buffer=nl.shared_hbm)
        rows, columns = nl.affine_range(64), nl.affine_range(8, 24)
        nl.store(out, nl.load(x[rows, columns]))
        return out

    x = np.arange(128 * 32, dtype=np.float32).reshape(128, 32)
    assert np.array_equal(kernel(x), x[:64, 8:24])


@pytest.mark.parametrize("wrong", [slice(0, 4.0), slice(0, True)])
def test_equal_numbers_of_other_types_are_no_subscripts_that_were_taken_before(wrong):
    with pytest.raises(NkiError, match="slice bound"):
        seen(lambda x: (x[0:4], x[0:1], x[wrong])[2], (6, 4), False)


@pytest.mark.parametrize("last", [slice(1, 5), slice(5, 8)])
def test_parts_that_overlap_leave_elements_that_nobody_wrote(last):
    @nki.jit
    def kernel(x):
        out = nl.ndarray((8, 8), nl.float32, buffer=nl.shared_hbm)
        for half in range(2):  # the second set of parts is known
            tile = nl.ndarray((4, 8), nl.float32)
            for part in (slice(0, 5), last):
                nisa.memset(tile[:, part], 1.0)
            nisa.dma_copy(out[half * 4 : half * 4 + 4], tile)
        return out

    x = np.zeros((1, 1), np.float32)
    if last.stop == 8:
        assert (kernel(x) == 1).all()
    else:
        with pytest.raises(NkiError, match="12 undefined"):
            kernel(x)
