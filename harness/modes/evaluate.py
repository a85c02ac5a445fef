"""`--mode evaluate` (`evaluate_single`): accuracy, speed, NKI share and score of the prompts."""

import json
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.figures import accuracy, benchmark, executed, graphs, reference
from harness.figures.accuracy import Expected, Place, RowResult
from harness.figures.benchmark import SpeedReport
from harness.figures.estimated_speed import SpeedEstimates
from harness.figures.evaluation import Evaluation, Figures, Speed, Speeds, from_report, score
from harness.figures.graphs import CHUNK
from harness.files import check_writable_folder
from harness.inputs.chunks import MOST_PREFILL
from harness.output import report
from harness.processes.worker import Role
from harness.processes.workers import SubmissionFailed
from harness.session.building import build
from harness.session.generation import new_token_limit
from harness.session.opening import Session, open_session
from harness.settings import Settings
from harness.streaming import Stream
from neuron_cpu.files import write_text_atomically

REPORT_FILE = "benchmark_report.json"
AHEAD = 4  # prompts whose logits the baseline may have ready: 3 MB each of 49,152 tokens
FINE = 64  # tokens between buckets of the fp32 model: a fifth of its prompts' time less


def run(settings: Settings) -> int:
    """Evaluate the prompts as one batch; exit status 0 where the logits agree, else 1."""
    accuracy.check_settings(settings)
    check_writable_folder(Path.cwd())
    session = open_session(settings)
    evaluator = Evaluator(session)
    length = new_token_limit(settings, session.prompt_ids)
    room = settings.seq_len - max(map(len, session.prompt_ids))
    total = evaluator.steps(session.prompt_ids, length, room)
    with console.step("Evaluating", total=total) as step:
        result = evaluator.evaluate(
            0, session.prompts, session.prompt_ids, settings.seq_len, None, step.advance
        )
    report.print_result(result)
    for note in report.of_quantised(settings.quantised_words, [result]):
        console.say(note)
    if result.figures is None:
        return 1
    speeds = json.dumps(asdict(result.figures.speed), indent=1)
    write_text_atomically(Path(REPORT_FILE), speeds + "\n")
    console.say(f"Speed report written to {REPORT_FILE}")
    if not result.accurate:
        console.say(accuracy.cause(settings))
    return 0 if result.accurate else 1


def planned(
    session: Session, index: int, prompts: Sequence[str], prompt_tokens: int, seq_len: int
) -> Evaluation:
    """A batch before it runs; the longest of its prompts has `prompt_tokens`."""
    room = seq_len - prompt_tokens
    new_tokens = min(room, session.settings.max_new_tokens or room)
    return Evaluation(index, list(prompts), prompt_tokens, seq_len, len(prompts), new_tokens)


