"""Mechanisms that strangers' kernels showed: the law that each has, or that none explains it.

    python -m lab.mechanisms

A law is a function of the cost model, found where it stands, with its constants and the public
source that they have. A mechanism without one is part of the band of its class. The second table
prices every source of published times by the others. Both go into pages of lab/docs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lab import ROOT, calibrate, calibration_rows, calibration_votes, pages
from neuron_cpu.core.current import operands
from neuron_cpu.core.device import spec
from neuron_cpu.core.time import cost, schedule
from neuron_cpu.core.time.passes import join

NOT_EXPLAINED = "not explained"
FAR = (1.1, 1.2, 1.5, float("inf"))  # measured times of a pair, one over the other
DATA = ("calibration.json", "calibration_opened.json", "calibration_sealed.json")


class Mechanism(NamedTuple):
    """What a device does, and what the model has of it.

    Attributes:
        name: what happens.
        law: the function that has it, None where nothing has.
        constants: its constants, fields of a generation's ``dma``.
        source: public source of the law, or what is known without one.
        kind: class of estimates whose band holds what is not explained; empty where the law is.
    """

    name: str
    law: Callable[..., Any] | None
    constants: tuple[str, ...]
    source: str
    kind: str = ""


MECHANISMS = (
    Mechanism(
        "serial issue, `dge_mode` open", schedule._Run._queued, ("issue_ns",),
        "vecadd-trn2; 46 profiles have none", "DMA",
    ),
    Mechanism(
        "serial issue, `hwdge`: 0.6 µs", schedule._Run._queued, ("hardware_ns",),
        "ARCH3, nki-dge.rst",
    ),
    Mechanism(
        "rows that data choose: 13 ns on a trn2", cost._built_ns, ("descriptor_ns",),
        "kiln on trn1; a comment: 26.5", "DMA",
    ),
    Mechanism(
        "loads that the compiler joins", join.join, (),
        "conv1d, for engines; transfers stay as written", "DMA",
    ),
    Mechanism(
        "engines that the compiler chooses for softmax", operands.choose, (),
        "none", "ScalarE",
    ),
    Mechanism(
        "rows a power of two apart", None, (),
        "spectral-dns, rule 7b: half of the rate", "DMA",
    ),
    Mechanism(
        "strided stores of 4 bytes on gen2: 88 ns", cost._since_2_24, ("part_word_ns",),
        "vecadd: 40", "DMA",
    ),
    Mechanism(
        "chains on one partition", cost.result_ns, (),
        "voyager: results after 150 to 228 cycles", "latency",
    ),
    Mechanism(
        "DMA that reads, changes and writes back", cost._source, (),
        "none", "DMA",
    ),
    Mechanism(
        "DMA transposes of 2 bytes on gen3", cost._transfer, ("transposed", "transposed_on_chip"),
        "ARCH3: up to 90, 50 %",
    ),
    Mechanism(
        "a core's share of HBM", cost._memory_ns, (), "ARCH3: 3 TB/s for eight cores",
    ),
    Mechanism(
        "a lone row below 8 bytes", cost.lane_ns, ("lone_row_ns",), "vecadd: 27.4 ms of 25 600",
    ),
)  # fmt: skip


def table() -> str:
    """Markdown: every mechanism with its law, or the band that holds it."""
    lines = [f"| Mechanism | law | gen2, gen3 | source | {NOT_EXPLAINED}: band of |"]
    lines.append("|---|---|---|---|---|")
    for one in MECHANISMS:
        cells = one.name, place(one.law), values(one), one.source, one.kind
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def place(law: Callable[..., Any] | None) -> str:
    """The module and the name of a law."""
    if law is None:
        return "none"
    path = Path(inspect.getsourcefile(law) or "").resolve().relative_to(ROOT / "neuron_cpu/core")
    return f"`{path.with_suffix('').as_posix()}: {law.__name__}`"


def values(one: Mechanism) -> str:
    """Of gen2 and gen3."""
    cores = (spec.GEN2, spec.GEN3)
    told = (", ".join(f"{getattr(c.dma, name):g}" for c in cores) for name in one.constants)
    return "; ".join(told)


def outcomes() -> list[calibrate.Outcome]:
    """Of every row, as the page has it: sealed ones as they were when they were sealed."""
    every = [
        row for name in DATA for row in calibration_rows.rows(calibration_rows.DATA.with_name(name))
    ]
    return [calibrate.on_page(row) for row in every]


def distances() -> str:
    """Markdown: pairs of variants in order, by how far their measured times are apart: of the rows
    that the model was made on, and of sealed sets as they were sealed."""
    lines = ["| Measured times differ by | 5 to 10 % | 10 to 20 % | 20 to 50 % | more |"]
    lines.append("|---|---:|---:|---:|---:|")
    made = (calibration_rows.FITTED, calibration_rows.CHECKED)
    for name, own in (("rows that the model was made on", True), ("sealed sets", False)):
        some = [one for one in outcomes() if (one.row.set in made) is own]
        bins = [[0, 0] for _ in FAR]
        for _, wrong, apart in calibrate.compared(some):
            counts = bins[sum(apart > far for far in FAR[:-1])]
            counts[0] += not wrong
            counts[1] += 1
        told = " | ".join(f"{right} of {every}" for right, every in bins)
        lines.append(f"| {name}: pairs in order | {told} |")
    return "\n".join(lines)


def main() -> int:
    pages.publish(calibrate.MODEL, "mechanisms", table())
    pages.publish(calibrate.MODEL, "distances", distances())
    pages.publish(calibrate.DOCUMENT, "left out", calibration_votes.left_out(outcomes()))
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
