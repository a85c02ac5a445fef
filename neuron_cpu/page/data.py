"""The page's view of one schedule, as plain data; times in nanoseconds.

The page has to stay usable with programs of any length. Beyond the limits below instructions are
drawn merged, and ``notes`` says so; figures always count everything.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.device.spec import using
from ..core.program.program import Instruction
from ..core.program.storage import Source
from ..core.report import report, tables
from ..core.time import cost
from ..core.time.passes.spill import spilling
from ..core.time.schedule import DMA, Schedule
from .sources import shown_lines

MOST_INSTRUCTIONS = 60_000  # with a bar, a row of the list and operands of their own
MOST_SPANS = 120_000  # shares of transfers on DMA engines with a bar of their own
MOST_STEPS = 20_000  # of a memory's use
SLICES = 4000  # of the run, where bars and steps are merged: about two for each pixel column

# Names of schedule.NOTHING, DATA, ENGINE, BUFFER, PORT, QUEUE: what an instruction waited for.
WAITS = ("nothing", "operands", "its engine", "a free buffer", "a shared port", "the DMA queue")

Span = tuple[float, float, int]  # begin, end, instruction; -1 for several that were merged
_OF_PROFILE = "name time_ns band_ns bound binding spills dma_profile schedule_order critical"


def run(label: str, schedule: Schedule, most: int = MOST_INSTRUCTIONS) -> dict[str, Any]:
    """Everything that the page shows of one run of one kernel.

    Args:
        label: its name on the page.
        most: instructions that are listed one by one, the first in program order.
    """
    found = report.profile(schedule)
    lines, numbers = _lines(schedule, found)
    kept = min(len(schedule.program), most)
    notes = []
    if kept < len(schedule.program):
        notes.append(
            f"The first {kept:,} of {len(schedule.program):,} instructions in program order have "
            "bars, arrows and rows of their own; later ones are drawn grey and merged. Figures, "
            "heat, memory and roofline count all of them."
        )
    return {
        "label": label,
        **{name: getattr(found, name) for name in _OF_PROFILE.split()},
        "dma_profile_note": cost.dma_profile(found.dma_profile).note,
        "figures": [
            (name, value, tables.figure_text(name, value)) for name, value in found.metrics.items()
        ],
        "idle": idle(schedule),
        "lines": lines,
        "files": _files(schedule, numbers),
        "rows": _rows(schedule, kept, notes),
        "memory": [_memory(schedule, buffer, notes) for buffer in ("sbuf", "psum")],
        "throughput": [(_round(t), _round(rate)) for t, rate in report.throughput(schedule)],
        "roofline": _roofline(schedule, found),
        "instructions": _instructions(schedule, numbers, kept),
        "notes": notes,
    }


def _round(time: float) -> float:
    return round(time, 1)


# --- source lines ---------------------------------------------------------------------------------
def _lines(
    schedule: Schedule, found: report.Profile
) -> tuple[list[dict[str, Any]], dict[Source | None, int]]:
    """Figures of every source line, in order of first use, and the position of each in the list."""
    figures = {(line.place, line.function): line for line in found.lines}
    numbers: dict[Source | None, int] = {}
    for instruction in schedule.program.instructions:
        numbers.setdefault(instruction.source, len(numbers))
    waited = _waited(schedule)
    lines = []
    for source in numbers:
        line = figures[report.place(source), source.function if source else "?"]
        lines.append(
            {
                "place": line.place,
                "function": line.function,
                "number": source.line if source else 0,
                "instructions": line.instructions,
                "opcodes": line.opcodes,
                "busy": [_round(line.busy[key]) for key in report.ENGINE_KEYS],
                "critical": _round(line.critical),
                "waiting": _round(waited.get(source, 0.0)),
                "bytes": line.dma_bytes,
                "binding": line.binding,
            }
        )
    return lines, numbers


def _waited(schedule: Schedule) -> dict[Source | None, float]:
    """The part of each line's critical time in which no instruction of the path worked.

    Between the end of what an instruction on the critical path waited for and its own start lie
    latencies: a transfer's start, a result on its way to another engine.
    """
    found: dict[Source | None, float] = {}
    for at in schedule.critical_path():
        by = schedule.waits[at].by
        before = schedule.end[by] if by >= 0 else 0.0
        source = schedule.program.instructions[at].source
        found[source] = found.get(source, 0.0) + max(schedule.start[at] - before, 0.0)
    return found


def _files(schedule: Schedule, numbers: dict[Source | None, int]) -> list[dict[str, Any]]:
    """Text of the functions that recorded instructions: rows of number, text, line of `lines`."""
    by_file: dict[str, dict[int, int]] = {}
    for source, position in numbers.items():
        if source is not None:
            by_file.setdefault(source.file, {})[source.line] = position
    files = []
    for file, used in by_file.items():
        rows = [(n, text, used.get(n, -1)) for n, text in shown_lines(file, used)]
        if not rows:
            rows = [(n, "(no source text)", position) for n, position in sorted(used.items())]
        files.append({"name": report.place(Source(file, "", 0)).rpartition(":")[0], "rows": rows})
    return files


# --- bars -----------------------------------------------------------------------------------------
def _rows(schedule: Schedule, kept: int, notes: list[str]) -> list[list[float]]:
    """Bars of four compute and 16 DMA engines, flat: begin, end, instruction, begin, ..."""
    rows: list[list[Span]] = [[] for _ in range(DMA + schedule.program.core.dma.engines)]
    for at, number in enumerate(schedule.engine):
        if number != DMA:
            rows[number].append((schedule.start[at], schedule.start[at] + schedule.busy[at], at))
    for lane, at, begin, end in schedule.lane_spans():
        rows[DMA + lane].append((begin, end, at))
    width = schedule.total / SLICES
    crowded = sum(map(len, rows[DMA:])) > MOST_SPANS
    if crowded:
        notes.append(
            f"Transfers of one DMA engine less than {width:,.0f} ns apart are drawn as one bar."
        )
    flat = []
    for number, spans in enumerate(rows):
        least = 0 if number >= DMA and crowded else kept
        named = ((b, e, at if at < least else -1) for b, e, at in sorted(spans))
        flat.append([n for b, e, at in merged(named, width) for n in (_round(b), _round(e), at)])
    return flat


def merged(spans: Iterable[Span], width: float) -> list[Span]:
    """Spans in order of their begin; neighbours without a number and less than ``width`` apart are
    one."""
    found: list[Span] = []
    for begin, end, at in spans:
        if found and at == found[-1][2] == -1 and begin - found[-1][1] < width:
            found[-1] = found[-1][0], max(found[-1][1], end), -1
        else:
            found.append((begin, end, at))
    return found


def idle(schedule: Schedule) -> list[list[float]]:
    """For each compute engine: idle nanoseconds by the reason of its next instruction's wait
    (WAITS); the last entry is the time after its last instruction."""
    found = []
    for number in range(DMA):
        times = [0.0] * (len(WAITS) + 1)
        mine = [at for at, engine in enumerate(schedule.engine) if engine == number]
        free = 0.0
        for at in sorted(mine, key=schedule.start.__getitem__):
            times[schedule.waits[at].kind] += max(schedule.start[at] - free, 0.0)
            free = schedule.start[at] + schedule.busy[at]
        times[-1] = schedule.total - free
        found.append([_round(time) for time in times])
    return found


# --- memory, roofline -----------------------------------------------------------------------------
def _memory(schedule: Schedule, buffer: str, notes: list[str]) -> dict[str, Any]:
    """Steps of a memory's use; of too many the largest use in each slice of the run."""
    steps: Sequence[tuple[float, int]] = schedule.memory(buffer)
    name = buffer.upper()
    if len(steps) > MOST_STEPS:
        steps = largest(steps, schedule.total / SLICES)
        notes.append(f"{name}: the largest use in each of {SLICES} equal slices of the run.")
    core = schedule.program.core
    if buffer == "sbuf":
        unit, capacity, per_unit = "KiB per partition", core.sbuf_usable_bytes / 1024, 1024
    else:
        unit, capacity, per_unit = "banks", float(core.psum_banks), 1
    return {
        "name": name,
        "unit": unit,
        "capacity": round(capacity, 1),
        "steps": [(_round(time), round(use / per_unit, 3)) for time, use in steps],
    }


