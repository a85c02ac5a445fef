"""Each kernel of llama.py against float64, beside what PyTorch computes in bf16 on the same input.

A kernel may be wrong by 1.1 times the PyTorch bf16 error at most, in the largest and in the root
mean square sense. Only generated shapes, which may be a single number that PyTorch happens to round
the right way, are allowed one bf16 step of the largest result more.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llama
from neuron_cpu.core.device import dtypes
from neuron_cpu.core.language.kernel import Kernel

BF16 = torch.bfloat16
LARGEST = 3.3895314e38  # the largest finite bf16


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


def check(got: torch.Tensor, torch_bf16: torch.Tensor, exact: torch.Tensor, steps: int = 0) -> None:
    """Assert the error bound of this module, with ``steps`` bf16 steps of the largest result."""
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    step = steps * 2.0**-8 * exact.abs().max().item()
    ours, theirs = (value.double() - exact for value in (got, torch_bf16))
    assert ours.abs().max() <= 1.1 * theirs.abs().max() + step
    assert ours.pow(2).mean().sqrt() <= 1.1 * theirs.pow(2).mean().sqrt() + step / 16


# --- normalisation and products -------------------------------------------------------------------


def norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


@pytest.mark.parametrize("tokens", [1, 3, 77, 130, 257])
@pytest.mark.parametrize("hidden", [64, 200, 576])
def test_rmsnorm(tokens: int, hidden: int) -> None:
    x, gain = random(tokens, hidden), random(1, hidden, seed=1)
    got = llama.rmsnorm_kernel(x, gain, 1e-5)
    reference = norm(x.float(), gain.float(), 1e-5).to(BF16)
    check(got, reference, norm(x.double(), gain.double(), 1e-5))


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
def test_rmsnorm_of_extreme_rows(scale: float) -> None:
    x, gain = random(5, 96, scale=scale), random(1, 96, seed=1)
    got = llama.rmsnorm_kernel(x, gain, 1e-5)
    reference = norm(x.float(), gain.float(), 1e-5).to(BF16)
    check(got, reference, norm(x.double(), gain.double(), 1e-5))


@pytest.mark.parametrize(
    ("tokens", "k", "n"),
    [(1, 576, 960), (1, 64, 16), (3, 200, 515), (77, 130, 49), (130, 128, 512), (513, 96, 40)],
)
def test_linear(tokens: int, k: int, n: int) -> None:
    x, weight = random(tokens, k), random(n, k, scale=k**-0.5, seed=1)
    got = llama.linear_kernel(x, llama.block_weight(weight), n)
    check(got, x @ weight.t(), x.double() @ weight.double().t())


@pytest.mark.parametrize("tokens", [1, 130])
def test_linear_normalises_first(tokens: int) -> None:
    x, gain, weight = random(tokens, 200), random(1, 200, seed=2), random(70, 200, seed=1)
    got = llama.linear_kernel(x, llama.block_weight(weight), 70, gain, 1e-6)
    reference = norm(x.float(), gain.float(), 1e-6).to(BF16) @ weight.t()
    check(got, reference, norm(x.double(), gain.double(), 1e-6) @ weight.double().t())


def test_linear_of_the_largest_finite_bf16() -> None:
    x = torch.zeros(2, 128, dtype=BF16)
    x[0, 3], x[1, 127] = LARGEST, -LARGEST
    got = llama.linear_kernel(x, llama.block_weight(torch.eye(128, dtype=BF16)), 128)
    assert torch.equal(got, x)


def test_rmsnorm_of_the_largest_finite_bf16() -> None:
    """Squares overflow fp32 here and in PyTorch alike: the row becomes zeros, never NaN."""
    x, gain = random(3, 96), random(1, 96, seed=1)
    x[1, 5] = LARGEST
    got = llama.rmsnorm_kernel(x, gain, 1e-5)
    reference = norm(x.float(), gain.float(), 1e-5).to(BF16)
    check(got, reference, norm(x.double(), gain.double(), 1e-5))


def swiglu(x, gate, up, down):
    inner = x @ gate.t()
    return (inner * torch.sigmoid(inner) * (x @ up.t())) @ down.t()


@pytest.mark.parametrize(("tokens", "hidden", "f"), [(1, 576, 1536), (77, 96, 200), (600, 64, 130)])
def test_swiglu_mlp(tokens: int, hidden: int, f: int) -> None:
    x = random(tokens, hidden)
    gate, up = random(f, hidden, scale=0.1, seed=1), random(f, hidden, scale=0.1, seed=2)
    down = random(hidden, f, scale=0.1, seed=3)
    weights = [llama.block_weight(w) for w in (gate, up, down)]
    got = llama.swiglu_mlp_kernel(x, *weights, f)
    inner = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    check(got, inner @ down.t(), swiglu(*(t.double() for t in (x, gate, up, down))))


def test_swiglu_of_the_largest_finite_bf16() -> None:
    """SiLU keeps it, and gives zero for its negative."""
    x, gate = torch.zeros(2, 128, dtype=BF16), torch.zeros(128, 128, dtype=BF16)
    x[0, 3], x[1, 3], x[:, 7] = LARGEST, -LARGEST, 0.5
    gate[9, 3] = 1.0
    up = torch.zeros_like(gate)
    up[9, 7] = 1.0
    weights = [llama.block_weight(w) for w in (gate, up, torch.eye(128, dtype=BF16))]
    got = llama.swiglu_mlp_kernel(x, *weights, 128)
    wanted = torch.zeros_like(x)
    wanted[0, 9] = LARGEST / 2
    assert torch.equal(got, wanted)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 140), st.integers(1, 300), st.integers(1, 600), st.integers(0, 5))
def test_linear_of_any_shape(tokens: int, k: int, n: int, seed: int) -> None:
    x, weight = random(tokens, k, seed=seed), random(n, k, seed=seed + 1)
    got = llama.linear_kernel(x, llama.block_weight(weight), n)
    check(got, x @ weight.t(), x.double() @ weight.double().t(), steps=1)


# --- rotary embedding -----------------------------------------------------------------------------


def frequencies(d: int, theta: float = 500000.0) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float32)


def tables(positions: torch.Tensor, d: int, dtype: object = llama.nl.bfloat16):
    rows = frequencies(d).expand(128, -1).contiguous()
    return llama.rope_tables_kernel(positions.float().reshape(-1, 1), rows, dtype)


@pytest.mark.parametrize("cast", ["to nearest", "towards zero"])
def test_angles_are_exact_up_to_position_131072(cast: str, monkeypatch) -> None:
    """Whichever way the device casts fp32 to int32, which is not documented for every release."""
    if cast == "towards zero":
        monkeypatch.setattr(dtypes, "_encode_int", lambda values, dt: values.trunc().to(dt.torch))
    positions = torch.cat((torch.arange(0, 131072, 1117), torch.tensor([131071])))
    cos, sin = tables(positions, 64, llama.nl.float32)
    angles = (positions.float()[:, None] * frequencies(64)).double()  # fp32 products, as in HF
    bound = 2e-6 if cast == "to nearest" else 3e-6  # one more turn, one more rounding
    assert (cos - angles.cos()).abs().max() < bound
    assert (sin - angles.sin()).abs().max() < bound


@pytest.mark.parametrize(("tokens", "heads", "d"), [(1, 3, 64), (130, 2, 128), (5, 1, 16)])
def test_rope_equals_the_reference_to_the_bit(tokens: int, heads: int, d: int) -> None:
    x = random(tokens, heads * d)
    cos, sin = tables(torch.arange(tokens), d)
    got = llama.rope_kernel(x, cos, sin)
    split = x.reshape(1, tokens, heads, d).transpose(1, 2)
    wanted = llama.rotate(split, cos[None], sin[None])
    assert torch.equal(got, wanted.transpose(1, 2).reshape(tokens, -1))


# --- attention ------------------------------------------------------------------------------------


def heads_of(rows: torch.Tensor, batch: int, d: int) -> torch.Tensor:
    return rows.reshape(batch, -1, rows.shape[-1] // d, d).transpose(1, 2)


def attend(q, k, v, mask, dtype, cached=0):
    """Grouped attention computed in ``dtype``; softmax in at least fp32.

    The sums over the first ``cached`` keys and over the others are rounded one by one, as in the
    decode step of the model.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        t.to(dtype) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    weights = torch.softmax(scores.to(wide).masked_fill(~mask, -math.inf), -1).to(dtype)
    out = weights[..., cached:] @ v[:, :, cached:]
    if cached:
        out = weights[..., :cached] @ v[:, :, :cached] + out
    return out.transpose(1, 2).reshape(out.shape[0] * out.shape[2], -1)


