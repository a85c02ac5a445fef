"""Races of rows that data choose: seen at run time, since addresses are known only there."""

import warnings

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning

PAGES, ROWS, COLUMNS = 4, 32, 16


@pytest.fixture(autouse=True)
def trn2(target):
    target("trn2")


def paged(writers=(0,), barrier=False, factor=2.0):
    @nki.jit
    def kernel(state, slots):
        """Each core reads its page; those among the writers store it doubled."""
        me = nl.program_id()
        out = nl.ndarray((2, ROWS, COLUMNS), state.dtype, buffer=nl.shared_hbm)
        slot = nl.ndarray((1, 1), nl.int32)
        nisa.dma_copy(slot, slots[me : me + 1, :])
        page = state.reshape((PAGES, ROWS * COLUMNS)).ap(
            pattern=[[COLUMNS, ROWS], [1, COLUMNS]], offset=0, scalar_offset=slot, indirect_dim=0
        )
        tile = nl.ndarray((ROWS, COLUMNS), state.dtype)
        nisa.dma_copy(tile, page)
        nisa.dma_copy(out[me], tile)
        if barrier:
            nisa.core_barrier(out, (0, 1))
        if me in writers:
            nisa.tensor_scalar(tile, tile, nl.multiply, factor)
            nisa.dma_copy(page, tile)
        return out

    return kernel


def run(kernel, first, second):
    state = np.arange(PAGES * ROWS * COLUMNS, dtype=np.float32).reshape(PAGES, ROWS, COLUMNS)
    before = state.copy()
    out = kernel[2](state, np.array([[first], [second]], np.int32))
    return before, state, out


@pytest.mark.parametrize(
    ("writers", "told"),
    [
        ((0,), "instance 1 of the launch grid reads rows of 'state'.*that instance 0 writes"),
        ((1,), "instance 1 of the launch grid writes rows of 'state'.*that .*instance.* read"),
    ],
)
def test_one_page_for_both_is_a_race(writers, told):
    with pytest.warns(NkiWarning, match=f"{told}.*sim_race_of_chosen_rows") as caught:
        run(paged(writers), 2, 2)
    assert caught[0].filename == __file__


def test_pages_of_ones_own_are_none():
    kernel = paged((0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        for first, second in ((0, 1), (3, 2), (1, 0)):  # no run is held against the next
            before, state, out = run(kernel, first, second)
            assert np.array_equal(out, before[[first, second]])
            before[[first, second]] *= 2
            assert np.array_equal(state, before)


def test_the_same_values_again_are_none():
    """Router kernels of nki-library d2ad3a5 scatter on both cores what both have computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        before, state, _ = run(paged((1,), factor=1.0), 2, 2)
    assert np.array_equal(state, before)


def test_it_is_an_error_in_strict_mode(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")
    with pytest.raises(NkiError, match="sim_race_of_chosen_rows"):
        run(paged(), 1, 1)
    run(paged(), 1, 2)


# --- kernels that do not divide their work --------------------------------------------------------
@nki.jit
def doubled(x):
    """Both cores compute all of it, by way of a tensor that both of them write."""
    between = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nl.store(between, tile)
    nl.store(out, nl.load(between))
    return out


@nki.jit
def doubled_in_place(x):
    tile = nl.load(x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nl.store(x, tile)
    return x


def test_cores_that_do_the_same_are_told_of(monkeypatch):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    monkeypatch.setenv("NKI_CPU_STRICT", "1")  # devices have run such launches
    with pytest.warns(NkiWarning, match="2 instances of doubled compute.*sim_copies_of_a_kernel"):
        assert np.array_equal(doubled[2](x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        doubled(x)


def test_an_update_in_place_by_both_is_a_race():
    x = np.ones((8, 8), np.float32)
    with pytest.raises(NkiError, match=r"writes x\[.*reads.*err_unexpected_output_dependencies"):
        doubled_in_place[2](x)
    assert np.array_equal(doubled_in_place(x), np.full((8, 8), 2.0))


def test_two_accesses_that_share_parts_of_rows_are_a_race():
    """Elements 0 to 3 and 10 to 13 of one core, 12 to 15 and 22 to 25 of the other."""

    @nki.jit
    def kernel(state, slots):
        me = nl.program_id()
        out = nl.ndarray((2, 2, 4), state.dtype, buffer=nl.shared_hbm)
        slot, tile = nl.ndarray((1, 1), nl.int32), nl.ndarray((2, 4), state.dtype)
        nisa.dma_copy(slot, slots[me : me + 1, :])
        page = state.ap(pattern=[[10, 2], [1, 4]], offset=0, scalar_offset=slot, indirect_dim=0)
        nisa.dma_copy(tile, page)
        nisa.dma_copy(out[me], tile)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nisa.dma_copy(page, tile)
        return out

    with pytest.warns(NkiWarning, match="sim_race_of_chosen_rows"):
        kernel[2](np.zeros((4, 12), np.float32), np.array([[0], [1]], np.int32))
