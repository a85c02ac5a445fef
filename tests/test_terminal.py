"""Tables in terminals of every width: whole words, nothing cut short, missing columns named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from neuron_cpu import terminal

HEADERS = ("kernel", "times", "latency ms", "source of it", "bound by")
ROWS = [
    (
        "attention_prefill_block_kernel",
        "30",
        "1,299.2",
        "cost model",
        "rows of 4.4 KiB, a b c " * 3,
    ),
    ("swiglu_mlp_kernel", "7", "87.24", "published", "nothing"),
]


def printed(width: int, expendable: tuple[str, ...] = ()) -> list[str]:
    table = Table(title="T", title_justify="left")
    for name in HEADERS:
        table.add_column(name)
    for row in ROWS:
        table.add_row(*row)
    out = Console(width=width, file=io.StringIO())
    terminal.print_table(out, table, expendable, prose="bound by")
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [71, 76, 80, 100, 120, 160, 200])
def test_words_stay_whole_and_lines_fit(width: int) -> None:
    lines = printed(width, ("source of it", "latency ms"))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for word in ("attention_prefill_block_kernel", "swiglu_mlp_kernel", "times", "KiB,", "30"):
        assert word in text
    missing = [name for name in HEADERS if name.split()[0] not in lines[1] + lines[2]]
    note = f"Left out for want of width: {', '.join(reversed(missing))}" if missing else ""
    assert note in text and ("Left out" in text) == bool(missing)


def test_wide_terminals_show_every_column_in_one_line_a_row() -> None:
    lines = printed(200, HEADERS)
    assert len(lines) == 3 + len(ROWS)


def test_columns_go_in_the_order_given() -> None:
    text = "\n".join(printed(72, ("source of it", "times", "latency ms")))
    assert "source" not in text.split("Left out")[0]
    assert "latency" in text.split("Left out")[0]


@pytest.mark.parametrize("width", [30, 40, 60])
def test_too_narrow_tables_still_hold_every_character(width: int) -> None:
    """The pieces of each column, put together, are its header and its cells without blanks."""
    lines = printed(width)
    assert max(map(len, lines)) <= width
    first_row = next(at for at, line in enumerate(lines) if line.startswith("──")) + 1
    starts = [match.start() for match in re.finditer(r"(?:(?<=   )|^)\S", lines[first_row])]
    assert len(starts) == len(HEADERS)
    body = [*lines[1 : first_row - 1], *lines[first_row:]]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], width])):
        text = "".join(line[start:end] for line in body)
        whole = HEADERS[number] + "".join(row[number] for row in ROWS)
        assert text.replace(" ", "") == whole.replace(" ", "")


def test_output_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "91")
    assert terminal.output(160).width == 91
    monkeypatch.delenv("COLUMNS")
    assert terminal.output(160).width == 160


def test_columns_without_entries_go_first() -> None:
    table = Table()
    for name in ("kernel", "TensorE µs", "GpSimdE µs"):
        table.add_column(name)
    table.add_row("attention_kernel", "12", "")
    out = Console(width=35, file=io.StringIO())
    terminal.print_table(out, table, ("TensorE µs", "GpSimdE µs"))
    text = " ".join(out.file.getvalue().split())  # type: ignore[attr-defined]
    assert "TensorE" in text.split("Left out")[0] and "width: GpSimdE µs" in text
