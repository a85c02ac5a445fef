"""How fast the simulator is, as ratios against plain PyTorch in the same run.

    python benchmarks/simulator.py [--threads N]

Goals: the 1024 x 1024 x 1024 bf16 matmul kernel traces in 100 ms and replays in 3 times
``torch.matmul`` in fp32; the decode linears of a Llama-3.2-1B layer at degree 2 replay in 3 times
the same products in bf16 (10 times with merging off); tracing takes 60 µs and 500 bytes an
instruction, in the current language, too. The time of an instruction is CPU time, which others on
the machine change less.
"""

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - after the path

from neuron_cpu import ensure_sdk  # noqa: E402

ensure_sdk()
import neuronxcc.nki as nki  # noqa: E402 - needs ensure_sdk
import neuronxcc.nki.isa as nisa  # noqa: E402
import neuronxcc.nki.language as nl  # noqa: E402
import nki as current_nki  # noqa: E402
import nki.isa as current_nisa  # noqa: E402
import nki.language as current_nl  # noqa: E402

from neuron_cpu.core.run.execute import Plan  # noqa: E402

RUNS = 7
# (in, out) of q, k, v, o, gate, up, down of Llama-3.2-1B at tensor-parallel degree 2
DECODE_LINEARS = (
    (2048, 1024), (2048, 256), (2048, 256), (1024, 2048), (2048, 4096), (2048, 4096), (4096, 2048),
)  # fmt: skip


