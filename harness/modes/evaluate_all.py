"""`--mode evaluate_all`, and `test.py`: every prompt of prompts.txt, one result file each.

A run is a folder: `run.json` says what was asked, `prompt-NN.json` appears whole when that prompt
is done, the reports at the end. Killed at any moment, `--resume` takes up the newest unfinished
run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from harness import console, sdk
from harness.errors import UserError
from harness.figures import accuracy, baseline, benchmark, reference
from harness.files import check_writable_folder
from harness.inputs import command_line
from harness.inputs.prompts import encode, read_prompt_file, shorten
from harness.modes.evaluate import Evaluator
from harness.output import report
from harness.session.building import Session, check_seq_len, open_session
from neuron_cpu.files import write_text_atomically

RUN_FILE = "run.json"
# A prompt that fits no row of prompt_data.txt runs at the first of these lengths that leaves room
# for DEFAULT_NEW_TOKENS, longer ones at a multiple of the first, the smallest bucket of NxDI.
LENGTHS = (128, 256, 512, 640, 1280)
DEFAULT_NEW_TOKENS = 64
# On the stand-in each token is simulated: enough to see a wrong kernel, few enough for a laptop.
SIMULATOR_NEW_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One prompt of the run with its token count, the length it runs at and its reference row."""

    index: int
    prompt: str
    ids: list[int]
    seq_len: int
    row: Optional[reference.Row]


def run(args: argparse.Namespace) -> int:
    """Run what is missing; exit status 0 where every prompt that fits ran and was accurate."""
    accuracy.check_settings(args)
    results_root = Path(args.results_path).expanduser()
    check_writable_folder(results_root)
    texts = args.prompts or read_prompt_file(reference.PROMPTS_FILE)
    cases, too_long, session = _cases(args, texts)
    if args.record_baseline:
        baseline.record(session, cases)
        return 0
    if args.max_new_tokens is None and sdk.is_stand_in():
        args.max_new_tokens = SIMULATOR_NEW_TOKENS
        console.say(
            f"Each prompt gets {SIMULATOR_NEW_TOKENS} new tokens on the stand-in "
            "(--max-new-tokens changes that)"
        )
    folder = _open_run(results_root, args.resume, _description(session, cases))
    missing = [case for case in cases if not _result_path(folder, case.index).exists()]
    for case in cases:
        if case not in missing:  # a damaged file is refused before the others run
            _read_json(_result_path(folder, case.index))
    if len(missing) < len(cases):
        console.say(f"{len(cases) - len(missing)} of {len(cases)} prompts are done already")
    _run_cases(session, missing, folder)
    results = [_read_json(_result_path(folder, case.index)) for case in cases]
    description = _read_json(folder / RUN_FILE)
    report.write_all(folder, description, results, too_long)
    report.print_summary(results, too_long)
    console.say(f"Reports are in {folder}")
    return 0 if all(result["accurate"] for result in results) else 1


def _cases(args: argparse.Namespace, texts: Sequence[str]) -> tuple[list[Case], list[str], Session]:
    """The chosen prompts that fit, a line for each that does not, and the opened session.

    Without `--seq-len` each prompt runs at the length of its row in prompt_data.txt, and the model
    is compiled for the longest.
    """
    rows = {} if args.prompts or args.record_baseline else _reference_rows()
    chosen = _chosen(args, len(texts))
    asked = args.seq_len if args.given_seq_len else None
    session = open_session(args, [])
    ids = encode(session.tokenizer, texts, args.raw)
    cases, too_long = [], []
    for index in chosen:
        row = rows.get(index)
        length = asked or length_for(len(ids[index]), row)
        if len(ids[index]) >= length:
            too_long.append(
                f"Prompt {index} ({shorten(texts[index])}) has {len(ids[index])} tokens and does "
                f"not fit --seq-len {length}: not run."
            )
            continue
        cases.append(Case(index, texts[index], ids[index], length, row))
    if not cases:
        raise UserError("None of the chosen prompts fits --seq-len; raise it.")
    return cases, too_long, _sized(session, cases)


def _reference_rows() -> dict[int, reference.Row]:
    return {row.index: row for row in reference.read_rows()}


def _sized(session: Session, cases: Sequence[Case]) -> Session:
    """The session with a model as long as the longest case."""
    args = session.args
    args.seq_len = args.max_context_length = max(case.seq_len for case in cases)
    check_seq_len(args, session.model)
    return session


