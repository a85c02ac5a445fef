"""What a transpose by DMA is estimated to take: elements on gen2, rows from gen3 on."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu.core.time.schedule import schedule

ROWS, BLOCKS = 16, 64  # 16 rows of 64 x 128 elements of two bytes: 256 KiB
BYTES = ROWS * BLOCKS * 128 * 2


@nki.jit
def turned(x):
    out = nl.ndarray((128, BLOCKS, ROWS), x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, BLOCKS, ROWS), x.dtype)
    nisa.dma_transpose(dst=tile, src=x)
    nisa.dma_copy(out, tile)
    return out


@pytest.mark.parametrize(
    ("name", "rates", "share"),
    [("trn2", (19, 25), 0.9), ("trn3", (25, 33), 0.9)],
    ids=["gen3", "gen4"],
)
def test_engines_of_later_generations_move_rows(name, rates, share, target):
    target(name)
    x = np.zeros((ROWS, BLOCKS, 128), nl.bfloat16)
    planned = schedule(turned.trace(x))
    moved = next(iter(planned.transfers.values()))
    assert (moved.rows, moved.row_bytes, moved.share) == (ROWS, BLOCKS * 128 * 2, share)
    spans = [end - begin for _, at, begin, end in planned.lane_spans() if at == 0]
    short, long = (moved.row_bytes / rate for rate in rates)  # B/ns of an engine
    row_ns = min(short + 4, long + 16) / share  # with what each row adds
    assert len(spans) == 16 and max(spans) == pytest.approx(ROWS / 16 * row_ns, rel=0.02)


@pytest.mark.warns("sim_transpose_by_dma")
def test_gen2_moves_elements(target):
    target("trn1")
    planned = schedule(turned.trace(np.zeros((ROWS, BLOCKS, 128), nl.bfloat16)))
    moved = next(iter(planned.transfers.values()))
    assert (moved.rows, moved.row_bytes, moved.share) == (BYTES // 2, 2, 1.0)
