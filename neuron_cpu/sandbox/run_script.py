"""``python -m neuron_cpu run SCRIPT ARGS...``: any script with the stand-in's SDK names in place.

The script runs as under ``python SCRIPT ARGS...`` on a machine with the SDK: its own arguments, its
own folder first on `sys.path`, `__name__ == "__main__"`. Processes that it starts get the names as
well.
"""

import functools
import importlib.util
import os
import re
import runpy
import sys
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from .. import ROOTS, announce, install, libraries
from ..errors import UsageError
from .foreign import meant

USAGE = "run SCRIPT ARGS..., or run -m MODULE ARGS..."
# Before the script: a page or .json of what it did on PyTorch's device `neuron`, and functions to
# compare its kernels with (KERNEL=MODULE:FUNCTION). Each may be given several times.
OPTIONS = ("--report", "--without")
PROGRAMS = {  # that others start a script with
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "python3": "python",
}
LAUNCHERS = (str(Path(__file__).parents[1] / "__main__.py"), __file__, "<frozen runpy>")


def missing(error: BaseException) -> list[str]:
    """A sentence about a package that the real libraries import and this Python lacks, PyTorch's
    other devices, or a file that the 2026 contest's test.py reads and its repository lacks."""
    if told := libraries.lacking(error):
        return [f"{told}."]
    if type(error).__name__ == "InvalidBackend":
        return ['Trainium\'s backend of torch.compile is neuron; write backend="neuron".']
    if re.search(
        "compiled with CUDA|requires CUDA|support for xla|start of device string", str(error)
    ):
        said = "'neuron', and .to('neuron') for .cuda()"
        return [f"Trainium is PyTorch's device neuron here, expected that name; write {said}."]
    if not isinstance(error, FileNotFoundError) or error.filename != "prompt_data.txt":
        return []
    return [
        "prompt_data.txt is missing, expected a line of base times for each prompt; copy "
        "prompt_data_trn2.csv or prompt_data_trn3.csv of aws-neuron/nki-moe to this name."
    ]


def from_scripts_line(error: BaseException) -> types.TracebackType | None:
    """The traceback from the script's first line on; of what the simulator refuses the user's lines
    alone. All of it where no line is the script's."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(LAUNCHERS):
        at = at.tb_next
    core = sys.modules.get("neuron_cpu.core.device.errors")
    if at is None or core is None or not type(error).__module__.startswith("neuron_cpu.core"):
        return at or error.__traceback__
    return core.users_frames(error.with_traceback(at))


def run(arguments: Sequence[str]) -> None:
    """Run the script or module that `arguments` name; returns when it ends without an exit status.

    Raises:
        UsageError: there is no such script.
        SystemExit, and whatever the script raises: as it raises them.
    """
    reports, without, arguments = _options(arguments)
    if not arguments or arguments[0] == "-m" and len(arguments) == 1:
        raise UsageError(f"run names no script, expected {USAGE}; add one.")
    # Who calls this asks for the stand-in, installed SDK or not. Its line goes where the script's
    # own output does not.
    print(install(), file=sys.stderr)
    sys.meta_path.insert(0, HookTaken())
    _forget_launcher()
    with _recorded(reports, without) if reports else nullcontext():
        _run(arguments)


def _options(arguments: Sequence[str]) -> tuple[list[str], list[str], Sequence[str]]:
    """The values of each option, and what follows them."""
    given: dict[str, list[str]] = {name: [] for name in OPTIONS}
    while arguments and arguments[0] in OPTIONS:
        name, value, *arguments = [*arguments, ""] if len(arguments) == 1 else arguments
        if not value:
            raise UsageError(f"{name} has no value, expected one behind it; add it.")
        if value.endswith(".py"):
            raise UsageError(f"{name} {value} is a script; write {name} page.html {value}.")
        given[name].append(value)
    reports, without = given.values()
    if without and not reports:
        raise UsageError("--without without a report, expected --report PATH; add it.")
    return reports, without, arguments


def _recorded(reports: Sequence[str], without: Sequence[str]) -> AbstractContextManager[None]:
    """Watch the script; the device's room is loaded for that alone."""
    for path in reports:
        if not Path(path).resolve().parent.is_dir():
            raise UsageError(f"--report {path} is in no folder that exists; create it.")
    return announce.room("report").recorded(reports, without)


def _run(arguments: Sequence[str]) -> None:
    name = PROGRAMS.get(arguments[0], arguments[0])
    if not Path(name).exists() and name.split(".")[0].isidentifier():
        if name == "python":
            return _run(arguments[1:])
        if importlib.util.find_spec(name.split(".")[0]):
            arguments = ["-m", name, *arguments[1:]]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        if arguments[1].endswith(".py"):
            raise UsageError(
                f"-m {arguments[1]} is a file, expected a module; write run {arguments[1]}."
            )
        if importlib.util.find_spec(arguments[1].partition(".")[0]) is None:
            raise UsageError(
                f"module {arguments[1]} does not exist, expected one that Python finds here; "
                "correct it."
            )
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _run_file(Path(arguments[0]), arguments[1:])


class HookTaken(MetaPathFinder):
    """NxDI 0.7 to 0.9 hand on a hook that their adapter does not define and their models do not
    take (v0.7.14366, utils/hf_adapter.py). Where the adapter is imported, both learn of it."""

    adapter, hook = "neuronx_distributed_inference.utils.hf_adapter", "tensor_capture_hook"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.adapter:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._teach(module, load(module))
        return spec

    def _teach(self, adapter: Any, _: None) -> None:
        from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM as model

        if hasattr(adapter, self.hook):
            return
        forward: Any = model.forward

        @functools.wraps(forward)
        def without(*args: Any, **given: Any) -> Any:
            given.pop(self.hook, None)
            return forward(*args, **given)

        adapter.tensor_capture_hook, model.forward = None, without


def _run_file(script: Path, arguments: Sequence[str]) -> None:
    if not os.path.isfile(script):  # whatever name it has
        lacks = "is a folder" if script.is_dir() else "does not exist"
        mend = meant(script)
        if str(script).startswith("-"):
            mend = f"options of run are {' and '.join(OPTIONS)}, and others follow the script"
        elif os.path.isfile(str(script).rpartition(":")[0]):
            mend = f"a kernel alone is for neuron_cpu check {script}, or profile"
        raise UsageError(f"script {script} {lacks}, expected a Python file; {mend}.")
    if script.suffix == ".ipynb":
        raise UsageError(
            f"script {script} is a notebook, expected a Python file; run it with jupyter nbconvert "
            f"--to notebook --execute {script}, or write one with --to python."
        )
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"script {script} is no Python ({error}), expected a Python file; mend it first."
        ) from error
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
    # Not runpy.run_path, which would say the whole path in sys.argv[0]. The module stays in place
    # to the end: multiprocessing and pickle find the script's functions through it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script.resolve())
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _forget_launcher() -> None:
    """Take what started this command off the path; scripts find their own folder in that place.

    `python -m` puts the working folder there, a console command the folder that it is in.
    """
    first = next((path for path in sys.path if path not in ROOTS), None)
    if first in (os.getcwd(), str(Path(sys.argv[0]).resolve().parent)):
        sys.path.remove(first)
