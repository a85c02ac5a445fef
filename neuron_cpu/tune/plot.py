"""The front of time against SBUF as a picture (matplotlib)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import write_bytes_atomically

if TYPE_CHECKING:  # a sweep draws without what a search needs
    from .search import Trial

LABELLED = 12  # points of the front whose values stand in the legend


def plot(
    found: "Sequence[Trial]", trials: "Sequence[Trial]", now: "Trial", title: str, path: Path
) -> None:
    """Plot all legal points, the front as a line with its values, and the unchanged kernel."""
    pyplot, figure, axes = _figure()
    legal = [trial for trial in trials if trial.kind == "legal"]
    axes.scatter(*_places(legal), s=16, color="#b0b5bd", label=f"{len(legal)} legal points")
    axes.plot(*_places(found), "o-", color="#4c72b0", drawstyle="steps-post", label="front")
    if now.kind == "legal":
        axes.plot(*_places([now]), "*", color="#dd8452", markersize=13, label="as it is")
    for number, trial in enumerate(found[:LABELLED], 1):
        where = (trial.sbuf_bytes / 1024, trial.time_ns / 1e3)
        axes.annotate(str(number), where, xytext=(5, 6), textcoords="offset points")
        text = ", ".join(f"{name}={value}" for name, value in trial.point.items())
        axes.plot([], [], " ", label=f"{number}: {text}")
    axes.set(xlabel="SBUF, KiB per partition", ylabel="time, µs (estimated)", title=title)
    axes.margins(0.1)
    axes.set_ylim(bottom=0)
    _save(pyplot, figure, axes, path)


def sweep(name: str, rows: Sequence[dict[str, Any]], kernel: str, path: Path) -> None:
    """Estimated time with its band, and the chip's bound, over a size."""
    pyplot, figure, axes = _figure()
    sizes = [row["size"] for row in rows]
    times, bounds = ([row[key] / 1e3 for row in rows] for key in ("time_ns", "bound_ns"))
    low, high = ([row["band_ns"][end] / 1e3 for row in rows] for end in (0, 1))
    axes.plot(sizes, times, "o-", color="#4c72b0", label="estimate")
    axes.fill_between(sizes, low, high, color="#4c72b0", alpha=0.15, label="on a device")
    axes.plot(sizes, bounds, "--", color="#dd8452", label="what the chip's limits alone take")
    for row, time in zip(rows, times):
        share = f"{row['roofline_percent']:.0f} %"
        axes.annotate(share, (row["size"], time), xytext=(4, -13), textcoords="offset points")
    axes.set(xlabel=name, ylabel="time, µs (estimated)", title=f"{kernel} over {name}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(pyplot.LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.08)
    _save(pyplot, figure, axes, path)


def _figure() -> tuple[Any, Any, Any]:
    """(pyplot, figure, axes), or the refusal where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, expected it to be installed; pip install matplotlib, or "
            "pip install '.[plots]' in a checkout."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return (pyplot, *pyplot.subplots(figsize=(8, 5)))


def _save(pyplot: Any, figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    picture, form = io.BytesIO(), path.suffix[1:] or "png"
    try:
        figure.savefig(picture, format=form, dpi=120)
    except ValueError as error:
        raise UsageError(
            f"--plot {path} ends in .{form}, which is no picture, expected a name such as "
            f"{path.stem}.png; correct it."
        ) from error
    finally:
        pyplot.close(figure)
    write_bytes_atomically(path, picture.getvalue())


def _places(trials: "Sequence[Trial]") -> tuple[list[float], list[float]]:
    ordered = sorted(trials, key=lambda trial: trial.sbuf_bytes)
    return [t.sbuf_bytes / 1024 for t in ordered], [t.time_ns / 1e3 for t in ordered]
