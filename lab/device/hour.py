"""Measures what was planned, entry by entry, and keeps the report whole."""

import contextlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from harness import console
from harness.errors import UserError
from harness.files import locked_folder
from lab.device import page, plan, results
from lab.device.calls import SUBMISSIONS
from lab.device.plan import Entry
from lab.device.running import HUNG, SIMULATOR, Unanswered, Workers
from neuron_cpu.files import write_text_atomically

MEASURED, WRONG, UNFINISHED = "measured", "wrong", "unfinished"
FAR = 0.02  # of results from the simulator's, relative to their size
SIMULATING_SECONDS = 1800.0
FITTED, FEWEST = (plan.CONSTANT, plan.LAUNCH), 20  # times that constants are fitted to
FITTING_SECONDS, MOST_FITTING = 120.0, 0.25  # of a run's time


def run(path: Path, minutes: float) -> dict[str, Any]:
    """Go on with the report at ``path`` for so many minutes, and write its page beside it."""
    until = time.monotonic() + 60 * minutes
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_folder(path.parent, lambda: _refuse(path)))
        report = results.begun(path)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(Workers(folder, report["machine"]["target"]))
        hour = _Hour(report, path, workers, folder, until)
        hour.fitting = min(FITTING_SECONDS, MOST_FITTING * 60 * minutes)
        hour.plan(minutes)
        hour.measure()
        hour.fit()
    results.write(path, report | {"sentences": page.sentences(report)})
    write_text_atomically(path.with_suffix(".md"), page.page(report))
    return report


def _refuse(path: Path) -> NoReturn:
    raise UserError(f"Another run measures in {path.parent}, expected none; wait for its end.")