def split_qkv(qkv: torch.Tensor, batch: int, q: int, kv: int, d: int):
    parts = torch.split(qkv, [q * d, kv * d, kv * d], dim=1)
    return [heads_of(part, batch, d) for part in parts]


def prefill_case(qkv: torch.Tensor, batch: int, q: int, kv: int, d: int) -> None:
    length = qkv.shape[0] // batch
    cos, sin = tables(torch.arange(length).repeat(batch), d)
    got, rotated = llama.attention_prefill_kernel(qkv, cos, sin, batch, q, kv)
    query, key, value = split_qkv(qkv, batch, q, kv, d)
    pair = cos.reshape(batch, length, -1), sin.reshape(batch, length, -1)
    query, key = llama.rotate(query, *pair), llama.rotate(key, *pair)
    assert torch.equal(heads_of(rotated, batch, d), key)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    args = query, key, value, mask
    check(got, attend(*args, BF16), attend(*args, torch.float64))


@pytest.mark.parametrize(
    ("batch", "length", "q", "kv", "d"),
    [
        (1, 64, 9, 3, 64),
        (2, 200, 4, 2, 64),
        (1, 130, 2, 2, 128),
        (3, 5, 4, 1, 64),
        (1, 640, 3, 1, 64),
        (1, 1100, 24, 24, 64),  # too many keys and values for SBUF: they come back from HBM
    ],
)
def test_prefill(batch: int, length: int, q: int, kv: int, d: int) -> None:
    prefill_case(random(batch * length, (q + 2 * kv) * d), batch, q, kv, d)


