"""Estimates over a size as a picture (matplotlib)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import write_bytes_atomically


def sweep(name: str, rows: Sequence[dict[str, Any]], kernel: str, path: Path) -> None:
    """Estimated time with its band, and the chip's bound, over a size.

    Raises:
        UsageError: there is no matplotlib, or the path's ending is no picture's.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, expected it to be installed; pip install matplotlib, or "
            "pip install '.[plots]' in a checkout."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
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
