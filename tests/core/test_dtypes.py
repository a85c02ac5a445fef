"""Element types: mapping between libraries, promotion, rounding."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_cpu.core.device import dtypes

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("wrong", [np.float64, torch.int64, "int64", int, complex, object()])
def test_types_without_a_counterpart_are_refused(wrong):
    with pytest.raises(TypeError, match="is not an NKI type"):
        dtypes.to_dtype(wrong)


@pytest.mark.parametrize("a", dtypes.ALL, ids=str)
def test_promotion_is_symmetric_and_keeps_equal_types(a):
    assert dtypes.promote(a, a) is a
    for b in dtypes.ALL:
        joined = dtypes.promote(a, b)
        assert joined is dtypes.promote(b, a)
        if a.is_float or b.is_float:
            assert joined.is_float
        assert joined.itemsize >= min(a.itemsize, b.itemsize)


SCALARS = [
    (True, "uint8"),
    (3, "int32"),
    (0.5, "float32"),
    (np.float16(1), "float16"),
    (np.int8(1), "int8"),
]


@pytest.mark.parametrize("value, name", SCALARS)
def test_type_of_scalars(value, name):
    assert dtypes.scalar_dtype(value).name == name


@settings(deadline=None, derandomize=True)
@given(st.lists(floats, min_size=1, max_size=50))
def test_narrow_floats_round_once_to_nearest_even(values):
    wide = torch.tensor(values, dtype=torch.float32)
    for dt in dtypes.ALL:
        if not dt.is_float or dt is dtypes.TFLOAT32:
            continue
        with np.errstate(over="ignore"):
            reference = wide.numpy().astype(dt.numpy).astype(np.float32)
        got = dtypes.decode(dtypes.encode(wide, dt), dt).numpy()
        assert np.array_equal(got, reference, equal_nan=True), dt


def test_tf32_ties_go_to_even_and_special_values_stay():
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, float("inf"), float("-inf")]
    got = dtypes.round_tf32(torch.tensor(ties)).tolist()
    assert got == [1.0, 1 + 2.0**-9, float("inf"), float("-inf")]
    assert torch.isnan(dtypes.round_tf32(torch.tensor([float("nan")]))).all()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_floats_become_integers_by_rounding_and_saturating(values):
    wide = torch.tensor(values, dtype=torch.float32)
    for dt in dtypes.ALL:
        if not dt.is_int or dt is dtypes.BOOL:
            continue
        info = np.iinfo(dt.numpy)
        exact = np.nan_to_num(wide.numpy().astype(np.float64), posinf=1e300, neginf=-1e300)
        reference = np.clip(np.rint(exact), info.min, info.max).astype(np.int64)
        assert dtypes.encode(wide, dt).to(torch.int64).tolist() == reference.tolist(), dt


def test_fp8_has_infinities_and_240():
    got = dtypes.decode(
        dtypes.encode(torch.tensor([240.0, 300.0, -1e9, 0.0]), dtypes.FLOAT8_E4M3),
        dtypes.FLOAT8_E4M3,
    )
    assert got.tolist() == [240.0, float("inf"), float("-inf"), 0.0]
    assert float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).max) == 240


def test_bool_is_nonzero():
    assert dtypes.encode(torch.tensor([0.0, -0.0, 1e-30, -2.0]), dtypes.BOOL).tolist() == [
        False,
        False,
        True,
        True,
    ]
