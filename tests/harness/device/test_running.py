"""Processes that answer, raise, hang and die."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.device import timing
from harness.device.calls import ROOT
from harness.device.running import BENCHMARK, SIMULATOR, XLA, Unanswered, Workers


@pytest.fixture
def workers(tmp_path):
    with Workers(tmp_path, "trn2") as found:
        yield found


def refused(workers, *asked):
    with pytest.raises(Unanswered) as caught:
        workers.ask(*asked)
    return caught.value.status, caught.value.words


def test_a_process_answers_one_request_after_the_other(workers):
    assert workers.ask(BENCHMARK, "json:loads", {"s": "[1]"}, 120) == [1]
    first = workers.ask(BENCHMARK, "os:getpid", {}, 120)
    status, words = refused(workers, BENCHMARK, "json:loads", {"s": "{"}, 120)
    assert status == "refused" and words.startswith("json.decoder.JSONDecodeError")
    assert workers.ask(BENCHMARK, "os:getpid", {}, 120) == first


def test_what_hangs_or_dies_is_told_and_the_next_request_is_answered(workers):
    assert refused(workers, BENCHMARK, "signal:pause", {}, 1) == ("hung", "no answer within 1 s")
    died = refused(workers, BENCHMARK, "os:_exit", {"status": 3}, 120)
    assert died == ("died", "its process ended")
    assert workers.ask(BENCHMARK, "json:loads", {"s": "1"}, 120) == 1


def test_one_process_is_beside_the_device_and_the_simulator_knows_what_it_stands_for(workers):
    workers.ask(BENCHMARK, "os:getpid", {}, 120)
    workers.ask(XLA, "os:getpid", {}, 120)
    name = {"key": "NEURON_PLATFORM_TARGET_OVERRIDE"}
    assert workers.ask(SIMULATOR, "os:getenv", name, 120) == "trn2"
    assert set(workers._running) == {XLA, SIMULATOR}


def test_of_a_long_error_its_end_is_told(workers):
    """Compilers put the reason last."""
    asked = {"s": "1", "parse_float": None, "x" * 900: 0}
    status, words = refused(workers, BENCHMARK, "json:loads", asked, 120)
    assert status == "refused" and words.startswith("... x") and len(words) == 604


def test_a_graph_is_timed_in_microseconds_behind_its_warm_up(monkeypatch):
    """A clock that shows a second more at each look, but for the first five times."""
    import torch_xla.core.xla_model as xm

    looks = iter([*range(0, 100, 10), *range(100, 200)])
    clock, here = SimpleNamespace(perf_counter=lambda: next(looks)), torch.zeros(1)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing.sdk, "platform", lambda: SimpleNamespace(estimates=False))
    monkeypatch.setattr(timing.calls, "arguments", lambda *_: (torch.neg, [here], {}))
    for name in ("mark_step", "wait_device_ops"):
        monkeypatch.setattr(xm, name, lambda: None, raising=False)
    found = timing.graph({"calls": 2, "reduced": 0})
    assert found == {"p0": 1e6, "p50": 1e6, "p99": 1e6}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_driver_that_is_killed_leaves_the_device_free(tmp_path):
    """Whatever its process was at: the next run needs the core."""
    program = tmp_path / "driver.py"
    program.write_text(
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "if __name__ == '__main__':\n"
        "    from harness.device.running import BENCHMARK, Workers\n"
        "    with Workers(Path(sys.argv[1]), 'trn1') as workers:\n"
        "        print(workers.ask(BENCHMARK, 'os:getpid', {}, 120), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True)
    worker = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 30
    while worker.exists() and worker.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the process beside the device has outlived the driver"
        time.sleep(0.05)
