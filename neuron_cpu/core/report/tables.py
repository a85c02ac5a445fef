"""Profiles as terminal tables (rich)."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..check.provenance import Finding
from ..device import spec
from ..time import cost
from ..time.schedule import ENGINES
from .report import ENGINE_KEYS, Line, Profile, size_text


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _folded(name: str) -> Column:
    return Column(name, overflow="fold")


def microseconds(time: float) -> str:
    """Nanoseconds as microseconds with as many digits as matter."""
    return f"{time / 1e3:,.1f}" if time >= 1e4 else f"{time / 1e3:.2f}"


def estimate_note(name: str) -> str:
    """The note printed with every estimate."""
    return f"estimated, not measured; DMA profile {name}: {cost.dma_profile(name).note}"


def other_releases(time: float, by_release: Mapping[str, float]) -> list[str]:
    """The times of releases whose DMA differs by more than APART, a line each; in ns."""
    return [
        f"with {name}: {microseconds(other)} µs ({cost.dma_profile(name).note})"
        for name, other in by_release.items()
        if abs(other - time) > cost.APART * time
    ]


def band_text(band_ns: tuple[float, float]) -> str:
    """The times of a device that an estimate stands for, in µs."""
    low, high = band_ns
    return f"{microseconds(low)} to {microseconds(high)} µs on a device"


def _likely(found: Profile) -> str:
    """The band of a calibrated generation, or the generation."""
    if not found.calibrated:
        return f" on {found.generation}, uncalibrated"
    return f", {band_text(found.band_ns)} by the calibration's {found.bound} kernels"


def print_profile(
    console: Console, found: Profile, print_table: Callable[[Table], None], top: int = 12
) -> None:
    """One kernel: figures, engines, source lines; tables through `print_table`."""
    console.print(
        Text(found.name, "bold") + f": {microseconds(found.time_ns)} µs{_likely(found)} "
        f"({estimate_note(found.dma_profile)}; schedule {found.schedule_order})"
    )
    console.print(f"bound by {found.binding}")
    console.print(
        f"the kernel alone: nki.benchmark adds {spec.GRAPH_START_NS / 1e3:g} µs for the start and "
        "end of a graph"
    )
    for words in found.spills:
        console.print(words)
    busy = {name: value for name, value in found.metrics.items() if value}
    for table in (
        line_table(found.lines, found.time_ns, top),
        _critical(found),
        figure_table("figures other than 0 (Neuron profiler names)", busy),
    ):
        print_table(table)


def figure_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Figures with the units that their names imply."""
    table = Table("figure", _right("value"), title=f"\n{title}", title_justify="left")
    for name, value in metrics.items():
        table.add_row(name, figure_text(name, value))
    return table


def figure_text(name: str, value: float) -> str:
    """A figure with the unit that its name implies."""
    if name.endswith("_percent"):
        return f"{value:.1f} %"
    if name.endswith("_time"):
        return f"{microseconds(value)} µs"
    if name.endswith("_bytes"):
        return size_text(value)
    return f"{value:,.4g}" if value != int(value) else f"{int(value):,}"


def _critical(found: Profile) -> Table:
    columns = "resource", _right("µs"), _right("share")
    table = Table(*columns, title="\ncritical path", title_justify="left")
    for name, time in found.critical.items():
        table.add_row(name, microseconds(time), f"{time / found.time_ns:.1%}")
    return table


def expendable(lines: Sequence[Line]) -> list[str]:
    """Columns that a narrow terminal does without, the first one first, the busiest engine last."""
    engines = sorted(zip(ENGINE_KEYS, ENGINES), key=lambda e: sum(one.busy[e[0]] for one in lines))
    rest = ("MFU", "MBU", "n", "bytes", "instructions", "function")
    return [*rest, *(f"{engine.value} µs" for _, engine in engines)]


def line_table(lines: Sequence[Line], total: float, top: int) -> Table:
    """Source lines by their share of the critical path."""
    title = f"\nsource lines, {min(top, len(lines))} of {len(lines)}"
    figures = ("n", "critical", *(f"{e.value} µs" for e in ENGINES), "bytes", "MFU", "MBU")
    words = map(_folded, ("line", "function", "instructions"))
    columns = *words, *map(_right, figures), _folded("bound by")
    table = Table(*columns, title=title, title_justify="left")
    for line in lines[:top]:
        table.add_row(
            line.place,
            line.function,
            ", ".join(line.opcodes),
            str(line.instructions),
            f"{line.critical / total:.1%}" if total else "",
            *(microseconds(line.busy[k]) if line.busy[k] else "" for k in ENGINE_KEYS),
            size_text(line.dma_bytes) if line.dma_bytes else "",
            f"{line.mfu_estimated_percent:.1f} %" if line.macs else "",
            f"{line.mbu_estimated_percent:.1f} %" if line.dma_bytes else "",
            line.binding,
        )
    return table


def provenance_table(findings: Sequence[Finding]) -> Table:
    """Constructs of a kernel file, unproven ones first."""
    words, numbers = ("construct", "status"), ("first line", "lines")
    columns = *map(_folded, words), *map(_right, numbers), _folded("source")
    table = Table(*columns, title="constructs and who has shown them", title_justify="left")
    for one in findings:
        line, lines = str(one.line), str(one.lines)
        table.add_row(one.construct, one.status, line, lines, one.source)
    return table
