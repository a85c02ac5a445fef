"""A Schedule for readers: figures, source lines, the binding resource in words, traces.

Names of figures follow the summary of the Neuron profiler (aws-neuron-sdk v2.21.1,
tools/neuron-sys-tools/neuron-profile-user-guide.rst); every one of them is an estimate here.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..device.spec import CORE, Engine, using
from ..program.program import Instruction, Program
from ..program.storage import Source
from ..time import cost, depend
from ..time.passes.spill import spilling
from ..time.schedule import BUFFER, DMA, ENGINES, PORT, TENSOR, Schedule
from . import bands

MOST = 8  # producers of one instruction that are known, those that end last
HANDLE_NS = 1.0  # from the edge of a bar to where an arrow holds it: at most half of the bar


# --- who reads whose results ----------------------------------------------------------------------
# Arrows show the last of them in a Perfetto trace: all are two fifths of its bytes
# (attention_prefill_kernel and swiglu_mlp_kernel of llama.py, 128 tokens).
def producers(schedule: Schedule) -> list[tuple[int, ...]]:
    """For every instruction whose results it reads: at most MOST, the one that ends last first."""
    needs = depend.dependences(schedule.program)
    count = len(needs.values)
    # A join stands for its members, which are instructions or older joins.
    joins: list[tuple[int, ...]] = []

    def latest(nodes: Iterable[int]) -> tuple[int, ...]:
        members: set[int] = set()
        for node in nodes:
            members.update((node,) if node < count else joins[node - count])
        return tuple(sorted(members, key=lambda at: (-schedule.end[at], at))[:MOST])

    for members in needs.joins:
        joins.append(latest(members))
    return [latest(nodes) for nodes in needs.values]


def flow_events(schedule: Schedule, pid: int) -> list[dict[str, Any]]:
    """Arrows to each bar from that of the producer that ends last, in Chrome's format.

    Where several DMA engines share a transfer, arrows arrive at the share that begins first and
    leave from the share that ends last.

    Args:
        pid: process of the bars (`report.trace_events`).
    """
    arrives, leaves = _bars(schedule)
    events: list[dict[str, Any]] = []
    for at, found in enumerate(producers(schedule)):
        if found:
            row, begin, end = leaves[found[0]]
            hold = max((begin + end) / 2, end - HANDLE_NS)
            common = {"name": "operand", "cat": "operand", "id": pid * 10**8 + at}
            events.append(_arrow("s", common, pid, row, hold))
            row, begin, end = arrives[at]
            hold = min((begin + end) / 2, begin + HANDLE_NS)
            events.append(_arrow("f", common, pid, row, hold) | {"bp": "e"})
    return events


Bar = tuple[int, float, float]  # row of the trace, begin, end


def _bars(schedule: Schedule) -> tuple[Sequence[Bar], Sequence[Bar]]:
    """The bar of each instruction at which arrows arrive, and the one from which they leave."""
    arrives: list[Bar] = list(zip(schedule.engine, schedule.start, schedule.end))
    leaves = list(arrives)
    seen: set[int] = set()
    for lane, at, begin, end in schedule.lane_spans():
        bar = (DMA + lane, begin, end)
        if at not in seen or begin < arrives[at][1]:
            arrives[at] = bar
        if at not in seen or end > leaves[at][2]:
            leaves[at] = bar
        seen.add(at)
    return arrives, leaves


def _arrow(phase: str, common: dict[str, Any], pid: int, row: int, time: float) -> dict[str, Any]:
    return common | {"ph": phase, "pid": pid, "tid": row, "ts": round(time / 1e3, 4)}


SPILLS = ("spill_save", "spill_reload")
ENGINE_KEYS = ("tensor_engine", "vector_engine", "scalar_engine", "gpsimd_engine", "dma")


@dataclass
class Line:
    """The cost of one source line of a kernel; times in nanoseconds.

    Attributes:
        place: ``file:line`` (file name only) and ``function``.
        instructions: device instructions that the line recorded.
        busy: time it occupies each engine; of DMA the share of the 16 engines together.
        dma_bytes, dma_rows, row_bytes: bytes and rows it moves, average bytes of a row.
        hbm_read_bytes, hbm_write_bytes: the part of the bytes on the HBM side.
        dma_span: time of its busiest DMA engine.
        critical: its share of the path that the end of the kernel waits for.
        macs, transpose_macs: multiply-accumulates of its products and of its transposes.
        mfu_estimated_percent, mbu_estimated_percent: its part of the kernel's utilisation.
        opcodes: names of its instructions.
        binding: what it occupies most, in words.
    """

    place: str
    function: str
    instructions: int = 0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINE_KEYS, 0.0))
    dma_bytes: int = 0
    dma_rows: int = 0
    row_bytes: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    dma_span: float = 0.0
    critical: float = 0.0
    macs: int = 0
    transpose_macs: int = 0
    mfu_estimated_percent: float = 0.0
    mbu_estimated_percent: float = 0.0
    opcodes: list[str] = field(default_factory=list)
    binding: str = ""

    @property
    def bandwidth(self) -> float:
        """GB/s while its busiest DMA engine works."""
        return self.dma_bytes / self.dma_span if self.dma_span else 0.0

    @property
    def longest(self) -> float:
        """Busy time on the engine that it occupies most."""
        return max(*(self.busy[k] for k in ENGINE_KEYS[:DMA]), self.dma_span)


@dataclass
class Profile:
    """Everything the reports print about one run of one kernel.

    Attributes:
        name: kernel.
        generation: of the core that it is timed for.
        calibrated: whether published times have confirmed estimates for that generation.
        time_ns: estimated latency.
        dma_profile: name of the DMA profile.
        schedule_order: in which order the engines took their instructions.
        bound: class of the kernel for the band, by what bounds it (``bands.kind_of``).
        band_ns: shortest and longest time of a device that fit the estimate: what the calibration's
            ratios of this class allow, 6th to 94th percentile.
        metrics: figures under the Neuron profiler's names.
        lines: source lines, most critical first.
        critical: nanoseconds of the critical path by resource (engines and kinds of waiting).
        binding: what bounds the kernel, in words.
        spills: where its tiles exceed SBUF and what that moves, in words.
    """

    name: str
    generation: str
    calibrated: bool
    time_ns: float
    dma_profile: str
    schedule_order: str
    bound: str
    band_ns: tuple[float, float]
    metrics: dict[str, float]
    lines: list[Line]
    critical: dict[str, float]
    binding: str
    spills: list[str] = field(default_factory=list)
    estimated: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def doubts(program: Program) -> list[str]:
    """The assumptions of an estimate that nobody has measured or published, in words."""
    found, core = [], program.core
    if not core.calibrated:
        found.append(
            f"{core.name} is uncalibrated: rates are its documented ones, latencies those of gen2, "
            "and no published time has confirmed them"
        )
    guessed = {i.op.name: place(i.source) for i in program if not i.op.published}
    if guessed:
        named = ", ".join(f"{name} ({where})" for name, where in sorted(guessed.items()))
        found.append(f"nobody publishes the cycles of {named}, which are a guess here")
    return found


def place(source: Source | None) -> str:
    """``file:line`` without directories."""
    return "?" if source is None else f"{os.path.basename(source.file)}:{source.line}"


def profile(schedule: Schedule) -> Profile:
    """All figures of one schedule."""
    with using(schedule.program.core):
        return _profile(schedule)


def _profile(schedule: Schedule) -> Profile:
    lines = _lines(schedule)
    critical = critical_times(schedule, lines)
    ordered = sorted(lines.values(), key=lambda line: (-line.critical, -line.longest))
    return Profile(
        name=schedule.program.name,
        generation=schedule.program.core.name,
        calibrated=schedule.program.core.calibrated,
        time_ns=schedule.total,
        dma_profile=schedule.profile,
        schedule_order=schedule.order,
        bound=bands.kind_of(critical),
        band_ns=bands.of(critical).measured(schedule.total),
        metrics=metrics(schedule, ordered),
        lines=ordered,
        critical=critical,
        binding="; ".join([binding(schedule, critical, ordered), *doubts(schedule.program)]),
        spills=spill_words(schedule),
    )


# --- figures --------------------------------------------------------------------------------------
def metrics(schedule: Schedule, lines: Sequence[Line]) -> dict[str, float]:
    """Figures of one schedule under the profiler's names; times in ns, shares in percent."""
    total = schedule.total or 1.0
    figures: dict[str, float] = {"total_time": schedule.total}
    busy = schedule.engine_busy()
    for key, engine in zip(ENGINE_KEYS, ENGINES):
        figures[f"{key}_active_time"] = busy[engine]
        figures[f"{key}_active_time_percent"] = 100 * busy[engine] / total
    macs = sum(line.macs for line in lines)
    moved = sum(line.transpose_macs for line in lines)
    peak = CORE.peak_macs_per_ns * total
    pairs = zip(schedule.engine, schedule.busy, schedule.program.instructions)
    turning = sum(time for number, time, i in pairs if number == TENSOR and i.moves_only)
    spills = spilled(schedule).values()
    return {
        **figures,
        "model_flops": 2 * macs,
        "transpose_flops": 2 * moved,
        "mfu_estimated_percent": 100 * macs / peak,
        "hfu_estimated_percent": 100 * (macs + moved) / peak,
        "transpose_time_percent": 100 * turning / total,
        **_dma_metrics(schedule, total),
        "sbuf_high_water_bytes": schedule.high_water("sbuf"),
        "psum_high_water_banks": schedule.high_water("psum"),
        "sbuf_overcommitted_bytes": schedule.overcommitted[0],
        **{f"{name}_bytes": sum(size[name] for size in spills) for name in SPILLS},
        "instruction_count": len(schedule.program),
    }


