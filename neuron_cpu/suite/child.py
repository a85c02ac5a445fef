"""The judge's process of an answer, in which no answer runs: it checks, estimates and runs what
the answer's process has recorded (`judge.recorder`)."""

import json
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Optional

import torch

from ..core import NkiError
from ..core.run.execute import Plan
from ..judge import recorder, verdict
from ..judge.cases import Case
from ..quoting import all_quoted
from ..sandbox import limits, records


def serve(
    programs: Connection,
    replies: Connection,
    cases: Sequence[Case],
    settings: verdict.Settings,
    bounds: limits.Limits,
    core: Optional[str],
    least_ns: float,
) -> None:
    """Judge a record of each case, for the generation `core` if one is named; ends the process. The
    last case takes `least_ns` or more."""
    recorder.confine(bounds, programs, replies)
    try:
        for case in cases:
            least = least_ns if case is cases[-1] else 0.0
            if not _answer(programs.recv_bytes(), replies, case, settings, core, least):
                break
    except EOFError:
        pass  # the judge sees how the other process has ended
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"[:200]
        _send(replies, {"failure": f"its process sent something else than a program ({told})"})
    os._exit(0)


def _answer(
    recorded: bytes,
    replies: Connection,
    case: Case,
    settings: verdict.Settings,
    core: Optional[str],
    least_ns: float,
) -> bool:
    """Send the estimate and the results of every trial; whether another case may follow."""
    told = records.loaded(recorded)
    if "program" not in told:
        refused = "refusal" in told
        said = str(told["text" if refused else "failure"])[:10_000]
        _send(replies, {"refusal" if refused else "failure": said})
        return refused
    try:
        program = records.program(told, verdict.asked_for(case, settings.grid))
    except NkiError as error:
        _send(replies, {"refusal": str(error)})
        return True
    if program.for_values:
        _send(replies, {"refusal": recorder.BY_VALUES})
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


def _send(replies: Connection, content: dict[str, Any]) -> None:
    replies.send_bytes(json.dumps(all_quoted(content)).encode())
