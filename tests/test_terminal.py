"""Tables in terminals of every width: whole words, nothing cut short, missing columns named."""

import io

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


def printed(width, expendable=()):
    table = Table(title="T", title_justify="left")
    for name in HEADERS:
        table.add_column(name)
    for row in ROWS:
        table.add_row(*row)
    out = Console(width=width, file=io.StringIO())
    terminal.print_table(out, table, expendable, prose="bound by")
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", range(60, 140, 5))
def test_no_word_is_broken_once_its_columns_fit(width):
    """At every width: a column that is left out must not make the others narrower."""
    lines = printed(width, ("times", "latency ms", "source of it"))
    words = {word for line in lines for word in line.split()}
    told = {word for text in (*HEADERS, *ROWS[0], *ROWS[1]) for word in text.split()}
    assert words - {"T", "Left", "out", "for", "want", "width:", "(a", "wider", "terminal"} <= (
        told | {"them).", "shows", "times,", "ms,", "it,"} | {w for w in words if set(w) == {"─"}}
    )


@pytest.mark.parametrize("pieces", [1, 2, 5, 200])
def test_running_text_breaks_between_words(pieces, monkeypatch):
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


def test_running_text_stays_as_it_is_where_programs_read_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    pipe = io.StringIO()
    running = terminal.Running(pipe)
    running.write("a rather long line of te")
    assert pipe.getvalue() == "a rather long line of te"
    running.write("xt")
    running.finish()
    assert pipe.getvalue() == "a rather long line of text"
    assert terminal.folded("a rather long line of text", pipe) == "a rather long line of text"


def test_folded_lines_keep_their_indent(monkeypatch):
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


def test_brackets_are_no_markup(capsys):
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
