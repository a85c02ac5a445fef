"""Kernels that are right, wrong or illegal, and what is said about them."""

import warnings

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import NkiWarning
from neuron_cpu.core.device.target import ENVIRONMENT_VARIABLE
from neuron_cpu.errors import UsageError
from neuron_cpu.judge import assert_kernel, cases, verdict
from neuron_cpu.judge.references import Reference
from neuron_cpu.judge.verdict import Settings, judge

CASE = "128x96:bf16"


@nki.jit
def softmax(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm, dtype=nl.float32)
    powers_sb = nl.exp(rows_sb - nl.max(rows_sb, axis=1, keepdims=True))
    nl.store(out_hbm, powers_sb / nl.sum(powers_sb, axis=1, keepdims=True))
    return out_hbm


@nki.jit
def overflowing(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    powers_sb = nl.exp(nl.load(x_hbm, dtype=nl.float32))
    nl.store(out_hbm, powers_sb / nl.sum(powers_sb, axis=1, keepdims=True))
    return out_hbm


@nki.jit
def last_column_off(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm)
    nl.store(out_hbm, rows_sb)
    nl.store(out_hbm[:, 95:96], rows_sb[:, 95:96] * 2.0)
    return out_hbm


@nki.jit
def rounding(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, nl.float32, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm)
    near_sb = nl.add(rows_sb, 64.0, dtype=nl.bfloat16)
    nl.store(out_hbm, nl.subtract(near_sb, 64.0, dtype=nl.float32))
    return out_hbm


@nki.jit
def uses_an_index_behind_its_loop(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    for k in nl.affine_range(2):
        nl.store(out_hbm[64 * k : 64 * k + 64], nl.load(x_hbm[64 * k : 64 * k + 64]) * 2.0)
    assert k == 1
    return out_hbm


@nki.jit
def too_many_rows(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.load(x_hbm))
    return out_hbm


@nki.jit(kernel_return=False)
def scaled_in_place(x_hbm, out_hbm, factor=1.0):
    nl.store(out_hbm, nl.load(x_hbm) * factor)


@nki.jit
def index_of_largest(x_hbm):
    out_hbm = nl.ndarray((x_hbm.shape[0], 8), nl.uint32, buffer=nl.shared_hbm)
    rows_sb = nl.load(x_hbm)
    nl.store(out_hbm, nisa.nc_find_index8(data=rows_sb, vals=nisa.max8(src=rows_sb)))
    return out_hbm


def torch_softmax(x):
    return torch.softmax(x, -1)


def numpy_softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def judged(kernel, reference, text=CASE, **options):
    made = Reference(reference) if reference is not None else None
    return judge(kernel, made, cases.case(text), Settings(**options))


@pytest.mark.parametrize("reference", [torch_softmax, numpy_softmax])
def test_a_right_kernel(reference):
    found = judged(softmax, reference, seeds=(0, 1), nan="same")
    assert found.correct and found.legal and not found.places
    kinds = [(r.kind, r.seed) for r in found.results]
    assert kinds.count(("zeros", 0)) == 1 and ("nan", 1) in kinds and len(kinds) == 9
    assert all(0 < r.accuracy.largest < 0.01 for r in found.results if r.kind == "random")
    assert found.speed.estimated and found.speed.time_ns > 0
    low, high = found.speed.band_ns
    assert low < high and 0 < found.speed.roofline_percent < 100


def test_a_softmax_without_its_maximum_is_caught_by_large_values():
    found = judged(overflowing, torch_softmax)
    assert not found.correct and found.worst.kind == "large"
    assert "infinite or NaN" in found.places[1] and "powers_sb" not in found.refusal
    assert judged(overflowing, torch_softmax, kinds=("random", "zeros", "ties")).correct


@nki.jit
def summed_in_bfloat16(x_hbm):
    out_hbm = nl.ndarray((64, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    sums = nl.zeros((64, 1), nl.bfloat16)
    for i in nl.static_range(64):
        part = nl.sum(nl.load(x_hbm[:, nl.ds(i * 64, 64)]), axis=1, keepdims=True)
        sums[...] = nl.add(sums, part, dtype=nl.bfloat16)
    nl.store(out_hbm, sums)
    return out_hbm


def test_an_error_near_what_is_accepted_is_told():
    for kernel, near in ((summed_in_bfloat16, True), (softmax, False)):
        reference = torch_softmax if kernel is softmax else lambda x: x.float().sum(1, keepdim=True)
        found = judged(kernel, reference, "64x4096:bf16", kinds=("random",))
        assert found.correct and near == any("that are accepted:" in one for one in found.places)


@nki.jit
def begun_at_zero(x_hbm):
    out_hbm = nl.ndarray((64, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    rows = nl.load(x_hbm)
    least = nl.minimum(nl.min(rows, axis=1, keepdims=True), nl.zeros((64, 1), nl.float32))
    nl.store(out_hbm, least)
    return out_hbm


@nki.jit
def with_another_eps(x_hbm):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    rows = nl.load(x_hbm)
    squares = nl.sum(nl.square(rows), axis=1, keepdims=True)
    nl.store(out_hbm, rows * nl.rsqrt(squares * (1 / 96) + 1e-5))
    return out_hbm


def test_what_random_values_do_not_show_is_caught_by_tiny_ones_and_those_of_one_sign():
    found = judged(begun_at_zero, lambda x: x.amin(1, keepdim=True), "64x96:f32")
    assert not found.correct and found.worst.kind == "positive"
    for eps, right in ((1e-6, False), (1e-5, True)):
        found = judged(
            with_another_eps,
            lambda x, eps=eps: x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps),
            "64x96:f32",
        )
        assert found.correct == right and (right or found.worst.kind == "tiny")


def test_the_first_wrong_element_and_the_line_that_stored_it():
    found = judged(last_column_off, lambda x: x)
    line = last_column_off.function.__code__.co_firstlineno + 5
    assert found.worst.accuracy.first == (0, 95)
    assert "(0, 95)" in found.places[0] and found.places[0].endswith(f"test_verdict.py:{line}")
    assert "columns 95 only" in found.places[1]
    assert "with `nl.store(out_hbm[:, 95:96], rows_sb[:, 95:96] * 2.0)` left out" in found.places[2]


def test_an_illegal_kernel_is_not_run():
    found = judged(too_many_rows, torch_softmax, "256x8:bf16")
    assert not found.legal and not found.correct and found.speed is None and not found.results
    assert "err_num_partition_exceed_arch_limit" in found.refusal


def test_results_that_cannot_be_compared():
    assert (
        "shape (128, 96), expected the reference's (128,)"
        in judged(softmax, lambda x: x.sum(-1)).mismatch
    )
    found = judged(softmax, lambda x: (x, x))
    assert "1 tensors, expected the reference's 2" in found.mismatch and not found.correct


def test_results_that_are_parameters_are_no_arguments_of_the_reference():
    case = "64x32:f32 64x32:f32 factor=3.0"
    assert judged(scaled_in_place, lambda x, factor: x * factor, case).correct
    assert not judged(scaled_in_place, lambda x, factor: x, case).correct


def test_integer_results_have_to_be_equal():
    # Equal elements have several right answers, so `ties` and `zeros` are left out.
    case, kinds = "128x64:f32", ("random",)
    right = lambda x: torch.topk(x, 8, -1).indices  # noqa: E731
    assert judged(index_of_largest, right, case, kinds=kinds).correct
    assert not judged(index_of_largest, lambda x: right(x) + 1, case, kinds=kinds).correct


def test_a_reference_that_fails_is_the_users_mistake():
    with pytest.raises(UsageError, match="reference <lambda> fails"):
        judged(softmax, lambda x, y: x)


def test_assert_kernel():
    assert_kernel(softmax, torch_softmax, CASE, "64x64:f32")
    with pytest.raises(AssertionError, match="large values, seed 0: .* elements are wrong") as told:
        assert_kernel(overflowing, torch_softmax, CASE)
    assert "first instruction whose result is infinite" in str(told.value)
    with pytest.raises(UsageError, match="no case"):
        assert_kernel(softmax, torch_softmax)


def test_assert_kernel_follows_the_three_outcomes(monkeypatch):
    """Refused fails, unproven passes and says so, legal is silent: one kernel, two chips."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "trn1")
    with pytest.raises(AssertionError, match="a device's compiler refuses it: "):
        assert_kernel(uses_an_index_behind_its_loop, lambda x: x * 2.0, CASE)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "trn2")
    with pytest.warns(NkiWarning, match="unproven: .*sim_loop_index_used_after"):
        assert_kernel(uses_an_index_behind_its_loop, lambda x: x * 2.0, CASE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_kernel(softmax, torch_softmax, CASE)


@nki.jit
def cancelling(x_hbm, far=4096.0):
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    nl.store(out_hbm, nl.subtract(nl.add(nl.load(x_hbm), far), 4096.0))
    return out_hbm


def test_a_numpy_reference_excuses_what_cancels_in_fp32():
    reference = Reference(lambda x, far=0.0: (x + 4096) - 4096, "numpy")
    settings = Settings(kinds=("random",), mends=False)
    for case, right in (("64x32:f32", True), ("64x32:f32 4096.01", False)):
        assert judge(cancelling, reference, cases.case(case), settings).correct is right


def test_ties_of_rounding_are_excused_and_other_whole_numbers_are_not():
    """A quotient that last bits move over a half; and one in which nothing is near one."""
    x = torch.full((1, 2000), 0.25)
    x[0, 0] = 0.5 - 2.0**-24
    for reference, taken in ((lambda x: (x + 2.0**-24).round(), True), (torch.round, False)):
        answer = Reference(lambda x, f=reference: f(x).to(torch.int8), "torch", None)
        right = torch.zeros(1, 2000, dtype=torch.float64)
        got = right.clone()
        got[0, 0 if taken else 1] = 1.0
        found = verdict._in_last_bits(answer, ([x], {}), 0, got, right)
        assert torch.equal(found, got) == taken
