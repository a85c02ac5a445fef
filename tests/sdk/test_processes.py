"""Ranks as processes: their meeting by itself, in threads, and under torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import mappings

from neuron_cpu.errors import CollectiveError, UsageError
from neuron_cpu.runtime import processes
from neuron_cpu.runtime.processes import Processes
from neuron_cpu.runtime.ranks import Group, RankPool, rank_context
from neuron_cpu.sandbox import torchrun
from neuron_cpu.sandbox.torchrun import Place

SCRIPT = Path(__file__).with_name("generate_under_torchrun.py")


def connected(size, seconds=20.0):
    """The `Processes` of `size` ranks, made in as many threads, each with a gloo group."""
    store, made = dist.HashStore(), [None] * size

    def join(rank):
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
        made[rank] = Processes(Place(rank, size, "localhost", 0), group)

    at_once(size, join)
    return made


def at_once(size, function):
    """What `function(rank)` returns or raises, by rank."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def call(ranks, function, label="a call"):
    """One call of `function(rank)` on all ranks: results, or what each of them raises."""

    def run(rank):
        with rank_context(Group(rank, len(ranks), ranks[rank])):
            return ranks[rank].call(lambda: function(rank), label)

    return at_once(len(ranks), run)


def shard(rank):
    return torch.randn((3, 4), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    "tensor_of",
    [
        lambda rank: shard(rank).to(torch.bfloat16) * 300**rank,
        lambda rank: shard(rank).t(),
        lambda rank: torch.tensor(rank),
        lambda rank: shard(rank) > 0,
        lambda rank: torch.empty(0, 2),
    ],
    ids=["bf16", "transposed", "scalar", "bool", "empty"],
)
def test_results_equal_those_of_threads(tensor_of):
    """All-reduce in rank order, to the bit, whatever the type and the layout."""

    def run(rank):
        return mappings.reduce_from_tensor_model_parallel_region(tensor_of(rank))

    pool = RankPool(3)
    expected = pool.run([lambda rank=rank: run(rank) for rank in range(3)])
    pool.close()
    for got, value in zip(call(connected(3), run), expected):
        assert got.dtype == value.dtype and torch.equal(got, value)


def test_gather_scatter_and_many_in_a_row():
    def run(rank):
        value = mappings.gather_from_sequence_parallel_region(shard(rank), 0)
        for _ in range(20):
            value = mappings.reduce_from_tensor_model_parallel_region(value) / 2
        return mappings.reduce_scatter_to_sequence_parallel_region(value, 0)

    whole = torch.cat([shard(0), shard(1)])
    for rank, got in enumerate(call(connected(2), run)):
        assert torch.equal(got, 2 * whole[3 * rank : 3 * rank + 3])


def test_the_reason_of_a_failing_rank_reaches_all_and_the_next_call_works():
    ranks = connected(3)

    def broken(rank):
        if rank == 1:
            raise ValueError("no weights\nfor me")
        while True:  # a model that goes on whatever happens
            try:
                mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))
            except Exception:
                continue

    results = call(ranks, broken)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert str(results[rank]) == "Rank 1 failed: no weights for me."
    good = call(ranks, lambda r: mappings.reduce_from_tensor_model_parallel_region(torch.ones(1)))
    assert good == [3.0] * 3


def test_ranks_that_do_different_things_are_named():
    ranks = connected(2)

    def leaves(rank):
        if rank:
            mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))

    for error in call(ranks, leaves):
        assert "Ranks [1] wait in all-reduce" in str(error) and "for rank 0" in str(error)
    shapes = call(
        ranks, lambda r: mappings.reduce_from_tensor_model_parallel_region(torch.ones(1 + r))
    )
    for error in shapes:
        assert "rank 0: all-reduce(float32[1]), rank 1: all-reduce(float32[2])" in str(error)
    labels = at_once(2, lambda r: ranks[r].call(lambda: None, f"inputs {r}"))
    assert all("rank 1: inputs 1" in str(error) for error in labels)


def test_outputs_are_rank_0s():
    ranks = connected(2)
    strided = [torch.arange(6).reshape(2, 3).t() + 10 * rank for rank in range(2)]
    got = at_once(2, lambda r: ranks[r].from_first([strided[r], torch.empty(0)]))
    for first, nothing in got:
        assert torch.equal(first, strided[0]) and nothing.shape == (0,)
    assert strided[1][0, 0] == 10  # a rank's own tensor stays its own
    for error in at_once(2, lambda r: ranks[r].from_first([torch.empty(1 + r)])):
        assert isinstance(error, CollectiveError)


def test_what_rank_0_says(monkeypatch):
    with pytest.raises(CollectiveError, match="has joined no ranks"):
        processes.rank_0_says(True)
    ranks = connected(2)
    for value in (True, False):
        # one rank after the other: the name of the joined ranks is the process's
        said = at_once(2, lambda r, v=value: ranks[r].from_first([torch.tensor(v == (r == 0))]))
        assert [bool(tensor) for (tensor,) in said] == [value, value]


