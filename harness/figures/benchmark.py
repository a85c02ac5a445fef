"""How long generation takes: the NxDI report's keys, with the time to the first token beside them.

Wall-clock times on the stand-in are the simulator's own: every report carries a `source`, and
nothing here mixes sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

from harness import sdk
from harness.modes.generate import generate_tokens
from harness.session.building import Loaded
from harness.session.streaming import Stream

SIMULATOR = "simulator"
DEVICE = "device"
ESTIMATE = "cost model"
PUBLISHED = "published"
SUBMODELS = ("context_encoding_model", "token_generation_model")
DEVICE_RUNS = 20  # as NxDI's Benchmark class
SIMULATOR_RUNS = 1
_PERCENTILES = (50, 90, 95, 99, 100)


def source() -> str:
    """Where wall-clock times of this process come from."""
    return SIMULATOR if sdk.is_stand_in() else DEVICE


def default_runs() -> int:
    """How often to repeat a measurement; the simulator's times are not worth repeating."""
    return SIMULATOR_RUNS if sdk.is_stand_in() else DEVICE_RUNS


def latency_report(seconds: Sequence[float], tokens: int, batch: int) -> dict[str, float]:
    """NxDI's report of one list of latencies; `tokens` per run and row count for throughput."""
    import numpy as np

    report = {
        f"latency_ms_p{percentile}": float(np.percentile(seconds, percentile)) * 1000
        for percentile in _PERCENTILES
    }
    report["latency_ms_avg"] = float(np.mean(seconds)) * 1000
    report["throughput"] = len(seconds) * tokens * batch / sum(seconds)
    return report


def measure(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    runs: int,
    on_step: Optional[Callable[[list[int]], Any]] = None,
    warm_up: bool = True,
) -> dict[str, Any]:
    """Generate `new_tokens` for a batch `runs` times and report as NxDI's benchmark does.

    Keys: `e2e_model` and one per sub-model, each with latency percentiles in ms and throughput in
    tokens/s; `ttft_ms` and `tokens_per_second` (medians over the runs), `source`, `runs`.
    End tokens are suppressed so that every run has the same length.
    """
    import numpy as np

    def generate(stream: Optional[Stream]) -> None:
        def step(tokens: list[int]) -> None:
            if stream is not None:
                stream.step(tokens)
            if on_step is not None:
                on_step(tokens)

        generate_tokens(loaded, prompt_ids, new_tokens, step, min_new_tokens=new_tokens)

    if warm_up:
        generate(None)
    timers = {name: _Timer(getattr(loaded.model, name, None)) for name in SUBMODELS}
    streams, latencies = [], []
    try:
        for _ in range(runs):
            stream = Stream(loaded.session.tokenizer, [], [""] * len(prompt_ids), lambda _: None)
            generate(stream)
            streams.append(stream)
            latencies.append(time.monotonic() - stream.started)
    finally:
        for timer in timers.values():
            timer.remove()
    width, batch = max(len(ids) for ids in prompt_ids), len(prompt_ids)
    report: dict[str, Any] = {"e2e_model": latency_report(latencies, width + new_tokens, batch)}
    for name, tokens in zip(SUBMODELS, (width, new_tokens)):
        if timers[name].seconds:
            report[name] = latency_report(timers[name].seconds, tokens, batch)
            report[name]["throughput"] = runs * tokens * batch / sum(timers[name].seconds)
    speeds = [stream.tokens_per_second for stream in streams if stream.tokens_per_second]
    report["ttft_ms"] = float(np.median([stream.first_seconds for stream in streams])) * 1000
    report["tokens_per_second"] = float(np.median(speeds)) * batch if speeds else None
    report.update(source=source(), runs=runs, new_tokens=new_tokens, batch_size=batch)
    return report


class _Timer:
    """Times the calls of one sub-model through hooks that `remove` takes off again."""

    def __init__(self, module: Any) -> None:
        self.seconds: list[float] = []
        self._started = 0.0
        self._handles = []
        if module is not None:
            self._handles = [
                module.register_forward_pre_hook(lambda *_: self._start()),
                module.register_forward_hook(lambda *_: self._stop()),
            ]

    def _start(self) -> None:
        self._started = time.monotonic()

    def _stop(self) -> None:
        self.seconds.append(time.monotonic() - self._started)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
