"""Tensor-parallel ranks as threads of one process, and the collectives between them.

Every rank runs the same Python with its own weights, as every NeuronCore runs the same graph. A
collective is a rendezvous: the last rank to arrive computes the results of all ranks, in rank
order, so sums do not depend on timing. No rank touches another rank's tensor outside that moment.

A rank that fails, or that ends while others wait for it, breaks the group: the others stop at
their next collective and the call raises the first failure. Nothing waits for ever.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence

import torch

from neuron_cpu.core import release_thread
from neuron_cpu.errors import CollectiveError

# A collective's arithmetic: the tensors of all ranks, in rank order -> the result of each rank.
Combine = Callable[[List[torch.Tensor]], List[torch.Tensor]]
# Who watches a trace: the operation, this rank's tensor, what computes the result -> the result.
Observer = Callable[[str, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]


class RankStopped(BaseException):
    """Raised inside a rank whose group broke; the failure that broke it is what the caller sees.

    A BaseException, so that a model's `except Exception` cannot keep a dead rank alive.
    """


class Rendezvous:
    """Where `size` threads meet; one object serves any number of collectives, one at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._arrived: dict = {}  # rank -> (operation label, tensor)
        self._left: set = set()  # ranks whose function has returned
        self._results: List[torch.Tensor] = []
        self._generation = 0
        self._failure: Optional[BaseException] = None

    def start(self) -> None:
        """Forget the previous call, whether it ended well or not."""
        with self._condition:
            self._reset()

    def fail(self, error: BaseException) -> None:
        """Break the group with `error` (the first one counts) and wake all that wait."""
        with self._condition:
            if self._failure is None:
                self._failure = error
            self._condition.notify_all()

    def leave(self, rank: int) -> None:
        """Rank `rank` has finished its function; whoever still waits for it waits in vain."""
        with self._condition:
            self._left.add(rank)
            self._check_missing()

    @property
    def failure(self) -> Optional[BaseException]:
        return self._failure

    def _check_missing(self) -> None:
        """Break the group if ranks wait while every missing one has left."""
        missing = set(range(self.size)) - set(self._arrived)
        gone = missing & self._left
        if self._arrived and gone and self._failure is None:
            label = next(iter(self._arrived.values()))[0]
            self._failure = CollectiveError(
                f"Ranks {sorted(self._arrived)} wait in {label} for rank {min(gone)}, which has "
                "ended its forward, expected every rank to take part in every collective; do not "
                "let the number of collectives depend on the rank or on tensor values."
            )
            self._condition.notify_all()

    def _complete(self, combine: Combine) -> None:
        """Run by the last rank to arrive, holding the lock: check, compute, open the gate."""
        labels = {label for label, _ in self._arrived.values()}
        if len(labels) > 1:
            described = ", ".join(f"rank {r}: {self._arrived[r][0]}" for r in sorted(self._arrived))
            raise CollectiveError(
                f"Ranks met in different collectives ({described}), expected the same operation, "
                "dtype and shape on every rank; make the model's forward alike on all ranks."
            )
        self._results = combine([self._arrived[rank][1] for rank in range(self.size)])
        self._arrived = {}
        self._generation += 1
        self._condition.notify_all()

    def exchange(
        self, rank: int, label: str, tensor: torch.Tensor, combine: Combine
    ) -> torch.Tensor:
        """Meet the other ranks with `tensor`; returns this rank's part of `combine`'s result."""
        with self._condition:
            if self._failure is not None:
                raise RankStopped
            # A rank cannot arrive twice for one generation: it waits below until the generation
            # ends, so a fast rank never overtakes a slow one by a whole collective.
            self._arrived[rank] = (label, tensor)
            if len(self._arrived) == self.size:
                try:
                    self._complete(combine)
                except BaseException as error:
                    # The others wait for a result that will not come; this rank raises itself.
                    self._failure = self._failure or error
                    self._condition.notify_all()
                    raise
                return self._results[rank]
            # Whoever is missing may have left before this rank came, and will not wake it.
            generation = self._generation
            self._check_missing()
            while self._generation == generation and self._failure is None:
                self._condition.wait()
            # A failure after the collective was completed does not take its result away. The next
            # one cannot replace `_results` before this rank has read them: it needs this rank.
            if self._generation == generation:
                raise RankStopped
            return self._results[rank]


