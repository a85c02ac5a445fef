"""What the compiler's passes must leave alone: forms next to those of test_lower.py."""

from __future__ import annotations

import pytest
import torch
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki.compiler import skip_middle_end_transformations

from neuron_cpu.core import Kernel
from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.lower import lower
from neuron_cpu.core.time.schedule import schedule

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")


def trace(function, *shapes, dtype=torch.float32):
    return Kernel(function).trace(*(torch.empty(s, dtype=dtype, device="meta") for s in shapes))


def count(program, op):
    return sum(i.op.name == op for i in program.instructions)


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
