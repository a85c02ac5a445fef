"""Costs of single things: DMA rows and their profiles, transfers, collectives."""

import pytest
import torch
from neuronxcc.nki import language as nl

from neuron_cpu.core import Kernel, NkiError
from neuron_cpu.core.device import spec
from neuron_cpu.core.time import cost

FLAT = cost.PROFILES["sdk2.21"]
LATER = cost.PROFILES["sdk2.25"]
RULE = cost.PROFILES["row-rule"]
PEAK = cost.PROFILES["hbm-peak"]

# nki-dma-overview.rst (v2.27.1), figure: bytes per partition -> share of the plateau, read to 0.01
PUBLISHED_CURVE = {
    32: 0.014, 64: 0.026, 128: 0.053, 256: 0.10, 512: 0.21, 1024: 0.42, 2048: 0.82, 4096: 0.97,
    8192: 0.98, 16384: 0.99, 32768: 1.00,
}  # fmt: skip


def transfer_of(function, *shapes, at=0):
    """The ``at``-th DMA instruction of a kernel as rows."""
    args = [torch.empty(s, dtype=d, device="meta") for s, d in shapes]
    program = Kernel(function).trace(*args)
    moves = [i for i in program.instructions if i.op.name.startswith("dma")]
    return cost.transfer(moves[at])


# --- profiles -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "share"), PUBLISHED_CURVE.items())
def test_row_rule_follows_the_published_curve(size, share):
    plateau = spec.GEN2.dma.bytes_per_ns * spec.GEN2.dma.engines
    assert RULE.bandwidth(size) / plateau == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_flat_profile_is_the_matmul_tutorials_104_gb_per_s(size):
    assert FLAT.bandwidth(size) == pytest.approx(104)


def test_profile_of_later_sdks_meets_its_measurements():
    assert LATER.bandwidth(1024) == LATER.peak == pytest.approx(272)
    assert 8 * LATER.row_ns(256) == 160  # the 20.99 ms of the tiled matmul: 0.64 us a product with
    assert 8 * (LATER.row_ns(256) + LATER.row_ns(1024)) == pytest.approx(640, rel=0.01)  # both
    assert LATER.row_ns(8) <= 22
    assert LATER.row_ns(4) == 40  # part of a word


def test_peak_profile_is_the_share_of_hbm():
    assert PEAK.bandwidth(64) == pytest.approx(PEAK.peak) == pytest.approx(410)


def test_unknown_profile_is_one_sentence():
    with pytest.raises(NkiError) as caught:
        cost.dma_profile("warp")
    assert "'warp' does not exist, expected one of " in str(caught.value)
    assert "\n" not in str(caught.value)


# --- transfers ------------------------------------------------------------------------------------
def load(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.load(x))
    return out


def test_few_rows_begin_at_the_engine_of_their_first_partition():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((128, 64), dtype=x.dtype)
        tile[120:124, :] = nl.load(x)
        nl.store(out, value=tile[120:124, :])
        return out

    assert transfer_of(kernel, ((4, 64), torch.float32)).lanes == (1, 1, 1, *(0,) * 12, 1)


# --- outside of kernels ---------------------------------------------------------------------------
def test_collectives_are_free_on_one_rank_and_grow_with_their_bytes():
    costs = cost.Overheads()
    assert costs.collective(4096, 1) == 0.0
    assert costs.collective(0, 2) == spec.COLLECTIVE_START_NS
    assert costs.collective(8192, 2) > costs.collective(4096, 2)
    ring = cost.Overheads(collective_ns=0.0)
    assert ring.collective(100, 2) == 100 / 50.0
    for ranks in (2, 3, 8):
        halves = [ring.collective(100, ranks, n) for n in ("all-gather", "reduce-scatter by sum")]
        assert halves[0] == halves[1] == 100 * (ranks - 1) / ranks / 50.0
        assert ring.collective(100, ranks) == sum(halves)
