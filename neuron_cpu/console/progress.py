"""Progress of long steps, as logging records that a driver may render.

Each record goes to the logger `neuron_cpu.progress` at level INFO and carries an attribute
`progress = {"task": str, "done": int, "total": int}`. Nobody needs to import this module to
listen: a handler on that logger is enough, and without one the records go nowhere.
"""

import logging

LOGGER_NAME = "neuron_cpu.progress"
_logger = logging.getLogger(LOGGER_NAME)


def report(task: str, done: int, total: int) -> None:
    """Say that `done` of `total` parts of `task` are finished (the first record has done = 0)."""
    _logger.info("%s: %d/%d", task, done, total, extra={"progress": progress(task, done, total)})


def progress(task: str, done: int, total: int) -> dict[str, str | int]:
    """The structured half of a progress record."""
    return {"task": task, "done": done, "total": total}
