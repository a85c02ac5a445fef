"""Figures of a kernel in a model of transformers: closeness to PyTorch, time, prompts a second.

Formulas: MSE = mean((a - b)^2); cosine = a.b / (|a| |b|) of each token's last hidden state; argmax
agreement = the share of tokens with the same best next token. Tokens that pad a row do not count.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np


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
    argmax: Optional[float]


@dataclass(frozen=True)
class Speed:
    """Seconds of one variant of a model.

    Attributes:
        compile_s: until it was ready to run.
        runs_s: of the timed runs.
        estimate_ms: on a NeuronCore by the cost model, with the shortest and longest time of a
            device that fit it; empty where there is none.
        why_not: why there is no estimate.
    """

    compile_s: float
    runs_s: tuple[float, ...]
    estimate_ms: tuple[float, ...] = ()
    why_not: str = ""

    @property
    def latency_ms(self) -> float:
        return 1000 * sum(self.runs_s) / len(self.runs_s)

    def as_dict(self, prompts: int) -> dict[str, Any]:
        """For JSON."""
        own = {"latency_ms": self.latency_ms, "prompts_per_s": 1000 * prompts / self.latency_ms}
        if self.estimate_ms:
            own["estimated_prompts_per_s"] = 1000 * prompts / self.estimate_ms[0]
        return asdict(self) | own


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
