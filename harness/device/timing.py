"""Times of one call: measured where a device is, estimated where the stand-in runs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness import sdk
from harness.device import calls

WARM_UPS, RUNS, PERCENTILES = 5, 50, (0, 50, 99)


def benchmark(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a kernel by percentile, the start of its graph included (`nki.benchmark`)."""
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl
    import neuronxcc.nki.typing as nt

    types = {"fp32": nl.float32, "bf16": nl.bfloat16, "fp16": nl.float16, "int32": nl.int32}
    kernel, given, named = calls.arguments(
        call, lambda shape, dtype: nt.tensor[shape, types[dtype]]
    )
    timed = nki.benchmark(warmup=WARM_UPS, iters=RUNS)(kernel)
    timed(*given, **named)
    latency = timed.benchmark_result.nc_latency
    return {f"p{p}": float(latency.get_latency_percentile(p)) for p in PERCENTILES}


def graph(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a graph by the host's clock: the kernel so often, so many all-reduces."""
    if sdk.platform().estimates:
        from harness.device import model

        return dict.fromkeys((f"p{p}" for p in PERCENTILES), model.graph_ns(call) / 1e3)
    if call["reduced"] and "RANK" not in os.environ:
        return _on_ranks(call)
    import torch_xla.core.xla_model as xm

    if call["reduced"]:
        import torch.distributed
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers "xla"

        torch.distributed.init_process_group("xla")
    device = xm.xla_device()
    kernel, given, named = calls.arguments(call, calls.Seeded())
    first = given[0].to(device)
    seconds = []
    for _ in range(WARM_UPS + RUNS):
        begun, value = time.perf_counter(), first
        for _ in range(call["calls"]):
            value = kernel(value, **named)
        for _ in range(call["reduced"]):
            value = xm.all_reduce(xm.REDUCE_SUM, value)
        xm.mark_step()
        xm.wait_device_ops()
        seconds.append(time.perf_counter() - begun)
    return {f"p{p}": float(np.percentile(seconds[WARM_UPS:], p)) * 1e6 for p in PERCENTILES}


def _on_ranks(call: Mapping[str, Any]) -> dict[str, float]:
    """The same on two cores, each a process of its own; rank 0 tells."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        command += ["-m", "harness.device.timing", json.dumps(dict(call)), str(told)]
        done = subprocess.run(command, cwd=calls.ROOT, capture_output=True, text=True)
        if done.returncode or not told.is_file():
            raise RuntimeError(f"torchrun: {done.stderr[-600:]}")
        return json.loads(told.read_text(encoding="utf-8"))


if __name__ == "__main__":  # a rank
    found = graph(json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
