"""Status lines and progress on standard error; standard output is for results only."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from neuron_cpu.console import terminal
from neuron_cpu.console.progress import LOGGER_NAME as PROGRESS_LOGGER  # a real SDK sends nothing

LINE_SECONDS = 15.0  # between progress lines where there is no terminal for a bar


def say(text: str) -> None:
    """One status line, whatever characters are in it."""
    print(terminal.folded(terminal.printable(text), sys.stderr), file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """A path for the terminal, `~` for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home in path.parents else str(path)


class Step:
    """A long step: `advance` moves its bar; `note` changes what the closing line says."""

    def __init__(self, title: str, progress: Progress, total: float | None) -> None:
        self.title = title
        self._progress = progress
        self._task = progress.add_task(title, total=total)
        self._began = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def tell(self) -> None:
        """A line about the step, or the newest part of one whose length nobody knows."""
        own, *parts = self._progress.tasks
        newest = parts[-1] if parts and not own.total else own
        name = "" if newest is own else f"{newest.description.strip()} "
        share = f"{name}{newest.percentage:.0f} %, " if newest.total else ""
        say(f"{self.title}: {share}{time.monotonic() - self._began:.0f} s so far")

    def note(self, title: str) -> None:
        self.title = title
        self._progress.update(self._task, description=title)


@contextlib.contextmanager
def step(title: str, total: float | None = None, least_seconds: float = 0.0) -> Iterator[Step]:
    """Show progress while the body runs; end with one line that says how long it took.

    The line is left out where it took less than `least_seconds`.

    Without a terminal a line tells every LINE_SECONDS how far it is. Progress records of the SDK's
    stand-in show as further bars below this one, and in these lines.
    """
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    screen = Console(stderr=True)
    bars = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    with bars as progress:
        current = Step(title, progress, total)
        listener = _ProgressListener(progress)
        logger = logging.getLogger(PROGRESS_LOGGER)
        level, propagate = logger.level, logger.propagate
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        ended = threading.Event()
        if progress.disable:
            threading.Thread(target=_tell, args=(current, ended), daemon=True).start()
        try:
            yield current
        finally:
            ended.set()
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate
    took = time.monotonic() - started
    if took >= least_seconds:
        say(f"{current.title}: {took:.1f} s")


def _tell(step: Step, ended: threading.Event) -> None:
    while not ended.wait(LINE_SECONDS):
        step.tell()


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
