"""The process of a stranger's kernel: loads the file, traces, estimates, runs, sends results.

It is confined before the file is imported. What it sends is plain: one JSON object a case, and
tensors as bytes, so that nothing of it can run anywhere else. Estimates are made here, because a
kernel's Python body has to run for them: a file that patches the simulator can forge its times.
"""

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .. import ensure_sdk
from ..core import Kernel, NkiError
from ..core.run.execute import Plan
from ..judge import verdict
from ..judge.cases import Case
from ..processes import forked, limits

KERNEL = "kernel"  # what an answer's function is called


def serve(
    replies: Connection,
    path: Path,
    cases: Sequence[Case],
    settings: verdict.Settings,
    bounds: limits.Limits,
) -> None:
    """Answer about every case; ends the process."""
    _be_silent()
    forked.close_others({replies.fileno()})
    limits.apply(bounds)
    limits.confine([])  # a kernel needs no files of its own
    torch.set_num_threads(1)
    ensure_sdk()
    try:
        kernel = _load(path)
        for case in cases:
            _answer(replies, kernel, case, settings)
    except BaseException as error:  # exits included: a stranger's file decides nothing
        _send(replies, {"failure": _sentence(error, path)})
    os._exit(0)


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


def _load(path: Path) -> Kernel:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    found = getattr(module, KERNEL, None)
    if not callable(found):
        raise LookupError(f"it has no function '{KERNEL}'")
    return found if isinstance(found, Kernel) else Kernel(found)


def _answer(replies: Connection, kernel: Kernel, case: Case, settings: verdict.Settings) -> None:
    """Send the estimate, then the results of every trial."""
    try:
        program = verdict.traced(kernel, case, settings.grid)
    except NkiError as error:
        _send(replies, {"refusal": str(error)})
        return
    speed = verdict.speed(program, settings)
    types = [str(t).removeprefix("torch.") for t in verdict.types_of(program)]
    _send(
        replies,
        {
            "speed": speed._asdict(),
            "types": types[len(program.inputs) :],
            "shapes": [list(shape) for shape in program.output_shapes],
        },
    )
    plan = Plan(program)
    for kind, seed in settings.trials():
        inputs = verdict.tensors_of(*case.values(kind, seed))
        for result in verdict.run(program, plan, inputs):
            replies.send_bytes(result.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _send(replies: Connection, content: dict[str, Any]) -> None:
    replies.send_bytes(json.dumps(content).encode())


def _sentence(error: BaseException, path: Path) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    place = f"{path.name}:{lines[-1]}" if lines else path.name
    return f"{place}: {type(error).__name__}: {error}"[:1000]
