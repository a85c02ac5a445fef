"""`--mode swap`: a kernel in any causal LM or encoder of transformers, held against PyTorch."""

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import console, files, sdk
from harness.errors import UserError, at_most
from harness.figures.benchmark import runs_asked
from harness.inputs import models, prompts, schema
from harness.inputs.features import LONGEST_EAGER
from harness.processes.workers import Answer, Job, SubmissionFailed, Worker, Workers
from harness.sdk import Source
from harness.session.opening import limits_of, read_tokenizer, work_folder
from harness.settings import Settings, Swap
from neuron_cpu.console import terminal

_REFERENCE = "harness.swapping.running:reference"
_CHECK = "harness.swapping.running:check"
_MEASURE = "harness.swapping.running:measure"
_ON_DEVICE = "harness.swapping.running:measure_on_device"
_ESTIMATE = "harness.figures.estimate:swapped"
LONGEST_RUN = 1e6  # seconds that a run may say to have taken
_SLOWEST_RUNS = ("compiled", "warm", "accuracy")  # events before the timed runs


@dataclass(frozen=True)
class Agreement:
    """Two results of a model.

    Attributes:
        mse: of all features of all tokens.
        cosine, least_cosine: of the tokens' last hidden states, their mean and the least one.
        argmax: share of tokens whose best next token is the same; None without a head.
    """

    mse: float
    cosine: float
    least_cosine: float
    argmax: float | None


@dataclass(frozen=True)
class Speed:
    """Seconds of one variant of a model.

    Attributes:
        compile_s: until it was ready to run.
        runs_s: of the timed runs.
        estimate_ms: on a NeuronCore by the cost model, with the shortest and longest time of a
            device that fit it; empty where there is none.
        why_not: why tracing refused the model, which PyTorch's `neuron` device ran then; without
            an estimate, why there is none.
    """

    compile_s: float
    runs_s: tuple[float, ...]
    estimate_ms: tuple[float, ...] = ()
    why_not: str = ""

    @property
    def latency_ms(self) -> float:
        return 1000 * sum(self.runs_s) / len(self.runs_s)


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
    print_table(title, rows, len(trial.ids), times)
    print_ratios(eager[1], kernel[1], times)
    return _verdict(trial.swap, kernel[0])


def _verdict(swap: Swap, close: Agreement) -> int:
    if close.least_cosine >= swap.least_cosine:
        return 0
    console.say(
        f"A token's cosine to the reference is {close.least_cosine:.6f}, expected at least "
        f"{swap.least_cosine:g} (--least-cosine); compare with the row of eager PyTorch."
    )
    return 1


def _model(asked: Path | None) -> tuple[Path, str]:
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
        raise UserError(
            f"{folder}/config.json gives no vocab_size, which inputs are made from; add it."
        )
    if type(longest) is int:
        at_most("--seq-len", settings.seq_len, longest, f" for {folder.name}")
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


def _job(trial: Trial, source: Path | None) -> Job:
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
    path = files.reference_file(identity)
    kept = files.read_reference(path)
    if kept is None:
        with console.step("Computing the reference in fp32"):
            worker = workers.worker(_job(trial, None), work_folder(trial.settings))
            answer = worker.call(
                _REFERENCE, "The model cannot be run", ids=trial.ids, lengths=trial.lengths, at=at
            )
            worker.close()
        kept = answer.body, answer.arrays
        files.write_reference(path, *kept)
    else:
        console.say(f"Reusing the reference in {console.shown(path)}")
    return replace(trial, plan=kept[0], reference=kept[1])


def _variant(trial: Trial, worker: Worker, name: str, kernel: bool) -> tuple[Agreement, Speed]:
    """One variant of the model: its results and times.

    Traced; on the stand-in's device where tracing or the estimate refuses a graph.
    """
    told: dict[str, Any] = {
        "ids": trial.ids,
        "lengths": trial.lengths,
        "plan": trial.plan,
        "swapped": kernel,
    }
    what = "The kernel cannot be run" if kernel else "The model cannot be run"
    answer, speed = _measured(trial, worker, name, what, told)
    if sdk.platform().simulates:
        if not speed.why_not:
            with console.step(f"Estimating {name}"):
                found = worker.call(_ESTIMATE, what, **told).body
            speed = replace(speed, estimate_ms=tuple(found["ms"]), why_not=str(found["why_not"]))
        if speed.why_not:
            try:
                answer, speed = _measured(trial, worker, name, what, told, speed.why_not)
            except UserError as error:
                if not answer.arrays or worker.ended:
                    raise
                speed = replace(speed, why_not=f"{speed.why_not} On the device neuron: {error}")
    return agreement(answer.arrays, trial.reference, trial.lengths), speed


