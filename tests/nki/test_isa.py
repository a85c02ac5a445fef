"""Instructions of ``nki.isa`` against float64 references that know nothing of the simulator."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core.device.errors import NkiError
from tests.nki.tiles import close, data
from tests.warned import allows

pytestmark = allows("sim_parser_subset")

BF16 = np.dtype(ml_dtypes.bfloat16)
FILL = -7.0  # what destinations hold before


def run(body, shape, *inputs, dtype="float32", fill=FILL):
    """What ``body(dst, *tiles)`` leaves in a destination tile, for numpy inputs loaded whole."""

    @nki.jit
    def kernel(*hbm):
        tiles = [nl.load(t) for t in hbm]
        made = nl.full(shape, fill, dtype)
        body(made, *tiles)
        out = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
        nl.store(out, made)
        return out

    return kernel(*inputs)


# --- element-wise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op1", "start", "function"),
    [("add", 0.0, np.cumsum), ("multiply", 1.0, np.cumprod), ("maximum", -9.0, None)],
)
def test_cumulative_goes_on_from_the_registers(op1, start, function):
    """Two halves, the second with what the first one left; a constant begins in load_reduce."""
    x = data(10, (3, 8))
    command = nisa.reduce_cmd

    def body(d, t):
        first, op = (command.load_reduce, start), getattr(nl, op1)
        nisa.tensor_scalar_cumulative(d[:, 0:4], t[:, 0:4], nl.add, op, 0.5, first[1], first[0])
        nisa.tensor_scalar_cumulative(d[:, 4:8], t[:, 4:8], nl.add, op, 0.5, None, command.reduce)

    moved = x.astype(float) + 0.5
    want = np.maximum.accumulate(moved, 1) if function is None else function(moved, axis=1)
    close(run(body, (3, 8), x), want)


# --- casts ----------------------------------------------------------------------------------------
def test_casts_round_to_even_and_saturate():
    x = np.array([[0.5, 1.5, 2.5, -0.5, 300.0, -300.0, 126.6]], np.float32)
    found = run(lambda d, t: nisa.tensor_copy(d, t), (1, 7), x, dtype="int8", fill=0)
    assert found.tolist() == [[0, 2, 2, 0, 127, -128, 127]]


# --- activations ----------------------------------------------------------------------------------


def test_sums_go_on_over_several_activations():
    """reset_reduce without a result, reduce, a read-out by idle; another engine's stay its own."""
    x = data(15, (4, 12))
    command = nisa.reduce_cmd

    def body(d, t):
        junk = nl.ndarray((4, 12), nl.float32)
        nisa.activation(junk[:, 0:4], nl.square, t[:, 0:4], reduce_cmd=command.reset_reduce)
        nisa.tensor_scalar_reduce(junk, t, nl.add, 0.0, nl.maximum, d[:, 1:2])
        nisa.activation(junk[:, 0:4], nl.copy, t[:, 4:8], reduce_cmd=command.reduce)
        nisa.activation(junk, nl.exp, t, reduce_res=d[:, 0:1], reduce_cmd=command.idle)
        nisa.activation(
            junk[:, 0:4], nl.copy, t[:, 8:12], reduce_res=d[:, 2:3], reduce_cmd=command.reduce
        )

    wide = x.astype(float)
    first = (wide[:, 0:4] ** 2).sum(1) + wide[:, 4:8].sum(1)
    want = np.stack([first, wide.max(1), first + wide[:, 8:12].sum(1)], 1)
    close(run(body, (4, 3), x), want)


def test_scalar_tensor_tensor_reduces_its_result():
    """SDK 2.33; the registers are those of tensor_scalar_reduce."""
    x, y = data(17, (4, 6)), data(18, (4, 6))
    command = nisa.reduce_cmd

    def body(d, a, b):
        junk = nl.ndarray((4, 6), nl.float32)
        nisa.scalar_tensor_tensor(
            junk, a, nl.multiply, 2.0, nl.add, b, reduce_op=nl.maximum, reduce_res=d[:, 0:1]
        )
        steps = (nl.multiply, 3.0, nl.add, b)
        kept = dict(reduce_op=nl.maximum, reduce_cmd=command.reduce)
        nisa.scalar_tensor_tensor(junk, a, *steps, reduce_res=d[:, 1:2], **kept)

    first = 2 * x.astype(float) + y
    both = np.maximum(first, 3 * x.astype(float) + y)
    close(run(body, (4, 2), x, y), np.stack([first.max(1), both.max(1)], 1))

    def without_operator(d, a, b):
        nisa.scalar_tensor_tensor(a, a, nl.add, 2.0, nl.add, b, reduce_res=d[:, 0:1])

    with pytest.raises(NkiError, match="reduce_res without reduce_op"):
        run(without_operator, (4, 2), x, y)


