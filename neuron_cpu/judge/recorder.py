"""The process of a stranger's file: it records a kernel and sends programs as plain data.

It gets shapes, types and constants. Values, seeds and references stay with the judge, whose own
process checks the programs anew, estimates and runs them. So an answer that patches the simulator,
the clock or the recorder in its process gets the verdict of what it has recorded.
"""

import gc
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .. import ensure_sdk
from ..core import NkiError
from ..core.check import verify
from ..core.device.errors import NkiAdvice, is_internal
from ..sandbox import foreign, forked, limits, records
from . import verdict
from .cases import Case

BY_VALUES = (
    "the kernel's control flow follows its arguments' values, which the judge keeps to itself, "
    "expected loops and conditions that shapes decide; select among results instead"
)
MOST_PROGRAM = 1 << 28  # bytes; the suite's own kernels have up to 310,000
MODULE = "judge: kernel"  # no name that a process has imported


@dataclass(frozen=True)
class Recording:
    """What that process gets.

    Attributes:
        file, function: where the kernel stands.
        cases: `Case.public` of each call.
        grid: of the launch.
        bounds: of the process.
        text: what stands in the place of the file, and has no neighbours if it is `alone`.
        modules: sources of modules that it imports, by name.
        arguments: further ones, as in a call.
        environment: variables, which name target and release.
    """

    file: Path
    function: str
    cases: Sequence[Case]
    grid: tuple[int, ...]
    bounds: limits.Limits
    text: str | None = None
    alone: bool = False
    modules: dict[str, str] = field(default_factory=dict)
    arguments: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def record(programs: Connection, asked: Recording) -> None:
    """Record the kernel on every case, a message each; ends the process."""
    confine(asked.bounds, programs)
    verify.later = True  # by the judge
    gc.disable()  # what it records stays to its end, and would be walked again and again
    os.environ.update(asked.environment)
    before = 0.0
    try:
        names = _names(asked)
        kernel = verdict.kernel_of(names, asked.function)
        named = tuple(eval(f"dict({asked.arguments})", vars(names)).items())
        for case in asked.cases:
            call = Case(case.positional, case.named + named).resolved(vars(names))
            told = _recorded(kernel, call, asked.grid)
            now = time.process_time()
            programs.send_bytes(records.dumped(told | {"seconds": now - before}))
            before = now
    except BaseException as error:  # exits included: a stranger's file decides nothing
        failure = _sentence(error, asked.file)
        programs.send_bytes(records.dumped({"failure": failure, "seconds": time.process_time()}))
    os._exit(0)


def confine(bounds: limits.Limits, *kept: Connection) -> None:
    forked.begin(bounds, *kept)
    limits.confine([])  # a kernel needs no files of its own
    torch.set_num_threads(1)
    ensure_sdk()


def worded(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """Warnings, mere advice so marked, with the line of the candidate that they are about."""
    said = []
    for one in told:
        kind = "advice, " if issubclass(one.category, NkiAdvice) else ""
        line = "" if is_internal(one.filename) else f"line {one.lineno}: "
        said.append(f"{kind}{line}{one.message}")
    return said


def _names(asked: Recording) -> Any:
    for name, source in asked.modules.items():
        foreign.imported(Path(f"{name}.py"), name, source)
    if not asked.alone:
        foreign.put_last(asked.file.resolve().parent)
    return foreign.imported(asked.file, MODULE, asked.text)


def _recorded(kernel: Any, case: Case, grid: tuple[int, ...]) -> dict[str, Any]:
    """The case's program, or the refusal."""
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            program = verdict.traced(kernel, case, grid)
    except NkiError as error:
        refusal = {"refusal": error.message, "identifier": error.identifier, "text": str(error)}
        return refusal | {"place": error.source or ""}
    program.warnings = worded(told)
    program.result_form = None  # a caller's classes; results are a list here
    return {"program": program}


def _sentence(error: BaseException, path: Path) -> str:
    """FILE:LINE of a stranger's file, the error's type and what it says."""
    found = foreign.place_of(error, [str(path)])
    place = f"{path.name}:{found[1]}" if found else path.name
    return f"{place}: {type(error).__name__}: {error}"[:1000]
