"""The oracle's own process: it checks, prices and runs what candidates have recorded.

No candidate's code runs here, only the reference of whoever asks. The process stays, so that values
and results of references are computed once for each case.
"""

import hashlib
import json
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..core import NkiError, Program
from ..core.device import dtypes
from ..core.device.pause import without_garbage_collection
from ..core.device.refusals import LEGAL, UNPROVEN
from ..core.device.target import TARGETS
from ..core.language.specialisation import to_torch
from ..core.program import digest
from ..core.report import report
from ..core.run.execute import Plan
from ..core.time.schedule import schedule
from ..errors import UsageError
from ..judge import accuracy, cases, recorder, verdict
from ..judge.references import Reference, comparable
from ..quoting import all_quoted
from ..sandbox import foreign, limits, records
from .forms import Request, Tolerance

MOST_ANSWERS, MOST_WARNINGS = 10_000, 20
SPARE = 2  # times as much memory as a candidate has: its program, values, float64 references
KEPT = 0.5  # as much again for inputs and references' results that are kept
Answer = dict[str, Any]


def serve(jobs: Connection, replies: Connection, memory_bytes: int) -> None:
    """Answer about programs until the oracle ends.

    A job is a JSON line (the request, the case, texts of the reference) and a recorded message.
    """
    kept = int(KEPT * memory_bytes)
    recorder.confine(limits.Limits(SPARE * memory_bytes + kept, 10**9, 0), jobs, replies)
    judge = Judge(kept)
    while True:
        job, recorded = json.loads(jobs.recv_bytes()), jobs.recv_bytes()
        request = Request.model_validate(job["request"])
        try:
            with limits.bounded(request.limits.cpu_seconds, None):
                answer = judge.answer(request, job["case"], job["reference"], recorded)
        except TimeoutError as error:
            answer = {"outcome": "failed", "sentence": f"judging it was ended: {error}"}
        except UsageError as error:
            late = isinstance(error.__cause__, TimeoutError)
            answer = {"outcome": "failed" if late else "invalid", "sentence": str(error)}
        except NkiError as error:
            answer = _refused(error.message, error.identifier, error.source or "")
        except Exception as error:  # what a stranger sent may be no program
            told = f"{type(error).__name__}: {error}"[:200]
            answer = {
                "outcome": "failed",
                "sentence": f"what it recorded cannot be judged ({told})",
            }
        replies.send_bytes(json.dumps(all_quoted(verdict.finite(answer))).encode())


