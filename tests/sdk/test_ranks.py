"""Ranks as threads: collectives, and failures that must not leave anyone waiting."""

import gc
import signal
import threading
import time

import pytest
import torch
from neuronx_distributed.operators.argmax import argmax
from neuronx_distributed.operators.topk import topk
from neuronx_distributed.parallel_layers import mappings

from neuron_cpu.core import NkiError
from neuron_cpu.errors import CollectiveError
from neuron_cpu.runtime import collectives
from neuron_cpu.runtime.ranks import Group, RankPool, rank_context

SIZES = [1, 2, 3, 8]


def on_ranks(size, function):
    """Results of `function(rank)` on each of `size` ranks."""
    pool = RankPool(size)
    try:
        return pool.run([lambda rank=rank: function(rank) for rank in range(size)])
    finally:
        pool.close()


def shard(rank, rows=3, columns=4):
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_and_gather(size):
    parts = [shard(rank) for rank in range(size)]
    total = sum(parts[1:], parts[0])
    for got in on_ranks(
        size, lambda r: mappings.reduce_from_tensor_model_parallel_region(shard(r))
    ):
        assert torch.equal(got, total)
    for got in on_ranks(
        size, lambda r: mappings.gather_from_tensor_model_parallel_region(shard(r))
    ):
        assert torch.equal(got, torch.cat(parts, dim=-1))
    for got in on_ranks(size, lambda r: mappings.gather_from_sequence_parallel_region(shard(r), 0)):
        assert torch.equal(got, torch.cat(parts, dim=0))


@pytest.mark.parametrize(
    "collective",
    [
        collectives.Collective(collectives.BROADCAST),
        collectives.Collective(collectives.PERMUTE, pairs=((0, 1), (1, 2), (2, 0))),
        collectives.Collective(collectives.ALL_GATHER),
        collectives.Collective(collectives.ALL_REDUCE),
    ],
)
def test_no_rank_has_the_memory_of_another(collective):
    """What one rank writes in place would else change another's tensor."""
    given = [shard(rank) for rank in range(3)]
    made = on_ranks(3, lambda rank: collective(given[rank]))
    for rank, tensor in enumerate(made):
        others = [*given[:rank], *given[rank + 1 :], *made[:rank], *made[rank + 1 :]]
        assert tensor.data_ptr() not in {other.data_ptr() for other in others}


@pytest.mark.parametrize("size", SIZES)
def test_scatter_and_reduce_scatter(size):
    width = 2 * size
    whole = [shard(rank, 3, width) for rank in range(size)]
    total = sum(whole[1:], whole[0])
    got = on_ranks(size, lambda r: mappings.reduce_scatter_to_sequence_parallel_region(whole[r], 1))
    for rank in range(size):
        assert torch.equal(got[rank], total[:, 2 * rank : 2 * rank + 2])
    got = on_ranks(size, lambda r: mappings.scatter_to_tensor_model_parallel_region(whole[0]))
    for mine in got:  # one graph serves all ranks, traced as rank 0
        assert torch.equal(mine, whole[0][:, :2])


def test_a_reduction_in_fp32_is_rounded_once():
    """256 + 1 + 1 is 258 in fp32, which bf16 holds."""
    values = [torch.full((3, 1), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    got = on_ranks(
        3,
        lambda r: mappings.reduce_scatter_to_sequence_parallel_region(
            values[r], 0, dtype=torch.float32
        ),
    )
    assert [(part.item(), part.dtype) for part in got] == [(258.0, torch.bfloat16)] * 3


def test_bf16_reduction_rounds_in_rank_order():
    """256 + 1 rounds to 256 in bf16, twice; 1 + 1 + 256 would give 258."""
    values = [256.0, 1.0, 1.0]
    got = on_ranks(
        3,
        lambda r: mappings.reduce_from_tensor_model_parallel_region(
            torch.tensor([values[r]], dtype=torch.bfloat16)
        ),
    )
    assert [tensor.item() for tensor in got] == [256.0] * 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_distributed_argmax_and_topk(size):
    logits = shard(0, 5, 12)
    logits[2, 3] = logits[2, 11] = 9.0  # a tie: the first index wins
    width = 12 // size

    def run(rank):
        part = logits[:, rank * width : (rank + 1) * width]
        values, indices = topk(part, 3, dim=-1, gather_dim=-1)
        return argmax(part, dim=-1, gather_dim=-1), values, indices

    for best, values, indices in on_ranks(size, run):
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(values, logits.topk(3).values)
        assert torch.equal(torch.gather(logits, 1, indices), values)


class Boom(Exception):
    pass


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_in_a_collective_ends_the_call(victim):
    """One rank dies while the others already wait for it."""

    def run(rank):
        if rank == victim:
            time.sleep(0.05)  # let the others reach the collective
            raise Boom(f"rank {rank}")
        return mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))

    with pytest.raises(Boom, match=f"rank {victim}"):
        on_ranks(3, run)


