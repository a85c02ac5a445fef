"""Figures of three equally shaped tensors: with kernels, without, and in fp32."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from harness.figures.repeater import Twin, error_of

TRUTH = torch.tensor([3.0, -4.0])


def test_error_figures() -> None:
    error = error_of("prefill", "m", TRUTH * 1.1, TRUTH * 1.01, TRUTH)
    assert error.nki == pytest.approx(0.1, rel=1e-5) and error.ratio == pytest.approx(10, rel=1e-4)
    assert error.ulps == pytest.approx(0.1 * 12.5**0.5 / 2**-6, rel=1e-5)
    assert error.suspicious
    assert not error_of("prefill", "m", TRUTH, TRUTH, TRUTH).suspicious
    exact = error_of("prefill", "m", TRUTH * 1.1, TRUTH, TRUTH)
    assert exact.ratio == math.inf and exact.suspicious


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_suspected_with_its_element(value: float) -> None:
    wrong = TRUTH.clone()
    wrong[1] = value
    error = error_of("prefill", "m", wrong, TRUTH, TRUTH)
    assert error.broken == [1] and error.suspicious and error.ratio == math.inf


def test_what_is_not_finite_in_fp32_is_no_fault_of_a_kernel() -> None:
    infinite = torch.tensor([3.0, -math.inf])
    error = error_of("decode", "lm_head", infinite, infinite, infinite)
    assert error.broken is None and not error.suspicious and error.undefined
    assert not error_of("prefill", "m", TRUTH, TRUTH, TRUTH).undefined


def test_a_layout_of_the_submission_s_own_gives_its_rows() -> None:
    class Columns(NamedTuple):
        columns: torch.Tensor

        def rows(self) -> torch.Tensor:
            return self.columns.t()[None]

    twin = Twin(torch.nn.Identity(), {}, torch.float32)
    columns = Columns(torch.ones(4, 3, dtype=torch.bfloat16))
    own = twin._own((columns, [columns.columns]))
    assert own[0].shape == (1, 3, 4) and own[0].dtype is torch.float32
    assert own[1][0].dtype is torch.float32

    class Norm(NamedTuple):
        gain: torch.Tensor
        eps: float

    norm = twin._own(Norm(torch.ones(2, dtype=torch.bfloat16), 1e-5))
    assert isinstance(norm, Norm) and norm.gain.dtype is torch.float32 and norm.eps == 1e-5


def test_a_reference_gets_fp32_in_its_own_type() -> None:
    """A submission's cos and sin in fp32 would make a reference in bf16 multiply unlike types."""
    twin = Twin(torch.nn.Identity(), {}, torch.bfloat16)
    own = twin._own((torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2).half()))
    assert [tensor.dtype for tensor in own] == [torch.bfloat16, torch.int32, torch.float16]
