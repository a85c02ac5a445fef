"""Figures that reports print beside others, recomputed from the schedule."""

from __future__ import annotations

import io
import json

import pytest
import torch
from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl
from rich.console import Console

from neuron_cpu.core import Kernel
from neuron_cpu.core.report import report, tables
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import PROGRAM_ORDER, schedule


def powers(x):
    out = nl.ndarray((128, 2048), nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    for _ in nl.static_range(6):
        tile = nisa.activation(nl.square, tile)
    nl.store(out, value=tile)
    return out


X = torch.empty(128, 2048, device="meta")


@pytest.fixture(scope="module")
def found():
    return schedule(Kernel(powers).trace(X))


def test_shares_of_the_critical_path_add_up_to_all_of_it(found):
    summary = report.profile(found)
    console = Console(width=200, file=io.StringIO())
    console.print(tables._critical(summary))
    rows = [line.strip("│ ").split("│") for line in console.file.getvalue().splitlines()]
    shares = {row[0].strip(): float(row[2].strip(" %")) for row in rows if "%" in row[-1]}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    busy = 6 * (2048 + 20) / 1.4  # ns on ScalarE
    assert shares["ScalarE"] == pytest.approx(100 * busy / found.total, abs=0.1)


def test_counters_of_a_trace_stand_at_the_times_of_the_schedule(found):
    events = report.perfetto([("powers", found)])["traceEvents"]
    shown = [e for e in events if e["ph"] == "C" and e["name"] == "SBUF bytes per partition"]
    steps = found.memory("sbuf")
    assert [e["ts"] for e in shown] == pytest.approx([time / 1e3 for time, _ in steps], abs=1e-4)
    assert [list(e["args"].values()) for e in shown] == [[use] for _, use in steps]


def test_a_profile_makes_the_folders_on_its_way(tmp_path):
    folder = tmp_path / "profiles" / "today"
    nki.profile(powers, working_directory=str(folder))(X)
    assert json.loads((folder / "profile.ntff.json").read_text())["traceEvents"]


def test_a_transposing_transfer_has_a_row_for_every_element():
    def kernel(x):
        out = nl.ndarray((64, 128), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, value=nisa.dma_transpose(x))
        return out

    args = [torch.empty(128, 64, dtype=torch.bfloat16, device="meta")]
    ran = schedule(Kernel(kernel).trace(*args), order=PROGRAM_ORDER)
    turned, stored = (cost.transfer(i) for i in ran.program.instructions)
    assert (turned.rows, turned.row_bytes) == (128 * 64, 2)
    assert (stored.rows, stored.row_bytes) == (64, 256)
