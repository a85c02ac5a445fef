"""Tables in terminals of every width: whole words, nothing cut short, missing columns named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from neuron_cpu.console import terminal

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


@pytest.mark.parametrize("width", range(60, 140))
def test_no_word_is_broken_once_its_columns_fit(width: int) -> None:
    """At every width: a column that is left out must not make the others narrower."""
    lines = printed(width, ("times", "latency ms", "source of it"))
    words = {word for line in lines for word in line.split()}
    told = {word for text in (*HEADERS, *ROWS[0], *ROWS[1]) for word in text.split()}
    assert words - {"T", "Left", "out", "for", "want", "width:", "(a", "wider", "terminal"} <= (
        told | {"them).", "shows", "times,", "ms,", "it,"} | {w for w in words if set(w) == {"─"}}
    )


@pytest.mark.parametrize("pieces", [1, 2, 5, 200])
def test_running_text_breaks_between_words(pieces: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "The capital of Japan is Tokyo, extraordinarily-large-and-old.\n\n"
    text += "Yes:\n    indented 東京都東京都東京都\n\x1b[2J"
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    running = terminal.Running(screen)
    for start in range(0, len(text), -(-len(text) // pieces)):
        running.write(text[start : start + -(-len(text) // pieces)])
    running.finish()
    lines = screen.getvalue().split("\n")
    assert lines[:2] == ["The capital of Japan", "is Tokyo, "]
    assert lines[2] == "extraordinarily-large-and-old." and lines[3:6] == [
        "",
        "Yes:",
        "    indented 東京都",
    ]
    assert "".join(screen.getvalue().split()) == "".join([*text.split()[:-1], "\\x1b[2J"])


def test_running_text_without_blanks_shows_as_it_comes(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    running = terminal.Running(screen)
    running.write("東京は")
    assert screen.getvalue() == "東京は"
    running.write("日本の首都")
    assert screen.getvalue() == "東京は日本\nの首都"
    for letter in " ภาษาไทยไม่เว้นวรรค":  # Thai, one column a letter or none
        running.write(letter)
    shown = screen.getvalue()
    assert shown.startswith("東京は日本\nの首都 \nภาษาไทยไม") and len(shown) > 25
    running.write("จบ end")
    running.finish()
    assert screen.getvalue().endswith("ภาษาไทยไม่เว้นวรรคจบ \nend")


def test_running_text_stays_as_it_is_where_programs_read_it(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    pipe = io.StringIO()
    running = terminal.Running(pipe)
    running.write("a rather long line of te")
    assert pipe.getvalue() == "a rather long line of te"
    running.write("xt")
    running.finish()
    assert pipe.getvalue() == "a rather long line of text"
    assert terminal.folded("a rather long line of text", pipe) == "a rather long line of text"


def test_folded_lines_keep_their_indent(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    text = "Speed:\n\tlatency p50 37.57, p90 37.68 ms\n/a/path/that/is-longer-than/the-terminal"
    assert terminal.folded(text, screen).split("\n") == [
        "Speed:",
        "    latency p50 37.57,",
        "    p90 37.68 ms",
        "/a/path/that/is-longer-than/the-terminal",
    ]


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


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture) -> None:
    out = terminal.output(60)
    out.print("wrote [/red] and [bold]")
    table = Table(title="a title wider than [/red]")
    table.add_column("[x]")
    table.add_row("[/y]")
    terminal.print_table(out, table)
    printed = capsys.readouterr().out
    assert all(
        text in printed
        for text in ("wrote [/red] and [bold]", "a title wider than [/red]\n", "[x]", "[/y]")
    )
