"""Each kernel of llama.py against float64, beside what PyTorch computes in bf16 on the same input.

A kernel may be wrong by 1.1 times the PyTorch bf16 error at most, in the largest and in the root
mean square sense. Only generated shapes, which may be a single number that PyTorch happens to round
the right way, are allowed one bf16 step of the largest result more.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_cpu.core.language.kernel import Kernel
from tests.crossed import crossed, full
from tests.llama.every import ALONE, llama
from tests.llama.references import TORCH, Reference
from tests.llama.references import check_error as check
from tests.warned import allows


def test_pieces_of_a_length_are_even():
    assert llama.even_spans(640, 512) == [(0, 320), (320, 320)]
    assert llama.even_spans(513, 512) == [(0, 320), (320, 193)]
    assert llama.even_spans(100, 512) == [(0, 100)]


BF16 = torch.bfloat16
LARGEST = 3.3895314e38  # the largest finite bf16
HUGE = 2.9e38  # near it; a weight times LARGEST, 2^128 less one bit, hardly rounds in PyTorch


def random(*shape, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


# --- normalisation and products -------------------------------------------------------------------


def norm(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def columns(rows, length=None):
    """[T, H] of sequences of ``length`` tokens -> the kernels' [H, T], H in whole tiles."""
    return llama.in_blocks(rows, length or len(rows))


def linear(x, weight, gain=None, eps=1e-5):
    """linear_kernel on rows [T, K] and a weight [N, K] as they come; with a gain, after a norm."""
    norm = None if gain is None else llama.Norm(x.shape[1], eps)
    behind = weight if gain is None else llama.times_gain(weight, gain[0])
    in_layout = llama.kernel_layout(llama.in_runs(llama.in_runs(behind, 0), 1))
    return llama.linear_kernel(columns(x, 1), in_layout, norm)[:, : len(weight)]


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
@allows("sim_activation_range")
def test_rmsnorm_of_extreme_rows(scale):
    x, gain = random(5, 96, scale=scale), random(1, 96, seed=1)
    weight = random(200, 96, seed=2)
    reference = norm(x.float(), gain.float(), 1e-5).to(BF16) @ weight.t()
    exact = norm(x.double(), gain.double(), 1e-5) @ weight.double().t()
    check(linear(x, weight, gain), reference, exact)


@pytest.mark.warns("sim_activation_range")
def test_rmsnorm_of_the_largest_finite_bf16():
    """Squares overflow fp32 here and in PyTorch alike: the row becomes zeros, never NaN."""
    x, gain = random(3, 96), random(1, 96, seed=1)
    x[1, 5], gain[0, 5] = LARGEST, 0.5
    got = linear(x, torch.eye(96, dtype=BF16), gain)
    reference = norm(x.float(), gain.float(), 1e-5).to(BF16)
    check(got, reference, norm(x.double(), gain.double(), 1e-5), steps=1)


def swiglu(x, gate, up, down):
    inner = x @ gate.t()
    return (inner * torch.sigmoid(inner) * (x @ up.t())) @ down.t()


def mlp(x, *weights):
    """swiglu_mlp_kernel without norm and residual on rows [T, H] and plain weights."""
    gate, up, down = weights
    blocked = [llama.kernel_layout(llama.in_runs(w, 1)) for w in (gate, up)]
    blocked.append(llama.kernel_layout(llama.in_runs(down, 0)))
    partial = llama.swiglu_mlp_kernel(columns(x), None, None, *blocked)
    return llama.from_blocks(partial, len(x))[:, : x.shape[1]]


def test_swiglu_of_the_largest_finite_bf16():
    """SiLU keeps it, and gives zero for its negative."""
    x, gate = torch.zeros(2, 128, dtype=BF16), torch.zeros(128, 128, dtype=BF16)
    x[0, 3], x[1, 3], x[:, 7] = LARGEST, -LARGEST, 0.5
    gate[9, 3] = 1.0
    up = torch.zeros_like(gate)
    up[9, 7] = 1.0
    got = mlp(x, gate, up, torch.eye(128, dtype=BF16))
    wanted = torch.zeros_like(x)
    wanted[0, 9] = LARGEST / 2
    assert torch.equal(got, wanted)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 140), st.integers(1, 300), st.integers(1, 600), st.integers(0, 5))
def test_linear_of_any_shape(tokens, k, n, seed):
    x, weight = random(tokens, k, seed=seed), random(n, k, seed=seed + 1)
    check(linear(x, weight), x @ weight.t(), x.double() @ weight.double().t(), steps=1)


# --- rotary embedding -----------------------------------------------------------------------------


