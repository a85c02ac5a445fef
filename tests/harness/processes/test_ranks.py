"""The driver over ranks that torchrun has started: orders, reasons, refusals, and whole runs."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import sdk
from harness.errors import UserError
from harness.inputs import command_line
from harness.processes import ranks
from harness.processes.ranks import Order, Rank
from harness.processes.worker import Answer, Draw, Job, Row
from harness.processes.workers import Process, SubmissionFailed
from harness.settings import Speculation
from neuron_cpu.sandbox.limits import Limits
from neuron_cpu.sandbox.torchrun import Place

ROOT = Path(__file__).resolve().parents[3]
PLACE = Place(0, 3, "localhost", 29500)
JOB = Job(
    settings=command_line.parse(["--mode", "generate"]),
    model_path=Path("model"),
    pad_token_id=0,
    eos_token_id=None,
    source=None,
    scratch=Path("scratch/one"),
    limits=Limits(memory_bytes=1 << 30, cpu_seconds=9, wall_seconds=0.1),
    confined=True,
)


class Memory:
    """A store within the process."""

    written: dict = {}

    def __init__(self, place):
        pass

    def write(self, value, number, rank=0):
        self.written[number, rank] = value

    def read(self, deadline, number, rank=0):
        if (number, rank) not in self.written:
            raise TimeoutError
        return self.written[number, rank]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(Memory, "written", {})
    monkeypatch.setattr(ranks, "Store", Memory)
    monkeypatch.setattr(Process, "__init__", lambda self, job: setattr(self, "job", job))
    return Memory.written


@pytest.fixture
def process(store):
    """Rank 0's process of three ranks; no process runs."""
    with ranks.leading(PLACE):
        yield ranks.workers()._started(JOB)


def test_orders_are_written_in_turn_and_the_last_one_ends_the_run(store, monkeypatch):
    monkeypatch.setattr(Process, "_call", lambda *_, **__: Answer("done"))
    with ranks.leading(PLACE):
        started = ranks.workers()._started(JOB)
        assert started.job.place == replace(PLACE, group="process 0", timeout_seconds=0.1)
        store.update({(1, rank): None for rank in (1, 2)})
        assert started.call("a:b", "It fails", x=1).body == "done"
        counting = ranks.workers()._started(replace(JOB, counts=True))
        assert type(counting) is Process and counting.job.place is None
    orders = [store[number, 0] for number in range(3)]
    assert orders[0] == Order(0, start=started.job)
    assert orders[1] == Order(0, function="a:b", what="It fails", arguments={"x": 1})
    assert orders[2].process is None and (3, 0) not in store
    assert ranks.workers()._process is None


def fails_with(monkeypatch, text):
    def call(*_, **__):
        raise SubmissionFailed(text)

    monkeypatch.setattr(Process, "_call", call)


def test_the_rank_that_failed_by_itself_gives_the_reason(process, store, monkeypatch):
    fails_with(monkeypatch, "Rank 2 failed: no.")
    store.update({(1, 1): "Rank 2 failed: no.", (1, 2): "It fails: line 3 raised X: no."})
    with pytest.raises(SubmissionFailed) as caught:
        process.call("a:b", "It fails")
    assert str(caught.value) == "It fails: line 3 raised X: no (rank 2)."


def test_rank_0s_own_reason_stands(process, store, monkeypatch):
    fails_with(monkeypatch, "It fails: no.")
    store.update({(1, 1): "another", (1, 2): None})
    with pytest.raises(SubmissionFailed, match=r"^It fails: no\.$"):
        process.call("a:b", "It fails")


def test_a_consequence_is_told_where_the_cause_is_mute(process, store, monkeypatch):
    fails_with(monkeypatch, "Rank 0 of 3 has lost the others.")
    monkeypatch.setattr(ranks, "OTHERS_SECONDS", 0)
    with pytest.raises(SubmissionFailed, match="has lost the others"):
        process.call("a:b", "It fails")


def test_failures_and_silence_of_others_fail_a_call_that_went_well_here(
    process, store, monkeypatch
):
    monkeypatch.setattr(Process, "_call", lambda *_, **__: Answer(None))
    with pytest.raises(SubmissionFailed, match=r"a rank has not answered within 0.1 s; --time"):
        process.call("a:b", "It fails")
    store.update({(2, 1): None, (2, 2): "It fails: no folder."})
    with pytest.raises(SubmissionFailed, match=r"It fails: no folder \(rank 2\)"):
        process.call("a:b", "It fails")


