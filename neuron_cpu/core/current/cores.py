"""Where the two cores of a logical one meet (gen3 and later).

Cores are recorded one after the other, or in step where they are executed meanwhile (`Turns`).
A barrier ends a phase. In the end all instructions are put in the order of phases
(``trace.Meetings``). Conflicting accesses of two cores to one tensor in a phase are a race. An
exchange is one instruction of both cores, recorded by the second one to reach it.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from ..device import ranks
from ..device.errors import current_place, refuse, silence, switched_off, warn
from ..device.spec import in_force, using
from ..device.target import needs
from ..instructions.arguments import several
from ..instructions.copies import EXCHANGE, ExchangeAttrs
from ..instructions.recorder import record
from ..program import trace
from ..program.storage import Frame, Loop
from ..program.view import View
from .operands import alike, dma_engine, engine, isa, same_types

CORES = (0, 1)


@isa(None)
def core_barrier(data: View, cores: Any = CORES, engine: engine = engine.gpsimd) -> None:
    """Both cores reach it before either goes on; ``data`` is the shared tensor it protects."""
    needs("core_barrier", 3)
    one = isinstance(cores, int)  # the library writes (0) for a kernel on one core
    named = (cores,) if one else tuple(several(cores, "core_barrier: cores"))
    if named == (0,) and not trace.current("nisa.core_barrier").program.cores > 1:
        return  # nobody to wait for
    told = f"core_barrier of {data.label()} over cores {cores}, expected a tensor in shared_hbm "
    if named != CORES:
        raise refuse("sim_core_barrier", f"{told}or an argument, and cores (0, 1)")
    if data.storage.buffer != "shared_hbm" and data.storage.role != "input":
        # nki-library d2ad3a5 does so (core/moe/moe_cte/bwmm_shard_on_I.py)
        warn("sim_core_barrier", f"{told}or an argument; here both cores wait all the same")
    wait(next_phase("core_barrier"))


def wait(tracer: trace.Tracer) -> None:
    """Let the other core come to the meeting, where both are recorded in step."""
    if tracer.turns is not None:
        tracer.turns.wait()


def next_phase(what: str) -> trace.Tracer:
    """Later instructions of this core come behind earlier ones of the other core.

    The caller brings its part to the meeting and calls ``wait`` then.
    """
    tracer = trace.current(f"nisa.{what}")
    if len(tracer.program.grid) != 1 or tracer.program.grid[0] != len(CORES):
        raise refuse(
            "sim_one_core",
            f"{what} in a kernel that runs on one core, expected two; launch it with kernel[2], on "
            "the command line --grid 2",
        )
    phase = tracer.meetings.phase = tracer.meetings.phase + 1
    tracer.meetings.last = current_place()
    loops = tracer.phase_loops
    if len(loops) < phase:
        loops.append(Loop(-1 - phase, "grid", len(CORES), tracer.place()))
    tracer.frame = tracer.root = Frame(loops[phase - 1], tracer.grid_index[0], None)
    return tracer


@isa(EXCHANGE, keywords={"dma_engine": "2.29"})
def sendrecv(
    src: View,
    dst: View,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
) -> None:
    """Exchange of SBUF tiles of one shape and type between the two cores, at the same time.

    ``gpsimd_dma`` takes at most 1024 bytes of a partition (512 of 16-bit, 256 of 8-bit types).
    """
    same_types("sendrecv", dst, src)
    src, dst = alike("sendrecv", src, dst)
    _check_size(src, dma_engine)
    tracer = trace.current("nisa.sendrecv")
    own = tracer.grid_index[0] if tracer.grid_index else 0
    if send_to_rank not in CORES or recv_from_rank not in CORES:
        raise refuse(
            "sim_rank_number",
            f"sendrecv to rank {send_to_rank} from rank {recv_from_rank}, expected 0 or 1; "
            "name the other core, 1 - nl.program_id(0)",
        )
    if own in (send_to_rank, recv_from_rank):
        raise refuse(
            "sim_rank_number",
            f"core {own} sends to rank {send_to_rank} and receives from rank {recv_from_rank}, "
            f"expected {1 - own}, the other core; write 1 - nl.program_id()",
        )
    before = tracer.meetings.phase
    next_phase("sendrecv")
    key = (before, "sendrecv", (pipe_id,))
    parts = tracer.meetings.open.setdefault(key, [])
    parts.append((src, dst))
    tracer.senders[(key, own)] = recv_from_rank
    if len(parts) == len(CORES):
        _exchange(tracer, key, parts)
    wait(tracer)


def _exchange(tracer: trace.Tracer, key: tuple, parts: list[tuple[View, View]]) -> None:
    """One instruction for both cores, between the phases that it separates."""
    del tracer.meetings.open[key]
    senders = tuple(tracer.senders[(key, core)] for core in CORES)
    frame, tracer.frame = tracer.frame, None
    sources, targets = zip(*parts)
    made = record(EXCHANGE, targets, sources, ExchangeAttrs(raw=True, senders=senders))
    tracer.frame = frame
    tracer.meetings.phases[id(made)] = key[0] + 0.5


_GPSIMD_BYTES = {4: 1024, 2: 512, 1: 256}


def _check_size(tile: View, given: Any) -> None:
    size = tile.free_size * tile.dt.itemsize
    limit = _GPSIMD_BYTES[tile.dt.itemsize]
    if given is dma_engine.gpsimd_dma and size > limit:
        raise refuse(
            "sim_exchange_size",
            f"sendrecv of {tile.label()} by gpsimd_dma takes {size} bytes per partition, expected "
            f"at most {limit}; use dma_engine.dma",
        )


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