@allows("sim_copy_bias")
def test_later_activations(target):
    target("trn3")
    x, m = data(17, (5, 8)), data(18, (5, 1))
    exp = run(lambda d, t, c: nisa.exponential(d, t, c), (5, 8), x, m)
    close(exp, np.exp(x.astype(float) - m))

    def body(d, t):
        nisa.activate2(
            d[:, 0:8],
            nl.prelu,
            t,
            2.0,
            1.0,
            nl.multiply,
            nl.subtract,
            relu_param=0.25,
            reduce_op=nl.abs_max,
            reduce_res=d[:, 8:9],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )

    y = x.astype(float) * 2 - 1
    y = np.where(y > 0, y, 0.25 * y)
    most = y[np.arange(5), np.abs(y).argmax(1)]
    close(run(body, (5, 9), x), np.concatenate([y, most[:, None]], 1))
    bias = run(lambda d, t: nisa.activation(d, nl.copy, t, bias=0.5), (5, 8), x)
    close(bias, x.astype(float) + 0.5)


# --- patterns and selections ----------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_where_a_predicate_is_nonzero(reverse):
    mask = (data(25, (4, 6)) > 0).astype(np.uint8)
    found = run(
        lambda d, p: nisa.tensor_copy_predicated(d, 2.5, p, reverse_pred=reverse), (4, 6), mask
    )
    assert np.array_equal(found, np.where((mask != 0) != reverse, 2.5, FILL))


def test_sequence_bounds():
    ids = np.array([[1, 1, 2, 2, 2, 0, 3]], np.int32)
    found = run(lambda d, t: nisa.sequence_bounds(d, t), (1, 2, 7), ids, dtype="int32", fill=0)
    assert found[0, 0].tolist() == [0, 0, 2, 2, 2, 7, 6]
    assert found[0, 1].tolist() == [2, 2, 5, 5, 5, -1, 7]


def test_nonzero_with_count(target):
    target("trn2")
    x = (data(26, (32, 9)) > 0).astype(np.float32)
    found = run(
        lambda d, t: nisa.nonzero_with_count(d, t, 100, -3),
        (32, 10),
        x,
        dtype="int32",
        fill=16777217,
    )
    for row in range(32):
        places = [*(100 + np.flatnonzero(x[row]))]
        want = [*places, *[-3] * (9 - len(places)), len(places)]
        assert found[row].tolist() == (want if row % 16 == 0 else [16777217] * 10)


# --- searches -------------------------------------------------------------------------------------


@pytest.mark.warns("sim_topk_place")
def test_topk_of_sixteen_partitions():
    values = np.random.default_rng(27).permutation(16 * 5).astype(BF16)
    x = values.reshape(5, 16).T  # element e at partition e % 16, column e // 16

    @nki.jit
    def kernel(hbm):
        tile = nl.load(hbm)
        best, place = nl.ndarray((16, 4), nl.bfloat16), nl.ndarray((16, 4), nl.uint32)
        nisa.topk(best, place, tile, n=70)
        outs = []
        for t in (best, place):
            out = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
            nl.store(out, t)
            outs.append(out)
        return outs

    best, place = kernel(np.ascontiguousarray(x))
    order = np.argsort(values[:70].astype(float))[-4:]
    assert np.array_equal(place[0], order) and np.array_equal(best[3], values[order])


# --- moving ---------------------------------------------------------------------------------------
def test_shuffle_and_gathers():
    x = data(28, (64, 6))
    lanes = [31 - k for k in range(32)]
    lanes[3] = 255
    found = run(lambda d, t: nisa.nc_stream_shuffle(d, t, lanes), (64, 6), x)
    want = x.reshape(2, 32, 6)[:, ::-1].copy()
    want[:, 3] = FILL
    assert np.array_equal(found, want.reshape(64, 6))
    found = run(lambda d, t: nisa.nc_stream_shuffle(d[0:20], t[32:33], [0] * 32), (64, 6), x)
    assert np.array_equal(found[:20], np.repeat(x[32:33], 20, 0)) and (found[20:] == FILL).all()
    with pytest.raises(NkiError, match="from the same quadrant of src"):
        run(lambda d, t: nisa.nc_stream_shuffle(d, t[0:1], [0] * 32), (64, 6), x)
    at = np.random.default_rng(29).integers(0, 6, (64, 4)).astype(np.uint32)
    found = run(lambda d, t, i: nisa.nc_n_gather(d, t, i), (64, 4), x, at)
    assert np.array_equal(found, np.take_along_axis(x, at.astype(int), 1))
    index = np.random.default_rng(30).integers(0, 3, (64, 1)).astype(np.uint16) * 2
    found = run(lambda d, t, i: nisa.local_gather(d, t, i, 2, 8), (64, 16), x, index)
    for row in range(64):
        first = row // 16 * 16
        places = index[first : first + 8, 0]
        assert np.array_equal(found[row], np.concatenate([x[row, p : p + 2] for p in places]))


@pytest.mark.warns("sim_rounded_sums")
def test_sums_in_bf16_and_wide_products(target):
    """gen4: PSUM holds bf16, rounded after each product, and one product moves 2048 columns."""
    target("trn3")
    a, b = data(42, (32, 8)), data(43, (32, 2048))

    def body(d, x, y):
        psum = nl.ndarray((8, 2048), nl.bfloat16, buffer=nl.psum)
        for _ in range(2):
            nisa.nc_matmul(psum, x, y)
        nisa.tensor_copy(d, psum)

    first = (a.T.astype(float) @ b).astype(BF16).astype(float)
    close(run(body, (8, 2048), a, b), first + a.T.astype(float) @ b, 2.0**-8)


