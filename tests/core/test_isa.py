"""Instructions against independent float64 references, over their types and odd shapes.

Both languages record the same instructions: what is not here is in tests/nki.

Tolerances, relative to the largest magnitude of the reference: one unit in the last place of the
result type (results are computed in fp32 and rounded once), and for fp32 results 2e-6 for single
operations, with sums adding one rounding per element.
"""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import NkiError, NkiWarning
from tests.core.test_refusals import kernel_of

ULP = {
    "float32": 2e-6,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "tfloat32": 2.0**-11,
}
FLOATS = ["float32", "bfloat16", "float16"]
INTEGERS = ["int32", "int16", "int8", "uint32", "uint16", "uint8"]
few = settings(max_examples=6, deadline=None, derandomize=True)
shapes = st.tuples(st.integers(1, 128), st.integers(1, 65))


@pytest.fixture(autouse=True)
def quiet():
    """Functions of releases after 2.21 warn; here they are the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(body, *inputs):
    """What the tile that ``body`` returns holds, for numpy inputs loaded whole."""

    @nki.jit
    def kernel(*hbm):
        tiles = [nl.load(t) for t in hbm]
        made = body(*tiles)
        out = nl.ndarray(made.shape, made.dtype, buffer=nl.shared_hbm)
        nl.store(out, made)
        return out

    return kernel(*inputs)


def data(seed, shape, dtype="float32", low=-4.0, high=4.0):
    generator = np.random.default_rng(seed)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    return generator.uniform(low, high, shape).astype(kind)


def wide(x):
    return np.asarray(x, dtype=np.float64)


def assert_close(got, reference, dtype, steps=1):
    """Within ``steps`` units of the last place of ``dtype`` at the largest magnitude."""
    assert got.shape == reference.shape
    limit = steps * ULP[dtype] * max(np.abs(reference).max(), 1e-30)
    worst = np.abs(wide(got) - reference).max()
    assert worst <= limit, f"off by {worst}, allowed {limit}"


# --- VectorE --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "uint16", "int8"])
def test_shifts_are_logical(kind):
    a = data(5, (4, 9), kind)
    unsigned = a.view("u" + kind.lstrip("u"))
    right = run(lambda x: nisa.tensor_scalar(x, nl.right_shift, 3), a)
    left = run(lambda x: nisa.tensor_scalar(x, nl.left_shift, 2), a)
    assert np.array_equal(right.view(unsigned.dtype), unsigned >> 3)
    assert np.array_equal(left.view(unsigned.dtype), unsigned << 2)
    assert np.array_equal(run(nl.invert, a), ~a)


REDUCE = {"add": np.sum, "maximum": np.max, "minimum": np.min}


@pytest.mark.parametrize("op", sorted(REDUCE))
@few
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 7), st.integers(1, 5)),
    axes=st.integers(1, 3),
    negate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tensor_reduce(op, shape, axes, negate, seed):
    a = data(seed, shape, "bfloat16")
    axis = tuple(range(4 - axes, 4))
    got = run(
        lambda x: nisa.tensor_reduce(
            getattr(nl, op), x, axis, dtype=nl.float32, negate=negate, keepdims=True
        ),
        a,
    )
    reference = REDUCE[op](wide(a), axis=axis, keepdims=True) * (-1 if negate else 1)
    assert_close(got, reference, "float32", math.prod(shape[1:]))


# --- scans and statistics -------------------------------------------------------------------------
@pytest.mark.parametrize("reverse", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ops", [(nl.multiply, nl.add), (nl.subtract, nl.maximum)])
@pytest.mark.parametrize("vector", [False, True])
def test_scan_carries_the_previous_result(ops, reverse, vector):
    a, b, column = data(3, (7, 33), low=-0.9, high=0.9), data(4, (7, 33)), data(5, (7, 1))

    def body(x, y, first):
        turned = {"reverse0": reverse[0], "reverse1": reverse[1]}
        return nisa.tensor_tensor_scan(x, y, first if vector else 0.25, *ops, **turned)

    found = run(body, a, b, column)
    state = wide(column)[:, 0] if vector else np.full(7, 0.25)
    one, other = (getattr(np, op.__name__) for op in ops)
    for i in range(33):
        step = one(*((state, a[:, i]) if reverse[0] else (a[:, i], state)))
        state = other(*((b[:, i], step) if reverse[1] else (step, b[:, i])))
        np.testing.assert_allclose(found[:, i], state, rtol=1e-4, atol=1e-5)


def test_scan_refuses_bitwise_operators():
    a = np.zeros((4, 8), np.float32)
    with pytest.raises(NkiError, match="bitwise_and"):
        run(lambda x: nisa.tensor_tensor_scan(x, x, 0.0, nl.bitwise_and, nl.add), a)


@pytest.mark.parametrize("columns", [1, 2, 7, 512, 1000, 1337])
def test_statistics_of_pieces_aggregate_to_mean_and_variance(columns):
    def body(tile):
        starts = range(0, columns, 512)
        parts = nl.ndarray((50, 6 * len(starts)), dtype=nl.float32)
        for k, at in enumerate(starts):
            parts[:, 6 * k : 6 * k + 6] = nisa.bn_stats(tile[:, at : min(at + 512, columns)])
        return nisa.bn_aggr(parts)

    x = (np.random.default_rng(0).standard_normal((50, columns)) * 5 + 100).astype(np.float32)
    found = run(body, x)
    np.testing.assert_allclose(found[:, 0], wide(x).mean(1), rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], wide(x).var(1), rtol=1e-4, atol=1e-6)


def test_statistics_keep_even_and_odd_positions_apart():
    found = run(nisa.bn_stats, np.array([[1, 10, 3, 20, 5]], np.float32))
    np.testing.assert_allclose(found, [[3, 3, 8, 2, 15, 50]])


# --- ScalarE --------------------------------------------------------------------------------------


@few
@given(shape=shapes, kind=st.sampled_from(FLOATS), vector=st.booleans(), seed=st.integers(0, 99))
def test_activation_scale_and_bias(shape, kind, vector, seed):
    a, bias = data(seed, shape, kind), data(seed + 1, (shape[0], 1), kind)
    scale = data(seed + 2, (shape[0], 1))

    def body(x, b, s):
        return nisa.activation(np.tanh, x, bias=b, scale=s if vector else 0.5, dtype=nl.float32)

    factor = wide(scale) if vector else 0.5
    assert_close(run(body, a, bias, scale), np.tanh(wide(a) * factor + wide(bias)), "float32", 4)


def test_activation_reduce_sums_before_the_cast():
    a = data(8, (128, 300))

    def body(x):
        total = nl.ndarray((128, 1), nl.float32)
        nisa.activation_reduce(np.exp, x, reduce_op=np.add, reduce_res=total, dtype=nl.bfloat16)
        return total

    assert_close(run(body, a), np.exp(wide(a)).sum(1, keepdims=True), "float32", 300)


# --- GpSimdE and selection ------------------------------------------------------------------------
@few
@given(shape=shapes, shift=st.integers(-20, 20), seed=st.integers(0, 99))
def test_affine_select(shape, shift, seed):
    a = data(seed, shape, "bfloat16")

    def body(x):
        i, j = nl.arange(shape[0])[:, None], nl.arange(shape[1])[None, :]
        return nisa.affine_select(i + shift >= 2 * j, x, -9984.0)

    i, j = np.ogrid[: shape[0], : shape[1]]
    assert np.array_equal(wide(run(body, a)), np.where(i + shift >= 2 * j, wide(a), -9984.0))


@few
@given(rows=st.integers(1, 128), n=st.integers(8, 40), seed=st.integers(0, 99))
def test_eight_largest_and_where_they_are(rows, n, seed):
    order = np.random.default_rng(seed).permuted(np.tile(np.arange(n), (rows, 1)), axis=1)
    a = order.astype(np.float32)
    assert np.array_equal(run(lambda x: nisa.max8(src=x), a), np.sort(a, 1)[:, :-9:-1])
    found = run(lambda x: nisa.nc_find_index8(data=x, vals=nisa.max8(src=x)), a)
    assert found.dtype == np.uint32
    assert np.array_equal(found, np.argsort(-a, 1)[:, :8])
    left = run(lambda x: nisa.nc_match_replace8(data=x, vals=nisa.max8(src=x), imm=-1.0), a)
    assert np.array_equal(left, np.where(a >= n - 8, -1.0, a))


@few
@given(cores=st.integers(1, 8), width=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_local_gather(cores, width, seed):
    generator = np.random.default_rng(seed)
    a = data(seed, (16 * cores, 12 * width))
    index = (generator.integers(0, 12, (16 * cores, 3)) * width).astype(np.uint16)
    count = int(generator.integers(1, 49))
    got = run(lambda x, i: nisa.local_gather(x, i, width, count), a, index)
    for core in range(cores):
        own = slice(16 * core, 16 * core + 16)
        offsets = index[own].flatten(order="F")[:count].astype(int)
        reference = a[own][:, offsets[:, None] + np.arange(width)]
        assert np.array_equal(got[own].reshape(reference.shape), reference)
        assert got.shape[1:] == ((3, 16, width) if count == 48 else (count, width))


def test_gathers_refuse_indices_outside():
    a, index = data(0, (16, 8)), np.full((16, 1), 8, np.uint16)
    with pytest.raises(NkiError, match="err_tensor_access_out_of_bound"):
        run(lambda x, i: nisa.local_gather(x, i), a, index)


def test_gather_flattened():
    a = data(1, (7, 3, 5))
    index = np.random.default_rng(2).integers(0, 15, (7, 9)).astype(np.uint32)
    got = run(nl.gather_flattened, a, index)
    assert np.array_equal(got, np.take_along_axis(a.reshape(7, 15), index.astype(int), 1))


# --- run-time offsets -----------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [0, 3, 7])
def test_copy_from_and_to_a_run_time_offset(offset):
    a, where = data(1, (16, 12), "bfloat16"), np.array([[offset]], np.int32)

    def source(x, o):
        i, j = nl.arange(16)[:, None], nl.arange(5)[None, :]
        return nisa.tensor_copy_dynamic_src(x[i, o[0, 0] + j])

    def target(x, o):
        i, j = nl.arange(16)[:, None], nl.arange(5)[None, :]
        out = nl.zeros((16, 12), nl.bfloat16)
        nisa.tensor_copy_dynamic_dst(dst=out[i, o[0, 0] + j], src=x[i, j])
        return out

    assert np.array_equal(wide(run(source, a, where)), wide(a)[:, offset : offset + 5])
    placed = np.zeros((16, 12))
    placed[:, offset : offset + 5] = wide(a)[:, :5]
    assert np.array_equal(wide(run(target, a, where)), placed)


def test_run_time_offset_outside_of_the_row_is_refused():
    def body(x, o):
        i, j = nl.arange(16)[:, None], nl.arange(5)[None, :]
        return nisa.tensor_copy_dynamic_src(x[i, o[0, 0] + j])

    with pytest.raises(NkiError, match="err_tensor_access_out_of_bound.*|.*expected 0 to 7"):
        run(body, data(1, (16, 12)), np.array([[8]], np.int32))


# --- DMA ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, order", [((9, 5), (1, 0)), ((3, 4, 6), (2, 1, 0)), ((2, 3, 4, 5), (3, 1, 2, 0))]
)
def test_dma_transpose(shape, order):
    a = data(1, shape, "bfloat16")

    @nki.jit
    def kernel(x):
        made = nisa.dma_transpose(x)
        out = nl.ndarray(made.shape, made.dtype, buffer=nl.shared_hbm)
        nl.store(out, made)
        return out

    assert np.array_equal(wide(kernel(a)), wide(a).transpose(order))


def test_transfers_that_a_devices_compiler_refused_are_refused(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    i, j = nl.arange(128)[:, None], nl.arange(8)[None, :]

    @nki.jit
    def repeated(x):
        out, tile = (
            nl.ndarray((128, 8), x.dtype, buffer=nl.shared_hbm),
            nl.ndarray((128, 8), x.dtype),
        )
        nisa.dma_copy(src=x[i * 0, j], dst=tile[i, j])
        nl.store(out, tile)
        return out

    @kernel_of
    def turned(x):
        return nisa.dma_transpose(x)

    for kernel, said in (
        (repeated, "IBCG901.*sim_refused_on_device"),
        (turned, "ISFV902.*sim_transposed_words"),
    ):
        with pytest.raises(NkiError, match=said):
            kernel(data(1, (1, 8)))


def test_dma_copy_adds_where_asked():
    a = data(1, (130, 4))

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(x, out)
        nisa.dma_copy(src=x, dst=out, dst_rmw_op=np.add)
        return out

    assert np.array_equal(kernel(a), 2 * a)


def test_instructions_of_newer_cores_are_refused():
    with pytest.raises(NkiError, match="range_select is there from gen3 on.*sim_newer_core"):
        run(lambda x: nisa.range_select(on_true_tile=x), data(0, (4, 4)))


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("reduced", [False, True])
def test_columns_between_two_bounds_on_a_newer_core(start, reduced, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_CPU_SDK", "2.23")
    low, high = np.array([[0], [3], [5], [9]], np.float32), np.full((4, 1), 12, np.float32)
    x = data(23, (4, 16))

    def body(t, a, b):
        out = nl.ndarray((4, 17), dtype=t.dtype, buffer=nl.sbuf)
        out[...] = 7.0
        more = {"reduce_res": out[:, 16:17], "reduce_op": np.max} if reduced else {}
        bounds = {"bound0": a, "bound1": b, "comp_op0": np.greater_equal, "comp_op1": np.less}
        out[:, 0:16] = nisa.range_select(on_true_tile=t, range_start=start, **bounds, **more)
        return out

    number = start + np.arange(16)
    want = np.where((number >= low) & (number < high), x, np.finfo(np.float32).min)
    most = want.max(1, keepdims=True) if reduced else np.full((4, 1), 7.0)
    assert np.array_equal(run(body, x, low, high), np.concatenate([want, most], 1))


def test_a_range_is_refused_in_words(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_CPU_SDK", "2.23")

    def made(**more):
        given = {"comp_op0": np.less, "comp_op1": np.less, **more}
        return lambda t, b: nisa.range_select(on_true_tile=t, bound0=b, bound1=b, **given)

    x, column = data(23, (4, 16)), np.zeros((4, 1), np.float32)
    for more, message in (
        ({"on_false_value": 0.0}, "on_false_value=0.0.*sim_range_select"),
        (
            {"reduce_cmd": nisa.reduce_cmd.reduce},
            "reduce_cmd.reduce, expected.*sim_reduce_registers",
        ),
        ({"comp_op1": np.add}, "with nl.add, expected one of equal.*sim_unknown_operator"),
    ):
        with pytest.raises(NkiError, match=message):
            run(made(**more), x, column)


def test_a_program_of_others_cannot_be_called():
    with pytest.raises(NotImplementedError, match="builtin_custom_op"):
        run(lambda x: nisa.builtin_custom_op(x), data(0, (4, 4)))


# --- random numbers -------------------------------------------------------------------------------
def test_random_numbers_are_reproducible_and_uniform():
    def body(seed):
        def draw(_):
            nl.random_seed(seed)
            tiles = nl.ndarray((128, 2, 300), nl.float32)
            for k in nl.static_range(2):
                tiles[:, k, :] = nl.rand((128, 300))
            return tiles

        return run(draw, np.zeros((1, 1), np.float32))

    first, again, other = body(7), body(7), body(8)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[:, 0], first[:, 1])
    assert first.min() >= 0 and first.max() < 1
    assert abs(first.mean() - 0.5) < 0.01  # 4 standard errors of 76800 draws


# --- operators ------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", [np.divide, np.exp, nl.tanh, "modulo"])
def test_what_no_alu_does_is_refused(op):
    a = data(1, (4, 4))
    for body in (lambda x: nisa.tensor_scalar(x, op, 2.0), lambda x: nisa.tensor_tensor(x, x, op)):
        with pytest.raises(NkiError, match="sim_unknown_operator"):
            run(body, a)


def test_operators_of_one_operand():
    a = data(1, (5, 6), low=0.5)
    got = run(lambda x: nisa.tensor_scalar(x, nl.reciprocal, 0, op1=nl.abs, operand1=0), a)
    assert_close(got, 1 / wide(a), "float32")
    got = run(lambda x: nisa.tensor_scalar(x, np.add, 1.0, op1=nl.rsqrt, operand1=0.0), a)
    assert_close(got, (wide(a) + 1) ** -0.5, "float32", 2)
    flags = np.array([[0.0, 2.0, -1.0, 0.0]], np.float32)
    assert run(nl.logical_not, flags).tolist() == [[True, False, False, True]]


NUMPY_REDUCTIONS = [np.max, np.min, np.sum, np.prod, np.add, np.maximum, nl.max, nl.prod]


# A ufunc of numpy before 2.2 names no module.
@pytest.mark.parametrize(
    "op", NUMPY_REDUCTIONS, ids=lambda op: f"{getattr(op, '__module__', 'numpy')}.{op.__name__}"
)
def test_numpy_functions_are_operators(op):
    a = data(1, (4, 5), low=0.5, high=1.5)
    reference = {
        "max": np.max,
        "maximum": np.max,
        "min": np.min,
        "sum": np.sum,
        "add": np.sum,
        "prod": np.prod,
        "multiply": np.prod,
        "minimum": np.min,
    }[op.__name__]
    got = run(lambda x: nisa.tensor_reduce(op, x, axis=[1]), a)
    assert_close(got, reference(wide(a), axis=1, keepdims=True), "float32", 5)


# --- integers beyond 2^24 -------------------------------------------------------------------------
LARGE = np.array([[29360769, -16777217, 2**24 - 3, 5]], np.int32)


@pytest.mark.parametrize("release", ["2.21", "2.25", "2.26"])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply"])
def test_large_integers_are_exact_or_told_of(monkeypatch, release, name):
    """fp32 on VectorE, and since 2.26 exact on GpSimdE; a table of blocks in vLLM's test is so."""
    monkeypatch.setenv("NEURON_CPU_SDK", release)
    other = np.array([[2, 3, 1, 7]], np.int32)
    want = getattr(np, name)(LARGE, other)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run(lambda a, b: nisa.tensor_tensor(a, b, getattr(np, name)), LARGE, other)
    told = [w for w in told if "sim_inexact_integers" in str(w.message)]
    if release == "2.26":
        assert np.array_equal(found, want) and not told
    else:
        assert not np.array_equal(found, want) and "29360769" in str(told[0].message)


