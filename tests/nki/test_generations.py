"""What each generation takes: every gate refuses below it and lets the same kernel pass from it on.

The list is that of the documentation's tables (aws-neuron-sdk v2.32.0, nki/guides/architecture and
nki/api/nki/isa): instructions, engines, modes, element types, sizes.
"""

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core import NkiError
from neuron_cpu.core.time.schedule import schedule
from tests.nki import tiles
from tests.warned import allows

TARGETS = {2: "trn1", 3: "trn2", 4: "trn3"}
E, D = nisa.engine, nisa.dge_mode


def sb(shape=(4, 8), dtype=nl.float32):
    return tiles.ones(shape, dtype)


def ps(shape=(8, 8), dtype=nl.float32):
    return tiles.ps(shape, dtype)


def column():
    return sb((4, 1))


def product(dtype=nl.bfloat16, rows=8, width=8, into=nl.float32, **how):
    left, right = sb((rows, 8), dtype), sb((rows, width), dtype)
    nisa.nc_matmul(ps((8, width), into), left, right, **how)


def double_rows():
    pair = sb((128, 2, 8), nl.float8_e4m3)
    nisa.nc_matmul(ps(), pair, pair, perf_mode=nisa.matmul_perf_mode.double_row)


def scaled():
    data, scales = sb((32, 8), nl.float8_e4m3fn_x4), sb((32, 8), nl.uint8)
    nisa.nc_matmul_mx(ps(), data, data, scales, scales)


def quantized():
    packed, scales = nl.ndarray((32, 8), nl.float8_e4m3fn_x4), nl.ndarray((32, 8), nl.uint8)
    nisa.quantize_mx(packed, sb((32, 32), nl.bfloat16), scales)


def ranged():
    whole = (nl.greater_equal, nl.less, column(), column())
    nisa.range_select(sb(), sb(), *whole, reduce_res=column())


def counted():
    nisa.nonzero_with_count(sb((16, 9), nl.int32), sb((16, 8)))


def activated():
    nisa.activate2(sb(), nl.exp, sb(), 2.0, 1.0, nl.multiply, nl.add)


def state(engine, values):
    return lambda x: nisa.rand_set_state(sb((4, values), nl.uint32), engine=engine)


def prioritised(ranks):
    def reduced(x):
        own, sums = (nl.zeros(x.shape, x.dtype, buffer=nl.shared_hbm) for _ in "ab")
        ncc.all_reduce([own], [sums], [ranks], nl.add, priority=1)

    return reduced


# first generation: what it brings. Each takes a (4, 8) fp32 tensor in HBM.
GATES = {
    "range_select": (3, lambda x: ranged()),
    "nonzero_with_count": (3, lambda x: counted()),
    "hardware descriptors": (3, lambda x: nisa.dma_copy(sb(), x, dge_mode=D.hwdge)),
    "copies on ScalarE": (3, lambda x: nisa.tensor_copy(sb(), sb(), engine=E.scalar)),
    "a constant bias": (3, lambda x: nisa.activation(sb(), nl.exp, sb(), bias=1.0)),
    "the reciprocal's bias": (3, lambda x: nisa.activation(sb(), nl.reciprocal, sb(), column())),
    "double_row": (3, lambda x: double_rows()),
    "array tiles of 32": (3, lambda x: product(tile_position=(0, 0), tile_size=(32, 32))),
    "random bits on GpSimdE": (3, lambda x: nisa.rng(sb(dtype=nl.uint32), engine=E.gpsimd)),
    "the state of GpSimdE": (3, state(E.gpsimd, 6)),
    "the state of VectorE": (4, state(E.vector, 24)),
    "nc_matmul_mx": (4, lambda x: scaled()),
    "quantize_mx": (4, lambda x: quantized()),
    "activate2": (4, lambda x: activated()),
    "exponential": (4, lambda x: nisa.exponential(sb(), sb())),
    "rand2": (4, lambda x: nisa.rand2(sb(), 0.0, 1.0)),
    "priority of a DMA": (4, lambda x: nisa.dma_copy(sb(), x, priority=1)),
    "priority of a collective": (4, prioritised([0, 1])),
    "priority in a group of one": (4, prioritised([0])),
    "abs_max": (4, lambda x: nl.abs_max(sb(), 1.0)),
    "abs_max of tiles": (4, lambda x: nisa.tensor_tensor(sb(), sb(), sb(), nl.abs_max)),
    "abs_min": (4, lambda x: nisa.tensor_scalar(sb(), sb(), nl.abs_min, 1.0)),
    "abs_min as a second step": (
        4, lambda x: nisa.tensor_scalar(sb(), sb(), nl.add, 1.0, op1=nl.abs_min, operand1=1.0)
    ),
    "square on VectorE": (4, lambda x: nisa.tensor_scalar(sb(), sb(), nl.square, None)),
    "relu on VectorE": (4, lambda x: nisa.tensor_scalar(sb(), sb(), nl.relu, None)),
    "relu of a scalar_tensor_tensor": (
        4, lambda x: nisa.scalar_tensor_tensor(sb(), sb(), nl.abs_max, 1.0, nl.add, sb())
    ),
    "OCP's fp8": (4, lambda x: product(nl.float8_e4m3fn)),
    "bf16 sums": (4, lambda x: product(into=nl.bfloat16)),
    "wide moving operands": (4, lambda x: product(width=1024)),
}  # fmt: skip
REFUSALS = {
    "sim_newer_core", "err_activation_bias_invalid_type", "sim_array_tile",
    "err_size_of_dimension_exceed_arch_limit", "sim_matmul_output_type",
}  # fmt: skip


def traced(body):
    return tiles.beside(body).trace(np.zeros((4, 8), np.float32))


@pytest.mark.parametrize("number", TARGETS)
@pytest.mark.parametrize("name", GATES)
@allows("sim_random_stream", "sim_rounded_sums")
def test_gates(target, name, number):
    first, body = GATES[name]
    target(TARGETS[number])
    if number >= first:
        assert traced(body).core.number == number
        return
    with pytest.raises(NkiError) as caught:
        traced(body)
    assert caught.value.identifier in REFUSALS, caught.value


def wide(engine, dtype, x):
    tiles = [sb((128, 4096), dtype) for _ in range(2)]
    if engine == "scalar":
        return nisa.activation(tiles[0], nl.exp, tiles[1])
    return nisa.tensor_copy(tiles[0], tiles[1], engine=E.vector)


def test_ports_are_shared_on_gen2_only(target):
    """VectorE and GpSimdE take turns on SBUF's port; from gen3 on they work at once."""

    def body(x):
        for engine in (E.vector, E.gpsimd):
            tile = nl.ndarray((128, 8192), nl.float32)
            nisa.memset(tile, 0, engine=engine)

    overlaps = []
    for number in TARGETS:
        target(TARGETS[number])
        made = schedule(traced(body))
        spans = [
            (made.start[k], made.end[k])
            for k, i in enumerate(made.program.instructions)
            if i.op.name == "memset"
        ]
        overlaps.append(spans[1][0] < spans[0][1])
    assert overlaps == [False, True, True]
