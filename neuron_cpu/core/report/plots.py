"""Profiles as PNG files: timeline, roofline, bytes by operator (matplotlib)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..device.spec import GENERATIONS, using
from ..time import cost
from ..time.schedule import DMA, ENGINES, Schedule
from . import bands
from .report import Profile, critical_times, size_text

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
MARKERS = "osD^vP*X<>"
BARS = 15  # operators with a bar of their own
VISIBLE = 0.004  # share of the longest bar from which on one can be seen
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
    share = 1.0 / schedule.program.core.dma.engines
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
            [k * width for k in range(BINS)],
            base,
            [base + 0.9 * min(s, 1.0) for s in shares],
            color=COLOURS[row],
            step="post",
            linewidth=0,
        )
    axes.set_yticks([len(ENGINES) - 1 - k + 0.45 for k in range(len(ENGINES))])
    axes.set_yticklabels([e.value for e in ENGINES])
    axes.set_xlabel("µs")
    low, high = bands.of(critical_times(schedule)).measured(schedule.total)
    axes.set_title(
        f"{schedule.program.name}: estimated {schedule.total / 1e3:.1f} µs "
        f"({low / 1e3:.1f} to {high / 1e3:.1f} on a device), DMA profile {schedule.profile}"
    )
    return _save(pyplot, figure, path)


def roofline(points: Sequence[tuple[str, Profile]], path: Path) -> Path:
    """Each labelled kernel as a point: FLOP per HBM byte against achieved TFLOP/s, with a bar for
    the rates of a device that fit the estimate."""
    pyplot, figure, axes = _figure(10, 5)
    core = GENERATIONS[points[0][1].generation]
    peak = 2 * core.peak_macs_per_ns / 1e3  # TFLOP/s
    profile = cost.dma_profile(points[0][1].dma_profile)
    with using(core):
        dma_peak = profile.peak
    for label, rate, style in (
        (f"HBM share, {core.hbm_bytes_per_ns:.0f} GB/s", core.hbm_bytes_per_ns, "-"),
        (f"DMA profile {profile.name}", dma_peak, "--"),
    ):
        knee = peak * 1e3 / rate
        axes.plot([0.1, knee, 1e4], [rate / 1e4, peak, peak], style, label=label, color="grey")
    for number, (label, found) in enumerate(points):
        size = found.metrics["hbm_read_bytes"] + found.metrics["hbm_write_bytes"]
        flops = found.metrics["model_flops"]
        if size and flops:
            marker = MARKERS[number % len(MARKERS)]
            (point,) = axes.plot(flops / size, flops / found.time_ns / 1e3, marker, label=label)
            rates = [flops / time / 1e3 for time in found.band_ns]
            axes.plot([flops / size] * 2, rates, color=point.get_color(), linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per HBM byte", ylabel="TFLOP/s (estimated)")
    axes.set_title("roofline of one NeuronCore in bf16, times estimated")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", fontsize=8)
    axes.grid(alpha=0.3)
    return _save(pyplot, figure, path)


def bytes_by_operator(sizes: dict[str, float], path: Path, title: str) -> Path:
    """Horizontal bars: bytes that each operator (kernel or source line) moves, largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    least = VISIBLE * max(sizes.values(), default=0.0)
    shown = [item for item in ordered[:BARS] if item[1] > least]
    rest = ordered[len(shown) :]
    if rest:
        shown.append((f"{len(rest)} smaller ones", sum(size for _, size in rest)))
    pyplot, figure, axes = _figure(9, 1.4 + 0.3 * len(shown))
    bars = axes.barh(
        [name for name, _ in shown[::-1]], [size / 1e6 for _, size in shown[::-1]], color=COLOURS[0]
    )
    axes.bar_label(bars, [size_text(int(size)) for _, size in shown[::-1]], padding=3, fontsize=8)
    axes.margins(x=0.12)  # room for the labels inside of the frame
    axes.set_xlabel("bytes moved, MB")
    axes.set_title(f"{title}: {size_text(int(sum(sizes.values())))} moved, estimated")
    return _save(pyplot, figure, path)


def all_plots(
    schedules: Sequence[Schedule], profiles: Sequence[Profile], folder: Path
) -> list[Path]:
    """The three kinds of plots for the given kernels, written into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [timeline(s, folder / f"timeline-{s.program.name}.png") for s in schedules]
    written.append(roofline([(p.name, p) for p in profiles], folder / "roofline.png"))
    if len(profiles) > 1:
        sizes = {p.name: p.metrics["dma_transfer_bytes"] for p in profiles}
    else:
        sizes = {line.place: float(line.dma_bytes) for line in profiles[0].lines if line.dma_bytes}
    title = ", ".join(dict.fromkeys(p.name for p in profiles))
    written.append(bytes_by_operator(sizes, folder / "bytes.png", title))
    return written
