"""``nki.language``: functions against float64, promotion, masks, loops, rows, constants."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import Kernel, NkiError, NkiWarning
from neuron_cpu.core.run.execute import Plan
from tests.core.test_isa import assert_close, data, run, wide

few = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def quiet():
    """Functions of releases after 2.21 warn; here they are the subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- functions ------------------------------------------------------------------------------------
UNARY = {"abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_rounding_functions_are_exact(name):
    a = np.array(
        [[0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 8388607.5, 1e30, -1e30, 1e-30, -1e-30]], "f4"
    )
    assert np.array_equal(run(getattr(nl, name), a), UNARY[name](a))


@few
@given(seed=st.integers(0, 99), reach=st.sampled_from([1.0, 10.0, 1000.0]))
def test_cosine_and_tangent_reduce_their_argument(seed, reach):
    a = data(seed, (17, 30), low=-reach, high=reach)
    # x itself has a relative error of 2^-24: absolute, reach * 6e-8 in the angle
    assert np.abs(wide(run(nl.cos, a)) - np.cos(wide(a))).max() < 2e-6 + reach * 2e-7
    tangent, slope = np.tan(wide(a)), 1 + np.tan(wide(a)) ** 2
    worst = np.abs(wide(run(nl.tan, a)) - tangent) / slope
    assert worst.max() < 4e-6 + reach * 2e-7


@few
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_statistics(shape, seed):
    a = data(seed, shape)
    assert_close(run(lambda x: nl.mean(x, axis=[2]), a), wide(a).mean(2), "float32", 20)
    got = run(lambda x: nl.var(x, axis=[1, 2]), a)
    assert_close(got, wide(a).var((1, 2))[:, None], "float32", 40)
    flags = (a > -3.5).astype(np.float32)
    got = run(lambda x: nl.all(x, axis=[1, 2], dtype=nl.uint8), flags)
    assert np.array_equal(got[:, 0] != 0, flags.all((1, 2)))


def test_rms_norm():
    a, w = data(1, (70, 96), "bfloat16"), data(2, (1, 96), "bfloat16")
    got = run(lambda x, v: nl.rms_norm(x, v, axis=1, n=96, epsilon=1e-5, dtype=nl.float32), a, w)
    scale = (wide(a) ** 2).mean(1, keepdims=True) + 1e-5
    assert_close(got, wide(a) / np.sqrt(scale) * wide(w), "float32", 10)


@pytest.mark.parametrize("left, right", [((9, 1), (9, 7)), ((1, 7), (9, 7)), ((9, 7), (1, 1))])
def test_functions_broadcast_like_numpy(left, right):
    a, b = data(1, left), data(2, right)
    for name in ("add", "multiply", "maximum", "subtract"):
        got = run(getattr(nl, name), a, b)
        assert_close(got, getattr(np, name)(wide(a), wide(b)), "float32", 2)


def test_where_takes_tiles_and_numbers():
    a, b = data(1, (5, 6)), data(2, (5, 6))
    assert np.array_equal(run(lambda x, y: nl.where(x > 0, x, y), a, b), np.where(a > 0, a, b))
    assert np.array_equal(run(lambda x: nl.where(x > 0, x, 0.0), a), np.where(a > 0, a, 0))

    def of_indices(x):
        i, j = nl.mgrid[0 : a.shape[0], 0 : a.shape[1]]
        return nl.where(condition=(i >= j) & (j < 3), x=x, y=-1e30)

    i, j = np.mgrid[0 : a.shape[0], 0 : a.shape[1]]
    assert np.array_equal(run(of_indices, a), np.where((i >= j) & (j < 3), a, np.float32(-1e30)))


PROMOTED = [
    ("bfloat16", 0.5, "float32"), ("bfloat16", 2, "bfloat16"), ("float16", 1.25, "float32"),
    ("int8", 2, "int32"), ("uint8", np.float16(2), "float16"), ("int16", np.int32(1), "int32"),
    ("bfloat16", np.float16(2), "float32"),
]  # fmt: skip


@pytest.mark.parametrize("kind, scalar, expected", PROMOTED)
def test_scalars_are_weak_to_the_widest_type(kind, scalar, expected):
    seen = []

    def body(x):
        made = x * scalar
        seen.append(made.dtype)
        return nl.copy(made, dtype=nl.float32)

    run(body, data(1, (2, 3), kind))
    assert seen == [getattr(nl, expected)]


@pytest.mark.parametrize("a, b, expected", [
    ("float32", "bfloat16", "float32"), ("float16", "bfloat16", "float32"),
    ("int8", "uint8", "int16"), ("int8", "uint16", "int32"), ("uint16", "int32", "int32"),
    ("int32", "uint32", "float32"), ("int32", "bfloat16", "bfloat16"),
    ("float8_e4m3", "float8_e5m2", "bfloat16"), ("float8_e4m3", "float16", "float16"),
])  # fmt: skip
def test_binary_functions_promote(a, b, expected):
    seen = []

    def body(x, y):
        made = nl.add(x, y)
        seen.append(made.dtype)
        return made

    run(body, data(1, (2, 3), a), data(2, (2, 3), b))
    assert seen == [getattr(nl, expected)]
    assert run(lambda x, y: x > y, data(1, (2, 3), a), data(2, (2, 3), b)).dtype == np.bool_


# --- loops ----------------------------------------------------------------------------------------
def test_loop_reduce_combines_into_the_destination():
    a = data(1, (8, 12))

    def sums(x):
        out = nl.zeros((8, 3), nl.float32)
        for k in nl.affine_range(4):
            out[...] = nl.loop_reduce(
                x[:, 3 * k : 3 * k + 3], op=np.add, loop_indices=[k], dtype=nl.float32
            )
        return out

    def maxima(x):
        best = nl.full((8, 3), -99.0, nl.float32)
        for k in nl.affine_range(4):
            best = nl.loop_reduce(x[:, 3 * k : 3 * k + 3], op=np.max, loop_indices=[k])
        return best

    parts = wide(a).reshape(8, 4, 3)
    assert_close(run(sums, a), parts.sum(1), "float32", 4)
    assert np.array_equal(wide(run(maxima, a)), parts.max(1))


def test_zeros_in_shared_hbm_are_of_2_21(monkeypatch):
    @nki.jit
    def kernel(a):
        out = nl.zeros((300, 700), nl.float32, buffer=nl.shared_hbm)
        nl.store(out[0:4, 0:9], nl.load(a))
        return out

    values = np.arange(36, dtype=np.float32).reshape(4, 9)
    want = np.zeros((300, 700), np.float32)
    want[:4, :9] = values
    assert np.array_equal(kernel(values), want)
    monkeypatch.setenv("NEURON_CPU_SDK", "2.22")
    with pytest.raises(NkiError, match="err_hbm_tensor_with_init_value_not_supported"):
        kernel.trace(torch.empty(4, 9, device="meta"))


def test_loop_reduce_needs_a_tile():
    def body(x):
        for k in nl.affine_range(2):
            made = nl.loop_reduce(x, op=np.add, loop_indices=[k])
        return made

    with pytest.raises(NkiError, match="sim_loop_reduce_target"):
        run(body, data(1, (2, 2)))


@pytest.mark.parametrize("grid", [(3,), (2, 2)])
def test_grid_instances(grid):
    count = int(np.prod(grid))
    a = data(1, (count * 8, 5))

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        at = nl.program_id(0)
        if nl.program_ndim() == 2:
            at = at * nl.num_programs(1) + nl.program_id(1)
        tile = nl.load(x[nl.ds(at * 8, 8), :])
        nl.store(out[nl.ds(at * 8, 8), :], nl.multiply(tile, at + nl.num_programs()))
        return out

    scale = np.repeat(np.arange(count) + count, 8)[:, None]
    assert np.array_equal(kernel[grid](a), (a * scale).astype(np.float32))


def test_grid_axes_of_cores():
    assert nl.nc(2) * 2 == 2 * nl.nc(2) == nl.spmd_dim(nl.nc(2), 2) == 4


# --- indirect rows --------------------------------------------------------------------------------
@nki.jit
def rows_added(x, where, start):
    out = nl.ndarray((9, 4), nl.float32, buffer=nl.shared_hbm)
    if start is not None:
        nisa.dma_copy(src=start, dst=out)
    i, j = nl.arange(8)[:, None], nl.arange(4)[None, :]
    at = nl.load(where)
    nl.atomic_rmw(out[at[i, 0], j], nl.load(x), op=np.add)
    return out


def test_atomic_rmw_adds_duplicates():
    a, index = data(1, (8, 4)), np.array([[0], [2], [2], [2], [5], [5], [7], [0]], np.int32)
    start = data(2, (9, 4))
    expected = wide(start).copy()
    np.add.at(expected, index[:, 0], wide(a))
    assert_close(rows_added(a, index, start), expected, "float32", 4)


def test_atomic_rmw_needs_what_it_adds_to():
    with pytest.raises(NkiError, match="sim_undefined_data"):
        rows_added(data(1, (8, 4)), np.zeros((8, 1), np.int32), None)


# --- constants, types, printing -------------------------------------------------------------------
def test_identity_defaults_to_bytes():
    got = run(lambda _: nl.load(nl.shared_identity_matrix(5)), np.zeros((1, 1), "f4"))
    assert got.dtype == np.uint8 and np.array_equal(got, np.eye(5))


def test_limits_and_casts():
    assert float(nl.finfo(nl.bfloat16).max) == 3.3895313892515355e38
    assert nl.fp32.min == np.finfo(np.float32).min
    assert nl.static_cast(2.7, nl.int32) == 2
    assert np.array_equal(
        run(lambda x: nl.static_cast(x, nl.int32), np.array([[1.6]], "f4")), [[2]]
    )


def test_device_print_outside_of_eager_mode_says_so():
    def body(x):
        nl.device_print("x", x)
        return x

    with pytest.warns(NkiWarning, match="sim_device_print"):
        run(body, data(1, (2, 2)))


# --- views ----------------------------------------------------------------------------------------
def test_strided_five_dimensional_view_pools():
    a = data(1, (4, 6, 8))

    def body(x):
        i0 = nl.arange(4)[:, None, None, None, None]
        i1 = nl.arange(3)[None, :, None, None, None]
        i2 = nl.arange(2)[None, None, :, None, None]
        i3 = nl.arange(4)[None, None, None, :, None]
        i4 = nl.arange(2)[None, None, None, None, :]
        return nisa.tensor_reduce(np.max, x[i0, 2 * i1 + i2, 2 * i3 + i4], axis=[2, 4])

    assert np.array_equal(run(body, a), a.reshape(4, 3, 2, 4, 2).max((2, 4)))


def test_assignment_outside_of_a_tile_is_refused_unless_masked():
    def body(bound):
        def shifted(x):
            out = nl.zeros((8, 6), nl.float32)
            i, j = nl.mgrid[0:8, 0:6]
            out[i, j + 1] = nl.multiply(x, 2.0, mask=j < bound)
            return out

        return shifted

    a = data(1, (8, 6))
    expected = np.zeros((8, 6))
    expected[:, 1:] = 2 * wide(a)[:, :5]
    assert np.array_equal(wide(run(body(5), a)), expected)
    with pytest.raises(NkiError, match="err_tensor_access_out_of_bound"):
        run(body(6), a)


@pytest.mark.parametrize("axes, op", [(0, np.add), (1, np.max), ([0, 1], np.add)])
def test_all_reduce_over_a_grid(axes, op):
    a = data(1, (2, 3, 16, 5))

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        i, j = nl.program_id(0), nl.program_id(1)
        part = nl.multiply(nl.load(x[i, j]), 2.0)
        total = nl.all_reduce(part, op=op, program_axes=axes)
        again = nl.all_reduce(nl.subtract(total, part), op=op, program_axes=axes)
        nl.store(out[i, j], nl.add(again, part))
        return out

    reduce, over = (np.max if op is np.max else np.sum), tuple(np.atleast_1d(axes).tolist())
    part = 2 * wide(a)
    rest = reduce(part, axis=over, keepdims=True) - part
    expected = reduce(rest, axis=over, keepdims=True) + part
    assert_close(kernel[2, 3](a), expected, "float32", 30)


def test_all_reduce_needs_all_instances():
    @nki.jit
    def kernel(x):
        out = nl.ndarray((3, 4, 4), x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        if nl.program_id(0) < 2:
            tile = nl.all_reduce(tile, np.add, 0)
        nl.store(out[nl.program_id(0)], tile)
        return out

    with pytest.raises(NkiError, match="sim_all_reduce_incomplete"):
        kernel[3](data(1, (4, 4)))


@pytest.mark.parametrize("name", ["gemm_grid", "gemm_stationary_grid"])
def test_functions_without_a_public_description_say_so(name):
    with pytest.raises(NotImplementedError, match=name):
        getattr(nl, name)(256, 256)


# --- the same merged, one by one and eager --------------------------------------------------------
MODES = pytest.mark.parametrize("mode", ["merged", "single", "eager"])


def compute(mode, function, *inputs):
    """The kernel's first result: loops merged, instruction by instruction, or while tracing."""
    if mode == "eager":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NKI_CPU_EAGER", "1")
            return Kernel(function)(*inputs)
    program = Kernel(function).trace(*(x.to("meta") for x in inputs))
    return Plan(program, merge_loops=mode == "merged").run(list(inputs))[0]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@MODES
def test_scattered_rows_leave_out_what_the_mask_does(mode):
    def kernel(x, rows):
        out = nl.zeros((100, 16), nl.float32, buffer=nl.shared_hbm)
        at, tile = nl.load(rows), nl.load(x)
        p, f = nl.arange(64)[:, None], nl.arange(16)[None, :]
        nl.store(out[at[p, 0], f], value=tile[p, f], mask=(p < 50) & (f >= p - 40))
        return out

    x, rows = numbers(64, 16), torch.randperm(100)[:64].int()[:, None]
    p, f = torch.arange(64)[:, None], torch.arange(16)[None, :]
    wanted = torch.zeros(100, 16)
    wanted[rows[:, 0]] = torch.where((p < 50) & (f >= p - 40), x, 0.0)
    assert torch.equal(compute(mode, kernel, x, rows), wanted)


# --- sums over a loop -----------------------------------------------------------------------------
REDUCED = {"add": torch.sum, "multiply": torch.prod, "maximum": torch.amax, "minimum": torch.amin}


@MODES
@pytest.mark.parametrize("name", REDUCED)
def test_loop_reduce_over_a_fresh_tile_begins_with_nothing(mode, name):
    operator = getattr(np, name)

    def kernel(x):
        out = nl.ndarray((128, 4), nl.float32, buffer=nl.shared_hbm)
        total = nl.ndarray((128, 4), nl.float32)
        for k in nl.affine_range(3):
            total[...] = nl.loop_reduce(nl.load(x[k]), op=operator, loop_indices=[k])
        nl.store(out, value=total)
        return out

    x = numbers(3, 128, 4)
    torch.testing.assert_close(compute(mode, kernel, x), REDUCED[name](x, dim=0))
