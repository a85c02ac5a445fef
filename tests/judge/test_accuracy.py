"""Errors against float64: what is an error, what is excused, what is never."""

import math

import pytest
import torch

from neuron_cpu.judge import accuracy

INF, NAN = math.inf, math.nan


def measured(got, expected, dtype=torch.float32, tolerance=0.01, **options):
    wide = torch.tensor(expected, dtype=torch.float64)
    plain = options.pop("plain", None)
    if plain is not None:
        plain = torch.tensor(plain, dtype=torch.float64)
    return accuracy.measure(torch.tensor(got), wide, dtype, tolerance, plain, **options)


def test_an_error_is_relative_to_the_element_or_its_row():
    rows = torch.ones(2, 16, dtype=torch.float64)
    rows[1] = 1000.0
    rows[0, 3] = 0.0
    got = rows.clone()
    got[0, 3] += 0.005  # small beside its row of ones
    got[1, 5] += 5.0  # small beside its row of thousands
    found = accuracy.measure(got, rows, torch.float32, 0.01)
    assert found.correct and found.largest == pytest.approx(0.005 / math.sqrt(15 / 16))
    got[0, 4] += 5.0  # what a row of thousands forgives, a row of ones does not
    found = accuracy.measure(got, rows, torch.float32, 0.01)
    assert (found.first, found.wrong, found.got, found.expected) == ((0, 4), 1, 6.0, 1.0)


@pytest.mark.parametrize(
    ("got", "expected", "dtype", "correct"),
    [
        (INF, INF, torch.float32, True),
        (-INF, INF, torch.float32, False),
        (INF, 1e39, torch.float32, True),  # fp32 has no such number
        (3e38, 1e39, torch.float32, False),
        (INF, 1e39, torch.bfloat16, True),
        (1.0, INF, torch.float32, False),
        (NAN, 1.0, torch.float32, False),
        (NAN, INF, torch.float32, False),
        (NAN, NAN, torch.float32, True),
        (7.0, NAN, torch.float32, True),  # nothing is asked there
        (0.0, 0.0, torch.float32, True),
        (1e-30, 0.0, torch.float32, True),
        (0.1, 0.0, torch.float32, False),
    ],
)
def test_special_values(got, expected, dtype, correct):
    assert measured([got], [expected], dtype).correct is correct


def test_nan_can_be_asked_for():
    assert not measured([7.0, 1.0], [NAN, 1.0], nan_is_asked=True).correct
    assert measured([NAN, 1.0], [NAN, 1.0], nan_is_asked=True).correct
    assert not measured([NAN, NAN], [NAN, 1.0], nan_is_asked=True).correct


def test_what_the_reference_overflows_in_the_same_type_is_not_judged():
    assert measured([INF, 1.0], [2.0, 1.0], plain=[INF, 1.0]).correct
    found = measured([INF, 5.0], [2.0, 1.0], plain=[INF, 1.0])
    assert found.first == (1,) and found.judged == 1


def test_an_infinity_that_float64_has_too_is_asked_for():
    """The reference in the kernel's own types excuses only infinities of its own."""
    assert measured([INF, 1.0], [INF, 1.0], plain=[INF, 1.0]).correct
    for got in (1.0, -INF, NAN):
        found = measured([got, 1.0], [INF, 1.0], plain=[INF, 1.0])
        assert (found.wrong, found.judged, found.first) == (1, 2, (0,))
    found = measured([NAN, 1.0], [2.0, 1.0])
    assert math.isinf(found.largest) and math.isinf(found.rms)


def test_the_reference_in_the_same_type_widens_the_bound_up_to_a_cap():
    assert measured([1.03], [1.0], plain=[1.02]).correct
    assert not measured([1.05], [1.0], plain=[1.02]).correct
    assert not measured([1.5], [1.0], plain=[1.4]).correct
    assert measured([1.001], [1.0], plain=[1.001], tolerance=1e-4).correct
    assert not measured([1.002], [1.0], plain=[1.002], tolerance=1e-4).correct


def test_integers_are_equal_or_wrong():
    one = torch.tensor([1, 2, 3])
    assert accuracy.measure(one, one.to(torch.float64), torch.int32, 0.5).correct
    found = accuracy.measure(one + 1, one.to(torch.float64), torch.int32, 5.0)
    assert found.wrong == 3 and found.largest == 1


def test_nothing_at_all():
    empty = torch.zeros(0, 4, dtype=torch.float64)
    assert accuracy.measure(empty, empty, torch.float32, 0.1).correct


def test_the_coarsest_type_sets_the_tolerance():
    assert accuracy.default_tolerance([torch.float32, torch.bfloat16]) == 2**-5
    assert accuracy.default_tolerance([torch.int32]) == 0.0
