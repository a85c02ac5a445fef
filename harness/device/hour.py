"""Measures what was planned, entry by entry, and keeps the report whole."""

import contextlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from harness import console
from harness.device import page, plan, results
from harness.device.calls import SUBMISSIONS
from harness.device.plan import Entry
from harness.device.running import SIMULATOR, XLA, Unanswered, Workers
from harness.errors import UserError
from harness.files import locked_folder
from neuron_cpu.files import write_text_atomically

MEASURED, WRONG, BEGUN = "measured", "wrong", "begun"
FAR = 0.02  # of results from the simulator's, relative to their size
SIMULATING_SECONDS = 1800.0
FEWEST = 20  # times that constants are fitted to


def run(path: Path, minutes: float) -> dict[str, Any]:
    """Go on with the report at ``path`` for so many minutes, and write its page beside it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_folder(path.parent, lambda: _refuse(path)))
        report = results.begun(path)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = stack.enter_context(Workers(folder, report["machine"]["target"]))
        hour = _Hour(report, path, workers, folder)
        hour.plan(minutes)
        hour.measure(time.monotonic() + 60 * minutes)
        hour.fit()
    results.write(path, report | {"sentences": page.sentences(report)})
    write_text_atomically(path.with_suffix(".md"), page.page(report))
    return report


def _refuse(path: Path) -> NoReturn:
    raise UserError(f"Another run measures in {path.parent}, expected none; wait for its end.")


class _Hour:
    """A report that grows."""

    def __init__(self, report: dict[str, Any], path: Path, workers: Workers, scratch: Path) -> None:
        self.report, self.path, self.workers, self.scratch = report, path, workers, scratch
        self.entries: list[Entry] = []

    def _simulate(self, do: str, **given: Any) -> Any:
        """The simulator's results, or None and a line with the reason."""
        try:
            return self.workers.ask(SIMULATOR, do, given, SIMULATING_SECONDS)
        except Unanswered as error:
            console.say(f"The simulator {error.status}: {error.words}")
            return None

    def plan(self, minutes: float) -> None:
        """The remaining work, and the part of it that fits; says so."""
        if self._simulate("harness.device.model:overheads") is None:
            raise UserError("Estimates need what the simulator has not found; install that.")
        known = self.report.setdefault("graphs", {})
        today = results.of_today(self.report)
        of = {"file": SUBMISSIONS[today], "degree": plan.DEGREE[today]}
        wanted = [name for name in plan.GRAPHS_OF_1B if name not in known]
        with console.step("Tracing the model's graphs", len(wanted), least_seconds=1.0) as step:
            for name in wanted:
                found = self._simulate("harness.device.model:graph", name=name, **of)
                known |= {} if found is None else {name: found}
                results.write(self.path, self.report)  # tracing takes minutes
                step.advance()
        every = list(plan.entries(known, today, self.report["machine"]["target"]))
        done = self.report["entries"]
        new = [entry for entry in every if entry.name not in done]
        # what a run was at when it was killed comes last: it may have been the reason
        again = [entry for entry in every if done.get(entry.name, {}).get("status") == BEGUN]
        self.entries = plan.within(minutes, [*new, *again])
        counts = Counter(entry.kind for entry in self.entries)
        took = {kind: count * plan.SECONDS[kind] / 60 for kind, count in counts.items()}
        said = ", ".join(f"{n} {kind} ({took[kind]:.0f} min)" for kind, n in counts.items())
        left = len(new) + len(again) - len(self.entries)
        console.say(
            f"Plan, the most valuable first: {said or 'nothing'}; {sum(took.values()):.0f} of "
            f"{minutes:g} minutes; {left} of {len(every)} entries are left for another run. A run "
            f"may be ended at any time: {self.path} holds what is done."
        )

    def measure(self, until: float) -> None:
        """Entry by entry, as long as there is time."""
        with console.step("Measuring", total=len(self.entries)) as step:
            for place, entry in enumerate(self.entries, 1):
                if time.monotonic() > until:
                    console.say(f"Time is up: {len(self.entries) - place + 1} entries are left.")
                    return
                step.note(f"{place} of {len(self.entries)}: {entry.name}")
                self._keep(entry, {"status": BEGUN})
                started = time.monotonic()
                found = self._done(entry)
                found["seconds"] = round(time.monotonic() - started, 1)
                self._keep(entry, found)
                if found["status"] != MEASURED:
                    told = f" ({found['words']})" if "words" in found else ""
                    console.say(f"{entry.name}: {found['status']}{told}")
                step.advance()

    def _keep(self, entry: Entry, found: dict[str, Any]) -> None:
        self.report["entries"][entry.name] = {"kind": entry.kind, **found}
        results.write(self.path, self.report)

    def _done(self, entry: Entry) -> dict[str, Any]:
        """The fields of an entry, whatever becomes of it."""
        found: dict[str, Any] = {}
        call = dict(entry.call)
        if entry.kind == plan.CONSTRUCT:
            file = self.scratch / f"probe_{len(self.report['entries'])}.py"
            file.write_text(call.pop("text"), encoding="utf-8")
            call["module"] = str(file)
            found["constructs"] = self._simulate("harness.device.model:constructs", call=call)
        elif entry.kind in (plan.CONSTANT, plan.LAUNCH, plan.KERNEL):
            found["estimate"] = self._simulate("harness.device.model:estimate", call=call)
        elif entry.kind == plan.WHOLE:
            of = {"file": call["file"], "degree": call["degree"]}
            for name in (f"{phase}-{call['length']}" for phase in ("prefill", "decode")):
                told = self._simulate("harness.device.model:graph", name=name, **of)
                found.setdefault("expected", {})[name] = told and told["us"]
        try:
            return found | self._measured(entry, call)
        except Unanswered as error:
            return found | {"status": error.status, "words": error.words}

    def _measured(self, entry: Entry, call: dict[str, Any]) -> dict[str, Any]:
        limit = float(plan.PATIENCE * plan.SECONDS[entry.kind])
        if entry.kind in (plan.CONSTRUCT, plan.NUMBERS):
            given: dict[str, Any] = {"call": call, "results": str(self.scratch / "results.pt")}
            self.workers.ask(XLA, "harness.device.calls:run", given, limit)
            beside = self._simulate("harness.device.calls:compare", **given)
            if beside is None:
                return {"status": MEASURED}
            wrong = beside["error"] > FAR or (entry.exact and beside["equal"] < 1)
            return beside | {"status": WRONG if wrong else MEASURED, "exact": entry.exact}
        if entry.kind == plan.TEXT:
            do = "harness.device.whole:text"
            told = self.workers.ask(entry.role, do, call, limit)
            ours = self._simulate(do, **call) or []
            equal = sum(a == b for a, b in zip(told, ours))
            words = f"{equal} of {len(told)} tokens are the stand-in's"
            return {"status": MEASURED, "tokens": told, "words": words}
        if entry.kind == plan.WHOLE:
            do, given = "harness.device.whole:measure", call
        else:
            name = "graph" if entry.kind == plan.LAUNCH else "benchmark"
            do, given = f"harness.device.timing:{name}", {"call": call}
        return {"status": MEASURED, "us": self.workers.ask(entry.role, do, given, limit)}

    def fit(self) -> None:
        """The constants with which the model gives these times, where there are enough."""
        times = results.measured(self.report, plan.CONSTANT, plan.LAUNCH)
        if len(times) < FEWEST:
            console.say(f"No constants are fitted to {len(times)} times, {FEWEST} are needed.")
            return
        with console.step("Fitting the cost model's constants"):
            today = results.of_today(self.report)
            found = self._simulate("harness.device.fit:fit", measured=times, today=today)
        if found is not None:
            self.report["fit"] = found
            results.write(self.path, self.report)