def length_for(tokens: int, row: Optional[reference.Row] = None) -> int:
    """Sequence length for a prompt: its row's where it fits, else with room for new tokens."""
    if row is not None and tokens < row.seq_len:
        return row.seq_len
    needed = tokens + DEFAULT_NEW_TOKENS
    rounded = -(-needed // LENGTHS[0]) * LENGTHS[0]
    return next((length for length in LENGTHS if length >= needed), rounded)


def _chosen(args: argparse.Namespace, count: int) -> list[int]:
    """Indices after `--only` and `--limit`."""
    chosen = list(range(count)) if args.only is None else sorted(set(args.only))
    wrong = [index for index in chosen if not 0 <= index < count]
    if wrong:
        raise UserError(f"--only must name prompts 0 to {count - 1}, got {wrong[0]}.")
    return chosen[: args.limit]


def _description(session: Session, cases: Sequence[Case]) -> dict[str, Any]:
    """What was asked: a resumed run must ask the same."""
    args = session.args
    texts = "\0".join(case.prompt for case in cases)
    return {
        "model": session.model.name,
        "submission": hashlib.sha256(session.submission.read_bytes()).hexdigest(),
        "submission_path": str(session.submission),
        "enable_nki": args.enable_nki,
        "settings": json.loads(json.dumps(command_line.settings(args))),
        "prompts": [[case.index, case.seq_len] for case in cases],
        "prompt_texts": hashlib.sha256(texts.encode()).hexdigest(),
        "max_new_tokens": args.max_new_tokens,
        "num_tokens_to_check": args.num_tokens_to_check,
        "tolerances": [str(args.tol_map), args.divergence_difference_tol],
        "sdk": sdk.identity(),
        "times": benchmark.source(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def _open_run(root: Path, resume: bool, description: dict[str, Any]) -> Path:
    """The folder of this run: a new one, or the newest unfinished one with `--resume`."""
    if resume:
        runs = sorted(path.parent for path in root.glob(f"*/{RUN_FILE}"))
        unfinished = [folder for folder in runs if not (folder / report.REPORT_JSON).exists()]
        if unfinished:
            _check_same(unfinished[-1], description)
            console.say(f"Resuming the run in {unfinished[-1]}")
            return unfinished[-1]
        console.say(f"No unfinished run in {root}: starting one")
    folder = root / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    suffix = 0
    while folder.exists():
        suffix += 1
        folder = root / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{suffix}"
    started = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    text = json.dumps(description | started, indent=1) + "\n"
    write_text_atomically(folder / RUN_FILE, text)
    return folder


def _check_same(folder: Path, description: dict[str, Any]) -> None:
    before = _read_json(folder / RUN_FILE)
    changed = [name for name, value in description.items() if before.get(name) != value]
    if changed:
        raise UserError(
            f"The run in {folder} cannot be resumed: {', '.join(changed)} changed since it "
            "started; give the same arguments, or start anew without --resume."
        )


def _run_cases(session: Session, cases: Sequence[Case], folder: Path) -> None:
    """Evaluate each case and write its result file."""
    if not cases:
        return
    evaluator = Evaluator(session)
    with console.step("Evaluating prompts", total=len(cases)) as step:
        for done, case in enumerate(cases, start=1):
            batch = [case.ids] * session.args.batch_size
            tokens = min(case.seq_len - len(case.ids), session.args.max_new_tokens or case.seq_len)
            part = 1 / max(1, evaluator.steps(batch, tokens))
            step.note(f"Evaluating prompt {case.index} ({done} of {len(cases)})")
            result = evaluator.evaluate(
                case.index,
                [case.prompt] * session.args.batch_size,
                batch,
                case.seq_len,
                case.row,
                functools.partial(step.advance, part),
            )
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            write_text_atomically(_result_path(folder, case.index), text)
            console.say(report.line(result))
        step.note("Evaluated prompts")


def _result_path(folder: Path, index: int) -> Path:
    return folder / f"prompt-{index:02d}.json"


def _read_json(path: Path) -> dict[str, Any]:
    """A file of an earlier run, which somebody may have edited or damaged since."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"Cannot read {path} ({error}), expected what an earlier run wrote; delete "
            f"{path if path.name != RUN_FILE else path.parent} and run again."
        ) from error
    return content
