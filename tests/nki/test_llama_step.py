"""models/step.py: a decode step in one kernel, against a plain Llama in float64 and in bf16.

Weights come as a checkpoint has them; llama.py's host side puts them in the kernels' layout.
"""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import pytest
import torch

import llama
import models.step
import models.today
from neuron_cpu.core import on_ranks
from tests.crossed import full

BF16 = torch.bfloat16
EPS = 1e-5


class Case(NamedTuple):
    """Sizes of a whole model, and what a step gets."""

    ranks: int = 1
    layers: int = 2
    hidden: int = 256
    q: int = 4
    kv: int = 2
    d: int = 64
    inner: int = 384
    vocabulary: int = 512
    batch: int = 1
    each: int = 1
    keys: int = 64  # that the step reads
    room: int = 64  # of the cache
    live: int = 40  # of the first sequence; each further one has one less
    dtype: torch.dtype = BF16
    scale: float = 1.0
    cores: int = 1

    @property
    def sizes(self):
        shares = self.q // self.ranks, self.kv // self.ranks
        return llama.Sizes(self.ranks, llama.HeadShape(*shares, self.d))


def drawn(seed, *shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def checkpoint(case):
    """A layer's tensors by Hugging Face's names, in the case's type."""
    h, d, state = case.hidden, case.d, {}
    shapes = {
        "self_attn.q_proj": (case.q * d, h),
        "self_attn.k_proj": (case.kv * d, h),
        "self_attn.v_proj": (case.kv * d, h),
        "self_attn.o_proj": (h, case.q * d),
        "mlp.gate_proj": (case.inner, h),
        "mlp.up_proj": (case.inner, h),
        "mlp.down_proj": (h, case.inner),
    }
    for n in range(case.layers):
        for k, (name, shape) in enumerate(shapes.items()):
            scale = case.scale / math.sqrt(shape[1])
            state[f"layers.{n}.{name}.weight"] = drawn(100 * n + k, *shape, scale=scale)
        for k, norm in enumerate(("input_layernorm", "post_attention_layernorm")):
            state[f"layers.{n}.{norm}.weight"] = 1 + drawn(50 + 100 * n + k, h, scale=0.1)
    state["norm.weight"] = 1 + drawn(7, h, scale=0.1)
    state["lm_head.weight"] = drawn(8, case.vocabulary, h, scale=1 / math.sqrt(h))
    return {name: tensor.to(case.dtype) for name, tensor in state.items()}


def inputs(case):
    """x [B, S, H], caches of each layer [B, kv, room, D], and how many keys count."""
    x = drawn(1, case.batch, case.each, case.hidden).to(case.dtype)
    shape = case.batch, case.kv, case.room, case.d
    caches = [
        [drawn(60 + 2 * n + k, *shape).to(case.dtype) for k in (0, 1)] for n in range(case.layers)
    ]
    return x, caches, [case.live - b for b in range(case.batch)]


def frequencies(d):
    return 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)


def positions(case, live):
    return torch.tensor([[n + s for s in range(case.each)] for n in live])


