"""Profiles as PNG files: timeline, roofline, bytes by operator (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cost, spec
from .report import Profile
from .schedule import DMA, ENGINES, Schedule

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
BINS = 600  # slices of the timeline: about one per pixel column


def _figure(width: float, height: float) -> tuple[Any, Any, Any]:
    """(pyplot, figure, axes) on the backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def activity(schedule: Schedule) -> list[list[float]]:
    """Busy share of each engine in BINS equal slices of the run; DMA averages its 16 engines."""
    width = schedule.total / BINS
    shares = [[0.0] * (BINS + 1) for _ in ENGINES]
    spans = [
        (number, begin, begin + time, 1.0)
        for number, begin, time in zip(schedule.engine, schedule.start, schedule.busy)
        if number != DMA
    ]
    share = 1.0 / spec.DMA_ENGINES
    spans += [(DMA, begin, end, share) for _, _, begin, end in schedule.lane_spans()]
    for number, begin, end, weight in spans:
        for k in range(int(begin / width), min(int(end / width), BINS) + 1):
            inside = min(end, (k + 1) * width) - max(begin, k * width)
            shares[number][k] += weight * inside / width
    return [row[:BINS] for row in shares]


def timeline(schedule: Schedule, path: Path) -> Path:
    """Busy share of every engine over time."""
    pyplot, figure, axes = _figure(11, 4)
    width = schedule.total / BINS / 1e3
    for row, shares in enumerate(activity(schedule)):
        base = len(ENGINES) - 1 - row
        axes.fill_between(
            [k * width for k in range(BINS)], base, [base + 0.9 * min(s, 1.0) for s in shares],
            color=COLOURS[row], step="post", linewidth=0,
        )  # fmt: skip
    axes.set_yticks([len(ENGINES) - 1 - k + 0.45 for k in range(len(ENGINES))])
    axes.set_yticklabels([e.value for e in ENGINES])
    axes.set_xlabel("µs")
    axes.set_title(f"{schedule.program.name}: estimated {schedule.total / 1e3:.1f} µs, "
                   f"DMA profile {schedule.profile}")  # fmt: skip
    return _save(pyplot, figure, path)


def roofline(profiles: Sequence[Profile], path: Path) -> Path:
    """Each kernel as a point: FLOP per HBM byte against achieved TFLOP/s."""
    pyplot, figure, axes = _figure(8, 5)
    peak = 2 * spec.PEAK_MACS_PER_NS / 1e3  # TFLOP/s
    rates = {
        "HBM share, 410 GB/s": spec.HBM_BYTES_PER_NS,
        f"DMA profile {profiles[0].dma_profile}": cost.dma_profile(profiles[0].dma_profile).peak,
    }
    for (label, rate), style in zip(rates.items(), ("-", "--")):
        knee = peak * 1e3 / rate
        axes.plot([0.1, knee, 1e4], [rate / 1e4, peak, peak], style, label=label)
    for found in profiles:
        size = found.metrics["hbm_read_bytes"] + found.metrics["hbm_write_bytes"]
        flops = found.metrics["model_flops"]
        if size and flops:
            x, y = flops / size, flops / found.time_ns / 1e3
            axes.plot(x, y, "o")
            axes.annotate(found.name, (x, y), textcoords="offset points", xytext=(5, -10))
    axes.set(xscale="log", yscale="log", xlabel="FLOP per HBM byte", ylabel="TFLOP/s (estimated)")
    axes.set_title("roofline of one NeuronCore-v2, bf16")
    axes.legend()
    axes.grid(alpha=0.3)
    return _save(pyplot, figure, path)


def bytes_by_operator(sizes: dict[str, float], path: Path) -> Path:
    """Horizontal bars: DMA bytes of each operator (kernel or source line)."""
    ordered = sorted(sizes.items(), key=lambda item: item[1])
    pyplot, figure, axes = _figure(9, 1 + 0.3 * len(ordered))
    axes.barh([name for name, _ in ordered], [size / 1e6 for _, size in ordered], color=COLOURS[0])
    axes.set_xlabel("DMA bytes, MB")
    return _save(pyplot, figure, path)


def all_plots(
    schedules: Sequence[Schedule], profiles: Sequence[Profile], folder: Path
) -> list[Path]:
    """The three kinds of plots for the given kernels, written into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [timeline(s, folder / f"timeline-{s.program.name}.png") for s in schedules]
    written.append(roofline(profiles, folder / "roofline.png"))
    if len(profiles) > 1:
        sizes = {p.name: p.metrics["dma_transfer_bytes"] for p in profiles}
    else:
        sizes = {line.place: float(line.dma_bytes) for line in profiles[0].lines if line.dma_bytes}
    written.append(bytes_by_operator(sizes, folder / "bytes.png"))
    return written
