"""Boxes of views askew in their storage, placed tiles, and memory that does not suffice."""

from __future__ import annotations

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
from neuron_cpu.core.device.spec import GEN2
from neuron_cpu.core.language.tensor import Tile as Tensor
from neuron_cpu.core.program import regions
from neuron_cpu.core.program.storage import Storage
from neuron_cpu.core.time.schedule import PROGRAM_ORDER, schedule

pytestmark = pytest.mark.filterwarnings("ignore::neuron_cpu.core.NkiWarning")


def simulate(function, *shapes, dtype=torch.float32, order=PROGRAM_ORDER):
    args = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return schedule(Kernel(function).trace(*args), order=order)


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

    found = simulate(kernel, (128, 5), dtype=torch.uint8, order="compiler")
    ops = [i.op.name for i in found.program.instructions]
    stored, filled = ops.index("dma_copy", 1), ops.index("memset")
    assert (found.start[filled] >= found.end[stored]) == (start == 4)


# --- waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [8, 10])
def test_psum_beyond_its_banks_is_copied_out_and_nothing_lacks(tiles):
    def kernel(a, b):
        out = nl.ndarray((tiles, 128, 512), nl.float32, buffer=nl.shared_hbm)
        left, right = nl.load(a), nl.load(b)
        banks = [nisa.nc_matmul(left, right) for _ in range(tiles)]
        for k in range(tiles):
            nl.store(out[k], value=nisa.tensor_copy(banks[k], engine=nisa.vector_engine))
        for k in range(tiles):  # all of them live until the end
            nl.store(out[k], value=nisa.tensor_copy(banks[k], engine=nisa.vector_engine))
        return out

    found = simulate(kernel, (128, 128), (128, 512))
    assert found.overcommitted == (0, 0) and found.high_water("psum") == 8
    written = 2 + tiles + 4 * tiles  # loads, products, copies and stores
    assert (len(found.program.instructions) > written) == (tiles > 8)


def test_what_one_instruction_lacks_is_told_in_bytes(monkeypatch):
    """A sum of two tiles of 80 KiB has a third: nothing of them can be elsewhere meanwhile."""

    def kernel(x):
        out = nl.ndarray((128, 20 * 1024), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, value=nisa.tensor_tensor(nl.load(x), nl.load(x), nl.add))
        return out

    with pytest.raises(NkiError, match="245760 bytes.*GCA035.*sim_instruction_capacity"):
        simulate(kernel, (128, 20 * 1024))
    monkeypatch.setenv("NKI_CPU_SILENCE", "sim_instruction_capacity")
    lacking, psum = simulate(kernel, (128, 20 * 1024)).overcommitted
    assert psum == 0 and lacking == 3 * 80 * 1024 - GEN2.sbuf_usable_bytes
