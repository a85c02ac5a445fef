"""Generation times on Trainium as the cost model estimates them, in the shape of a measured report.

Works on the stand-in only; on a device there is nothing to estimate.
"""

from __future__ import annotations

import math
from typing import Optional

from harness import sdk
from harness.figures.benchmark import SpeedReport
from harness.figures.graphs import DECODE, PREFILL
from harness.session.building import Loaded
from harness.session.workers import SubmissionFailed
from harness.sources import Source

_ESTIMATE = "harness.figures.estimate:graph_milliseconds"


class SpeedEstimates:
    """Estimates of one loaded model; every graph is scheduled once, when it is first needed."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._graph_ms: dict[tuple[str, int], float] = {}

    def report(self, prompt_tokens: int, new_tokens: int) -> Optional[SpeedReport]:
        """Latencies in ms and tokens/s of one generation; None where there is no cost model.

        One deterministic run, so all percentiles would be the same number: `latency_ms_p99` and
        `latency_ms_avg` stand for them.
        """
        if not sdk.platform().estimates:
            return None
        prefill = self._graph(PREFILL, prompt_tokens)
        steps = [self._graph(DECODE, prompt_tokens + step + 1) for step in range(new_tokens - 1)]
        batch = self._loaded.session.settings.batch_size
        total = prefill + sum(steps)
        mean = sum(steps) / len(steps) if steps else 0.0
        return SpeedReport(
            e2e_model=_entry(total, (prompt_tokens + new_tokens) * batch, total),
            context_encoding_model=_entry(prefill, prompt_tokens * batch, prefill),
            token_generation_model=_entry(mean, len(steps) * batch, sum(steps)) if steps else None,
            ttft_ms=prefill,
            tokens_per_second=1000 * batch / mean if steps else None,
            source=Source.COST_MODEL,
            new_tokens=new_tokens,
            batch_size=batch,
        )

    def _graph(self, submodel: str, length: int) -> float:
        """Milliseconds of one execution of the bucket that holds `length` tokens."""
        buckets = self._loaded.buckets[submodel]
        key = submodel, next((bucket for bucket in buckets if bucket >= length), buckets[-1])
        if key not in self._graph_ms:
            self._graph_ms[key] = self._estimate(*key)
        return self._graph_ms[key]

    def _estimate(self, submodel: str, bucket: int) -> float:
        what = f"{submodel}, bucket {bucket} cannot be estimated"
        found = self._loaded.call(_ESTIMATE, what, submodel=submodel, bucket=bucket).body
        if type(found) is not float or not math.isfinite(found) or found <= 0:
            raise SubmissionFailed(f"{what}: expected milliseconds, got {str(found)[:80]}.")
        return found


def _entry(latency_ms: float, tokens: int, total_ms: float) -> dict[str, float]:
    return {
        "latency_ms_p99": latency_ms,
        "latency_ms_avg": latency_ms,
        "throughput": 1000 * tokens / total_ms,
    }
