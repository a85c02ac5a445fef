"""Words, shapes and figures that a wrong character would change, and no other test reads."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning


def sb(shape, dtype=nl.float32):
    made = nl.ndarray(shape, dtype=dtype)
    nisa.memset(made, 1)
    return made


def run(body, x=None):
    """The result of a kernel that ``body`` writes."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        body(x, out)
        return out

    return kernel(np.zeros((16, 16), np.float32) if x is None else x)


def turned_by_hwdge(dtype):
    def body(x, out):
        target, source = nl.ndarray((16, 16), dtype), sb((16, 16), dtype)
        nisa.dma_transpose(target, source, dge_mode=nisa.dge_mode.hwdge)
        nisa.dma_copy(out, x)

    return body


REFUSED = {
    "another product": (lambda x, out: x.reshape((3, 5)), "shape .3, 5. for 256 elements"),
    "sizes below one": (lambda x, out: x.reshape((-16, -16)), "shape .-16, -16. for 256"),
    "four bytes": (turned_by_hwdge(nl.float32), "with hwdge, expected a 2-byte type"),
    "keys": (
        lambda x, out: x.size(1),
        r"number 256 without a call; use tile.shape or tile.shape.1",
    ),
    "no axis": (lambda x, out: x.size(), r"use tile.shape or tile.shape.0."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_was_given(name, target):
    target("trn2")
    body, words = REFUSED[name]
    with pytest.raises(NkiError, match=words):
        run(body)


def test_types_of_two_bytes_are_turned_by_hwdge(target):
    target("trn2")
    assert not run(turned_by_hwdge(nl.bfloat16)).any()


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


@pytest.mark.parametrize("shape", [(4, 4, 16), (4, 64), (2, 8, 16)])
def test_copies_into_a_tile_of_other_axes_keep_the_order(shape):
    x = np.random.default_rng(5).normal(size=(16, 16)).astype(np.float32)

    def body(x, out):
        tile = nl.ndarray(shape, x.dtype)
        nisa.dma_copy(tile, x.reshape((shape[0], 256 // shape[0])))
        nisa.dma_copy(out.reshape((shape[0], 256 // shape[0])), tile)

    assert np.array_equal(run(body, x), x)


def of_strings(x, out):
    held = {"rows": x}
    nisa.dma_copy(out, held["rows"])


def of_numbers(x, out):
    held = {1: x}
    nisa.dma_copy(out, held[1])


def test_the_parser_takes_dictionaries_of_strings(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    assert not run(of_strings).any()
    with pytest.raises(NkiError, match="a dictionary with other keys than strings is not supp"):
        run(of_numbers)