def test_a_rank_does_what_it_is_told(store, monkeypatch, tmp_path):
    called, ended = [], []
    monkeypatch.setattr(Process, "call", lambda self, *what, **given: called.append((what, given)))
    monkeypatch.setattr(Process, "close", lambda self: ended.append(self.job.place.rank))
    rank = Rank(replace(PLACE, rank=2))
    job = replace(JOB, place=PLACE, scratch=tmp_path / "work" / "one")
    assert rank.outcome(Order(4, start=job)) is None
    own = rank._running[4].job
    assert own.place == replace(PLACE, rank=2) and own.scratch.parent == tmp_path / "work"
    assert rank.outcome(Order(4, function="a:b", what="It", arguments={"x": 1})) is None
    assert called == [(("a:b", "It"), {"x": 1})]
    assert rank.outcome(Order(4)) is None and ended == [2]
    assert "no process" in rank.outcome(Order(4, function="a:b", what="It"))
    missing = rank.outcome(Order(5, start=replace(job, source=tmp_path / "llama.py")))
    assert missing == f"{tmp_path / 'llama.py'} is not on the machine of rank 2."


def test_settings_of_a_run_over_ranks(monkeypatch):
    settings = JOB.settings
    assert ranks.over_ranks(settings, None) is settings
    assert ranks.over_ranks(settings, PLACE).tp_degree == 3
    assert ranks.over_ranks(replace(settings, tp_degree=3), PLACE).tp_degree == 3
    with pytest.raises(UserError, match="--tp-degree must be 3, .* got 2"):
        ranks.over_ranks(replace(settings, tp_degree=2), PLACE)
    with pytest.raises(UserError, match="--no-isolate runs the submission in the driver's"):
        ranks.over_ranks(replace(settings, isolate=False), PLACE)
    monkeypatch.setattr(sdk, "platform", lambda: sdk.DEVICE)
    with pytest.raises(UserError, match="only the stand-in for the SDK takes"):
        ranks.over_ranks(settings, PLACE)


def over_ranks(size, folder, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    return [*launcher, str(ROOT / "main.py"), *driver(folder, *arguments)]


def driver(folder, *arguments):
    compiled = ["--compiled-model-path", str(folder / "compiled")]
    return ["--prompt", "Hello there", "--max-new-tokens", "4", *compiled, *map(str, arguments)]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["generate", "validate", "evaluate", "diff"])
def test_modes_give_over_processes_what_they_give_over_threads(
    mode, tiny_model, tmp_path, run_main
):
    arguments = ["--mode", mode, "--enable-nki", "--model-path", tiny_model]
    threads = run_main(*driver(tmp_path, *arguments), "--tp-degree", "2", cwd=tmp_path)
    processes = subprocess.run(
        over_ranks(2, tmp_path, *arguments), cwd=tmp_path, capture_output=True, timeout=300
    )
    assert (processes.returncode == 0) == (threads.returncode == 0), processes.stderr
    if mode == "generate":
        assert processes.stdout.decode(errors="replace") == threads.stdout


def sick(folder: Path, reason: str) -> Path:
    """A model file whose second rank raises in line 6."""
    entry = folder / "sick.py"
    entry.write_text(
        "from neuronx_distributed.parallel_layers import parallel_state\n"
        "from neuronx_distributed_inference.models.llama import modeling_llama\n"
        "class Sick(modeling_llama.NeuronLlamaModel):\n"
        "    def forward(self, *inputs):\n"
        "        if parallel_state.get_tensor_model_parallel_rank() == 1:\n"
        f"            raise ValueError('{reason}')\n"
        "        return super().forward(*inputs)\n"
        "class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):\n"
        "    _model_cls = Sick\n"
    )
    return entry


@pytest.mark.full
def test_the_reason_of_a_failing_rank_is_told_and_ends_all(tiny_model, tmp_path):
    entry = sick(tmp_path, "rank one is ill")
    arguments = ["--mode", "generate", "--model-path", tiny_model, "--llama", entry]
    run = subprocess.run(over_ranks(2, tmp_path, *arguments), capture_output=True, timeout=300)
    told = b"line 6, raised ValueError: rank one is ill (rank 1)."
    assert run.returncode == 1 and run.stderr.count(told) == 1, run.stderr


@pytest.mark.full
def test_an_interrupt_ends_the_driver_and_all_ranks(tiny_model, tmp_path):
    """Ctrl-C reaches torchrun, the driver and the other ranks, while one of them hangs."""
    entry = tmp_path / "hangs.py"
    entry.write_text("import signal\nsignal.pause()\n")
    arguments = ["--mode", "generate", "--model-path", tiny_model, "--llama", entry]
    agent = subprocess.Popen(
        over_ranks(2, tmp_path, *arguments), start_new_session=True, stderr=subprocess.PIPE
    )
    while not list((tmp_path / "compiled").glob(".work.*")):
        assert agent.poll() is None
        time.sleep(0.1)
    time.sleep(3)  # until both hang in the import
    os.killpg(agent.pid, signal.SIGINT)
    _, told = agent.communicate(timeout=60)
    assert agent.returncode != 0 and told.count(b"main.py: Interrupted.") == 1
    alive = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in path.read_bytes()
    ]
    assert not alive


