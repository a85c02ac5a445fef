"""The result of one batch of prompts: comparison, measurements, estimates and score."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

from pydantic import TypeAdapter

from harness.figures.accuracy import RowResult
from harness.figures.benchmark import SpeedReport
from harness.figures.flops import NkiShare
from harness.figures.score import Score


@dataclass(frozen=True)
class Speeds:
    """Speeds of the submission: by the clock here, and by the cost model where there is one."""

    measured: SpeedReport
    estimated: Optional[SpeedReport]

    @property
    def best(self) -> SpeedReport:
        """The figures that stand for a device: the estimate if there is one."""
        return self.estimated or self.measured

    def as_dict(self) -> dict[str, Any]:
        estimated = self.estimated.as_dict() if self.estimated else None
        return {"measured": self.measured.as_dict(), "estimated": estimated}


@dataclass(frozen=True)
class Figures:
    """The figures of a batch without an error; `accuracy` has one entry a row."""

    accuracy: list[RowResult]
    nki: NkiShare
    speed: Speeds
    score: Score

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy": [row.as_dict() for row in self.accuracy],
            "nki": asdict(self.nki),
            "speed": self.speed.as_dict(),
            "score": self.score.as_dict(),
        }


@dataclass(frozen=True)
class Evaluation:
    """One batch; it has figures or an `error`.

    Attributes:
        id: number of the prompt, from 0.
        prompt_tokens: of the longest prompt.
        seq_len: prompt and new tokens together.
        new_tokens: that were compared and measured behind each prompt.
        error: what the submission raised, in one sentence.
    """

    id: int
    prompts: list[str]
    prompt_tokens: int
    seq_len: int
    batch_size: int
    new_tokens: int
    accurate: bool = False
    error: Optional[str] = None
    figures: Optional[Figures] = None

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON, with its figures on the same level."""
        plain = {key: value for key, value in vars(self).items() if key != "figures"}
        return plain | (self.figures.as_dict() if self.figures else {})


def from_dict(content: Any) -> Evaluation:
    """Read back the result of `as_dict`; ValueError for anything else."""
    plain = TypeAdapter(Evaluation).validate_python(content)
    if plain.error is not None:
        return plain
    figures = TypeAdapter(Figures).validate_python(content)
    return replace(plain, figures=figures)