def test_a_rank_that_hangs_ends_the_call_after_the_timeout_for_good():
    ranks = connected(2, seconds=0.2)
    with pytest.raises(CollectiveError, match="Rank 0 of 2 has lost the others in a call"):
        ranks[0].call(lambda: None, "a call")
    with pytest.raises(CollectiveError, match="has lost the others"):
        ranks[0].call(lambda: None, "a call")


def test_checksums_tell_inputs_apart():
    zeros = torch.zeros(2, 3, dtype=torch.int32)
    assert processes.digest([zeros]) == processes.digest([zeros.clone()])
    assert processes.digest([zeros]) != processes.digest([zeros + 1])
    assert processes.digest([torch.empty(0)]) == processes.digest([])


def test_a_model_of_another_degree_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "_joined", connected(1)[0])
    assert processes.joined(1) is None
    with pytest.raises(CollectiveError, match="degree of 4, expected 1 ranks in all, the number"):
        RankPool(4)


def test_every_process_gets_the_first_ranks_results(monkeypatch):
    pools = []
    for joined in connected(2):
        monkeypatch.setattr(processes, "_joined", joined)
        pools.append(RankPool(2))
    inputs = [torch.ones(1)]
    found = at_once(
        2, lambda rank: pools[rank].first_of([lambda: [torch.full((2,), 3.0 + rank)]], inputs)
    )
    assert [[result.tolist() for result in of_rank] for of_rank in found] == [[[3.0, 3.0]]] * 2


def test_places_are_read_from_what_torchrun_sets():
    whole = dict(RANK="3", WORLD_SIZE="4", MASTER_ADDR="one", MASTER_PORT="29500")
    assert torchrun.place(whole) is None  # of another launcher
    started = whole | {"TORCHELASTIC_RUN_ID": "x"}
    assert torchrun.place(started) == Place(3, 4, "one", 29500)
    assert torchrun.place(started | {"WORLD_SIZE": "1"}) is None
    for name in ("MASTER_PORT", "RANK"):
        with pytest.raises(UsageError, match="torchrun's variables are not whole"):
            torchrun.place(started | {name: "none"})
        with pytest.raises(UsageError, match=name):
            torchrun.place({key: value for key, value in started.items() if key != name})


def torchrun_command(*arguments):
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


@pytest.fixture
def wide_llama(tiny_llama):
    """A tiny Llama that 32 ranks can share: 32 query heads and 8 key/value heads."""
    _, folder = tiny_llama(
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=224,
    )
    return folder


def threads_logits(folder, degree):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from generate_under_torchrun import logits
    finally:
        sys.path.pop(0)
    return logits(folder, folder / "threads", degree)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`do_sample` is set to `False`")  # NxDI 0.1 goes by top_k
@pytest.mark.parametrize("degree", [2, 8, 16, 32])
def test_processes_give_the_logits_of_threads(wide_llama, tmp_path, degree):
    command = torchrun_command(
        f"--nproc-per-node={degree}", SCRIPT, wide_llama, tmp_path / "compiled", tmp_path
    )
    subprocess.run(command, check=True, timeout=900, capture_output=True)
    expected = threads_logits(wide_llama, degree)
    for rank in range(degree):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


def two_agents(*script):
    """Exit statuses of two agents of torchrun with two ranks each, which find each other."""
    with closing(socket.socket()) as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = torchrun_command(
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=two-nodes",
        "--local-addr=localhost",
        *script,
    )
    agents = [subprocess.Popen(command) for _ in range(2)]
    try:
        return [agent.wait(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`do_sample` is set to `False`")  # NxDI 0.1 goes by top_k
def test_two_nodes_on_one_machine(wide_llama, tmp_path):
    """Two agents of torchrun that find each other by its rendezvous, two ranks each."""
    assert two_agents(SCRIPT, wide_llama, tmp_path / "compiled", tmp_path) == [0, 0]
    expected = threads_logits(wide_llama, 4)
    for rank in range(4):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


@pytest.mark.full
def test_an_interrupt_ends_all_ranks(wide_llama, tmp_path):
    """Ctrl-C reaches the agent and every rank, of which one never comes to the first call."""
    script = tmp_path / "hangs.py"
    script.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import generate_under_torchrun as script\nfrom pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(300)\n"
        "script.main(*map(Path, sys.argv[1:]))\n"
    )
    command = torchrun_command(
        "--nproc-per-node=2", script, wide_llama, tmp_path / "compiled", tmp_path
    )
    agent = subprocess.Popen(command, start_new_session=True)
    marks = [tmp_path / "pid0", tmp_path / "pid1"]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        assert agent.poll() is None
        time.sleep(0.1)
    os.killpg(agent.pid, signal.SIGINT)
    assert agent.wait(timeout=60) != 0
    for mark in marks:
        assert not Path(f"/proc/{mark.read_text()}").exists()
