"""Combinations of parameters, half of which are left to the full run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(*columns: Sequence[Any]) -> list[Any]:
    """Rows of all combinations; those of odd places are marked ``full``.

    Every value stays in the default run; of three columns or more, so does every pair of values
    where no more than one column has an odd number of them.
    """
    rows = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        marks = [pytest.mark.full] if sum(places) % 2 else []
        rows.append(pytest.param(*(c[i] for c, i in zip(columns, places)), marks=marks))
    return rows
