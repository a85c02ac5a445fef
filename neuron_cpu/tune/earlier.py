"""Points that an earlier search has tried: read from its --json, if it was of the same task."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .search import Task, Trial


def identity(task: Task) -> dict[str, str]:
    """The inputs of a point's figures besides its values, by name: two searches have one task where
    these are equal."""
    named = {"kernel": (task.source.path, task.source.kernel)}
    if task.reference is not None:
        named["reference"] = task.reference
    files = {
        role: f"{path.name}:{name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        for role, (path, name) in named.items()
    }
    settings = task.settings
    return {
        "kernel": files["kernel"],
        "reference": files.get("reference", "none"),
        "arguments": ", ".join(map(str, task.cases)),
        "values": f"{','.join(settings.kinds)}, tolerance {settings.tolerance}",
        "grid": "x".join(map(str, settings.grid)) or "none",
    }


def trials(path: Path, task: Task, space: dict[str, list[Any]]) -> list[Trial]:
    """The trials in a file of `tune --json` whose points lie in a space; none without the file.

    Raises:
        UsageError: the file is of another task, or not of a search.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        was, saved = dict(content["task"]), [Trial(**one) for one in content["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} has no points of a search, expected a file that tune --json wrote; name "
            "another, or delete it."
        ) from error
    for what, now in identity(task).items():
        if was.get(what) != now:
            raise UsageError(
                f"{path} is of another task: {what} {was.get(what)}, expected {now}; leave "
                "--resume, or name another file."
            )
    found = []
    for trial in saved:
        point = {
            name: next((v for v in values if str(v) == str(trial.point.get(name))), None)
            for name, values in space.items()
        }
        if len(point) == len(trial.point) and None not in point.values():
            trial.point = point
            found.append(trial)
    return found