def test_a_failure_inside_the_collective_itself_ends_the_call():
    """The last rank to arrive computes; shapes that cannot be concatenated fail there."""
    with pytest.raises(NkiError, match="different collectives.*{0: .*, 1: "):
        on_ranks(
            2, lambda r: mappings.gather_from_tensor_model_parallel_region(torch.ones(2 + r, 3))
        )


@pytest.fixture
def watched():
    """A pool of three ranks whose calls end with a TimeoutError instead of never."""
    pool = RankPool(3)
    watch = threading.Timer(20, lambda: pool._meeting.fail(TimeoutError("ranks wait for ever")))
    watch.start()
    yield pool
    watch.cancel()
    pool.close()


def until(condition):
    while not condition():
        time.sleep(0.001)


def test_a_rank_that_leaves_while_the_others_wait_is_named(watched):
    """Nobody else will arrive any more: the one that leaves has to look for who waits."""
    rendezvous = watched._meeting

    def run(rank):
        if rank == 1:
            until(
                lambda: any(len(w) == 2 for w in rendezvous.arrived.values()) or rendezvous.failure
            )
            return None
        return mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))

    with pytest.raises(NkiError, match="wait in all-reduce.*for rank 1"):
        watched.run([lambda rank=rank: run(rank) for rank in range(3)])


def test_except_exception_does_not_swallow_the_end():
    """A rank that catches every Exception still stops when its group has broken."""

    def run(rank):
        if rank == 0:
            raise Boom
        while True:
            try:
                mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))
            except Exception:
                continue

    with pytest.raises(Boom):
        on_ranks(2, run)


def test_the_pool_works_again_after_a_failure():
    pool = RankPool(2)

    def broken(rank):
        if rank == 1:
            raise Boom
        return mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))

    for _ in range(3):
        with pytest.raises(Boom):
            pool.run([lambda: broken(0), lambda: broken(1)])
        good = [lambda: mappings.reduce_from_tensor_model_parallel_region(torch.ones(1)).item()] * 2
        assert pool.run(good) == [2.0, 2.0]
    pool.close()


def test_an_interrupt_stops_the_ranks_first():
    """Ctrl-C while rank 0 waits in a collective for rank 1: both stop, then it is raised."""
    pool = RankPool(2)
    released = threading.Event()

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        released.set()

    def late():
        assert released.wait(timeout=10)
        return mappings.reduce_from_tensor_model_parallel_region(torch.ones(1))

    timer = threading.Timer(0.1, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([lambda: mappings.reduce_from_tensor_model_parallel_region(torch.ones(1)), late])
    timer.join()
    assert pool.run([lambda: 1, lambda: 2]) == [1, 2]
    pool.close()


def test_threads_end_with_their_pool():
    before = set(threading.enumerate())
    pool = RankPool(4)
    created = set(threading.enumerate()) - before
    assert len(created) == 4
    del pool
    gc.collect()
    for thread in created:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_mocked_group_gives_shapes_and_refuses_values():
    """As while compiling: rank 0 of 4, alone."""
    with rank_context(Group(0, 4)):
        gathered = mappings.gather_from_tensor_model_parallel_region(
            torch.empty((2, 3), device="meta")
        )
        assert gathered.shape == (2, 12)
        with pytest.raises(CollectiveError, match="met no other rank, expected 4"):
            mappings.reduce_from_tensor_model_parallel_region(torch.ones(2))
