"""Tables on standard output that suit the width of the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Column, Table

PROSE_WIDTH = 20  # characters that sentences in a table get at least
COLUMN_GAP = 3  # between columns: padding, a blank, padding


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the driver: rich would exit with status 1, which means a failed check."""
        raise BrokenPipeError


def output(piped_width: int) -> Console:
    """Standard output: as wide as the terminal or COLUMNS says, else `piped_width` columns."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Output(width=None if known else piped_width)


def written_to(file: TextIO, width: int, styled: bool) -> Console:
    """The same for text that is shown elsewhere, with colours where `styled`."""
    return _Output(file=file, width=width, force_terminal=styled)


def print_table(
    out: Console,
    table: Table,
    expendable: Sequence[str] = (),
    prose: str = "",
    elsewhere: str = "a wider terminal shows them",
) -> None:
    """Print a table that `out` is wide enough for; nothing in it is cut short.

    Where it is not, the columns named in `expendable` are left out one by one, those without any
    entry before the others, first named first, and a line below says which and where they are.
    `prose` names a column of sentences, which may wrap.
    """
    table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
    left_out = []
    empty = {column.header for column in table.columns if not any(map(str, column.cells))}
    for name in sorted(expendable, key=lambda name: name not in empty):
        if _least_width(table, prose) <= out.width:
            break
        left_out += [name for column in table.columns if column.header == name]
        table.columns = [column for column in table.columns if column.header != name]
    _set_widths(table, prose, out.width)
    out.print(table)
    if left_out:
        out.print(f"Left out for want of width: {', '.join(left_out)} ({elsewhere}).")


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
    """Give each column its longest word, and what is left to texts that would wrap, prose last.

    Rich would take from the widest column first and break its words. A table that is too wide even
    so is left to rich, which folds words.
    """
    spare = width - _least_width(table, prose)
    for column in sorted(table.columns, key=lambda column: column.header == prose):
        column.overflow = "fold"
        if spare >= 0:
            least = _least(column, prose)
            column.width = min(max(least, *map(len, _texts(column))), least + spare)
            spare -= column.width - least