def spilled(schedule: Schedule) -> dict[Source | None, dict[str, int]]:
    """Bytes that go out and come back because tiles exceed SBUF, by the line that needs room."""
    found: dict[Source | None, dict[str, int]] = {}
    for at, moved in schedule.transfers.items():
        instruction = schedule.program.instructions[at]
        if (name := spilling(instruction)) is not None:
            found.setdefault(instruction.source, dict.fromkeys(SPILLS, 0))[name] += moved.bytes
    return found


def spill_words(schedule: Schedule) -> list[str]:
    """A sentence for each line at which SBUF overflows, most bytes first."""
    return [
        f"SBUF overflows at {place(source)}: {size_text(sizes['spill_save'])} spilled to HBM, "
        f"{size_text(sizes['spill_reload'])} reloaded"
        for source, sizes in sorted(spilled(schedule).items(), key=lambda e: -sum(e[1].values()))
    ]


def _dma_metrics(schedule: Schedule, total: float) -> dict[str, float]:
    transfers = schedule.transfers.values()
    read = sum(t.hbm_read for t in transfers)
    written = sum(t.hbm_written for t in transfers)
    size = sum(t.bytes for t in transfers)
    rows = sum(t.rows for t in transfers)
    return {
        "hbm_read_bytes": read,
        "hbm_write_bytes": written,
        "mbu_estimated_percent": 100 * (read + written) / (CORE.hbm_bytes_per_ns * total),
        "dma_transfer_bytes": size,
        "dma_transfer_count": rows,
        "dma_transfer_average_bytes": size / rows if rows else 0.0,
        "dma_throughput_gb_per_s": size / total,
    }


