"""Where rank threads meet for a collective."""

import threading
from typing import Callable, List, Optional

import torch

from neuron_cpu.errors import CollectiveError

# A collective's arithmetic: the tensors of all ranks, in rank order -> the result of each rank.
Combine = Callable[[List[torch.Tensor]], List[torch.Tensor]]


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
