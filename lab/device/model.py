"""The cost model's view of a call: its time, its band, and the calls of a model's graphs.

Runs beside the stand-in's names; `harness.simulator` is the door to the simulator.
"""

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.figures import tracing
from harness.figures.estimate import Estimator, events_of
from harness.figures.graphs import DECODE, PREFILL
from harness.model_shapes import MODEL_SHAPES
from harness.simulator import (
    Program,
    bands,
    cost,
    observe_kernel_calls,
    provenance,
    report,
    schedules,
    spec,
)
from lab.device import calls

SHAPES = "llama-3.2-1b"
DEGREE = 2
OVERHEADS = (
    "GRAPH_START_NS", "GRAPH_LAUNCH_NS", "KERNEL_LAUNCH_NS", "COLLECTIVE_START_NS",
    "COLLECTIVE_BYTES_PER_NS",
)  # fmt: skip


def overheads() -> dict[str, float]:
    """The cost of a graph beside its kernels, by the cost model."""
    return {name: getattr(spec, name) for name in OVERHEADS}


@functools.cache
def _traced(call: str, _: str) -> Program:
    kernel, given, named = calls.arguments(json.loads(call), calls.shapes)
    return kernel.trace(*given, **named)


def program(call: Mapping[str, Any]) -> Program:
    """The traced kernel of a call, once for all that ask."""
    names = ("module", "kernel", "arguments", "keywords")
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "")
    return _traced(json.dumps({name: call[name] for name in names}), target)


def graph_ns(
    call: Mapping[str, Any],
    costs: Mapping[str, float] | None = None,
    profile: str = cost.DEFAULT_PROFILE,
    order: str | None = None,
    known: dict[tuple, Any] | None = None,
) -> float:
    """Nanoseconds of what a row measures: `nki.benchmark` of a kernel, or a graph from the host.
    ``known`` keeps what `schedules` finds once for all constants."""
    told = overheads() | dict(costs or {})
    alone = schedules(program(call), (profile,), order, known)[profile].total
    if not call.get("calls"):
        return alone + told["GRAPH_START_NS"]
    started, rate = told["COLLECTIVE_START_NS"], told["COLLECTIVE_BYTES_PER_NS"]
    over = cost.Overheads(collective_ns=started, collective_bytes_per_ns=rate)
    given = calls.arguments(call, calls.shapes)[1][0]
    reduced = over.collective(given.numel() * given.itemsize, DEGREE)  # the result has its shape
    launched = call["calls"] * (alone + told["KERNEL_LAUNCH_NS"])
    return told["GRAPH_LAUNCH_NS"] + launched + call["reduced"] * reduced


def estimate(call: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds, the shortest and longest time of a device that fit, and the class."""
    name = cost.DEFAULT_PROFILE
    found = report.profile(schedules(program(call), (name,))[name])
    total = graph_ns(call)
    band = [(time + total - found.time_ns) / 1e3 for time in found.band_ns]
    return {"us": total / 1e3, "band_us": band, "class": bands.kind_of(found.critical)}


def constructs(call: Mapping[str, Any]) -> list[str]:
    """Constructs of a generated kernel that no public run on a device shows."""
    kernel, given, named = calls.arguments(call, calls.Seeded())
    traced = getattr(kernel, "trace_with_values", kernel.trace)(*given, **named)
    text = Path(call["module"]).read_text(encoding="utf-8")
    used = provenance.in_source(text) | provenance.in_program(traced)
    return [one.construct for one in provenance.judge(used) if one.status != provenance.SEEN]


# --- graphs of the model --------------------------------------------------------------------------
def graph(name: str, file: str = calls.SUBMISSIONS[False], degree: int = 2) -> dict[str, Any]:
    """The different kernel calls of one graph of Llama-3.2-1B, and the graph's estimate.

    Args:
        name: ``prefill-640`` of so many tokens, ``decode-640`` of one behind so many.
        file: the submission whose graph it is.
    """
    found: dict[str, dict[str, Any]] = {}

    def heard(call: Any) -> None:
        given, named = call.arguments
        one = {
            "module": file,
            "kernel": call.name,
            "arguments": [calls.written(value) for value in given],
            "keywords": {name: calls.written(value) for name, value in named.items()},
        }
        found[json.dumps(one)] = one

    with tempfile.TemporaryDirectory() as folder, observe_kernel_calls(heard):
        model, wrapper, bucket = _application(name, file, degree, Path(folder))
        events = events_of(tracing.record(model, wrapper, bucket, Path(folder)))
    # what the host does around a graph is no part of it
    costs = cost.Overheads(host_ns=0.0, logits_ns=0.0, argmax_ns=0.0)
    whole = Estimator(cost.DEFAULT_PROFILE, costs, degree).graph(wrapper.tag, bucket, 1, events)
    return {"kernels": list(found.values()), "us": whole.latency_ns / 1e3}


def _application(name: str, file: str, degree: int, folder: Path) -> tuple[Any, Any, int]:
    phase, _, size = name.partition("-")
    module, length = calls.module(file), int(size)
    limits = max(128, length), length if phase == "prefill" else 64
    own = dict(zip(("seq_len", "max_context_length"), limits), tp_degree=degree, batch_size=1)
    model = tracing.application(module, MODEL_SHAPES[SHAPES], folder, **own)
    tag = PREFILL if phase == "prefill" else DECODE
    wrapper = next(wrapper for wrapper in model.models if wrapper.tag == tag)
    return model, wrapper, next(b for b in wrapper.neuron_config.buckets if b >= length)