def reference(case, state, dtype):
    """Logits [B, S, V], and the caches with the new rows; ``dtype`` between operators."""
    x, caches, live = inputs(case)
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, group = x.to(dtype), case.q // case.kv
    angles = positions(case, live)[:, None, :, None] * frequencies(case.d)
    cos, sin = (f(angles.to(wide)).to(case.dtype).to(dtype) for f in (torch.cos, torch.sin))

    def norm(x, gain):
        y = x.to(wide)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS) * gain.to(wide)).to(dtype)

    def heads(x):
        return x.unflatten(-1, (-1, case.d)).transpose(1, 2)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for n in range(case.layers):
        w = {k.split(".", 2)[2]: v for k, v in state.items() if k.startswith(f"layers.{n}.")}
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (heads(y @ w[f"self_attn.{p}_proj.weight"].T) for p in "qkv")
        q, k, rows = rotate(q), rotate(k), []
        for b, count in enumerate(live):
            for new, cache in zip((k, v), caches[n]):
                cache[b, :, count : count + case.each] = new[b].to(case.dtype)
            kept = [c[b, :, : count + case.each].to(dtype) for c in caches[n]]
            kept[0][:, count:], kept[1][:, count:] = k[b], v[b]
            keys, values = (t.repeat_interleave(group, 0) for t in kept)
            scores = (q[b] @ keys.transpose(1, 2) / math.sqrt(case.d)).to(wide)
            seen = torch.arange(scores.shape[-1]) <= count + torch.arange(case.each)[:, None]
            weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).to(dtype)
            rows.append((weights @ values).transpose(0, 1).flatten(1))
        x = x + torch.stack(rows) @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        up = y @ w["mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(x, state["norm.weight"]) @ state["lm_head.weight"].T, caches


def arguments(case, state):
    """Those of each rank."""
    sizes, layers, state = case.sizes, range(case.layers), dict(state)
    for n in layers:
        at = f"layers.{n}."
        gain = state.pop(f"{at}input_layernorm.weight")
        llama.attention_for_kernels(state, f"{at}self_attn.", gain, sizes)
        gain = state.pop(f"{at}post_attention_layernorm.weight")
        llama.mlp_for_kernels(state, f"{at}mlp.", gain, case.ranks)
    llama.head_for_kernels(state, "lm_head", state.pop("norm.weight"), case.ranks)
    x, caches, live = inputs(case)
    lanes = llama.in_lanes(torch.cat((frequencies(case.d), -frequencies(case.d))), case.d)
    angles = lanes[:, None] * positions(case, live).reshape(1, -1)
    kv, tokens = case.kv // case.ranks, case.batch * case.each
    heads = models.today.HeadShape(case.q // case.ranks, kv, case.d)
    bias = torch.zeros(case.batch, case.keys, dtype=case.dtype)
    for b, count in enumerate(live):
        bias[b, count:] = llama.masked(case.dtype)
    runs = models.today.cache_runs(case.keys, 128 // kv)
    bias = bias.unflatten(1, runs).transpose(1, 2).reshape(bias.shape)
    starts = torch.tensor([live], dtype=torch.int32)
    x = llama.pad_tiles(x.reshape(tokens, -1), 1).t().contiguous()
    names = "self_attn.qkv", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"
    found = []
    for rank in range(case.ranks):
        weights = []
        for name in names:
            of_layers = [state[f"layers.{n}.{name}_proj.weight"] for n in layers]
            weights.append(tuple(w.chunk(case.ranks)[rank].contiguous() for w in of_layers))
        head = state["lm_head.weight"].chunk(case.ranks)[rank].contiguous()
        keys, values = (
            tuple(c[k].chunk(case.ranks, 1)[rank].contiguous() for c in caches) for k in (0, 1)
        )
        groups = (tuple(range(case.ranks)),) if case.ranks > 1 else None
        # a rank's own features, where they are whole partitions
        own = x.chunk(case.ranks)[rank].contiguous() if case.hidden % 128 == 0 else x
        found.append(
            (
                own,
                models.today.Norm(case.hidden, EPS),
                *weights,
                head,
                angles.cos().to(case.dtype),
                angles.sin().to(case.dtype),
                keys,
                values,
                starts,
                bias,
                heads,
                case.batch,
                case.vocabulary // case.ranks,
                groups,
            )
        )
    return found


def flat(args):
    """Each tensor by itself, as `kernel_of` takes them."""
    given = []
    for name, value in zip(inspect.signature(models.step.decode_step_kernel).parameters, args):
        given += value if name in models.step.OF_LAYERS else [value]
    return given


def run(case, state):
    """Logits [B, S, V] and caches."""
    kernel = models.step.kernel_of(case.layers)[case.cores]
    results = on_ranks(kernel, [flat(args) for args in arguments(case, state)])
    caches = [
        [torch.cat([r[1 + 2 * n + k] for r in results], 1) for k in (0, 1)]
        for n in range(case.layers)
    ]
    for other in results[1:]:  # each rank has the logits of all
        assert torch.equal(other[0], results[0][0])
    return results[0][0].reshape(case.batch, case.each, -1), caches


CASES = {
    "one layer": Case(layers=1),
    "two ranks": Case(ranks=2, kv=2),
    "three sequences": Case(batch=3, q=9, kv=3, hidden=192, live=33),
    "heads of 128": Case(ranks=2, d=128, q=6, kv=2, keys=128, room=256, live=100),
    "four new tokens": Case(ranks=2, each=4),
    "new tokens of two sequences": Case(batch=2, each=3, q=3, kv=1, keys=128, room=128, live=77),
    "part of a cache": Case(keys=64, room=200, live=60),
    "an empty cache": Case(live=0),
    "odd tiles": Case(hidden=320, inner=200, vocabulary=300),
    "odd tiles of ranks": Case(ranks=2, hidden=320, inner=200, vocabulary=2500, each=2),
    "in fp32": Case(dtype=torch.float32, ranks=2),
}


def check(got, case, state):
    exact, caches = reference(case, state, torch.float64)
    logits, kept = got
    if case.dtype == torch.float32:
        bound = 2e-6 * exact.abs().max()
    else:
        rounded = reference(case, state, case.dtype)[0]
        bound = 1.5 * (rounded.double() - exact).abs().max()
    assert (logits.double() - exact).abs().max() <= bound
    for of_layer, wanted in zip(kept, caches):
        for cache, other in zip(of_layer, wanted):
            assert torch.allclose(
                cache.float(), other.float(), rtol=0, atol=0.02 * float(other.max())
            )


DEFAULT = (
    "three sequences", "heads of 128", "new tokens of two sequences", "odd tiles of ranks",
    "in fp32",
)  # fmt: skip


@pytest.mark.parametrize("name", [n if n in DEFAULT else full(n) for n in CASES])
def test_a_step_is_a_plain_llamas(name):
    case = CASES[name]
    state = checkpoint(case)
    check(run(case, state), case, state)


@pytest.mark.parametrize("cores", [2, full(1)])
@pytest.mark.parametrize("name", ["two ranks", "odd tiles"])
def test_later_chips_and_two_cores(name, cores, target):
    target("trn2")
    case = CASES[name]._replace(cores=cores)
    state = checkpoint(case)
    check(run(case, state), case, state)


def test_generated_kernels_have_names():
    assert models.step.decode_step_kernel_3 is models.step.kernel_of(3)
    with pytest.raises(AttributeError, match="decode_step_kernel_of"):
        models.step.decode_step_kernel_of  # noqa: B018


def test_large_scores_and_equal_keys():
    """Adversarial caches: a dominant key, and keys that are all the same."""
    case = Case(layers=1, scale=30.0)
    state = checkpoint(case)
    logits, _ = run(case, state)
    assert torch.isfinite(logits).all()
    check((logits, run(case, state)[1]), case, state)


def test_only_new_rows_of_a_cache_change():
    case = CASES["new tokens of two sequences"]
    state = checkpoint(case)
    before = inputs(case)[1]
    _, after = run(case, state)
    for n in range(case.layers):
        for old, new in zip(before[n], after[n]):
            changed = (old != new).any(-1).any(1)  # [B, room]
            for b, row in enumerate(changed):
                live = case.live - b
                assert row.nonzero().flatten().tolist() == list(range(live, live + case.each))


REFUSED = {
    "rows of scores": dict(case=Case(each=33)),
    "keys, the caches have": dict(keys=128),
    "no 2 sequences": dict(batch=2),
    "qkv is": dict(q=6),
    "take 197652 bytes of a partition": dict(case=Case(keys=16384, room=16384, layers=1, live=3)),
    "in runs of": dict(case=Case(keys=131, room=131, layers=1, live=3)),
    "132 new tokens do not fit": dict(case=Case(batch=6, each=22, layers=1)),
    "60 products, more than the 31": dict(case=Case(), most=31),
    "a head of 1 tiles of 128, expected one for each of 2": dict(
        case=Case(cores=2, vocabulary=100, layers=1)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message, target, monkeypatch):
    target("trn2")
    given = dict(REFUSED[message])
    monkeypatch.setattr(models.step, "MOST_INSTRUCTIONS", given.pop("most", 5_000_000))
    case = given.pop("case", Case())
    args = list(arguments(case, checkpoint(case))[0])
    if "keys" in given:
        args[13] = torch.zeros(1, 128, dtype=BF16)
    if "batch" in given:
        args[15] = 2
    if "q" in given:
        args[14] = models.today.HeadShape(6, 2, 64)
    with pytest.raises(AssertionError, match=message):
        models.step.kernel_of(len(args[10]))[case.cores](*flat(args))
