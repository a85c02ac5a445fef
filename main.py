"""The driver: compile Llama for Neuron and generate; `python main.py --help` lists the modes."""

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

_on_interrupt = signal.getsignal(signal.SIGINT)
if _on_interrupt is signal.default_int_handler:  # no traceback out of the imports below
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if sys.version_info < (3, 10):  # noqa: UP036 - who starts it may have any
    sys.exit(f"main.py: expected Python 3.10 or newer, got {sys.version.split()[0]}; take another.")
try:
    import neuron_cpu
    from harness import console
    from harness.errors import UserError, is_refusal, words_of
    from harness.inputs import command_line
    from neuron_cpu import files, libraries
    from neuron_cpu.console import streams
except ModuleNotFoundError as error:
    sys.exit(f"main.py: {error}, expected what README names; pip install {error.name}.")
signal.signal(signal.SIGINT, _on_interrupt)
INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C
TERMINATED = 143  # what it reports for a process ended by SIGTERM
AGAIN_SECONDS = 2.0  # until an end that somebody has swallowed is raised again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode; returns the exit status: 0, 1 where a check failed, 2 for bad input."""
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        _write_what_the_encoding_lacks()
        return _run(argv)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            if sys.stdout.isatty():
                print()  # generated text may stand in an open line
        _say(f"{command_line.program()}: Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        streams.abandon()
        return streams.READER_GONE
    except Exception as error:
        if not is_refusal(error) and not isinstance(error, (OSError, MemoryError)):
            raise
        if debug:
            traceback.print_exc()
        told = words_of(error)
        if isinstance(error, OSError) and not is_refusal(error):
            told = files.told(error)
        _say(f"{command_line.program()}: {told}")
        streams.abandon()
        return 2


def _run(argv: Sequence[str] | None) -> int:
    """Run the mode."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and processes != "1":
        raise UserError(
            f"A launcher has started {processes} processes, expected one, which runs all ranks; "
            f"start main.py by itself, with --tp-degree {processes}."
        )
    settings = command_line.parse(argv)
    if settings.libraries:
        os.environ[libraries.VARIABLE] = os.pathsep.join(map(str, settings.libraries))
    console.say(neuron_cpu.ensure_sdk())
    _quieten_libraries()
    status = importlib.import_module(command_line.module_of(settings)).run(settings)
    sys.stdout.flush()
    return status


def _write_what_the_encoding_lacks() -> None:
    """Characters that standard output cannot encode come out as escapes, not as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        console.say(text)


def _quieten_libraries() -> None:
    """Advice of transformers that means nothing for a Neuron model stays off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("NXD_LOG_LEVEL", "error")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")


def script(argv: Sequence[str] | None = None) -> int:
    """`main` as a process of its own, which SIGTERM and Ctrl-C end in order."""
    streams.open_closed()
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = _told_unless_it_comes_again
    try:
        return main(argv)
    finally:  # nothing is left to interrupt
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)


def _end(number: int, _: object) -> NoReturn:
    """End as an error would, so that progress bars give the cursor back.

    `timeout` signals the process and then its group: the second signal must not end the clean-up.
    """
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = SystemExit(TERMINATED) if number == signal.SIGTERM else KeyboardInterrupt()
    signal.signal(signal.SIGALRM, lambda *_: _end_again(end))
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
    raise end


def _told_unless_it_comes_again(found: Any) -> None:
    """An end that is raised inside of a garbage collector's callback is lost."""
    if not isinstance(found.exc_value, (SystemExit, KeyboardInterrupt)):
        sys.__unraisablehook__(found)


def _end_again(end: BaseException) -> None:
    """Code that catches everything, as in imports of libraries, swallows an end, too."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            return  # it is on its way, and something is being put in order
        error = error.__context__
    raise end


if __name__ == "__main__":
    sys.exit(script())
