"""`--mode evaluate_all`, and `test.py`: every prompt of prompts.txt, one result file each.

A run is a folder. `run.json` has the settings, `prompt-NN.json` appears whole when its prompt is
done, and reports appear at the end. A run may be killed at any moment; `--resume` takes up the
newest unfinished run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.errors import UserError
from harness.figures import accuracy, evaluation, reference
from harness.figures.evaluation import Evaluation
from harness.figures.reference import Case
from harness.files import check_writable_folder
from harness.inputs import options, submission
from harness.inputs.chunks import with_chunks
from harness.inputs.models import checkpoint_identity
from harness.inputs.prompts import encode, read_prompt_file, shorten
from harness.modes.evaluate import AHEAD, Evaluator, planned
from harness.output import report
from harness.session.opening import Session, check_seq_len, open_session
from harness.settings import LONGEST_PREFILL, Settings
from neuron_cpu import cluster
from neuron_cpu.files import write_text_atomically

RUN_FILE = "run.json"
# A prompt that fits no row of prompt_data.txt runs at the first of these lengths that leaves room
# for DEFAULT_NEW_TOKENS, longer ones at a multiple of the first, the smallest bucket of NxDI.
LENGTHS = (128, 256, 512, 640, 1280)
DEFAULT_NEW_TOKENS = 64


def run(settings: Settings) -> int:
    """Run the missing prompts; exit status 0 where every prompt that fits ran and was accurate."""
    accuracy.check_settings(settings)
    check_writable_folder(settings.results_path)
    prompts_file, _ = reference.files_of(settings.contest)
    texts = settings.prompts or tuple(read_prompt_file(prompts_file))
    if settings.record_baseline:
        cases, _, session = _cases(settings, texts)
        reference.record(session, cases)
        return 0
    with cluster.joined(settings.scheduler, ROOMS) as workers:
        runs = _opened(settings, texts)
        if workers is not None:
            _run_elsewhere(runs, workers)
        else:
            for one in runs:
                _run_cases(one, len(runs) == 1)
    if settings.part is not None:
        return 0
    results = {one.name: _reported(one) for one in runs}
    if len(runs) > 1:
        report.write_leaderboard(settings.results_path, results)
        report.show_leaderboard(results)
    return 0 if all(result.accurate for found in results.values() for result in found) else 1


@dataclass(frozen=True)
class Run:
    """One submission's run: a folder of results, of which some may be there already."""

    name: str
    session: Session
    cases: list[Case]
    too_long: list[str]
    folder: Path

    @property
    def missing(self) -> list[Case]:
        """The cases without a result."""
        return [case for case in self.cases if not _result_path(self.folder, case.index).exists()]


def _opened(settings: Settings, texts: Sequence[str]) -> list[Run]:
    """A run for each submission; where there are several, each has a folder of runs by its name."""
    runs = []
    names = report.submission_names([submission.find(llama) for llama in settings.contestants])
    for llama, name in zip(settings.contestants, names):
        cases, too_long, session = _cases(replace(settings, llama=llama), texts)
        session = _with_new_tokens(session)
        root = settings.results_path / name if len(names) > 1 else settings.results_path
        folder = _open_run(root, settings.resume, _description(session, cases), len(names) > 1)
        one = Run(name, session, cases, too_long, folder)
        for case in cases:
            if case not in one.missing:  # a damaged file is refused before the others run
                _read_result(_result_path(folder, case.index))
        if len(one.missing) < len(cases):
            done = len(cases) - len(one.missing)
            console.say(f"{done} of {len(cases)} prompts are done already")
        runs.append(one)
    return runs


def _reported(run: Run) -> list[Evaluation]:
    """The results of a run that is complete, written as reports and shown."""
    results = [_read_result(_result_path(run.folder, case.index)) for case in run.cases]
    description = _read_json(run.folder / RUN_FILE)
    notes = report.of_quantised(run.session.settings.quantised_words, results)
    report.write_all(run.folder, description, results, run.too_long, notes)
    report.print_summary(results, [*run.too_long, *notes])
    console.say(f"Reports are in {run.folder}")
    return results


