"""Processes of strangers' code, forked from this process's one fork server, and their end.

The server adopts their orphans (`limits.adopt_orphans` in its preloaded module), so that no child
outlives them, even outside of their process group.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from typing import Any

from . import limits
from .interpreter import started_safely

_turn = threading.Lock()
_running: set[int] = set()  # processes that have not been ended


def context(*modules: str) -> Any:
    """The context of the fork server, whose processes find `modules` imported already.

    Not on macOS: there PyTorch computes with Apple's libraries, which end a process that was forked
    after they had been loaded. Each process imports them itself.
    """
    made = multiprocessing.get_context("forkserver")
    ready = () if sys.platform == "darwin" else modules
    made.set_forkserver_preload(["neuron_cpu.sandbox.fork_server", *ready])
    return made


def start(process: Any) -> None:
    """Start a process of the fork server's context; from then on nobody looks into this one."""
    limits.close_memory()
    with _turn, started_safely():  # until it is known as running it would pass for an orphan
        process.start()
        _running.add(process.pid)


def end(process: Any) -> None:
    """Kill a process, its group and its orphans; it has nothing to clean up."""
    with _turn:
        _running.discard(process.pid)
        for kill in (os.killpg, os.kill):
            _quietly(kill, process.pid)
    process.join(5)
    with _turn:
        for orphan in set(limits.children(_server())) - _running:
            _quietly(os.kill, orphan)


class Processes:
    """Processes of one owner; `close` ends all, and no more can begin."""

    def __init__(self, context: Any) -> None:
        self._context, self._turn = context, threading.Lock()
        self._running: set[Any] = set()
        self._closed = False

    def start(self, target: Callable, *arguments: Any) -> Any:
        """A process that does `target`; an OSError once they are closed."""
        process = self._context.Process(target=target, args=arguments, daemon=True)
        with self._turn:
            if self._closed:
                raise OSError("no process begins any more")
            start(process)
            self._running.add(process)
        return process

    def end(self, process: Any) -> None:
        end(process)
        with self._turn:
            self._running.discard(process)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            running = list(self._running)
        for process in running:
            end(process)


def signal_name(number: int) -> str:
    """The name of a signal, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def close_others(kept: Collection[int]) -> None:
    """Leave a process no descriptor of the fork server or its starter to write to."""
    for descriptor in limits.descriptors():
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _quietly(kill: Any, process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(process, signal.SIGKILL)


def _server() -> int:
    """The fork server, which adopts orphans; 0 before it runs."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    return getattr(server, "_forkserver_pid", None) or 0
