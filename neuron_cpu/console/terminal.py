"""Text and tables that suit the width of the terminal: nothing cut short, words left whole."""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

from ..quoting import quoted

PROSE_WIDTH = 20  # characters that sentences in a table get at least
COLUMN_GAP = 3  # between columns: padding, a blank, padding


class _Output(Console):
    """Without markup: brackets in names of files and prompts are theirs."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(here(o) if isinstance(o, str) else o for o in objects), **how)

    def on_broken_pipe(self) -> None:
        """Leave it to the driver: rich would exit with status 1, which means a failed check."""
        raise BrokenPipeError


def here(text: str) -> str:
    """Paths below the folder that one works in, seen from there."""
    return text.replace(os.path.join(os.getcwd(), ""), "")


def output(piped_width: int, file: TextIO | None = None, quiet: bool = False) -> Console:
    """Standard output with the terminal's or COLUMNS' width, or `piped_width` columns in a pipe.

    Args:
        file: a stream in its place.
        quiet: nothing is printed.
    """
    width = None if (file or sys.stdout).isatty() or "COLUMNS" in os.environ else piped_width
    return _Output(file=file, width=width, quiet=quiet, markup=False, highlight=False)


def written_to(file: TextIO, width: int, styled: bool) -> Console:
    """The same for text that is shown elsewhere, with colours where `styled`."""
    return _Output(
        file=file,
        width=width,
        force_terminal=styled,
        force_jupyter=False,  # else a notebook shows each line below its cell, and the file none
        markup=False,
        highlight=False,
    )


def table_of(columns: str, title: str | None = None) -> Table:
    """An empty one of columns between bars: > has numbers, ~ prose that is folded."""
    table = Table(title=title, title_justify="left")
    for name in columns.split("|"):
        justify, fold = "right" if name[:1] == ">" else "left", name[:1] == "~"
        overflow = "fold" if fold else "ellipsis"
        table.add_column(name.lstrip(">~"), justify=justify, overflow=overflow)  # type: ignore
    return table


def print_table(
    out: Console,
    table: Table,
    expendable: Sequence[str] = (),
    prose: str = "",
    elsewhere: str = "a wider terminal shows them",
) -> None:
    """Print a table as wide as `out`; nothing in it is cut short.

    Where it is too wide, columns of `expendable` are left out one by one in their order, columns
    without an entry first. A line below says which, and where they are. `prose` names a column of
    sentences, which may wrap.
    """
    left_out: list[str] = []
    empty = {column.header for column in table.columns if not any(map(str, column.cells))}
    for name in sorted(expendable, key=lambda name: name not in empty):
        if _least_width(table, prose) <= out.width:
            break
        left_out += [name for column in table.columns if column.header == name]
        table = _without(table, name)
    table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
    _set_widths(table, prose, out.width)
    if table.title is not None:  # rich would fold it to the width of the table
        out.print(table.title, style="table.title")
        table.title = None
    out.print(table)
    if left_out:
        out.print(f"Left out for want of width: {', '.join(left_out)} ({elsewhere}).")


def _without(table: Table, name: str) -> Table:
    """The same table without one column; rich counts paddings by the numbers of columns."""
    kept = [column for column in table.columns if column.header != name]
    made = Table(
        title=table.title, title_justify=table.title_justify, show_header=table.show_header
    )
    for column in kept:
        made.add_column(column.header, justify=column.justify, overflow=column.overflow)
    for cells in zip(*(column.cells for column in kept)):
        made.add_row(*cells)
    return made


def printable(text: str) -> str:
    """Text that cannot change the terminal."""
    return quoted(text, len(text), lines=True)


def folded(text: str, stream: TextIO) -> str:
    """Lines no longer than the terminal `stream`, broken between words only.

    Continued lines are indented as their first. In a pipe or file lines stay unchanged: programs
    read them.
    """
    if not stream.isatty():
        return text
    width = _width(stream)
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def _width(stream: TextIO) -> int:
    """Columns of a stream's terminal; COLUMNS takes precedence. 80 where the terminal has no size
    or the size 0.
    """
    try:
        told = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80
    return told if told > 0 else 80


def _folded(line: str, width: int) -> str:
    line = line.expandtabs(4)
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def printed(text: str = "") -> None:
    """Print results on standard output, folded."""
    print(folded(text, sys.stdout), flush=True)


class Running:
    """Writes text that comes in pieces to standard output.

    On a terminal it breaks lines between words, or between characters that are two columns wide.
    Control characters become escapes.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._folds = self._stream.isatty()
        self._column = 0
        self._word = ""  # not written yet: it may go on in the next piece
        self._long = False  # what was written last is the beginning of a word longer than a line

    def write(self, text: str) -> None:
        """Write the words that this piece completes, and the part so far of a long one."""
        if not self._folds:
            self._stream.write(text)
        else:
            *whole, self._word = _PIECES.split(self._word + printable(text))
            for piece in whole:
                self._put(piece)
            if self._long or len(self._word) >= _width(self._stream):
                self._put(self._word)
                self._long, self._word = True, ""
        self._stream.flush()

    def finish(self) -> None:
        """Write the text held back."""
        self._put(self._word)
        self._word, self._long = "", False
        self._stream.flush()

    def _put(self, piece: str) -> None:
        """One word, one wide character, or one blank; blanks at a break are left out."""
        if not piece:
            return
        width, length = _width(self._stream), cell_len(piece)
        goes_on = self._long and not _PIECES.fullmatch(piece)  # the terminal breaks it
        self._long = goes_on
        if piece == "\n":
            self._column = 0
        elif self._column and self._column + length > width and not goes_on:
            self._stream.write("\n")
            self._column = 0
            if piece.isspace():
                return
        self._stream.write(piece)
        if piece != "\n":
            self._column += length
            if self._column > width:
                self._column = self._column % width or width


# Between Chinese and Japanese characters, and what else is two columns wide, a line may break.
_PIECES = re.compile(
    "([\\s\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
    "\U0001f300-\U0003fffd])"
)


def _texts(column: Column) -> list[str]:
    return [str(column.header), *map(str, column.cells)]


def _least(column: Column, prose: str) -> int:
    """Characters that a column needs: its longest word, for prose `PROSE_WIDTH` at least."""
    longest = max((len(word) for text in _texts(column) for word in text.split()), default=1)
    return max(longest, PROSE_WIDTH) if column.header == prose else longest


def _least_width(table: Table, prose: str) -> int:
    gaps = COLUMN_GAP * (len(table.columns) - 1)
    return gaps + sum(_least(column, prose) for column in table.columns)


def _set_widths(table: Table, prose: str, width: int) -> None:
    """Give each column its longest word, and the rest to texts that would wrap, prose last.

    Rich alone would take from the widest column first and break its words. Rich folds words of a
    table that is still too wide.
    """
    spare = width - _least_width(table, prose)
    for column in sorted(table.columns, key=lambda column: column.header == prose):
        column.overflow = "fold"
        if spare >= 0:
            least = _least(column, prose)
            column.width = min(max(least, *map(len, _texts(column))), least + spare)
            spare -= column.width - least