def _with_new_tokens(session: Session) -> Session:
    """The session with a default number of new tokens."""
    count = sdk.platform().new_tokens
    if session.settings.max_new_tokens is not None or count is None:
        return session
    console.say(
        f"Each prompt gets {count} new tokens on the stand-in (--max-new-tokens changes that)"
    )
    return session.changed(max_new_tokens=count)


def _cases(settings: Settings, texts: Sequence[str]) -> tuple[list[Case], list[str], Session]:
    """The chosen prompts that fit, a line for each that does not, and the opened session.

    Without `--seq-len` each prompt runs at the length of its row in prompt_data.txt, and the model
    is compiled for the longest.
    """
    rows = {} if settings.prompts or settings.record_baseline else _reference_rows(settings)
    chosen = _chosen(settings, len(texts))
    session = open_session(settings, [])
    ids = encode(session.tokenizer, texts, settings.raw)
    cases, too_long = [], []
    for index in chosen:
        row = rows.get(index)
        length = settings.asked_seq_len or length_for(len(ids[index]), row)
        if len(ids[index]) >= length:
            too_long.append(
                f"Prompt {index} ({shorten(texts[index])}) has {len(ids[index])} tokens and does "
                f"not fit --seq-len {length}: not run."
            )
            continue
        cases.append(Case(index, texts[index], ids[index], length, row))
    if not cases:
        raise UserError("None of the chosen prompts fits --seq-len; raise it.")
    longest = max(case.seq_len for case in cases)
    return cases, too_long, sized(session, longest, [case.ids for case in cases])


def _reference_rows(settings: Settings) -> dict[int, reference.Row]:
    rows = reference.read_rows(reference.files_of(settings.contest)[1])
    if settings.contest is not None:
        rows = [replace(row, seq_len=reference.CONTEST_SEQ_LEN) for row in rows]
    return {row.index: row for row in rows}


def sized(session: Session, seq_len: int, ids: Sequence[Sequence[int]]) -> Session:
    """The session with a model of another length, for prompts of these tokens."""
    check_seq_len(seq_len, session.model)
    settings, longest = session.settings, seq_len
    if settings.takes_chunks:
        longest = min(seq_len, settings.asked_max_context_length or LONGEST_PREFILL)
    chunk = settings.prefill_chunk if longest < seq_len else None
    settings = replace(settings, seq_len=seq_len, max_context_length=longest, prefill_chunk=chunk)
    return replace(session, settings=with_chunks(settings, session.model.config, ids))


