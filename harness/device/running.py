"""Processes that do one thing after the other beside the device, or beside the simulator.

A NeuronCore belongs to one process. `nki.benchmark` starts another one for it, so a process that
has used PyTorch/XLA ends before that. A process that hangs or dies is one result, and the next
request starts another one. Whatever compilers print goes to a file.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import neuron_cpu

# who may run beside each other: the simulator touches no device
BENCHMARK, XLA, SIMULATOR = "benchmark", "xla", "simulator"
DEVICES = (BENCHMARK, XLA)
ENDING_SECONDS = 20.0  # until a process that was asked to end is killed
MOST_WORDS = 600  # of an error: a compiler's can be megabytes


class Unanswered(Exception):
    """What became of a request instead of a result: `status`, and words about it."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class Workers:
    """Processes by role; at most one of them beside a device.

    Args:
        scratch: where compilers leave their files.
        target: the generation that the simulator stands for.
    """

    def __init__(self, scratch: Path, target: str) -> None:
        self._scratch, self._target = scratch, target
        self._running: dict[str, tuple[Any, Connection]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for role in list(self._running):
            self._end(role)

    def ask(self, role: str, do: str, given: Mapping[str, Any], limit: float) -> Any:
        """The result of ``module:function`` in a process of the role, within ``limit`` seconds.

        Raises:
            Unanswered: it raised (``refused``), took longer (``hung``), or its process ended.
        """
        process, pipe = self._started(role)
        try:
            pipe.send((do, dict(given)))
            if not pipe.poll(limit):
                self._end(role, at_once=True)
                raise Unanswered("hung", f"no answer within {limit:.0f} s")
            result, words = pipe.recv()
        except (EOFError, OSError):
            self._end(role, at_once=True)
            told = f"its process ended with status {process.exitcode}"
            raise Unanswered("died", told) from None
        if words:
            raise Unanswered("refused", words)
        return result

    def _started(self, role: str) -> tuple[Any, Connection]:
        if role not in self._running:
            for other in DEVICES if role in DEVICES else ():
                self._end(other)
            environment = {"NEURON_CPU": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": self._target}
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=_serve,
                args=(theirs, self._scratch, environment if role == SIMULATOR else {}),
            )
            process.start()
            theirs.close()
            self._running[role] = process, ours
        return self._running[role]

    def _end(self, role: str, at_once: bool = False) -> None:
        """End a process and what it has started: the device has to be free."""
        if role not in self._running:
            return
        process, pipe = self._running.pop(role)
        pipe.close()
        process.join(0 if at_once else ENDING_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # none where it died before it had a session
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _serve(pipe: Connection, scratch: Path, environment: Mapping[str, str]) -> None:
    """Answer requests until the other end is closed: (result, "") or (None, an error's words)."""
    os.setsid()
    os.environ.update(environment)
    os.chdir(scratch)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    neuron_cpu.ensure_sdk()
    while True:
        try:
            do, given = pipe.recv()
        except EOFError:
            return
        module, _, name = do.partition(":")
        try:
            pipe.send((getattr(importlib.import_module(module), name)(**given), ""))
        except Exception as error:  # a compiler may raise anything
            pipe.send((None, _words(error)))


def _words(error: BaseException) -> str:
    """What an error says, on one line, its end where it is long: compilers put the reason last."""
    told = " ".join("".join(traceback.format_exception_only(error)).split())
    plain = "".join(letter if letter.isprintable() else "?" for letter in told)
    return plain if len(plain) <= MOST_WORDS else f"... {plain[-MOST_WORDS:]}"
