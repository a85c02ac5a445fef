"""What the kernels keep in SBUF, and what they load again for want of room."""

import pytest
import torch

from tests.crossed import full
from tests.llama.every import llama
from tests.llama.test_kernels import BF16, Plain, columns, lanes


def chunk(q, d, past, tokens):
    """Trace of new tokens of one KV head over ``past`` keys."""
    with torch.device("meta"):
        plain = Plain(q, 1, d)
    tables = lanes((torch.zeros(tokens, d // 2),) * 2, d)
    x = columns(torch.zeros(tokens, (q + 2) * d, dtype=BF16))
    cache = [torch.empty(1, 1, past, d, dtype=BF16)] * 2
    bias = torch.empty(1, past)
    given = x, plain.qkv_w, plain.out_w, *tables, *cache, bias
    x, *others = (tensor.to("meta", BF16) for tensor in given)
    active = None if tokens > 128 else torch.empty(1, tokens, tokens, dtype=BF16, device="meta")
    return llama.attention_chunk_kernel.trace(x, None, None, *others, active, plain.heads)


@pytest.mark.parametrize("tokens", [2048, full(8192)])  # 16 and 64 tiles of keys
def test_a_prompt_reads_its_weights_once_and_long_ones_their_keys_again(tokens):
    """One KV head of 64: what stays is 386 bytes a tile and partition."""
    plain = Plain(4, 1, 64)
    x = columns(torch.zeros(tokens, 6 * 64, dtype=BF16))
    given = x, plain.qkv_w, plain.out_w, *lanes((torch.zeros(tokens, 32),) * 2, 64)
    x, *others = (tensor.to("meta", BF16) for tensor in given)
    program = llama.attention_prefill_kernel.trace(x, None, None, *others, plain.heads, 1)
    weights = {s.id for s in program.inputs[1:3]}
    loads = [view for i in program.instructions for view in i.src if view.storage.id in weights]
    assert sum(view.size for view in loads) == plain.qkv_w.numel() + plain.out_w.numel()


@pytest.mark.parametrize(
    ("tokens", "length", "features", "sizes"),
    [
        (200, 200, 2048, [200]),
        (640, 640, 2048, [256, 256, 128]),
        (640, 640, 4096, [384, 256]),
        (600, 200, 128, [200, 200, 200]),
        (600, 100, 128, [200, 200, 200]),
        (700, 350, 128, [256, 94, 256, 94]),
        (300, 1, 128, [256, 44]),
    ],
)
def test_blocks_of_tokens_in_hbm(tokens, length, features, sizes):
    """Whole sequences, or whole tiles of one; a partition's features of a block are contiguous."""
    blocks = llama.token_blocks(features, tokens, length)
    assert [block.count for block in blocks] == sizes
    rows = torch.arange(tokens * features, dtype=torch.int32).reshape(tokens, features)
    x = llama.in_blocks(rows, length)
    flat, at, each = x.reshape(128, -1), 0, features // 128
    for block in blocks:
        own = flat[:, at : at + each * block.count].reshape(128, each, block.count)
        for p, k, t in ((0, 0, 0), (5, each - 1, block.count - 1), (127, 0, block.count // 2)):
            assert own[p, k, t] == rows[block.start + t, p * each + k]
        at += each * block.count
    assert torch.equal(llama.from_blocks(x, length), rows)


def test_a_sequence_of_more_tokens_than_a_pass_takes_is_refused():
    """400 of 50 * 128 features and 48 heads of 128 would keep 201,114 of 180,224 bytes."""
    with pytest.raises(AssertionError, match="400 new tokens .* at most 384"):
        chunk(48, 128, 128, 400)