def tables(positions, d):
    """cos and sin [T, D / 2] in bf16."""
    frequencies = torch.tensor([500000.0 ** (-2 * i / d) for i in range(d // 2)])
    angles = positions.float().reshape(-1, 1) * frequencies
    return angles.cos().to(BF16), angles.sin().to(BF16)


def lanes(pair, d):
    """The same in the kernels' layout, [128, T]: once more for each half, the sine negated."""
    cos, sin = pair
    halves = torch.cat((cos, cos), 1), torch.cat((sin, -sin), 1)
    return [half.repeat(1, 128 // d).t().contiguous() for half in halves]


# --- attention ------------------------------------------------------------------------------------


class BehindRotation(Reference):
    """All in float64 but rotations, whose results, queries and keys, PyTorch rounds to bf16."""

    def rotate(self, x, *tables):
        return TORCH.rotate(x.to(BF16), *tables).to(self.dtype)


BEHIND_ROTATION = BehindRotation(torch.float64)


class Plain:
    """The attention kernels without norm and residual, between products with the identity.

    qkv are rows [T, (q_heads + 2 * kv_heads) * D]; contexts come back as rows [T, q_heads * D].
    """

    def __init__(self, q, kv, d):
        self.heads, self.width = llama.HeadShape(q, kv, d), q * d
        parts = torch.eye((q + 2 * kv) * d, dtype=BF16).split([q * d, kv * d, kv * d])
        order = self.heads.order
        tiles = torch.cat((order(parts[0], q // kv), order(parts[1], 1), parts[2]))
        self.qkv_w = llama.kernel_layout(llama.in_runs(tiles, 1))
        self.out_w = llama.kernel_layout(llama.in_runs(order(parts[0], q // kv).t(), 0))

    def call(self, kernel, qkv, length, pair, *more, **named):
        d = self.heads.head_dim
        arguments = columns(qkv, length), None, None, self.qkv_w, self.out_w, *lanes(pair, d)
        out, *new = kernel(*arguments, *more, **named)
        return llama.from_blocks(out, length)[:, : self.width], *new

    def compared(self, kernel, *given):
        """Contexts of a kernel, of PyTorch in bf16 and in float64. New keys are PyTorch's."""
        sides = kernel, *(getattr(side, kernel.__name__) for side in (TORCH, BEHIND_ROTATION))
        results = [self.call(side, *given) for side in sides]
        assert all(map(torch.equal, results[0][1:], results[1][1:]))
        return [contexts for contexts, *_ in results]


def heads_of(rows, batch, d):
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


def split_qkv(qkv, batch, q, kv, d):
    parts = torch.split(qkv, [q * d, kv * d, kv * d], dim=1)
    return [heads_of(part, batch, d) for part in parts]


PREFILLS = ALONE.attention_prefill_kernel, llama.attention_prefill_kernel


def prefill_case(qkv, batch, q, kv, d, kernels=PREFILLS):
    """The kernel of llama.py, and that of heads and lengths of any size."""
    plain, length = Plain(q, kv, d), len(qkv) // batch
    pair = tables(torch.arange(length).repeat(batch), d)
    for kernel in kernels:
        got, bf16, exact = plain.compared(kernel, qkv, length, pair, plain.heads, batch)
        check(got, bf16, exact.double())


KINDS = ["rising maxima", "one dominant key", "equal scores", "zeros", "largest value"]


def distort(kind, keys, values):
    """Make keys and values [.., length, D] adversarial in place; key 530 is in no first block."""
    length = keys.shape[-2]
    if kind == "rising maxima":
        keys *= torch.linspace(0.01, 30, length)[:, None].to(BF16)
    elif kind == "one dominant key":
        keys[..., 530, :] *= 100
    elif kind == "equal scores":
        keys[:] = 0
    elif kind == "largest value":
        values[..., 530, 0] = HUGE
    else:
        keys[:], values[:] = 0, 0


def trace_with(monkeypatch, constant, value):
    """Another value for a constant of the module, in programs that this test alone sees."""
    monkeypatch.setattr(llama, constant, value)
    for kernel in llama.values:
        if isinstance(kernel, Kernel):
            monkeypatch.setattr(kernel, "programs", {})


@pytest.mark.parametrize(("kind", "size"), crossed(KINDS, [(1099, True), (1100, False)]))
def test_prefill_of_adversarial_scores(kind, size, monkeypatch):
    """Maxima that grow from key block to key block do not survive a softmax that forgets them."""
    length, running = size
    if running:
        trace_with(monkeypatch, "RESIDENT_BYTES", 0)  # blocks come from HBM
    q, kv, d = 1, 1, 64
    qkv = random(length, (q + 2 * kv) * d)
    distort(kind, qkv[:, q * d : (q + kv) * d], qkv[:, (q + kv) * d :])
    prefill_case(qkv, 1, q, kv, d)


def raised(qkv, q, kv, d, top):
    """What queries and keys, raised here in place, are multiplied by so that the largest score, of
    any two tokens before their rotation, is ``top``."""
    query, key, _ = split_qkv(qkv.double(), 1, q, kv, d)
    scores = query @ key.repeat_interleave(q // kv, 1).transpose(2, 3) / math.sqrt(d)
    factor = math.sqrt(top / scores.abs().max().item())
    qkv[:, : (q + kv) * d] *= factor
    return factor


# Up to here the half of a bf16 maximum's last bit that rounding takes is at most 64, or 45, and the
# exponential of a score less the maximum stays finite, in fp32 and in bf16
LARGEST_SCORES = {64: 2.0**15, 128: 2.0**18 / math.sqrt(128)}


@pytest.mark.parametrize(("d", "resident"), crossed([*LARGEST_SCORES], [True, False]))
def test_prefill_of_the_largest_scores(d, resident, monkeypatch):
    if not resident:
        trace_with(monkeypatch, "RESIDENT_BYTES", 0)
    q, kv = 2, 1
    qkv = random(300, (q + 2 * kv) * d)
    raised(qkv, q, kv, d, 0.9 * LARGEST_SCORES[d])
    prefill_case(qkv, 1, q, kv, d)


def test_keys_behind_a_query_do_not_count_however_large():
    """Their exponentials overflow; GpSimdE selects them away, a product with zero would not."""
    q, kv, d = 2, 1, 64
    qkv = random(130, (q + 2 * kv) * d)
    qkv[100:, q * d : (q + kv) * d] *= 1000
    prefill_case(qkv, 1, q, kv, d)


@pytest.mark.parametrize(("heads", "resident"), crossed([(4, 2, 64), (3, 1, 128)], [True, False]))
def test_prefill_of_one_block_after_another(heads, resident, monkeypatch):
    """Where no room is for three on their way; contexts then replace queries of the same block."""
    if not resident:
        trace_with(monkeypatch, "RESIDENT_BYTES", 0)
    fitting, number = ALONE.PromptPlan.fitting, -1 if resident else 1  # overlapping or not
    monkeypatch.setattr(
        ALONE.PromptPlan, "fitting", classmethod(lambda _, *sizes: [fitting(*sizes)[number]])
    )
    q, kv, d = heads
    prefill_case(random(600, (q + 2 * kv) * d), 1, q, kv, d)


@pytest.mark.parametrize(
    ("kind", "past"),
    [
        *((kind, 1100) for kind in KINDS if kind != "zeros"),
        *(full(kind, 4609) for kind in KINDS if kind != "zeros"),
    ],
)
def test_decode_of_adversarial_scores(kind, past):
    """As for prefill: complete rows, and blocks relative to maxima of their own."""
    cached = [random(8, 2, past, 64, seed=s) for s in (1, 2)]
    distort(kind, *cached)
    decode_case(cached, 8, past, 16, 2, 64)


@pytest.mark.parametrize("d", [64, full(128)])
def test_decode_over_keys_that_have_no_room_at_once(d, monkeypatch):
    """They come a few heads at a time."""
    trace_with(monkeypatch, "KEY_BYTES", 0)
    cached = [random(3, 4, 200, d, seed=s) for s in (1, 2)]
    decode_case(cached, 3, 200, 8, 4, d)


def decode_case(cached, batch, past, q, kv, d):
    """Two steps over the same cache, every row relative to its size: of all rows' roundings, not of
    the few that happen to be largest. A long cache is for the kernel of several tokens."""
    live = torch.arange(past)[None] < torch.arange(batch)[:, None] * past // batch + past // 2
    cached[0][~live[:, None].expand(-1, kv, -1)] = 1e4  # what stands behind the mask must not count
    plain, pair = Plain(q, kv, d), tables(torch.arange(batch) + 7, d)
    bias = llama._mask_bias(live, BF16)
    kernel, active, lanes = llama.attention_decode_kernel, [], 128 // kv
    if past > llama.DECODE_KEYS:
        kernel, active, lanes = llama.attention_chunk_kernel, [None], 128
    cache = llama.cache_in_runs(*cached, bias, lanes)
    results = []
    for seed in (0, 5):
        qkv = random(batch, (q + 2 * kv) * d, seed=seed)
        results.append(plain.compared(kernel, qkv, 1, pair, *cache, *active, plain.heads))
    got, bf16, exact = (torch.cat(part).double() for part in zip(*results))
    size = exact.pow(2).mean(1, keepdim=True).sqrt() + 1e-30
    check(got / size, bf16 / size, exact / size)
