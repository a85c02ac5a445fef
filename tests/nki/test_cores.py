"""Two cores of a logical one: barriers, exchanges, races, and what each of them holds."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning


@pytest.fixture(autouse=True)
def trn2(target):
    target("trn2")


def rotated(barrier):
    @nki.jit
    def kernel(x):
        """Each core writes its row to HBM and reads the other's."""
        shared = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="shared")
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        me = nl.program_id()
        nisa.dma_copy(shared[me : me + 1, :], x[me : me + 1, :])
        if barrier:
            nisa.core_barrier(shared, (0, 1))
        tile = nl.load(shared[1 - me : 2 - me, :])
        nl.store(out[me : me + 1, :], tile)
        return out

    return kernel


def test_a_barrier_makes_writes_visible():
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert np.array_equal(rotated(True)[2](x), x[::-1])


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("rewrites", [False, True])
def test_what_both_cores_write_is_compared(differ, rewrites):
    @nki.jit
    def kernel(x):
        """Rows are divided; the sum of all of them is written by both cores."""
        total = nl.ndarray((1, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        me = nl.program_id()
        first, second = nl.load(x[0:1, :]), nl.load(x[1:2, :])
        nl.store(out[me : me + 1, :], first)
        if rewrites:  # what a core writes first does not count
            nisa.dma_copy(total, x[me : me + 1, :])
        nisa.tensor_tensor(first, first, second, nl.add)
        if differ:
            nisa.tensor_scalar(first, first, nl.add, float(me))
        nl.store(total, first)
        nl.store(out[me : me + 1, :], nl.load(total))
        return total, out

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    if differ:
        with pytest.raises(NkiError, match="8 get other values"):
            kernel[2](x)
        return
    with pytest.warns(NkiWarning, match="'total'.*equal values.*sim_cores_write_alike"):
        total, out = kernel[2](x)
    assert np.array_equal(total[0], x.sum(0)) and np.array_equal(out[0], x.sum(0))


def test_tiles_of_two_cores_at_one_address_are_two():
    @nki.jit
    def kernel(x):
        """Each core keeps a tile at the same address while the other one writes its own."""
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        me = nl.program_id()
        tile = nl.ndarray((1, 8), x.dtype, address=(0, 0))
        nisa.dma_copy(tile, x[me : me + 1, :])
        nisa.core_barrier(out, (0, 1))
        nl.store(out[me : me + 1, :], tile)
        return out

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert np.array_equal(kernel[2](x), x)


def test_a_barrier_protects_an_argument():
    @nki.jit
    def kernel(x):
        me = nl.program_id()
        nl.store(x[me : me + 1, :], nl.load(x[2 + me : 3 + me, :]))
        nisa.core_barrier(x, (0, 1))
        nl.store(x[2 + me : 3 + me, :], nl.load(x[1 - me : 2 - me, :]))
        return x

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    want = x[[2, 3, 3, 2]]
    assert np.array_equal(kernel[2](x), want)


@pytest.mark.parametrize("filled", [True, False])
def test_each_core_reads_chosen_rows_of_its_half(filled):
    """What the other core fills counts as filled; rows that nobody fills do not."""

    @nki.jit
    def kernel(x, rows):
        me = nl.program_id()
        out = nl.ndarray((8, 16), x.dtype, buffer=nl.shared_hbm)
        index, part = nl.load(rows), nl.ndarray((4, 16), x.dtype, buffer=nl.sbuf)
        if filled or me == 0:
            nl.store(out[4 * me : 4 * me + 4, :], nl.load(x))
        chosen = [[16, 4], [1, 16]]
        source = out.ap(chosen, offset=64 * me, vector_offset=index, indirect_dim=0)
        nisa.dma_copy(part, source)
        nl.store(out[4 * me : 4 * me + 4, :], part)
        return out

    x = np.arange(64, dtype=np.float32).reshape(4, 16)
    rows = np.array([[3], [1], [0], [2]], np.int32)
    if filled:
        assert np.array_equal(kernel[2](x, rows), np.tile(x[rows[:, 0]], (2, 1)))
    else:
        with pytest.warns(NkiWarning, match="sim_undefined_data|partly_written") as told:
            kernel[2](x, rows)
        assert any("sim_undefined_data" in str(one.message) for one in told)


def lonely(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.core_barrier(out)
        nisa.dma_copy(out, x)
    return out


def one_sided(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    me = nl.program_id()
    nisa.sendrecv(tile, tile, 1 - me, 1 - me, pipe_id=me)
    return out


def narrow(x):
    tile = nl.ndarray((4, 1024), nl.float32)
    nisa.memset(tile, 0)
    nisa.sendrecv(tile, tile, 1, 1, 0, dma_engine=nisa.dma_engine.gpsimd_dma)


def third(x):
    tile = nl.load(x)
    nisa.sendrecv(tile, tile, 2, 0, 0)


REFUSED = {
    "sim_core_barrier": lonely,
    "sim_all_reduce_incomplete": one_sided,
    "sim_exchange_size": narrow,
    "sim_rank_number": third,
}


@pytest.mark.parametrize("identifier", REFUSED)
def test_refused(identifier):
    with pytest.raises(NkiError) as caught:
        nki.jit(REFUSED[identifier])[2].trace(np.zeros((4, 8), np.float32))
    assert caught.value.identifier == identifier


def test_one_core_meets_nobody():
    with pytest.raises(NkiError, match="sim_one_core"):
        rotated(True)(np.zeros((2, 8), np.float32))


def test_gen2_has_no_barriers(target):
    target("trn1")
    with pytest.raises(NkiError, match="gen3 on"):
        rotated(True)[2](np.zeros((2, 8), np.float32))


@nki.jit
def named(x):
    """Instructions with names, on each core its own."""
    me = nl.program_id()
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, other = nl.load(x[me : me + 1, :]), nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0, name="doubled")
    nisa.memset(other, 1.0, name="ones")
    nisa.tensor_tensor(tile, tile, other, nl.add, name="sum")
    nl.store(out[me : me + 1, :], tile)
    return out


def test_names_are_those_of_a_core():
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    ordered = named.with_schedule([("ones", "doubled")])
    assert np.array_equal(ordered[2](x), 2 * x + 1)
    edges = ordered[2].trace(x).edges
    assert [(a.op.name, b.op.name, a.frame.i == b.frame.i) for a, b in edges] == [
        ("tensor_scalar", "memset", True)
    ] * 2


@pytest.mark.parametrize("cores", [0, (0,)])
def test_a_core_alone_waits_for_nobody(cores):
    @nki.jit
    def kernel(x):
        shared = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(shared, x)
        nisa.core_barrier(shared, cores)
        return shared

    x = np.ones((2, 8), np.float32)
    assert np.array_equal(kernel(x), x)
    with pytest.raises(NkiError, match="sim_core_barrier"):
        kernel[2](x)
