"""models/today.py beside llama.py: equal results, and estimates that agree on the same chip.

Weights in the kernels' layout come from llama.py's host side; nothing else is shared.
"""

import warnings

import pytest
import torch

import models.today
from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time.cost import DEFAULT_PROFILE
from neuron_cpu.core.time.schedule import COMPILER_ORDER, schedule
from tests.crossed import full
from tests.llama.every import ALONE, llama

BF16 = torch.bfloat16
HIDDEN = 256


def values(seed, *shape, dtype=BF16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def weight(seed, out_features, features):
    return llama.kernel_layout(values(seed, out_features, features, scale=0.05))


def tables(tokens, d, dtype=BF16):
    """cos and sin [128, T]: once more for each half, the sine negated."""
    steps = torch.rand(d // 2, generator=torch.Generator().manual_seed(9))[:, None]
    angles = steps * torch.arange(tokens)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    copies = 128 // d
    return torch.cat([cos, cos] * copies), torch.cat([sin, -sin] * copies)


def norms(features=250):
    """The same norm for each module."""
    return [module.Norm(features, 1e-5) for module in (llama, models.today)]


def attention(q, kv, d, tokens, hidden=HIDDEN, delta=True, dtype=BF16):
    """Arguments of an attention kernel of both modules up to the tables, and their heads."""
    heads = [module.HeadShape(q, kv, d) for module in (llama, models.today)]
    columns = (heads[0].q_tiles + heads[0].stacks) * 128 + kv * d
    weights = weight(2, columns, hidden), weight(3, hidden, heads[0].q_tiles * 128)
    common = [t.to(dtype) for t in (*weights, *tables(tokens, d))]
    x = values(1, hidden, tokens, dtype=dtype)
    added = values(4, hidden, tokens, dtype=dtype) if delta else None
    return [((x, added, norm, *common), h) for norm, h in zip(norms(hidden - 6), heads)]


def prefill(q, kv, d, length, batch=1, **more):
    sides = attention(q, kv, d, batch * length, **more)
    return "attention_prefill_kernel", *[(*a, heads, batch) for a, heads in sides]


def decode(q, kv, d, past, batch=1, live=None, dtype=BF16, **more):
    caches = [values(seed, batch, kv, past, d, dtype=dtype) for seed in (5, 6)]
    bias = torch.zeros(batch, past, dtype=dtype)
    bias[:, live or past :] = llama.MASKED
    sides = attention(q, kv, d, batch, dtype=dtype, **more)
    return "attention_decode_kernel", *[(*a, *caches, bias, heads) for a, heads in sides]


def mlp(tokens, delta=True, norm=True, length=None, hidden=HIDDEN, inner=640):
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    weights = [weight(seed, *shape) for seed, shape in enumerate(shapes, 2)]
    x = values(1, hidden, tokens), values(5, hidden, tokens) if delta else None
    old, new = norms() if norm else (None, None)
    return "swiglu_mlp_kernel", (*x, old, *weights, None, length), (*x, new, *weights, length)


def linear(tokens, norm=True, hidden=HIDDEN, features=1024):
    x, w = values(7, hidden, tokens), weight(8, features, hidden)
    old, new = norms() if norm else (None, None)
    return "linear_kernel", (x, w, old), (x, w, new)


def programs(case):
    name, *sides = case
    old, new = sides
    kernel = getattr(ALONE if "prefill" in name else llama, name)
    return [kernel.trace(*old), getattr(models.today, name).trace(*new)]


CASES = {
    "MLP of one token": lambda: mlp(1),
    "MLP without a sum": lambda: mlp(7, delta=False),
    "MLP of half a block": lambda: mlp(100),
    "MLP of pieces stored together": lambda: mlp(9, hidden=1024),
    "MLP of pieces with the last alone": lambda: mlp(100, hidden=1024),
    "MLP without a norm": lambda: mlp(128, norm=False),
    "MLP of two blocks": lambda: mlp(300),
    "MLP of three sequences": lambda: mlp(600, length=200),
    "head of one token": lambda: linear(1),
    "head without a norm": lambda: linear(5, norm=False),
    "head of many tokens": lambda: linear(300),
    "prompt of 64 heads": lambda: prefill(9, 3, 64, 130),
    "tiles of uneven queries": lambda: prefill(9, 3, 64, 192),
    "prompts of 5": lambda: prefill(4, 1, 64, 5, batch=3),
    "prompts of two blocks": lambda: prefill(4, 2, 64, 140, batch=2, delta=False),
    "prompt of 128 heads": lambda: prefill(2, 2, 128, 300),
    "group of 128 heads": lambda: prefill(2, 1, 128, 200),
    "prompt of three blocks": lambda: prefill(3, 1, 64, 640),
    "decode of 64 heads": lambda: decode(9, 3, 64, 237, batch=3, live=101),
    "decode over one key": lambda: decode(4, 2, 64, 1, batch=8, delta=False),
    "decode of 128 heads": lambda: decode(2, 2, 128, 128, batch=2, live=77),
    "decode of many sequences": lambda: decode(16, 2, 64, 1100, batch=8, live=600),
    "prompt in fp16": lambda: prefill(4, 2, 64, 70, dtype=torch.float16),
    "decode in fp32": lambda: decode(2, 1, 64, 60, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_equal(name):
    case = CASES[name]()
    # one by one: merged loops may add up in another order
    old, new = (
        Plan(program, merge_loops=False).run([a for a in args if isinstance(a, torch.Tensor)])
        for program, args in zip(programs(case), case[1:])
    )
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert all(torch.isfinite(a).all() and a.any() for a in new)


def alike(program):
    """µs under one profile, rearranged by one compiler: languages differ in both by default."""
    return schedule(program, DEFAULT_PROFILE, COMPILER_ORDER).total


@pytest.mark.parametrize("name", CASES)
def test_it_warns_of_nothing_up_to_2_32(name, target, monkeypatch):
    """A trn1 of SDK 2.32, the last with a parser, lost first products of tiles of several sums."""
    target("trn1")
    monkeypatch.setenv("NEURON_CPU_NKI", "2.32")
    kernel, _, args = CASES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(models.today, kernel).trace(*args)


@pytest.mark.parametrize(
    "name",
    [
        full("prompts of two blocks"),
        "prompt of 128 heads",
        full("decode of 64 heads"),
        "MLP of half a block",
        "head of many tokens",
    ],
)
def test_later_chips_agree(name, target):
    """Their transposes write bf16, which loses nothing of bf16. Small work is no faster on trn2,
    whose instructions have more cycles each; trn3 has trn2's and higher clocks."""
    kernel, _, args = CASES[name]()
    times, results = [], []
    for chip in ("trn1", "trn2", "trn3"):
        target(chip)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(getattr(models.today, kernel)(*args))
        times.append(alike(getattr(models.today, kernel).trace(*args)))
    assert times[1] >= times[2]
    first, *others = (r if isinstance(r, tuple) else (r,) for r in results)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


REFUSED = {
    "heads of 64 or 128": lambda: models.today.HeadShape(4, 2, 80),
    "whole groups": lambda: models.today.HeadShape(5, 2, 64),
    "weight of QKV is": lambda: attend(3, values(2, 128, 640)),
    "weight of the output is": lambda: attend(4, values(2, 128, 128)),
    "a table is": lambda: attend(5, values(2, 128, 3)),
    "no 2 sequences": lambda: attend(8, 2),
    "weight of down is": lambda: models.today.swiglu_mlp_kernel(
        *mlp(3)[2][:5], values(2, 128, 256)
    ),
    "whole tiles": lambda: models.today.linear_kernel(values(1, 100, 3), values(2, 128, 128)),
}


def attend(number, value):
    """attention_prefill_kernel with another value of one argument."""
    arguments = list(prefill(2, 1, 64, 5)[2])
    arguments[number] = value
    return models.today.attention_prefill_kernel(*arguments)


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(AssertionError, match=message):
        REFUSED[message]()
