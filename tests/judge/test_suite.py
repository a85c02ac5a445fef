"""The suite's own kernels are legal and right; its pages are what an answer starts from."""

from __future__ import annotations

import warnings

import pytest

from neuron_cpu import suite
from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.judge import cases, verdict
from neuron_cpu.judge.references import Reference
from neuron_cpu.judge.verdict import Settings, judge
from neuron_cpu.lessons import pages


@pytest.mark.parametrize("name", suite.names())
def test_a_naive_kernel_is_right_at_an_odd_size(name):
    operator = suite.operator(name)
    odd, timed = operator.cases[0], operator.cases[-1]
    assert odd != timed and isinstance(odd, cases.Case)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NkiWarning)
        found = judge(operator.kernel, Reference(operator.reference), odd, Settings(seeds=(0, 1)))
    assert found.correct, (found.refusal, found.mismatch, found.places)
    assert not found.warnings


@pytest.mark.full
@pytest.mark.parametrize("name", suite.names())
def test_a_naive_kernel_is_right_at_the_timed_size(name):
    operator = suite.operator(name)
    found = judge(operator.kernel, Reference(operator.reference), operator.cases[-1], Settings())
    assert found.correct and 0 < found.speed.roofline_percent < 75


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "attention"])
def test_a_softmax_without_its_maximum_does_not_pass(name):
    """The adversarial values of the suite notice it."""
    operator = suite.operator(name)
    wrong = suite.template(name).replace("nl.max(", "nl.min(")
    module: dict = {}
    exec(compile(wrong, name, "exec"), module)
    found = judge(module["kernel"], Reference(operator.reference), operator.cases[0], Settings())
    assert found.legal and not found.correct


def test_a_tile_without_elements_is_refused():
    """It ended in a division by zero, in one of the suite's mutants."""
    text = suite.template("embedding").replace("min(64, width - column)", "min(64, column)")
    module = pages.module("an empty tile", text, "empty_tile.py")
    with pytest.raises(NkiError, match="has no elements"):
        verdict.traced(module.kernel, suite.operator("embedding").cases[0], ())
