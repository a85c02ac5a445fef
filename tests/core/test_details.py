"""Words, shapes and figures that a wrong character would change, and no other test reads."""

import numpy as np
import pytest
from neuronxcc import nki
from neuronxcc.nki import compiler as ncc
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki.language import par_dim

from neuron_cpu.core import NkiWarning
from neuron_cpu.core.time.lower import lower
from neuron_cpu.core.time.schedule import schedule
from tests.warned import allows


def whole(*shape, seed=0):
    """Small whole numbers: exact in every float type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def result(body, shape, *arrays):
    """What a kernel stores of the tile that ``body`` makes, and its program."""

    @nki.jit
    def kernel(*tensors):
        out = nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)
        nl.store(out, body(*tensors))
        return out

    return np.asarray(kernel(*arrays)), kernel.trace(*arrays)


def test_a_smaller_operand_is_broadcast_over_trailing_axes():
    x, y = whole(16, 4), whole(16, 4, 8, seed=1)
    for one, other in ((x, y), (y, x)):
        with pytest.warns(NkiWarning, match=r"broadcasts [^(]*\(16, 4\) .* over [^(]*\(16, 4, 8\)"):
            found, _ = result(lambda a, b: nl.multiply(nl.load(a), nl.load(b)), y.shape, one, other)
        assert np.array_equal(found, x[..., None] * y)


def test_vectors_of_two_bytes_are_operands():
    x = whole(16, 8)
    found, _ = result(
        lambda x: nisa.tensor_scalar(nl.load(x), np.add, nl.full((16, 1), 3, nl.bfloat16)),
        x.shape,
        x,
    )
    assert np.array_equal(found, x + 3)


def test_instructions_of_a_part_of_a_block_wait_for_that_part_alone():
    def cost(second):
        def body(x):
            blocks = nl.ndarray((2, par_dim(128), 4096), nl.float32)
            blocks[0, :, 0:2048] = nl.load(x)
            blocks[0, :, 2048:4096] = nl.load(x)
            made = nl.copy(blocks[0, :, second : second + 2048])
            return made

        return schedule(result(body, (128, 2048), whole(128, 2048))[1]).total

    assert cost(0) < cost(2048)


def test_the_dma_engine_of_gen3_turns_short_types_itself(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    program = result(
        lambda x: nl.copy(nisa.dma_transpose(x), dtype=nl.float32),
        (64, 128),
        np.zeros((128, 64), nl.bfloat16),
    )[1]
    ran = schedule(program).program.instructions
    assert [i.op.name for i in ran].count("dma_transpose") == 1


def test_neighbouring_partitions_share_an_engine_of_gen3(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")

    def body(x):
        tile = nl.ndarray((128, 64), nl.float32)
        tile[120:124, :] = nl.load(x)
        return tile[120:124, :]

    _, program = result(body, (4, 64), whole(4, 64))
    lanes = [moved.lanes for moved in schedule(program).transfers.values()]
    assert lanes[0] == (*(0,) * 15, 4)


def shared_rows(x):
    return nisa.tensor_scalar(nl.load(x).broadcast_to((128, 512)), nl.add, 2)


def row_of_a_grid(x):
    """Loaded by an unused axis of a grid, it has an axis too many, which the broadcast drops."""
    i_p, i_f, i_one = nl.mgrid[0:16, 0:8, 0:1]
    row = nl.load(x.reshape((1, 8))[i_one, i_f]).broadcast_to((16, 8))
    return nl.add(row, row)


def with_an_axis_of_one(x):
    rows = nl.ndarray((128, 3, 8), nl.float32)
    for k in nl.affine_range(3):
        rows[:, nl.ds(k, 1), :] = nisa.tensor_scalar(nl.load(x), nl.multiply, 2.0)
    return rows


def shifted(x):
    t = nl.ndarray(x.shape, x.dtype)
    t[...] = nl.load(x)
    t[:, 1:] = nisa.tensor_copy(t[:, :-1])
    t[...] = nisa.nc_transpose(t, engine=nisa.vector_engine)
    return t


def placed_products(a, b):
    """src/nki_samples/reference/allocated_fused_linear.py of nki-samples has this form."""

    def at(base, shape, free=()):
        place = ncc.sbuf.mod_alloc(base_addr=base, num_free_tiles=free)
        return nl.ndarray(shape, nl.float32, buffer=place)

    left, right = at(0, (2, par_dim(128), 64), (2,)), at(2048, (2, par_dim(128), 100), (2,))
    sums = nl.ndarray((1, par_dim(64), 100), nl.float32, buffer=ncc.psum.mod_alloc(base_bank=0))
    made = at(8192, (par_dim(64), 100))
    for i in nl.affine_range(2):
        left[i] = nl.load(a[i * 128 : (i + 1) * 128])
        right[i] = nl.load(b[i * 128 : (i + 1) * 128])
        sums[0] += nisa.nc_matmul(left[i], right[i])
    made[...] = nl.copy(sums[0])
    return made


def beside_running_sums(x):
    """bf16 data into fp32: a tile in the data's type between them would lose bits."""
    tile, made = nl.load(x), nl.ndarray((16, 64), nl.float32)
    command, sums = nisa.reduce_cmd, nl.ndarray((16, 1), nl.float32)
    for k, order in enumerate([command.reset_reduce, command.reduce]):
        part = nl.ds(32 * k, 32)
        made[:, part] = nisa.activation(
            nl.exp, tile[:, part], reduce_op=np.add, reduce_res=sums, reduce_cmd=order
        )
    made[...] = nisa.tensor_scalar(made, np.multiply, sums)
    return made


