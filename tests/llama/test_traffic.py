"""What the kernels keep in SBUF, and what they load again for want of room."""

from __future__ import annotations

import math

import neuronxcc.nki.language as nl
import pytest
import torch

import llama
from neuron_cpu.core import Kernel, Program
from tests.llama.test_kernels import BF16, Plain, columns, lanes
from tests.llama.test_weights import config


def chunk(q: int, d: int, past: int, tokens: int = 4) -> Program:
    """Trace of a few new tokens of one KV head over ``past`` keys."""
    plain = Plain(q, 1, d)
    tables = lanes((torch.zeros(tokens, d // 2),) * 2, d)
    x = columns(torch.zeros(tokens, (q + 2) * d, dtype=BF16))
    cache = [torch.empty(1, 1, past, d, dtype=BF16)] * 2
    marks, active = torch.empty(1, llama.MARKS, past), torch.empty(1, tokens, tokens)
    given = x, plain.qkv_w, plain.out_w, *tables, *cache, marks, active
    x, *others = (tensor.to("meta", BF16) for tensor in given)
    return llama.attention_chunk_kernel.trace(x, None, None, *others, plain.heads)


def times_read(program: Program, past: int, d: int) -> list[float]:
    """How often each of the cached keys and values is loaded."""
    caches = [s for s in program.inputs if s.shape == (1, 1, past, d)]
    moved = dict.fromkeys((s.id for s in caches), 0)
    for instruction in program.instructions:
        for view in instruction.src:
            if view.storage.id in moved:
                moved[view.storage.id] += view.size
    return [count / (past * d) for count in moved.values()]


@pytest.mark.parametrize(("q", "d"), [(2, 64), (1, 128)])
def test_cached_keys_that_fit_are_loaded_once_and_others_for_each_pass(q: int, d: int) -> None:
    """Per tile of 128 keys: keys and marks [128, slots, 128], values and ones [128, parts, 128]."""
    slots, parts = math.ceil((d + llama.MARKS) / 128), d // 64
    tiles = llama.RESIDENT_BYTES // (2 * 128 * (slots + parts))
    fits, beyond = 128 * tiles, 128 * (tiles + 1)
    assert times_read(chunk(q, d, fits), fits, d) == [1, 1]
    assert times_read(chunk(q, d, beyond), beyond, d) == [2, 1]  # maxima first, then weights


@pytest.mark.parametrize(
    ("heads", "tiles"), [((8, 8, 128), 11), ((4, 2, 64), 95), ((6, 3, 64), 54)]
)
def test_keys_of_a_prompt_that_fit_need_no_memory_beside_sbuf(
    heads: tuple[int, int, int], tiles: int
) -> None:
    """2 bytes of [128, stacks, tokens] keys and [128, tiles, kv heads, D + 1] values, in 48 KiB."""
    shape = llama.HeadShape(*heads)
    per_tile = 2 * (128 * shape.stacks + heads[1] * (heads[2] + 1))
    assert tiles * per_tile <= llama.RESIDENT_BYTES < (tiles + 1) * per_tile
    made = []

    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=nl.load(x))
        for count in (tiles, tiles + 1):
            made.append(llama.key_scratch(2, 128 * count, 128, shape, nl.bfloat16))
        return out

    Kernel(kernel).trace(torch.empty(1, 1, device="meta"))
    assert made[0] is None
    assert made[1][0].shape == (2, shape.stacks, 128, 128 * (tiles + 1))
    assert made[1][1].shape == (2, heads[1], 128, tiles + 1, heads[2] + 1)


def test_heads_share_the_hidden_size_where_the_configuration_gives_none() -> None:
    cfg = config(2, nki_enabled=True)
    heads, hidden = cfg.num_attention_heads, cfg.hidden_size
    cfg.hidden_size, cfg.head_dim = 64 * heads, None
    assert llama.Sizes.of(cfg).of_rank.head_dim == 64 and hidden != 64 * heads


@pytest.mark.parametrize("features", [2048, 4096, 8192])
@pytest.mark.parametrize(
    "heads", [(32, 8, 64), (32, 8, 128), (8, 2, 128), (4, 1, 64), (64, 8, 128)]
)
def test_a_pass_takes_as_many_tokens_as_there_is_room_for(
    features: int, heads: tuple[int, int, int]
) -> None:
    """Per token stay 2 bytes of each of its columns: x, queries, keys and the context."""
    shape = llama.HeadShape(*heads)
    held = features // 128 + shape.stacks * (shape.group + 1 + shape.group)
    tokens = llama.chunk_tokens(features, shape, 2)
    assert tokens % 128 == 0 and tokens * 2 * held <= max(llama.CHUNK_BYTES, 128 * 2 * held)
    assert tokens == llama.TOKEN_CHUNK or (tokens + 128) * 2 * held > llama.CHUNK_BYTES
