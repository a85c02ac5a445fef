"""How well a model predicts a text: exp of the mean negative log-likelihood of its tokens.

The text is cut into runs of WINDOW tokens. A model gets the first two tokens of each run and then
every token that really follows. Its logits in front of that token count. So a token is predicted
from at most WINDOW - 1 tokens before it, and the runs are a batch of plain decode steps, on a
device too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import inputs
from harness.errors import UserError
from harness.processes.workers import SubmissionFailed
from harness.session.building import Loaded

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
