"""`--mode perplexity`: how well the text is predicted, by float weights and by quantised ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import console, inputs
from harness.errors import UserError
from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded, build
from harness.session.opening import open_session
from harness.settings import QUANTISED_AS, Settings
from neuron_cpu.console import terminal

WIDTH = 120  # columns of a table that goes to a file


def run(settings: Settings) -> int:
    """Print the perplexity of the float model and of quantised models. By default these are int8
    and fp8, with a scale for each channel."""
    if settings.on_device_sampling:
        raise UserError("--mode perplexity reads logits; leave --on-device-sampling out.")
    results = [_measured(variant) for variant in variants(settings)]
    _print(results)
    return 0


def variants(settings: Settings) -> list[Settings]:
    """The settings of the float model first, then of the models compared with it."""
    plain = settings.in_float()
    if settings.quantised_words:
        return [plain, settings]
    weights = replace(plain, quantized=True, quantization_type="per_channel_symmetric")
    return [plain, *(replace(weights, quantization_dtype=d) for d in QUANTISED_AS.values())]


def _measured(settings: Settings) -> Perplexity:
    """One model, opened, compiled where it changed, and closed again."""
    length = settings.seq_len
    session = open_session(replace(settings, batch_size=1), [])
    try:
        ids = session.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
        runs = runs_of(ids, length)
        loaded = build(session.changed(batch_size=len(runs)))
        title = f"Reading {len(runs)} runs of {length} tokens"
        with console.step(title, total=length - GIVEN) as step:
            return measure(loaded, runs, lambda _: step.advance())
    finally:
        session.workers.close()


def _print(results: list[Perplexity]) -> None:
    title = f"Perplexity of {TEXT.name}"
    table = terminal.table_of("model|>perplexity|>above the first|>tokens", title)
    for found in results:
        above = "-" if found is results[0] else f"{found.relative(results[0]):+.2%}"
        table.add_row(found.words, f"{found.value:.3f}", above, str(found.tokens))
    terminal.print_table(terminal.output(WIDTH), table)
    terminal.printed(
        f"Another text of this length would move each by some {results[0].error:.0%}, all of them "
        "together: the differences are of the weights."
    )


TEXT = Path(inputs.__file__).with_name("perplexity.txt")  # written for this project
WINDOW = 128
MOST_RUNS = 8
GIVEN = 2  # tokens of a run that are not predicted: NxDI decodes no prompt of one token
_FORCED = "harness.session.model:forced"
_FAILED = "The model fails while it reads the text"


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one model on a number of tokens, and the standard error of its logarithm."""

    words: str  # what the weights and the cache are
    value: float
    tokens: int
    error: float

    def relative(self, reference: Perplexity) -> float:
        """The share by which it is above the reference."""
        return self.value / reference.value - 1


def runs_of(ids: Sequence[int], length: int) -> list[list[int]]:
    """Cut a text into runs of `length` tokens, MOST_RUNS at most."""
    count = min(MOST_RUNS, len(ids) // length)
    if not count:
        raise UserError(
            f"The text has {len(ids)} tokens, expected at least --seq-len {length}; give a smaller "
            "--seq-len."
        )
    return [list(ids[at * length : (at + 1) * length]) for at in range(count)]


def measure(
    loaded: Loaded, runs: Sequence[Sequence[int]], on_step: Callable[[list[int]], Any]
) -> Perplexity:
    """The perplexity of a loaded model on runs of equal length; `on_step` after each token."""
    predicted = len(runs[0]) - GIVEN
    answer = loaded.call(_FORCED, _FAILED, on_step, runs=[list(run) for run in runs], given=GIVEN)
    shape = (predicted, len(runs))
    if len(answer.arrays) != 1 or answer.arrays[0].shape != shape:
        found = [array.shape for array in answer.arrays]
        raise SubmissionFailed(f"{_FAILED}: expected likelihoods of shape {shape}, got {found}.")
    losses = answer.arrays[0].astype(np.float64)
    if not np.isfinite(losses).all():
        raise SubmissionFailed(f"{_FAILED}: its logits are NaN or infinite.")
    settings = loaded.session.settings
    words = settings.quantised_words or f"{settings.torch_dtype} weights"
    error = float(losses.std()) / math.sqrt(losses.size)
    return Perplexity(words, math.exp(float(losses.mean())), losses.size, error)
