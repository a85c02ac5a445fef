"""Estimates obey the hardware: nothing is faster than its engine or its memory allows.

Hypothesis draws an instruction, a chip, a type and sizes. The time of one is the slope between two
kernels that repeat it, which is what each of a stream of them takes. PHYSICS_EXAMPLES says how many
draws there are: 100 by default, 10,000 in the laboratory (`make physics`). A rule of the hardware
that makes a time jump, or fall where a size grows, is named in `rule`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import nki
import nki.isa as nisa
import nki.language as nl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_cpu.core import silence
from neuron_cpu.core.device import spec, target
from neuron_cpu.core.device.spec import Engine
from neuron_cpu.core.time.schedule import NUMBER, schedule
from neuron_cpu.environment import variable

EXAMPLES = int(os.environ.get("PHYSICS_EXAMPLES", "100"))
FEW, MANY = 40, 64  # behind TensorE's start, which runs at half rate
SMALLER = 1.02
ALONE, PART = 85.0, 3.0  # times what a longer row takes: one below eight bytes, alone; among others
CHIPS = {"trn1": spec.GEN2, "trn2": spec.GEN3, "trn3": spec.GEN4}
DTYPES = {"fp32": nl.float32, "bf16": nl.bfloat16}
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST = 600  # columns, which MANY tiles of SBUF hold


class Case(NamedTuple):
    """One thing of one size: a name of MAKERS on a chip, [rows, columns] of a type; of a product
    rows of both sides and columns of the moving one."""

    what: str
    chip: str
    dtype: str
    rows: int
    columns: int

    @property
    def core(self):
        return CHIPS[self.chip]

    @property
    def item(self):
        return {"fp32": 4, "bf16": 2}[self.dtype]

    @property
    def row_bytes(self):
        return self.columns * self.item


# --- what is repeated -----------------------------------------------------------------------------
Repeat = Callable[[int], Any]
MAKERS: dict[str, tuple[Engine, Callable[..., Repeat]]] = {}


def on(engine):
    def add(maker):
        MAKERS[maker.__name__] = engine, maker
        return maker

    return add


def tile(case, columns, buffer=None):
    made = nl.ndarray((case.rows, columns), DTYPES[case.dtype], buffer=buffer or nl.sbuf)
    nisa.memset(made, 0)
    return made


def operands(case):
    """A tile, and four places for results in turn, so that none waits for its place."""
    shape, dtype = (case.rows, case.columns), DTYPES[case.dtype]
    return tile(case, case.columns), [nl.ndarray(shape, dtype, buffer=nl.sbuf) for _ in range(4)]


@on(Engine.VECTOR)
def vector_of_two(case, x):
    (a, outs), on, b = operands(case), nisa.engine.vector, tile(case, case.columns)
    return lambda k: nisa.tensor_tensor(dst=outs[k % 4], data1=a, data2=b, op=nl.add, engine=on)


@on(Engine.GPSIMD)
def gpsimd_of_two(case, x):
    (a, outs), on, b = operands(case), nisa.engine.gpsimd, tile(case, case.columns)
    return lambda k: nisa.tensor_tensor(dst=outs[k % 4], data1=a, data2=b, op=nl.add, engine=on)


@on(Engine.VECTOR)
def vector_of_one(case, x):
    (a, outs), on = operands(case), nisa.engine.vector
    return lambda k: nisa.tensor_scalar(
        dst=outs[k % 4], data=a, op0=nl.add, operand0=1.0, engine=on
    )


@on(Engine.VECTOR)
def vector_copy(case, x):
    (a, outs), on = operands(case), nisa.engine.vector
    return lambda k: nisa.tensor_copy(dst=outs[k % 4], src=a, engine=on)


@on(Engine.VECTOR)
def vector_sum(case, x):
    a, sums = tile(case, case.columns), tile(case, 4)
    return lambda k: nisa.tensor_reduce(dst=sums[:, k % 4 : k % 4 + 1], data=a, op=nl.add, axis=1)


@on(Engine.VECTOR)
def vector_fill(case, x):
    _, outs = operands(case)
    return lambda k: nisa.memset(outs[k % 4], 1.0, engine=nisa.engine.vector)


@on(Engine.SCALAR)
def scalar_function(case, x):
    a, outs = operands(case)
    return lambda k: nisa.activation(dst=outs[k % 4], op=nl.exp, data=a)


@on(Engine.TENSOR)
def product(case, x):
    columns = min(case.columns, 512)
    left, right = tile(case, 128), tile(case, columns)
    sums = nl.ndarray((128, columns), nl.float32, buffer=nl.psum)
    return lambda k: nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=k > 0)


@on(Engine.DMA)
def load(case, x):
    pieces = nl.ndarray((case.rows, MANY, case.columns), x.dtype, buffer=nl.sbuf)
    return lambda k: nisa.dma_copy(dst=pieces[:, k, :], src=x[k, :, 0 : case.columns])


@on(Engine.DMA)
def store(case, x):
    a, out = tile(case, case.columns), nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
    return lambda k: nisa.dma_copy(dst=out[k, :, 0 : case.columns], src=a)


@on(Engine.DMA)
def memory_copy(case, x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
    return lambda k: nisa.dma_copy(dst=out[k], src=x[k])


@on(Engine.DMA)
def strided_copy(case, x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
    part = slice(0, case.columns)
    return lambda k: nisa.dma_copy(dst=out[k, :, part], src=x[k, :, part])


@on(Engine.DMA)
def chip_copy(case, x):
    a = tile(case, case.columns)
    pieces = nl.ndarray((case.rows, MANY, case.columns), x.dtype, buffer=nl.sbuf)
    return lambda k: nisa.dma_copy(dst=pieces[:, k, :], src=a)


@on(Engine.DMA)
def transposing_load(case, x):
    pieces = nl.ndarray((case.columns, MANY, case.rows), x.dtype, buffer=nl.sbuf)
    part = slice(0, case.columns)
    return lambda k: nisa.dma_transpose(dst=pieces[:, k, :], src=x[k, :, part], axes=(1, 0))


def quiet():
    """What is odd about a kernel is not what is asked here."""
    return silence("sim_dma_on_chip", "sim_engine_operators")


@functools.cache
def slope(case):
    """Nanoseconds of one more in a stream: between the ends of two of them."""
    engine, maker = MAKERS[case.what]

    def kernel(x):
        out = nl.ndarray((1, 1), x.dtype, buffer=nl.shared_hbm)
        repeat = maker(case, x)
        for k in range(MANY):
            repeat(k)
        nisa.dma_copy(dst=out, src=x[0, 0:1, 0:1])
        return out

    width = case.columns * (1 if case.what == "memory_copy" else 2)
    x = torch.empty(MANY, case.rows, width, dtype=TORCH[case.dtype], device="meta")
    with variable(target.ENVIRONMENT_VARIABLE, case.chip), quiet():
        found = schedule(nki.jit(kernel).trace(x))
    ends = [e for e, on in zip(found.end, found.engine) if on == NUMBER[engine]]
    ends = sorted(ends[:-1] if engine is Engine.DMA else ends)[-MANY:]
    return (ends[MANY - 1] - ends[FEW - 1]) / (MANY - FEW)


# --- the hardware's own limits --------------------------------------------------------------------
def least_ns(case):
    """What no instruction of the size can be faster than: elements a cycle of the engine's
    data path (ARCH, ARCH3, ARCH4), the DMA engines' rate, and the core's share of HBM."""
    engine, core, narrow = MAKERS[case.what][0], case.core, case.item == 2
    size = case.rows * case.row_bytes
    if engine is Engine.DMA:
        passes = {"memory_copy": 2, "strided_copy": 2, "chip_copy": 0}.get(case.what, 1)
        rate = core.dma.engines * core.dma.bytes_per_ns
        return max(size / rate, passes * size / core.hbm_bytes_per_ns)
    a_cycle = {
        Engine.VECTOR: 4 if narrow else 2,
        Engine.SCALAR: 2 if narrow and core.number > 3 else 1,
        Engine.GPSIMD: 1,
        Engine.TENSOR: 1 if narrow else 0.25,
    }
    if core.number == 2:  # 128 elements a cycle; sums and fills of 16 bits have two
        a_cycle[Engine.VECTOR] = 2 if narrow else 1
    return case.columns / a_cycle[engine] / core.clock_hz[engine] * 1e9


def rule(one, other):
    """How many times a time may be another one's because of a rule of the hardware; 1: of none.

    - Part of a word: a row below eight bytes is read, changed and written back, and alone nothing
      hides that (vector addition of SDK 2.24 and later: 360 ns, where others take 4 to 20).
    - Half of the array: from gen3 on products of at most 64 rows run at half rate.
    - Partitions of engines: a partition's rows belong to one DMA engine, and 16 engines serve them.
    """
    if one.what == "product" and one.core.number > 2:
        return 2.0 if (one.rows <= 64) != (other.rows <= 64) else 1.0
    if MAKERS[one.what][0] is not Engine.DMA:
        return 1.0
    if one.what == "memory_copy":
        return ALONE if min(c.rows * c.row_bytes for c in (one, other)) < 8 else 1.0
    parts = {c.row_bytes < 8 for c in (one, other)}
    shares = [math.ceil(c.rows / c.core.dma.engines) for c in (one, other)]
    word = 1.0
    if True in parts and 1 in (one.rows, other.rows):
        word = ALONE
    elif len(parts) > 1:
        word = PART
    return word * max(shares) / min(shares)


CASES = st.builds(
    Case, *(st.sampled_from(sorted(names)) for names in (MAKERS, CHIPS, DTYPES)),
    st.integers(1, 128), st.integers(1, MOST),
)  # fmt: skip
draws = settings(max_examples=EXAMPLES // 5, deadline=None, derandomize=True, database=None)


def sized(case):
    """A product's columns fit a bank of PSUM; a transposing load's become partitions, from gen3 on,
    where sources have it."""
    if case.what == "transposing_load":
        chip = "trn2" if case.chip == "trn1" else case.chip
        return case._replace(chip=chip, columns=min(case.columns, 128))
    return case._replace(columns=min(case.columns, 512)) if case.what == "product" else case


@draws
@given(CASES)
def test_nothing_is_faster_than_its_engine_or_its_memory_allows(case):
    case = sized(case)
    assert slope(case) >= 0.999 * least_ns(case)


@draws
@given(CASES, st.integers(1, MOST), st.booleans())
def test_more_never_takes_less(case, size, rows):
    other = case._replace(rows=1 + size % 128) if rows else case._replace(columns=size)
    small, large = sorted(map(sized, (case, other)), key=lambda c: (c.rows, c.columns))
    assert slope(small) <= SMALLER * rule(small, large) * slope(large)


@draws
@given(CASES)
def test_two_halves_take_no_less_than_the_whole(case):
    whole = sized(case)
    whole = whole._replace(columns=whole.columns + whole.columns % 2)
    half = whole._replace(columns=whole.columns // 2)
    assert slope(whole) <= SMALLER * rule(whole, half) * 2 * slope(half)


@pytest.mark.parametrize("chip", ["trn2", "trn3"])
@draws
@given(case=CASES)
def test_gpsimd_beats_vector_nowhere_from_gen3_on(chip, case):
    case = case._replace(what="gpsimd_of_two", chip=chip)
    assert slope(case) >= slope(case._replace(what="vector_of_two"))


@draws
@given(st.sampled_from(["trn2", "trn3"]), st.integers(1, 8), st.integers(1, 4))
def test_a_transposing_load_takes_longer_than_a_load(chip, rows, columns):
    """From gen3 on the engine transposes on the way, at a share of its rate."""
    case = Case("transposing_load", chip, "bf16", 16 * rows, 32 * columns)
    assert slope(case) > SMALLER * slope(case._replace(what="load"))
