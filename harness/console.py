"""Status lines and progress on standard error; standard output is for results only."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

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

LINE_SECONDS = 10.0  # between progress lines where there is no terminal for a bar
STILL_SECONDS = 20.0  # without such a line, after which one says that the step goes on


def say(text: str) -> None:
    """One status line, whatever characters are in it."""
    print(terminal.folded(terminal.printable(text), sys.stderr), file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """A path for the terminal, `~` for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if home in path.parents else str(path)


class Step:
    """A long step: `advance` moves its bar; `note` changes what the closing line says."""

    def __init__(self, title: str, progress: Progress, total: Optional[float]) -> None:
        self.title = title
        self._progress = progress
        self._task = progress.add_task(title, total=total)
        self._began = self._said = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)
        self.tell(self._progress.tasks[0].percentage)

    def tell(self, share: float, part: str = "") -> None:
        """A line about percents of the step, or of a part, where there is no bar."""
        late = time.monotonic() - self._said > LINE_SECONDS
        if self._progress.disable and late and share < 100:  # a repeated part goes beyond
            self._said = time.monotonic()
            say(f"{self.title}: {part}{share:.0f} %")

    def still(self) -> None:
        """A line that the step goes on, where none has told so for long."""
        now = time.monotonic()
        if self._progress.disable and now - self._said >= STILL_SECONDS:
            self._said = now
            known = self._progress.tasks[0].total is not None
            share = f"{self._progress.tasks[0].percentage:.0f} %, " if known else ""
            say(f"{self.title}: {share}{now - self._began:.0f} s so far")

    def note(self, title: str) -> None:
        self.title = title
        self._progress.update(self._task, description=title)


@contextlib.contextmanager
def step(title: str, total: Optional[float] = None, least_seconds: float = 0.0) -> Iterator[Step]:
    """Show progress while the body runs; end with one line that says how long it took.

    The line is left out where it took less than `least_seconds`.

    Without a terminal a line tells every LINE_SECONDS how far it is, and another one that it still
    runs where nothing ends for long. Progress records of the SDK's stand-in show as further bars
    below this one, and in these lines.
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
        listener = _ProgressListener(progress, current)
        logger = logging.getLogger(PROGRESS_LOGGER)
        level, propagate = logger.level, logger.propagate
        logger.addHandler(listener)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        ended = threading.Event()
        threading.Thread(target=_tell_still, args=(current, ended), daemon=True).start()
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


def _tell_still(step: Step, ended: threading.Event) -> None:
    while not ended.wait(STILL_SECONDS / 4):
        step.still()


class _ProgressListener(logging.Handler):
    """Renders the progress records of the SDK's stand-in, one bar for each task."""

    def __init__(self, progress: Progress, step: Step) -> None:
        super().__init__()
        self._progress, self._step = progress, step
        self._bars: dict[str, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        state = getattr(record, "progress", None)
        if not isinstance(state, dict):
            return
        task = str(state["task"])
        if task not in self._bars:
            self._bars[task] = self._progress.add_task(f"  {task}", total=state["total"])
        self._progress.update(self._bars[task], completed=state["done"], total=state["total"])
        if state["total"]:
            self._step.tell(100 * state["done"] / state["total"], f"{task} ")