def length_for(tokens: int, row: reference.Row | None = None) -> int:
    """The sequence length for a prompt: its row's if it fits, or one with room for new tokens."""
    if row is not None and tokens < row.seq_len:
        return row.seq_len
    needed = tokens + DEFAULT_NEW_TOKENS
    rounded = -(-needed // LENGTHS[0]) * LENGTHS[0]
    return next((length for length in LENGTHS if length >= needed), rounded)


def _chosen(settings: Settings, count: int) -> list[int]:
    """Indices after `--only` and `--limit`."""
    chosen = list(range(count)) if settings.only is None else sorted(set(settings.only))
    wrong = [index for index in chosen if not 0 <= index < count]
    if wrong:
        raise UserError(f"--only must name prompts 0 to {count - 1}, got {wrong[0]}; take it out.")
    return chosen[: settings.limit]


def _description(session: Session, cases: Sequence[Case]) -> dict[str, Any]:
    """The run's settings. `inputs` is a digest of all inputs, the model's files included; a resumed
    run must have the same digest."""
    settings = session.settings
    described = {
        "model": session.model.name,
        "model_path": str(session.model.path),
        "checkpoint": _digest(checkpoint_identity(session.model.path)),
        "submission": submission.digest(session.source),
        "submission_path": str(session.submission),
        "enable_nki": settings.enable_nki,
        "settings": json.loads(json.dumps(settings.neuron_config())),
        "prompts": [[case.index, case.seq_len] for case in cases],
        "prompt_texts": _digest([[case.prompt, case.ids] for case in cases]),
        "references": _digest([asdict(case.row) if case.row else None for case in cases]),
        "max_new_tokens": settings.max_new_tokens,
        "num_tokens_to_check": settings.num_tokens_to_check,
        "tolerances": [str(settings.tol_map), settings.divergence_difference_tol],
        "sdk": sdk.identity(),
        "times": sdk.platform().times,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    going_in = {field.name: getattr(settings, field.name) for field in fields(settings)}
    asked = {
        name: str(value) for name, value in going_in.items() if name not in _FREE_TO_CHANGE.split()
    }
    return described | {"inputs": _digest([described, asked, sdk.version()])}


# What a resumed run may ask differently: it changes no result.
_FREE_TO_CHANGE = """
resume debug recompile results_path compiled_model_path llama model_path isolate memory_limit
cpu_limit time_limit prompt_notes given contestants scheduler part
"""


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def _open_run(root: Path, resume: bool, description: dict[str, Any], finished: bool) -> Path:
    """The folder of this run: a new one, or the newest unfinished one with `--resume`.

    With `finished` it may also be the newest finished run with the same settings, since one
    submission may be done while others are not.
    """
    if resume:
        runs = sorted(path.parent for path in root.glob(f"*/{RUN_FILE}"))
        if finished and runs and not _changed(runs[-1], description):
            return runs[-1]
        unfinished = [folder for folder in runs if not (folder / report.REPORT_JSON).exists()]
        if unfinished:
            if changed := _changed(unfinished[-1], description):
                raise UserError(
                    f"The run in {unfinished[-1]} cannot be resumed: {', '.join(changed)} changed "
                    "since it started; give the same arguments, or start anew without --resume."
                )
            console.say(f"Resuming the run in {unfinished[-1]}")
            return unfinished[-1]
        console.say(f"No unfinished run in {root}: starting one")
    now = time.gmtime()
    name = time.strftime("%Y%m%d-%H%M%S", now)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    folder = next(root / name for name in names if not (root / name).exists())
    started = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", now)}
    write_text_atomically(folder / RUN_FILE, json.dumps(description | started, indent=1) + "\n")
    return folder


def _changed(folder: Path, description: dict[str, Any]) -> list[str]:
    """The settings that differ from those with which the folder's run started."""
    before = _read_json(folder / RUN_FILE)
    return [name for name, value in description.items() if before.get(name) != value]


def _run_cases(run: Run, alone: bool) -> None:
    """Evaluate each missing case and write its result file.

    A submission that cannot be built is an error where it is `alone`, else a result without points.
    """
    session, chosen = run.session, run.session.settings.part
    cases = [case for case in run.missing if chosen is None or case.index in chosen]
    if not cases:
        return
    coming = [_for_baseline(case, session) for case in cases]
    try:
        evaluator = Evaluator(session, coming)
    except UserError as error:
        if alone:
            raise
        for case in cases:
            write(run, _lost(session, case, str(error)))
        return
    with (
        contextlib.closing(evaluator),
        console.step("Evaluating prompts", total=len(cases)) as step,
    ):
        for done, case in enumerate(cases, start=1):
            settings = session.settings
            batch = [case.ids] * settings.batch_size
            tokens = _new_tokens(case, settings)
            part = 1 / max(1, evaluator.steps(batch, tokens, case.seq_len - len(case.ids)))
            step.note(f"Evaluating prompt {case.index} ({done} of {len(cases)})")
            for prompt in coming[done - 1 : done + AHEAD]:  # the baseline's part meanwhile
                evaluator.begin(*prompt)
            result = evaluator.evaluate(
                case.index,
                [case.prompt] * settings.batch_size,
                batch,
                case.seq_len,
                case.row,
                functools.partial(step.advance, part),
            )
            write(run, result)
        step.note("Evaluated prompts")


# --- on a cluster ---------------------------------------------------------------------------------
# What has to be the same on a worker: the driver, its models and the prompts.
ROOMS = (
    "neuron_cpu", "harness", "models", "main.py", "llama.py", "prompts.txt", "prompt_data.txt",
)  # fmt: skip
# What each piece of a run says itself; and what a worker's place may change in the description.
_OF_A_PIECE = frozenset(("scheduler", "contestants", "results_path", "resume", "recompile", "part"))
_OF_A_PLACE = frozenset(("submission_path", "model_path", "machine", "inputs", "started"))


def _run_elsewhere(runs: Sequence[Run], workers: cluster.Cluster) -> None:
    """The missing cases of all runs, in as many pieces as the cluster does at once."""
    each = -(-workers.slots // len(runs))
    pieces = [
        (run, cases)
        for run in runs
        for cases in (run.missing[number::each] for number in range(each))
        if cases
    ]
    count = sum(len(cases) for _, cases in pieces)
    pool = ThreadPoolExecutor(cluster.jobs(None, workers))
    try:
        futures = [pool.submit(_piece, workers, *piece) for piece in pieces]
        with console.step("Evaluating prompts", total=count) as step:
            for (run, cases), future in zip(pieces, futures):
                _take(run, cases, future.result(), len(runs) == 1)
                step.advance(len(cases))
    finally:
        workers.close()  # what waits for results ends
        pool.shutdown(cancel_futures=True)


def _piece(workers: cluster.Cluster, run: Run, cases: Sequence[Case]) -> dict[str, Any]:
    """What a worker's driver says of some cases (`cluster.command`)."""
    path, given = run.session.submission, run.session.settings.given
    own = submission.REPOSITORY in path.parents
    place = path.relative_to(submission.REPOSITORY) if own else path.relative_to("/")
    words = [f"{cluster.PROJECT}/main.py", "--mode", "evaluate_all"]
    words += options.words_of(given, lambda option: option.name not in _OF_A_PIECE)
    words += ["--llama", f"{cluster.PROJECT if own else cluster.FOLDER}/{place}"]
    words += ["--results-path", cluster.RESULTS, "--part", *(str(case.index) for case in cases)]
    files = [] if own else submission.files(path)
    try:
        return workers.call(cluster.command, files, words=words, cwd=os.getcwd())
    except cluster.WorkersLostError as error:
        return {"said": str(error), "results": {}}


def _take(run: Run, cases: Sequence[Case], told: dict[str, Any], alone: bool) -> None:
    """Write the results of a piece; an error in the place of those that it lacks."""
    description = told["results"].get(RUN_FILE, {})
    wrong = [name for name in _changed(run.folder, description) if name not in _OF_A_PLACE]
    if wrong:
        raise UserError(
            f"A worker's {wrong[0]} is not the one here, expected the same model, prompts and "
            "settings on all machines; give it the same files."
        )
    said = told["said"].removeprefix("main.py: ")
    for case in cases:
        found = told["results"].get(_result_path(run.folder, case.index).name)
        if found is not None:
            write(run, evaluation.from_dict(found))
        elif alone:
            raise UserError(f"A worker did not evaluate prompt {case.index}: {said}")
        else:
            write(run, _lost(run.session, case, said))


def _lost(session: Session, case: Case, error: str) -> Evaluation:
    """The result of a case that could not be run."""
    prompts = [case.prompt] * session.settings.batch_size
    return replace(planned(session, case.index, prompts, len(case.ids), case.seq_len), error=error)


def _for_baseline(case: Case, session: Session) -> tuple[list[int], int, int]:
    """What the baseline is asked: prompt, new tokens, and room for more whose speed is unknown."""
    known = reference.baseline_speed(session.settings, session.model.name, case.seq_len, case.row)
    room = 0 if known else case.seq_len - len(case.ids)
    return case.ids, _new_tokens(case, session.settings), room


def _new_tokens(case: Case, settings: Settings) -> int:
    """How many tokens a case makes and compares."""
    return min(case.seq_len - len(case.ids), settings.max_new_tokens or case.seq_len)


def write(run: Run, result: Evaluation) -> None:
    """The result as a file, which appears whole, and as a line."""
    text = json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n"
    write_text_atomically(_result_path(run.folder, result.id), text)
    console.say(report.line(result))


def _result_path(folder: Path, index: int) -> Path:
    return folder / f"prompt-{index:02d}.json"


def _read_result(path: Path) -> Evaluation:
    """The result of one prompt, whose file somebody may have edited or damaged since."""
    content = _read_json(path)
    try:
        return evaluation.from_dict(content)
    except ValueError as error:
        raise _unreadable(path, "it holds no result") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A file of an earlier run, which somebody may have edited or damaged since."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    return content


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        f"Cannot read {path} ({reason}), expected what an earlier run wrote; delete "
        f"{path if path.name != RUN_FILE else path.parent} and run again."
    )
