"""What a search would have kept with estimates in place of device times."""

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


def test_a_step_is_kept_where_both_keep_as_fast_a_candidate():
    found = search((10, 10), (8, 12), (7, 7), (9, 6), (6.9, 20), (6, 5))
    assert found.steps == (2, 5)
