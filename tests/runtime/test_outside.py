"""The work of PyTorch's operators: rules that hold between them."""

import pytest
import torch

from neuron_cpu.runtime.outside import Work, work
from neuron_cpu.runtime.recording import KERNEL, TORCH, Event, TensorShape


def of(name, *inputs, kind=TORCH):
    shapes = tuple(TensorShape(shape, torch.bfloat16) for shape in inputs)
    return work(Event("", kind, name, shapes, ()))


RULES = {
    "a vector is a column": lambda: (of("mv", (256, 128), (128,)), of("mm", (256, 128), (128, 1))),
    "three products": lambda: (
        of("bmm", (3, 64, 128), (3, 128, 640)).tensor,
        3 * of("mm", (64, 128), (128, 640)).tensor,
    ),
    "five tiles": lambda: (
        of("mm", (64, 128), (128, 640)).tensor,
        5 * of("mm", (64, 128), (128, 128)).tensor,
    ),
    "three passes": lambda: (of("_softmax", (512, 512)).vector, 3 * of("exp", (512, 512)).vector),
    "the compiler folds a number": lambda: (of("mul", (), ()), Work()),
    "a kernel has nothing to turn": lambda: (of("any", (512, 512), kind=KERNEL), Work()),
}


@pytest.mark.parametrize("rule", RULES)
def test_work_follows_from_shapes(rule):
    found, expected = RULES[rule]()
    assert found == expected