class Judge:
    """State that stays between candidates.

    Attributes:
        kept: most bytes of inputs and of references' results that stay.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self._modules: dict[tuple[str, str], Any] = {}
        self._values: OrderedDict[Any, tuple[int, Any, _Known]] = OrderedDict()
        self._answers: OrderedDict[Any, Answer] = OrderedDict()
        self._spent: dict[str, float] = {}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        before = time.process_time()
        try:
            yield
        finally:
            took = 1e3 * (time.process_time() - before)
            self._spent[name] = round(self._spent.get(name, 0.0) + took, 2)

    @without_garbage_collection()
    def answer(self, request: Request, case: str, reference: str | None, recorded: bytes) -> Answer:
        """The answer to one case: an outcome, and what is known of the kernel.

        Raises:
            NkiError: the device would refuse the program.
            UsageError: reference or inputs do not go with it.
        """
        self._spent = {}
        with self._phase("check"):
            told = records.loaded(recorded)
            self._spent["record"] = round(1e3 * float(told.pop("seconds")), 2)
            if "program" not in told:
                return _unrecorded(told)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                asked = verdict.asked_for(cases.case(case), tuple(request.grid))
                program = records.program(told, asked)
                program.warnings += recorder.worded(warned)
        if program.for_values and reference is not None:
            return _refused(recorder.BY_VALUES, "", "")
        if request.target is not None and program.core.name != TARGETS[request.target].name:
            raise UsageError(
                f"the kernel was recorded for {program.core.name}, expected "
                f"{TARGETS[request.target].name}; leave the target to the request."
            )
        with self._phase("digest"):
            name = digest.of_program(program)
            lines = [str(instruction.source) for instruction in program]  # the answer names them
            said = request.model_dump_json(exclude={"id", "kernel", "cases"})
            key = name, case, reference, said, hashlib.sha256(repr(lines).encode()).digest()
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key] | {"cached": True, "spent_ms": self._spent}
        found: Answer = {"outcome": "passed", "sentence": "", "digest": name}
        found["results"] = results_of(program)
        found["warnings"] = [str(one)[:1000] for one in program.warnings[:MOST_WARNINGS]]
        proven = all(str(one).startswith("advice, ") for one in program.warnings)
        found["legality"] = LEGAL if proven else UNPROVEN
        with self._phase("estimate"):
            found["estimate"] = estimate(program, request)
        if reference is not None:
            found |= self._compared(program, request, case, reference)
        self._answers[key] = found
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return found | {"cached": False, "spent_ms": self._spent}

    # --- right? -----------------------------------------------------------------------------------
    def _compared(self, program: Program, request: Request, case: str, text: str) -> Answer:
        """Errors of every trial, and where the first wrong one comes from."""
        settings = request.settings()
        with self._phase("plan"):
            plan = Plan(program)
        tolerance = settings.tolerance or accuracy.default_tolerance(verdict.types_of(program))
        wrong, errors = Answer(), list[Answer]()
        for trial in settings.trials():
            arguments, known = self._expected(text, request, case, trial, program)
            with self._phase("run"):
                inputs = verdict.tensors_of(*arguments)
                got = [t.to(torch.float64) for t in verdict.run(program, plan, inputs)]
                if request.outputs is not None and request.reference is not None:
                    made = self._function(text, request.reference.file, request.outputs)
                    got = comparable(made, got, known.results, arguments[0])
            with self._phase("measure"):
                said = verdict.mismatch(got, known.results)
                if said:
                    return {"outcome": "wrong", "sentence": said, "errors": errors}
                told = _errors(request.tolerance, got, known.results)
                results = []
                if not all(one["right"] for one in told) or not told:
                    results = _held(program, known, arguments, got, tolerance, trial)
                told = told or [_error(result.accuracy) for result in results]
                told = [
                    {"values": trial[0], "seed": trial[1], "result": number, **one}
                    for number, one in enumerate(told)
                ]
            errors += told
            bad = next((one for one in told if not one["right"]), None)
            if bad and not wrong:
                wrong = {"outcome": "wrong", "sentence": _sentence(bad), "places": []}
                with self._phase("locate"):
                    worst = results[bad["result"]]
                    if worst.accuracy.first is not None:
                        wrong["places"] = verdict.places(
                            program, inputs, worst.number, worst.accuracy, tolerance
                        )
        return {**wrong, "errors": errors}

    def _expected(
        self, text: str, request: Request, case: str, trial: tuple[str, int], program: Program
    ) -> Any:
        """Arguments of a trial, and a reference that knows its results for them."""
        assert request.reference is not None
        code, inputs = request.reference, request.inputs
        key = text, code.name, inputs, case, trial, program.returns
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key][1:]
        with self._phase("values"):
            function = self._function(text, code.file, code.name)
            module = self._modules[text, code.file or "reference.py"]
            asked = cases.case(case).resolved(vars(module))
            arguments: Any = replace(asked, hide=getattr(module, cases.HIDDEN, None)).values(*trial)
            if inputs is not None:
                arguments = _values(self._function(text, code.file, inputs), trial[1])
                _refuse_unfit(program, verdict.tensors_of(*arguments), inputs)
        with self._phase("reference"):
            known = _Known(Reference(function, code.library), verdict.asked(program, *arguments))
        size = sum(t.nbytes for t in (*verdict.tensors_of(*arguments), *known.results))
        self._values[key] = size, arguments, known
        while sum(size for size, *_ in self._values.values()) > self.kept:
            self._values.popitem(last=False)
        return arguments, known

    def _function(self, text: str, file: str | None, name: str) -> Any:
        key = text, file or "reference.py"
        try:
            if key not in self._modules:
                path = Path(key[1])
                if file is not None:
                    foreign.put_last(path.resolve().parent)
                self._modules[key] = foreign.imported(path, f"oracle: {path}", text)
            return getattr(self._modules[key], name)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"reference {name} cannot be imported ({type(error).__name__}: {error}), expected "
                "a module with that function; mend it."
            ) from error


class _Known(Reference):
    """A reference with its results for one trial's arguments.

    Attributes:
        excuses: whether it tells what it errs in the arguments' own types.
    """

    def __init__(self, reference: Reference, asked: Any) -> None:
        super().__init__(reference.function, reference.library)
        self.results, self._asked, self.excuses = reference.exact(*asked), asked, False

    def exact(self, *_: Any) -> list[torch.Tensor]:
        return self.results

    def plain(self, *_: Any) -> list[torch.Tensor] | None:
        return super().plain(*self._asked) if self.excuses else None


def results_of(program: Program) -> list[list[Any]]:
    """[type of the host, shape] of each result."""
    return [
        [str(dtypes.host_dtype(s.dtype)).removeprefix("torch."), list(shape)]
        for s, shape in zip(program.outputs, program.output_shapes)
    ]


def _values(function: Any, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that a function of the asker makes for a seed: a list, or a dictionary by name."""
    try:
        made = function(seed)
        named = made if isinstance(made, dict) else {}
        positional = [] if named else list(made)
        tensors = {k: to_torch(v) if hasattr(v, "shape") else v for k, v in named.items()}
        return [to_torch(v) if hasattr(v, "shape") else v for v in positional], tensors
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"inputs {function.__name__} fails for seed {seed} ({type(error).__name__}: {error}), "
            "expected the kernel's arguments as a list or dictionary; mend it."
        ) from error


