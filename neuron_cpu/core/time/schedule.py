"""When each instruction of a Program runs, and what made it wait.

Four compute engines take their instructions in program order; 16 DMA engines serve transfers in the
order in which these become ready. An instruction starts when its engine is free, its operands are
there, the memory of its result has been granted and the port that it shares with another engine is
free. Memory is granted to storages in the order of their first use, as soon as enough has been
released: that is how far a compiler that rotates buffers could run ahead, so double buffering
follows from the kernel's storages and the capacity of SBUF and PSUM and is never assumed.

Model and constants: aws-neuron-sdk v2.21.1, general/nki/arch/trainium_inferentia2_arch.rst and
nki_perf_guide.rst; see docs/cost_model.md for its calibration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..device import spec
from ..device.pause import without_garbage_collection
from ..device.spec import GEN2, Engine
from ..program.program import Instruction, Program, Storage
from . import cost, depend

ENGINES = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, Engine.DMA)
TENSOR, VECTOR, SCALAR, GPSIMD, DMA = range(5)
NUMBER = {engine: k for k, engine in enumerate(ENGINES)}

# why an instruction did not start earlier
NOTHING, DATA, ENGINE, BUFFER, PORT, QUEUE = range(6)
WAITS = ("nothing", "operands", "its engine", "a free buffer", "a shared port", "the DMA queue")


class Wait(NamedTuple):
    """What bound the start of an instruction: the kind and the instruction that ended last."""

    kind: int
    by: int


@dataclass
class Schedule:
    """Times of every instruction of one Program, in nanoseconds from the start of the kernel.

    Attributes:
        program: what was scheduled.
        profile: name of the DMA profile.
        engine: engine number of each instruction (index into ENGINES).
        start, end: of each instruction; a transfer starts with its first row.
        busy: time that each instruction occupies its engine; for a transfer its longest engine.
        waits: what bound the start of each instruction.
        transfers: rows of each DMA instruction, by instruction index, in the order served.
        lane_busy: time that each of the 16 DMA engines moves rows.
        overcommitted: bytes per partition of SBUF and banks of PSUM by which the kernel exceeds the
            capacity; a compiler would spill these.
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
        found = self._memory.get(buffer)
        if found is None:
            found = self._memory[buffer] = _occupancy(self, buffer)
        return found

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

    def lane_spans(self) -> Iterator[tuple[int, int, float, float]]:
        """(DMA engine, instruction, start, end) of every engine's share of every transfer."""
        free = [0.0] * spec.DMA_ENGINES
        row_ns = cost.dma_profile(self.profile).row_ns
        for at, moved in self.transfers.items():
            row = row_ns(moved.row_bytes)
            for lane, rows in enumerate(moved.lanes):
                if rows:
                    begin = max(self.start[at], free[lane])
                    free[lane] = begin + rows * row
                    yield lane, at, begin, free[lane]