class _Hour:
    """A report that grows until a time."""

    def __init__(
        self, report: dict[str, Any], path: Path, workers: Workers, scratch: Path, until: float
    ) -> None:
        self.report, self.path, self.workers, self.scratch = report, path, workers, scratch
        self.until, self.today, self.fitting = until, results.of_today(report), 0.0
        self.graphs: dict[str, Any] = dict(report.setdefault("graphs", {}))

    def _simulate(self, do: str, **given: Any) -> Any:
        """The simulator's results, or None and a line with the reason."""
        try:
            return self.workers.ask(SIMULATOR, do, given, SIMULATING_SECONDS)
        except Unanswered as error:
            console.say(f"The simulator {error.status}: {error.words}")
            return None

    def _open(self) -> list[Entry]:
        """What is not measured yet. An entry that a run was at when it was killed comes last: it
        may have been the reason."""
        done, target = self.report["entries"], self.report["machine"]["target"]
        every = list(plan.entries(self.graphs, self.today, target))
        new = [entry for entry in every if entry.name not in done]
        return new + [e for e in every if done.get(e.name, {}).get("status") == UNFINISHED]

    def _chosen(self, known: int) -> list[Entry]:
        """What fits into the time that is left; the fit takes some where enough times are known."""
        fitting = self.fitting if known >= FEWEST else 0.0
        return plan.within(self.until - fitting - time.monotonic(), self._open())

    def _planned(self) -> list[Entry]:
        known = len(results.measured(self.report, *FITTED))
        return self._chosen(known + sum(entry.kind in FITTED for entry in self._chosen(0)))

    def plan(self, minutes: float) -> None:
        """Say what fits; a graph of the model is traced where its kernels may fit."""
        if self._simulate("lab.device.model:overheads") is None:
            raise UserError("Estimates need what the simulator has not found; install that.")
        begun = time.monotonic()
        while graphs := [e.call["name"] for e in self._planned() if e.kind == plan.KERNELS_OF]:
            with console.step(f"Tracing {graphs[0]}", least_seconds=1.0):
                self._trace(graphs[0])
        gone, chosen = (time.monotonic() - begun) / 60, self._planned()
        counts = Counter(entry.kind for entry in chosen)
        took = {kind: count * plan.SECONDS[kind] / 60 for kind, count in counts.items()}
        said = ", ".join(f"{n} {kind} ({took[kind]:.0f} min)" for kind, n in counts.items())
        console.say(
            f"Plan of {minutes:g} minutes, the most valuable first: {said or 'nothing'}; tracing "
            f"took {gone:.1f} and the fit may take {self.fitting / 60:.1f}. "
            f"{len(self._open()) - len(chosen)} entries are left for time that is saved, or for "
            f"another run. A run may be ended at any time: {self.path} holds what is done."
        )

    def _trace(self, name: str) -> None:
        """Find out about the kernels of one of the model's graphs; it has none if that fails."""
        of = {"file": SUBMISSIONS[self.today], "degree": plan.DEGREE[self.today]}
        found = self._simulate("lab.device.model:graph", name=name, **of)
        self.graphs[name] = found or {"kernels": []}
        if found is not None:
            self.report["graphs"][name] = found
            results.write(self.path, self.report)

    def measure(self) -> None:
        """The most valuable entry that fits, until none does."""
        with console.step("Measuring", total=len(self._open())) as step:
            while chosen := self._chosen(len(results.measured(self.report, *FITTED))):
                entry = chosen[0]
                step.note(f"Measuring {entry.name}")
                if entry.kind == plan.KERNELS_OF:
                    self._trace(entry.call["name"])
                    continue
                self._keep(entry, {"status": UNFINISHED})
                started = time.monotonic()
                found = self._done(entry)
                found["seconds"] = round(time.monotonic() - started, 1)
                self._keep(entry, found)
                if found["status"] != MEASURED:
                    told = f" ({found['words']})" if "words" in found else ""
                    console.say(f"{entry.name}: {found['status']}{told}")
                step.advance()
            step.note("Measuring")
        if left := self._open():
            console.say(f"Time is up: {len(left)} entries are left.")

    def _keep(self, entry: Entry, found: dict[str, Any]) -> None:
        self.report["entries"][entry.name] = {"kind": entry.kind, **found}
        results.write(self.path, self.report)

    def _done(self, entry: Entry) -> dict[str, Any]:
        """The fields of an entry, whatever becomes of it."""
        found: dict[str, Any] = {}
        call = dict(entry.call)
        if entry.kind == plan.CONSTRUCT:
            number = len(list(self.scratch.glob("probe_*.py")))
            file = self.scratch / f"probe_{number}.py"  # a new one, as modules are kept by path
            file.write_text(call.pop("text"), encoding="utf-8")
            call["module"] = str(file)
            found["constructs"] = self._simulate("lab.device.model:constructs", call=call)
        elif entry.kind in (plan.CONSTANT, plan.LAUNCH, plan.KERNEL):
            found["estimate"] = self._simulate("lab.device.model:estimate", call=call)
        elif entry.kind == plan.WHOLE:
            of = {"file": call["file"], "degree": call["degree"]}
            for name in (f"{phase}-{call['length']}" for phase in ("prefill", "decode")):
                told = self._simulate("lab.device.model:graph", name=name, **of)
                found.setdefault("expected", {})[name] = told and told["us"]
        patience = float(plan.PATIENCE * plan.SECONDS[entry.kind])
        limit = min(patience, self.until - time.monotonic())
        try:
            return found | self._measured(entry, call, limit)
        except Unanswered as error:  # another run may have more time for it
            late = error.status == HUNG and limit < patience
            return found | {"status": UNFINISHED if late else error.status, "words": error.words}

    def _measured(self, entry: Entry, call: dict[str, Any], limit: float) -> dict[str, Any]:
        if entry.kind in (plan.CONSTRUCT, plan.NUMBERS):
            given: dict[str, Any] = {"call": call, "results": str(self.scratch / "results.pt")}
            self.workers.ask(entry.role, "lab.device.calls:run", given, limit)
            beside = self._simulate("lab.device.calls:compare", **given)
            if beside is None:
                return {"status": MEASURED}
            wrong = beside["error"] > FAR or (entry.exact and beside["equal"] < 1)
            return beside | {"status": WRONG if wrong else MEASURED, "exact": entry.exact}
        if entry.kind == plan.TEXT:
            do = "lab.device.whole:text"
            told = self.workers.ask(entry.role, do, call, limit)
            ours = self._simulate(do, **call) or []
            equal = sum(a == b for a, b in zip(told, ours))
            words = f"{equal} of {len(told)} tokens are the stand-in's"
            return {"status": MEASURED, "tokens": told, "words": words}
        if entry.kind == plan.WHOLE:
            do, given = "lab.device.whole:measure", call
        else:
            name = "graph" if entry.kind == plan.LAUNCH else "benchmark"
            do, given = f"lab.device.timing:{name}", {"call": call}
        return {"status": MEASURED, "us": self.workers.ask(entry.role, do, given, limit)}

    def fit(self) -> None:
        """The constants with which the model gives these times, where there are enough."""
        times = results.measured(self.report, *FITTED)
        if len(times) < FEWEST:
            console.say(f"No constants are fitted to {len(times)} times, {FEWEST} are needed.")
            return
        with console.step("Fitting the cost model's constants"):
            found = self._simulate("lab.device.fit:fit", measured=times, today=self.today)
        if found is not None:
            self.report["fit"] = found
            results.write(self.path, self.report)
