"""`--mode swap`: a kernel in any causal LM or encoder of transformers, held against PyTorch."""

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import numpy as np

from harness import console, sdk
from harness.errors import UserError
from harness.figures.agreement import Agreement, Speed, agreement
from harness.figures.benchmark import runs_asked
from harness.inputs import models, prompts, schema
from harness.inputs.features import LONGEST_EAGER
from harness.output import swapped as output
from harness.processes.workers import Job, SubmissionFailed, Worker, Workers
from harness.session.jobs import limits_of, work_folder
from harness.session.opening import read_tokenizer
from harness.settings import Settings, Swap
from harness.swapping import reference_cache

_REFERENCE = "harness.swapping.running:reference"
_CHECK = "harness.swapping.running:check"
_MEASURE = "harness.swapping.running:measure"
_ESTIMATE = "harness.figures.swapped:estimate"
LONGEST_RUN = 1e6  # seconds that a run may say to have taken
_SLOWEST_RUNS = ("compiled", "warm", "accuracy")  # events before the timed runs


@dataclass(frozen=True)
class Trial:
    """One model and its inputs.

    Attributes:
        ids: token ids [B, S].
        lengths: of each row, before its padding.
        plan: what each call of attention hides (`harness.swapping.running`).
        reference: last hidden states [B, S, H] in fp32 and, with a head, best tokens [B, S].
    """

    settings: Settings
    swap: Swap
    folder: Path
    ids: list[list[int]]
    lengths: list[int]
    plan: Sequence[str] = ()
    reference: Sequence[np.ndarray] = ()


def run(settings: Settings) -> int:
    """Reference, eager PyTorch, the kernel; 1 where a token is farther off than --least-cosine."""
    assert settings.swap is not None
    folder, name = _model(settings.model_path)
    trial = Trial(settings, settings.swap, folder, *_inputs(settings, folder))
    workers = Workers()
    workers.prepare()
    with console.step("Importing PyTorch, transformers and the kernel", least_seconds=1):
        worker = workers.worker(_job(trial, trial.swap.source), work_folder(settings))
        worker.call(_CHECK, "The kernel cannot be imported")
    trial = _with_reference(trial, workers)
    plain = "eager PyTorch" if settings.seq_len <= LONGEST_EAGER else "PyTorch's sdpa"
    eager = _variant(trial, worker, plain, False)
    kernel = _variant(trial, worker, trial.swap.name, True)
    times = sdk.platform().times
    cut = "" if trial.swap.layers is None else f", {trial.swap.layers} layers"
    title = (
        f"{name}{cut}: {len(trial.ids)} x {len(trial.ids[0])} tokens in {settings.torch_dtype}, "
        "against PyTorch in fp32"
    )
    rows = [(plain, *eager), (f"{trial.swap.name} at {trial.swap.at}", *kernel)]
    output.print_table(title, rows, len(trial.ids), times)
    output.print_ratios(eager[1], kernel[1], times)
    return _verdict(trial.swap, kernel[0])


def _verdict(swap: Swap, close: Agreement) -> int:
    if close.least_cosine >= swap.least_cosine:
        return 0
    console.say(
        f"A token's cosine to the reference is {close.least_cosine:.6f}, expected at least "
        f"{swap.least_cosine:g} (--least-cosine); compare with the row of eager PyTorch."
    )
    return 1


def _model(asked: Optional[Path]) -> tuple[Path, str]:
    """Any model's folder, and its name."""
    if asked is None:
        chosen = models.choose_model(None)
        return chosen.path, chosen.name
    folder, name = models.located(asked)
    if not folder.is_dir():
        raise UserError(models.no_folder(folder))
    folder = folder.resolve()
    console.say(f"Model: {name or folder.name} ({console.shown(folder)})")
    return folder, name or folder.name


