"""Parameters that are left to the full run, one by one or half of all combinations."""

import itertools

import pytest


def full(*values):
    """A row of the full run alone."""
    return pytest.param(*values, marks=pytest.mark.full)


def crossed(*columns):
    """Rows of all combinations; those of odd places are marked ``full``.

    Every value stays in the default run; of three columns or more, so does every pair of values
    where no more than one column has an odd number of them.
    """
    rows = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        row = full if sum(places) % 2 else pytest.param
        rows.append(row(*(c[i] for c, i in zip(columns, places))))
    return rows