@pytest.mark.parametrize("hint", ["is_stationary_onezero", "is_moving_onezero", "is_transpose"])
def test_an_operand_that_is_promised_to_hold_ones_and_zeros(hint):
    """Fewer passes count then, so the promise is looked at where the kernel runs."""

    def body(d, x, eye):
        psum = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
        operands = (eye, x) if hint == "is_stationary_onezero" else (x, eye)
        nisa.nc_matmul(psum, *operands, **{hint: True})
        nisa.tensor_copy(d, psum)

    x, eye = data(1, (8, 8)), np.eye(8, dtype=np.float32)
    run(body, (8, 8), x, eye)
    with pytest.raises(Exception, match="sim_onezero"):
        run(body, (8, 8), eye, x)


# --- DMA ------------------------------------------------------------------------------------------
def moved(body, shape, *inputs, dtype="float32"):
    """What ``body(out_hbm, *inputs_hbm)`` leaves in an HBM tensor."""

    @nki.jit
    def kernel(*hbm):
        out = nl.full(shape, FILL, dtype, buffer=nl.shared_hbm)
        body(out, *hbm)
        return out

    return kernel(*inputs)


def test_dma_between_other_shapes_and_types():
    x = data(37, (6, 8))
    found = moved(lambda o, h: nisa.dma_copy(o, h), (3, 16), x, dtype="bfloat16")
    assert np.array_equal(found, x.reshape(3, 16).astype(BF16))

    def through(o, h):
        tile = nl.ndarray((12, 4), nl.float32)
        nisa.dma_copy(tile, h)  # HBM (6, 8) to SBUF (12, 4)
        nisa.dma_copy(o, tile)

    assert np.array_equal(moved(through, (2, 24), x), x.reshape(2, 24))

    def one_partition(o, h):
        tile = nl.ndarray((1, 48), nl.float32)
        nisa.dma_copy(tile, h.reshape((48,)))
        nisa.dma_copy(o, tile)

    assert np.array_equal(moved(one_partition, (4, 12), x), x.reshape(4, 12))

    def row_to_column(o, h):
        tile = nl.ndarray((48, 1), nl.float32)
        nisa.dma_copy(tile, h.reshape((1, 48)))
        nisa.dma_copy(o, tile)

    assert np.array_equal(moved(row_to_column, (48, 1), x), x.reshape(48, 1))


ROWS = np.array([[3], [0], [9], [3], [-1]], np.int32)  # of a table of 6: two are out of bounds


def rows_tile(h):
    tile = nl.ndarray((5, 1), nl.int32)
    nisa.dma_copy(tile, h)
    return tile


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.warns("sim_duplicate_rows")
def test_scatters_skip_rows_out_of_bounds(add):
    values = data(40, (5, 4))

    def body(o, h, i):
        tile = nl.load(h)
        target = o.vector_select(0, rows_tile(i))
        if add:
            nisa.dma_compute(target, [tile, target], nl.add, oob_mode=nisa.oob_mode.skip)
        else:
            nisa.dma_copy(target, tile, oob_mode=nisa.oob_mode.skip)

    want = np.full((6, 4), FILL, np.float64)
    for row, at in enumerate(ROWS[:, 0]):
        if 0 <= at < 6:
            want[at] = want[at] + values[row] if add else values[row]
    if not add:  # the order of duplicate rows is open
        found = moved(body, (6, 4), values, ROWS)
        assert np.array_equal(found[0], want[0]) and np.array_equal(found[4], want[4])
        assert any(np.array_equal(found[3], values[k]) for k in (0, 3))
    else:
        close(moved(body, (6, 4), values, ROWS), want)


# --- random numbers -------------------------------------------------------------------------------
@pytest.mark.warns("sim_dropout_probability", "sim_random_stream")
def test_random_numbers_repeat_with_their_seed(target):
    target("trn3")

    def body(d, t, seed):
        nisa.set_rng_seed(seed)
        nisa.rand2(d, 2.0, 5.0)

    x = data(41, (8, 64))
    seeds = [np.array([[s]], np.uint32) for s in (1, 1, 2)]
    found = [run(body, (8, 64), x, s) for s in seeds]
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    assert found[0].min() >= 2.0 and found[0].max() < 5.0 and abs(found[0].mean() - 3.5) < 0.2
    bits = run(lambda d, t: nisa.rng(d), (8, 64), x, dtype="uint32", fill=0)
    ones = sum(bin(int(v)).count("1") for v in bits.reshape(-1))
    assert abs(ones / (32 * bits.size) - 0.5) < 0.02
    kept = run(lambda d, t: nisa.dropout(d, t, 0.25), (8, 64), x + 10)
    assert 0.1 < (kept == 0).mean() < 0.4 and np.array_equal(kept[kept != 0], (x + 10)[kept != 0])
