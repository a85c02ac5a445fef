"""`--mode evaluate` (`evaluate_single`): accuracy, speed, NKI share and score of the prompts."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from harness import console, sdk
from harness.errors import is_refusal
from harness.figures import accuracy, benchmark, flops, graphs, reference
from harness.figures.accuracy import RowResult
from harness.figures.estimated_speed import SpeedEstimates
from harness.figures.score import Speed, from_report, score
from harness.files import check_writable_folder
from harness.inputs.submission import where
from harness.modes.generate import new_token_limit
from harness.output import report
from harness.session.building import Session, build, open_session
from neuron_cpu.files import write_text_atomically

REPORT_FILE = "benchmark_report.json"


def run(args: argparse.Namespace) -> int:
    """Evaluate the prompts as one batch; exit status 0 where the logits agree, else 1."""
    accuracy.check_settings(args)
    check_writable_folder(Path.cwd())
    session = open_session(args)
    evaluator = Evaluator(session)
    length = new_token_limit(args, session.prompt_ids)
    with console.step("Evaluating", total=evaluator.steps(session.prompt_ids, length)) as step:
        result = evaluator.evaluate(0, session.prompts, session.prompt_ids, args.seq_len, None,
                                    step.advance)  # fmt: skip
    report.print_result(result)
    if result["error"] is not None:
        return 1
    write_text_atomically(Path(REPORT_FILE), json.dumps(result["speed"], indent=1) + "\n")
    console.say(f"Speed report written to {REPORT_FILE}")
    return 0 if result["accurate"] else 1


class Evaluator:
    """The baseline and the submission, compiled once and compared on any number of batches."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.baseline = build(session, "baseline")
        self.candidate = build(session)
        self._graphs = graphs.read(self.candidate.folder)
        self._estimates = SpeedEstimates(self.candidate)
        self._base_estimates = SpeedEstimates(self.baseline)

    def steps(self, prompt_ids: Sequence[Sequence[int]], new_tokens: int) -> int:
        """Generated tokens that one evaluation reports through its callback."""
        runs = self.session.args.runs or benchmark.default_runs()
        return new_tokens * (2 * len(prompt_ids) + runs + self._warm_ups)

    @property
    def _warm_ups(self) -> int:
        """The device needs one; the accuracy check has warmed the simulator's caches."""
        return 0 if sdk.is_stand_in() else 1

    def evaluate(
        self,
        index: int,
        prompts: Sequence[str],
        prompt_ids: Sequence[list[int]],
        seq_len: int,
        row: Optional[reference.Row],
        advance: Callable[[], Any],
    ) -> dict[str, Any]:
        """One batch: a JSON-ready result. An exception of the submission becomes its `error`.

        `seq_len` bounds prompt and new tokens together and may be shorter than the compiled one.
        """
        args = self.session.args
        width = max(len(ids) for ids in prompt_ids)
        room = seq_len - width
        result: dict[str, Any] = {
            "id": index,
            "prompts": list(prompts),
            "prompt_tokens": width,
            "seq_len": seq_len,
            "batch_size": len(prompt_ids),
            "new_tokens": min(room, args.max_new_tokens or room),
            "accurate": False,
            "error": None,
        }
        try:
            rows = [
                accuracy.check_row(
                    self.baseline, self.candidate, ids, result["new_tokens"], lambda _: advance()
                )
                for ids in prompt_ids
            ]
            self._fill(result, rows, prompt_ids, room, row, advance)
        except (
            Exception
        ) as error:  # whatever a submission raises counts as a failure, with its place
            place = self.session.submission
            result["error"] = str(error) if is_refusal(error) else where(error, place)
            if args.debug:
                traceback.print_exc()
        return result

    def _fill(
        self,
        result: dict[str, Any],
        rows: Sequence[RowResult],
        prompt_ids: Sequence[list[int]],
        room: int,
        row: Optional[reference.Row],
        advance: Callable[[], Any],
    ) -> None:
        """Add accuracy, speed, NKI share and score to a result."""
        result["accuracy"] = [checked.as_dict() for checked in rows]
        result["accurate"] = all(checked.passed for checked in rows)
        share = flops.nki_share(self._graphs, result["prompt_tokens"], room)
        result["nki"] = asdict(share)
        runs = self.session.args.runs or benchmark.default_runs()
        measured = benchmark.measure(
            self.candidate,
            prompt_ids,
            result["new_tokens"],
            runs,
            lambda _: advance(),
            warm_up=bool(self._warm_ups),
        )
        estimated = self._estimates.report(result["prompt_tokens"], room)
        result["speed"] = {"measured": measured, "estimated": estimated}
        name = self.session.model.name
        base = reference.baseline_speed(self.session.args, name, result["seq_len"], row)
        result["score"] = score(
            result["accurate"],
            share.contest,
            from_report(estimated or measured),
            base or self.baseline_speed(prompt_ids, room),
        ).as_dict()

    def baseline_speed(self, prompt_ids: Sequence[list[int]], room: int) -> Speed:
        """The baseline's own figures: estimated on the stand-in, measured on the device."""
        width = max(len(ids) for ids in prompt_ids)
        estimated = self._base_estimates.report(width, room)
        if estimated is None:
            estimated = benchmark.measure(self.baseline, prompt_ids, room, benchmark.DEVICE_RUNS)
        return from_report(estimated)
