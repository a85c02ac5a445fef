"""Latency of an application and of its sub-models, with NxDI's report keys and formulas."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    SPECULATION_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
)
from .constants import BENCHMARK_REPORT_FILENAME  # noqa: F401 - drivers take it from here

Report = dict[str, float]
DEFAULT_RUNS = 20


class Benchmark:
    """Calls a function once to warm up, then `num_runs` times on the clock.

    `input_param` is a tuple (positional), a dict (keywords) or one argument. A run's time includes
    `preprocess_func`. `post_warmup_func` runs after the warm-up.
    """

    def __init__(
        self,
        benchmark_func: Callable[..., Any],
        input_param: Any,
        num_runs: int = DEFAULT_RUNS,
        preprocess_func: Callable[[], Any] | None = None,
        post_warmup_func: Callable[[], Any] | None = None,
    ) -> None:
        if isinstance(input_param, (tuple, list)):
            self.benchmark_func = partial(benchmark_func, *input_param)
        elif isinstance(input_param, dict):
            self.benchmark_func = partial(benchmark_func, **input_param)
        else:
            self.benchmark_func = partial(benchmark_func, input_param)
        self.num_runs = num_runs
        self.preprocess_func = preprocess_func
        self.post_warmup_func = post_warmup_func
        self.latency_list: list[float] = []  # seconds

    def _call(self) -> None:
        if self.preprocess_func is not None:
            self.preprocess_func()
        self.benchmark_func()

    def run(self) -> None:
        """Fill `latency_list` with each run's wall-clock time, in seconds."""
        self._call()
        if self.post_warmup_func is not None:
            self.post_warmup_func()
        for _ in range(self.num_runs):
            start = time.time()
            self._call()
            self.latency_list.append(time.time() - start)


class LatencyCollector:
    """Forward hooks that time a module; `latency_list` is in seconds."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.latency_list: list[float] = []

    def pre_hook(self, *args: Any) -> None:
        del args
        self.start = time.time()

    def hook(self, *args: Any) -> None:
        del args
        self.latency_list.append(time.time() - self.start)


def create_submodule_latency_collectors(model: Any) -> dict[str, LatencyCollector]:
    """A collector for each sub-model of `model`, by its tag."""
    tags = (CONTEXT_ENCODING_MODEL_TAG, TOKEN_GENERATION_MODEL_TAG, SPECULATION_MODEL_TAG)
    return {tag: LatencyCollector() for tag in tags if hasattr(model, tag)}


def register_latency_collectors(
    latency_collectors: dict[str, LatencyCollector], model: Any
) -> None:
    """Attach the collectors to the sub-models, where they stay, as in NxDI."""
    for tag, collector in latency_collectors.items():
        register_forward_latency_collector(collector, getattr(model, tag))


def register_forward_latency_collector(latency_collector: LatencyCollector, model: Any) -> None:
    """Time the calls of the module `model`."""
    model.register_forward_pre_hook(latency_collector.pre_hook)
    model.register_forward_hook(latency_collector.hook)


def generate_report(
    latency_list: Sequence[float] | np.ndarray,
    max_length: int,
    max_batch_size: int,
    n_runs: int = DEFAULT_RUNS,
) -> Report | None:
    """Percentiles in ms, and throughput in tokens/s; None without any latency. throughput = n_runs
    * max_length * max_batch_size / total seconds."""
    if len(latency_list) == 0:
        return None
    latencies = np.array(latency_list)
    report = {
        f"latency_ms_p{level}": float(np.percentile(latencies, level) * 1000)
        for level in (50, 90, 95, 99, 100)
    }
    report["latency_ms_avg"] = float(np.average(latencies) * 1000)
    report["throughput"] = float(n_runs * max_length * max_batch_size / latencies.sum())
    return report
