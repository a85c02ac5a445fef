"""Values that answers meet which are right for most values only."""

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
    "a variance that cancels": (
        "layer_norm",
        "nl.mean(nl.multiply(centred_sb, centred_sb), axis=1, keepdims=True)",
        "nl.subtract(nl.mean(nl.multiply(x_sb, x_sb), axis=1, keepdims=True), "
        "nl.square(nl.mean(x_sb, axis=1, keepdims=True)))",
        "offset",
    ),
    "a sum of exponentials that clamps": (
        "log_sum_exp", "nl.max(x_sb, axis=1, keepdims=True)",
        "nl.maximum(nl.minimum(nl.max(x_sb, axis=1, keepdims=True), 0.0), 0.0)", "offset",
    ),
    "a mask that is added to what it hides": (
        "causal_softmax", "nisa.affine_select(row + i_row >= i_column, scores_sb, HIDDEN)",
        "nl.add(scores_sb, nisa.affine_select(row + i_row >= i_column, "
        "nl.zeros((count, size), dtype=nl.float32), HIDDEN))", "hidden",
    ),
    "a weight of zero for what the cache does not hold": (
        "decode_attention", "nl.store(out_hbm, nl.copy(mixed_psum))",
        "rest_sb = nl.multiply(nl.load(v_hbm[length : length + 1, :], dtype=nl.float32), 0.0)\n"
        "    rests_sb = nl.broadcast_to(rest_sb, shape=(heads, size))\n"
        "    nl.store(out_hbm, nl.add(nl.copy(mixed_psum), rests_sb))", "hidden",
    ),
    "a sum that is right at the sizes that are listed": (
        "row_sum", "nl.sum(x_sb,",
        "nl.sum(x_sb[:, 0 : max(1, x_sb.shape[1] - (width not in (333, 4096)))],", "random",
    ),
    "a product that is right at the depths that are listed": (
        "matmul", "nl.static_range(0, depth, 128)",
        "nl.static_range(0, depth if depth in (192, 512) else min(depth, 128), 128)", "random",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_elsewhere_is_wrong(name, tmp_path):
    which, right, wrong, kind = WRONG[name]
    operator = suite.operator(which)
    text = suite.template(which)
    assert text.count(right) == 1
    path = tmp_path / f"{which}.py"
    path.write_text(text.replace(right, wrong))
    kernel = foreign.imported(path, f"{which} of a wrong answer").kernel
    tried = (operator.cases[0], *suite.drawn(which, 0))
    for made, values in ((operator.kernel, operator.values), (kernel, (kind,))):
        settings = verdict.Settings(kinds=values, mends=False)
        reference = Reference(operator.reference)
        found = [verdict.judge(made, reference, case, settings) for case in tried]
        assert all(one.legal for one in found), found
        assert all(one.correct for one in found) is (made is operator.kernel), found


@pytest.mark.parametrize("kind", cases.HARD)
def test_hard_values_are_as_they_say(kind):
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
