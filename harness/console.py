"""Status lines and progress on standard error; standard output is for results only."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

# Long steps of the SDK's stand-in say how far they are through records of this logger, which carry
# an attribute `progress` with keys task, done and total. A real SDK sends none.
PROGRESS_LOGGER = "neuron_cpu.progress"
LINE_SECONDS = 10.0  # between progress lines where there is no terminal for a bar
PROSE_WIDTH = 20  # characters that sentences in a table get at least
COLUMN_GAP = 3  # between columns: padding, a blank, padding


def say(text: str) -> None:
    """One status line."""
    print(text, file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """A path for the terminal, `~` for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home in path.parents else str(path)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the driver: rich would exit with status 1, which means a failed check."""
        raise BrokenPipeError


def output(piped_width: int) -> Console:
    """Standard output: as wide as the terminal or COLUMNS says, else `piped_width` columns."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Output(width=None if known else piped_width)


def print_table(
    out: Console,
    table: Table,
    expendable: Sequence[str] = (),
    prose: str = "",
    elsewhere: str = "a wider terminal shows them",
) -> None:
    """Print a table that `out` is wide enough for; nothing in it is cut short.

    Where it is not, the columns named in `expendable` are left out one by one, first named first,
    and a line below says which and where they are. `prose` names a column of sentences, which may
    wrap.
    """
    table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
    left_out = []
    for name in expendable:
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


class Step:
    """A long step: `advance` moves its bar; `note` changes what the closing line says."""

    def __init__(self, title: str, progress: Progress, total: Optional[float]) -> None:
        self.title = title
        self._progress = progress
        self._task = progress.add_task(title, total=total)
        self._said = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)
        if self._progress.disable and time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            say(f"{self.title}: {self._progress.tasks[0].percentage:.0f} %")

    def note(self, title: str) -> None:
        self.title = title
        self._progress.update(self._task, description=title)


@contextlib.contextmanager
def step(title: str, total: Optional[float] = None) -> Iterator[Step]:
    """Show progress while the body runs; end with one line that says how long it took.

    Without a terminal a line tells every LINE_SECONDS how far it is. Progress records of the SDK's
    stand-in show as further bars below this one.
    """
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    terminal = Console(stderr=True)
    bars = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    with bars as progress:
        current = Step(title, progress, total)
        listener = _ProgressListener(progress)
        logger = logging.getLogger(PROGRESS_LOGGER)
        level, propagate = logger.level, logger.propagate
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        try:
            yield current
        finally:
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate
    say(f"{current.title}: {time.monotonic() - started:.1f} s")


class _ProgressListener(logging.Handler):
    """Renders the progress records of the SDK's stand-in, one bar for each task."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        state = getattr(record, "progress", None)
        if not isinstance(state, dict):
            return
        task = str(state["task"])
        if task not in self._bars:
            self._bars[task] = self._progress.add_task(f"  {task}", total=state["total"])
        self._progress.update(self._bars[task], completed=state["done"], total=state["total"])
