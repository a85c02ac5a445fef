"""Whose results an instruction reads, and the arrows that show it in a Perfetto trace."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..time import depend
from ..time.schedule import DMA, Schedule

MOST = 8  # producers of one instruction that are known, those that end last
# Of them a trace draws the last one unless asked for more: with all of them arrows are two fifths
# of its bytes (attention_prefill_kernel and swiglu_mlp_kernel of llama.py, 128 tokens).
ARROWS = 1
HANDLE_NS = 1.0  # from the edge of a bar to where an arrow holds it: at most half of the bar


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


def flow_events(schedule: Schedule, pid: int, most: int = ARROWS) -> list[dict[str, Any]]:
    """Arrows from producers' bars to the bar that reads their results, in Chrome's format.

    Where several DMA engines share a transfer, arrows arrive at the share that begins first and
    leave from the share that ends last.

    Args:
        pid: process of the bars (`report.trace_events`).
        most: the number of arrows of one instruction, from the producers that end last.
    """
    arrives, leaves = _bars(schedule)
    events: list[dict[str, Any]] = []
    for at, found in enumerate(producers(schedule)):
        for before in found[:most]:
            row, begin, end = leaves[before]
            hold = max((begin + end) / 2, end - HANDLE_NS)
            common = {"name": "operand", "cat": "operand", "id": pid * 10**8 + len(events) // 2}
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
