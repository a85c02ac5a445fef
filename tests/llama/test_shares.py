"""Keys that several ranks share: attention_share_kernel against float64, beside PyTorch in bf16.

The bounds are those of test_kernels.py. A share's positions are every g-th; what each rank gives is
combined as NeuronLlamaAttention does it, with the ranks' results beside each other in one process.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models import ranks
from tests.crossed import crossed
from tests.llama.every import llama
from tests.llama.references import check_error as check
from tests.llama.references import in_tiles, root_in_queries
from tests.llama.test_kernels import BF16, KINDS, attend, distort, random


class Case:
    """New tokens [B, heads, n, D] of one KV head over ``past`` keys that ``ranks`` share.

    A sequence's first ``live`` keys count; its new tokens lie behind them, each on the rank that
    its position names.
    """

    def __init__(self, batch, n, past, heads, d, ranks):
        self.ranks, self.heads = ranks, llama.HeadShape(heads, 1, d)
        self.q, self.k, self.v = random(3, batch, heads, n, d).unbind()
        self.k, self.v = self.k[:, :1], self.v[:, :1]
        self.keys, self.values = (random(batch, 1, past, d, seed=s) for s in (1, 2))
        self.live = torch.tensor([max(0, past - 7 * b - 3) for b in range(batch)])[:, None]
        self.seen = torch.arange(past) < self.live
        self.active = torch.ones(n, n, dtype=torch.bool).tril()

    def share(self, rank, dtype=BF16):
        """Cached keys, values and bias of a rank, and the mask of the new tokens."""
        keys, values, seen = (t[..., rank :: self.ranks] for t in self.turned())
        keys, values = keys.transpose(2, 3).contiguous(), values.transpose(2, 3).contiguous()
        owned = (self.live + torch.arange(len(self.active))) % self.ranks == rank
        active = self.active & owned[:, None]
        cache = llama.cache_in_runs(
            keys.to(dtype), values.to(dtype), llama._mask_bias(seen[:, 0], dtype)
        )
        return *cache, llama._mask_bias(active, dtype)

    def turned(self):
        """Keys, values and what counts, positions last."""
        return self.keys.transpose(2, 3), self.values.transpose(2, 3), self.seen[:, None]

    def new(self, dtype=BF16):
        """Queries and keys in tiles, and rows of values, as the kernel takes them."""
        q, k, v = (t.transpose(1, 2).flatten(0, 1).to(dtype) for t in (self.q, self.k, self.v))
        q = in_tiles(q / root_in_queries(self.heads), self.heads, self.heads.group)
        k = in_tiles(k, self.heads, 1)
        return q.transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous(), v.flatten(1)

    def of_ranks(self, kernels, dtype=BF16):
        return [
            kernels.attention_share_kernel(
                *self.new(dtype), *self.share(rank, dtype), self.heads, len(self.q)
            )
            for rank in range(self.ranks)
        ]

    def together(self, monkeypatch):
        """Contexts [B * n, heads * D] of all ranks."""
        found = self.of_ranks(llama)
        every = torch.stack([weights[:, 0] for _, weights in found])
        monkeypatch.setattr(
            llama, "gather_from_sequence_parallel_region", lambda *args, **kwargs: every
        )
        n = self.q.shape[2]
        total = sum(
            context * llama.share_of_keys(weights[:, 0], n, None) for context, weights in found
        )
        return total.to(BF16).permute(2, 1, 0)[..., : self.heads.head_dim].flatten(1)

    def wanted(self, dtype):
        seen = self.seen[:, None, None].expand(-1, 1, self.q.shape[2], -1)
        active = self.active.expand(len(self.q), 1, -1, -1)
        keys, values = torch.cat((self.keys, self.k), 2), torch.cat((self.values, self.v), 2)
        mask = torch.cat((seen, active), -1)
        return attend(self.q, keys, values, mask, dtype, self.keys.shape[2])


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(8, 300), st.integers(1, 9), st.integers(2, 8)
)
@example(2, 9, 129, 14, 5)
def test_shares_of_any_shape(batch, n, past, heads, ranks):
    case = Case(batch, n, past, heads, 64, ranks)
    with pytest.MonkeyPatch.context() as patch:
        check(case.together(patch), case.wanted(BF16), case.wanted(torch.float64))


@pytest.mark.parametrize(("kind", "d"), crossed(KINDS, [64, 128]))
def test_adversarial_shares(kind, d, monkeypatch):
    """Maxima of the ranks lie far apart, or all keys of some are hidden."""
    case = Case(2, 3, 603, 4, d, 4)
    distort(kind, case.keys, case.values)
    check(case.together(monkeypatch), case.wanted(BF16), case.wanted(torch.float64), steps=1)


def test_parts_of_a_prompt_over_blocks_are_refused():
    """NxDI 0.6 answers wrongly there with its own layers, too, by half of the largest logit."""
    asked = dict.fromkeys(
        ("flash_decoding_enabled", "sequence_parallel_enabled", "quantized"), False
    )
    for blocks in (False, True):
        own = SimpleNamespace(
            **asked, lora_config=None, cp_degree=2, tp_degree=4, is_block_kv_layout=blocks
        )
        config = SimpleNamespace(neuron_config=own, num_attention_heads=4, num_key_value_heads=4)
        if not blocks:
            ranks.check_parts_of_prompt(config)
            continue
        with pytest.raises(ValueError, match="expected no is_block_kv_layout"):
            ranks.check_parts_of_prompt(config)
