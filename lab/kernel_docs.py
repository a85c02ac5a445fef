"""Rewrites what lab/docs/kernels.md and lab/docs/porting.md show in numbers.

    python -m lab.kernel_docs [--larger]

Traces the fused kernels of llama.py for Llama-3.2-1B at tensor-parallel degree 2, and the graphs of
lab/roofline.py, and schedules them with the cost model (estimated, nothing is measured).
A test makes the graphs again, and fails where one takes 2 % longer.
``--larger`` rewrites the graphs of larger models and of prompts in chunks alone, in some minutes.
"""

import argparse
import sys
from collections.abc import Sequence

import neuron_cpu

neuron_cpu.ensure_sdk()

import llama  # noqa: E402
from harness import console  # noqa: E402
from harness.inputs.command_line import Parser  # noqa: E402
from lab import NOTES, pages, porting_docs, roofline  # noqa: E402
from neuron_cpu.core import Program  # noqa: E402
from neuron_cpu.core.report import report  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402

PAGE = NOTES / "kernels.md"


def programs() -> list[tuple[str, Program]]:
    """The kernels of one layer, in prefill and decode, and of the head."""
    size = porting_docs.SIZES["Llama-3.2-1B"]
    return [(name, kernel.trace(*given)) for name, kernel, given in porting_docs.calls(llama, size)]


HEAD = (
    "Kernel", "instructions", "MACs, M", "HBM read, MB", "written, MB", "bytes a row",
    "SBUF, KiB a partition", "time, µs",
)  # fmt: skip


def row(name: str, program: Program, profile: report.Profile) -> str:
    figures = profile.metrics
    return (
        f"| {name} | {len(program):,} | {program.macs / 1e6:,.1f} "
        f"| {figures['hbm_read_bytes'] / 1e6:,.2f} | {figures['hbm_write_bytes'] / 1e6:,.2f} "
        f"| {figures['dma_transfer_average_bytes']:,.0f} "
        f"| {figures['sbuf_high_water_bytes'] / 1024:,.0f} | {profile.time_ns / 1e3:,.1f} |"
    )


def kernels() -> str:
    """A table of figures, and below it what bounds each kernel."""
    figures = [f"| {' | '.join(HEAD)} |", f"|---|{'---:|' * (len(HEAD) - 1)}"]
    bounds = []
    for name, program in programs():
        profile = report.profile(schedule.schedule(program))
        figures.append(row(name, program, profile))
        bound, _, _ = profile.binding.partition("; llama.py:")  # lines move with every change
        bounds.append(f"- {name} is bound by {bound}")
    return "\n".join([*figures, "", *bounds])


CHUNKS = [row for row in roofline.ROWS if row.name == "prefill-8192"]
LARGER = {  # tables that take minutes
    "chunks": (roofline.DEFAULT_MODEL, CHUNKS),
    "llama-3.2-3b": ("llama-3.2-3b", roofline.SHORT),
    # 2048 tokens of it make a graph of 1.9 million instructions, which is refused
    "llama-3.1-8b": ("llama-3.1-8b", [r for r in roofline.SHORT if r.name != "prefill-2048"]),
}


def graphs(model: str = roofline.DEFAULT_MODEL, rows: Sequence[roofline.Row] = ()) -> str:
    """Rows of the roofline, the short ones if none are given."""
    found = roofline.measure(model, rows or roofline.SHORT, cost.DEFAULT_PROFILE)
    rule = f"|---|{'---:|' * (len(roofline.COLUMNS) - 1)}"
    head, *rest = (
        f"| {' | '.join(cells)} |" for cells in (roofline.COLUMNS, *(each.cells for each in found))
    )
    return "\n".join([head, rule, *rest])


def column(table: str, name: str) -> dict[str, float]:
    """Numbers of a column by the first cell of their rows."""
    lines = [line.strip("| ").split(" | ") for line in table.split("\n") if line.startswith("| ")]
    at = lines[0].index(name)
    return {cells[0]: float(cells[at].replace(",", "")) for cells in lines[1:]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="-m lab.kernel_docs",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--larger", action="store_true", help="only larger models' graphs")
    args = parser.parse_args(argv)
    if args.larger:
        for name, rows in LARGER.items():
            pages.publish(PAGE, name, graphs(*rows))
        print(f"{PAGE.name} rewritten (DMA profile {cost.DEFAULT_PROFILE})")
        return 0
    with console.step("Tracing the kernels", least_seconds=roofline.SHOWN_SECONDS):
        pages.publish(PAGE, "kernels", kernels())
    pages.publish(PAGE, "graphs", graphs())
    with console.step("Tracing both languages"):
        pages.publish(porting_docs.PAGE, "times", porting_docs.time_table())
    print(
        f"{PAGE.name} and {porting_docs.PAGE.name} rewritten (DMA profile {cost.DEFAULT_PROFILE})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
