"""Shares with one vote a kernel, one source left out, and the table of mechanisms."""

import pytest

from lab import calibrate, calibration_rows, calibration_votes, mechanisms
from neuron_cpu.core.report import bands


def outcome(ratio, kind="DMA", function="one", repository="own/er"):
    made = calibration_rows.Row(
        f"{function}{ratio}",
        "s",
        repository,
        "0" * 40,
        "k.py",
        function,
        measured_us=100,
        kind="p50",
        sdk="2.32",
        set="sealed",
        group="s",
        figures="here",
        machine="trn2",
    )
    return calibrate.Outcome(made, 100 * ratio, kind)


@pytest.mark.parametrize(("ratio", "held"), [(0.99, True), (0.01, False), (9.0, False)])
def test_a_time_is_in_the_band_of_its_class(ratio, held):
    assert calibration_votes.inside(outcome(ratio)) is held
    assert calibration_votes.inside(outcome(ratio, bands.ALL)) is held


def test_tables_are_those_of_the_pages():
    assert calibrate.pages.published(calibrate.MODEL, "mechanisms") == mechanisms.table()
    assert calibrate.pages.published(calibrate.MODEL, "distances") == mechanisms.distances()
    made = calibration_votes.left_out(mechanisms.outcomes())
    assert calibrate.pages.published(calibrate.DOCUMENT, "left out") == made


def test_every_mechanism_has_a_law_or_a_class():
    for one in mechanisms.MECHANISMS:
        assert one.kind in ("", *bands.CLASSES) and one.source
        assert one.kind or one.law, f"{one.name} is explained by nothing"
