"""The error of estimates: the spread of the calibration's ratios, by the bound of a kernel.

`bands.json` is written by `make calibrate PUBLIC=DIR` from the public kernels that the model met
for the first time when they were evaluated; docs/calibration.md has the tables. A band is the 6th
to the 94th percentile of estimated over measured time: made so of five sealed sets, bands held 81 %
of the sixth, in the mean of the six (lab/trust.py).
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..device.spec import Engine

DATA = Path(__file__).resolve().with_name("bands.json")
CLASSES = ("DMA", "TensorE", "VectorE", "ScalarE", "latency")
ALL = "all"
FEWEST = 5  # rows of a class that make a band of its own


class Band(NamedTuple):
    """Estimated over measured time of the rows of one class.

    Attributes:
        kind: the class, ``all`` where it has too few rows of its own.
        rows: how many there are.
        low, median, high: 6th, 50th and 94th percentile.
    """

    kind: str
    rows: int
    low: float
    median: float
    high: float

    def measured(self, estimate: float) -> tuple[float, float]:
        """Shortest and longest time that a device would show for this estimate, in its unit."""
        return estimate / self.high, estimate / self.low


def kind_of(critical: Mapping[str, float]) -> str:
    """The class of a kernel: the resource with the largest share of its critical path.

    Args:
        critical: nanoseconds by resource, as `report.Profile.critical`.
    """
    if not critical:
        return "latency"
    resource = max(critical, key=lambda name: critical[name])
    if resource == Engine.GPSIMD.value:
        return ALL  # no public kernel with a published time is bound by it
    return resource if resource in CLASSES else "latency"


@functools.cache
def load() -> dict[str, Band]:
    """The bands that the project ships, by class; ``all`` is always there."""
    found = json.loads(DATA.read_text())["bands"]
    return {kind: Band(kind, **figures) for kind, figures in found.items()}


def of(critical: Mapping[str, float]) -> Band:
    """The band of a kernel with this critical path."""
    shipped = load()
    found = shipped.get(kind_of(critical))
    return found if found is not None and found.rows >= FEWEST else shipped[ALL]


@functools.cache
def ratios() -> dict[str, float]:
    """Estimated over measured time of every row of the shipped table."""
    return dict(json.loads(DATA.read_text())["ratios"])
