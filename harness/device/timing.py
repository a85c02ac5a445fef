"""Times of one call: measured where a device is, estimated where the stand-in runs.

Kernels of `neuronxcc.nki` are timed by `nki.benchmark`. Today's `nki` has no timer: a kernel that
is called leaves its NEFF in NKI_ARTIFACTS_DIR (aws-neuron-sdk v2.33.0, neuron-runtime/nrtpy), and
the profiler runs that so often and tells the time on the device of every 11th run, as
nki-library's tests time theirs. Its inputs are zeros.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness import sdk
from harness.device import calls

WARM_UPS, RUNS, PERCENTILES = 5, 50, (0, 50, 99)
OFTEN = f"--num-exec={WARM_UPS + RUNS}", "--profile-nth-exec=11"
PROFILERS, TOOLS = ("neuron-explorer", "neuron-profile"), "/opt/aws/neuron/bin"
ONE_CORE = {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_NUM_CORES": "1"}  # a kernel's without [2]


def benchmark(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a kernel by percentile, the start of its graph included."""
    if call["module"] in calls.OF_TODAY:
        return estimated(call) if sdk.platform().estimates else profiled(call)
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


def estimated(call: Mapping[str, Any]) -> dict[str, float]:
    """The cost model's time, in the form of a measurement."""
    from harness.device import model

    return dict.fromkeys((f"p{p}" for p in PERCENTILES), model.graph_ns(call) / 1e3)


def by_percentile(us: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(us, p)) for p in PERCENTILES}


def profiled(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds on the device of a kernel of today's language, its start included."""
    path = f"{os.environ.get('PATH', '')}:{TOOLS}"
    tool = next((found for name in PROFILERS if (found := shutil.which(name, path=path))), None)
    if tool is None:
        raise FileNotFoundError(f"none of {', '.join(PROFILERS)} (aws-neuronx-tools) in {path}")
    with tempfile.TemporaryDirectory() as folder:

        def told(*command: str) -> str:
            env = os.environ | ONE_CORE | {"NKI_ARTIFACTS_DIR": folder, "PYTHONPATH": python_path}
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr or done.stdout)[-600:]
                raise RuntimeError(f"{Path(command[0]).name}: {said}")
            return done.stdout

        python_path = f"{calls.ROOT}:{os.environ.get('PYTHONPATH', '')}"
        # a process of its own: the profiler needs the core
        told(sys.executable, "-m", "harness.device.calls", json.dumps(dict(call)), "results.pt")
        neff = next(Path(folder).rglob("*.neff"), None)
        if neff is None:
            raise FileNotFoundError("the call of the kernel left no NEFF in NKI_ARTIFACTS_DIR")
        told(tool, "capture", "-n", str(neff), "-s", "profile.ntff", *OFTEN)
        view = "view", "-n", str(neff), "--output-format=summary-json", "-s"
        traces = sorted(Path(folder).glob("profile*.ntff"))
        us = [1e6 * seconds_of(told(tool, *view, str(trace))) for trace in traces]
        if not us:
            raise FileNotFoundError(f"{Path(tool).name} capture left no profile*.ntff")
    return by_percentile(us)


def seconds_of(summary: str) -> float:
    """The first `total_time` of a profiler's summary; releases nest it in other ways."""
    found = re.search(r'"total_time":\s*(\d[\d.eE+-]*)', summary)
    if found is None:
        raise ValueError(f"the profiler's summary has no total_time: {summary[:200]!r}")
    return float(found[1])


def graph(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a graph by the host's clock: the kernel so often, so many all-reduces."""
    if sdk.platform().estimates:
        return estimated(call)
    if importlib.util.find_spec("torch_xla") is None:
        run = _of_jax(call)
    elif call["reduced"] and "RANK" not in os.environ:
        return _on_ranks(call)
    else:
        run = _of_torch(call)
    seconds = []
    for _ in range(WARM_UPS + RUNS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return by_percentile([1e6 * one for one in seconds[WARM_UPS:]])


def _of_jax(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph in JAX, which today's SDK has where PyTorch/XLA is gone."""
    import jax

    def graph(value: Any) -> Any:
        for _ in range(call["calls"]):
            value = kernel(value, **named)
        for _ in range(call["reduced"]):
            value = jax.lax.psum(value, "cores")
        return value

    kernel, given, named = calls.arguments(call, calls.Seeded())
    value = given[0].numpy()
    if not call["reduced"]:
        value, run = jax.numpy.asarray(value), jax.jit(graph)
    else:
        value = jax.numpy.stack([value, value])
        run = jax.pmap(graph, axis_name="cores", devices=jax.devices()[:2])
    return lambda: run(value).block_until_ready()


def _of_torch(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph in PyTorch/XLA; of all-reduces this process is a rank."""
    import torch_xla.core.xla_model as xm

    if call["reduced"]:
        import torch.distributed
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers "xla"

        torch.distributed.init_process_group("xla")
    device = xm.xla_device()
    kernel, given, named = calls.arguments(call, calls.Seeded())
    first = given[0].to(device)

    def run() -> None:
        value = first
        for _ in range(call["calls"]):
            value = kernel(value, **named)
        for _ in range(call["reduced"]):
            value = xm.all_reduce(xm.REDUCE_SUM, value)
        xm.mark_step()
        xm.wait_device_ops()

    return run


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
