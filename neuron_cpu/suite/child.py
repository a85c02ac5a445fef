"""The two processes of an answer: one runs its file and records, the other judges the record.

Both are confined. The first has the stranger's code and sends programs as plain data. The second
imports none of it: it checks the programs anew, estimates and runs them. So an answer that patches
the simulator, the clock or the recorder in its process gets the verdict of what it has recorded.
"""

import json
import os
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
from ..quoting import all_quoted
from ..sandbox import foreign, forked, limits, records

BY_VALUES = (
    "the kernel's control flow follows its arguments' values, which the judge keeps to itself, "
    "expected loops and conditions that shapes decide; select among results instead"
)
MOST_PROGRAM = 1 << 28  # bytes; the suite's own kernels have up to 310,000


def record(
    programs: Connection,
    path: Path,
    function: str,
    cases: Sequence[Case],
    grid: tuple[int, ...],
    bounds: limits.Limits,
) -> None:
    """The answer's own process: record its kernel on every case; ends the process.

    It knows shapes, types and constants. Seeds and references are the judge's.
    """
    confine(bounds, programs)
    try:
        kernel = _load(path, function)
        for case in cases:
            try:
                program = verdict.traced(kernel, case, grid)
                _tell(programs, {"program": program})
            except NkiError as error:
                _tell(programs, {"refusal": str(error)})
    except BaseException as error:  # exits included: a stranger's file decides nothing
        _tell(programs, {"failure": sentence(error, path)})
    os._exit(0)


def serve(
    programs: Connection,
    replies: Connection,
    cases: Sequence[Case],
    settings: verdict.Settings,
    bounds: limits.Limits,
    core: str | None,
    least_ns: float,
) -> None:
    """The judge's process, in which no answer runs: check, estimate and run the records, for the
    generation `core` if one is named; ends the process. The last case takes `least_ns` or more."""
    confine(bounds, programs, replies)
    try:
        for case in cases:
            least = least_ns if case is cases[-1] else 0.0
            if not _answer(programs, replies, case, settings, core, least):
                break
    except EOFError:
        pass  # the judge sees how the other process has ended
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"[:200]
        _send(replies, {"failure": f"its process sent something else than a program ({told})"})
    os._exit(0)


def confine(bounds: limits.Limits, *kept: Connection) -> None:
    forked.begin(bounds, *kept)
    limits.confine([])  # a kernel needs no files of its own
    torch.set_num_threads(1)
    ensure_sdk()


def _load(path: Path, function: str) -> Kernel:
    foreign.put_last(path.parent)
    return verdict.kernel_of(foreign.imported(path, path.stem), function)


def _answer(
    programs: Connection,
    replies: Connection,
    case: Case,
    settings: verdict.Settings,
    core: str | None,
    least_ns: float,
) -> bool:
    """Send the estimate and the results of every trial; whether another case may follow."""
    told = records.loaded(programs.recv_bytes(MOST_PROGRAM))
    if "program" not in told:
        word = "refusal" if "refusal" in told else "failure"
        _send(replies, {word: str(told[word])[:10_000]})
        return word == "refusal"
    try:
        program = records.program(told, verdict.asked_for(case, settings.grid))
    except NkiError as error:
        _send(replies, {"refusal": str(error)})
        return True
    if program.for_values:
        _send(replies, {"refusal": BY_VALUES})
        return True
    if core not in (None, program.core.name):
        raise ValueError(
            f"a kernel for {program.core.name}, expected {core}, as the suite's own is timed"
        )
    speed = verdict.speed(program, settings)
    verdict.hold_above(program, speed.time_ns, least_ns)
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
        try:
            results = verdict.run(program, plan, inputs)
        except NkiError as error:  # what only values tell
            _send(replies, {"refusal": str(error)})
            return True
        _send(replies, {})
        for result in results:
            replies.send_bytes(result.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return True


def _tell(programs: Connection, content: dict[str, Any]) -> None:
    programs.send_bytes(records.dumped(content))


def _send(replies: Connection, content: dict[str, Any]) -> None:
    replies.send_bytes(json.dumps(all_quoted(content)).encode())


def sentence(error: BaseException, path: Path) -> str:
    """FILE:LINE of a stranger's file, the error's type and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    place = f"{path.name}:{lines[-1]}" if lines else path.name
    return f"{place}: {type(error).__name__}: {error}"[:1000]
