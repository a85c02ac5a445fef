"""Processes that answer, raise, hang and die."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.device import calls, plan, timing
from harness.device.calls import ROOT
from harness.device.rows import ROWS
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
    looks = iter([*range(0, 100, 10), *range(100, 200)])
    clock = SimpleNamespace(perf_counter=lambda: next(looks))
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "_of_torch", lambda _: lambda: None)
    assert timing.timed({}) == {"p0": 1e6, "p50": 1e6, "p99": 1e6}


@pytest.mark.parametrize("reduced", [0, 3])
def test_a_graph_is_compiled_once_and_has_its_kernels_and_all_reduces(reduced, monkeypatch):
    """Two ranks as one call; a sum doubles, and each call of the kernel adds what one does."""
    import torch_neuronx
    import torch_xla.core.xla_model as xm

    compiled = []

    def parallel_model_trace(rank, example, tp_degree):
        compiled.append(tp_degree)
        return pickle.loads(pickle.dumps(rank))()[0]

    trace = SimpleNamespace(parallel_model_trace=parallel_model_trace)
    monkeypatch.setitem(sys.modules, "neuronx_distributed.trace", trace)
    monkeypatch.setattr(torch_neuronx, "trace", lambda made, _: compiled.append(1) or made)
    monkeypatch.setattr(xm, "all_reduce", lambda kind, value: value * 2)
    call = plan.of_row(ROWS["launches-1"]).call
    (chained,) = calls.computed(call, calls.Seeded())
    run = timing._of_torch(dict(call, reduced=reduced))
    first, second = run(), run()
    assert compiled == [2 if reduced else 1] and torch.equal(first, second)
    assert torch.equal(first, chained[:, :1] * 2**reduced)


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
