"""When each instruction of a Program runs, and what made it wait.

The vendor's compiler changes what a kernel writes (lower.py) and does not issue it in the order in
which it is written: within each engine it moves instructions whose operands are there before others
that still wait. So does this schedule. Each of the four compute engines takes, whenever it is free,
the oldest (in program order) of the instructions that have everything they need, looking at most
WINDOW instructions past its oldest one that waits; dependences through overlapping views and reused
buffers bound what may overtake what (depend.py). ``program-order`` is the unchanged program with a
window of one. 16 DMA engines serve transfers in the order in which these become ready.

An instruction starts when its engine is free, its operands are there, the memory of its result has
been granted and the port that it shares with another engine is free. Memory is granted to storages
in the order of their first use, as soon as enough has been released: that is how far a compiler
that rotates buffers could run ahead, so double buffering follows from the kernel's storages and the
capacity of SBUF and PSUM (memory.py) and is never assumed.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..device.errors import refuse
from ..device.pause import without_garbage_collection
from ..device.spec import CORE, Engine, in_force, using
from ..instructions.ranks import by_core
from ..program.program import Instruction, Program
from ..program.storage import ON_CHIP, Storage
from . import cost, depend, memory
from .lower import as_written, lower
from .passes.spill import spill

ENGINES = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, Engine.DMA)
TENSOR, VECTOR, SCALAR, GPSIMD, DMA = range(5)
NUMBER = {engine: k for k, engine in enumerate(ENGINES)}

# Why an instruction did not start earlier: nothing to wait for, operands, its engine, a free
# buffer, a port that engines share, the DMA queue.
NOTHING, DATA, ENGINE, BUFFER, PORT, QUEUE = range(6)

# in which order an engine takes its instructions
COMPILER_ORDER, PROGRAM_ORDER = "compiler", "program-order"
ORDERS = (COMPILER_ORDER, PROGRAM_ORDER)
WINDOW = 256  # instructions of one engine, from its oldest that waits, among which it may choose


class Wait(NamedTuple):
    """The bound of an instruction's start: the kind and the instruction that ended last."""

    kind: int
    by: int


@dataclass
class Schedule:
    """Times of every instruction of one Program, in nanoseconds from the start of the kernel.

    Attributes:
        program: what was scheduled: the kernel's program as the compiler would change it.
        profile: name of the DMA profile.
        engine: engine number of each instruction (index into ENGINES).
        start, end: of each instruction; a transfer starts with its first row.
        busy: time that each instruction occupies its engine; for a transfer its longest engine.
        waits: what bound the start of each instruction.
        transfers: rows of each DMA instruction, by instruction index, in the order served.
        lane_busy: time that each of the 16 DMA engines moves rows.
        overcommitted: bytes per partition of SBUF and of PSUM by which the kernel exceeds the
            capacity although tiles are spilled: what single instructions need at once.
        order: which order the engines followed (``ORDERS``).
    """

    program: Program
    profile: str
    engine: list[int]
    start: list[float]
    end: list[float]
    busy: list[float]
    waits: list[Wait]
    transfers: dict[int, cost.Transfer]
    lane_busy: list[float]
    overcommitted: tuple[int, int] = (0, 0)
    order: str = COMPILER_ORDER
    _memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Nanoseconds from the first instruction to the end of the last."""
        return max(self.end, default=0.0)

    def engine_busy(self) -> dict[Engine, float]:
        """Busy nanoseconds of each engine; DMA counts the busiest of its 16 engines."""
        busy = [0.0] * len(ENGINES)
        for number, time in zip(self.engine, self.busy):
            busy[number] += time
        busy[DMA] = max(self.lane_busy)
        return dict(zip(ENGINES, busy))

    def memory(self, buffer: str) -> list[tuple[float, int]]:
        """(time, use) steps of ``sbuf`` in bytes per partition or ``psum`` in banks."""
        if not self._memory:
            self._memory = _occupancy(self)
        return self._memory[buffer]

    def high_water(self, buffer: str) -> int:
        """Largest use of ``sbuf`` (bytes per partition) or ``psum`` (banks)."""
        return max((use for _, use in self.memory(buffer)), default=0)

    def critical_path(self) -> list[int]:
        """Instructions that the end of the kernel waited for, last first."""
        if not self.end:
            return []
        path = []
        at = max(range(len(self.end)), key=self.end.__getitem__)
        while at >= 0:
            path.append(at)
            at = self.waits[at].by
        return path

    def lane_spans(self) -> list[tuple[int, int, float, float]]:
        """(DMA engine, instruction, start, end) of every engine's share of every transfer."""
        spans, free = [], [0.0] * len(self.lane_busy)
        profile = cost.dma_profile(self.profile)
        with using(profile.core(self.program.core)):
            profile = cost.in_language(profile, self.program.today)
            for at, moved in self.transfers.items():
                for lane, rows in enumerate(moved.lanes):
                    if rows:
                        begin = max(self.start[at], free[lane])
                        free[lane] = begin + cost.lane_ns(profile, moved, rows)
                        spans.append((lane, at, begin, free[lane]))
        return spans


