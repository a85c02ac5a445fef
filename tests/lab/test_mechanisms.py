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


def test_sizes_of_a_kernel_share_its_vote():
    found = [outcome(1.0), outcome(1.1), outcome(0.9), outcome(2.0, "latency", "other")]
    (near, far, _), kernels = calibration_votes.shares(found), calibration_votes.by_kernel(found)
    assert near == far == (0.75, 0.5) and len(kernels) == 2
    table = calibration_votes.votes_table(found)
    assert "| all | 4 | 2 | 75% | 50% |" in table and "TensorE" not in table
    aims = calibration_votes.aims_list(found, (97, 100))
    assert "| all: kernels within ±15% | 70% | 50% | no |" in aims
    assert "| pairs in order | 97% | 97% | yes |" in aims


@pytest.mark.parametrize(("ratio", "held"), [(0.99, True), (0.01, False), (9.0, False)])
def test_a_time_is_in_the_band_of_its_class(ratio, held):
    assert calibration_votes.inside(outcome(ratio)) is held
    assert calibration_votes.inside(outcome(ratio, bands.ALL)) is held


def test_a_source_is_held_against_the_others():
    found = [outcome(0.5 + k / 100, repository="a/a") for k in range(10)]
    found += [outcome(0.6, repository="b/b"), outcome(0.6, function="f", repository="b/b")]
    lines = calibration_votes.left_out(found).splitlines()
    # b's 0.6 is 40 % off; divided by a's median, 0.545, it is 10 % off, and beyond a's band
    assert lines[3] == "| b/b | 2 | 40% | 10% | 0% |"
    assert lines[4].startswith("| mean of the 2 sources | | ")


def test_tables_are_those_of_the_pages():
    assert calibrate.pages.published(calibrate.MODEL, "mechanisms") == mechanisms.table()
    assert calibrate.pages.published(calibrate.MODEL, "distances") == mechanisms.distances()
    made = calibration_votes.left_out(mechanisms.outcomes())
    assert calibrate.pages.published(calibrate.DOCUMENT, "left out") == made


def test_every_mechanism_has_a_law_or_a_class():
    for one in mechanisms.MECHANISMS:
        assert one.kind in ("", *bands.CLASSES) and one.source
        assert one.kind or one.law, f"{one.name} is explained by nothing"