def _refuse_unfit(program: Program, tensors: list[torch.Tensor], name: str) -> None:
    asked = [(tuple(s.shape), dtypes.host_dtype(s.dtype)) for s in program.inputs]
    given = [(tuple(t.shape), t.dtype) for t in tensors]
    if asked != given:
        raise UsageError(f"inputs {name} makes {given}, expected {asked} as in the case; mend it.")


def _held(
    program: Program,
    known: _Known,
    arguments: Any,
    got: list[torch.Tensor],
    tolerance: float,
    trial: tuple[str, int],
) -> list[verdict.Result]:
    """Results held against the reference's, with its excuses where they are wrong without."""
    types = [dtypes.host_dtype(s.dtype) for s in program.outputs]
    for known.excuses in (False, True):
        found = verdict.Verdict("")
        verdict.hold(found, known, arguments, types, got, tolerance, "any", trial)
        if found.correct:
            break
    return found.results


def _error(found: accuracy.Accuracy) -> Answer:
    """A result's error by element."""
    return {
        "right": found.correct,
        "measure": "a largest error of",
        "error": found.largest,
        "limit": found.bound,
        "relative_l2": found.rms,
        "wrong_elements": found.wrong,
    }


def _errors(asked: Tolerance, got: list[torch.Tensor], exact: list[torch.Tensor]) -> list[Answer]:
    """Results' errors by a measure of whole results; none where the request asks for none."""
    measured = []
    for mine, right in zip(got, exact):
        apart = mine - right
        if not bool(apart.norm().isfinite()):  # a pass without copies of the whole
            apart = torch.where((mine == right) | (mine.isnan() & right.isnan()), 0.0, apart)
        if asked.relative_l2 is not None:
            error, size, limit = float(apart.norm()), float(right.norm()), asked.relative_l2
            measured.append(("a relative L2 error of", error / (size or 1.0), limit))
        elif asked.allclose is not None:
            rtol, atol = asked.allclose
            beyond = (apart.abs() - (atol + rtol * right.abs())).nan_to_num(nan=torch.inf)
            most = float(beyond.max()) if beyond.numel() else 0.0
            measured.append(("an error beyond rtol and atol of", most, 0.0))
    return [
        {"right": error <= limit, "measure": name, "error": error, "limit": limit}
        for name, error, limit in measured
    ]


def _sentence(bad: Answer) -> str:
    return (
        f"result {bad['result']} of {bad['values']} values, seed {bad['seed']}, has "
        f"{bad['measure']} {bad['error']:.3g}, expected at most {bad['limit']:.3g}; places says "
        "where it comes from"
    )


# --- refused --------------------------------------------------------------------------------------
def _unrecorded(told: Answer) -> Answer:
    if "refusal" in told:
        identifier, place = str(told.get("identifier", ""))[:100], str(told.get("place", ""))[:500]
        return _refused(str(told["refusal"])[:5000], identifier, place)
    sentence = str(told.get("failure", ""))[:1000]
    return {"outcome": "failed", "sentence": sentence, "line": _line(sentence.partition(": ")[0])}


def _refused(message: str, identifier: str, place: str) -> Answer:
    """A refusal apart: its sentence ends with the mending, behind the last semicolon."""
    fault, _, mending = message.rpartition("; ")
    return {
        "outcome": "refused",
        "sentence": message,
        "identifier": identifier,
        "line": _line(place),
        "fault": fault or message,
        "mending": mending if fault else "",
    }


def _line(place: str) -> int | None:
    digits = place.rstrip(")").rpartition(":")[2]
    return int(digits) if digits.isdigit() else None


# --- fast? ----------------------------------------------------------------------------------------
def estimate(program: Program, request: Request) -> Answer:
    """Time, band, engines, bytes, what bounds it and which lines take the time."""
    found = schedule(program, request.dma_profile, request.order)
    summary = report.profile(found)
    speed, figures = verdict.speed_of(found, summary), summary.metrics
    verdict.hold_above(program, found.total)
    busy = {key: figures[f"{key}_active_time_percent"] for key in report.ENGINE_KEYS}
    return {
        "estimated": True,
        "time_us": found.total / 1e3,
        "band_us": [t / 1e3 for t in summary.band_ns],
        "generation": summary.generation,
        "calibrated": summary.calibrated,
        "dma_profile": summary.dma_profile,
        "engine_percent": busy,
        "hbm_read_bytes": figures["hbm_read_bytes"],
        "hbm_write_bytes": figures["hbm_write_bytes"],
        "spilled_bytes": sum(figures[f"{name}_bytes"] for name in report.SPILLS),
        "sbuf_bytes": figures["sbuf_high_water_bytes"],
        "instructions": figures["instruction_count"],
        "macs": program.macs,
        "bound": summary.bound,
        "binding": summary.binding,
        "metrics": figures,
        "of_bound_percent": speed.roofline_percent,
        "bound_by": speed.roofline_side,
        "lines": [
            {
                "place": line.place,
                "critical_us": line.critical / 1e3,
                "busiest_us": line.longest / 1e3,
                "binding": line.binding,
            }
            for line in summary.lines[: request.lines]
        ],
    }
