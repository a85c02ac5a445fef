"""Heads of other sizes than 64 and 128 in the kernels of llama.py, against float64.

Sizes that are no whole quadrants of 32 leave lanes without features: keys in SBUF, weights and
contexts have zeros there, caches and values do not.
"""

import pytest
import torch

from tests.crossed import full
from tests.llama.every import llama
from tests.llama.references import EXACT, assert_close

HIDDEN = 136


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


class Layer:
    """Seeded arguments of an attention kernel, with bias and norms of heads, in ``dtype``."""

    def __init__(self, heads, batch, length, dtype=torch.float32):
        torch.manual_seed(heads.head_dim)
        tokens, d = batch * length, heads.head_dim
        q, k, v = (torch.randn(n * d, HIDDEN) / 12 for n in (heads.q_heads, *[heads.kv_heads] * 2))
        qkv = torch.cat((heads.order(q, heads.group), heads.order(k, 1), v))
        out = heads.order(torch.randn(heads.q_heads * d, HIDDEN) / 12, heads.group).t()
        weights = llama.in_runs(qkv, 1), llama.in_runs(out, 0)
        biases = [torch.randn(len(w), 1) / 4 for w in (q, k, v)]
        bias = torch.cat(
            (heads.order(biases[0], heads.group), heads.order(biases[1], 1), biases[2])
        )
        angles = torch.tensor([1e4 ** (-2 * i / d) for i in range(d // 2)])
        angles = llama.in_lanes(torch.cat((angles, -angles)), d)[:, None] * torch.arange(tokens)
        states = [llama.in_blocks(torch.randn(tokens, HIDDEN), length).to(dtype) for _ in range(2)]
        norm = llama.Norm(HIDDEN, 1e-5)
        layouts = [llama.kernel_layout(weight).to(dtype) for weight in weights]
        self.inputs = *states, norm, *layouts, angles.cos().to(dtype), angles.sin().to(dtype)
        gains = llama.in_lanes(torch.randn(d, 2), d).to(dtype)
        self.own = llama.pad_tiles(bias, 0).t().to(dtype), gains
        self.heads, self.batch, self.dtype = heads, batch, dtype

    def caches(self, past):
        """Keys, values and bias [B, past]; what is hidden would show."""
        shape = self.batch, self.heads.kv_heads, past, self.heads.head_dim
        live = torch.arange(past) < past - 3 * torch.arange(1, self.batch + 1)[:, None]
        caches = [torch.randn(shape) * torch.where(live, 1, 30)[:, None, :, None] for _ in "kv"]
        return *(cache.to(self.dtype) for cache in caches), llama._mask_bias(live, self.dtype)


def assert_equal(kernel, *arguments, **more):
    got, wanted = (getattr(of, kernel)(*arguments, **more) for of in (llama, EXACT))
    assert_close(got, wanted, 3e-5 if arguments[0].dtype is torch.float32 else 3e-2)


PREFILLS = [
    ((4, 2, 80), 2, 70),
    full((3, 3, 96), 1, 300),
    full((6, 3, 48), 1, 200),
    full((2, 1, 34), 1, 40),
    full((2, 1, 2), 1, 20),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "batch", "length"), PREFILLS)
def test_prefill(heads, batch, length, dtype):
    layer = Layer(llama.HeadShape(*heads), batch, length, dtype)
    assert_equal("attention_prefill_kernel", *layer.inputs, layer.heads, batch, None, *layer.own)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("heads", "batch", "n", "past"),
    [
        ((4, 2, 80), 2, 5, 128),
        ((2, 1, 32), 2, 5, 128),  # one head in a tile of four
        full((4, 2, 80), 1, 140, 640),
        full((3, 3, 96), 1, 130, 256),
        ((4, 2, 80), 2, 1, 130),
        *(full(h, 2, 1, 256) for h in ((6, 3, 48), (8, 4, 32), (2, 1, 34))),
    ],
)
def test_chunks(heads, batch, n, past, blocks):
    layer = Layer(llama.HeadShape(*heads), batch, n)
    keys, values, bias = layer.caches(past)
    active, rows = None, None
    if n <= 128:
        triangle = torch.ones((batch, n, n), dtype=torch.bool).tril()
        active = llama._mask_bias(triangle, torch.float32)
    if blocks:  # two a sequence, in the order of their sequences turned round
        shape = batch * 2, past // 2, layer.heads.kv_heads, layer.heads.head_dim
        table = torch.arange(batch * 2).flip(0).view(batch, 2)
        stored = [x.transpose(1, 2).reshape(shape).flip(0) for x in (keys, values)]
        *cache, rows = llama.blocks_in_runs(*stored, table, bias)
    else:
        cache = llama.cache_in_runs(keys, values, bias)
    arguments = *layer.inputs, *cache, active, layer.heads, *layer.own
    assert_equal("attention_chunk_kernel", *arguments, rows_hbm=rows)