class Group:
    """A tensor-parallel group as one rank sees it.

    With `rendezvous` None and more than one rank the group is mocked, as it is while the SDK
    traces: this rank claims its place among `size` ranks, and a collective behaves as if every
    rank had sent the same tensor. Outside a trace only meta tensors may meet in a mocked group.
    """

    def __init__(self, rank: int, size: int, rendezvous: Optional[Rendezvous] = None) -> None:
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
            return self._rendezvous.exchange(self._rank, label, tensor, combine)
        if not tensor.is_meta and not is_tracing():
            raise CollectiveError(
                f"{label} met no other rank, expected {self._size} ranks, got a call outside "
                "them; run the model through its application, or use a tensor-parallel size of 1."
            )
        observer = getattr(_current, "observer", None)
        if observer is None:
            return self._mocked(tensor, combine)
        return observer(label.partition("(")[0], tensor, lambda: self._mocked(tensor, combine))

    def _mocked(self, tensor: torch.Tensor, combine: Combine) -> torch.Tensor:
        return combine([tensor] * self._size)[self._rank]


_current = threading.local()


def current_group() -> Optional[Group]:
    """The group of the running thread, None where no parallel state is initialised."""
    return getattr(_current, "group", None)


def set_current_group(group: Optional[Group]) -> None:
    """Install `group` for the running thread."""
    _current.group = group


def is_tracing() -> bool:
    """Whether the running thread traces a model ahead of time."""
    return getattr(_current, "tracing", False)


def set_tracing(tracing: bool) -> None:
    """Mark the running thread as tracing, or not."""
    _current.tracing = bool(tracing)


@contextmanager
def observe_collectives(observer: Observer) -> Iterator[None]:
    """Inside the block, this thread's collectives of mocked groups run through `observer`.

    It gets the operation's name, this rank's tensor and a function that computes the result, which
    it returns.
    """
    before = getattr(_current, "observer", None)
    _current.observer = observer
    try:
        yield
    finally:
        _current.observer = before


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
    group: Group, rendezvous: Rendezvous, inbox: queue.SimpleQueue, done: queue.SimpleQueue
) -> None:
    """Body of a rank's thread: take a function, run it, report; None ends the thread."""
    # Ranks share the cores: with one OpenMP team per rank, more threads than cores would spin.
    torch.set_num_threads(max(1, torch.get_num_threads() // group.size()))
    set_current_group(group)
    while True:
        function = inbox.get()
        if function is None:
            release_thread()
            return
        result = None
        try:
            with torch.no_grad():
                result = function()
            # Also where all went well: ranks that still wait would wait for this one for ever.
            rendezvous.leave(group.rank())
        except RankStopped:
            rendezvous.leave(group.rank())
        except BaseException as error:  # the caller's thread raises it
            rendezvous.fail(error)
        # Between calls the thread lives on and must not keep the call's weights and caches alive.
        del function
        # Every rank reports exactly once a call, whatever happened: the caller counts reports.
        done.put((group.rank(), result))


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
        self._rendezvous = Rendezvous(size)
        self._groups = [Group(rank, size, self._rendezvous) for rank in range(size)]
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._inboxes: List[queue.SimpleQueue] = []
        self._busy = threading.Lock()
        if size > 1:
            self._inboxes = [queue.SimpleQueue() for _ in range(size)]
            # The threads must not hold the pool, or the pool would never be collected.
            threads = [
                threading.Thread(
                    target=_serve,
                    args=(group, self._rendezvous, inbox, self._done),
                    name=f"rank-{group.rank()}",
                    daemon=True,
                )
                for group, inbox in zip(self._groups, self._inboxes, strict=True)
            ]
            for thread in threads:
                _THREADS.add(thread)
                thread.start()
            _POOLS.add(self)

    def group(self, rank: int) -> Group:
        return self._groups[rank]

    def run(self, functions: Sequence[Callable[[], Any]]) -> List[Any]:
        """Run `functions[rank]()` on each rank at once, without gradients; results by rank.

        Raises the first failure of any rank, after every rank has stopped.
        """
        if len(functions) != self.size:
            raise ValueError(f"Expected {self.size} functions, one a rank, got {len(functions)}.")
        if self.size == 1:
            with rank_context(self._groups[0]), torch.no_grad():
                return [functions[0]()]
        with self._busy:
            return self._run_threads(functions)

    def _run_threads(self, functions: Sequence[Callable[[], Any]]) -> List[Any]:
        self._rendezvous.start()
        results: List[Any] = [None] * self.size
        for inbox, function in zip(self._inboxes, functions, strict=True):
            inbox.put(function)
        # Every rank has to report before this returns: none may still compute into tensors that
        # the caller is about to use, and the rendezvous is reset at the start of the next call.
        waiting = self.size
        interrupted: Optional[BaseException] = None
        while waiting:
            try:
                rank, result = self._done.get()
            except KeyboardInterrupt as error:  # stop the ranks first, then let it through
                interrupted = error
                self._rendezvous.fail(error)
                continue
            results[rank] = result
            waiting -= 1
        if interrupted is not None:
            raise interrupted
        if self._rendezvous.failure is not None:
            raise self._rendezvous.failure
        return results

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def __del__(self) -> None:
        self.close()
