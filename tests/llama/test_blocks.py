"""A cache of blocks, read through a table, against float64 beside PyTorch in bf16."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.crossed import crossed
from tests.llama.every import llama
from tests.llama.references import check_error as check
from tests.llama.test_chunk import Case
from tests.llama.test_kernels import BF16, attend, random, split_qkv, tables


class BlockCase(Case):
    """The same keys in blocks of any order; blocks of nobody and what is behind a sequence's end
    hold values that would show."""

    def __init__(self, batch, n, past, heads, block, seed=0):
        super().__init__(batch, n, past, heads, seed)
        _, kv, d = heads
        each, spare = past // block, 3
        order = torch.randperm(batch * each + spare, generator=torch.Generator().manual_seed(seed))
        self.table = order[: batch * each].view(batch, each)
        self.blocks = []
        for s, name in ((3, "keys"), (4, "values")):
            blocks = 30.0 * random(len(order), block, kv, d, seed=seed + s)
            rows = getattr(self, name).transpose(1, 2)
            rows = torch.where(self.live[..., None, None], rows, 30.0 * rows).to(BF16)
            blocks[self.table] = rows.reshape(batch, each, block, kv, d)
            self.blocks.append(blocks)

    def cache(self, bias, heads_first=False):
        """``heads_first``: as blocks of chunks are."""
        blocks = self.blocks
        if heads_first:
            blocks = [x.transpose(1, 2).contiguous() for x in blocks]
        return llama.blocks_in_runs(*blocks, self.table, bias, heads_first)


STEPS = [
    (1, 64, (4, 2, 64), 16),
    (2, 640, (9, 3, 64), 32),  # a stack of one head
    (8, 640, (16, 4, 64), 32),  # a rank of 1B
    (5, 256, (32, 8, 64), 32),
    (3, 2048, (4, 4, 128), 32),  # parts
    (2, 48, (8, 1, 128), 4),
    (1, 1, (1, 1, 64), 1),
]


def test_a_row_holds_as_many_tokens_as_spread_a_sequence_over_all_partitions():
    """5 of 640 keys on each of 128 partitions, rounded up to a power of two."""
    keys, values, _, rows = BlockCase(1, 1, 640, (4, 1, 128), 32).cache(torch.zeros(1, 640))
    assert keys.shape[1] == values.shape[1] == 8 and rows.shape == (80, 1)


@pytest.mark.parametrize(("step", "heads_first"), crossed(STEPS, [False, True]))
def test_a_step_over_blocks(step, heads_first):
    batch, past, heads, block = step
    check(*BlockCase(batch, 1, past, heads, block).run(True, heads_first=heads_first))


@settings(max_examples=4, deadline=None)
@given(
    st.integers(1, 2), st.sampled_from([1, 2, 9]), st.integers(1, 9), st.sampled_from([16, 32, 128])
)
@example(2, 9, 1, 128)
def test_any_table(batch, n, blocks, block):
    check(*BlockCase(batch, n, blocks * block, (2, 2, 64), block, seed=blocks).run(True))


@pytest.mark.parametrize("n", [1, 5])
def test_blocks_of_fp8(n):
    """The keys that were cached in fp8, exactly; new ones are not rounded to it."""
    case = BlockCase(2, n, 160, (4, 2, 64), 32)
    for name in ("keys", "values"):
        setattr(case, name, getattr(case, name).to(torch.float8_e4m3fn).to(BF16))
    case.blocks = [cache.clamp(-240, 240).to(torch.float8_e4m3fn) for cache in case.blocks]
    check(*case.run(True))


@pytest.mark.parametrize(
    ("keys", "blocks"), [(64, 4), (128, 8), (1024, 64), (1024, 8), (2048, 256)]
)
def test_masks_of_tiles_come_in_the_order_of_their_keys(keys, blocks):
    """NxDI's kernel loads a tile in parts of 128 partitions, on each of them keys that are
    neighbours, and looks at the first of all partitions, then at the second."""
    rows = max(128, blocks)
    in_row = max(1, keys // rows)
    order = torch.arange(keys)
    if in_row > 1:
        loads = [order[n : n + 128 * in_row] for n in range(0, keys, 128 * in_row)]
        order = torch.cat([part[at::in_row] for part in loads for at in range(in_row)])
    masks = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(0)) < 0.5
    given = {"tile_masks": masks[:, :, order], "tile_block_tables": torch.zeros(2, blocks)}
    assert torch.equal(llama.masks_in_order(given), masks)


class SharedCase(Case):
    """A chunk of several sequences, end to end, and padding: ``counts`` are (new tokens, cached
    ones) of each, the cached ones in blocks of any order, whose heads lie apart."""

    def __init__(self, counts, padding, heads, block, seed=0):
        new, cached = ([count[side] for count in counts] for side in (0, 1))
        widths = [math.ceil(length / block) for length in cached]
        super().__init__(1, sum(new) + padding, max(1, sum(widths)) * block, heads, seed)
        owner = [row for row, count in enumerate(new) for _ in range(count)]
        self.owner = torch.tensor(owner + [len(counts)] * padding)
        column = [
            row if place < length else -1
            for row, (length, width) in enumerate(zip(cached, widths))
            for place in range(width * block)
        ]
        self.column = torch.tensor(column or [-1] * block)
        self.places = torch.cat([past + torch.arange(n) for n, past in counts])
        self.places = torch.nn.functional.pad(self.places, (0, padding))
        order = torch.randperm(
            max(1, sum(widths)) + 2, generator=torch.Generator().manual_seed(seed)
        )
        self.table, self.blocks = order[None, :-2], []
        for s, name in ((3, "keys"), (4, "values")):
            blocks = 30.0 * random(len(order), heads[1], block, heads[2], seed=seed + s)
            rows = getattr(self, name)[0]
            rows = torch.where((self.column < 0)[None, :, None], 30.0 * rows, rows).to(BF16)
            setattr(self, name, rows[None])
            blocks[self.table[0]] = rows.unflatten(1, (-1, block)).transpose(0, 1)
            self.blocks.append(blocks)

    def run(self):
        """(contexts of the kernel, of PyTorch in bf16, in float64), padding left out."""
        cos, sin = tables(self.places[None], self.sizes[2])
        rows = torch.arange(int(self.owner.max()) + 1)[:, None]
        seen = (self.column == rows) & (self.column >= 0)
        bias = llama._mask_bias(torch.nn.functional.pad(seen, (0, 0, 0, 1)), BF16)
        owners = (self.owner == torch.arange(len(bias))[:, None]).to(BF16)
        *caches, bias, named = llama.blocks_in_runs(*self.blocks, self.table, bias, True)
        more = {"rows_hbm": named, "owners_hbm": owners}
        got, *_ = self.plain.call(
            llama.attention_chunk_kernel,
            *(self.qkv, self.n, (cos, sin), *caches, bias, None, self.plain.heads),
            **more,
        )
        query, key, value = split_qkv(self.qkv, 1, *self.sizes)
        pair = cos.reshape(1, self.n, -1), sin.reshape(1, self.n, -1)
        query, key = llama.rotate(query, *pair), llama.rotate(key, *pair)
        own = (self.owner[:, None] == self.owner) & torch.ones(self.n, self.n).tril().bool()
        mask = torch.cat((self.owner[:, None] == self.column, own), 1)[None, None]
        args = query, torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2), mask
        count = int((self.owner < len(bias) - 1).sum())
        results = got, attend(*args, BF16, self.keys.shape[2]), attend(*args, torch.float64)
        return tuple(result[:, :count] for result in results)


SHARED = [
    ([(1, 37), (1, 64), (1, 5)], 0, (4, 2, 64), 32),  # steps alone
    ([(1, 40), (9, 0), (3, 17)], 3, (2, 1, 64), 16),
    ([(1, 96), (100, 31), (40, 200), (1, 1)], 0, (4, 2, 64), 32),  # more than a tile of tokens
    ([(1, 600), (130, 300)], 125, (4, 1, 64), 32),
    ([(2, 50), (5, 70)], 1, (4, 2, 128), 16),
    ([(60, 0), (150, 140)], 46, (2, 2, 128), 64),
    ([(12, 0), (20, 0)], 0, (2, 2, 64), 16),  # nothing is cached
]


@pytest.mark.parametrize(("counts", "padding", "heads", "block"), SHARED)
def test_a_chunk_that_sequences_share(counts, padding, heads, block):
    check(*SharedCase(counts, padding, heads, block).run())
