"""``python -m neuron_cpu run SCRIPT ARGS...``: any script with the stand-in's SDK names in place.

The script sees what it would see from ``python SCRIPT ARGS...`` on a machine with the SDK: its own
arguments, its own folder first on `sys.path`, `__name__ == "__main__"`. Processes that it starts
get the names as well.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from . import SDK_ROOT, ensure_sdk
from .errors import UsageError

USAGE = "python -m neuron_cpu run SCRIPT ARGS..., or run -m MODULE ARGS..."


def run(arguments: Sequence[str]) -> None:
    """Run the script or module that `arguments` name; returns when it ends without an exit status.

    Raises:
        UsageError: there is no such script.
        SystemExit, and whatever the script raises: as it raises them.
    """
    if not arguments or arguments[0] == "-m" and len(arguments) == 1:
        raise UsageError(f"run names no script, expected {USAGE}; add one.")
    os.environ["NEURON_CPU"] = "1"  # who calls this asks for the stand-in, installed SDK or not
    print(ensure_sdk(), file=sys.stderr)  # the script's own output stays what it is
    _share_with_children()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _run_file(Path(arguments[0]), arguments[1:])


def _run_file(script: Path, arguments: Sequence[str]) -> None:
    if not script.is_file():
        raise UsageError(f"script {script} does not exist, expected a Python file; correct it.")
    launcher = os.getcwd()  # what `python -m` put first; a script finds its own folder there
    if launcher in sys.path:
        sys.path.remove(launcher)
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    # Not runpy.run_path, which would say the whole path in sys.argv[0]. The module stays in place
    # to the end: multiprocessing and pickle find the script's functions through it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script.resolve())
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), vars(module))


def _share_with_children() -> None:
    """Put the names on the path of Python processes to come: the SDK's first, this package last."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(SDK_ROOT), *filter(None, inherited), str(SDK_ROOT.parent.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