KINDS = ["rising maxima", "one dominant key", "equal scores", "zeros", "largest value"]


def distort(kind: str, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Make keys and values [.., length, D] adversarial in place; key 530 is in no first block."""
    length = keys.shape[-2]
    if kind == "rising maxima":
        keys *= torch.linspace(0.01, 30, length)[:, None].to(BF16)
    elif kind == "one dominant key":
        keys[..., 530, :] *= 100
    elif kind == "equal scores":
        keys[:] = 0
    elif kind == "largest value":
        values[..., 530, 0] = LARGEST
    else:
        keys[:], values[:] = 0, 0


def trace_with(monkeypatch: pytest.MonkeyPatch, constant: str, value: int) -> None:
    """Another value for a constant of the module, in programs that this test alone sees."""
    monkeypatch.setattr(llama, constant, value)
    for kernel in vars(llama).values():
        if isinstance(kernel, Kernel):
            monkeypatch.setattr(kernel, "programs", {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "running"), [(1100, False), (1099, True)])
def test_prefill_of_adversarial_scores(
    kind: str, length: int, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima that grow from key block to key block do not survive a softmax that forgets them."""
    if running:
        trace_with(monkeypatch, "RESIDENT_BYTES", 0)  # blocks come from HBM
    q, kv, d = 2, 1, 64
    qkv = random(length, (q + 2 * kv) * d)
    distort(kind, qkv[:, q * d : (q + kv) * d], qkv[:, (q + kv) * d :])
    prefill_case(qkv, 1, q, kv, d)


def test_prefill_hides_left_padding() -> None:
    batch, length, q, kv, d = 2, 140, 2, 1, 64
    qkv = random(batch * length, (q + 2 * kv) * d)
    valid = torch.arange(length)[None] >= torch.tensor([[0], [57]])
    cos, sin = tables(torch.arange(length).repeat(batch), d)
    bias = llama._mask_bias(valid, BF16)
    got, rotated = llama.attention_prefill_kernel(qkv, cos, sin, batch, q, kv, bias)
    query, _, value = split_qkv(qkv, batch, q, kv, d)
    query = llama.rotate(query, cos.reshape(batch, length, -1), sin.reshape(batch, length, -1))
    key = heads_of(rotated, batch, d)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (causal & valid[:, None, None, :]) | torch.eye(length, dtype=torch.bool)
    rows = valid.reshape(-1)  # rows of padding attend to nothing and mean nothing
    args = query, key, value, mask
    check(got[rows], attend(*args, BF16)[rows], attend(*args, torch.float64)[rows])


@pytest.mark.parametrize(
    ("batch", "past", "q", "kv", "d"),
    [
        (1, 64, 9, 3, 64),
        (3, 237, 4, 2, 64),
        (2, 128, 2, 2, 128),
        (1, 2500, 2, 1, 64),
        (8, 1, 4, 1, 64),
    ],
)
def test_decode(batch: int, past: int, q: int, kv: int, d: int) -> None:
    cached = [random(batch, kv, past, d, seed=s) for s in (1, 2)]
    decode_case(cached, batch, past, q, kv, d)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("past", "running"), [(1100, False), (1099, True)])
