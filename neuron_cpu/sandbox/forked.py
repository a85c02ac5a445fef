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
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from ..quoting import quoted
from . import limits
from .interpreter import started_safely, without_main
from .pipes import Pipe

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # of another form

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
    with (
        _turn,
        started_safely(),
        without_main(),
    ):  # until it is known as running it would pass for an orphan
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
        self.context, self._turn = context, threading.Lock()
        self._running: set[Any] = set()
        self._closed = False

    def start(self, target: Callable, *arguments: Any) -> Any:
        """A process that does `target`; an OSError once they are closed."""
        process = self.context.Process(target=target, args=arguments, daemon=True)
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


class Talk:
    """A process that does `target(TO IT if it `hears`, FROM IT, its OUTPUT if it `prints`,
    *arguments)`, and the pipes.

    Attributes:
        output: what it prints; whoever reads that closes it.
    """

    output: Connection

    def __init__(
        self,
        processes: Processes,
        target: Callable,
        *arguments: Any,
        hears: bool = False,
        prints: bool = False,
    ) -> None:
        self._processes = processes
        heard, theirs = processes.context.Pipe(duplex=False)
        self._ends, ends = [heard], [theirs]
        if hears:
            taken, said = processes.context.Pipe(duplex=False)
            self._ends, ends = [heard, said], [taken, theirs]
        if prints:
            self.output, printed = processes.context.Pipe(duplex=False)
            ends.append(printed)
        self.process = processes.start(target, *ends, *arguments)
        for end in ends:
            end.close()
        self.receive = Pipe(heard, self.process.sentinel).receive
        if hears:
            self.send = Pipe(said, self.process.sentinel).send

    def end(self) -> None:
        self._processes.end(self.process)
        for connection in self._ends:
            connection.close()


def begin(bounds: limits.Limits, *kept: Connection, output: Connection | None = None) -> None:
    """In the process itself: put it under limits and leave it no stream and no descriptor of the
    fork server or its starter but the connections that are `kept`; `output` is where it prints."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    prints = nowhere if output is None else output.fileno()
    for place, stream in enumerate((nowhere, prints, prints)):
        os.dup2(stream, place)
    if output is not None:
        output.close()
    for descriptor in limits.descriptors():
        if descriptor > 2 and descriptor not in {connection.fileno() for connection in kept}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    limits.apply(bounds)


def why(error: Exception, talk: Talk, bounds: limits.Limits, option: str) -> str:
    """The reason why a process that ended badly, or was late, gave no answer."""
    if isinstance(error, TimeoutError):
        return f"it took longer than {bounds.wall_seconds:.0f} s; {option} gives it more"
    if isinstance(error, MALFORMED):
        told = quoted(f"{type(error).__name__}: {error}", 200)
        return f"its process sent something else than results ({told})"
    return end_in_words(talk.process, bounds)


def end_in_words(process: Any, bounds: limits.Limits, option: str = "") -> str:
    """How a process has ended; `option` gives it more time."""
    process.join(5)
    code = process.exitcode
    if code is None:
        return "it closed its connection"
    if code >= 0:
        return f"its process ended with status {code} before it answered"
    name = _signal_name(-code)
    if name == "SIGXCPU":
        more = f"; {option} changes that" if option else ""
        return f"it used the {bounds.cpu_seconds} s of processor time that it may use{more}"
    return f"its process was ended by {name}"


def _signal_name(number: int) -> str:
    """The name of a signal, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _quietly(kill: Any, process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(process, signal.SIGKILL)


def _server() -> int:
    """The fork server, which adopts orphans; 0 before it runs."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    return getattr(server, "_forkserver_pid", None) or 0
