"""Interpreters that this program starts look for modules where it does, and in no working folder.

`python -c` and `python -m` look in the working folder first, and that may be a stranger's: a
`typing_extensions.py` there would run. Python 3.11 has -P against that, Python 3.10 nothing. So the
first statement of every interpreter replaces its path, before it imports anything.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
_turn = threading.RLock()
_multiprocessing: Any = util
_spawn: Any = spawn


def paths() -> list[str]:
    """The places of `sys.path` without the working folder, unless this program stands there."""
    here = Path.cwd()
    return [
        place
        for place in sys.path
        if os.path.isabs(place) and (Path(place) != here or here == _ROOT)
    ]


def command(*arguments: str) -> list[str]:
    """``python ARGUMENTS``, which are -c CODE or -m MODULE and what follows."""
    word, what, *more = arguments
    code = {"-c": what, "-m": f"import runpy; runpy.run_module({what!r}, None, '__main__', True)"}
    return [sys.executable, *_first(), "-c", code[word], *more]


@contextlib.contextmanager
def started_safely() -> Iterator[None]:
    """What multiprocessing starts in the body (fork server, tracker, process) begins as above."""
    with _turn:
        flags, before = _multiprocessing._args_from_interpreter_flags, sys.path[:]
        _multiprocessing._args_from_interpreter_flags = lambda: [*flags(), *_first()]
        sys.path[:] = paths()  # which a process takes over
        try:
            yield
        finally:
            sys.path[:] = before
            _multiprocessing._args_from_interpreter_flags = flags


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """What multiprocessing starts in the body does not import the program's main module first, of
    which it needs nothing: that of a cluster's worker takes 0.6 s."""
    with _turn:
        prepared = _spawn.get_preparation_data
        _spawn.get_preparation_data = lambda name: {
            key: value for key, value in prepared(name).items() if not key.startswith("init_main")
        }
        try:
            yield
        finally:
            _spawn.get_preparation_data = prepared


def _first() -> list[str]:
    """A statement before that of a second -c, which Python itself would take for an argument."""
    return ["-c", f"import sys; sys.path[:] = {paths()!r}; del sys.argv[1]; exec(sys.argv.pop(1))"]