@nki.jit
def matmul(lhs_t, rhs):
    """``lhs_t[K, M].T @ rhs[K, N]`` in tiles of 128 x 128 by 128 x 512."""
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    out = nl.ndarray((m_size, n_size), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(m_size // 128):
        for n in nl.affine_range(n_size // 512):
            acc = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
            for k in nl.affine_range(k_size // 128):
                left = nl.load(lhs_t[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
                right = nl.load(rhs[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
                acc += nisa.nc_matmul(left, right)
            result = nisa.tensor_copy(acc, dtype=out.dtype)
            nl.store(out[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], value=result)
    return out


@current_nki.jit
def current_matmul(lhs_t, rhs):
    """The same in the current language, whose loops leave no trace to merge."""
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    out = current_nl.ndarray((m_size, n_size), lhs_t.dtype, buffer=current_nl.shared_hbm)
    for m in range(m_size // 128):
        for n in range(n_size // 512):
            acc = current_nl.ndarray((128, 512), current_nl.float32, buffer=current_nl.psum)
            for k in range(k_size // 128):
                rows = current_nl.ds(k * 128, 128)
                left = current_nl.load(lhs_t[rows, current_nl.ds(m * 128, 128)])
                right = current_nl.load(rhs[rows, current_nl.ds(n * 512, 512)])
                current_nisa.nc_matmul(acc, left, right, accumulate=k > 0)
            result = current_nl.ndarray((128, 512), lhs_t.dtype)
            current_nisa.tensor_copy(result, acc)
            part = out[current_nl.ds(m * 128, 128), current_nl.ds(n * 512, 512)]
            current_nl.store(part, result)
    return out


@nki.jit
def linear(x_t, weight):
    """``weight[K, N].T @ x_t[K, 1]``, weights stationary: features land on partitions."""
    k_size, n_size = weight.shape
    k_tiles, n_tiles = k_size // 128, n_size // 128
    out = nl.ndarray((n_size, 1), dtype=x_t.dtype, buffer=nl.shared_hbm)
    x = nl.ndarray((128, k_tiles), dtype=x_t.dtype, buffer=nl.sbuf)
    for k in nl.affine_range(k_tiles):
        x[:, nl.ds(k, 1)] = nl.load(x_t[nl.ds(k * 128, 128), :])
    acc = nl.zeros((128, n_tiles), nl.float32, buffer=nl.psum)
    for k in nl.affine_range(k_tiles):
        rows = nl.load(weight[nl.ds(k * 128, 128), :])
        for n in nl.affine_range(n_tiles):
            tile = rows[:, nl.ds(n * 128, 128)]
            acc[:, nl.ds(n, 1)] += nisa.nc_matmul(tile, x[:, nl.ds(k, 1)])
    result = nisa.tensor_copy(acc, dtype=out.dtype)
    for n in nl.affine_range(n_tiles):
        nl.store(out[nl.ds(n * 128, 128), :], value=result[:, nl.ds(n, 1)])
    return out


def best(
    function: Callable[[], object], runs: int = RUNS, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Shortest of several runs, in seconds of ``clock``."""
    times = []
    for _ in range(runs):
        begin = clock()
        function()
        times.append(clock() - begin)
    return min(times)


def line(what: str, value: float, unit: str, goal: float) -> None:
    """One result beside its goal."""
    print(
        f"{what:58s} {value:8.2f} {unit:16s} goal {goal:g}: {'met' if value <= goal else 'MISSED'}"
    )


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def measure_matmul() -> None:
    """Tracing and replay of the tiled matmul."""
    a, b = bfloat16(1024, 1024), bfloat16(1024, 1024)

    def trace():
        matmul.programs.clear()
        return matmul.trace(a, b)

    tracing = best(trace)
    program = trace()
    left, right = a.float().t().contiguous(), b.float()
    bare = best(lambda: torch.matmul(left, right))
    line("1024^3 matmul: trace and verify", tracing * 1e3, "ms", 100)
    each = best(trace, clock=time.thread_time) / len(program) * 1e6
    line("1024^3 matmul: the same, of each instruction", each, "µs of CPU", 60)
    for merge, goal in ((True, 3), (False, 10)):
        plan = Plan(program, merge)
        ratio = best(lambda plan=plan: plan.run([a, b])) / bare
        line(f"1024^3 matmul: replay, {_mode(merge)}", ratio, "x torch fp32", goal)


def measure_current() -> None:
    """The same product in the current language."""
    a, b = bfloat16(1024, 1024), bfloat16(1024, 1024)

    def trace():
        current_matmul.programs.clear()
        return current_matmul.trace(a, b)

    tracing, program = best(trace, clock=time.thread_time), trace()
    left, right = a.float().t().contiguous(), b.float()
    bare = best(lambda: torch.matmul(left, right))
    each = tracing / len(program) * 1e6
    line("1024^3 matmul in the current language: each instruction", each, "µs of CPU", 60)
    plan = Plan(program)
    ratio = best(lambda: plan.run([a, b])) / bare
    line("1024^3 matmul in the current language: replay", ratio, "x torch fp32", 3)


def _mode(merge: bool) -> str:
    return "loops merged" if merge else "one by one"


def measure_linears() -> None:
    """Replay of all linears of a decoder layer for one token."""
    pairs = [(bfloat16(k, 1), bfloat16(k, n)) for k, n in DECODE_LINEARS]
    bare = best(lambda: [torch.matmul(w.t(), x) for x, w in pairs])
    for merge, goal in ((True, 3), (False, 10)):
        plans = [Plan(linear.trace(x, w), merge) for x, w in pairs]
        time_ = best(lambda plans=plans: [p.run([x, w]) for p, (x, w) in zip(plans, pairs)])
        line(
            f"decode linears of a layer: replay, {_mode(merge)}", time_ / bare, "x torch bf16", goal
        )


def measure_memory() -> None:
    """Bytes that a Program keeps for each instruction."""
    x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4096, 1), (4096, 4096)))
    linear.trace(x, w)  # what is interned once for all programs is no program's memory
    linear.programs.clear()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    program = linear.trace(x, w)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    line("memory of a program, of each instruction", used / len(program), "bytes", 500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    measure_matmul()
    measure_current()
    measure_linears()
    measure_memory()


if __name__ == "__main__":
    main()