# --- the store, which every process of the machine reaches ----------------------------------------
@pytest.fixture
def stores():
    """Rank 0's and rank 1's end, and what a stranger has."""
    import torch.distributed as dist

    opened = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = Place(0, 2, "127.0.0.1", opened.port)
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(ranks.Store, (place, replace(place, rank=1))))
    return *ends, opened


def test_orders_arrive_whole_over_a_store(stores, tmp_path):
    leader, follower, _ = stores
    speculation = Speculation("draft", 3, tmp_path, tree=((0, 1), (2,)))
    settings = replace(JOB.settings, speculation=speculation, tol_map={None: (0.5, 1.0)})
    job = replace(JOB, settings=settings, place=PLACE)
    draw = Draw(0.5, 3, 1.0, 7, 0)
    rows = {"rows": [Row(1, 2, 3, draw, 0, (4,))], "folder": tmp_path, "ids": [[1]]}
    for order in (Order(4, start=job), Order(4, function="a:b", what="It", arguments=rows)):
        leader.write(order, 0)
        assert follower.read(time.monotonic() + 5, 0) == order
    follower.write("why", 1, 1)
    assert leader.read(time.monotonic() + 5, 1, 1) == "why"


class Evil:
    """What runs a command where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_what_a_stranger_writes_into_the_store_is_no_order(stores, tmp_path):
    leader, follower, open_to_all = stores
    assert not open_to_all.check(["main.py/key"])
    leader.write(Order(1), 0)
    replayed = open_to_all.get("main.py/0/0")
    forged = ranks.FORM.dumps(Order(1, start=replace(JOB, confined=False)))
    for number, said in enumerate((pickle.dumps(Evil(tmp_path / "m")), forged, replayed, b""), 1):
        open_to_all.set(f"main.py/{number}/0", said)
        with pytest.raises(UserError, match="Somebody else has written into torchrun's store"):
            follower.read(time.monotonic() + 5, number)
    assert not (tmp_path / "m").exists()


def test_the_end_of_torchrun_is_told_in_a_sentence(stores, monkeypatch):
    leader, _, _ = stores

    def gone(*_):
        raise RuntimeError("recvValue failed on SocketImpl(fd=3): Connection reset by peer")

    monkeypatch.setattr(leader, "_store", SimpleNamespace(set=gone, check=gone))
    with pytest.raises(UserError, match="^torchrun, which has started the ranks, has ended"):
        leader.write(Order(), 1)
    with pytest.raises(UserError, match="^torchrun, which has started the ranks, has ended"):
        leader.read(time.monotonic() + 5, 1)


def test_no_key_no_order(stores):
    """Without another rank rank 0 begins nothing."""
    place = Place(0, 3, "127.0.0.1", stores[2].port, timeout_seconds=0.2)
    with pytest.raises(UserError, match="Not all of 3 ranks have joined within 0.2 s"):
        ranks.Store(place)


@pytest.mark.parametrize(
    "whole",
    [
        {"a": 1}, {"eval": ["1"]}, {"of": ["os:system", "1"]}, {"object": 0}, {"dict": 3},
        {"of": ["harness.processes.ranks:Order", *range(7)]}, {"of": ["neuron_cpu.plain:json"]},
        {"of": ["harness.absent:x"]}, {"Path": 1}, {"a": 1, "b": 2}, {},
        {"of": ["neuron_cpu.plain:Form", 1, 2]}, {"entry": "matmul"}, {"array": ["O", [1], "AA=="]},
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(whole):
    with pytest.raises(ValueError):
        ranks.FORM.loads(json.dumps([whole, [], []]).encode())
    with pytest.raises(TypeError, match="is no plain value"):
        ranks.FORM.dumps(object())


@pytest.mark.parametrize("data", [b"", b"[", b"3e", b"{}", b"[1]", b"[1, [], [], []]",
                                  b"[" * 99_999, b'[0, ["os:path"], [[]]]',
                                  b'[0, ["harness.processes.ranks:Order"], []]',
                                  b'[0, ["harness.processes.ranks:Order"], [[1]]]'])  # fmt: skip
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(ValueError):
        ranks.FORM.loads(data)
