"""Words, shapes and figures that a wrong character would change, and no other test reads."""

from __future__ import annotations

import numpy as np
import pytest
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from neuronxcc.nki.language import par_dim

from neuron_cpu.core import NkiWarning
from neuron_cpu.core.run.boundaries import carriers
from neuron_cpu.core.time.schedule import schedule


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


@pytest.mark.parametrize("through", ["copies", "arithmetic"])
def test_moves_alone_carry_an_argument_to_a_result(through):
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        first = nl.load(x)
        second = nl.copy(first)
        third = nl.copy(second) if through == "copies" else nl.add(second, 1.0)
        nl.store(out, third)
        return out

    program = kernel.trace(np.zeros((16, 8), nl.bfloat16))
    apart = set(program.storages) - carriers(program, program.inputs)
    assert len(program.storages) == 5
    assert len(apart) == (through == "arithmetic")  # moves behind it carry the result
