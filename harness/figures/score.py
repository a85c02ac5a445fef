"""The contest's score, with each of its factors and where its figures come from.

score = accuracy * (base latency / latency) * (throughput / base throughput) * (1 + NKI share),
latency being the end-to-end p99 as the contest's driver computes it; the contest's README words
the second factor with the time to the first token, so that score stands beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional

from harness.figures.benchmark import SpeedReport
from harness.sources import Source


@dataclass(frozen=True)
class Speed:
    """Figures of one model on one prompt, all from one `source`."""

    latency_ms: float
    throughput: float  # tokens/s, prompt and new tokens of all rows over the whole run
    source: Source
    ttft_ms: Optional[float] = None


@dataclass(frozen=True)
class Score:
    """A score and its factors; `value` is None where `reason` says why there can be none."""

    accurate: bool
    nki_share: float
    speed: Speed
    base: Speed
    reduced_latency: Optional[float]
    increased_throughput: Optional[float]
    value: Optional[float]
    ttft_value: Optional[float]
    reason: Optional[str]

    @property
    def source(self) -> str:
        """Where the two sides' figures come from, for the report's column."""
        return f"{self.speed.source} / {self.base.source}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"source": self.source}


def from_report(report: SpeedReport) -> Speed:
    """The figures that the score uses, out of a benchmark report."""
    e2e = report.e2e_model
    return Speed(e2e["latency_ms_p99"], e2e["throughput"], report.source, report.ttft_ms)


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
    return Score(accurate, nki_share, speed, base, latency, throughput, latency * rest, first, None)
