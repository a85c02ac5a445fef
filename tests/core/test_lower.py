"""What the compiler makes of a kernel: each pass on small programs, and equal results on all."""

import functools
import random

import pytest
import torch
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki.compiler import skip_middle_end_transformations

from neuron_cpu.core import Kernel
from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.lower import lower
from neuron_cpu.core.time.passes.spill import spill, spilling
from neuron_cpu.core.time.schedule import schedule

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")

F32, BF16 = torch.float32, torch.bfloat16


def trace(function, *shapes):
    return Kernel(function).trace(*(torch.empty(s, device="meta") for s in shapes))


def count(program, op):
    return sum(i.op.name == op for i in program.instructions)


def buffers(program, op):
    """How many tensors the results of one opcode lie in."""
    return len({i.dst[0].storage.id for i in program.instructions if i.op.name == op})


def same_results(program, *inputs, changed=lower):
    """Both programs, executed instruction by instruction, on the same numbers."""
    lowered = changed(program)
    made = [s.id for s in lowered.storages if s not in program.storages]
    assert len(set(made)) == len(made)
    assert min(made, default=1 << 30) > max(s.id for s in program.storages)
    (before,) = Plan(program, merge_loops=False).run([x.clone() for x in inputs])
    (after,) = Plan(lowered, merge_loops=False).run([x.clone() for x in inputs])
    return torch.equal(before, after)


