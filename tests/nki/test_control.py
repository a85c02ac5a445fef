"""Device loops, registers, order, and Python that the vendor's parser refuses."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.time.schedule import schedule
from tests.warned import allows

pytestmark = allows("sim_dynamic_slice")

X = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_registers_as_offsets_need_no_values():
    @nki.jit
    def kernel(x, at):
        out = nl.ndarray((4, 1), x.dtype, buffer=nl.shared_hbm)
        kept = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        register, copy = nisa.register_alloc(at), nisa.register_alloc()
        nisa.register_move(copy, register)
        nisa.dma_copy(out, x[:, nl.ds(copy, 1)])
        nisa.register_store(kept, copy)
        return out, kept

    program = kernel.trace(X, np.array([[0]], np.int32))
    assert len(program) == 3
    out, kept = kernel(X, np.array([[5]], np.int32))
    assert np.array_equal(out, X[:, 5:6]) and kept.tolist() == [[5]]


def test_registers_are_no_numbers():
    def kernel(use):
        def body(x):
            use(nisa.register_alloc(3))
            return x

        return lambda: nki.jit(body).trace(X)

    with pytest.raises(TypeError, match="no value while the kernel is built"):
        kernel(lambda r: range(r))()
    with pytest.raises(TypeError, match="no value while"):
        kernel(lambda r: r + 1)()
    with pytest.raises(AssertionError, match="read-only"):
        kernel(lambda r: nl.fori_loop(0, 1, lambda i: nisa.register_move(i, 2)))()
    with pytest.raises(NkiError, match="positive"):
        kernel(lambda r: nl.fori_loop(0, 1, lambda i: None, step=r))()


def test_ranges_are_python_s():
    assert list(nl.affine_range(3)) == list(range(3)) == list(nl.static_range(0, 3))
    assert list(nl.sequential_range(1, 9, 4)) == [1, 5]


# --- order ----------------------------------------------------------------------------------------
def two_chains(order):
    """A long and a short chain on ScalarE and VectorE that nothing connects."""

    def kernel(x):
        out = nl.ndarray((128, 512), nl.float32, buffer=nl.shared_hbm)
        long, short = nl.zeros((128, 4096), nl.float32), nl.zeros((128, 512), nl.float32)
        first = nisa.activation(long, nl.exp, long, name="long")
        second = nisa.tensor_scalar(
            short, short, nl.add, 1.0, engine=nisa.engine.vector, name="short"
        )
        if order == "depends":
            assert second.depends_on(first) is second
        nisa.dma_copy(out, short)
        return out

    def in_order(x):
        with nl.no_reorder():
            return kernel(x)

    made = nki.jit(in_order if order == "no_reorder" else kernel)
    return made.with_schedule([("short", ["long"])]) if order == "schedule" else made


@pytest.mark.parametrize("order", ["depends", "no_reorder", "schedule"])
def test_order_beyond_what_data_demand(order):
    free, bound = (two_chains(o).trace(X) for o in ("none", order))
    ends = []
    for program in (free, bound):
        made = schedule(program)
        at = {i.op.name: k for k, i in enumerate(made.program.instructions)}
        ends.append((made.start[at["tensor_scalar"]], made.end[at["activation"]]))
    assert ends[0][0] < ends[0][1] and ends[1][0] >= ends[1][1]


def test_device_loops_have_no_place_in_an_order():
    def kernel(around):
        @nki.jit
        def made(x):
            out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
            tile = nl.load(x)
            if around:
                with nl.no_reorder():
                    for _ in nl.dynamic_range(2):
                        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
            else:
                for _ in nl.dynamic_range(2):
                    with nl.no_reorder():
                        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
            nl.store(out, tile)
            return out

        return made

    with pytest.raises(NkiError, match="sim_ordered_loop"):
        kernel(True)(X)
    assert np.array_equal(kernel(False)(X), X + 2)


@nki.jit
def nested_by_data(x, count, times):
    """``count`` columns grow ``times``: a loop in a loop, the inner one while a register holds."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, left = nl.load(x), nl.ndarray((1, 1), nl.int32)

    def body(i):
        nisa.dma_copy(left, times)
        condition = nisa.register_alloc()
        nisa.register_load(condition, left)

        def inner(_):
            column = tile[:, nl.ds(i, 1)]
            nisa.tensor_scalar(column, column, nl.add, 1.0)
            nisa.tensor_scalar(left, left, nl.subtract, 1)
            following = nisa.register_alloc()
            nisa.register_load(following, left)
            return following

        nl.while_loop(condition, inner)

    register = nisa.register_alloc()
    nisa.register_load(register, nl.load(count))
    nl.fori_loop(0, register, body)
    nl.store(out, tile)
    return out


@pytest.mark.parametrize(("count", "times"), [(0, 3), (3, 0), (4, 2)])
def test_loops_in_loops_over_data(count, times, target):
    if count:  # else the outer loop has no iteration
        with pytest.raises(NkiError, match="dominate.*sim_nested_device_loops"):
            nested_by_data(X, np.array([[count]], np.int32), np.array([[times]], np.int32))
    target("trn2")
    want = X.copy()
    want[:, :count] += times
    found = nested_by_data(X, np.array([[count]], np.int32), np.array([[times]], np.int32))
    assert np.array_equal(found, want)


def test_printing_while_it_runs(monkeypatch, capsys):
    monkeypatch.setenv("NKI_CPU_EAGER", "1")

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nl.device_print("tile", tile[0:1, 1:3])
        nl.store(out, tile)
        return out

    kernel(X)
    assert "tile [[1. 2.]]" in capsys.readouterr().out


def fenced(twice):
    @nki.jit
    def kernel(x, count):
        """Stores as many rows as data say, and copies the output onto itself to wait for them."""
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        other = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        number = nisa.register_alloc()
        nisa.register_load(number, nl.load(count))
        for i in nl.dynamic_range(number):
            nisa.dma_copy(out[nl.ds(i, 1), :], x[nl.ds(i, 1), :])
        nisa.dma_copy(out, out)
        if twice:
            nisa.dma_copy(other, out)
        return out

    return kernel


def test_outputs_that_this_call_left_alone_are_told_of():
    with pytest.warns(NkiWarning, match="sim_output_partly_written"):
        fenced(False)(X, np.array([[0]], np.int32))
