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
import signal
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
from lab.device import calls
from lab.device.running import DIED, Unanswered
from neuron_cpu.sandbox import interpreter

WARM_UPS, RUNS, PERCENTILES = 5, 50, (0, 50, 99)
RANKS = 2  # of a graph with all-reduces
INFERENCE, CORE = "libtorch_neuronx_lite", "neuron:0"  # PyTorch in vLLM's environment, its device
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
OFTEN = f"--num-exec={WARM_UPS + RUNS}", "--profile-nth-exec=11"
PROFILERS, TOOLS = ("neuron-explorer", "neuron-profile"), "/opt/aws/neuron/bin"
ONE_CORE = {"NEURON_RT_NUM_CORES": "1"}


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
    options = of_one_core() or ""
    timed = nki.benchmark(warmup=WARM_UPS, iters=RUNS, additional_compile_opt=options)(kernel)
    timed(*given, **named)
    latency = timed.benchmark_result.nc_latency
    return {f"p{p}": float(latency.get_latency_percentile(p)) for p in PERCENTILES}


def estimated(call: Mapping[str, Any]) -> dict[str, float]:
    """The cost model's time, in the form of a measurement."""
    from lab.device import model

    return by_percentile([model.graph_ns(call) / 1e3])


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
        run = "-m", "lab.device.calls", json.dumps(dict(call)), "results.pt"
        _told(folder, ONE_CORE, *interpreter.command(*run))
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
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    name, words = Path(command[0]).name, (done.stderr or done.stdout)[-600:]
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        raise Unanswered(DIED, f"{ended} ended {name}, whose last words are: {words or 'none'}")
    if done.returncode:
        raise RuntimeError(f"{name}, with status {done.returncode}: {words or 'not a word'}")
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
        run = "-m", "lab.device.timing", json.dumps(dict(call)), "times.json"
        _told(folder, {}, *interpreter.command(*run))
        return json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))


def timed(call: Mapping[str, Any]) -> dict[str, float]:
    """The same, in this process."""
    made = _of_jax
    if importlib.util.find_spec("torch_xla"):
        made = _of_torch
    elif importlib.util.find_spec(INFERENCE) and not call["reduced"]:
        made = _of_inference
    run = made(call)
    seconds = []
    for _ in range(WARM_UPS + RUNS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return by_percentile([1e6 * one for one in seconds[WARM_UPS:]])


def _of_inference(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph as vLLM's environment of SDK 2.32 and later compiles it (foxl-ai/kiln on a trn1,
    mega-trainium on a trn2, which begins a group of one process, too)."""
    importlib.import_module(INFERENCE)  # PyTorch knows its device and compiler behind this
    wrapped = importlib.import_module(f"{INFERENCE}.nki.nki_hop").wrap_nki
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), **ALONE)
    graph, value = _graph(call, wrap=lambda kernel: wrapped(kernel)[1])
    run = torch.compile(lambda x: graph(x)[:, :1], backend="neuron_libtorch", fullgraph=True)
    given = value.to(CORE)
    return lambda: run(given).cpu()


def _of_jax(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph in JAX, which today's SDK has where PyTorch/XLA is gone."""
    import jax

    graph, value = _graph(call, lambda value: jax.lax.psum(value, "cores"))
    given = jax.numpy.asarray(value.numpy())
    if call["reduced"]:
        mesh, whole = jax.sharding.Mesh(jax.devices()[:2], ("cores",)), jax.sharding.PartitionSpec()
        # JAX cannot look into a kernel, so it cannot check where results are the same
        graph = jax.shard_map(graph, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        given = jax.device_put(given, jax.sharding.NamedSharding(mesh, whole))
    run = jax.jit(graph)
    return lambda: run(given).block_until_ready()


def _of_torch(call: Mapping[str, Any]) -> Callable[[], Any]:
    """The graph as inference has it: compiled before. PyTorch/XLA would record it at each run, and
    so run the Python of every kernel in it (aws-neuron-sdk v2.21.1, api-torch-neuronx-trace)."""
    import neuronx_distributed as nxd

    column, options = Ranked(call).value[:, :1].contiguous(), of_one_core()
    run: Any
    if not call["reduced"]:
        import torch_neuronx

        run = torch_neuronx.trace(Ranked(call), (column,), compiler_args=options)
    elif not hasattr(nxd, "NxDParallelState"):  # before SDK 2.25
        from neuronx_distributed.trace import parallel_model_trace as trace

        of_rank = functools.partial(_of_rank, dict(call))
        run = trace(of_rank, (column,), tp_degree=RANKS, compiler_args=options)
    else:
        with nxd.NxDParallelState(world_size=RANKS, tensor_model_parallel_size=RANKS):
            traced = nxd.ModelBuilder(Ranked(call)).trace(args=column, tag="graph")
            run = traced.compile(compiler_workdir=os.getcwd(), compiler_args=options)
        run.set_weights([{}] * RANKS)
        run.to_neuron()
    return lambda: run(column)


def of_one_core() -> str | None:
    """The compiler's option with which a core is a core of its own. Where two are one by default, a
    graph has to be compiled for what the runtime's NEURON_LOGICAL_NC_CONFIG says."""
    target = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    return None if target in ("trn1", "inf2") else "--logical-nc-config=1"


def _of_rank(call: Mapping[str, Any]) -> tuple[torch.nn.Module, dict[Any, Any]]:
    """A rank's module, and its states, of which there are none."""
    return Ranked(call), {}


class Ranked(torch.nn.Module):
    """What a rank computes. A column comes from the host and goes back, as little as possible: both
    are timed."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        super().__init__()
        from neuronx_distributed.parallel_layers import mappings

        self.graph, self.value = _graph(call, mappings.reduce_from_tensor_model_parallel_region)

    def forward(self, column: Any) -> Any:
        """[rows, 1] of what every column holds -> the result's first column."""
        return self.graph(column.expand(self.value.shape).contiguous())[:, :1]


def _graph(
    call: Mapping[str, Any],
    reduce: Callable[[Any], Any] = lambda value: value,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> tuple[Callable[[Any], Any], torch.Tensor]:
    """The computation, and a tensor to begin with."""
    kernel, given, named = calls.arguments(call, calls.Seeded())
    kernel = wrap(kernel)

    def graph(value: Any) -> Any:
        for _ in range(call["calls"]):
            value = kernel(value, **named)
        for _ in range(call["reduced"]):
            value = reduce(value)
        return value

    return graph, given[0]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(timed(json.loads(sys.argv[1]))), encoding="utf-8")