def _lines(schedule: Schedule) -> dict[Source | None, Line]:
    """Busy time and bytes of each source line."""
    found: dict[Source | None, Line] = {}
    lanes: dict[Source | None, list[float]] = {}
    for at, instruction in enumerate(schedule.program.instructions):
        source = instruction.source
        line = found.get(source)
        if line is None:
            line = found[source] = Line(place(source), source.function if source else "?")
        line.instructions += 1
        opcode = spilling(instruction) or instruction.op.name
        if opcode not in line.opcodes:
            line.opcodes.append(opcode)
        number = schedule.engine[at]
        if number != DMA:
            line.busy[ENGINE_KEYS[number]] += schedule.busy[at]
            if number == TENSOR:
                moved_macs = instruction.moves_only
                line.transpose_macs += instruction.tensor_macs if moved_macs else 0
                line.macs += 0 if moved_macs else instruction.tensor_macs
            continue
        moved = schedule.transfers[at]
        line.dma_bytes += moved.bytes
        line.dma_rows += moved.rows
        line.hbm_read_bytes += moved.hbm_read
        line.hbm_write_bytes += moved.hbm_written
    # A line's transfers overlap on 16 engines: it cannot take less than the busiest of them.
    for lane, at, begin, end in schedule.lane_spans():
        source = schedule.program.instructions[at].source
        own = lanes.setdefault(source, [0.0] * CORE.dma.engines)
        own[lane] += end - begin
    for source, own in lanes.items():
        line = found[source]
        line.busy["dma"] = sum(own) / CORE.dma.engines
        line.dma_span = max(own)
        line.row_bytes = line.dma_bytes // line.dma_rows
    total = schedule.total or 1.0
    for line in found.values():
        line.mfu_estimated_percent = 100 * line.macs / (CORE.peak_macs_per_ns * total)
        traffic = line.hbm_read_bytes + line.hbm_write_bytes
        line.mbu_estimated_percent = 100 * traffic / (CORE.hbm_bytes_per_ns * total)
        line.binding = _line_words(line)
    return found


