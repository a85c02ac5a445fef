"""Figures of three equally shaped tensors: with kernels, without, and in fp32."""

import math

import pytest
import torch

from harness.figures.repeater import _first, error_of

TRUTH = torch.tensor([3.0, -4.0])


def test_error_figures():
    error = error_of("prefill", "m", TRUTH * 1.1, TRUTH * 1.01, TRUTH)
    assert error.nki == pytest.approx(0.1, rel=1e-5) and error.ratio == pytest.approx(10, rel=1e-4)
    assert error.ulps == pytest.approx(0.1 * 12.5**0.5 / 2**-6, rel=1e-5)
    assert error.suspicious
    assert not error_of("prefill", "m", TRUTH, TRUTH, TRUTH).suspicious
    exact = error_of("prefill", "m", TRUTH * 1.1, TRUTH, TRUTH)
    assert exact.ratio == math.inf and exact.suspicious


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_suspected_with_its_element(value):
    wrong = TRUTH.clone()
    wrong[1] = value
    error = error_of("prefill", "m", wrong, TRUTH, TRUTH)
    assert error.broken == [1] and error.suspicious and error.ratio == math.inf


def test_what_is_not_finite_in_fp32_is_no_fault_of_a_kernel():
    infinite = torch.tensor([3.0, -math.inf])
    error = error_of("decode", "lm_head", infinite, infinite, infinite)
    assert error.broken is None and not error.suspicious and error.undefined
    assert not error_of("prefill", "m", TRUTH, TRUTH, TRUTH).undefined


def test_attention_of_nxdi_06_gives_an_object_of_its_own():
    from neuronx_distributed_inference.modules.attention import attention_base

    output = attention_base.NeuronAttentionBaseOutput(TRUTH, (TRUTH, TRUTH))
    assert _first((output,)) is TRUTH
