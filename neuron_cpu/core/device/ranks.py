"""Which of several ranks runs a kernel here, and where they meet.

A kernel of several ranks runs as on devices: once on each, with the rank's own tensors. Here ranks
are threads. A collective is a meeting: the last rank of a group to arrive lets all go on, and every
one computes its result from all parts in rank order, so that results do not depend on timing.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .dtypes import Tensors
from .errors import NkiError, current_place, within

Members = tuple[int, ...]  # the ranks of a group


class Rank(Protocol):
    """A rank that runs a kernel: one of ``size``."""

    rank: int
    size: int

    def meet(self, label: str, members: Members, parts: Tensors) -> list[Tensors]:
        """The parts of all members, in their order; blocks until all have brought theirs."""


def _refuse(identifier: str, message: str) -> NkiError:
    return NkiError(identifier, message, current_place())


class Alone:
    """The only rank there is."""

    rank, size = 0, 1

    def meet(self, label: str, members: Members, parts: Tensors) -> list[Tensors]:
        if len(members) > 1:
            raise _refuse(
                "sim_rank_alone",
                f"{label} over ranks {list(members)} in a kernel that one rank runs, expected "
                "all of them; call it with neuron_cpu.core.on_ranks, or inside the SDK's ranks",
            )
        return [parts]


_local = threading.local()
ALONE = Alone()


def own() -> Rank:
    """The rank that this thread is."""
    return getattr(_local, "rank", None) or ALONE


def be(rank: Rank | None) -> None:
    """Make this thread a rank, or the only one again."""
    _local.rank = rank


def being(rank: Rank) -> AbstractContextManager[None]:
    """Be a rank inside the block (this thread only)."""
    return within(_local, rank=rank)


# --- ranks as threads -----------------------------------------------------------------------------
class Stopped(BaseException):
    """Ends a rank whose group broke; the failure that broke it is what the caller sees.

    A BaseException, so that ``except Exception`` in a model cannot keep a dead rank alive.
    """


class Rendezvous:
    """Where ``size`` threads meet, group by group; ``start`` begins a further call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.start()

    def start(self) -> None:
        """Forget the previous call, whether it ended well or not."""
        with self.condition:
            self.arrived: dict[Members, dict[int, tuple[str, Any]]] = {}
            self.results: dict[Members, Sequence[Any]] = {}
            self.rounds: dict[Members, int] = {}
            self.gone: set[int] = set()
            self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Break all groups with ``error`` (the first one counts) and wake all that wait."""
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

    def leave(self, rank: int) -> None:
        """A rank has finished its call; whoever still waits for it waits in vain."""
        with self.condition:
            self.gone.add(rank)
            self._check_missing()

    def meet(
        self,
        rank: int,
        label: str,
        members: Members,
        part: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """This rank's result of ``combine``, which the last member to arrive calls once, with the
        parts of all in their order. ``label`` names operation, type and shape for messages."""
        with self.condition:
            if self.failure is not None:
                raise Stopped
            # A rank cannot arrive twice in one round: it waits below until the round ends.
            waiting = self.arrived.setdefault(members, {})
            waiting[rank] = label, part
            if len(waiting) == len(members):
                try:
                    self._complete(members, waiting, combine)
                except BaseException as error:  # the others wait for a result that will not come
                    self.fail(error)
                    raise
            else:
                # Whoever is missing may have left before this rank came, and will not wake it.
                mine = self.rounds.get(members, 0)
                self._check_missing()
                while self.rounds.get(members, 0) == mine and self.failure is None:
                    self.condition.wait()
                # A failure after the round was completed does not take its result away. The next
                # round cannot replace it before this rank has read it: that needs this rank.
                if self.rounds.get(members, 0) == mine:
                    raise Stopped
            return self.results[members][members.index(rank)]

    def _complete(
        self,
        members: Members,
        waiting: dict[int, tuple[str, Any]],
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> None:
        told = {rank: waiting[rank][0] for rank in members}
        if len(set(told.values())) > 1:
            raise _refuse(
                "sim_ranks_differ",
                f"ranks meet in different collectives, {told}, expected the same operation, shape "
                "and type on each; make control flow equal on all ranks",
            )
        self.results[members] = combine([waiting[rank][1] for rank in members])
        del self.arrived[members]
        self.rounds[members] = self.rounds.get(members, 0) + 1
        self.condition.notify_all()

    def _check_missing(self) -> None:
        for members, waiting in self.arrived.items():
            gone = (set(members) - set(waiting)) & self.gone
            beyond = [rank for rank in members if rank >= self.size]
            if gone or beyond:
                label = next(iter(waiting.values()))[0]
                missing = _refuse(
                    "sim_rank_missing",
                    f"ranks {sorted(waiting)} wait in {label} for rank {min([*gone, *beyond])}, "
                    "which does not come, expected every rank of the group there; call "
                    "the same collectives on all ranks",
                )
                self.fail(missing)


class _Thread:
    """One rank of a call of ``on_ranks``."""

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        self.rank, self.size, self.rendezvous = rank, rendezvous.size, rendezvous

    def meet(self, label: str, members: Members, parts: Tensors) -> list[Tensors]:
        mine = [part.clone() for part in parts]
        return self.rendezvous.meet(self.rank, label, members, mine, lambda all: [all] * len(all))


def on_ranks(kernel: Callable, arguments: Sequence[tuple]) -> list[Any]:
    """Call ``kernel`` on as many ranks as there are tuples of arguments; results by rank.

    Raises:
        NkiError: ranks did not meet; or whatever the first rank that failed has raised.
    """
    rendezvous = Rendezvous(len(arguments))
    results: list[Any] = [None] * len(arguments)

    def run(rank: int) -> None:
        try:
            with being(_Thread(rank, rendezvous)):
                results[rank] = kernel(*arguments[rank])
            rendezvous.leave(rank)
        except Stopped:
            rendezvous.leave(rank)
        except BaseException as error:  # the caller's thread raises it
            rendezvous.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return results
