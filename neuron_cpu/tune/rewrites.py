"""Candidates that a script writes: it reads each answer, and writes the next source."""

import contextlib
import json
import os
import shlex
import subprocess
from collections.abc import Callable

from ..errors import UsageError
from .search import Oracle, Task, Trial, attempt


class Rewrites:
    """The unchanged kernel and up to `most` rewrites.

    The script reads `{"source": ..., "answer": ...}` of the last candidate, a JSON line each, and
    writes `{"source": ...}` for the next one. It ends the search with its output.

    Args:
        done: told of each trial.
    """

    def __init__(
        self, oracle: Oracle, task: Task, command: str, most: int, done: Callable[[Trial], object]
    ) -> None:
        self.oracle, self.task, self.command = oracle, task, command
        self.most, self.done, self.trials = most, done, list[Trial]()

    def run(self) -> None:
        """Judge the script's candidates; `trials` has the known ones when it ends.

        Raises:
            UsageError: the script cannot be started, fails, or writes something else.
        """
        line, pipe, code = "", subprocess.PIPE, self.task.source.at({})
        try:
            command = shlex.split(self.command)
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as script:
                assert script.stdin is not None and script.stdout is not None
                for number in range(self.most + 1):
                    trial = attempt(self.oracle, self.task, {"candidate": number}, (), code)
                    told = {"source": code["source"], "answer": trial.answer}
                    trial.answer = trial.answer | {"source": code["source"]}
                    self.trials.append(trial)
                    self.done(trial)
                    with contextlib.suppress(BrokenPipeError):  # it may have written and ended
                        os.write(script.stdin.fileno(), json.dumps(told).encode() + b"\n")
                    line = script.stdout.readline() if number < self.most else ""
                    if not line:
                        break
                    code["source"] = str(json.loads(line)["source"])
            if script.returncode:
                raise ValueError(f"and ended with status {script.returncode}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"--rewrite {self.command} wrote {line[:80]!r} ({error}), expected lines "
                '{"source": ...} of JSON; correct the script.'
            ) from error
