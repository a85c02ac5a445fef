"""What the documentation leaves open is taken on the safe side, with a warning that says so.

Each case has a near miss: the same without what is open, and no warning.
"""

import warnings

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiWarning
from tests.nki import tiles


def sb(shape=(32, 32), dtype=nl.float32):
    return tiles.ones(shape, dtype)


def ps(shape=(32, 32), dtype=nl.float32):
    return tiles.ps(shape, dtype)


def column_tile(start):
    narrow, whole = sb((32, 32), nl.bfloat16), ps((128, 32))
    target = whole[start : start + 32, :]
    nisa.nc_matmul(target, narrow, narrow, tile_position=(0, 32), tile_size=(32, 32))


def filled(value, flag):
    target = ps()
    nisa.memset(target, value)
    nisa.nc_matmul(target, sb(), sb(), accumulate=flag)


def looped(inside):
    outer = ps()
    for _ in nl.dynamic_range(2):
        nisa.nc_matmul(ps() if inside else outer, sb(), sb())


def summed(count):
    nisa.dma_compute(sb(), [sb() for _ in range(count)], nl.add)


def rows(x, count):
    """Two offsets, each of so many rows of 32."""
    chosen = x.ap([[32, 2], [1, 32 * count]], vector_offset=sb((2, 1), nl.int32))
    nisa.dma_copy(sb((2, 32 * count)), chosen)


def sums_of(tensors, flags=(False, True)):
    """Two sums of two products each, in one tensor of PSUM or in two."""
    targets = [ps((32, 64)) for _ in range(tensors)]
    for k in range(2):
        for flag in flags:
            target = targets[k % tensors][:, 32 * k : 32 * (k + 1)]
            nisa.nc_matmul(target, sb(), sb(), accumulate=flag)


def added(on_gpsimd):
    engine = nisa.engine.gpsimd if on_gpsimd else nisa.engine.vector
    nisa.tensor_tensor(sb(), sb(), sb(), nl.add, engine=engine)


def reduced(op):
    nisa.tensor_partition_reduce(sb((1, 32)), op, sb())


def turned(x, by_dma):
    if by_dma:
        nisa.dma_transpose(sb(), sb())
    else:
        nisa.nc_transpose(sb(), sb())


def dropped(x):
    nisa.dropout(sb(), sb(), 0.5)


def sums(dtype):
    nisa.nc_matmul(ps(dtype=dtype), sb(dtype=nl.bfloat16), sb(dtype=nl.bfloat16))


def register_slice(x, by_ds):
    at = nisa.register_alloc(1)
    part = x[nl.ds(at, 4), :] if by_ds else x.ap([[32, 4], [1, 32]], scalar_offset=at)
    nisa.dma_copy(sb((4, 32)), part)


def loops(inside):
    for _ in nl.dynamic_range(2):
        for _ in nl.dynamic_range(2) if inside else range(2):
            nisa.tensor_copy(sb(), sb())


def scaled(dtype, other, op=nl.add):
    nisa.tensor_scalar(sb(dtype=other), sb(dtype=dtype), op, 1 if op is nl.add else None)


def stepped(op, engine):
    nisa.tensor_scalar(sb(), sb(), op, 1.0, engine=engine)


def drawn(random):
    bits = sb(dtype=nl.uint32)
    nisa.rng(bits) if random else nisa.memset(bits, 1)


def largest(whole_groups):
    values, places = sb((16, 8), nl.bfloat16), sb((16, 8), nl.uint32)
    if whole_groups:
        nisa.topk(values, places, sb((16, 8), nl.bfloat16), 64)
    else:
        nisa.max8(values, sb((16, 8), nl.bfloat16))


def scattered(x, rows):
    out = nl.ndarray((32, 32), nl.float32, buffer=nl.private_hbm)
    at = sb((4, 1), nl.int32)
    nisa.iota(at, [[0, 1]], channel_multiplier=rows)
    nisa.dma_copy(out.vector_select(0, at), sb((4, 32)))


def of_nan(value):
    tile = sb()
    nisa.memset(tile[:, 0:1], value)
    nisa.max8(sb((32, 8)), tile)


def microscaled(scale, at=0):
    data = nl.ndarray((32, 32), nl.float8_e4m3fn_x4)
    nisa.memset(data, 0)
    scales = nl.ndarray((32, 32), nl.uint8)
    nisa.memset(scales, scale)
    scales = scales[at : at + 4]
    nisa.nc_matmul_mx(ps(), data, data, scales, scales)


@nki.jit
def inner_body(x):
    tile = nl.load(x)

    def body(i):
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)

    nl.fori_loop(0, 2, body)
    nl.store(x, tile)
    return x


def nothing(i):
    sb()


@nki.jit
def outer_body(x):
    nl.fori_loop(0, 2, nothing)
    nl.store(x, nl.load(x))
    return x


