"""Measured against predicted: the published device times and what the cost model says.

    python benchmarks/calibrate.py [--profile NAME ...] [--points WORD ...] [--write]

``--write`` replaces the table in docs/cost_model.md. Exit status 1 where a predicted device time is
off by more than 15 % under the first profile.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402 - after the path

from neuron_cpu import ensure_sdk  # noqa: E402

ensure_sdk()
import calibration_kernels as kernels  # noqa: E402 - needs the SDK names

from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.device import spec  # noqa: E402
from neuron_cpu.core.time import cost, schedule  # noqa: E402

LIMIT = 0.15
DOCUMENT = ROOT / "docs" / "cost_model.md"
BEGIN, END = "<!-- calibration: begin -->", "<!-- calibration: end -->"


@dataclass(frozen=True)
class Point:
    """One published time of one workload.

    Attributes:
        name: workload.
        kernel: attribute of ``calibration_kernels``.
        arguments: shapes and dtypes.
        measured_us: published microseconds.
        device: False where host transfers are part of the measurement.
        lacks: what the model lacks, for a point that it does not meet.
    """

    name: str
    kernel: str
    arguments: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    measured_us: float
    device: bool = True
    lacks: str = ""


Found = Optional[dict[str, schedule.Schedule]]  # by profile; None where the kernel is refused


def _matmul(name: str, kernel: str, measured_ms: float) -> Point:
    shapes = ((8192, 4096), torch.bfloat16), ((8192, 8192), torch.bfloat16)
    return Point(f"matmul 4096x8192x8192, {name}", kernel, shapes, measured_ms * 1e3)


def _mamba(version: str, kernel: str, channels: int, length: int, ms: float, lacks="") -> Point:
    big, states = ((channels, length), torch.float32), ((16, length), torch.float32)
    shapes = big, big, ((channels, 16), torch.float32), states, states
    return Point(f"Mamba {version}, {channels} ch, {length} tokens", kernel, shapes, ms * 1e3,
                 lacks=lacks)  # fmt: skip


def _layernorm(name: str, kernel: str, measured_us: float) -> Point:
    row = ((1, 1000), torch.float32)
    shapes = ((300, 1000), torch.float32), row, row
    return Point(f"LayerNorm 300x1000, {name}", kernel, shapes, measured_us, device=False,
                 lacks="the measurement contains host transfers")  # fmt: skip


POINTS = [
    _matmul("tiled", "matmul_tiled", 51.80),
    _matmul("left operand hoisted", "matmul_hoisted", 42.96),
    _matmul("2 x 2 blocks", "matmul_blocked_2x2", 22.07),
    _matmul("fully blocked", "matmul_blocked_3d", 6.97),
    _mamba("v1", "mamba_states_outside", 256, 512, 0.17293),
    _mamba("v1", "mamba_states_outside", 4096, 512, 2.34),
    _mamba("v2", "mamba_channels_outside", 4096, 512, 1.61),
    _mamba("v2", "mamba_channels_outside", 4096, 1024, 4.4),
    _mamba("v2", "mamba_channels_outside", 4096, 2048, 8.9),
    _mamba("v2", "mamba_channels_outside", 4096, 4096, 17.6),
    _mamba("v2", "mamba_channels_outside", 4096, 8192, 53.33,
           "the compiler spills; here a kernel that holds more than SBUF is refused"),
    _mamba("v3", "mamba_tiled", 4096, 1024, 3.3),
    _mamba("v3", "mamba_tiled", 4096, 2048, 6.6),
    _mamba("v3", "mamba_tiled", 4096, 4096, 13.3),
    _mamba("v3", "mamba_tiled", 4096, 8192, 27.8),
    _layernorm("nl operations", "layernorm_language", 2311),
    _layernorm("bn_stats", "layernorm_statistics", 1969),
]  # fmt: skip


def predict(point: Point, profiles: list[str]) -> Found:
    """Schedules of one point under each profile."""
    arguments = [torch.empty(s, dtype=d, device="meta") for s, d in point.arguments]
    kernel = getattr(kernels, point.kernel)
    try:
        program = kernel.trace(*arguments)
    except NkiError as refusal:
        if refusal.identifier != "sim_sbuf_capacity" or not point.lacks:
            raise
        return None
    kernel.programs.clear()  # the large ones hold 100 000 instructions each
    return {name: schedule.schedule(program, name) for name in profiles}


def table(rows: list[tuple[Point, Found]], profiles: list[str]) -> str:
    """Markdown: measured, predicted and ratio for every point and profile."""
    head = "".join(f" {p}: µs | ratio |" for p in profiles)
    lines = [
        f"| Workload | measured µs |{head} busiest engine | note |",
        "|---|---:|" + "---:|---:|" * len(profiles) + "---|---|",
    ]
    for point, found in rows:
        lines.append(f"| {point.name} | {point.measured_us:.1f} | {cells(point, found, profiles)}")
    return "\n".join(lines)


def cells(point: Point, found: Found, profiles: list[str]) -> str:
    """The predicted part of a row."""
    if found is None:
        return " | ".join(["refused", ""] * len(profiles)) + f" | | {point.lacks} |"
    times = [f"{predicted_us(found[p]):.1f} | {ratio(point, found[p]):.2f}" for p in profiles]
    busy = found[profiles[0]].engine_busy()
    engine = max(busy, key=lambda e: busy[e])
    share = busy[engine] / found[profiles[0]].total
    return f"{' | '.join(times)} | {engine.value} {share:.0%} | {point.lacks} |"


def predicted_us(found: schedule.Schedule) -> float:
    """Microseconds of a graph that consists of this kernel."""
    return (found.total + spec.GRAPH_START_NS) / 1e3


def ratio(point: Point, found: schedule.Schedule) -> float:
    return predicted_us(found) / point.measured_us


def write(text: str) -> None:
    """Replace the table of the document."""
    before = DOCUMENT.read_text()
    block = f"{BEGIN}\n{text}\n{END}"
    after, count = re.subn(f"{BEGIN}.*{END}", lambda _: block, before, flags=re.S)
    if count != 1:
        raise SystemExit(f"{DOCUMENT} has {count} calibration blocks, expected 1")
    DOCUMENT.write_text(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", nargs="+", default=list(cost.PROFILES))
    parser.add_argument("--points", nargs="+", help="only points whose name has one of the words")
    parser.add_argument("--write", action="store_true", help="update docs/cost_model.md")
    args = parser.parse_args()
    rows = []
    for point in POINTS:
        if args.points and not any(word in point.name for word in args.points):
            continue
        begin = time.perf_counter()
        rows.append((point, predict(point, args.profile)))
        spent = time.perf_counter() - begin
        print(f"{point.name}: {spent:.1f} s", file=sys.stderr, flush=True)
    text = table(rows, args.profile)
    print(text)
    if args.write:
        write(text)
    off = [
        point.name
        for point, found in rows
        if found is not None and point.device
        and abs(ratio(point, found[args.profile[0]]) - 1) > LIMIT
    ]  # fmt: skip
    if off:
        print(f"off by more than {LIMIT:.0%}: {'; '.join(off)}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
