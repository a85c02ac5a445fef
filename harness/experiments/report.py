"""What moved between a process that prefills and one that decodes, as a table."""

from collections.abc import Sequence

from rich.table import Table

from harness.experiments.answered import Answered
from harness.sources import Source
from neuron_cpu.console import terminal

PIPED_WIDTH = 160
EXPENDABLE = ("MB/s", "new")


def print_report(found: Sequence[Answered], device_ms: Sequence[float], assumed: str) -> None:
    """A line for each prompt; `device_ms` of its transfer, under what is `assumed` in words."""
    table = Table(title="Keys and values from prefill to decode", title_justify="left")
    for name in ("prompt", "tokens", "new", "prefill ms", "bytes", "transfer ms", "MB/s"):
        table.add_column(name, justify="right")
    table.add_column("on Trainium ms", justify="right")
    for number, (answered, estimate) in enumerate(zip(found, device_ms, strict=True)):
        rate = answered.nbytes / answered.transfer_s / 1e6 if answered.transfer_s else 0.0
        table.add_row(
            str(number),
            str(answered.length),
            str(answered.tokens),
            f"{1e3 * answered.prefill_s:.1f}",
            f"{answered.nbytes:,}",
            f"{1e3 * answered.transfer_s:.2f}",
            f"{rate:.0f}",
            f"{estimate:.4f}",
        )
    terminal.print_table(terminal.output(PIPED_WIDTH), table, EXPENDABLE)
    terminal.printed(f"prefill and transfer ms: {Source.SIMULATOR.label}.")
    terminal.printed(f"on Trainium ms: estimated ({Source.COST_MODEL}) with {assumed}.")
