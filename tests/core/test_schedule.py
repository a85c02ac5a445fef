"""Schedules: small programs computed by hand, and laws that every schedule must obey."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from neuronxcc.nki import compiler as ncc
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl

from neuron_cpu.core import Kernel, NkiError
from neuron_cpu.core.device.dtypes import FLOAT32
from neuron_cpu.core.device.spec import GEN2, Engine
from neuron_cpu.core.language.tensor import Tile as Tensor
from neuron_cpu.core.program import regions
from neuron_cpu.core.program.storage import Storage
from neuron_cpu.core.report import report
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import (
    COMPILER_ORDER,
    DMA,
    ENGINE,
    PORT,
    PROGRAM_ORDER,
    SCALAR,
    VECTOR,
)
from neuron_cpu.core.time.schedule import schedule as simulate
from tests.core.test_lower import random_kernel
from tests.warned import allows

ROWS = 8  # partitions, hence rows of a full tile, per DMA engine
START = GEN2.dma.start_ns
BF16, F32 = torch.bfloat16, torch.float32


def ns(engine, cycles):
    """Occupancy of an instruction of so many documented cycles."""
    if cycles > 64:
        tensor = engine is Engine.TENSOR
        cycles = cycles * GEN2.tensor_pace if tensor else cycles + 20
    return cycles / GEN2.clock_hz[engine] * 1e9


def late(engine):
    """From the end of an instruction to the start of one that needs its result."""
    return GEN2.dependent_cycles / GEN2.clock_hz[engine] * 1e9


def hbm(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def run(function, *args, profile="row-rule", order=COMPILER_ORDER):
    return simulate(Kernel(function).trace(*args), profile, order)


def named(found, op):
    """Indices of the instructions of one opcode, in program order."""
    return [k for k, i in enumerate(found.program.instructions) if i.op.name == op]


def row_ns(size, profile="row-rule"):
    return cost.dma_profile(profile).row_ns(size)


# --- by hand --------------------------------------------------------------------------------------
def test_blocks_of_one_tensor_hold_memory_one_by_one():
    """Blocks of a tensor that is larger than SBUF: it never lies there whole."""
    columns = 30 * 1024

    def kernel(x):
        out = nl.ndarray((2, 128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        blocks = nl.ndarray((2, nl.par_dim(128), columns), dtype=nl.float32)
        for t in nl.affine_range(2):
            blocks[t] = nl.load(x[t])
            nl.store(out[t], value=nisa.tensor_reduce(nl.add, blocks[t], axis=1))
        return out

    found = run(kernel, hbm(2, 128, columns, dtype=F32))
    first, second = named(found, "dma_copy")[0::2]
    reductions = named(found, "tensor_reduce")
    assert found.start[second] >= found.end[reductions[0]] > found.end[first]
    assert found.overcommitted == (0, 0)
    assert 4 * columns <= found.high_water("sbuf") <= GEN2.sbuf_usable_bytes


def port_kernel(first, second):
    """Two independent instructions on loaded data, and what they leave."""

    def kernel(x):
        out = nl.ndarray((2, 128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x)
        a, b = first(tile), second(tile)
        nl.store(out[0], value=a)
        nl.store(out[1], value=b)
        return out

    return run(kernel, hbm(128, 512, dtype=F32))


def on_vector(tile):
    return nisa.tensor_scalar(tile, op0=nl.multiply, operand0=2.0, engine=nisa.vector_engine)


def on_scalar(tile):
    return nisa.activation(nl.exp, tile)


def on_gpsimd(tile):
    return nisa.tensor_copy(tile, engine=nisa.gpsimd_engine)


@pytest.mark.parametrize(
    ("first", "second", "exclusive"),
    [(on_vector, on_gpsimd, True), (on_scalar, on_gpsimd, False), (on_vector, on_scalar, False)],
)
def test_vector_and_gpsimd_exclude_each_other_on_sbuf(first, second, exclusive):
    found = port_kernel(first, second)
    one, two = [k for k, e in enumerate(found.engine) if e != DMA][:2]
    together = found.start[one] < found.end[two] and found.start[two] < found.end[one]
    assert together is not exclusive
    if exclusive:
        assert found.start[two] == pytest.approx(found.end[one])
        assert found.waits[two] == (PORT, one)


# --- order within an engine -----------------------------------------------------------------------
N = 512
VECTOR_N, SCALAR_N = ns(Engine.VECTOR, N), ns(Engine.SCALAR, N)


def _scaled(tile, by=2.0):
    return nisa.tensor_scalar(tile, op0=nl.multiply, operand0=by, engine=nisa.vector_engine)


def two_chains(x):
    """Of each of two tiles: VectorE, ScalarE, VectorE, one chain written after the other."""
    out = nl.ndarray((2, 128, N), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for k in nl.affine_range(2):
        nl.store(out[k], value=_scaled(nisa.activation(nl.exp, _scaled(tile, 2.0 + k))))
    return out


CHAIN = VECTOR_N + late(Engine.VECTOR) + SCALAR_N + late(Engine.SCALAR) + VECTOR_N
LOADED = START + ROWS * row_ns(4 * N)


def test_program_order_runs_one_chain_after_the_other():
    found = run(two_chains, hbm(128, N, dtype=F32), order=PROGRAM_ORDER)
    chain = [k for k, e in enumerate(found.engine) if e != DMA]
    assert found.end[chain[2]] == pytest.approx(LOADED + CHAIN)
    assert found.end[chain[5]] == pytest.approx(LOADED + 2 * CHAIN)
    assert found.waits[chain[3]] == (ENGINE, chain[2])


def test_the_compiler_starts_the_second_chain_while_the_first_waits():
    found = run(two_chains, hbm(128, N, dtype=F32))
    first, second = [k for k, e in enumerate(found.engine) if e != DMA][::3]
    assert found.start[first] == pytest.approx(LOADED)
    assert found.start[second] == pytest.approx(LOADED + VECTOR_N)
    # VectorE is free again when the first chain comes back to it: the second is one step behind
    assert late(Engine.VECTOR) + SCALAR_N > VECTOR_N
    assert found.end[first + 2] == pytest.approx(LOADED + CHAIN)
    assert found.end[second + 2] == pytest.approx(LOADED + CHAIN + VECTOR_N)


def test_a_kernel_that_forbids_reordering_runs_as_it_is_written(monkeypatch):
    assert not hasattr(ncc, "no_reorder")  # SDK 2.21 has none
    monkeypatch.setenv("NEURON_CPU_SDK", "2.23")

    def guarded(x):
        out = nl.ndarray((2, 128, N), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x)
        with ncc.no_reorder():
            for k in nl.affine_range(2):
                nl.store(out[k], value=_scaled(nisa.activation(nl.exp, _scaled(tile, 2.0 + k))))
        return out

    x = hbm(128, N, dtype=F32)
    found, written = run(guarded, x), run(two_chains, x, order=PROGRAM_ORDER)
    assert found.order == PROGRAM_ORDER
    assert found.total == written.total > run(two_chains, x).total


# --- PSUM by bytes --------------------------------------------------------------------------------
def test_a_reciprocal_that_names_no_engine_takes_the_engine_that_is_eight_times_faster():
    def kernel(x):
        out = nl.ndarray((2, 128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nl.store(out[0], value=nisa.reciprocal(tile))
        nl.store(out[1], value=nisa.reciprocal(tile, engine=nisa.vector_engine))
        return out

    found = run(kernel, hbm(128, 512, dtype=F32))
    free, bound = named(found, "reciprocal")
    assert (found.engine[free], found.engine[bound]) == (SCALAR, VECTOR)
    assert found.busy[free] == pytest.approx(ns(Engine.SCALAR, 512))
    assert found.busy[bound] == pytest.approx(ns(Engine.VECTOR, 8 * 512))


# --- spills ---------------------------------------------------------------------------------------
def around(columns):
    """A tile that is summed up, and changed by the sum of another one of the same size."""

    def kernel(x):
        out = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        first = nl.load(x[0])
        nl.store(out, value=nisa.tensor_reduce(nl.add, first, axis=1))
        total = nisa.tensor_reduce(nl.add, nl.load(x[1]), axis=1)
        first[...] = nisa.tensor_scalar(first, nl.add, total, engine=nisa.vector_engine)
        nl.store(out, value=first[:, 0:1])
        return out

    return run(kernel, hbm(2, 128, columns, dtype=F32))


@pytest.mark.parametrize("columns", [20 * 1024, 30 * 1024])
@allows("sim_sbuf_capacity")
def test_a_tile_that_does_not_fit_beside_another_goes_and_comes_back(columns):
    """Twice 80 KiB fit into SBUF and twice 120 KiB do not: by hand, what VectorE does."""
    found = around(columns)
    load, work = ROWS * row_ns(4 * columns), ns(Engine.VECTOR, columns)
    ends = [found.end[k] for k, e in enumerate(found.engine) if e == VECTOR]
    first = START + load + work
    words = report.profile(found).spills
    if 2 * 4 * columns <= GEN2.sbuf_usable_bytes:
        second = first + load
        assert load > work and words == []
        expected = [first, second, second + late(Engine.VECTOR) + work]
    else:
        saved = 2 * (START + load)  # begins when the tile is there, while VectorE reads it
        assert saved > first + late(Engine.VECTOR)
        second = saved + START + load + work
        back = second + late(Engine.VECTOR) + START + load
        expected = [first, second, back + work]
        size = f"{4 * columns / 8 / 1024:g} MiB"
        assert len(words) == 1
        assert words[0].startswith("SBUF overflows at test_schedule.py:")
        assert words[0].endswith(f"{size} spilled to HBM, {size} reloaded")
    assert ends == pytest.approx(expected)
    assert found.overcommitted == (0, 0)
    assert found.high_water("sbuf") <= GEN2.sbuf_usable_bytes


# --- laws -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=range(2))
def random_schedule(request):
    program = random_kernel(request.param)
    return simulate(program, sorted(cost.PROFILES)[2 * request.param % len(cost.PROFILES)])


def test_no_engine_runs_two_instructions_at_once(random_schedule):
    found = random_schedule
    for number in range(DMA):
        mine = [k for k, e in enumerate(found.engine) if e == number]
        mine.sort(key=found.start.__getitem__)
        for before, after in zip(mine, mine[1:]):
            assert found.start[after] >= found.end[before] - 1e-6
    ends = {}
    for lane, _, begin, end in found.lane_spans():
        assert begin >= ends.get(lane, 0.0) - 1e-6
        ends[lane] = end


def elements(view):
    """Flat element numbers of a view, by brute force."""
    numbers = np.arange(view.storage.size)
    return set(
        np.lib.stride_tricks.as_strided(
            numbers[view.offset :], view.shape, tuple(8 * s for s in view.strides)
        ).ravel()
    )


def test_instructions_that_share_elements_keep_their_order(random_schedule):
    found = random_schedule
    history = []
    for at, instruction in enumerate(found.program.instructions):
        reads = [(v.storage.id, elements(v)) for v in instruction.src if v.storage.on_chip]
        writes = [(v.storage.id, elements(v)) for v in instruction.dst if v.storage.on_chip]
        for before, old_reads, old_writes in history:
            conflicts = [(a, b) for a in old_writes for b in reads + writes]
            conflicts += [(a, b) for a in old_reads for b in writes]
            if any(a[0] == b[0] and a[1] & b[1] for a, b in conflicts):
                assert found.start[at] >= found.end[before] - 1e-6, (before, at)
        history.append((at, reads, writes))


def test_gpsimd_builds_the_descriptors_of_rows_that_data_choose():
    """One a row, in front of the transfer, and behind what GpSimdE is at."""

    def kernel(x, rows, chosen):
        rows_sb = nl.load(rows)
        lane, column = nl.arange(128)[:, None], nl.arange(512)[None, :]
        first = nl.load(x[rows_sb[lane, 0], column]) if chosen else nl.load(x[0:128, :])
        second = nl.load(x[rows_sb[lane, 1], column]) if chosen else nl.load(x[128:256, :])
        out = nl.ndarray((128, 512), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, nisa.tensor_tensor(first, second, nl.add))
        return out

    x, rows = hbm(256, 512), hbm(128, 2, dtype=torch.int32)
    plans = [simulate(Kernel(kernel).trace(x, rows, chosen)) for chosen in (False, True)]
    moves = [[at for at, n in enumerate(plan.engine) if n == DMA] for plan in plans]
    built = 128 * GEN2.dma.descriptor_ns
    for plan, (_, first, second, _) in zip(plans[1:], moves[1:]):
        assert plan.start[second] - plan.start[first] == pytest.approx(built)
    plain, named = plans
    begins = named.end[moves[1][0]]  # the rows' numbers are there
    assert named.start[moves[1][1]] >= begins + built + START
    assert cost.transfer(named.program.instructions[moves[1][1]]).built_ns == built
    assert cost.transfer(plain.program.instructions[moves[0][1]]).built_ns == 0


# --- boxes of views, placed tiles, memory that does not suffice -----------------------------------
def places(view):
    """Coordinates in the storage of every element of a view."""
    for index in product(*(range(n) for n in view.shape)):
        flat = view.offset + sum(i * s for i, s in zip(index, view.strides))
        yield tuple(int(i) for i in np.unravel_index(flat, view.storage.shape))


def test_a_box_holds_every_element_of_any_view():
    """Diagonals, reversed axes, runs that carry from one axis into the next: whatever fits."""
    rng = random.Random(11)
    storage = Storage(0, (4, 3, 10), FLOAT32, "sbuf")
    found = 0
    while found < 400:
        rank = rng.randrange(1, 4)
        shape = tuple(rng.randrange(1, 6) for _ in range(rank))
        strides = tuple(rng.choice((-11, -10, -1, 0, 1, 2, 3, 7, 10, 11, 30, 31)) for _ in shape)
        reach = [(n - 1) * s for n, s in zip(shape, strides)]
        low, high = -sum(min(r, 0) for r in reach), 120 - sum(max(r, 0) for r in reach)
        if low >= high:
            continue
        found += 1
        view = Tensor(storage, rng.randrange(low, high), shape, strides)
        box = regions.box_of(view)
        for place in places(view):
            assert all(
                first <= at <= last and (at - first) % step == 0
                for at, (first, last, step) in zip(place, box)
            ), (view.offset, shape, strides)


@pytest.mark.parametrize("start", [4, 8])
def test_placed_tiles_that_share_their_last_byte_wait(start):
    """Tile one holds bytes 0 to 4; tile two begins with the last of them or behind it."""

    def kernel(x):
        out = nl.ndarray((128, 5), nl.uint8, buffer=nl.shared_hbm)
        last = nl.ndarray((128, 4), nl.uint8, buffer=nl.shared_hbm)
        first, behind = (ncc.sbuf.mod_alloc(base_addr=at) for at in (0, start))
        one = nl.ndarray((nl.par_dim(128), 5), nl.uint8, buffer=first)
        two = nl.ndarray((nl.par_dim(128), 4), nl.uint8, buffer=behind)
        one[...] = nl.load(x)
        nl.store(out, value=one)
        two[...] = nisa.memset((128, 4), 1.0, nl.uint8)
        nl.store(last, value=two)
        return out, last

    found = run(kernel, hbm(128, 5, dtype=torch.uint8))
    ops = [i.op.name for i in found.program.instructions]
    stored, filled = ops.index("dma_copy", 1), ops.index("memset")
    assert (found.start[filled] >= found.end[stored]) == (start == 4)


# --- waits ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("tiles", [8, 10])
@allows("sim_psum_capacity")
def test_psum_beyond_its_banks_is_copied_out_and_nothing_lacks(tiles):
    def kernel(a, b):
        out = nl.ndarray((tiles, 128, 512), nl.float32, buffer=nl.shared_hbm)
        left, right = nl.load(a), nl.load(b)
        banks = [nisa.nc_matmul(left, right) for _ in range(tiles)]
        for k in nl.static_range(tiles):
            nl.store(out[k], value=nisa.tensor_copy(banks[k], engine=nisa.vector_engine))
        for k in nl.static_range(tiles):  # all of them live until the end
            nl.store(out[k], value=nisa.tensor_copy(banks[k], engine=nisa.vector_engine))
        return out

    found = run(kernel, *(hbm(128, n, dtype=F32) for n in (128, 512)), order=PROGRAM_ORDER)
    assert found.overcommitted == (0, 0) and found.high_water("psum") == 8
    written = 2 + tiles + 4 * tiles  # loads, products, copies and stores
    assert (len(found.program.instructions) > written) == (tiles > 8)


@allows("sim_sbuf_capacity")
def test_what_one_instruction_lacks_is_told_in_bytes(monkeypatch):
    """A sum of two tiles of 80 KiB has a third: nothing of them can be elsewhere meanwhile."""

    def kernel(x):
        out = nl.ndarray((128, 20 * 1024), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, value=nisa.tensor_tensor(nl.load(x), nl.load(x), nl.add))
        return out

    with pytest.raises(NkiError, match="245760 bytes.*GCA035.*sim_instruction_capacity"):
        run(kernel, hbm(128, 20 * 1024, dtype=F32), order=PROGRAM_ORDER)
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_instruction_capacity")
    lacking, psum = run(kernel, hbm(128, 20 * 1024, dtype=F32), order=PROGRAM_ORDER).overcommitted
    assert psum == 0 and lacking == 3 * 80 * 1024 - GEN2.sbuf_usable_bytes
