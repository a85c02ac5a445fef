"""What all instructions share: the record form, masks, typed attributes, access patterns."""

import warnings

import neuronxcc.nki as nki
import numpy as np
import pytest
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError
from tests.core.test_isa import assert_close, data
from tests.core.test_refusals import kernel_of


@pytest.fixture(autouse=True)
def quiet():
    """Functions of releases after 2.21 warn; here they are no subject."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sim_newer_api")
        yield


# --- attributes -----------------------------------------------------------------------------------
@pytest.mark.warns("sim_loop_condition")
def test_iterations_that_differ_in_the_sign_of_zero_are_not_merged_into_one():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 128, 8), nl.float32, buffer=nl.shared_hbm)
        for k in nl.affine_range(4):
            nl.store(out[k], nisa.memset((128, 8), -0.0 if k == 2 else 0.0, nl.float32))
        return out

    got = kernel(data(1, (1, 1)))
    assert np.signbit(got).reshape(4, -1).any(axis=1).tolist() == [False, False, True, False]


# --- masks ----------------------------------------------------------------------------------------
def masked(body, *inputs):
    """What ``body`` (from loaded tiles) writes over a tile of sevens."""

    @kernel_of
    def kernel(*hbm):
        made = nl.full((128, 64), 7.0, nl.float32)
        made[...] = body(*map(nl.load, hbm))
        return made

    return kernel(*inputs)


ROW, COLUMN = (nl.arange(128)[:, None], nl.arange(64)[None, :])


@pytest.mark.parametrize("limit", ["box", "triangle"])
def test_masks_cut_the_values_that_an_instruction_holds(limit):
    row, column = np.mgrid[0:128, 0:64]
    keep = (row < 100) & (column < 60) if limit == "box" else row + column < 90

    def mask():
        if limit == "box":
            return (ROW < 100) & (COLUMN < 60)
        return ROW + COLUMN < 90

    counted = masked(
        lambda x: nisa.iota(ROW * 64 + COLUMN, nl.float32, mask=mask()), data(1, (1, 1))
    )
    np.testing.assert_array_equal(counted, np.where(keep, row * 64 + column, 7.0))
    x = data(2, (128, 64))
    causal = masked(lambda t: nisa.affine_select(ROW >= COLUMN, t, -1.0, mask=mask()), x)
    np.testing.assert_array_equal(causal, np.where(keep, np.where(row >= column, x, -1.0), 7.0))


# --- access patterns ------------------------------------------------------------------------------
def test_an_operand_walks_at_most_four_free_axes():
    def kernel_for(axes):
        @nki.jit
        def kernel(x):
            sizes = (4,) * axes
            out = nl.ndarray((128, 2**axes), x.dtype, buffer=nl.shared_hbm)
            tile = nl.load(x).reshape((128, *sizes))
            corner = (slice(None), *(slice(0, 2) for _ in sizes))
            nl.store(out, nl.copy(tile[corner]).reshape((128, 2**axes)))
            return out

        return kernel

    def told(axes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel_for(axes).trace(data(1, (128, 4**axes)))
        return [str(w.message) for w in caught if "sim_access_pattern_axes" in str(w.message)]

    assert told(4) == []
    (message,) = told(5)
    assert "tensor_copy" in message and "walks 5 free axes" in message


# --- two results ----------------------------------------------------------------------------------
TWO_RESULTS = {
    "activation_reduce": lambda x, sums: nisa.activation_reduce(
        nl.exp, x, reduce_op=np.add, reduce_res=sums
    ),
    "tensor_scalar_reduce": lambda x, sums: nisa.tensor_scalar_reduce(
        data=x, op0=np.multiply, operand0=1.001, reduce_op=np.add, reduce_res=sums
    ),
}


@pytest.mark.parametrize("name", TWO_RESULTS)
@pytest.mark.parametrize("eager", [False, True])
def test_the_first_of_two_results_moves_into_its_destination(monkeypatch, name, eager):
    """bf16 data into an fp32 tile keeps its fp32 bits, and no copy is recorded."""
    if eager:
        monkeypatch.setenv("NKI_CPU_EAGER", "1")

    @nki.jit
    def kernel(x):
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 1), nl.float32, buffer=nl.shared_hbm)
        kept, sums = nl.ndarray((128, 64), nl.float32), nl.ndarray((128, 1), nl.float32)
        kept[...] = TWO_RESULTS[name](nl.load(x), sums)
        nl.store(out, kept)
        nl.store(total, sums)
        return out, total

    x = data(1, (128, 64), "bfloat16")
    wide = x.astype(np.float64)
    want = np.exp(wide) if name == "activation_reduce" else wide * np.float32(1.001)
    got, total = kernel(x)
    assert_close(got, want, "float32", 8)
    assert_close(total, want.sum(axis=1, keepdims=True), "float32", 64)
    if not eager:
        assert [i.op.name for i in kernel.trace(x)].count("tensor_copy") == 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_second_result_over_an_operand_or_the_destination_comes_out_right(monkeypatch, eager):
    """The sums replace the bias that went into them; the other sums are a column of their tile."""
    if eager:
        monkeypatch.setenv("NKI_CPU_EAGER", "1")

    @nki.jit
    def kernel(x, shift):
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 1), nl.float32, buffer=nl.shared_hbm)
        again = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        kept, sums = nl.ndarray((128, 64), nl.float32), nl.ndarray((128, 1), nl.float32)
        tile = nl.load(x)
        sums[...] = nl.load(shift)
        kept[...] = nisa.activation_reduce(
            nl.square, tile, bias=sums, reduce_op=np.add, reduce_res=sums
        )
        nl.store(out, kept)
        nl.store(total, sums)
        kept[...] = nisa.activation_reduce(
            nl.square, tile, reduce_op=np.add, reduce_res=kept[:, 0:1]
        )
        nl.store(again, kept)
        return out, total, again

    x, shift = data(1, (128, 64)), data(2, (128, 1))
    got, total, again = kernel(x, shift)
    want = np.square(x.astype(np.float64) + shift)
    assert_close(got, want, "float32", 4)
    assert_close(total, want.sum(axis=1, keepdims=True), "float32", 64)
    assert_close(again, np.square(x.astype(np.float64)), "float32", 4)


# --- ScalarE's running sums -----------------------------------------------------------------------
def summing(loop, first):
    """Row sums of squares over four column blocks, kept in ScalarE's registers."""

    @nki.jit
    def kernel(x):
        total = nl.ndarray((128, 1), nl.float32, buffer=nl.shared_hbm)
        tile, sums = nl.load(x), nl.ndarray((128, 1), nl.float32)
        command, zero = nisa.reduce_cmd, nisa.memset((128, 1), 0, nl.float32)
        if not first:
            nisa.activation(nl.copy, zero, bias=zero, reduce_op=np.add, reduce_cmd=command.reset)
        for k in loop(4):
            nisa.activation(
                nl.square,
                tile[:, nl.ds(k * 16, 16)],
                bias=zero,
                reduce_op=np.add,
                reduce_cmd=command.reset_reduce if first and k == 0 else command.reduce,
            )
        nisa.activation(
            nl.copy, zero, bias=zero, reduce_op=np.add, reduce_res=sums, reduce_cmd=command.idle
        )
        nl.store(total, sums)
        return total

    return kernel