def _line_words(line: Line) -> str:
    """The engine that a line occupies longest; for DMA its rows and their rate."""
    key = max(ENGINE_KEYS[:DMA], key=lambda k: line.busy[k])
    if line.dma_span >= line.busy[key]:
        return f"DMA: rows of {size_text(line.row_bytes)} reach {line.bandwidth:.0f} GB/s"
    engine = ENGINES[ENGINE_KEYS.index(key)].value
    each = line.busy[key] / line.instructions
    plural = "" if line.instructions == 1 else "s"
    return f"{engine}: {line.instructions} instruction{plural} of {each / 1e3:.2f} µs"


# --- what bounds it -------------------------------------------------------------------------------
def critical_times(
    schedule: Schedule, lines: dict[Source | None, Line] | None = None
) -> dict[str, float]:
    """Nanoseconds of the critical path by resource; adds each line's share to ``lines``."""
    shares: dict[str, float] = defaultdict(float)
    instructions = schedule.program.instructions
    # Backwards along the path: between the end of what an instruction waited for and its own end
    # lie a gap, named after the kind of wait, and its work. Together they are the whole run.
    for at in schedule.critical_path():
        wait = schedule.waits[at]
        before = schedule.end[wait.by] if wait.by >= 0 else 0.0
        begin = max(schedule.start[at], before)
        number = schedule.engine[at]
        kind = "DMA start" if number == DMA else "result latency"
        if wait.kind == BUFFER and wait.by >= 0:
            kind = "free buffer"
        elif wait.kind == PORT:
            kind = "shared port"
        engine = ENGINES[number].value
        shares[kind] += begin - before
        shares[engine] += schedule.end[at] - begin
        if lines is not None:
            lines[instructions[at].source].critical += schedule.end[at] - before
    return {k: v for k, v in sorted(shares.items(), key=lambda e: -e[1]) if v > 0}