# --- GpSimdE has no PSUM port ---------------------------------------------------------------------
IN_PSUM = {
    "tensor_tensor": lambda p, t: nisa.tensor_tensor(p, t, np.add, engine=nisa.gpsimd_engine),
    "tensor_scalar": lambda p, t: nisa.tensor_scalar(p, np.add, 1.0, engine=nisa.gpsimd_engine),
}
INTO_PSUM = {
    "memset": lambda t: nisa.memset((16, 16), 1.0, np.float32, engine=nisa.gpsimd_engine),
    "iota": lambda t: nisa.iota(nl.arange(16)[:, None] + nl.arange(16)[None, :], np.float32),
    "tensor_tensor": lambda t: nisa.tensor_tensor(t, t, np.add, engine=nisa.gpsimd_engine),
}


@pytest.mark.parametrize("name", IN_PSUM)
def test_gpsimd_reads_no_psum(name):
    x = data(90, (16, 16))
    with pytest.raises(NkiError, match="err_unsupported_memory"):
        run(lambda t: IN_PSUM[name](nisa.nc_transpose(t), t), x)


@pytest.mark.parametrize("name", INTO_PSUM)
def test_gpsimd_writes_no_psum(name):
    def body(t):
        made = nl.ndarray((16, 16), nl.float32, buffer=nl.psum)
        made[...] = INTO_PSUM[name](t)
        return nl.copy(made)

    with pytest.warns(NkiWarning, match="sim_gpsimd_psum"):
        run(body, data(91, (16, 16)))


def test_a_number_goes_to_one_element():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x).as_tile())
        nl.store(out[1, 1], value=1.0)
        return out

    want = np.zeros((4, 4), np.float32)
    want[1, 1] = 1.0
    assert np.array_equal(kernel(np.zeros((4, 4), np.float32)), want)
