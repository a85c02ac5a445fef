"""Small kernels in today's language, and the profiler that times them."""

import math
import sys
from pathlib import Path

import pytest

from lab.device import calls, hour, model, plan, timing
from lab.device.rows import ROWS
from tests.lab import played
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


def test_a_kernel_runs_on_numpy_s_arrays_and_both_sides_are_compared_with_fp32(tmp_path):
    call = plan.of_row(ROWS["product-chain-16"], today=True).call
    calls.run(call, str(tmp_path / "out.pt"))
    found = calls.compare(call, str(tmp_path / "out.pt"))
    assert found["equal"] == 1 and found["error"] == 0
    assert 0 < found["device to fp32"] == found["simulator to fp32"] < 0.1


ROW_NAMES = ("small", "rows-512", "rows-4", "scalar-chain-1-32", "launches-1", played.HANGS)
DIES = "kill -SEGV $$"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_what_becomes_of_a_compiler_or_a_profiler_is_one_result(tmp_path, monkeypatch):
    """Processes of their own, with programs in the place of the SDK's."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_CPU_NKI", "2.33")
    monkeypatch.setattr(hour, "Workers", played.WithTools)
    monkeypatch.setattr(played.WithTools, "tools", tmp_path)
    monkeypatch.setattr(plan, "GRAPHS_OF_1B", ())
    entries = [plan.of_row(ROWS[name], today=True) for name in (*ROW_NAMES, "rows-8")]
    monkeypatch.setattr(plan, "entries", lambda *_: iter(entries))
    compiler = {"rows-512": "echo 'error: no such engine' >&2; exit 70", "rows-4": DIES}
    compiler |= {"launches-1": f"echo 'assertion failed'; {DIES}"}
    hang = f"echo $$ > {tmp_path}/hanging; exec sleep 600"
    profiler = {"scalar-chain-1-32": "exit 0", played.HANGS: hang, "rows-8": "exit 1"}
    played.sdk_of_today(tmp_path, compiler, profiler)
    found = hour.run(tmp_path / "report.json", 60)["entries"]
    told = {name: (one["status"], one.get("words")) for name, one in found.items()}
    assert told.pop("small") == ("measured", None)
    assert all(math.isclose(us, 10) for us in found["small"]["us"].values())
    assert told == {
        "rows-512": ("refused", "RuntimeError: python, with status 70: error: no such engine"),
        "rows-4": ("died", "SIGSEGV ended python, whose last words are: none"),
        "scalar-chain-1-32": (
            "refused",
            "FileNotFoundError: neuron-explorer capture left no profile*.ntff",
        ),
        "launches-1": ("died", "SIGSEGV ended python, whose last words are: assertion failed"),
        played.HANGS: ("hung", "no answer within 3 s"),
        "rows-8": ("refused", "RuntimeError: neuron-explorer, with status 1: not a word"),
    }
    hanging = Path(f"/proc/{int((tmp_path / 'hanging').read_text())}/stat")
    assert not hanging.exists() or hanging.read_text().split()[2] == "Z"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(words in text for _, words in told.values())


@pytest.mark.parametrize(
    "summary",
    [
        '{"n0": {"total_time": 0.017, "event_count": 3}}',
        'read profile.ntff\n{"summary": [{"event_count": 3, "total_time": 0.017}]}\ndone',
        '[{"total_time": 0.017}]',
        '{"total_time": 0.017}',
    ],
)
def test_a_profilers_summary_may_nest_its_time_in_any_way(summary):
    assert timing.seconds_of(summary) == 0.017


@pytest.mark.parametrize(
    "summary", ["", "{", "no profile", '{"n0": {"time": 1}}', '{"total_time": "x"}']
)
def test_a_summary_without_a_time_is_told(summary):
    with pytest.raises(ValueError, match="has no total_time"):
        timing.seconds_of(summary)