# What the body computes, the result, and how many instructions of one kind the program has.
SIXTEEN, EIGHT, LONG = whole(16, 16), whole(128, 8), whole(256, 100, seed=1)
RAISED = np.exp(whole(16, 64))
COMPUTED = {
    shared_rows: ([whole(1, 512)], np.tile(whole(1, 512) + 2, (128, 1)), "nc_matmul", 1),
    row_of_a_grid: ([whole(8)], np.tile(2 * whole(8), (16, 1)), "dma_copy", 2),
    with_an_axis_of_one: ([EIGHT], np.repeat(2 * EIGHT[:, None], 3, 1), "tensor_copy", 0),
    shifted: ([SIXTEEN], np.hstack([SIXTEEN[:, :1], SIXTEEN[:, :-1]]).T, "tensor_copy", 1),
    placed_products: ([whole(256, 64), LONG], whole(256, 64).T @ LONG, "nc_matmul", 2),
    beside_running_sums: (
        *([whole(16, 64).astype(nl.bfloat16)], RAISED * RAISED.sum(1, keepdims=True)),
        *("tensor_copy", 2),  # of the sums; the results need none
    ),
}


@pytest.mark.parametrize("eager", ["0", "1"], ids=["replay", "eager"])
@pytest.mark.parametrize("body", COMPUTED)
@allows("sim_newer_api")
def test_results_and_how_many_instructions_make_them(body, eager, monkeypatch):
    monkeypatch.setenv("NKI_CPU_EAGER", eager)
    arrays, want, op, count = COMPUTED[body]
    found, program = result(body, want.shape, *arrays)
    assert np.allclose(found, want, rtol=1e-6, atol=0)
    assert [i.op.name for i in lower(program).instructions].count(op) == count


def test_softmax_sums_as_it_computes_exponentials():
    found, program = result(lambda x: nl.softmax(nl.load(x), axis=1), (16, 8), whole(16, 8))
    assert np.allclose(found.sum(1), 1)
    assert [i.op.name for i in program.instructions].count("tensor_reduce") == 1  # the maximum


def test_an_engine_starts_20_cycles_after_it_is_told():
    """Engines of trn1 other than TensorE; GpSimdE's clock is 1.4 GHz."""
    _, program = result(
        lambda x: nisa.tensor_copy(nl.load(x), engine=nisa.gpsimd_engine), (16, 300), whole(16, 300)
    )
    planned = schedule(program)
    at = [i.op.name for i in program.instructions].index("tensor_copy")
    op = program.instructions[at].op
    assert planned.busy[at] * 1.4 == pytest.approx(op.cycles(program.instructions[at]) + 20)
