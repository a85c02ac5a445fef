"""Processes that answer, raise, hang and die."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.device import calls, plan, timing
from lab.device.calls import ROOT
from lab.device.rows import ROWS
from lab.device.running import BENCHMARK, PAIR, SIMULATOR, XLA, Unanswered, Workers


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
    cores = {"key": "NEURON_LOGICAL_NC_CONFIG"}
    asked = {role: workers.ask(role, "os:getenv", cores, 120) for role in (XLA, SIMULATOR, PAIR)}
    assert asked == {XLA: "1", SIMULATOR: "1", PAIR: "2"}
    assert set(workers._running) == {PAIR, SIMULATOR}


class Builder:
    """NxD's model builder; `made` says for how many ranks, and with which options."""

    made: list = []

    def __init__(self, module):
        self.module, self.weights = module, None

    def trace(self, args, tag):
        return self

    def compile(self, compiler_workdir, compiler_args):
        self.made.append(compiler_args)
        return self

    def set_weights(self, weights):
        self.weights = weights

    def to_neuron(self):
        assert self.weights == [{}, {}]

    def __call__(self, column):
        return self.module(column)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize(("reduced", "release"), [(0, "2.21"), (3, "2.21"), (3, "2.29")])
def test_a_graph_is_compiled_once_and_has_its_kernels_and_all_reduces(
    reduced, release, target, monkeypatch
):
    """Two ranks as one call; a sum doubles, and each call of the kernel adds what one does."""
    import neuronx_distributed
    import torch_neuronx
    from neuronx_distributed.parallel_layers import mappings

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    compiled = Builder.made = []

    def state(world_size, tensor_model_parallel_size):
        compiled.append(world_size)
        return contextlib.nullcontext()

    def parallel_model_trace(rank, example, tp_degree, compiler_args):
        compiled.extend((tp_degree, compiler_args))
        return pickle.loads(pickle.dumps(rank))()[0]

    def trace(made, example, compiler_args):
        compiled.extend((1, compiler_args))
        return made

    if release == "2.29":
        monkeypatch.setattr(neuronx_distributed, "NxDParallelState", state, raising=False)
        monkeypatch.setattr(neuronx_distributed, "ModelBuilder", Builder, raising=False)
    old = SimpleNamespace(parallel_model_trace=parallel_model_trace)
    monkeypatch.setitem(sys.modules, "neuronx_distributed.trace", old)
    monkeypatch.setattr(torch_neuronx, "trace", trace)
    sums = "reduce_from_tensor_model_parallel_region"
    monkeypatch.setattr(mappings, sums, lambda value: value * 2)
    call = plan.of_row(ROWS["launches-1"]).call
    (chained,) = calls.computed(call, calls.Seeded())
    run = timing._of_torch(dict(call, reduced=reduced))
    first, second = run(), run()
    one_core = "--logical-nc-config=1" if target == "trn2" else None
    assert compiled == [2 if reduced else 1, one_core] and torch.equal(first, second)
    assert torch.equal(first, chained[:, :1] * 2**reduced)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent")
def test_a_driver_that_is_killed_leaves_the_device_free(tmp_path):
    """Whatever its process was at: the next run needs the core."""
    program = tmp_path / "driver.py"
    program.write_text(
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "if __name__ == '__main__':\n"
        "    from lab.device.running import BENCHMARK, Workers\n"
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
