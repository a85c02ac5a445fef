"""Merged execution gives the bits of instruction-by-instruction execution, on generated loop nests.

Inputs are small integers, so that fp32 sums are exact in any order and results must be equal to the
bit. What merging must leave apart has a test of its own.
"""

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronxcc import nki

from neuron_cpu.core.run.execute import Plan
from tests.core.test_refusals import kernel_of

MANY = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
RANGES = {"affine": nl.affine_range, "sequential": nl.sequential_range, "static": nl.static_range}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def integers(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def both(kernel, *inputs):
    """The first output, merged and one by one."""
    program = kernel.trace(*inputs)
    merged, single = (Plan(program, on).run(list(inputs))[0] for on in (True, False))
    return merged, single


def check_equal(kernel, *inputs):
    """The first output, once merged execution gave the same bits."""
    merged, single = both(kernel, *inputs)
    assert torch.equal(merged, single), f"differ by {(merged - single).abs().max()}"
    return single


# --- matrix products ------------------------------------------------------------------------------
def tiled_product(kinds, order, tile, stationary_first):
    """``lhs_t.T @ rhs`` (or its transpose) with tails on every axis, m and n in any order."""
    tm, tn, tk = tile

    @nki.jit
    def kernel(lhs_t, rhs):
        (k_size, m_size), n_size = lhs_t.shape, rhs.shape[1]
        shape = (m_size, n_size) if stationary_first else (n_size, m_size)
        out = nl.ndarray(shape, dtype=lhs_t.dtype, buffer=nl.shared_hbm)
        counts = {"m": -(-m_size // tm), "n": -(-n_size // tn)}
        for p in RANGES[kinds[0]](counts[order[0]]):
            for q in RANGES[kinds[1]](counts[order[1]]):
                at = {order[0]: p, order[1]: q}
                m, n = at["m"] * tm, at["n"] * tn
                columns, rows = nl.ds(m, min(tm, m_size - m)), nl.ds(n, min(tn, n_size - n))
                place = (columns, rows) if stationary_first else (rows, columns)
                acc = nl.zeros([s.stop - s.start for s in place], nl.float32, buffer=nl.psum)
                for k in RANGES[kinds[2]](-(-k_size // tk)):
                    inner = nl.ds(k * tk, min(tk, k_size - k * tk))
                    left, right = nl.load(lhs_t[inner, columns]), nl.load(rhs[inner, rows])
                    if stationary_first:
                        acc += nisa.nc_matmul(left, right)
                    else:
                        acc += nisa.nc_matmul(right, left)
                nl.store(out[place], value=nisa.tensor_copy(acc, dtype=out.dtype))
        return out

    return kernel


@MANY
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    tile=st.tuples(*[st.integers(8, 16)] * 3),
    kinds=st.tuples(*[st.sampled_from(sorted(RANGES))] * 3),
    order=st.sampled_from(["mn", "nm"]),
    stationary_first=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_products_with_tails_in_any_loop_order(sizes, tile, kinds, order, stationary_first, dtype):
    m, n, k = sizes
    a = integers(1, k, m, dtype=DTYPES[dtype])
    b = integers(2, k, n, dtype=DTYPES[dtype])
    found = check_equal(tiled_product(kinds, order, tile, stationary_first), a, b)
    expected = a.double().t() @ b.double()
    expected = expected if stationary_first else expected.t()
    assert torch.equal(found, expected.to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("n_size, moving", [(96, 96), (1, 1), (2, 1)])
def test_large_operands_in_parts_match_float64(n_size, moving, blocked, dtype):
    """Operands beyond one cache-sized part: K is cut, or blocks of weights follow each other.

    One column alone meets bf16 weights row by row of their memory.
    """
    k_tiles, m_tiles = 5, 18

    @nki.jit
    def kernel(w, x):
        out = nl.ndarray((m_tiles * 128, n_size), dtype=nl.float32, buffer=nl.shared_hbm)
        for m in nl.affine_range(m_tiles):
            columns = nl.ds(m * 128, 128)
            for n in nl.affine_range(n_size // moving):
                acc = nl.zeros((128, moving), nl.float32, buffer=nl.psum)
                each = nl.ds(n * moving, moving)
                for k in nl.affine_range(k_tiles):
                    rows = nl.ds(k * 128, 128)
                    tile = nl.load(w[m, rows, :] if blocked else w[rows, columns])
                    acc += nisa.nc_matmul(tile, nl.load(x[rows, each]))
                nl.store(out[columns, each], nisa.tensor_copy(acc))
        return out

    generator = torch.Generator().manual_seed(5)
    w = torch.randn(k_tiles * 128, m_tiles * 128, generator=generator).to(dtype)
    x = torch.randn(k_tiles * 128, n_size, generator=generator).to(dtype)
    passed = w.reshape(-1, m_tiles, 128).transpose(0, 1).contiguous() if blocked else w
    expected = w.double().t() @ x.double()
    bound = 2e-6 * (w.double().abs().t() @ x.double().abs())  # fp32 sums of 640 products
    for found in both(kernel, passed, x):
        assert bool(((found - expected).abs() <= bound).all())


# --- chains of instructions -----------------------------------------------------------------------
def _triangle(t, i):
    return nl.arange(t.shape[0])[:, None] + i, nl.arange(t.shape[1])[None, :]


def _halves(t, v, i):
    made = nl.ndarray(t.shape, dtype=t.dtype, buffer=nl.sbuf)
    made[:, 0:1] = nisa.tensor_scalar(t[:, 0:1], nl.multiply, -1.0)
    made[:, 1:] = nisa.tensor_copy(t[:, 1:])
    return made


def _sum_on_the_way(t, v, i):
    total = nl.ndarray((t.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    halved = nisa.activation_reduce(nl.relu, t, reduce_op=nl.add, reduce_res=total)
    return nisa.tensor_scalar(halved, nl.subtract, total)


def _masked(t, v, i):
    made = nisa.memset(t.shape, 1.0, t.dtype)
    rows, columns = _triangle(t, 0)
    made[rows, columns] = nisa.tensor_scalar(t, nl.add, 1.0, mask=rows < columns + 2)
    return made


def _bits(t, v, i):
    numbers = nisa.tensor_copy(t, dtype=nl.int32)
    odd = nisa.tensor_scalar(numbers, nl.bitwise_and, 1)
    return nisa.tensor_copy(odd, dtype=t.dtype)


def _there_and_back(t, v, i):
    turned = nisa.nc_transpose(t, engine=nisa.vector_engine)
    return nisa.nc_transpose(turned, engine=nisa.vector_engine)


def _numbered(t, v, i):
    rows, columns = _triangle(t, i)
    return nisa.tensor_tensor(t, nisa.iota(rows - columns, dtype=nl.float32), nl.add, dtype=t.dtype)


STEPS = {
    "scale": lambda t, v, i: nisa.tensor_scalar(t, nl.multiply, v, op1=nl.add, operand1=2.0),
    "max": lambda t, v, i: nisa.tensor_scalar(t, nl.subtract, nisa.tensor_reduce(nl.max, t, 1)),
    "sum": lambda t, v, i: nisa.tensor_scalar(t, nl.add, nisa.tensor_reduce(nl.add, t, 1)),
    "relu": lambda t, v, i: nisa.activation(nl.relu, t, bias=v, scale=0.5),
    "double": lambda t, v, i: nisa.tensor_tensor(t, t, nl.add),
    "cast": lambda t, v, i: nisa.tensor_copy(nisa.tensor_copy(t, dtype=nl.bfloat16), dtype=t.dtype),
    "select": lambda t, v, i: nisa.affine_select(_triangle(t, 0)[0] >= _triangle(t, 0)[1], t, -3.0),
    "moving": lambda t, v, i: nisa.affine_select(_triangle(t, i)[0] >= _triangle(t, i)[1], t, -3.0),
    "first": lambda t, v, i: nisa.tensor_scalar(t, nl.multiply, 3.0) if i == 0 else t,
    "scan": lambda t, v, i: nisa.tensor_tensor_scan(t, t, 0.0, nl.subtract, nl.maximum),
    "transpose": _there_and_back,
    "halves": _halves,
    "running": _sum_on_the_way,
    "masked": _masked,
    "bits": _bits,
    "iota": _numbered,
}


def chain(steps, kinds, counts, tile, order, inner_index, tail):
    """Loads, ``steps``, stores in a nest of two loops; ``out`` has the input's shape."""
    p, f = tile

    @nki.jit
    def kernel(a, v):
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        for i in RANGES[kinds[0]](counts[0]):
            vector = nl.load(v[nl.ds(i * p, p), :])
            for j in RANGES[kinds[1]](counts[1]):
                row = {"up": i, "down": counts[0] - 1 - i, "mixed": i ^ 1}[order]
                width = f - tail if j == counts[1] - 1 else f
                place = (nl.ds(row * p, p), nl.ds(j * f, width))
                t = nl.load(a[place])
                for step in steps:
                    t = STEPS[step](t, vector, j if inner_index else i)
                nl.store(out[place], value=t)
        return out

    return kernel


@MANY
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    kinds=st.tuples(*[st.sampled_from(sorted(RANGES))] * 2),
    counts=st.tuples(st.sampled_from([2, 4]), st.integers(1, 4)),
    tile=st.tuples(st.integers(1, 32), st.integers(3, 32)),
    order=st.sampled_from(["up", "down", "mixed"]),
    inner_index=st.booleans(),
    tail=st.integers(0, 1),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_chains_of_instructions(steps, kinds, counts, tile, order, inner_index, tail, dtype):
    (p, f), (n, m) = tile, counts
    a = integers(6, n * p, m * f - tail, dtype=DTYPES[dtype])
    check_equal(
        chain(steps, kinds, counts, tile, order, inner_index, tail), a, integers(7, n * p, 1)
    )


# --- what must stay apart, and what must not ------------------------------------------------------


def test_reshaped_tiles_are_read_in_place_only_where_the_source_has_such_rows():
    """Two rows of 3 cut from rows of 10, joined to one of 6 and read across their joint."""

    @kernel_of
    def kernel(a):
        joined = nl.load(a[:, :, 2:5]).reshape((4, 6))
        return nisa.tensor_scalar(joined[:, 1:5], nl.add, 1.0)

    a = integers(15, 4, 2, 10)
    assert torch.equal(check_equal(kernel, a), a[:, :, 2:5].reshape(4, 6)[:, 1:5] + 1)


@pytest.mark.filterwarnings("ignore")
def test_overlapping_accumulations_add_up():
    """Accumulation is no race, so windows of one PSUM tile may overlap from turn to turn."""

    @kernel_of
    def kernel(a, b):
        acc = nl.ndarray((4, 10), dtype=nl.float32, buffer=nl.psum)
        acc[...] = nisa.memset((4, 10), 0.0, nl.float32)
        for i in nl.affine_range(4):
            acc[:, nl.ds(i * 2, 4)] += nisa.nc_matmul(nl.load(a), nl.load(b[:, nl.ds(i * 4, 4)]))
        return nisa.tensor_copy(acc)

    a, b = integers(23, 8, 4), integers(24, 8, 16)
    expected = torch.zeros(4, 10)
    for i in range(4):
        expected[:, 2 * i : 2 * i + 4] += a.t() @ b[:, 4 * i : 4 * i + 4]
    assert torch.equal(check_equal(kernel, a, b), expected)


def test_merging_can_be_switched_off(monkeypatch):
    a, b = integers(8, 64, 32), integers(9, 64, 48)
    program = tiled_product(("affine",) * 3, "mn", (8, 16, 16), True).trace(a, b)
    monkeypatch.setenv("NKI_CPU_MERGE", "0")
    assert len(Plan(program).ops) == len(program)
    monkeypatch.setenv("NKI_CPU_MERGE", "1")
    assert len(Plan(program).ops) < len(program)
