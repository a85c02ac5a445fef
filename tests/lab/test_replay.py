"""What a search would have kept with estimates in place of device times."""

from __future__ import annotations

import dataclasses

import pytest

from lab import calibrate, replay


def search(*times):
    row = calibrate.public_rows.rows()[0]
    made = [
        calibrate.Outcome(dataclasses.replace(row, group="g", measured_us=measured), estimated)
        for measured, estimated in times
    ]
    (found,) = replay.searches(made)
    return found


def test_regret_is_of_what_the_estimate_picks():
    found = search((9, 60), (10, 20), (20, 10), (30, 30), (40, 40), (50, 50))
    assert found.regret(1) == pytest.approx(20 / 9 - 1)
    assert found.regret(5) == pytest.approx(10 / 9 - 1)
    assert found.regret(6) == 0.0
    assert found.ties == 0


def test_among_ties_the_slowest_count_as_picked():
    found = search((10, 100.0), (20, 100.05), (30, 100.1), (40, 99.96), (50, 100.02), (60, 100.0))
    assert found.ties == 15
    assert found.regret(1) == pytest.approx(5.0)
    assert found.regret(5) == pytest.approx(1.0)


def test_a_step_is_kept_where_both_keep_as_fast_a_candidate():
    found = search((10, 10), (8, 12), (7, 7), (9, 6), (6.9, 20), (6, 5))
    assert found.steps == (2, 5)


def test_groups_of_few_or_of_other_arguments_are_no_search():
    row = calibrate.public_rows.rows()[0]
    few = [calibrate.Outcome(row, 1.0)] * 5
    assert replay.searches(few) == []
    other = calibrate.Outcome(dataclasses.replace(row, arguments=()), 1.0)
    assert replay.searches([*few, other]) == []