def _measured(
    trial: Trial, worker: Worker, name: str, what: str, told: dict[str, Any], refusal: str = ""
) -> tuple[Answer, Speed]:
    """A variant's results and the clock's times: traced, or on the device after a refusal.

    Without results where tracing refuses; `why_not` has its sentence then.
    """
    clock = [time.monotonic()]
    runs = runs_asked(trial.settings.runs)
    where = " on the device neuron" if refusal else ""
    with console.step(f"Running {name}{where}", total=len(_SLOWEST_RUNS) + runs) as step:

        def note(seconds: Any) -> None:
            least = seconds if isinstance(seconds, float) and 0 <= seconds < LONGEST_RUN else 0.0
            clock.append(max(time.monotonic(), clock[-1] + least))
            step.advance()

        answer = worker.call(_ON_DEVICE if refusal else _MEASURE, what, note, **told, runs=runs)
    if not refusal and isinstance(answer.body, str):
        return answer, Speed(0.0, (), why_not=answer.body)
    if len(clock) != 1 + len(_SLOWEST_RUNS) + runs:
        raise SubmissionFailed(f"{what}: expected {runs} timed runs, got {len(clock) - 4}.")
    shapes = [array.shape for array in trial.reference]
    if [array.shape for array in answer.arrays] != shapes:
        raise SubmissionFailed(f"{what}: expected results of {shapes}, got others.")
    seconds = tuple(np.diff(clock))
    speed = Speed(seconds[0], seconds[len(_SLOWEST_RUNS) :])
    if refusal:
        left = ", ".join(answer.body["fallbacks"])
        refusal += f" Left to the CPU, and estimated as if it were not: {left}." if left else ""
        speed = replace(speed, estimate_ms=tuple(answer.body["ms"]), why_not=refusal)
    return answer, speed


def agreement(
    found: Sequence[np.ndarray], expected: Sequence[np.ndarray], lengths: Sequence[int]
) -> Agreement:
    """Hidden states [B, S, H], and best tokens [B, S] where there are any, of two runs."""
    kept = np.arange(found[0].shape[1]) < np.asarray(lengths)[:, None]
    a, b = (np.asarray(run[0], np.float64)[kept] for run in (found, expected))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (a * b).sum(1) / norms
    same = None
    if len(found) > 1 and len(expected) > 1:
        same = float((found[1][kept] == expected[1][kept]).mean())
    return Agreement(float(((a - b) ** 2).mean()), float(cosines.mean()), _least(cosines), same)


def _least(values: np.ndarray) -> float:
    """NaN where one is: a comparison with it fails."""
    return float(values.min())


PIPED_WIDTH = 160
# What a narrow terminal does without, first named first.
EXPENDABLE = ("compile s", "band ms", "MSE")


def print_table(
    title: str, rows: Sequence[tuple[str, Agreement, Speed]], prompts: int, times: Source
) -> None:
    """Accuracy and speed of each variant of the model."""
    table = terminal.table_of(
        "attention, norms, MLP by|>MSE|>cosine|>least|>argmax|>compile s|>ms|>prompts/s|"
        ">estimated ms|>band ms|>est. prompts/s",
        title,
    )
    for name, close, speed in rows:
        estimate, band, rate = "-", "-", "-"
        if speed.estimate_ms:
            first, low, high = speed.estimate_ms
            estimate, band = f"{first:.3f}", f"{low:.3f} to {high:.3f}"
            rate = f"{1000 * prompts / first:.2f}"
        table.add_row(
            name,
            f"{close.mse:.3g}",
            f"{close.cosine:.6f}",
            f"{close.least_cosine:.6f}",
            "-" if close.argmax is None else f"{close.argmax:.2%}",
            f"{speed.compile_s:.1f}",
            f"{speed.latency_ms:.0f}",
            f"{1000 * prompts / speed.latency_ms:.3g}",
            estimate,
            band,
            rate,
        )
    terminal.print_table(terminal.output(PIPED_WIDTH), table, EXPENDABLE)
    terminal.printed(f"ms and prompts/s: {times.label}; estimated ms: {Source.COST_MODEL}.")


def print_ratios(eager: Speed, kernel: Speed, times: Source) -> None:
    """Print how many times faster than eager PyTorch it is, or why there is no estimate."""
    ratios = [f"{eager.latency_ms / kernel.latency_ms:.3g} ({times})"]
    same_path = bool(eager.why_not) == bool(kernel.why_not)  # both graphs, or both operators
    if eager.estimate_ms and kernel.estimate_ms and same_path:
        ratio = eager.estimate_ms[0] / kernel.estimate_ms[0]
        ratios.append(f"{ratio:.3g} ({Source.COST_MODEL})")
    terminal.printed(f"Times as fast as eager: {', '.join(ratios)}.")
    reasons: dict[tuple[str, bool], list[str]] = {}
    for name, speed in (("eager", eager), ("the kernel", kernel)):
        if speed.why_not:
            reasons.setdefault((speed.why_not, bool(speed.estimate_ms)), []).append(name)
    for (why, on_device), names in reasons.items():
        what = " and ".join(names)
        told = f"No estimate for {what}: {why}"
        if on_device:
            told = (
                f"PyTorch's device neuron ran {what} operator by operator, because tracing refused "
                "it; the estimate leaves out the host's time between operators, and no source "
                f"lists those of a device. The refusal: {why}"
            )
        terminal.printed(told)