# --- rename ---------------------------------------------------------------------------------------
def reusing(loop, columns=lambda k: 8, read=lambda tile, k: tile[:, 0:8], before=None):
    """Each round loads into the first columns of one tile and stores what ``read`` selects."""

    def kernel(x):
        out = nl.ndarray((4, 128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.zeros((128, 8), dtype=nl.float32)
        for k in loop(4):
            tile[:, 0 : columns(k)] = nl.load(x[:, 0 : columns(k)])
            nl.store(out[k], value=nisa.tensor_scalar(read(tile, k), nl.multiply, 1.0 + k))
        return out

    return trace(kernel, (128, 8))


def test_sequential_loops_keep_their_buffers():
    program = reusing(nl.sequential_range)
    assert lower(program).instructions == program.instructions


def test_a_value_that_a_later_write_covers_in_part_stays_where_it_is():
    program = reusing(nl.static_range, columns=lambda k: 8 - 2 * k)  # reads what is older
    loads = buffers(lower(program), "dma_copy") - 1  # the output is the other one
    assert loads == 1
    assert same_results(program, torch.randn(128, 8))


# --- hoist ----------------------------------------------------------------------------------------
def test_loads_and_work_that_a_loop_repeats_run_once():
    def kernel(x, scale):
        out = nl.ndarray((3, 4, 128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(3):
            for j in nl.affine_range(4):
                row = nisa.activation(nl.square, nl.load(scale[i]))  # invariant in j
                ones = nisa.memset((128, 8), 1.0, nl.float32)  # invariant in both
                part = nisa.tensor_tensor(nl.load(x[j]), row, op=nl.add)
                nl.store(out[i, j], value=nisa.tensor_tensor(part, ones, op=nl.multiply))
        return out

    program = trace(kernel, (4, 128, 8), (3, 128, 8))
    lowered = lower(program)
    assert count(program, "activation") == 12 and count(lowered, "activation") == 3
    assert count(lowered, "memset") == 1
    # x[j] changes in the inner loop; its four tiles fit, so they stay
    assert count(lowered, "dma_copy") == 3 + 4 + 12
    assert count(lower(program, keeps=False), "dma_copy") == 3 + 12 + 12
    assert same_results(program, torch.randn(4, 128, 8), torch.randn(3, 128, 8))


# --- transpose ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(128, 64), (300, 128), (5, 7)])
def test_transposing_loads_go_through_tensor_engine(shape):
    def kernel(x):
        out = nl.ndarray((shape[1], shape[0]), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, value=nl.load_transpose2d(x))
        return out

    program = trace(kernel, shape)
    lowered = lower(program)
    blocks = -(-shape[0] // 128)
    assert count(program, "dma_transpose") == 1 and count(lowered, "dma_transpose") == 0
    assert count(lowered, "nc_transpose") == count(lowered, "tensor_copy") == blocks
    assert same_results(program, torch.randn(*shape))


def test_transposing_stores_go_through_tensor_engine():
    def kernel(x):
        out = nl.ndarray((64, 128), dtype=nl.float32, buffer=nl.shared_hbm)
        rows, columns = nl.mgrid[0:128, 0:64]
        nl.store(out[columns, rows], value=nl.load(x))
        return out

    program = trace(kernel, (128, 64))
    lowered = lower(program)
    assert count(lowered, "nc_transpose") == 1
    stored = lowered.instructions[-1]
    assert stored.op.name == "dma_copy" and stored.src[0].shape == (64, 128)
    assert same_results(program, torch.randn(128, 64))


# --- broadcast ------------------------------------------------------------------------------------
def stretched(columns, explicit):
    def kernel(x, row):
        out = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.shared_hbm)
        tile, one = nl.load(x), nl.load(row)
        wide = one.broadcast_to((128, columns)) if explicit else one
        nl.store(out, value=nl.multiply(tile, wide))
        return out

    return trace(kernel, (128, columns), (1, columns))


def test_an_operator_reads_its_own_broadcast_from_psum():
    program = stretched(512, explicit=False)
    lowered = lower(program)
    product = next(i for i in lowered.instructions if i.op.name == "tensor_tensor")
    assert count(program, "tensor_copy") == 1 and count(lowered, "tensor_copy") == 0
    assert "psum" in [v.storage.buffer for v in product.src]
    assert product.op.cycles(product) == 512  # 1024 with both operands in SBUF
    assert same_results(program, torch.randn(128, 512), torch.randn(1, 512))


# --- join -----------------------------------------------------------------------------------------
def windows(n, block, width=3, larger=False):
    """Sums of ``n`` neighbouring windows, in blocks of a loop."""

    def kernel(x):
        out = nl.ndarray((128, n), dtype=nl.float32, buffer=nl.shared_hbm)
        tile, sums = nl.load(x), nl.ndarray((128, n), dtype=nl.float32)
        for b in nl.affine_range(n // block):
            for k in nl.affine_range(block):
                at = b * block + k
                part = nisa.tensor_scalar(tile[:, nl.ds(at, width)], nl.multiply, 2.0)
                sums[:, nl.ds(at, 1)] = nisa.tensor_reduce(nl.add, part, axis=1)
        nl.store(out, value=sums)
        return out

    return trace(kernel, (128, n + width))


@pytest.mark.parametrize(("block", "each"), [(64, 4), (128, 2), (256, 256)])
def test_short_loops_over_few_elements_become_one_instruction(block, each):
    program = windows(256, block)
    lowered = lower(program)
    assert count(lowered, "tensor_scalar") == count(lowered, "tensor_reduce") == each
    first = next(i for i in lowered.instructions if i.op.name == "tensor_reduce")
    assert first.op.cycles(first) == max(64, 256 // each * 3)
    assert same_results(program, torch.randn(128, 259))


@pytest.mark.parametrize(("in_psum", "sums"), [(True, 65), (False, 258)])
def test_long_loops_join_four_sums_where_an_operand_lies_in_psum(in_psum, sums):
    """Windows overlap, so that their products stay apart; 258 iterations leave a rest of two."""

    def kernel(x):
        out = nl.ndarray((128, 258), dtype=nl.float32, buffer=nl.shared_hbm)
        tile, found = nl.load(x), nl.ndarray((128, 258), dtype=nl.float32)
        weights = nl.ndarray((128, 3), dtype=nl.float32, buffer=nl.psum if in_psum else nl.sbuf)
        weights[...] = nisa.tensor_copy(tile[:, 0:3])
        for k in nl.affine_range(258):
            part = nisa.tensor_tensor(tile[:, nl.ds(k, 3)], weights, op=nl.multiply)
            found[:, nl.ds(k, 1)] = nisa.tensor_reduce(nl.add, part, axis=1)
        nl.store(out, value=found)
        return out

    program = trace(kernel, (128, 261))
    lowered = lower(program)
    assert count(lowered, "tensor_tensor") == 258
    assert count(lowered, "tensor_reduce") == sums
    assert same_results(program, torch.randn(128, 261))


def test_wide_instructions_are_not_joined():
    program = windows(256, 64, width=64)
    assert count(lower(program), "tensor_reduce") == 256


# --- spill ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_a_spilled_program_computes_the_same_bits(seed):
    program = random_kernel(seed)
    changed = functools.partial(spill, sbuf_bytes=4 * 64)
    assert any(spilling(i) for i in changed(lower(program)).instructions)
    assert same_results(
        program, torch.randn(2, 128, 16), changed=lambda program: changed(lower(program))
    )


# --- laws -----------------------------------------------------------------------------------------
def random_kernel(seed):
    """Loops of all kinds around reused buffers, invariant loads, partial writes, all engines."""
    rng = random.Random(seed)
    plan = [[rng.randrange(10) for _ in range(9)] for _ in range(3)]
    picks = [rng.randrange(1 << 30) for _ in range(200)]

    def kernel(x):
        out = nl.ndarray((128, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        kept = [nl.zeros((128, 16), dtype=nl.float32) for _ in range(3)]
        at = iter(picks * 30)

        def part():
            low = next(at) % 12
            return nl.ds(low, 1 + next(at) % (16 - low))

        def body(kind, k):
            a, b = kept[next(at) % 3], kept[next(at) % 3]
            if kind == 0:
                a[...] = nl.load(x[next(at) % 2])
            elif kind == 1:
                cut = part()
                a[:, cut] = nl.load(x[next(at) % 2, :, cut])
            elif kind == 2:
                a[...] = nisa.tensor_tensor(a, b, op=nl.add)
            elif kind == 3:
                a[...] = nisa.tensor_scalar(b, nl.multiply, 0.5 + k)
            elif kind == 4:
                fresh = nisa.tensor_scalar(nl.load(x[0]), nl.add, 1.0)
                b[...] = nisa.tensor_tensor(b, fresh, op=nl.subtract)
            elif kind == 5:
                cut = part()
                a[:, cut] = nisa.tensor_copy(b[:, cut])
            elif kind == 6:
                b[...] = nisa.memset((128, 16), 1.0, nl.float32)
            elif kind == 7:
                a[...] = nisa.activation(nl.tanh, b)
            elif kind == 8:
                cut = part()
                b[:, cut] = nisa.tensor_copy(a[:, cut], engine=nisa.gpsimd_engine)
            else:
                a[0:16] = nisa.activation(nl.tanh, nisa.nc_matmul(a, b))

        for number, loop in enumerate((nl.static_range, nl.sequential_range, nl.static_range)):
            for k in loop(3):
                for kind in plan[number]:
                    body(kind, k)
        total = nisa.tensor_tensor(kept[0], kept[1], op=nl.add)
        nl.store(out, value=nisa.tensor_tensor(total, kept[2], op=nl.add))
        return out

    return trace(kernel, (2, 128, 16))


@pytest.mark.parametrize("seed", range(6))
def test_a_lowered_program_computes_the_same_bits(seed):
    program = random_kernel(seed)
    before = list(program.instructions)
    assert same_results(
        program, torch.randn(2, 128, 16, generator=torch.Generator().manual_seed(seed))
    )
    assert program.instructions == before  # the kernel's own program is not touched


# --- what passes must leave alone -----------------------------------------------------------------
def results(program, *inputs):
    """What the program computes and what its lowered form does, instruction by instruction."""
    return [
        Plan(form, merge_loops=False).run([x.clone() for x in inputs])[0]
        for form in (program, lower(program))
    ]


# --- join -----------------------------------------------------------------------------------------
def doubled(n, extra=()):
    """Each of ``n`` columns times two; the iterations in ``extra`` add one first."""

    def kernel(x):
        out = nl.ndarray((128, n), nl.float32, buffer=nl.shared_hbm)
        tile, sums = nl.load(x), nl.ndarray((128, n), nl.float32)
        for k in nl.affine_range(n):
            column = tile[:, nl.ds(k, 1)]
            more = nisa.tensor_scalar(column, nl.add, 1.0) if k in extra else column
            sums[:, nl.ds(k, 1)] = nisa.tensor_scalar(more, nl.multiply, 2.0)
        nl.store(out, value=sums)
        return out

    return trace(kernel, (128, n))


@pytest.mark.parametrize("n", [2, 3, 128])
def test_a_loop_of_few_iterations_becomes_one_instruction(n):
    program = doubled(n)
    assert count(program, "tensor_scalar") == n and count(lower(program), "tensor_scalar") == 1
    before, after = results(program, torch.randn(128, n))
    assert torch.equal(before, after)


@pytest.mark.parametrize("extra", [(0,), (1,), (3,), (0, 1, 2)])
def test_iterations_that_differ_are_not_joined(extra):
    x = torch.randn(128, 4)
    before, after = results(doubled(4, extra), x)
    wanted = x.clone()
    wanted[:, list(extra)] += 1
    assert torch.equal(before, 2 * wanted) and torch.equal(after, 2 * wanted)


# --- broadcast ------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", [nl.psum, nl.sbuf])
def test_a_broadcast_row_is_copied_where_the_other_operand_lies_in_psum(memory):
    """An instruction reads at most one operand from PSUM."""

    def kernel(x, row):
        out = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 64), nl.float32, buffer=memory)
        tile[...] = nisa.tensor_copy(nl.load(x))
        nl.store(out, value=nl.multiply(tile, nl.load(row)))
        return out

    program = trace(kernel, (128, 64), (1, 64))
    copies = 2 if memory is nl.psum else 1
    assert count(lower(program), "tensor_copy") == copies
    x, row = torch.randn(128, 64), torch.randn(1, 64)
    for found in results(program, x, row):
        torch.testing.assert_close(found, x * row)


# --- rename ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("held", [False, True])
def test_an_index_that_chooses_rows_stays_where_it_is(held):
    """Rows are found through the index tile itself, not through an operand that could move."""

    def kernel(table, rows):
        out = nl.ndarray((3, 64, 16), nl.float32, buffer=nl.shared_hbm)
        index = nl.ndarray((64, 1), nl.int32)
        p, f = nl.arange(64)[:, None], nl.arange(16)[None, :]
        for k in nl.static_range(3):
            index[...] = nisa.memset((64, 1), 0, nl.int32)
            index[...] = nl.load(rows[k])
            at = index if held else nisa.tensor_copy(index)
            nl.store(out[k], value=nl.load(table[at[p, 0], f]))
        return out

    table = torch.randn(1000, 16)
    rows = torch.randint(0, 1000, (3, 64, 1), generator=torch.Generator().manual_seed(1))
    program = Kernel(kernel).trace(table.to("meta"), rows.int().to("meta"))
    written = {
        i.dst[0].storage.id
        for i in lower(program).instructions
        if i.op.name in ("memset", "dma_copy") and i.dst[0].dt.name == "int32"
    }
    assert len(written) == (1 if held else 2)
    for found in results(program, table, rows.int()):
        assert torch.equal(found, table[rows[..., 0]])


# --- rename ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_values_of_an_outer_buffer_in_a_sequential_loop(skipped, carried):
    """Only a kernel whose loops are unrolled before gives each value a tile of its own."""

    def kernel(x):
        out = nl.ndarray((8, 128, 256), nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x[0])
        for k in nl.sequential_range(8):
            if not carried:
                tile[...] = nl.load(x[k])
            made = nisa.tensor_scalar(tile, nl.add, 1.0)
            nl.store(out[k], value=made)
            if carried:
                tile[...] = nisa.tensor_scalar(made, nl.multiply, 0.5)
        return out

    if skipped:
        kernel = skip_middle_end_transformations(kernel)
    program = trace(kernel, (8, 128, 256))
    before, after = results(program, torch.randn(8, 128, 256))
    assert torch.equal(before, after)
    made = lower(program)
    assert (len(made.storages) > len(program.storages)) is skipped
    if not carried:
        kept = schedule(program).total
        program.skips_middle_end = not skipped
        other = schedule(program).total
        assert min(kept, other) < 0.7 * max(kept, other) and (kept < other) is skipped
