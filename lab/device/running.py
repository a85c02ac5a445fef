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
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import neuron_cpu
from neuron_cpu.quoting import quoted
from neuron_cpu.sandbox import limits
from neuron_cpu.sandbox.interpreter import started_safely

# Who may run beside each other: the simulator touches no device. A kernel without [2] runs on one
# core. On Trainium2 and 3 two are one by default, and the runtime refuses what was made for another
# number (aws-neuron-sdk v2.32.0, nki/api/nki/__init__.py), so kernels with [2] have a role.
BENCHMARK, XLA, PAIR, SIMULATOR = "benchmark", "xla", "pair", "simulator"
DEVICES = (BENCHMARK, XLA, PAIR)
HUNG, DIED = "hung", "died"
MOST_WORDS = 600  # of an error: a compiler's can be megabytes


class Unanswered(Exception):
    """The outcome of a request without a result: `status`, and words about it."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class Workers(contextlib.AbstractContextManager["Workers"]):
    """Processes by role, at most one of them beside a device; `target` is what the simulator
    stands for, and compilers leave their files in `scratch`."""

    def __init__(self, scratch: Path, target: str) -> None:
        self._scratch, self._target = scratch, target
        self._running: dict[str, tuple[ProcessPoolExecutor, int]] = {}

    def __exit__(self, *_: object) -> None:
        self._end(*self._running)

    def ask(self, role: str, do: str, given: Mapping[str, Any], limit: float) -> Any:
        """The result of ``module:function`` in a process of the role, within ``limit`` seconds.

        Raises:
            Unanswered: it raised (``refused``), took longer (``hung``), or its process ended.
        """
        try:
            if role not in self._running:
                self._start(role)
            done = self._running[role][0].submit(_do, do, dict(given))
            result, *unanswered = done.result(limit)
        except TimeoutError:
            self._end(role)
            raise Unanswered(HUNG, f"no answer within {limit:.0f} s") from None
        except BrokenProcessPool:
            self._end(role)
            raise Unanswered(DIED, "its process ended") from None
        if unanswered:
            raise Unanswered(*unanswered)
        return result

    def _start(self, role: str) -> None:
        if role in DEVICES:
            self._end(*(other for other in DEVICES if other in self._running))
        environment = {"NEURON_PLATFORM_TARGET_OVERRIDE": self._target}
        environment["NEURON_LOGICAL_NC_CONFIG"] = "2" if role == PAIR else "1"
        given = self._scratch, environment | ({"NEURON_CPU": "1"} if role == SIMULATOR else {})
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=given)
        with started_safely():
            self._running[role] = pool, pool.submit(os.getpid).result()

    def _end(self, *roles: str) -> None:
        """End processes and what they have started: the device has to be free."""
        for role in roles:
            pool, pid = self._running.pop(role)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            pool.shutdown()


def _begin(scratch: Path, environment: Mapping[str, str]) -> None:
    """A session of its own, whose members end together; the device is free when the driver dies."""
    os.setsid()
    limits.end_with_parent()
    os.environ.update(environment)
    os.chdir(scratch)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    neuron_cpu.ensure_sdk()


def _do(do: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A function's result alone, or None, the status and what its error says: on one line, and the
    end where it is long, as compilers put the reason last."""
    module, _, name = do.partition(":")
    try:
        return (getattr(importlib.import_module(module), name)(**given),)
    except Unanswered as error:
        return None, error.status, _plain(str(error))
    except Exception as error:  # a compiler may raise anything
        return None, "refused", _plain("".join(traceback.format_exception_only(error)))


def _plain(told: str) -> str:
    plain = quoted(" ".join(told.split()), len(told))
    return plain if len(plain) <= MOST_WORDS else f"... {plain[-MOST_WORDS:]}"
