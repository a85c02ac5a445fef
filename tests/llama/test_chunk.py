"""Several new tokens over a cache: attention_chunk_kernel against float64, beside PyTorch in bf16.

The bounds are those of test_kernels.py.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.crossed import crossed, full
from tests.llama.every import llama
from tests.llama.references import check_error as check
from tests.llama.test_kernels import (
    BF16,
    KINDS,
    LARGEST_SCORES,
    Plain,
    attend,
    distort,
    heads_of,
    raised,
    random,
    split_qkv,
    tables,
)


class Case:
    """New tokens [B * n], a cache of ``past`` keys, of which a sequence's first ``live`` count."""

    def __init__(self, batch, n, past, heads, seed=0):
        q, kv, d = self.sizes = heads
        self.batch, self.n, self.plain = batch, n, Plain(q, kv, d)
        self.qkv = random(batch * n, (q + 2 * kv) * d, seed=seed)
        self.keys, self.values = (random(batch, kv, past, d, seed=seed + s) for s in (1, 2))
        lengths = torch.tensor([[max(1, past - 7 * b - 3)] for b in range(batch)])
        self.live = torch.arange(past)[None] < lengths
        self.active = torch.ones(n, n, dtype=torch.bool).tril().expand(batch, n, n)

    def cache(self, bias):
        """Keys, values and bias as the kernel takes them, and rows where they are in blocks."""
        return llama.cache_in_runs(self.keys, self.values, bias)

    def run(self, given_mask, **cached):
        """(contexts of the kernel, of PyTorch in bf16, in float64)."""
        positions = self.live.sum(1)[:, None] + torch.arange(self.n)
        cos, sin = tables(positions, self.sizes[2])
        bias = llama._mask_bias(self.live, BF16)
        keys, values, bias, *rows = self.cache(bias, **cached)
        active = llama._mask_bias(self.active, BF16) if given_mask else None
        given = self.qkv, self.n, (cos, sin), keys, values, bias, active, self.plain.heads
        named = dict(zip(["rows_hbm"], rows))
        got, rotated, new_values = self.plain.call(llama.attention_chunk_kernel, *given, **named)
        query, key, value = split_qkv(self.qkv, self.batch, *self.sizes)
        pair = cos.reshape(self.batch, self.n, -1), sin.reshape(self.batch, self.n, -1)
        query, key = llama.rotate(query, *pair), llama.rotate(key, *pair)
        assert torch.equal(heads_of(rotated, self.batch, self.sizes[2]), key)
        assert torch.equal(heads_of(new_values, self.batch, self.sizes[2]), value)
        seen = self.live[:, None, None].expand(-1, 1, self.n, -1)
        mask = torch.cat((seen, self.active[:, None]), -1)
        args = query, torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2), mask
        cached = self.keys.shape[2]
        return got, attend(*args, BF16, cached), attend(*args, torch.float64)


@pytest.mark.parametrize(
    ("batch", "n", "past", "heads"),
    [
        (1, 5, 640, (4, 1, 64)),
        (2, 2, 200, (9, 3, 64)),
        (3, 33, 137, (8, 8, 64)),  # a length that is padded
        (1, 130, 300, (4, 2, 64)),  # two tiles of tokens
        (1, 7, 1100, (4, 2, 128)),
        (2, 129, 64, (3, 1, 128)),
        (1, 1, 9, (2, 2, 64)),
        full(1, 257, 5000, (2, 1, 64)),  # the cache comes in blocks
        (2, 6, 7000, (4, 2, 64)),  # and once, relative to the maximum of each block
        (1, 4, 3500, (2, 2, 128)),
    ],
)
def test_chunk(batch, n, past, heads):
    check(*Case(batch, n, past, heads).run(given_mask=n < 128))


@pytest.mark.parametrize("d", LARGEST_SCORES)
@pytest.mark.parametrize(("n", "past"), [(130, 300), (7, 300), (1, 3000)])
def test_chunk_of_the_largest_scores(n, past, d):
    """The maximum of up to 128 queries is that of the numbers that it is subtracted from."""
    case = Case(1, n, past, (2, 1, d))
    case.keys *= raised(case.qkv, 2, 1, d, 0.9 * LARGEST_SCORES[d] if n > 128 else 1e30)
    check(*case.run(given_mask=n < 128))


@pytest.mark.parametrize(
    ("n", "past", "seen"),
    [
        (130, 900, 640),
        (5, 800, 640),
        (130, 500, 211),  # a prime number of keys: 45 behind them are read and hidden
        (130, 230, 211),  # and more than there are
    ],
)
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128)])
def test_keys_behind_those_of_the_bias_are_not_read(n, past, seen, heads):
    """A bucket has room for the chunk itself: what lies there is not cached yet."""
    case = Case(1, n, past, heads)
    case.live = torch.arange(past)[None] < seen  # the last one that is read counts
    case.cache = lambda bias: llama.cache_in_runs(case.keys, case.values, bias[:, :seen])
    check(*case.run(given_mask=n < 128))


@pytest.mark.parametrize(
    ("batch", "n", "past", "heads"),
    [
        (1, 257, 5000, (2, 1, 64)),  # 125 lanes, three blocks of up to 24 tiles
        full(1, 140, 3328, (6, 6, 64)),  # two sets of heads
        full(1, 130, 3328, (4, 2, 128)),  # marks in rows of their own
    ],
)
def test_a_long_cache_comes_twice(monkeypatch, batch, n, past, heads):
    """For the maxima as it is, then with the keys that were turned for these."""
    monkeypatch.setattr(llama, "RESIDENT_BYTES", 0)
    check(*Case(batch, n, past, heads).run(given_mask=False))


@settings(max_examples=6, deadline=None)
@example(1, 65, 9, (6, 2, 64), 0)  # two banks of one head each read the same cached keys
@example(1, 33, 1, (7, 7, 64), 0)  # many queries of four heads, few of the other three
@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 700),
    st.sampled_from([(1, 1, 64), (6, 2, 64), (7, 7, 64), (5, 1, 128), (4, 4, 128)]),
    st.integers(0, 5),
)
def test_chunk_of_any_shape(batch, n, past, heads, seed):
    check(*Case(batch, n, past, heads, seed).run(given_mask=True), steps=1)


@pytest.mark.parametrize(("kind", "heads"), crossed(KINDS, [(4, 1, 64), (2, 1, 128)]))
def test_adversarial_chunk(kind, heads):
    case = Case(1, 130, 900, heads)
    distort(kind, case.keys, case.values)
    check(*case.run(given_mask=False))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("tokens", [5, 130])  # one pass over the cache, and two
def test_keys_that_are_hidden_do_not_move_the_maximum(sign, tokens):
    """Stale cache lines, orders of magnitude above the scores that count or below."""
    case = Case(2, tokens, 640, (4, 1, 64))
    case.live = case.live & (torch.arange(640) < 300)
    case.keys[:, :, 300:] = sign * 1e4
    case.values[:, :, 300:] = 1e30
    check(*case.run(given_mask=tokens < 128))


def test_a_tree_of_tokens():
    """Two branches that do not see each other, as a token tree has them."""
    case = Case(2, 6, 130, (4, 2, 64))
    case.active = torch.eye(6, dtype=torch.bool).repeat(2, 1, 1)
    case.active[:, :, 0] = True
    case.active[:, 3, 1] = case.active[:, 4, 2] = case.active[:, 5, 4] = case.active[:, 5, 2] = True
    check(*case.run(given_mask=True))