def size_text(count: float) -> str:
    """Bytes with a binary unit: 1 KiB, 2.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def binding(schedule: Schedule, critical: dict[str, float], lines: Sequence[Line]) -> str:
    """The resource with the largest share of the critical path, its share and its worst line."""
    if not critical:
        return "nothing: the kernel has no instructions"
    resource = next(iter(critical))
    share = critical[resource] / schedule.total
    if resource == Engine.DMA.value:
        return dma_words(schedule.profile, lines)
    if resource in (e.value for e in ENGINES):
        key = ENGINE_KEYS[[e.value for e in ENGINES].index(resource)]
        worst = max(lines, key=lambda line: line.busy[key])
        part = worst.busy[key] / sum(line.busy[key] for line in lines)
        return (
            f"{resource}: {share:.0%} of the critical path, {part:.0%} of its work in "
            f"{'/'.join(worst.opcodes)}; {worst.place}"
        )
    worst = max(lines, key=lambda line: line.critical)
    reason = {
        "DMA start": f"{CORE.dma.start_ns / 1e3:.1f} µs until a transfer's first row, not hidden",
        "result latency": "small instructions that wait for each other's results",
        "free buffer": "memory that an earlier tile still holds",
        "shared port": "engines that exclude each other on SBUF or PSUM",
    }[resource]
    return f"{resource}: {share:.0%} of the critical path is {reason}; {worst.place}"


def dma_words(name: str, lines: Sequence[Line]) -> str:
    """DMA as the binding resource: rows and bandwidth of the line that occupies it most."""
    worst = max(lines, key=lambda line: line.dma_span)
    peak = cost.dma_profile(name).peak
    return (
        f"DMA: rows of {size_text(worst.row_bytes)} reach {worst.bandwidth:.0f} of {peak:.0f} "
        f"GB/s, {size_text(worst.dma_bytes)} in all; {worst.place}"
    )


# --- Perfetto trace -------------------------------------------------------------------------------
def trace_events(schedule: Schedule, pid: int, label: str) -> list[dict]:
    """Chrome trace events of one schedule: a process with engines and DMA queues as rows, arrows
    from results to who reads them."""
    events = [meta_event("process_name", pid, 0, label)]
    for row, engine in enumerate(ENGINES[:DMA]):
        events.append(meta_event("thread_name", pid, row, engine.value))
    for lane in range(CORE.dma.engines):
        events.append(meta_event("thread_name", pid, DMA + lane, f"DMA queue {lane}"))
    instructions = schedule.program.instructions
    for at, instruction in enumerate(instructions):
        number = schedule.engine[at]
        if number != DMA:
            events.append(_slice(instruction, pid, number, schedule.start[at], schedule.busy[at]))
    for lane, at, begin, end in schedule.lane_spans():
        events.append(_slice(instructions[at], pid, DMA + lane, begin, end - begin))
    events.extend(flow_events(schedule, pid))
    for buffer, name in (("sbuf", "SBUF bytes per partition"), ("psum", "PSUM banks")):
        for time, use in schedule.memory(buffer):
            events.append(_counter(name, pid, time, use))
    for time, rate in throughput(schedule):
        events.append(_counter("DMA GB/s", pid, time, round(rate, 2)))
    return events


def meta_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Names a process (``process_name``) or a row of one (``thread_name``)."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(instruction: Instruction, pid: int, row: int, begin: float, time: float) -> dict:
    about = {
        "source": place(instruction.source),
        "operands": [v.brief() for v in instruction.src],
        "results": [v.brief() for v in instruction.dst],
    }
    return slice_event(spilling(instruction) or instruction.op.name, pid, row, begin, time, about)


def slice_event(
    name: str, pid: int, row: int, begin: float, time: float, about: dict[str, Any]
) -> dict[str, Any]:
    """A bar in row ``row`` of process ``pid``; times in nanoseconds."""
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": row,
        "ts": round(begin / 1e3, 4),
        "dur": round(time / 1e3, 4),
        "args": about,
    }


def _counter(name: str, pid: int, time: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": round(time / 1e3, 4), "args": {name: value}}


def throughput(schedule: Schedule, bins: int = 400) -> list[tuple[float, float]]:
    """(time, GB/s) of all DMA engines together, averaged over equal slices of the run."""
    if not schedule.transfers:
        return []
    width = schedule.total / bins
    moved = [0.0] * (bins + 1)
    for lane, at, begin, end in schedule.lane_spans():
        # An engine's share of a transfer moves at one rate; slices take what lies inside of them.
        share = schedule.transfers[at]
        rate = share.lanes[lane] * share.row_bytes / (end - begin)
        first, last = int(begin / width), min(int(end / width), bins)
        for k in range(first, last + 1):
            inside = min(end, (k + 1) * width) - max(begin, k * width)
            moved[k] += inside * rate
    return [(k * width, moved[k] / width) for k in range(bins)]


def perfetto(label: str, schedule: Schedule) -> dict[str, Any]:
    """A trace file's content: one process, from zero."""
    return trace_file(trace_events(schedule, 1, label), schedule.profile)


def trace_file(events: list[dict], dma_profile: str) -> dict[str, Any]:
    """Content of a trace file that ui.perfetto.dev and chrome://tracing open."""
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"estimated": True, "dma_profile": dma_profile},
    }
