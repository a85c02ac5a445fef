"""Generation times on Trainium as the cost model estimates them, in the shape of a measured report.

Works on the stand-in only; on a device there is nothing to estimate.
"""

from __future__ import annotations

from typing import Any, Optional

from harness import sdk
from harness.figures.benchmark import ESTIMATE, SUBMODELS
from harness.session.building import Loaded


class SpeedEstimates:
    """Estimates of one loaded model; every graph is scheduled once, when it is first needed."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._wrappers = {wrapper.tag: wrapper for wrapper in loaded.model.models}
        self._graph_ms: dict[tuple[str, int], float] = {}

    def report(self, prompt_tokens: int, new_tokens: int) -> Optional[dict[str, Any]]:
        """Latencies in ms and tokens/s of one generation; None where there is no cost model.

        One deterministic run, so all percentiles would be the same number: `latency_ms_p99` and
        `latency_ms_avg` stand for them.
        """
        if not sdk.is_stand_in():
            return None
        prefill = self._graph(SUBMODELS[0], prompt_tokens)
        steps = [
            self._graph(SUBMODELS[1], prompt_tokens + step + 1) for step in range(new_tokens - 1)
        ]
        batch = self._loaded.session.args.batch_size
        total = prefill + sum(steps)
        report: dict[str, Any] = {
            "e2e_model": _entry(total, (prompt_tokens + new_tokens) * batch, total),
            SUBMODELS[0]: _entry(prefill, prompt_tokens * batch, prefill),
            "ttft_ms": prefill,
            "tokens_per_second": None,
            "source": ESTIMATE,
            "new_tokens": new_tokens,
            "batch_size": batch,
        }
        if steps:
            mean = sum(steps) / len(steps)
            report[SUBMODELS[1]] = _entry(mean, len(steps) * batch, sum(steps))
            report["tokens_per_second"] = 1000 * batch / mean
        return report

    def _graph(self, submodel: str, length: int) -> float:
        """Milliseconds of one execution of the bucket that holds `length` tokens."""
        buckets = self._wrappers[submodel].neuron_config.buckets
        key = submodel, next((bucket for bucket in buckets if bucket >= length), buckets[-1])
        if key not in self._graph_ms:
            self._graph_ms[key] = self._estimate(*key)
        return self._graph_ms[key]

    def _estimate(self, submodel: str, bucket: int) -> float:
        from harness.figures.estimate import Estimator, record
        from neuron_cpu.core.time import cost

        model = self._loaded.model
        args = self._loaded.session.args
        estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), args.tp_degree)
        events = record(model, self._wrappers[submodel], bucket)
        return estimator.graph(submodel, bucket, args.batch_size, events).latency_ns / 1e6


def _entry(latency_ms: float, tokens: int, total_ms: float) -> dict[str, float]:
    return {
        "latency_ms_p99": latency_ms,
        "latency_ms_avg": latency_ms,
        "throughput": 1000 * tokens / total_ms,
    }
