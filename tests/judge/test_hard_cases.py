"""Values that answers meet which are right for most values only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuron_cpu import suite
from neuron_cpu.judge import cases, verdict
from neuron_cpu.judge.references import Reference
from neuron_cpu.sandbox import foreign

# Operator, what stands in its kernel, what a wrong answer has there, and values that find it out.
WRONG = {
    "an RMSNorm without its epsilon": (
        "rms_norm", "nl.add(mean_sb, EPSILON)", "nl.maximum(mean_sb, 1e-30)", "tiny",
    ),
    "a LayerNorm without its epsilon": (
        "layer_norm", "nl.add(variance_sb, EPSILON)", "nl.maximum(variance_sb, 1e-30)", "tiny",
    ),
    "a variance that cancels": (
        "layer_norm",
        "nl.mean(nl.multiply(centred_sb, centred_sb), axis=1, keepdims=True)",
        "nl.subtract(nl.mean(nl.multiply(x_sb, x_sb), axis=1, keepdims=True), "
        "nl.square(nl.mean(x_sb, axis=1, keepdims=True)))",
        "offset",
    ),
    "a softmax that clamps": (
        "softmax", "nl.subtract(x_sb, nl.max(x_sb, axis=1, keepdims=True))",
        "nl.minimum(x_sb, 80.0)", "offset",
    ),
    "a sum of exponentials that clamps": (
        "log_sum_exp", "nl.max(x_sb, axis=1, keepdims=True)",
        "nl.maximum(nl.minimum(nl.max(x_sb, axis=1, keepdims=True), 0.0), 0.0)", "offset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_elsewhere_is_wrong(name: str, tmp_path: Path) -> None:
    which, right, wrong, kind = WRONG[name]
    operator = suite.operator(which)
    text = suite.template(which)
    assert text.count(right) == 1
    path = tmp_path / f"{which}.py"
    path.write_text(text.replace(right, wrong))
    kernel = foreign.imported(path, f"{which} of a wrong answer").kernel
    for values, correct in ((operator.values, True), ((kind,), False)):
        settings = verdict.Settings(kinds=values)
        made = operator.kernel if correct else kernel
        found = verdict.judge(made, Reference(operator.reference), operator.cases[0], settings)
        assert found.correct is correct, found


@pytest.mark.parametrize("kind", cases.HARD)
def test_hard_values_are_as_they_say(kind: str) -> None:
    spec = cases.Spec((64, 333), torch.float32)
    values = cases.fill(spec, kind, torch.Generator().manual_seed(3))
    if kind == "offset":
        means = values.mean(-1)
        assert means.min() < -100 and means.max() > 100 and 0.8 < values.std(-1).mean() < 1.2
    elif kind == "tiny":
        assert 0 < values.square().mean() < 1e-6 and values[0].abs().max() < 1e-5
    elif kind == "rows":
        assert values[::2].abs().max() == 0 and values[1::2].std() > 0.9
    elif kind == "denormal":
        assert 0 < values.abs().view(-1)[::2].max() < torch.finfo(torch.float32).tiny
    else:
        assert values.sum(-1).abs().max() < 5 and values.std() > 0.9