def _inputs(settings: Settings, folder: Path) -> tuple[list[list[int]], list[int]]:
    """Token ids [B, S] and the rows' own lengths: prompts, or seeded tokens where none are named.

    Prompts are padded on the right to --seq-len, the one length that is compiled.
    """
    config = schema.read_json(folder / "config.json")
    vocabulary, longest = config.get("vocab_size"), config.get("max_position_embeddings")
    if type(vocabulary) is not int or vocabulary < 1:
        raise UserError(f"{folder}/config.json gives no vocab_size, which inputs are made from.")
    if type(longest) is int and settings.seq_len > longest:
        raise UserError(f"--seq-len must be at most {longest} for {folder.name}.")
    if not settings.prompts:
        shape = settings.batch_size, settings.seq_len
        ids = np.random.default_rng(settings.seed).integers(0, vocabulary, shape)
        return ids.tolist(), [settings.seq_len] * settings.batch_size
    if settings.batch_size != len(settings.prompts):
        raise UserError(
            f"--batch-size is the number of prompts here, {len(settings.prompts)}, got "
            f"{settings.batch_size}; leave it out."
        )
    rows = prompts.encode(read_tokenizer(folder, "right"), settings.prompts, raw=True)
    for text, row in zip(settings.prompts, rows):
        if not 0 < len(row) <= settings.seq_len or not all(0 <= t < vocabulary for t in row):
            raise UserError(
                f"The prompt {prompts.shorten(text)} has {len(row)} tokens, expected 1 to "
                f"{settings.seq_len} (--seq-len), each below vocab_size {vocabulary}; change one."
            )
    return [row + [0] * (settings.seq_len - len(row)) for row in rows], [len(r) for r in rows]


def _job(trial: Trial, source: Optional[Path]) -> Job:
    here = sdk.platform()
    return Job(
        settings=trial.settings,
        model_path=trial.folder,
        pad_token_id=0,
        eos_token_id=None,
        source=source,
        scratch=Path(),
        limits=limits_of(trial.settings) if trial.settings.isolate else None,
        confined=here.confines,
    )


def _with_reference(trial: Trial, workers: Workers) -> Trial:
    """PyTorch's results in fp32, kept for the next time."""
    at, swap = trial.swap.at, trial.swap
    identity = {
        "checkpoint": models.checkpoint_identity(trial.folder),
        "layers": swap.layers,
        "at": at,
        "ids": trial.ids,
        "lengths": trial.lengths,
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }
    path = reference_cache.place(identity)
    kept = reference_cache.read(path)
    if kept is None:
        with console.step("Computing the reference in fp32"):
            worker = workers.worker(_job(trial, None), work_folder(trial.settings))
            answer = worker.call(
                _REFERENCE, "The model cannot be run", ids=trial.ids, lengths=trial.lengths, at=at
            )
            worker.close()
        kept = answer.body, answer.arrays
        reference_cache.write(path, *kept)
    else:
        console.say(f"Reusing the reference in {console.shown(path)}")
    return replace(trial, plan=kept[0], reference=kept[1])


def _variant(trial: Trial, worker: Worker, name: str, kernel: bool) -> tuple[Agreement, Speed]:
    """One variant of the model: its results and times."""
    clock = [time.monotonic()]
    runs = runs_asked(trial.settings.runs)
    told: dict[str, Any] = {
        "ids": trial.ids,
        "lengths": trial.lengths,
        "plan": trial.plan,
        "swapped": kernel,
    }
    what = "The kernel cannot be run" if kernel else "The model cannot be run"
    with console.step(f"Running {name}", total=len(_SLOWEST_RUNS) + runs) as step:

        def note(seconds: Any) -> None:
            least = seconds if isinstance(seconds, float) and 0 <= seconds < LONGEST_RUN else 0.0
            clock.append(max(time.monotonic(), clock[-1] + least))
            step.advance()

        answer = worker.call(_MEASURE, what, note, **told, runs=runs)
    if len(clock) != 1 + len(_SLOWEST_RUNS) + runs:
        raise SubmissionFailed(f"{what}: expected {runs} timed runs, got {len(clock) - 4}.")
    shapes = [array.shape for array in trial.reference]
    if [array.shape for array in answer.arrays] != shapes:
        raise SubmissionFailed(f"{what}: expected results of {shapes}, got others.")
    seconds = tuple(np.diff(clock))
    speed = Speed(seconds[0], seconds[len(_SLOWEST_RUNS) :])
    if sdk.platform().simulates:
        with console.step(f"Estimating {name}"):
            found = worker.call(_ESTIMATE, what, **told).body
        speed = replace(speed, estimate_ms=tuple(found["ms"]), why_not=str(found["why_not"]))
    return agreement(answer.arrays, trial.reference, trial.lengths), speed
