"""Counters and histograms in Prometheus' form."""

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.serving.scheduler import Meters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a decode step on a device to a prefill on the simulator.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics(Meters):
    """The server's own registry: nothing of the process or of other libraries is in it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "HTTP requests", ["path", "status"])
        self._answers = self._counter("answers", "Ends: stop, length, left, error", ["end"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._new_tokens = self._counter("new_tokens", "Tokens that the model has made")
        self._first = self._histogram("time_to_first_token", "From a request to its first token")
        self._next = self._histogram("time_per_token", "From one token of an answer to the next")

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"nki_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        name = f"nki_{name}_seconds"
        return Histogram(name, what, buckets=_SECONDS, registry=self._registry)

    def show(self, state: Callable[[], dict[str, Any]]) -> None:
        """Add the gauges of a scheduler."""
        self._registry.register(_Gauges(state))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)
        self._new_tokens.inc()

    def next_token(self, seconds: float) -> None:
        self._next.observe(seconds)
        self._new_tokens.inc()

    def ended(self, reason: str, prompt_tokens: int) -> None:
        self._answers.labels(reason).inc()
        self._prompt_tokens.inc(prompt_tokens)


class _Gauges(Collector):
    """Gauges of a scheduler's state at the moment of the request."""

    _NAMES = {
        "running": "Answers that have a slot",
        "waiting": "Answers in the queue",
        "tokens_per_second": "Tokens a second, over the last five seconds",
        "failures": "Calls of the model that have failed",
    }
    _BLOCKS = ("used", "kept", "free")  # by answers, for prefixes, and for anything

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def collect(self) -> list[Metric]:
        state = self._state()
        gauges: list[Metric] = [
            GaugeMetricFamily(f"nki_{name}", what, value=state[name])
            for name, what in self._NAMES.items()
        ]
        blocks = state["blocks"]
        if blocks is None:
            return gauges
        held = GaugeMetricFamily(
            "nki_cache_blocks", "Blocks: used by answers, kept for prefixes, free", labels=["state"]
        )
        for name in self._BLOCKS:
            held.add_metric([name], blocks[name])
        counters = (
            ("asked", "Tokens of prompts that were looked up in the cache"),
            ("found", "Tokens of prompts that the cache had"),
        )
        rates = [
            CounterMetricFamily(f"nki_prefix_{name}_tokens", what, value=blocks[f"{name}_tokens"])
            for name, what in counters
        ]
        return [*gauges, held, *rates]
