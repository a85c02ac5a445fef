"""The result of one batch of prompts: comparison, measurements, estimates and score."""

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from harness.figures.accuracy import RowResult
from harness.figures.benchmark import SpeedReport
from harness.figures.graphs import NkiShare
from harness.sdk import Source


@dataclass(frozen=True)
class Speed:
    """Figures of one model on one prompt, all from one `source`."""

    latency_ms: float
    throughput: float  # tokens/s, prompt and new tokens of all rows over the whole run
    source: Source
    ttft_ms: float | None = None
    band_ms: tuple[float, float] | None = None  # latencies of a device that fit an estimate


@dataclass(frozen=True)
class Score:
    """A score and its factors; `value` is None where `reason` says why there can be none.

    `band` is the range of the value on a device where one side or both are estimated. Latency and
    throughput both depend on the time of a generation, so its error counts twice. Where both sides
    are estimated their errors are taken as independent, although one model made them.
    """

    accurate: bool
    nki_share: float
    speed: Speed
    base: Speed
    reduced_latency: float | None
    increased_throughput: float | None
    value: float | None
    ttft_value: float | None
    reason: str | None
    band: tuple[float, float] | None = None

    @property
    def source(self) -> str:
        """Where the two sides' figures come from, for the report's column: once where alike."""
        return " / ".join(dict.fromkeys((str(self.speed.source), str(self.base.source))))


@dataclass(frozen=True)
class Speeds:
    """Speeds of the submission: by the clock here, and by the cost model where there is one."""

    measured: SpeedReport
    estimated: SpeedReport | None

    @property
    def best(self) -> SpeedReport:
        """The figures that stand for a device: the estimate if there is one."""
        return self.estimated or self.measured


@dataclass(frozen=True)
class Figures:
    """The figures of a batch without an error; `accuracy` has one entry a row."""

    accuracy: list[RowResult]
    nki: NkiShare
    speed: Speeds
    score: Score


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
    error: str | None = None
    figures: Figures | None = None


def from_dict(content: Any) -> Evaluation:
    """Read back the result of `asdict`; ValueError for anything else."""
    found = TypeAdapter(Evaluation).validate_python(content)
    if (found.figures is None) == (found.error is None):
        raise ValueError("expected figures or an error")
    return found


def from_report(report: SpeedReport) -> Speed:
    """The figures that the score uses, out of a benchmark report."""
    e2e = report.e2e_model
    return Speed(
        e2e["latency_ms_p99"], e2e["throughput"], report.source, report.ttft_ms, report.band_ms
    )


def score(accurate: bool, nki_share: float, speed: Speed, base: Speed) -> Score:
    """Combine the factors; wall-clock times of the simulator never make a score."""
    if Source.SIMULATOR in (speed.source, base.source):
        reason = "wall-clock times of the simulator are not device times"
        return Score(accurate, nki_share, speed, base, None, None, None, None, reason)
    latency = base.latency_ms / speed.latency_ms
    throughput = speed.throughput / base.throughput
    rest = int(accurate) * throughput * (1 + nki_share)
    first = None
    if base.ttft_ms is not None and speed.ttft_ms is not None:
        first = base.ttft_ms / speed.ttft_ms * rest
    value = latency * rest
    band = _band(value, speed, base)
    return Score(accurate, nki_share, speed, base, latency, throughput, value, first, None, band)


def _band(value: float, speed: Speed, base: Speed) -> tuple[float, float] | None:
    """Lowest and highest score that the bands of the two times allow; None where both are known."""
    if speed.band_ms is None and base.band_ms is None:
        return None
    fastest, slowest = speed.band_ms or (speed.latency_ms, speed.latency_ms)
    base_fastest, base_slowest = base.band_ms or (base.latency_ms, base.latency_ms)
    known = base.latency_ms / speed.latency_ms
    return (
        value * (base_fastest / slowest / known) ** 2,
        value * (base_slowest / fastest / known) ** 2,
    )