def _occupancy(schedule: Schedule) -> dict[str, list[tuple[float, int]]]:
    spans: dict[tuple[Storage, int], list[float]] = {}  # of each tile: first start, last end
    known: dict[int, list[list[float]]] = {}  # those of a view's tiles
    placed = dict.fromkeys(ON_CHIP, 0)  # tensors with addresses hold them from beginning to end
    # A tile is held from the first instruction that touches it to the end of the last one.
    for at, instruction in enumerate(schedule.program.instructions):
        begin, end = schedule.start[at], schedule.end[at]
        for view in (*instruction.src, *instruction.dst):
            tiles = known.get(id(view))
            if tiles is None:
                tiles = known[id(view)] = []
                storage = view.storage.memory
                if storage.address is not None:
                    stops = (tile.stop for tile in storage.address)
                    placed[storage.buffer] = max(placed[storage.buffer], *stops)
                elif storage.on_chip:
                    for block in view.blocks():
                        tiles.append(spans.setdefault((storage, block), [begin, end]))
            for span in tiles:
                if begin < span[0]:
                    span[0] = begin
                if end > span[1]:
                    span[1] = end
    # Steps of one time add up, so that a buffer that is passed on does not count twice.
    steps: dict[str, dict[float, int]] = {buffer: {} for buffer in placed}
    for (storage, _), (begin, end) in spans.items():
        own, size = steps[storage.buffer], storage.tile_bytes
        own[begin] = own.get(begin, 0) + size
        own[end] = own.get(end, 0) - size
    found = {}
    for buffer, use in placed.items():
        unit = 1 if buffer == "sbuf" else CORE.psum_bank_bytes
        found[buffer] = [(0.0, -(-use // unit))] if use else []
        for time in sorted(steps[buffer]):
            use += steps[buffer][time]
            found[buffer].append((time, -(-use // unit)))
    return found


# --- what every instruction needs -----------------------------------------------------------------
class _Made(NamedTuple):
    """A lowered program with what no constant changes.

    Attributes:
        alike: of each instruction, the number of the first one that takes as long on each engine.
    """

    program: Program
    needs: depend.Dependences
    alike: list[int]


Known = dict[tuple, _Made]
Profiles = dict[str, cost.DmaProfile]


def _made(program: Program) -> _Made:
    known: dict[tuple, int] = {}
    distinct = {id(i.attrs): i.attrs for i in program.instructions}
    constants = {key: attrs.timed() for key, attrs in distinct.items()}
    forms = [
        (i.op.name, constants[id(i.attrs)], len(i.dst))
        + tuple((v.shape, v.strides, v.dt, v.storage.buffer) for v in (*i.dst, *i.src))
        for i in program.instructions
    ]
    alike = [known.setdefault(form, at) for at, form in enumerate(forms)]
    return _Made(program, depend.dependences(program), alike)


def _engines(made: _Made) -> tuple[list[int], list[float], list[float]]:
    """Engine and occupancy of every instruction, and what its result takes after that.

    Copies of floats that leave the engine open go to the less loaded of VectorE and ScalarE.
    """
    load = [0.0] * len(ENGINES)
    known: dict[int, list[tuple[int, float, float]]] = {}  # engines that it may take, and times
    numbers, times, latency = [], [], []
    for first, instruction in zip(made.alike, made.program.instructions):
        if first not in known:
            free = instruction.op.choice(instruction) is not None
            own = instruction.op.engine_of(instruction)
            known[first] = [
                (NUMBER[e], cost.engine_ns(instruction, e), cost.result_ns(instruction, e))
                if e is not Engine.DMA
                else (DMA, 0.0, 0.0)
                for e in ((Engine.VECTOR, Engine.SCALAR) if free else (own,))
            ]
        # Greedy, in program order: the engine that would so be through with its work first.
        number, time, after = min(known[first], key=lambda one: load[one[0]] + one[1])
        load[number] += time
        numbers.append(number)
        times.append(time)
        latency.append(after)
    return numbers, times, latency


def _ports(instruction: Instruction, number: int) -> tuple[bool, bool]:
    """Whether it needs the SBUF port of VectorE|GpSimdE and the PSUM port of VectorE|ScalarE."""
    if number in (TENSOR, DMA) or not CORE.exclusive_ports:
        return False, False
    buffers = {v.storage.buffer for v in (*instruction.src, *instruction.dst)}
    return "sbuf" in buffers and number != SCALAR, "psum" in buffers and number != GPSIMD


class _Run:
    """State of one simulation; times in nanoseconds.

    Events are numbers in one heap: a node that became ready (an instruction, or a join, from
    ``joins_at`` on), an engine that may issue (from ``engines_at`` on) and, below zero, a storage
    to be released. At one time, everything that becomes ready comes before an engine's choice.
    """

    def __init__(self, made: _Made, profile: cost.DmaProfile, order: str) -> None:
        self.program = program = made.program
        self.profile = cost.in_language(profile, program.today)
        self.numbers, self.times, self.latency = _engines(made)
        # Nodes: instructions, joins behind them; then the engines, for events only.
        n = self.joins_at = len(self.numbers)
        self.pending: list[int] = []
        self.after: list[list[int]] = []  # who needs the result: waits for end and latency
        self.behind: list[list[int]] = []  # who only follows on the same engine: waits for the end
        self._edges(made.needs)
        self.engines_at = len(self.pending)
        # What each engine may choose from. A window of one instruction is program order.
        self.window = 1 if order == PROGRAM_ORDER else WINDOW
        self.queue: list[list[int]] = [[] for _ in range(DMA)]  # of each engine in program order
        self.place = [0] * n  # position of an instruction in that queue
        for at, number in enumerate(self.numbers):
            if number != DMA:
                self.place[at] = len(self.queue[number])
                self.queue[number].append(at)
        self.oldest = [0] * DMA  # position of the first one that has not been issued
        self.issued = [False] * n
        self.candidates: list[list[int]] = [[] for _ in range(DMA)]
        self.beyond: list[list[int]] = [[] for _ in range(DMA)]  # ready, but outside of the window
        self.engine_free = [0.0] * DMA
        self.engine_last = [-1] * DMA
        # Grants of memory count among the things that an instruction waits for. ``ready`` is when
        # the last of them came, ``waits`` what it was.
        self.memory = memory.Memory(program, self.pending)
        self.ready = [0.0] * len(self.pending)
        self.start = [0.0] * n
        self.end = [0.0] * n
        self.waits = [Wait(NOTHING, -1)] * len(self.pending)
        self.transfers: dict[int, cost.Transfer] = {}
        self.works: dict[cost.Transfer, list[float]] = {}  # of each DMA engine
        self.lane_free = [0.0] * CORE.dma.engines
        self.lane_last = [-1] * CORE.dma.engines
        self.lane_busy = [0.0] * CORE.dma.engines
        self.collective_free, self.collective_last = 0.0, -1
        # no time of a kernel of `nki` shows fixed places of partitions or a limit of issue
        self.fixed = not program.today or CORE.dma.today_fixed
        issued = not program.today or CORE.dma.today_issued
        self.issues = profile.issued and issued and CORE.dma.issue_ns > 0
        self.issue_free = dict.fromkeys(("", "sync", "scalar"), 0.0)  # by issuer
        self.issue_last = dict.fromkeys(self.issue_free, -1)
        self.used: deque[tuple[float, float, float]] = deque()  # TensorE: start, end, share
        self.port_free = [0.0, 0.0]
        self.port_last = [-1, -1]
        self.ports = [_ports(i, e) for i, e in zip(program.instructions, self.numbers)]
        self.heap: list[tuple[float, int]] = []

    def _edges(self, needs: depend.Dependences) -> None:
        """Turn predecessors into successors."""
        numbers = self.numbers
        count = len(numbers) + len(needs.joins)
        self.after = [[] for _ in range(count)]
        self.behind = [[] for _ in range(count)]
        pending = self.pending = [0] * count
        for at, (values, orders) in enumerate(zip(needs.values, needs.orders)):
            pending[at] = len(values) + len(orders)
            number = numbers[at]
            for before in values:
                # matmuls into one PSUM tile follow each other without a gap
                chained = number == TENSOR and before < self.joins_at and numbers[before] == TENSOR
                (self.behind if chained else self.after)[before].append(at)
            # Who overwrites must only come later. On one engine that is order alone; another one
            # has to be told, which takes as long as telling a reader.
            for before in orders:
                same = before < self.joins_at and numbers[before] == number
                (self.behind if same else self.after)[before].append(at)
        for k, before_join in enumerate(needs.joins, self.joins_at):
            pending[k] = len(before_join)
            for before in before_join:
                self.after[before].append(k)

    def run(self, fits: bool) -> bool:
        """Serve events in order of time: what is ready, engines that are free, freed memory. One
        that has to fit gives up, with False, where the memory does not suffice."""
        heap = self.heap
        heap.extend((0.0, at) for at, count in enumerate(self.pending) if not count)
        heapify(heap)
        for pool in (self.memory.sbuf, self.memory.psum):
            self._grant(pool, 0.0, -1)
        left = len(self.numbers)
        while left:
            if not heap:
                # Whatever waits now waits for memory: more is live than there is. A compiler would
                # spill; the schedule goes on, and says how much is lacking (``overcommitted``).
                if fits:
                    return False
                now = max(self.end)
                self._grant(self.memory.force(), now, -1)
                continue
            now, at = heappop(heap)
            if at < 0:
                self._grant(self.memory.release(~at), now, self.memory.releaser[~at])
            elif at >= self.engines_at:
                left -= self._issue(at - self.engines_at, now)
            elif at >= self.joins_at:
                # A join hands on what bound it: what is shown as a reason is an instruction.
                for later in self.after[at]:
                    self._ready(later, now, *self.waits[at])
            elif self.numbers[at] == DMA:
                left -= 1
                self._transfer(at, now)
                self._finish(at)
            else:
                self._offer(at, now)
        return True

    def _offer(self, at: int, now: float) -> None:
        """An instruction has all that it needs but its engine."""
        number = self.numbers[at]
        if self.place[at] >= self.oldest[number] + self.window:
            heappush(self.beyond[number], at)
            return
        # The engine chooses when it is free, not now: an older one may have become ready by then.
        heappush(self.candidates[number], at)
        heappush(self.heap, (max(now, self.engine_free[number]), self.engines_at + number))

    def _issue(self, number: int, now: float) -> int:
        """The engine takes the oldest of its candidates; how many it took."""
        candidates = self.candidates[number]
        # Every candidate entered an event of its own, so the engine may have been served meanwhile.
        if not candidates or self.engine_free[number] > now:
            return 0
        at = heappop(candidates)
        self.issued[at] = True
        # Ready before the engine was: the engine bound it. A port may bind it yet (_compute).
        if self.engine_last[number] >= 0 and self.engine_free[number] > self.ready[at]:
            self.waits[at] = Wait(ENGINE, self.engine_last[number])
        self._compute(at, now)
        self.engine_free[number], self.engine_last[number] = self.end[at], at
        self._advance(number)
        if candidates:
            heappush(self.heap, (self.end[at], self.engines_at + number))
        self._finish(at)
        return 1

    def _advance(self, number: int) -> None:
        """Move the window behind everything that has been issued."""
        queue, beyond = self.queue[number], self.beyond[number]
        oldest = self.oldest[number]
        while oldest < len(queue) and self.issued[queue[oldest]]:
            oldest += 1
        self.oldest[number] = oldest
        while beyond and self.place[beyond[0]] < oldest + self.window:
            heappush(self.candidates[number], heappop(beyond))

    def _compute(self, at: int, now: float) -> None:
        sbuf, psum = self.ports[at]
        # A port belongs to an instruction from its start to its end; the other engine waits.
        for port, needed in ((0, sbuf), (1, psum)):
            if needed and self.port_free[port] > now:
                now = self.port_free[port]
                self.waits[at] = Wait(PORT, self.port_last[port])
        if CORE.ramp_ns and self.numbers[at] == TENSOR:
            self.times[at] *= self._ramp(at, now)
        self.start[at] = now
        end = self.end[at] = now + self.times[at]
        if sbuf:
            self.port_free[0], self.port_last[0] = end, at
        if psum:
            self.port_free[1], self.port_last[1] = end, at

    def _ramp(self, at: int, now: float) -> float:
        """How much slower TensorE is than at its full rate, by how it was used just before."""
        now = float(now)  # the fit's numbers carry more
        used, since = self.used, now - CORE.ramp_ns
        while used and used[0][1] <= since:
            used.popleft()
        share = float(cost.array_use(self.program.instructions[at]))
        work = sum((end - max(begin, since)) * part for begin, end, part in used)
        slower = 2.0 if share and 2 * work < CORE.ramp_ns else 1.0
        used.append((now, now + slower * float(self.times[at]), share))
        return slower

    def _transfer(self, at: int, now: float) -> None:
        moved = self.transfers[at] = cost.transfer(self.program.instructions[at], self.fixed)
        if moved.apart_ns:  # collectives follow each other on a queue of their own
            if self.collective_free > now:
                now, self.waits[at] = self.collective_free, Wait(QUEUE, self.collective_last)
            moving_ns = CORE.collective_ns + self._beside(moved, now)
            self.start[at], self.times[at] = now, max(moved.apart_ns, moving_ns)
            self.end[at] = self.collective_free = now + self.times[at]
            self.collective_last = at
            return
        issuer = self.program.instructions[at].attrs.issuer
        if issuer:
            now = self._queued(at, now, issuer, CORE.dma.hardware_ns)
        elif moved.built_ns:
            now = self._describe(at, now, moved.built_ns)
        if self.issues:
            now = self._queued(at, now, "", CORE.dma.issue_ns + moved.rows * CORE.dma.issue_row_ns)
        arrival = now + CORE.dma.start_ns
        free, busy, last = self.lane_free, self.lane_busy, self.lane_last
        first, end, blocker = float("inf"), 0.0, -1
        # Each engine moves its share behind what it has to do; the transfer starts with the first
        # row and ends with the last. The queue bound it only if the engine that ends last was busy.
        works = cost.lanes_ns(self.profile, moved, self.works)
        for lane, (rows, work) in enumerate(zip(moved.lanes, works)):
            if not rows:
                continue
            begin = free[lane]
            before = last[lane]
            if begin <= arrival:
                begin, before = arrival, -1
            if begin < first:
                first = begin
            busy[lane] += work
            free[lane] = begin + work
            last[lane] = at
            if begin + work > end:
                end, blocker, self.times[at] = begin + work, before, work
        self.start[at], self.end[at] = first, end
        if blocker >= 0:
            self.waits[at] = Wait(QUEUE, blocker)

    def _beside(self, moved: cost.Transfer, now: float) -> float:
        """How long the engines take for a collective's rows on queues of its own: an engine takes
        turns between its queues, a packet of each, so each row waits for a packet of the others
        (compute-comm-overlap.rst), and what waits there waits for the rows."""
        longest, free = 0.0, self.lane_free
        packet = self.profile.row_ns(CORE.dma.packet_bytes)
        for lane, rows in enumerate(moved.lanes):
            if not rows:
                continue
            work, left = cost.lane_ns(self.profile, moved, rows), max(0.0, free[lane] - now)
            longest = max(longest, work + min(left, rows * packet))
            free[lane] = now + left + work
            self.lane_busy[lane] += work
        return longest

    def _describe(self, at: int, now: float, built: float) -> float:
        """When GpSimdE has built the descriptors of a transfer, behind what it is at."""
        if self.engine_free[GPSIMD] > now:
            now, self.waits[at] = self.engine_free[GPSIMD], Wait(ENGINE, self.engine_last[GPSIMD])
        now += built
        self.engine_free[GPSIMD], self.engine_last[GPSIMD] = now, at
        if self.candidates[GPSIMD]:  # they were to choose at the time before
            heappush(self.heap, (now, self.engines_at + GPSIMD))
        return now

    def _queued(self, at: int, now: float, issuer: str, time: float) -> float:
        """When a queue has issued a transfer, behind those before it; of any issuer the one that
        is free first."""
        free = self.issue_free
        name = min(("sync", "scalar"), key=free.__getitem__) if issuer == "any" else issuer
        if free[name] > now:
            now, self.waits[at] = free[name], Wait(QUEUE, self.issue_last[name])
        free[name], self.issue_last[name] = now + time, at
        return now + time

    def _finish(self, at: int) -> None:
        """Tell the successors and give up the storages that nobody needs any more."""
        end = self.end[at]
        available = end + self.latency[at]
        for later in self.behind[at]:
            self._ready(later, end, DATA, at)
        for later in self.after[at]:
            self._ready(later, available, DATA, at)
        held = self.memory
        # Accesses end in any order: a storage is free when the one that ends last has ended.
        for k in held.of[at]:
            held.left[k] -= 1
            if available >= held.released[k]:
                held.released[k], held.releaser[k] = available, at
            if not held.left[k]:
                heappush(self.heap, (held.released[k], ~k))

    def _ready(self, at: int, time: float, kind: int, by: int) -> None:
        if time >= self.ready[at]:
            self.ready[at] = time
            self.waits[at] = Wait(kind, by)
        self.pending[at] -= 1
        if not self.pending[at]:
            heappush(self.heap, (self.ready[at], at))

    def _grant(self, pool: memory.Pool, now: float, by: int) -> None:
        """Serve storages in order of first use as long as there is room."""
        while (k := self.memory.grant(pool)) >= 0:
            for at in self.memory.waiters[k]:
                self._ready(at, now, BUFFER, by)


def check_order(order: str) -> None:
    """Refuse a name that is not in ORDERS."""
    if order not in ORDERS:
        raise refuse(
            "sim_schedule_order",
            f"schedule '{order}' does not exist, expected one of {', '.join(ORDERS)}; pass one of "
            "those names",
        )


def usual_order(today: bool) -> str:
    """The order that the compiler of a language leaves its kernels in: ``neuronxcc.nki`` is
    rearranged, kernels of ``nki`` keep the writer's order (docs/cost_model.md)."""
    return PROGRAM_ORDER if today else COMPILER_ORDER


def schedule(
    program: Program, profile: str = cost.DEFAULT_PROFILE, order: str | None = None
) -> Schedule:
    """Simulate one run of ``program`` on the generation that it was traced for.

    Args:
        profile: name of a DMA profile (``cost.PROFILES``).
        order: one of ``ORDERS``: ``compiler`` lowers the program (lower.py) and lets engines leave
            program order, which a kernel with ``no_reorder`` forbids. None for the usual one.

    Raises:
        NkiError: for an unknown profile or order.
    """
    return schedules(program, (profile,), order)[profile]


def schedules(
    program: Program, profiles: Sequence[str], order: str | None = None, known: Known | None = None
) -> dict[str, Schedule]:
    """One run under each of several DMA profiles, by name; what they share is done once.

    Args:
        known: what the caller keeps of one program, whose constants alone change between calls.

    Of a program of two cores, the run of the core that takes longer; what a core waits for the
    other at a barrier is not counted.

    Raises:
        NkiError: for an unknown profile or order.
    """
    if program.cores > 1:
        parts = [schedules(part, profiles, order) for part in by_core(program)]
        return {name: max((p[name] for p in parts), key=lambda s: s.total) for name in profiles}
    rows = {name: cost.dma_profile(name) for name in profiles}
    order = order or usual_order(program.today)
    check_order(order)
    order = PROGRAM_ORDER if program.in_order else order
    found: dict[str, Schedule] = {}
    with without_garbage_collection(), using(program.core):
        for keeps in sorted({profile.keeps for profile in rows.values()}):
            some = {name: row for name, row in rows.items() if row.keeps == keeps}
            found |= _lowered(program, some, order, keeps, {} if known is None else known)
    return {name: found[name] for name in profiles}


def _lowered(
    program: Program, rows: Profiles, order: str, keeps: bool, known: Known
) -> dict[str, Schedule]:
    """One run under each of the profiles for which the compiler makes the same of the kernel."""
    compiled, before = order == COMPILER_ORDER, -1
    for kept in (True, False) if keeps and compiled else (False,):  # kept tiles are the first to go
        key: tuple = (compiled, kept, math.ceil(CORE.min_ii))  # which join.py compares lengths with
        if key not in known:
            known[key] = _made(lower(program, kept) if compiled else as_written(program))
        made = known[key]
        if len(made.program) != before and (found := _scheduled(made, rows, order, fits=True)):
            return found
        before = len(made.program)
    key = ("spilled", *key)
    if key not in known:
        known[key] = _made(spill(made.program))
    return _scheduled(known[key], rows, order)


def _scheduled(made: _Made, rows: Profiles, order: str, fits: bool = False) -> dict[str, Schedule]:
    """One run under each of the profiles; nothing where one has to fit and does not."""
    found = {}
    for name, profile in rows.items():
        with using(profile.core(in_force())):
            run = _Run(made, profile, order)
            if not run.run(fits):
                return {}
        found[name] = Schedule(
            made.program,
            profile.name,
            run.numbers,
            run.start,
            run.end,
            run.times,
            run.waits[: run.joins_at],
            run.transfers,
            run.lane_busy,
            (run.memory.sbuf.short, run.memory.psum.short),
            order,
        )
    return found
