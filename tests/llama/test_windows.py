"""Sliding windows in the kernels of llama.py against float64: edges inside tiles and on them."""

import pytest
import torch

from tests.crossed import full
from tests.llama import test_head_sizes
from tests.llama.every import llama
from tests.llama.references import EXACT, assert_close


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


class Layer(test_head_sizes.Layer):
    """The same without a norm: every seventh token is six times as large, so that keys which a
    window hides would have the largest scores."""

    def __init__(self, heads, batch, length):
        super().__init__(heads, batch, length)
        x, _, _, *others = self.inputs
        rows = llama.from_blocks(x, length)
        rows[::7] *= 6
        self.inputs = llama.in_blocks(rows, length), None, None, *others


def assert_equal(kernel, *arguments, **more):
    got, wanted = (getattr(of, kernel)(*arguments, **more) for of in (llama, EXACT))
    assert_close(got, wanted, 5e-5)


@pytest.mark.parametrize(
    ("heads", "batch", "length", "window"),
    [
        ((3, 3, 64), 2, 70, 8),  # within one tile, and one that is not whole
        full((2, 1, 128), 1, 300, 129),
        ((2, 1, 64), 1, 300, 1),
        full((2, 1, 128), 1, 300, 100),
        full((2, 1, 64), 1, 400, 128),
        full((2, 2, 64), 1, 520, 130),
        full((2, 1, 128), 1, 700, 256),
        full((2, 1, 64), 1, 300, 299),
        full((2, 1, 64), 1, 130, 500),  # longer than the prompt
    ],
)
def test_prefill(heads, batch, length, window):
    layer = Layer(llama.HeadShape(*heads), batch, length)
    arguments = *layer.inputs, layer.heads, layer.batch
    assert_equal("attention_prefill_kernel", *arguments, window=window)


def test_tiles_that_no_query_sees_are_left_out():
    """Products of scores and sums grow with the window, not with the prompt."""
    layer = Layer(llama.HeadShape(8, 1, 64), 1, 1536)
    arguments = *layer.inputs, layer.heads, layer.batch
    whole, cut = (
        len(llama.attention_prefill_kernel.trace(*arguments, window=window).instructions)
        for window in (None, 128)
    )
    assert cut < 0.8 * whole


@pytest.mark.parametrize(
    ("heads", "starts", "n", "length", "window"),
    [
        ((2, 1, 64), (5, 200), 4, 256, 8),  # sequences of different lengths
        ((2, 1, 128), (90,), 130, 256, 100),  # two tiles of queries, shorter than the chunk
        full((4, 2, 64), (0, 128), 5, 384, 129),  # nothing is cached yet, and a whole tile
        full((2, 2, 128), (2000,), 1, 2560, 300),  # a decode step over more than DECODE_KEYS
        full((2, 1, 64), (300,), 64, 640, 1),
        full((6, 2, 64), (511,), 140, 512, 400),
        full((2, 1, 64), (20,), 3, 128, 1000),  # longer than everything
        full((2, 1, 64), (30,), 3, 99, 10),  # a cache of no whole tiles
    ],
)
def test_chunks_behind_a_cache(heads, starts, n, length, window):
    """Hidden keys of the cache, and those behind its end, are the largest."""
    batch, heads = len(starts), llama.HeadShape(*heads)
    layer, dim = Layer(heads, batch, n), heads.head_dim
    caches = [torch.randn(batch, heads.kv_heads, length, dim) for _ in range(2)]
    queries = torch.tensor(starts)[:, None] + torch.arange(n)
    keys, new = torch.arange(length), torch.arange(n)
    seen = (keys < torch.tensor(starts)[:, None, None]) & (queries[:, :, None] - keys < window)
    for cache in caches:
        cache *= torch.where(seen.any(1), 1.0, 30.0)[:, None, :, None]
    bias, active = llama._mask_bias(seen, torch.float32), None
    if n <= 128:
        age = new[:, None] - new
        active = llama._mask_bias((age >= 0) & (age < window), torch.float32).expand(batch, n, n)
    bias = bias[:, 0] if n == 1 else bias
    table = torch.arange(batch)[:, None]
    whole = *caches, llama.cache_in_runs(*caches, bias.view(-1, length))[2].view(bias.shape)
    *cut, rows = llama.blocks_in_runs(*caches, table, bias, True, window)
    assert length < 3 * window or cut[2].shape[-1] < length
    got = llama.attention_chunk_kernel(
        *layer.inputs, *cut, active, heads, rows_hbm=rows, window=window
    )
    wanted = EXACT.attention_chunk_kernel(*layer.inputs, *whole, active, heads, window=window)
    assert_close(got, wanted, 5e-5)
