"""The driver: compile Llama for Neuron and generate; `python main.py --help` lists the modes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Optional

import neuron_cpu
from harness import console
from harness.errors import is_refusal
from harness.inputs import command_line

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C
READER_GONE = 141  # what it reports where `| head` has closed the pipe


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one mode; returns the exit status: 0, 1 where a check failed, 2 for bad input."""
    debug = "--debug" in (sys.argv if argv is None else argv)
    try:
        settings = command_line.parse(argv)
        console.say(neuron_cpu.ensure_sdk())
        _quieten_libraries()
        name = command_line.ALIASES.get(settings.mode, settings.mode)
        status = importlib.import_module(f"harness.modes.{name}").run(settings)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        console.say("main.py: Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # Python would write a traceback when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:
        if not is_refusal(error):
            raise
        if debug:
            traceback.print_exc()
        console.say(f"main.py: {' '.join(str(error).split())}")
        return 2


def _quieten_libraries() -> None:
    """Advice of transformers that means nothing for a Neuron model stays off the terminal."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")


if __name__ == "__main__":
    sys.exit(main())