@nki.jit
def halves_down(x):
    nl.store(x[0 : -(x.shape[0] // -2)], nl.load(x[0:16]))
    return x


@nki.jit
def halves_up(x):
    nl.store(x[0 : -(-x.shape[0] // 2)], nl.load(x[0:16]))
    return x


PATTERN = [[32, 2], [1, 32]]
NAN = float("nan")
# identifier: generation, what is open, the near miss
CASES = {
    "sim_ap_offset": (
        2, lambda x: x[1:3].ap(PATTERN, offset=0), lambda x: x[1:3].ap(PATTERN)
    ),
    "sim_array_tile_place": (3, lambda x: column_tile(0), lambda x: column_tile(32)),
    "sim_accumulation_start": (2, lambda x: filled(1.0, None), lambda x: filled(0.0, None)),
    "sim_accumulation_loop": (2, lambda x: looped(False), lambda x: looped(True)),
    "sim_dma_one_source": (2, lambda x: summed(1), lambda x: summed(2)),
    "sim_vector_offsets": (2, lambda x: rows(x, 2), lambda x: rows(x, 1)),
    "sim_sums_share_tensor": (3, lambda x: sums_of(1), lambda x: sums_of(1, (None, None))),
    "sim_dma_on_chip": (2, lambda x: nisa.dma_copy(sb(), sb()), lambda x: nisa.dma_copy(sb(), x)),
    "sim_transpose_by_dma": (2, lambda x: turned(x, True), lambda x: turned(x, False)),
    "sim_unpublished_limit": (
        2, lambda x: nl.tile_size.psum_min_align, lambda x: nl.tile_size.sbuf_fmax_bytes
    ),
    "sim_average": (2, lambda x: reduced(nl.average), lambda x: reduced(nl.add)),
    "sim_dropout_probability": (2, dropped, lambda x: nisa.tensor_copy(sb(), sb())),
    "sim_dynamic_slice": (2, lambda x: register_slice(x, True), lambda x: register_slice(x, False)),
    "sim_unary_integers": (
        2,
        lambda x: scaled(nl.int16, nl.int16, nl.abs),
        lambda x: scaled(nl.float32, nl.int16, nl.abs),
    ),
    "sim_engine_operators": (
        3,
        lambda x: stepped(nl.add, nisa.engine.gpsimd),
        lambda x: stepped(nl.add, nisa.engine.scalar),
    ),
    "sim_expansion": (2, lambda x: nl.softmax(sb()), lambda x: nl.exp(sb())),
    "sim_power": (2, lambda x: nl.power(sb(), 3), lambda x: nl.power(sb(), sb())),
    "sim_random_stream": (2, lambda x: drawn(True), lambda x: drawn(False)),
    "sim_topk_place": (2, lambda x: largest(True), lambda x: largest(False)),
    "sim_duplicate_rows": (3, lambda x: scattered(x, 0), lambda x: scattered(x, 1)),
    "sim_nan_compared": (2, lambda x: of_nan(NAN), lambda x: of_nan(1.0)),
    "sim_scale_of_ones": (4, lambda x: microscaled(255), lambda x: microscaled(254)),
    "sim_scale_packing": (4, lambda x: microscaled(127, 4), lambda x: microscaled(127, 0)),
    "sim_rounded_sums": (4, lambda x: sums(nl.bfloat16), lambda x: sums(nl.float32)),
}  # fmt: skip
GATES_ALONE = {  # open on gen2 only
    "sim_vector_offsets", "sim_transpose_by_dma",
}  # fmt: skip


def told(body):
    return told_by(tiles.beside(body))


def told_by(kernel):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel(np.zeros((32, 32), np.float32))
    return " ".join(str(w.message) for w in caught if issubclass(w.category, NkiWarning))


def test_gpsimd_and_two_tensors_on_gen2(target):
    target("gen2")
    assert "tensor_tensor with add on GpSimdE" in told(lambda x: added(True))
    assert "sim_engine_operators" not in told(lambda x: added(False))
    target("gen3")
    assert "sim_engine_operators" not in told(lambda x: added(True))


def test_sums_that_share_a_tensor_are_open_on_gen2_however_they_begin(target):
    target("gen2")
    for flags in ((False, True), (None, None)):
        assert "sim_sums_share_tensor" in told(lambda x, flags=flags: sums_of(1, flags))
        assert "sim_sums_share_tensor" not in told(lambda x, flags=flags: sums_of(2, flags))


def test_python_of_which_parser_and_tracer_differ_warns(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    assert "sim_inner_body" in told_by(inner_body)
    assert "sim_inner_body" not in told_by(outer_body)
    assert "sim_negative_divisor" in told_by(halves_down)
    assert "sim_negative_divisor" not in told_by(halves_up)


def test_the_largest_moving_operand_is_open_on_gen4_only(target):
    read = "sim_unpublished_limit"
    target("gen4")
    assert read in told(lambda x: nl.tile_size.gemm_moving_fmax)
    target("gen3")
    assert read not in told(lambda x: nl.tile_size.gemm_moving_fmax)


@pytest.mark.parametrize("identifier", CASES)
def test_open_points_warn(target, identifier):
    number, doubtful, near = CASES[identifier]
    target(f"gen{number}")
    assert identifier in told(doubtful)
    assert identifier not in told(near)
    if identifier in GATES_ALONE:
        target("gen3")
        assert identifier not in told(doubtful)
