"""llama_nki.py beside llama.py: equal results, and estimates that agree on the same chip."""

from __future__ import annotations

import pytest
import torch

import llama
import llama_nki
from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.schedule import schedule


def values(seed, *shape, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def weight(seed, out_features, features):
    return llama.kernel_layout(values(seed, out_features, features, scale=0.05))


NORM = llama.Norm(250, 1e-5)
MLP = [
    (
        values(1, 256, tokens),
        delta,
        norm,
        weight(2, 640, 256),
        weight(3, 640, 256),
        weight(4, 256, 640),
    )
    for tokens, delta, norm in (
        (1, values(5, 256, 1), NORM),
        (7, None, NORM),
        (100, values(6, 256, 100), NORM),
        (128, None, None),
    )
]
LINEAR = [
    (values(7, 256, tokens), weight(8, 1024, 256), norm)
    for tokens, norm in ((1, NORM), (5, None), (120, NORM))
]
CASES = [("swiglu_mlp_kernel", args) for args in MLP] + [("linear_kernel", args) for args in LINEAR]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_and_times_agree(case):
    name, args = CASES[case]
    old, new = (getattr(module, name) for module in (llama, llama_nki))
    programs = [kernel.trace(*args) for kernel in (old, new)]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    # one by one: merged loops may add up in another order
    results = [Plan(p, merge_loops=False).run(tensors) for p in programs]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    times = [schedule(p).total for p in programs]
    assert abs(times[1] / times[0] - 1) < 0.03


def test_more_tokens_are_refused():
    with pytest.raises(AssertionError, match="at most 128"):
        llama_nki.linear_kernel(values(1, 256, 129), weight(2, 128, 256))


def test_later_chips_are_faster(target):
    args = MLP[0]
    times = []
    for name in ("trn1", "trn2", "trn3"):
        target(name)
        times.append(schedule(llama_nki.swiglu_mlp_kernel.trace(*args)).total)
    assert times == sorted(times, reverse=True)