def footprint(storage: Storage) -> int:
    """What a storage takes: bytes per partition in SBUF, whole banks in PSUM."""
    if storage.buffer == "sbuf":
        return storage.partition_bytes
    tile = storage.free_size * storage.dtype.itemsize
    blocks = storage.partition_bytes // tile
    return blocks * -(-tile // GEN2.psum_bank_bytes)


def _occupancy(schedule: Schedule, buffer: str) -> list[tuple[float, int]]:
    first: dict[Storage, float] = {}
    last: dict[Storage, float] = {}
    placed = 0  # tensors with addresses hold them from beginning to end
    for at, instruction in enumerate(schedule.program.instructions):
        begin, end = schedule.start[at], schedule.end[at]
        for view in (*instruction.src, *instruction.dst):
            storage = view.storage
            if storage.buffer != buffer:
                continue
            if storage.address is not None:
                placed = max(placed, *(tile.stop for tile in storage.address))
            elif begin < first.get(storage, end):
                first[storage] = begin
            if end > last.get(storage, -1.0):
                last[storage] = end
    steps: dict[float, int] = {}
    for storage, begin in first.items():
        size = footprint(storage)
        steps[begin] = steps.get(begin, 0) + size
        steps[last[storage]] = steps.get(last[storage], 0) - size
    use = placed if buffer == "sbuf" else -(-placed // GEN2.psum_bank_bytes)
    result = [(0.0, use)] if use else []
    for time in sorted(steps):
        use += steps[time]
        result.append((time, use))
    return result


# --- what every instruction needs -----------------------------------------------------------------
def _engines(program: Program) -> tuple[list[int], list[float]]:
    """Engine and occupancy of every instruction.

    Copies of floats that leave the engine open go to the less loaded of VectorE and ScalarE.
    """
    load = [0.0] * len(ENGINES)
    numbers, times = [], []
    period = [1e9 / GEN2.clock_hz[e] for e in ENGINES[:DMA]]
    for instruction in program.instructions:
        number = NUMBER[instruction.op.engine_of(instruction)]
        time = 0.0
        if number != DMA:
            cycles = instruction.op.cycles(instruction)
            if instruction.op.name == "tensor_copy" and _either_engine(instruction):
                vector, scalar = cycles * period[VECTOR], cycles * period[SCALAR]
                number = VECTOR if load[VECTOR] + vector <= load[SCALAR] + scalar else SCALAR
            time = cycles * period[number]
            load[number] += time
        numbers.append(number)
        times.append(time)
    return numbers, times


def _either_engine(instruction: Instruction) -> bool:
    return "engine" not in instruction.attrs and instruction.src[0].dt.is_float


def _ports(instruction: Instruction, number: int) -> tuple[bool, bool]:
    """Whether it needs the SBUF port of VectorE|GpSimdE and the PSUM port of VectorE|ScalarE."""
    if number in (TENSOR, DMA):
        return False, False
    buffers = {v.storage.buffer for v in (*instruction.src, *instruction.dst)}
    sbuf = "sbuf" in buffers and number != SCALAR
    return sbuf, "psum" in buffers and number != GPSIMD


def _successors(
    program: Program, numbers: list[int]
) -> tuple[list[list[int]], list[int], list[int]]:
    """Who waits for each instruction, how many it waits for, and who follows on its engine."""
    values, orders = depend.dependences(program, numbers, DMA)
    n = len(numbers)
    waiting: list[list[int]] = [[] for _ in range(n)]
    pending = [0] * n
    following = [-1] * n
    last = [-1] * DMA
    for at in range(n):
        number = numbers[at]
        needed = set()
        latest = [-1] * DMA  # of an in-order engine only the last predecessor matters
        for before in values[at]:
            other = numbers[before]
            if other == DMA:
                needed.add(before)
            elif before > latest[other] and (other != TENSOR or number != TENSOR):
                latest[other] = before
        for before in orders[at]:
            other = numbers[before]
            if other == DMA:
                needed.add(before)
            elif other != number and before > latest[other]:
                latest[other] = before
        for before in latest:
            if before >= 0:
                needed.add(before)
        for before in needed:
            waiting[before].append(at)
        pending[at] = len(needed)
        if number != DMA:
            if last[number] >= 0:
                following[last[number]] = at
                pending[at] += 1
            last[number] = at
    return waiting, pending, following


class _Pool:
    """SBUF or PSUM: grants memory to storages in the order of their first use.

    Attributes:
        free: what is left, in the pool's unit.
        queue: storages that wait, by number, first use first.
        next: position in the queue.
        short: largest amount by which grants had to exceed the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.free, self.short = capacity, 0
        self.queue: list[int] = []
        self.next = 0


class _Memory:
    """Storages of both pools, who accesses them and who waits for them."""

    def __init__(self, program: Program, numbers: list[int], pending: list[int]) -> None:
        self.pools = {
            "sbuf": _Pool(GEN2.sbuf_usable_bytes),
            "psum": _Pool(GEN2.psum_banks),
        }
        self.size: list[int] = []
        self.pool: list[_Pool] = []
        self.left: list[int] = []  # accesses that have not been scheduled yet
        self.released: list[float] = []  # when the last scheduled access is known to be over
        self.releaser: list[int] = []
        self.waiters: list[list[int]] = []
        self.of: list[list[int]] = []  # storages that each instruction accesses
        self._collect(program)
        for k, waiters in enumerate(self.waiters):
            self.pool[k].queue.append(k)
            for at in waiters:
                pending[at] += 1

    def _collect(self, program: Program) -> None:
        known: dict[int, int] = {}
        for at, instruction in enumerate(program.instructions):
            mine: list[int] = []
            written = {v.storage.id for v in instruction.dst}
            for storage in depend.touched(instruction):
                if storage.address is not None:
                    continue  # the kernel placed it: waits are dependences through addresses
                k = known.get(storage.id)
                if k is None:
                    k = known[storage.id] = len(self.size)
                    self._add(storage)
                    self.waiters[k].append(at)
                elif storage.id in written:
                    self.waiters[k].append(at)
                self.left[k] += 1
                mine.append(k)
            self.of.append(mine)

    def _add(self, storage: Storage) -> None:
        self.size.append(footprint(storage))
        self.pool.append(self.pools[storage.buffer])
        self.left.append(0)
        self.released.append(0.0)
        self.releaser.append(-1)
        self.waiters.append([])


class _Run:
    """State of one simulation; times in nanoseconds."""

    def __init__(self, program: Program, profile: cost.DmaProfile) -> None:
        self.program, self.profile = program, profile
        self.numbers, self.times = _engines(program)
        self.waiting, self.pending, self.following = _successors(program, self.numbers)
        self.memory = _Memory(program, self.numbers, self.pending)
        n = len(self.numbers)
        self.ready = [0.0] * n
        self.start = [0.0] * n
        self.end = [0.0] * n
        self.waits = [Wait(NOTHING, -1)] * n
        self.transfers: dict[int, cost.Transfer] = {}
        self.lane_free = [0.0] * spec.DMA_ENGINES
        self.lane_last = [-1] * spec.DMA_ENGINES
        self.lane_busy = [0.0] * spec.DMA_ENGINES
        self.port_free = [0.0, 0.0]
        self.port_last = [-1, -1]
        self.ports = [_ports(i, e) for i, e in zip(program.instructions, self.numbers)]
        self.latency = [cost.RESULT_LATENCY_NS[e] for e in ENGINES[:DMA]] + [0.0]
        self.heap: list[tuple[float, int]] = []

    def run(self) -> None:
        """Serve events in order of time: instructions that are ready, memory that is released."""
        heap = self.heap
        heap.extend((0.0, at) for at, count in enumerate(self.pending) if not count)
        heapify(heap)
        for pool in self.memory.pools.values():
            self._grant(pool, 0.0, -1)
        done = 0
        while done < len(self.numbers):
            if not heap:
                self._force()
                continue
            now, at = heappop(heap)
            if at < 0:
                self._release(~at, now)
                continue
            done += 1
            if self.numbers[at] == DMA:
                self._transfer(at, now)
            else:
                self._compute(at, now)
            self._finish(at)

    def _compute(self, at: int, now: float) -> None:
        sbuf, psum = self.ports[at]
        for port, needed in ((0, sbuf), (1, psum)):
            if needed and self.port_free[port] > now:
                now = self.port_free[port]
                self.waits[at] = Wait(PORT, self.port_last[port])
        self.start[at] = now
        end = self.end[at] = now + self.times[at]
        if sbuf:
            self.port_free[0], self.port_last[0] = end, at
        if psum:
            self.port_free[1], self.port_last[1] = end, at
        follower = self.following[at]
        if follower >= 0:
            self._ready(follower, end, ENGINE, at)

    def _transfer(self, at: int, now: float) -> None:
        moved = self.transfers[at] = cost.transfer(self.program.instructions[at])
        row = self.profile.row_ns(moved.row_bytes)
        arrival = now + spec.DMA_START_NS
        free, busy, last = self.lane_free, self.lane_busy, self.lane_last
        first, end, blocker = float("inf"), 0.0, -1
        for lane, rows in enumerate(moved.lanes):
            if not rows:
                continue
            begin = free[lane]
            before = last[lane]
            if begin <= arrival:
                begin, before = arrival, -1
            if begin < first:
                first = begin
            work = rows * row
            busy[lane] += work
            free[lane] = begin + work
            last[lane] = at
            if begin + work > end:
                end, blocker, self.times[at] = begin + work, before, work
        self.start[at], self.end[at] = first, end
        if blocker >= 0:
            self.waits[at] = Wait(QUEUE, blocker)

    def _finish(self, at: int) -> None:
        """Tell the successors and give up the storages that nobody needs any more."""
        available = self.end[at] + self.latency[self.numbers[at]]
        for later in self.waiting[at]:
            self._ready(later, available, DATA, at)
        memory = self.memory
        for k in memory.of[at]:
            memory.left[k] -= 1
            if available >= memory.released[k]:
                memory.released[k], memory.releaser[k] = available, at
            if not memory.left[k]:
                heappush(self.heap, (memory.released[k], ~k))

    def _ready(self, at: int, time: float, kind: int, by: int) -> None:
        if time >= self.ready[at]:
            self.ready[at] = time
            self.waits[at] = Wait(kind, by)
        self.pending[at] -= 1
        if not self.pending[at]:
            heappush(self.heap, (self.ready[at], at))

    def _release(self, k: int, now: float) -> None:
        pool = self.memory.pool[k]
        pool.free += self.memory.size[k]
        self._grant(pool, now, self.memory.releaser[k])

    def _grant(self, pool: _Pool, now: float, by: int) -> None:
        memory = self.memory
        while pool.next < len(pool.queue):
            k = pool.queue[pool.next]
            if memory.size[k] > pool.free:
                return
            pool.free -= memory.size[k]
            pool.next += 1
            for at in memory.waiters[k]:
                self._ready(at, now, BUFFER, by)

    def _force(self) -> None:
        """Nothing can run: the kernel holds more than the memory has, so grant beyond it."""
        now = max(self.end)
        for pool in self.memory.pools.values():
            if pool.next < len(pool.queue):
                size = self.memory.size[pool.queue[pool.next]]
                pool.short += size - pool.free
                pool.free = size
                self._grant(pool, now, -1)
                return
        raise AssertionError("instructions wait for each other in a circle")


def schedule(program: Program, profile: str = cost.DEFAULT_PROFILE) -> Schedule:
    """Simulate one run of ``program`` on a NeuronCore-v2.

    Args:
        profile: name of a DMA profile (``cost.PROFILES``).

    Raises:
        NkiError: for an unknown profile.
    """
    rows = cost.dma_profile(profile)
    with without_garbage_collection():
        run = _Run(program, rows)
        run.run()
    pools = run.memory.pools
    return Schedule(
        program, profile, run.numbers, run.start, run.end, run.times, run.waits, run.transfers,
        run.lane_busy, (pools["sbuf"].short, pools["psum"].short),
    )  # fmt: skip
