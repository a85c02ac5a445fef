"""Runs the two cores of a kernel in step while they are recorded.

Where control flow depends on data, a core's acts behind a meeting may depend on the other core's
acts before it. So each core is a thread, of which one runs at a time: core 0 until it meets the
other, core 1 until there, core 0 until the next meeting, and so on. The order is always the same.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from ..device import ranks
from ..device.errors import refuse, silence, switched_off
from ..device.spec import in_force, using
from ..program import trace

# what the tracer knows of the core that is being recorded
_OF_A_CORE = ("grid_index", "frame", "root", "shared_next", "accumulators", "sums", "in_order")


class _Stopped(BaseException):
    """Ends a core because the other one failed."""


class Turns:
    """Which of two cores is being recorded."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._gates = (threading.Semaphore(0), threading.Semaphore(0))
        self._met = [0, 0]  # meetings that each core has reached
        self._gone: set[int] = set()
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Hold a core that has reached a meeting until the other core has, too.

        Raises:
            NkiError: the other core ends without it.
        """
        tracer = self._tracer
        me = tracer.grid_index[0]
        self._met[me] += 1
        self._check_other(me)
        kept = {name: getattr(tracer, name) for name in _OF_A_CORE}
        phase = tracer.meetings.phase
        self._gates[1 - me].release()
        self._gates[me].acquire()
        if self._failure is not None:
            raise _Stopped
        for name, value in kept.items():
            setattr(tracer, name, value)
        tracer.meetings.phase = phase
        self._check_other(me)

    def _check_other(self, core: int) -> None:
        if 1 - core in self._gone and self._met[1 - core] < self._met[core]:
            raise refuse(
                "sim_core_barrier",
                f"core {core} of {self._tracer.program.name} waits at its meeting number "
                f"{self._met[core]}, to which core {1 - core} does not come, expected both to meet "
                "equally often; let loops and conditions around core_barrier and sendrecv depend "
                "on the same data on both",
            )

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(core)`` on both cores in step; their results.

        Raises:
            Exception: what the first core that failed has raised.
        """
        results: list[Any] = [None, None]
        rank, core, quiet = ranks.own(), in_force(), switched_off()

        def second() -> None:
            with ranks.being(rank), using(core), silence(*quiet), trace.shared(self._tracer):
                self._gates[1].acquire()
                self._core(1, body, results)
                self._gates[0].release()

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(second,), daemon=True)
        thread.start()
        self._core(0, body, results)
        self._gates[1].release()
        thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def _core(self, core: int, body: Callable[[int], Any], results: list[Any]) -> None:
        """One core from its beginning to its end."""
        try:
            if self._failure is None:
                self._tracer.accumulators = {}
                results[core] = body(core)
        except _Stopped:
            pass
        except BaseException as error:  # the caller's thread raises it
            self._failure = self._failure or error
        self._gone.add(core)