def largest(steps: Sequence[tuple[float, int]], width: float) -> list[tuple[float, int]]:
    """The largest use in every slice of ``width``; a slice without a step keeps the last use."""
    found: list[tuple[float, int]] = []
    use = 0
    k = 0
    for number in range(SLICES + 1):
        most = use
        while k < len(steps) and steps[k][0] < (number + 1) * width:
            use = steps[k][1]
            most = max(most, use)
            k += 1
        found.append((number * width, most))
    return found


def _roofline(schedule: Schedule, found: report.Profile) -> dict[str, float]:
    """Limits of the core, and where the run stands: FLOP, bytes of HBM."""
    metrics, core = found.metrics, schedule.program.core
    with using(core):
        dma_peak = cost.dma_profile(schedule.profile).peak
    return {
        "peak_flops_per_ns": 2 * core.peak_macs_per_ns,
        "hbm_bytes_per_ns": core.hbm_bytes_per_ns,
        "dma_bytes_per_ns": dma_peak,
        "flops": metrics["model_flops"],
        "bytes": metrics["hbm_read_bytes"] + metrics["hbm_write_bytes"],
    }


# --- instructions ---------------------------------------------------------------------------------
def _instructions(
    schedule: Schedule, numbers: dict[Source | None, int], kept: int
) -> dict[str, Any]:
    """Columns of the first ``kept`` instructions; words stand once and are named by position."""
    shown = schedule.program.instructions[:kept]
    opcodes, texts = _Words(), _Words()
    path = set(schedule.critical_path())
    waits = schedule.waits[:kept]
    return {
        "opcode": [opcodes.number(spilling(one) or one.op.name) for one in shown],
        "opcodes": opcodes.words,
        "text": [texts.number((_operands(one), _regions(one))) for one in shown],
        "texts": [text for text, _ in texts.words],
        "regions": [regions for _, regions in texts.words],
        "engine": schedule.engine[:kept],
        "line": [numbers[one.source] for one in shown],
        "start": [_round(time) for time in schedule.start[:kept]],
        "end": [_round(time) for time in schedule.end[:kept]],
        "wait": [wait.kind for wait in waits],
        "by": [wait.by for wait in waits],
        "critical": [int(at in path) for at in range(kept)],
        "producers": report.producers(schedule)[:kept],
    }


def _operands(instruction: Instruction) -> str:
    results = ", ".join(view.brief() for view in instruction.dst)
    return f"{results} = {', '.join(view.brief() for view in instruction.src)}"


def _regions(instruction: Instruction) -> tuple:
    """What it writes and reads: tensor, on chip, its rows (partitions) and columns, the elements'
    offset, sizes and steps in it, written, chosen by data."""
    found = []
    for written, views in ((1, instruction.dst), (0, instruction.src)):
        for view in views:
            storage = view.storage
            columns = storage.free_size if storage.on_chip else math.prod(storage.shape[1:] or (1,))
            rows = storage.size // columns
            columns = columns * storage.dtype.itemsize // view.dt.itemsize
            name, chosen = view.brief().partition("+")[0], int(view.by_data is not None)
            chip, place = int(storage.on_chip), (view.offset, view.shape, view.strides)
            found.append((name, chip, rows, columns, *place, written, chosen))
    return tuple(found)


class _Words:
    """Every word once, in order of first use."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def number(self, word: Any) -> int:
        return self._known.setdefault(word, len(self._known))

    @property
    def words(self) -> list[Any]:
        return list(self._known)
