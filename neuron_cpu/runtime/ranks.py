"""Tensor-parallel ranks, and the collectives between them.

Every rank runs the same Python with its own weights, as every NeuronCore runs the same graph.
Ranks are threads of one process (`core.device.ranks`). The results of a collective are computed in
rank order, so sums do not depend on timing, and no rank touches another rank's tensor outside that
moment.

A rank that fails, or that ends while others wait for it, breaks the group: the others stop at
their next collective and the call raises the first failure. Nothing waits for ever.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from neuron_cpu.core import release_thread
from neuron_cpu.core.device import ranks as kernel_ranks
from neuron_cpu.core.device.dtypes import Tensors
from neuron_cpu.core.device.errors import within
from neuron_cpu.errors import CollectiveError

from . import rounding

# A collective's arithmetic: the tensors of all ranks, in rank order -> the result of each rank.
Combine = Callable[[Tensors], Tensors]
# Where the ranks of a group meet; None where there is nobody to meet.
Meeting = kernel_ranks.Rendezvous | None


class Group:
    """A tensor-parallel group as one rank sees it.

    With `rendezvous` None and more than one rank the group is mocked, as it is while the SDK
    traces: this rank claims its place among `size` ranks, and a collective behaves as if every
    rank had sent the same tensor. Outside a trace only meta tensors may meet in a mocked group.
    """

    def __init__(self, rank: int, size: int, rendezvous: Meeting = None) -> None:
        self._rank = rank
        self._size = size
        self._rendezvous = rendezvous

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def exchange(self, label: str, tensor: torch.Tensor, combine: Combine) -> torch.Tensor:
        """Run one collective; `label` names operation, dtype and shape for the error message."""
        if self._rendezvous is not None:
            mine = rounding.settled(tensor)
            with unwatched():
                everyone = tuple(range(self._size))
                made = self._rendezvous.meet(self._rank, label, everyone, mine, combine)
            return rounding.settled(made)
        if not tensor.is_meta and not is_tracing():
            raise CollectiveError(
                f"{label} met no other rank, expected {self._size} ranks, got a call outside "
                "them; run the model through its application, or use a tensor-parallel size of 1."
            )
        return combine([tensor] * self._size)[self._rank]


_current = threading.local()


def current_group() -> Group | None:
    """The group of the running thread, None where no parallel state is initialised."""
    return getattr(_current, "group", None)


class _KernelRank:
    """A group as kernels see it that issue collectives themselves (`nki.collectives`)."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def meet(self, label: str, members: kernel_ranks.Members, parts: Tensors) -> list[Tensors]:
        """Parts of `members`; all ranks of the group take part, whatever groups they name."""
        everyone = [
            self._group.exchange(label, part, lambda all: [torch.stack(all)] * len(all))
            for part in parts
        ]
        return [[of_all[member] for of_all in everyone] for member in members]


def set_current_group(group: Group | None) -> None:
    """Install `group` for the running thread, and for the kernels that it calls."""
    _current.group = group
    kernel_ranks.be(None if group is None else _KernelRank(group))


def is_tracing() -> bool:
    """Whether the running thread traces a model ahead of time."""
    return bool(getattr(_current, "tracing", False))


def tracing() -> AbstractContextManager[None]:
    """Ahead-of-time mode in this thread: a mocked group lets tensors with values meet."""
    return within(_current, tracing=True)


def set_watch(pause: Callable[[], AbstractContextManager[None]]) -> None:
    """Set the context that `unwatched` enters in the running thread."""
    _current.pause = pause


def unwatched() -> AbstractContextManager[None]:
    """Around a collective's own work, which is no operator of the graph (`executed`)."""
    return getattr(_current, "pause", nullcontext)()


@contextmanager
def rank_context(group: Group) -> Iterator[Group]:
    """Be a rank of `group` for the length of the block."""
    before = current_group()
    set_current_group(group)
    try:
        yield group
    finally:
        set_current_group(before)


def _serve(
    group: Group, rank: int, meeting: kernel_ranks.Rendezvous, inbox: queue.SimpleQueue
) -> None:
    """Body of a rank's thread: take a function, run it, report; None ends the thread."""
    # Ranks share the cores: with one OpenMP team per rank, more threads than cores would spin.
    torch.set_num_threads(max(1, torch.get_num_threads() // group.size()))
    set_current_group(group)
    while True:
        job = inbox.get()
        if job is None:
            release_thread()
            return
        function, report = job
        result = None
        try:
            with torch.no_grad():
                result = function()
        except kernel_ranks.Stopped:  # the meeting has the reason
            pass
        except BaseException as error:  # the caller's thread raises it
            meeting.fail(error)
        # Also where all went well: ranks that still wait would wait for this one for ever.
        meeting.leave(rank)
        # Between calls the thread lives on and must not keep the call's weights and caches alive.
        del job, function
        # Every rank reports exactly once a call, whatever happened: the caller counts reports.
        report.set_result(result)
        del report, result


_POOLS: weakref.WeakSet[RankPool] = weakref.WeakSet()
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that first wakes while the interpreter shuts down aborts the whole process."""
    for pool in list(_POOLS):
        pool.close()
    for thread in list(_THREADS):  # a pool that was collected has told its threads to end
        thread.join()


class RankPool:
    """The ranks of one application: `size` threads that live as long as the pool.

    With one rank there are no threads: the caller's thread is the rank. Threads rather than
    processes, because PyTorch releases the interpreter lock inside heavy operators and weights
    need not be pickled.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._inboxes: list[queue.SimpleQueue] = []
        self._meeting = kernel_ranks.Rendezvous(size)
        self._groups = [Group(rank, size, self._meeting) for rank in range(size)]
        self._busy = threading.Lock()
        if size > 1:
            self._start_threads()

    def _start_threads(self) -> None:
        """A thread for each rank, which must not hold the pool: it would never be collected."""
        self._inboxes = [queue.SimpleQueue() for _ in range(self.size)]
        for rank, (group, inbox) in enumerate(zip(self._groups, self._inboxes, strict=True)):
            thread = threading.Thread(
                target=_serve,
                args=(group, rank, self._meeting, inbox),
                name=f"rank-{rank}",
                daemon=True,
            )
            _THREADS.add(thread)
            thread.start()
        _POOLS.add(self)

    def group(self, rank: int) -> Group:
        return self._groups[rank]

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function a rank at once, without gradients; results by rank.

        Raises the first failure of any rank, after every rank has stopped.
        """
        if len(functions) != self.size:
            raise ValueError(f"Expected {self.size} functions, one a rank, got {len(functions)}.")
        if self.size == 1:
            with rank_context(self._groups[0]), torch.no_grad():
                return [functions[0]()]
        with self._busy:
            return self._run_threads(functions)

    def _run_threads(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        self._meeting.start()
        reports: list[Future[Any]] = [Future() for _ in functions]
        for inbox, job in zip(self._inboxes, zip(functions, reports), strict=True):
            inbox.put(job)
        # Every rank has to report before this returns: none may still compute into tensors that
        # the caller is about to use, and the rendezvous is reset at the start of the next call.
        interrupted: BaseException | None = None
        while not all(report.done() for report in reports):
            try:
                for report in reports:
                    report.result()
            except KeyboardInterrupt as error:  # stop the ranks first, then let it through
                interrupted = error
                self._meeting.fail(error)
        if interrupted is not None:
            raise interrupted
        failure = self._meeting.failure
        self._meeting.start()  # ranks of another pool may run modules of this one next
        if failure is not None:
            raise failure
        return [report.result() for report in reports]

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def __del__(self) -> None:
        self.close()
