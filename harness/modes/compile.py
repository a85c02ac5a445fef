"""`--mode compile`: build and check every sub-model and bucket, say which operator ran where."""

from pathlib import Path

from harness import console
from harness.figures import graphs
from harness.session.building import build
from harness.session.opening import open_session
from harness.settings import Settings
from neuron_cpu.console import terminal


def run(settings: Settings) -> int:
    """Compile the changed graphs and print the operators of each graph."""
    loaded = build(open_session(settings))
    print_operators(graphs.read(loaded.folder))
    if settings.enable_nki:
        report_outside_nki(loaded.folder)
    return 0


def print_operators(records: list[graphs.Graph]) -> None:
    """One table for each sub-model and bucket, equal operators of all layers in one row."""
    out = terminal.output(100)
    for record in records:
        share = f"{record.nki_share:.1%} of {record.macs:,} MACs in NKI"
        title = f"\n{record.submodel}, bucket {record.sizes}: {share}"
        if record.instructions is not None:
            title += f", {record.instructions:,} instructions"
        table = terminal.table_of("operator|ran in|>times|>MACs", title)
        for row in record.grouped():
            place = f"NKI kernel {row.name}" if row.in_kernel else f"PyTorch {row.name}"
            table.add_row(row.operator, place, str(row.count), f"{row.macs:,}" if row.macs else "")
        terminal.print_table(out, table, ("times", "MACs"))


def report_outside_nki(folder: Path) -> None:
    """One line for each graph that names the products left outside NKI, or says there are none."""
    for record in graphs.read(folder):
        outside = ", ".join(graphs.outside(record))
        console.say(
            f"{record.submodel}, bucket {record.sizes}: {record.nki_share:.1%} of the MACs in "
            + ("NKI" if not outside else f"NKI; outside: {outside}")
        )