def test_decode_of_adversarial_scores(
    kind: str, past: int, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for prefill: complete rows, and with small blocks a running softmax."""
    if running:
        trace_with(monkeypatch, "KEY_CHUNK", 256)
    cached = [random(8, 2, past, 64, seed=s) for s in (1, 2)]
    distort(kind, *cached)
    decode_case(cached, 8, past, 4, 2, 64)


def decode_case(cached: list[torch.Tensor], batch: int, past: int, q: int, kv: int, d: int) -> None:
    qkv = random(batch, (q + 2 * kv) * d)
    live = torch.arange(past)[None] < torch.arange(batch)[:, None] * past // batch + past // 2
    cached[0][~live[:, None].expand(-1, kv, -1)] = 1e4  # what stands behind the mask must not count
    cos, sin = tables(torch.arange(batch) + 7, d)
    got, rotated, values = llama.attention_decode_kernel(
        qkv, cos, sin, *cached, llama._mask_bias(live, BF16), q, kv
    )
    got = got.reshape(batch, -1)
    assert torch.equal(values, qkv[:, (q + kv) * d :])
    query, key, value = split_qkv(qkv, batch, q, kv, d)
    query, key = (llama.rotate(t, cos[:, None], sin[:, None]) for t in (query, key))
    assert torch.equal(heads_of(rotated, batch, d), key)
    mask = torch.cat((live, torch.ones(batch, 1, dtype=torch.bool)), 1)[:, None, None]
    args = query, torch.cat((cached[0], key), 2), torch.cat((cached[1], value), 2), mask
    check(got, attend(*args, BF16, cached=past), attend(*args, torch.float64))


# --- fused blocks: the same as their parts --------------------------------------------------------


def block_case(batch: int, length: int, hidden: int, q: int, kv: int, d: int):
    x, gain = random(batch * length, hidden), random(1, hidden, seed=1)
    width = (q + 2 * kv) * d
    weights = random(width, hidden, scale=0.1, seed=2), random(hidden, q * d, scale=0.1, seed=3)
    cos, sin = tables(torch.arange(length).repeat(batch), d)
    return x, gain, *(llama.block_weight(w) for w in weights), cos, sin


@pytest.mark.parametrize(
    ("batch", "length", "hidden", "q", "kv", "d"),
    [(1, 130, 96, 3, 1, 64), (2, 64, 200, 2, 2, 64), (1, 700, 64, 2, 1, 128)],
)
def test_prefill_block_is_its_parts(
    batch: int, length: int, hidden: int, q: int, kv: int, d: int
) -> None:
    x, gain, qkv_w, out_w, cos, sin = block_case(batch, length, hidden, q, kv, d)
    got = llama.attention_prefill_block_kernel(x, gain, 1e-5, qkv_w, out_w, cos, sin, batch, q, kv)
    qkv = llama.linear_kernel(x, qkv_w, (q + 2 * kv) * d, gain, 1e-5)
    context, keys = llama.attention_prefill_kernel(qkv, cos, sin, batch, q, kv)
    wanted = llama.linear_kernel(context, out_w, hidden), keys, qkv[:, (q + kv) * d :]
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("batch", "past", "q", "kv"), [(1, 100, 3, 1), (3, 130, 4, 2)])
def test_decode_block_is_its_parts(batch: int, past: int, q: int, kv: int) -> None:
    hidden, d = 96, 64
    x, gain, qkv_w, out_w, cos, sin = block_case(batch, 1, hidden, q, kv, d)
    cached = [random(batch, kv, past, d, seed=s) for s in (4, 5)]
    bias = llama._mask_bias(torch.arange(past)[None] < torch.tensor([[past // 2]] * batch), BF16)
    got = llama.attention_decode_block_kernel(
        x, gain, 1e-5, qkv_w, out_w, cos, sin, *cached, bias, q, kv
    )
    qkv = llama.linear_kernel(x, qkv_w, (q + 2 * kv) * d, gain, 1e-5)
    context, *new = llama.attention_decode_kernel(qkv, cos, sin, *cached, bias, q, kv)
    wanted = llama.linear_kernel(context.reshape(batch, -1), out_w, hidden), *new
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_every_product_counts_its_macs() -> None:
    """In whole tiles of the contraction, as TensorE multiplies them: 200 inputs are two tiles."""
    x, weight = random(3, 200).to("meta"), llama.block_weight(random(70, 200)).to("meta")
    assert llama.linear_kernel.trace(x, weight, 70).macs == 3 * 256 * 70
