"""Two cores whose loops and conditions depend on data meet while they run."""

import threading

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from neuron_cpu.core.instructions.ranks import by_core


@pytest.fixture(autouse=True)
def trn2(target):
    target("trn2")


def count_of(n):
    count = nisa.register_alloc()
    nisa.register_load(count, n)
    return count


@nki.jit
def relayed(x, n):
    """In each of n rounds a core adds 1 to its row and takes the other's, through HBM."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    shared = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    me = nl.program_id()
    row = nl.load(x[me : me + 1, :])
    for _ in nl.dynamic_range(count_of(n)):
        nisa.tensor_scalar(row, row, nl.add, 1.0)
        nisa.dma_copy(shared[me : me + 1, :], row)
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(row, shared[1 - me : 2 - me, :])
        nisa.core_barrier(shared, (0, 1))
    nisa.dma_copy(out[me : me + 1, :], row)
    return out


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
def test_barriers_in_a_loop_as_long_as_data_say(rounds):
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    found = relayed[2](x, np.array([[rounds]], np.int32))
    assert np.array_equal(found, (x[::-1] if rounds % 2 else x) + rounds)


@nki.jit
def doubled_thrice(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    me = nl.program_id()
    row = nl.load(x[me : me + 1, :])
    for _ in nl.dynamic_range(3):
        nisa.tensor_tensor(row, row, row, nl.add)
    nisa.dma_copy(out[me : me + 1, :], row)
    return out


def test_the_program_of_a_core_has_its_loops():
    program = doubled_thrice[2].trace(np.zeros((2, 8), np.float32))
    for part in by_core(program):
        assert "tensor_tensor" in [instruction.op.name for instruction in part.instructions]


@nki.jit
def uneven(x, n):
    """Core 0 loops n[0] times, core 1 n[1] times."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    me = nl.program_id()
    for _ in nl.dynamic_range(count_of(n[me : me + 1, :])):
        nisa.core_barrier(out, (0, 1))
    nisa.dma_copy(out[me : me + 1, :], x[me : me + 1, :])
    return out


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (0, 3), (3, 0)])
def test_cores_that_do_not_meet_equally_often(counts):
    before = threading.active_count()
    x, n = np.ones((2, 8), np.float32), np.array(counts, np.int32).reshape(2, 1)
    with pytest.raises(NkiError, match="sim_core_barrier"):
        uneven[2](x, n)
    assert threading.active_count() == before
    assert np.array_equal(uneven[2](x, np.full((2, 1), 2, np.int32)), x)


@pytest.mark.parametrize("core", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
def test_a_failure_of_either_core_is_the_callers(core, after):
    @nki.jit
    def kernel(x, n):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        for k in range(2):
            for _ in nl.dynamic_range(count_of(n)):
                nisa.core_barrier(out, (0, 1))
            assert nl.program_id() != core or k != after, "own message"
        return out

    before = threading.active_count()
    with pytest.raises(AssertionError, match="own message"):
        kernel[2](np.ones((2, 8), np.float32), np.array([[1]], np.int32))
    assert threading.active_count() == before
