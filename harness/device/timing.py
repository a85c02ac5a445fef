"""Times of one call: measured where a device is, estimated where the stand-in runs.

Kernels of `neuronxcc.nki` are timed by `nki.benchmark`. Today's `nki` has no timer: a kernel that
is called leaves its NEFF in NKI_ARTIFACTS_DIR (aws-neuron-sdk v2.33.0, neuron-runtime/nrtpy), and
the profiler runs that so often and tells the time on the device of every 11th run, as
nki-library's tests time theirs. Its inputs are zeros.
"""

import functools
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
import torch

from harness import sdk
from harness.device import calls

WARM_UPS, RUNS, PERCENTILES = 5, 50, (0, 50, 99)
OFTEN = f"--num-exec={WARM_UPS + RUNS}", "--profile-nth-exec=11"
PROFILERS, TOOLS = ("neuron-explorer", "neuron-profile"), "/opt/aws/neuron/bin"
ONE_CORE = {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_NUM_CORES": "1"}  # a kernel's without [2]


def benchmark(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a kernel by percentile, the start of its graph included."""
    if call["module"] in calls.OF_TODAY:
        return estimated(call) if sdk.platform().simulates else profiled(call)
    import neuronxcc.nki as nki
    import neuronxcc.nki.language as nl
    import neuronxcc.nki.typing as nt

    types, seeded = {"fp32": nl.float32, "bf16": nl.bfloat16, "fp16": nl.float16}, calls.Seeded()

    def tensor(shape: list[int], dtype: str) -> Any:  # indices have to lie inside of their table
        return nt.tensor[shape, types[dtype]] if dtype in types else seeded(shape, dtype).numpy()

    kernel, given, named = calls.arguments(call, tensor)
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
        # a process of its own: the profiler needs the core
        run = "-m", "harness.device.calls", json.dumps(dict(call)), "results.pt"
        _told(folder, ONE_CORE, sys.executable, *run)
        neff = next(Path(folder).rglob("*.neff"), None)
        if neff is None:
            raise FileNotFoundError("the call of the kernel left no NEFF in NKI_ARTIFACTS_DIR")
        _told(folder, ONE_CORE, tool, "capture", "-n", str(neff), "-s", "profile.ntff", *OFTEN)
        view = "view", "-n", str(neff), "--output-format=summary-json", "-s"
        traces = sorted(Path(folder).glob("profile*.ntff"))
        told = [_told(folder, ONE_CORE, tool, *view, str(trace)) for trace in traces]
        if not told:
            raise FileNotFoundError(f"{Path(tool).name} capture left no profile*.ntff")
    return by_percentile([1e6 * seconds_of(one) for one in told])


def _told(folder: str, cores: Mapping[str, str], *command: str) -> str:
    """What a command writes that runs in a folder."""
    env = os.environ | cores | {"NKI_ARTIFACTS_DIR": folder}
    env["PYTHONPATH"] = f"{calls.ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout


def seconds_of(summary: str) -> float:
    """The first `total_time` of a profiler's summary; releases nest it in other ways."""
    found = re.search(r'"total_time":\s*(\d[\d.eE+-]*)', summary)
    if found is None:
        raise ValueError(f"the profiler's summary has no total_time: {summary[:200]!r}")
    return float(found[1])


# --- graphs from the host -------------------------------------------------------------------------
def graph(call: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a graph by the host's clock: the kernel so often, so many all-reduces.

    A process of its own runs it, as the cores are free again only when that has ended.
    """
    if sdk.platform().simulates:
        return estimated(call)
    with tempfile.TemporaryDirectory() as folder:
        run = "-m", "harness.device.timing", json.dumps(dict(call)), "times.json"
        _told(folder, {}, sys.executable, *run)
        return json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))


def timed(call: Mapping[str, Any]) -> dict[str, float]:
    """The same, in this process."""
    run = (_of_torch if importlib.util.find_spec("torch_neuronx") else _of_jax)(call)
    seconds = []
    for _ in range(WARM_UPS + RUNS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return by_percentile([1e6 * one for one in seconds[WARM_UPS:]])


def _of_jax(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph in JAX, which today's SDK has where PyTorch is gone."""
    import jax

    graph, value = _graph(call, lambda value: jax.lax.psum(value, "cores"))
    if not call["reduced"]:
        given, run = jax.numpy.asarray(value.numpy()), jax.jit(graph)
    else:
        given = jax.numpy.stack([value.numpy()] * 2)
        run = jax.pmap(graph, axis_name="cores", devices=jax.devices()[:2])
    return lambda: run(given).block_until_ready()


def _of_torch(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph as inference has it: compiled before. PyTorch/XLA would record it at each run, and
    so run the Python of every kernel in it (aws-neuron-sdk v2.21.1, api-torch-neuronx-trace)."""
    column = _graph(call)[1][:, :1].contiguous()
    if call["reduced"]:
        from neuronx_distributed.trace import parallel_model_trace

        rank = functools.partial(_of_a_rank, dict(call))
        traced = parallel_model_trace(rank, (column,), tp_degree=2)
    else:
        import torch_neuronx

        traced = torch_neuronx.trace(_of_a_rank(call)[0], (column,))
    return lambda: traced(column)


def _of_a_rank(call: Mapping[str, Any]) -> tuple[Callable[[Any], Any], dict[Any, Any]]:
    """What a rank computes, and its states, of which there are none.

    A column comes from the host and goes back, as little as possible: both are timed.
    """
    import torch_xla.core.xla_model as xm

    graph, value = _graph(call, functools.partial(xm.all_reduce, xm.REDUCE_SUM))
    shape = value.shape
    return lambda column: graph(column.expand(shape).contiguous())[:, :1], {}


def _graph(
    call: Mapping[str, Any], reduce: Callable[[Any], Any] = lambda value: value
) -> tuple[Callable[[Any], Any], torch.Tensor]:
    """The computation, and a tensor to begin with."""
    kernel, given, named = calls.arguments(call, calls.Seeded())

    def graph(value: Any) -> Any:
        for _ in range(call["calls"]):
            value = kernel(value, **named)
        for _ in range(call["reduced"]):
            value = reduce(value)
        return value

    return graph, given[0]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(timed(json.loads(sys.argv[1]))), encoding="utf-8")
