"""Small kernels in today's language, and the profiler that times them."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from harness.device import calls, model, page, plan, timing
from harness.device.rows import ROWS
from tests.warned import allows

pytestmark = allows("sim_sbuf_capacity")  # a row spills on purpose
ONE_OF_EACH = (
    "vector-stream-64-512", "scalar-chain-1-32", "product-16-64", "rows-512",
    "product-chain-16", "transfers-16", "round-trips-4", "gathers-8", "two-vector-scalar-psum",
    "small",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_small_kernel_has_the_same_results_in_both_languages(name, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    before, today = (
        calls.computed(plan.of_row(ROWS[name], language).call, calls.Seeded())
        for language in (False, True)
    )
    assert calls.difference(before, today)["equal"] == 1


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_every_small_kernel_of_today_has_an_estimate_and_no_warning(target, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    every = {name: plan.of_row(row, today=True).call for name, row in ROWS.items()}
    assert all(0 < model.graph_ns(call) < 2e6 for call in every.values())


def test_a_call_of_today_s_language_is_the_same_when_it_is_read_again():
    origin = calls.module(calls.SUBMISSIONS[True])
    heads = origin.HeadShape(16, 4, 64)
    told = json.loads(json.dumps(calls.written((heads, torch.zeros(2, 3), None))))
    read, tensor, none = calls.read(told, origin, calls.shapes)
    assert (read.q_heads, read.kv_heads, read.head_dim, none) == (16, 4, 64, None)
    assert tuple(tensor.shape) == (2, 3)


def test_a_kernel_runs_on_numpy_s_arrays_and_both_sides_are_compared_with_fp32(tmp_path):
    call = plan.of_row(ROWS["product-chain-16"], today=True).call
    calls.run(call, str(tmp_path / "out.pt"))
    found = calls.compare(call, str(tmp_path / "out.pt"))
    assert found["equal"] == 1 and found["error"] == 0
    assert 0 < found["device to fp32"] == found["simulator to fp32"] < 0.1


def test_a_kernel_that_takes_no_fp32_says_why_it_is_not_compared_with_it(tmp_path, monkeypatch):
    call = plan.of_row(ROWS["product-chain-16"], today=True).call
    calls.run(call, str(tmp_path / "out.pt"))
    computed = calls.computed

    def narrow(call, tensor):
        if tensor(torch.Size([1]), "bf16").dtype == torch.float32:
            raise ValueError("tiles of fp32 have no room")
        return computed(call, calls.Seeded())

    monkeypatch.setattr(calls, "computed", narrow)
    found = calls.compare(call, str(tmp_path / "out.pt"))
    assert found["error"] == 0 and found["no fp32"] == "ValueError: tiles of fp32 have no room"
    *_, told = page._row("a kernel", found | {"status": "measured", "exact": False})
    assert "not compared with fp32 (ValueError: tiles of fp32 have no room)" in told


def test_an_estimate_is_for_the_chip_that_is_measured(monkeypatch):
    call, clocks = ROWS["vector-chain-512-128"]._asdict() | {"module": calls.MICRO}, []
    for target in ("trn1", "trn2"):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        clocks.append(model.program(call).core.name)
    assert clocks == ["gen2", "gen3"]


@pytest.fixture
def sdk_of_today(tmp_path, monkeypatch):
    """A profiler that tells 10 us for each of five traces, and a process that leaves a NEFF."""

    def tool(name, text):
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return str(path)

    capture = "for n in 11 22 33 44 55; do echo > profile_exec_$n.ntff; done"
    view = 'echo reading; echo \'{"n": {"total_time": 1e-05}}\''
    tool("neuron-explorer", f'case "$1" in capture) {capture};; *) {view};; esac')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(timing, "TOOLS", str(tmp_path))
    monkeypatch.setattr(sys, "executable", tool("python", 'echo > "$NKI_ARTIFACTS_DIR/k.neff"'))
    return tool


def test_a_profiler_s_times_are_microseconds_on_the_device(sdk_of_today):
    found = timing.profiled(plan.of_row(ROWS["small"], today=True).call)
    assert all(math.isclose(us, 10) for us in found.values()) and set(found) == {"p0", "p50", "p99"}


def test_the_compiler_s_words_are_told(sdk_of_today):
    sdk_of_today("python", "echo 'error: no such engine' >&2; exit 70")
    with pytest.raises(RuntimeError, match="python: error: no such engine"):
        timing.profiled(plan.of_row(ROWS["small"], today=True).call)


@pytest.mark.parametrize(
    "summary",
    [
        '{"n0": {"total_time": 0.017, "event_count": 3}}',
        'read profile.ntff\n{"summary": [{"event_count": 3, "total_time": 0.017}]}\ndone',
        '[{"total_time": 0.017}]',
        '{"total_time": 0.017}',
    ],
)
def test_a_profilers_summary_may_nest_its_time_in_any_way(summary: str) -> None:
    assert timing.seconds_of(summary) == 0.017


@pytest.mark.parametrize(
    "summary", ["", "{", "no profile", '{"n0": {"time": 1}}', '{"total_time": "x"}']
)
def test_a_summary_without_a_time_is_told(summary: str) -> None:
    with pytest.raises(ValueError, match="has no total_time"):
        timing.seconds_of(summary)
