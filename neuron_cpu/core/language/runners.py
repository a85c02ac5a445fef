"""``nki.benchmark`` and ``nki.profile``: the documented result objects, filled with estimates.

Signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/__init__.py. Both run a kernel on its shapes
only, as the device tools do not use the caller's values either, and return nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..device import spec
from ..device.errors import refuse
from ..report import report
from ..time import cost
from ..time.schedule import Schedule, schedule
from .annotation import placeholder
from .kernel import Kernel

PERCENTILES = (0, 1, 10, 25, 50, 90, 99, 100)


class Latency:
    """``benchmark_result.nc_latency``: latency percentiles in microseconds.

    Attributes:
        estimated: always True here; every percentile is the same estimate.
    """

    estimated = True

    def __init__(self, nanoseconds: float) -> None:
        self._microseconds = nanoseconds / 1e3

    def get_latency_percentile(self, percentile: int) -> float:
        """Microseconds of one run; ``percentile`` one of 0, 1, 10, 25, 50, 90, 99, 100."""
        if percentile not in PERCENTILES:
            raise refuse(
                "sim_percentile",
                f"latency percentile {percentile!r}, expected one of {PERCENTILES}; ask for one "
                "of those",
            )
        return self._microseconds


class BenchmarkResult:
    """``kernel.benchmark_result`` after a call.

    Attributes:
        nc_latency: Latency on one NeuronCore, the start of the graph included.
        profile: all figures of the estimate (not in the SDK).
        estimated: always True here.
    """

    estimated = True

    def __init__(self, found: Schedule) -> None:
        self.nc_latency = Latency(found.total + spec.GRAPH_START_NS)
        self.profile = report.profile(found)


class TimedKernel:
    """A kernel whose call estimates its time instead of computing its result.

    Attributes:
        benchmark_result: of the latest call, None before it.
    """

    def __init__(self, kernel: Any, trace_path: Path | None, dma_profile: str) -> None:
        self.kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
        self.trace_path, self.dma_profile = trace_path, dma_profile
        self.benchmark_result: BenchmarkResult | None = None

    def __getitem__(self, grid: Any) -> TimedKernel:
        return TimedKernel(self.kernel[grid], self.trace_path, self.dma_profile)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        # Shapes and types only: nothing is computed, so annotations can stand for arguments.
        args = tuple(map(placeholder, args))
        kwargs = {name: placeholder(value) for name, value in kwargs.items()}
        found = schedule(self.kernel.trace(*args, **kwargs), self.dma_profile)
        self.benchmark_result = BenchmarkResult(found)
        if self.trace_path is not None:
            events = report.perfetto(self.kernel.name, found)
            self.trace_path.parent.mkdir(parents=True, exist_ok=True)
            self.trace_path.write_text(json.dumps(events), encoding="utf-8")
        time = self.benchmark_result.nc_latency.get_latency_percentile(50)
        where = f"; trace for ui.perfetto.dev: {self.trace_path}" if self.trace_path else ""
        print(
            f"{self.kernel.name}: {time:.2f} µs, {spec.GRAPH_START_NS / 1e3:g} of them for the "
            "start and end of its graph (estimated, not measured; DMA profile "
            f"{self.dma_profile}){where}",
            file=sys.stderr,
        )


def benchmark(
    kernel: Callable | None = None,
    warmup: int = 10,
    iters: int = 100,
    save_neff_name: str | None = None,
    save_trace_name: str | None = None,
    additional_compile_opt: str = "",
    dma_profile: str = cost.DEFAULT_PROFILE,
) -> Any:
    """Decorator: calls estimate the latency and leave it in ``kernel.benchmark_result``.

    There is no executable, so ``save_neff_name`` writes nothing; ``save_trace_name`` writes a
    Chrome trace under that name. ``dma_profile`` is not in the SDK.
    """
    if warmup < 0 or iters < 1:
        raise refuse(
            "sim_benchmark_iterations",
            f"nki.benchmark got warmup={warmup}, iters={iters}, expected warmup >= 0 and "
            "iters >= 1; correct them",
        )
    if save_trace_name is not None and save_neff_name != "file.neff":
        raise refuse(
            "sim_benchmark_neff_name",
            f"nki.benchmark got save_trace_name with save_neff_name={save_neff_name!r}, expected "
            "'file.neff' as the SDK does; pass save_neff_name='file.neff'",
        )
    cost.dma_profile(dma_profile)
    path = None if save_trace_name is None else Path(save_trace_name)
    if kernel is None:
        return lambda function: TimedKernel(function, path, dma_profile)
    return TimedKernel(kernel, path, dma_profile)


def profile(
    func: Callable | None = None,
    working_directory: str | None = None,
    save_neff_name: str = "file.neff",
    save_trace_name: str = "profile.ntff",
    additional_compile_opt: str = "",
    overwrite: bool = False,
    profile_nth: int = 1,
    num_execs: int = 1,
    dma_profile: str = cost.DEFAULT_PROFILE,
) -> Any:
    """Decorator: calls write an estimated profile into ``working_directory`` (absolute path).

    The trace is Chrome JSON, so ``.json`` is added to ``save_trace_name``; without ``overwrite``
    an existing one is refused. ``dma_profile`` is not in the SDK.
    """
    if working_directory is None or not os.path.isabs(working_directory):
        raise refuse(
            "sim_profile_directory",
            f"nki.profile got working_directory={working_directory!r}, expected an absolute path; "
            "pass one",
        )
    cost.dma_profile(dma_profile)
    path = Path(working_directory) / f"{save_trace_name}.json"
    if path.exists() and not overwrite:
        raise refuse(
            "sim_profile_exists",
            f"nki.profile would replace {path}, expected no such file; pass overwrite=True",
        )
    if func is None:
        return lambda function: TimedKernel(function, path, dma_profile)
    return TimedKernel(func, path, dma_profile)
