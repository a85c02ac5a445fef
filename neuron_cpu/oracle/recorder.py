"""The process of one candidate: it runs the stranger's file and sends what it records, as data."""

import gc
import os
import time
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..core import NkiError
from ..core.check import verify
from ..core.device.errors import NkiAdvice, is_internal
from ..core.device.release import NKI_VARIABLE
from ..core.device.target import ENVIRONMENT_VARIABLE
from ..judge import cases, verdict
from ..sandbox import foreign, records
from ..suite import child
from .forms import Request

FILE = "candidate.py"  # what messages call a source without a file
MODULE = "oracle: kernel"  # no name that a process has imported


def record(programs: Connection, text: str, request: Request) -> None:
    """Record the kernel of `text` on every case; ends the process."""
    child.confine(request.limits.limits(), programs)
    verify.later = True  # by the judge
    gc.disable()  # what it records stays to its end, and would be walked again and again
    for name, value in ((ENVIRONMENT_VARIABLE, request.target), (NKI_VARIABLE, request.release)):
        if value is not None:
            os.environ[name] = value
    code, before = request.kernel, 0.0
    file = code.file or FILE
    try:
        for name, source in code.modules.items():
            foreign.imported(Path(f"{name}.py"), name, source)
        if code.file is not None:
            foreign.put_last(Path(file).resolve().parent)
        module = foreign.imported(Path(file), MODULE, text)
        kernel = verdict.kernel_of(module, code.name)
        named = tuple(eval(f"dict({code.arguments})", vars(module)).items())
        for text in request.cases:
            case = cases.case(text)
            case = cases.Case(case.positional, case.named + named).resolved(vars(module))
            told = _recorded(kernel, case, request)
            now = time.process_time()
            programs.send_bytes(records.dumped(told | {"seconds": now - before}))
            before = now
    except BaseException as error:  # exits included: a stranger's file decides nothing
        failure = child.sentence(error, Path(file))
        programs.send_bytes(records.dumped({"failure": failure, "seconds": time.process_time()}))
    os._exit(0)


def worded(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """Warnings, mere advice so marked, with the line of the candidate that they are about."""
    said = []
    for one in told:
        kind = "advice, " if issubclass(one.category, NkiAdvice) else ""
        line = "" if is_internal(one.filename) else f"line {one.lineno}: "
        said.append(f"{kind}{line}{one.message}")
    return said


def _recorded(kernel: Any, case: cases.Case, request: Request) -> dict[str, Any]:
    """The case's program, and one for each trial where control flow is data; or the refusal."""
    settings = request.settings()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found: dict[str, Any] = {"program": verdict.traced(kernel, case, settings.grid)}
        found["program"].warnings = worded(told)
        if found["program"].for_values:
            for kind, seed in settings.trials():
                found[f"{kind} {seed}"] = verdict.traced(kernel, case, settings.grid, kind, seed)
    except NkiError as error:
        said = {"refusal": error.message, "identifier": error.identifier}
        return said | {"place": error.source or ""}
    for program in found.values():
        program.result_form = None  # a caller's classes; results are a list here
    return found
