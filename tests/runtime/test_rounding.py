"""Where the baseline rounds: at operands of products, not behind every operator."""

import pytest
import torch

from neuron_cpu.runtime import rounding

BF16 = torch.bfloat16


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def graph():
    """One run of a graph that rounds as a compiled one."""
    return rounding.FusedRounding()


@pytest.mark.parametrize("inference", [False, True])
def test_a_chain_behind_a_product_stays_in_fp32_until_the_next(inference):
    x, w, y, v = values(8, 64), values(32, 64, seed=1), values(8, 32, seed=2), values(4, 32, seed=3)
    with torch.inference_mode(inference), graph():
        hidden = torch.nn.functional.linear(x, w)
        out = torch.nn.functional.linear(torch.nn.functional.silu(hidden) * y + y, v)
    wide = x.float() @ w.float().T
    chain = torch.nn.functional.silu(wide) * y.float() + y.float()
    assert hidden.dtype == out.dtype == BF16
    assert torch.equal(out, (chain.to(BF16).float() @ v.float().T).to(BF16))
    rounded = torch.nn.functional.linear(torch.nn.functional.silu(x @ w.T) * y + y, v)
    assert not torch.equal(out, rounded)


def test_a_cast_to_fp32_gets_what_was_not_rounded():
    x, y = values(4, 16), values(4, 16, seed=1)
    with graph():
        wide = (x * y).transpose(0, 1).reshape(8, 8).float()
        back = wide.to(BF16) + 1
    assert torch.equal(wide, (x.float() * y.float()).T.reshape(8, 8))
    assert torch.equal(back, (wide + 1).to(BF16))


def test_what_is_written_into_memory_is_rounded():
    x, y = values(4, 16), values(4, 16, seed=1)
    with graph():
        product, cache = x * y, torch.zeros(4, 16, dtype=BF16)
        cache.copy_(product)
        read = cache.float()
        product.mul_(2)  # what stood beside it is out of date
        later = product.float()
    assert torch.equal(read, (x.float() * y.float()).to(BF16).float())
    assert torch.equal(later, 2 * read)


def test_what_travels_between_ranks_is_rounded():
    x, y = values(4, 16), values(4, 16, seed=1)
    with graph():
        product = x * y
        wide, moved = product.float(), rounding.settled(product).float()
    assert torch.equal(moved, (x * y).float()) and not torch.equal(moved, wide)


@pytest.mark.parametrize(
    ("assumed", "kept"), [("fused", (1, 1)), ("products", (1, 0)), ("elementwise", (0, 1))]
)
def test_what_a_compiler_leaves_in_fp32_can_be_chosen(assumed, kept):
    x, w, y = values(4, 16), values(16, 16, seed=1), values(4, 16, seed=2)
    with rounding.fused(assumed), rounding.of_graph():
        product, chain = (x @ w).float(), (x * y).float()
    exact = x.float() @ w.float(), x.float() * y.float()
    for found, wide, stays in zip((product, chain), exact, kept):
        assert torch.equal(found, wide if stays else wide.to(BF16).float())