@pytest.mark.parametrize("first", [True, False], ids=["reset in the loop", "reset before it"])
@pytest.mark.parametrize("loop", [nl.sequential_range, nl.affine_range, nl.static_range])
def test_running_sums_outlive_the_iteration_that_began_them(loop, first):
    x = data(1, (128, 64))
    want = np.square(x.astype(np.float64)).sum(axis=1, keepdims=True)
    if loop is nl.affine_range:  # its iterations may not tell the first from the others
        with pytest.raises(NkiError, match="err_unexpected_output_dependencies"):
            summing(loop, first).trace(x)
        return
    assert_close(summing(loop, first)(x), want, "float32", 64)


def test_running_sums_of_another_grid_instance_are_not_read():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((2, 128, 1), nl.float32, buffer=nl.shared_hbm)
        at = nl.program_id(0)
        command, sums = nisa.reduce_cmd, nl.ndarray((128, 1), nl.float32)
        tile = nl.load(x[at])
        nisa.activation(
            nl.square, tile, reduce_op=np.add, reduce_res=sums, reduce_cmd=command.reduce
        )
        nl.store(out[at], sums)
        return out

    x = data(1, (2, 128, 16))
    want = np.square(x.astype(np.float64)).sum(axis=2, keepdims=True)
    assert_close(kernel[2](x), want, "float32", 64)
