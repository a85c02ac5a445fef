"""The work of an hour, the most valuable first.

Seconds are assumptions, compile time included; nobody has published it for such kernels.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.inputs.models import EMBEDDED_WHEEL
from lab.device.calls import MICROS, SUBMISSIONS
from lab.device.probes import PROBES, USED
from lab.device.rows import GRAPHS, KERNELS, ROWS, Row
from lab.device.running import BENCHMARK, PAIR, SIMULATOR, XLA

# kinds of entries
CONSTANT, LAUNCH, KERNEL = "constant", "launch", "kernel"
CONSTRUCT, NUMBERS, WHOLE, TEXT = "construct", "numbers", "whole graph", "text"
KERNELS_OF = "kernels of a graph"  # that is not traced yet, so nobody knows them
FIRST = ("decode-640", "prefill-640")
GRAPHS_OF_1B = (
    *FIRST, "decode-128", "prefill-128", "decode-2048", "prefill-64", "prefill-512", "prefill-1024",
    "prefill-2048",
)  # fmt: skip
DEGREE = (2, 1)  # by language: a step of one kernel has its collectives inside
DEVICE, REHEARSAL = "device", "rehearsal"  # a rehearsal's times are the cost model's own
GENERATIONS = {"trn2": 3, "trn3": 4}  # of the others 2
SECONDS = {
    CONSTANT: 12, LAUNCH: 25, KERNEL: 60, CONSTRUCT: 12, NUMBERS: 45, WHOLE: 600, TEXT: 300,
    KERNELS_OF: 85,  # tracing, and one of them
}  # fmt: skip
LAST = "by keywords"  # a probe of other spellings
PATIENCE = 10  # times as long is taken for hanging
# Kernels whose results the simulator claims to the bit: they move, or add whole numbers in fp32.
EXACT = ("small", "rows-4", "rows-512", "transfers-16", "gathers-8", "round-trips-4", "spills")


@dataclass(frozen=True)
class Entry:
    """One thing to measure.

    Attributes:
        name: in the report.
        kind: what it is; role: whose process it needs; call: the kernel's, as plain data.
        exact: its results have to be the simulator's to the bit.
    """

    name: str
    kind: str
    role: str
    call: Mapping[str, Any]
    exact: bool = False


def of_row(row: Row, today: bool = False) -> Entry:
    """The entry of a small kernel or graph."""
    call = row._asdict() | {"module": MICROS[today]}
    return Entry(row.name, LAUNCH if row.calls else CONSTANT, BENCHMARK, call)


def entries(
    graphs: Mapping[str, Mapping[str, Any]], today: bool = False, target: str = ""
) -> Iterator[Entry]:
    """Every entry for a chip, the most valuable first; ``graphs`` as `model.graph` tells them, in
    `nki` or `neuronxcc.nki`.

    Launches of a kernel inside a graph decide whether a decode step should be one kernel
    (lab/docs/decode_step.md), so they are first.
    """
    kernels: dict[str, list[Entry]] = {}
    names: dict[str, str] = {}  # of calls that several graphs have
    for graph, found in graphs.items():
        for call in found["kernels"]:
            key = json.dumps([call["kernel"], call["arguments"], call["keywords"]])
            name = f"{call['kernel']} {graph}"
            name += " (other layers)" if name in names.values() else ""
            if key not in names:
                names[key] = name
                kernels.setdefault(graph, []).append(Entry(name, KERNEL, BENCHMARK, call))
    for graph in GRAPHS_OF_1B:
        if graph not in graphs:
            entry = Entry(f"{KERNELS_OF}: {graph}", KERNELS_OF, SIMULATOR, {"name": graph})
            kernels[graph] = [entry]
    yield from (of_row(row, today) for row in (*GRAPHS, *KERNELS))
    first = [entry for graph in FIRST for entry in kernels.pop(graph, ())]
    yield from first
    probes = [
        construct(name, today)
        for name, probe in PROBES[today].items()
        if probe.generation <= GENERATIONS.get(target, 2)
    ]
    yield from probes[: USED[today]]
    exact = [of_row(ROWS[name], today) for name in EXACT]
    for entry in (*exact, *(one for one in first if one.kind == KERNEL)):
        numbers = f"{entry.name}: numbers"
        yield Entry(numbers, NUMBERS, XLA, entry.call, exact=entry.kind == CONSTANT)
    yield whole(640, today)
    if importlib.util.find_spec(EMBEDDED_WHEEL.replace("-", "_")):
        yield Entry("text of the embedded model", TEXT, BENCHMARK, {"file": SUBMISSIONS[today]})
    yield from (entry for found in kernels.values() for entry in found)
    later = probes[USED[today] :]
    yield from (entry for entry in later if not entry.name.endswith(LAST))
    yield from (whole(length, today) for length in (128, 2048))
    yield from (entry for entry in later if entry.name.endswith(LAST))


def whole(length: int, today: bool) -> Entry:
    """The entry of a prompt's graph and of the decode step behind it."""
    call = {"length": length, "file": SUBMISSIONS[today], "degree": DEGREE[False]}
    return Entry(f"whole graphs of {length}", WHOLE, BENCHMARK, call)


def construct(name: str, today: bool = False) -> Entry:
    """The entry of a probe."""
    probe = PROBES[today][name]
    role = PAIR if probe.launch == "[2]" else XLA
    return Entry(f"construct {name}", CONSTRUCT, role, {**probe.call, "text": probe.text})


def within(left: float, every: Sequence[Entry]) -> list[Entry]:
    """The first entries that fit into so many seconds; one that is too long leaves its time to
    those behind it."""
    chosen = []
    for entry in every:
        if SECONDS[entry.kind] <= left:
            left -= SECONDS[entry.kind]
            chosen.append(entry)
    return chosen
