"""From gen3 on TensorE ramps up, and short instructions take their start."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core.device.spec import GEN3
from neuron_cpu.core.time.schedule import schedule

COLUMNS = {"trn1": 512 * 1.125 / 2.8, "trn2": (512 + 8) / 2.4}  # ns of a bf16 product of 512


@nki.jit
def products(a, b, count, rest):
    out = nl.ndarray((128, 512), nl.float32, buffer=nl.shared_hbm)
    left, right = nl.ndarray(a.shape, a.dtype), nl.ndarray(b.shape, b.dtype)
    nisa.dma_copy(left, a)
    nisa.dma_copy(right, b)
    total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
    for _ in range(count):
        nisa.nc_matmul(total, left, right)
        for _ in range(rest):  # TensorE waits: its next operand is written anew
            nisa.tensor_copy(left, left)
    tile = nl.ndarray((128, 512), nl.float32)
    nisa.tensor_copy(tile, total)
    nisa.dma_copy(out, tile)
    return out


@pytest.mark.parametrize("name", ["trn1", "trn2"])
@pytest.mark.parametrize("rest", [0, 8], ids=["dense", "with-gaps"])
def test_tensor_engine_ramps_up(name, rest, target):
    target(name)
    a, b = np.zeros((128, 128), nl.bfloat16), np.zeros((128, 512), nl.bfloat16)
    planned = schedule(products.trace(a, b, 32, rest))
    found = [t for t, e in zip(planned.busy, planned.engine) if e == 0]
    halves = 0 if name == "trn1" else 32 if rest else 4  # 3 us / 2 of work at half rate, rounded up
    want = [2 * COLUMNS[name]] * halves + [COLUMNS[name]] * (32 - halves)
    assert found == pytest.approx(want)


ISSUED = {  # issuers of three transfers, in whose order their rows begin, in ns
    "sync": (("sync",) * 3, (600, 1200, 1800)),
    "both": (("sync", "scalar", "sync"), (600, 600, 1200)),
    "either": (("unknown",) * 3, (600, 600, 1200)),
    "open": ((), (0, 0, 0)),
}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("name", ISSUED)
def test_descriptors_are_made_one_after_the_other(target, name, indexed):
    """By hardware 600 ns each on the queue of Sync or Scalar (Trainium2's guide), by GpSimdE one
    for each index."""
    target("trn2")
    issuers, after = ISSUED[name]

    @nki.jit
    def moved(x):
        place = nl.ndarray((1, 1), nl.int32)
        nisa.memset(place, 1)
        out = nl.ndarray((3, 16, 64), x.dtype, buffer=nl.shared_hbm)
        tiles = [nl.ndarray((16, 64), x.dtype) for _ in range(3)]
        chosen = dict(scalar_offset=place, indirect_dim=0) if indexed else {}
        for at, tile in enumerate(tiles):
            source, made = x.ap([[64, 16], [1, 64]], **chosen), {}
            if issuers:
                made["dge_mode"] = nisa.dge_mode.hwdge
                made["engine"] = getattr(nisa.engine, issuers[at])
            nisa.dma_copy(tile, source, **made)
        for at, tile in enumerate(tiles):
            nisa.dma_copy(out[at], tile)
        return out

    found = schedule(moved.trace(np.zeros((4, 16, 64), nl.float32)), "sdk2.25")
    code, begin = found.program.instructions, GEN3.dma.start_ns + found.end[0] * indexed
    starts = sorted(
        found.start[at] for at in found.transfers if code[at].src[0].storage.name == "x"
    )
    if indexed and not issuers:
        after = [count * GEN3.dma.one_index_ns for count in (1, 2, 3)]
    told = 200 * indexed  # that the index is there; rows behind others on an engine take 20 ns
    assert [time - begin for time in starts] == pytest.approx(after, abs=40 + told)
