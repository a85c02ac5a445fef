"""Evaluates prompts for another machine: the process beside a cluster's worker (see `spread`).

Tasks come pickled on standard input, answers go pickled to standard output, and what is printed
goes to standard error. A model stays compiled and loaded for the tasks that need it next.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import neuron_cpu
from harness.errors import UserError, is_refusal
from harness.figures.baseline import Case
from harness.inputs.models import checkpoint_identity
from harness.modes.evaluate import Evaluator
from harness.session.opening import Session, open_session
from harness.settings import Settings

PARENT_SECONDS = 1.0  # between two looks for the worker that this process serves


@dataclass(frozen=True)
class Task:
    """One prompt of one submission.

    Attributes:
        settings: of a session whose lengths are chosen.
        submission, sources: the file's name, and the texts of its own files, which travel.
        checkpoint: sizes of the model's files by name, which have to be there already.
        code: digest of this project's sources, which have to be the same there.
        environment: variables that results depend on.
    """

    settings: Settings
    submission: str
    sources: dict[str, bytes]
    checkpoint: dict[str, int]
    code: str
    environment: dict[str, str]
    case: Case

    def model(self) -> Task:
        """What tasks have in common that one loaded model serves."""
        return replace(self, case=Case(0, "", [], 0, None))


@dataclass(frozen=True)
class Outcome:
    """What became of a task: a result as JSON, or why the model could not be built."""

    result: Optional[dict[str, Any]] = None
    refusal: Optional[str] = None


def sizes_of(folder: Path) -> dict[str, int]:
    """File name -> bytes of a checkpoint; times and places differ from machine to machine."""
    identity = checkpoint_identity(folder)
    return {name: values[0] for name, values in identity.items() if name != "folder"}


class Evaluators:
    """The model that was asked for last, ready for the next prompt."""

    def __init__(self) -> None:
        self._model: Optional[Task] = None
        self._evaluator: Optional[Evaluator] = None
        self._refusal: Optional[str] = None
        self._folder = tempfile.TemporaryDirectory()

    def outcome(self, task: Task) -> Outcome:
        """Do a task; a model that cannot be built is refused for all its prompts."""
        if task.model() != self._model:
            self._model, self._evaluator, self._refusal = task.model(), None, None
            try:
                self._evaluator = Evaluator(self._session(task))
            except Exception as error:
                if not is_refusal(error):
                    raise
                self._refusal = str(error)
        if self._evaluator is None:
            return Outcome(refusal=self._refusal)
        case, rows = task.case, task.settings.batch_size
        result = self._evaluator.evaluate(
            case.index, [case.prompt] * rows, [case.ids] * rows, case.seq_len, case.row, _nothing
        )
        return Outcome(result.as_dict())

    def _session(self, task: Task) -> Session:
        folder = Path(self._folder.name)
        for name, text in task.sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
        entry = folder / task.submission
        session = open_session(replace(task.settings, llama=str(entry)), [])
        sizes = sizes_of(session.model.path)
        if sizes != task.checkpoint:
            raise UserError(
                f"The worker's model in {session.model.path} has other files than the one that "
                f"was asked for, expected {len(task.checkpoint)} of the same sizes; copy the "
                "model there under the same path."
            )
        return session


def _nothing() -> None:
    """Nobody watches the progress of one prompt."""


def _end_with(parent: int) -> None:
    """A worker that is killed takes this process along, and that its submissions."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def serve() -> None:
    """Answer one task after the other until the worker closes the connection."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    neuron_cpu.ensure_sdk()
    evaluators = Evaluators()
    with contextlib.suppress(EOFError):
        while True:
            task = pickle.load(sys.stdin.buffer)
            try:
                answer: Any = evaluators.outcome(task)
            except Exception as error:  # the worker raises it
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    from harness.experiments import remote  # what is pickled is of the module, not of this script

    remote.serve()
