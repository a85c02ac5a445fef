"""Words, shapes and figures that a wrong character would change, and no other test reads."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.time.schedule import schedule
from tests.nki.tiles import ones as sb

X = np.random.default_rng(5).normal(size=(16, 16)).astype(np.float32)


def kernel_of(body):
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        body(x, out)
        return out

    return kernel


def run(body):
    """The result of a kernel that ``body`` writes."""
    return kernel_of(body)(X)


def turned_by_hwdge(dtype):
    def body(x, out):
        target, source = nl.ndarray((16, 16), dtype), sb((16, 16), dtype)
        nisa.dma_transpose(target, source, dge_mode=nisa.dge_mode.hwdge)
        nisa.dma_copy(out, x)

    return body


REFUSED = {
    "another product": (lambda x, out: x.reshape((3, 5)), "shape .3, 5. for 256 elements"),
    "four bytes": (turned_by_hwdge(nl.float32), "with hwdge, expected a 2-byte type"),
    "axis of a launch": (lambda x, out: nl.num_programs((0, 1)), "expected axis 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_given(name, target):
    target("trn2")
    body, words = REFUSED[name]
    with pytest.raises(NkiError, match=words):
        run(body)


@nki.jit
def of_strings(x):
    held = {"rows": x}
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for _ in range(1):
        nisa.dma_copy(out, held["rows"])
    return out


def test_the_parser_of_2_32_takes_dictionaries_of_strings_and_loops(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    assert np.array_equal(of_strings(X), X)


def scattered(add):
    def body(x, out):
        nisa.dma_copy(out, x)
        rows, tile = nl.ndarray((4, 1), nl.int32), sb((4, 16))
        nisa.memset(rows, 3)
        target = out.vector_select(0, rows)
        if add:
            nisa.dma_compute(target, [tile, target], nl.add)
        else:
            nisa.dma_copy(target, tile)

    return body


@pytest.mark.parametrize(("add", "words"), [(True, "adds to row 3"), (False, "writes row 3")])
def test_rows_named_twice_are_told_with_what_is_done(add, words, target):
    target("trn2")
    with pytest.warns(NkiWarning, match=f"{words} of .*sim_duplicate_rows"):
        run(scattered(add))


def blocks(x, out):
    tile = nl.ndarray((4, 4, 16), x.dtype)
    nisa.dma_copy(tile, x.reshape((4, 64)))
    nisa.dma_copy(out.reshape((4, 64)), tile)


def at_an_offset(x, out):
    rows, made = nl.ndarray((16, 1), nl.int32), nl.ndarray(x.shape, x.dtype)
    nisa.iota(rows, [[1, 1]], channel_multiplier=1)
    nisa.dma_copy(made, x)
    nisa.dma_copy(out.vector_select(0, rows), made)


def rows_in_bounds(x, out):
    rows, made = nl.ndarray((16, 1), nl.int32), sb((16, 16), x.dtype)
    nisa.iota(rows, [[1, 1]], offset=8, channel_multiplier=1)
    source = x.ap([[16, 16], [1, 16]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(made, source, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(out, made)


def assigned(x, out):
    """trnrand's threefry writes its results so, column by column (trn1 and trn2)."""
    tile = nl.ndarray(x.shape, x.dtype)
    tile[...] = x
    out[:, 0:8] = 3.0
    for k in range(8, 16):
        out[:, k : k + 1] = tile[:, 15 - k : 16 - k]


def summed_from_zero(x, out):
    tile, sums = nl.ndarray(x.shape, x.dtype), nl.ndarray((16, 1), x.dtype)
    nisa.dma_copy(tile, x)
    for command in (nisa.reduce_cmd.reset, nisa.reduce_cmd.reduce):
        nisa.tensor_scalar_reduce(tile, tile, nl.add, 1.0, nl.add, sums, reduce_cmd=command)
    nisa.tensor_scalar(tile, tile, nl.add, sums)
    nisa.dma_copy(out, tile)


def number_where_chosen(x, out):
    tile, chosen = nl.ndarray(x.shape, x.dtype), nl.ndarray(x.shape, nl.uint8)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(chosen, tile, nl.greater, 0.0)
    nisa.tensor_copy_predicated(tile, 5.0, chosen)
    nisa.dma_copy(out, tile)


COPIES = {
    "summed from zero": (summed_from_zero, X + 2 + (X + 2).sum(1, keepdims=True)),
    "number where chosen": (number_where_chosen, np.where(X > 0, 5.0, X)),
    "assigned": (assigned, np.hstack([np.full((16, 8), 3.0), X[:, 7::-1]])),
    "tile of other axes": (blocks, X),
    "rows by data": (at_an_offset, X),
    "rows out of bounds": (rows_in_bounds, np.concatenate([X[8:], np.ones((8, 16))])),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_sums(name, target):
    target("trn2")
    body, want = COPIES[name]
    assert np.allclose(run(body), want, rtol=1e-6, atol=1e-5)


def test_an_engine_goes_on_while_a_result_is_on_its_way(target):
    target("trn2")

    def body(x, out):
        tile, made, last = (nl.ndarray(x.shape, x.dtype) for _ in range(3))
        nisa.dma_copy(tile, x)
        nisa.tensor_copy(made, tile)
        nisa.tensor_tensor(last[:, 0:1], tile[:, 0:1], tile[:, 0:1], nl.add)  # needs nothing of it
        nisa.tensor_tensor(last, made, made, nl.add)
        nisa.dma_copy(out, last)

    planned = schedule(kernel_of(body).trace(np.zeros((128, 512), np.float32)))
    ops = [i.op.name for i in planned.program.instructions]
    at = ops.index("tensor_copy")
    free, used = (k for k, op in enumerate(ops) if op == "tensor_tensor")
    assert planned.busy[at] == pytest.approx((512 / 2 + 57) / 0.96)
    assert planned.start[free] == pytest.approx(planned.end[at])
    assert planned.start[used] == pytest.approx(planned.start[at] + (512 / 2 + 150) / 0.96)