class Evaluator:
    """The baseline and the submission, compiled once and compared on any number of batches.

    The baseline begins with the first prompts of `soon`, as `begin` takes them, while the
    submission is compiled. Lengths of `soon` are the fp32 model's buckets, as nobody times it.
    """

    def __init__(self, session: Session, soon: Sequence[tuple[list[int], int, int]] = ()) -> None:
        self.session = session
        self.baseline, asked = build(session, Role.BASELINE), session.settings
        if soon and asked.enable_bucketing and asked.seq_len <= MOST_PREFILL:
            fine = sorted({-(-len(ids) // FINE) * FINE for ids, *_ in soon})
            session = session.changed(
                context_encoding_buckets=asked.context_encoding_buckets or fine
            )
        self.precise = build(session, Role.PRECISE) if sdk.platform().simulates else None
        # One thread asks the baseline's process, which answers one request at a time.
        self._ahead = ThreadPoolExecutor(max_workers=1)
        self._known: dict[tuple[int, ...], Future[Expected]] = {}
        self._speeds: dict[tuple[int, ...], Speed] = {}
        self._base_estimates = SpeedEstimates(self.baseline)
        for prompt in soon[:AHEAD]:
            self.begin(*prompt)
        try:
            self.candidate = build(self.session)
        except BaseException:
            self.close()
            raise
        self._graphs = graphs.read(self.candidate.folder)
        graphs.check_macs(self.session, self._graphs)
        self._estimates = SpeedEstimates(self.candidate)
        self._runs = benchmark.runs_asked(self.session.settings.runs)
        self._warm_ups = sdk.platform().warm_ups

    @property
    def _looks_ahead(self) -> bool:
        """Whether the submission has graphs of several tokens that nobody asked for."""
        asked = self.session.settings
        own = asked.speculation is None and not asked.prefill_chunk and asked.batch_size == 1
        return own and CHUNK in self.candidate.buckets

    def steps(self, prompt_ids: Sequence[Sequence[int]], new_tokens: int, room: int) -> int:
        """Generated tokens that one evaluation reports through its callback."""
        measured = 0 if self._check_is_measured(prompt_ids) else self._runs + self._warm_ups
        return new_tokens * (2 * len(prompt_ids) + measured) + room * self._looks_ahead

    def _check_is_measured(self, prompt_ids: Sequence[Sequence[int]]) -> bool:
        """Whether the accuracy check's own generation is the measurement.

        True where the times are the simulator's and nobody asked for several runs. A batch is
        checked row by row and measured as one, and a check does not speculate.
        """
        settings = self.session.settings
        alone = len(prompt_ids) == 1 and settings.speculation is None and settings.runs is None
        return alone and sdk.platform().simulates

    def begin(self, ids: Sequence[int], new_tokens: int, room: int = 0) -> None:
        """Let the baseline start on its logits for a later `evaluate` of this prompt.

        With `room` for tokens behind the prompt, on its own speed, too. It runs in a process of its
        own, where the platform has two.
        """
        apart = self.session.settings.isolate and sdk.platform().simulates
        if apart and tuple(ids) not in self._known:
            self._known[tuple(ids)] = self._ahead.submit(self._expected, ids, new_tokens, room)

    def _expected(self, ids: Sequence[int], new_tokens: int, room: int) -> Expected:
        found = accuracy.expected_of(self.baseline, self.precise, ids, new_tokens)
        if room:
            self._speeds[tuple(ids)] = self.baseline_speed([list(ids)], room)
        return found

    def close(self) -> None:
        """Forget what the baseline has not begun: nobody will ask for it."""
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def evaluate(
        self,
        index: int,
        prompts: Sequence[str],
        prompt_ids: Sequence[list[int]],
        seq_len: int,
        row: reference.Row | None,
        advance: Callable[[], Any],
    ) -> Evaluation:
        """Evaluate one batch; a fault of the submission becomes the result's `error`.

        `seq_len` bounds prompt and new tokens together and may be shorter than the compiled one.
        """
        result = planned(self.session, index, prompts, max(map(len, prompt_ids)), seq_len)
        try:
            return self._with_figures(result, prompt_ids, row, advance)
        except SubmissionFailed as error:
            if self.session.settings.debug:
                traceback.print_exc()
            return replace(result, error=str(error))

    def _with_figures(
        self,
        result: Evaluation,
        prompt_ids: Sequence[list[int]],
        row: reference.Row | None,
        advance: Callable[[], Any],
    ) -> Evaluation:
        """The result with accuracy, speed, NKI share and score."""
        streams: list[Stream] = []
        rows, known = [], []
        for number, ids in enumerate(prompt_ids):
            place = Place(number, prompt_ids) if len(prompt_ids) > 1 else None
            checked, expected = self._check(ids, result.new_tokens, advance, streams, place)
            rows.append(checked)
            known.append(expected)
        rows = self._together(prompt_ids, rows, known)
        accurate = all(checked.passed for checked in rows)
        room = result.seq_len - result.prompt_tokens
        settings = self.session.settings
        asked = settings.prefill_chunk, settings.speculation
        share = graphs.nki_share(self._graphs, result.prompt_tokens, room, *asked)
        measured = self._measured(prompt_ids, result.new_tokens, streams, advance)
        if self._looks_ahead and accurate:
            spoken = benchmark.looked_ahead(self.candidate, prompt_ids[0], room, advance)
            measured = replace(measured, speculation=spoken)
        estimated = self._estimates.report(result.prompt_tokens, room, measured.speculation)
        executed.check(self.candidate, self._graphs, self._estimates.used)
        speed = Speeds(measured, estimated)
        base = reference.baseline_speed(settings, self.session.model.name, result.seq_len, row)
        base = base or self._speeds.pop(tuple(prompt_ids[0]), None)
        base = base or self._ahead.submit(self.baseline_speed, prompt_ids, room).result()
        scored = score(accurate, share.contest, from_report(speed.best), base)
        return replace(result, accurate=accurate, figures=Figures(rows, share, speed, scored))

    def _together(
        self, prompt_ids: Sequence[list[int]], rows: list[RowResult], known: list[Expected]
    ) -> list[RowResult]:
        """The results of rows that pass, held against a run of all of them as one batch."""
        if len(rows) == 1 or not all(row.passed for row in rows):
            return rows
        if len({*map(len, prompt_ids)}) == 1:
            return rows  # each has been among rows of its length
        return [
            replace(row, passed=False, message=told) if told else row
            for row, told in zip(rows, accuracy.check_together(self.candidate, prompt_ids, known))
        ]

    def _check(
        self,
        ids: list[int],
        new_tokens: int,
        advance: Callable[[], Any],
        streams: list[Stream],
        place: Place | None,
    ) -> tuple[RowResult, Expected]:
        """One prompt's logits; the candidate's generation is clocked in one of `streams`."""
        self.begin(ids, new_tokens)
        ahead = self._known.pop(tuple(ids), None)
        known = self._expected(ids, new_tokens, 0) if ahead is None else ahead.result()
        for _ in range(len(known.baseline)):
            advance()
        streams.append(benchmark.silent_stream(self.candidate, 1))

        def step(tokens: list[int], seconds: float) -> None:
            streams[-1].step(tokens, seconds)
            advance()

        checked = accuracy.check_row(
            self.baseline, self.candidate, ids, new_tokens, step, known, place
        )
        return checked, known

    def _measured(
        self,
        prompt_ids: Sequence[list[int]],
        new_tokens: int,
        streams: Sequence[Stream],
        advance: Callable[[], Any],
    ) -> SpeedReport:
        """The speed by the clock here, of the check itself where that was one generation."""
        if self._check_is_measured(prompt_ids) and len(streams[0].step_seconds) == new_tokens:
            whole = sum(streams[0].step_seconds)
            return benchmark.timed(streams, [whole], len(prompt_ids[0]), new_tokens, 1)
        return benchmark.measure(
            self.candidate,
            prompt_ids,
            new_tokens,
            self._runs,
            lambda _: advance(),
            warm_up=bool(self._warm_ups),
        )

    def baseline_speed(self, prompt_ids: Sequence[list[int]], room: int) -> Speed:
        """The baseline's own figures: estimated on the stand-in, measured on the device."""
        found = self._base_estimates.report(max(len(ids) for ids in prompt_ids), room)
        if found is None:
            found = benchmark.measure(self.baseline, prompt_ids, room, sdk.platform().runs)
        return from_report(found)
