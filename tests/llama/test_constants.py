"""What attention's kernels make on chip: masks, ones of tokens and marks, bit by bit as NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
import pytest
import torch

from neuron_cpu.core import Kernel
from tests.llama.every import llama

SIZES = 1, 5, 31, 33, 64, 100, 127, 128
LENGTHS = (*SIZES, 129, 300)
# query heads, KV heads and D: several queries a bank, one, heads of 128 (marks in a slot of their
# own), a depth beyond D, two tiles a head
HEADS = (16, 4, 64), (1, 1, 64), (12, 4, 128), (4, 2, 80), (4, 2, 256)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def made(make: Callable[[Any], list[Any]], dtype: torch.dtype) -> list[torch.Tensor]:
    """What a function makes in the type of a kernel's argument, tiles @ SBUF."""

    def kernel(x):
        found = []
        for tile_sb in make(x.dtype):
            found.append(nl.ndarray(tile_sb.shape, tile_sb.dtype, buffer=nl.shared_hbm))
            nl.store(found[-1], tile_sb)
        return tuple(found)

    return list(Kernel(kernel)(torch.zeros(1, 1, dtype=dtype)))


def assert_same(got: torch.Tensor, wanted: np.ndarray, dtype: torch.dtype) -> None:
    """In type and value, and no zero is negative."""
    expected = torch.from_numpy(wanted).to(dtype)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("tokens", SIZES)
def test_causal_mask(tokens: int, dtype: torch.dtype) -> None:
    """What is hidden stays finite where two masks add up, of fp16, too."""
    (got,) = made(lambda of: [llama.causal_mask(tokens, of)], dtype)
    hidden = -3.0e4 if dtype == torch.float16 else -1.5e38
    wanted = np.where(np.tri(tokens, dtype=bool), 0.0, hidden)
    assert_same(got, wanted, dtype)
    assert (got + got).isfinite().all()


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_constants(heads: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    def make(of):
        return list(llama.attention_constants(tokens, llama.HeadShape(*heads), of))

    zero, eye, which, own = made(make, dtype)
    assert_same(zero, np.zeros((128, 1)), torch.float32)
    assert_same(eye, np.eye(128), dtype)
    assert_same(which, np.eye(min(tokens, 128))[:, None].repeat(which.shape[1], 1), dtype)
    assert_same(own, np.concatenate([np.ones((1, 4)), np.eye(4)]), torch.float32)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_new_keys(heads: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    """Marks and ones of every tile, and zeros behind the last key, before any key is there."""
    shape, tiles, last = llama.HeadShape(*heads), -(-tokens // 128), tokens // 128
    slot, row = divmod(shape.depth, 128)

    def make(of):
        new = llama.new_keys(tokens, shape, of, None, hides=False)
        marks_sb = new.k_sb[row : row + llama.AUGMENTED, :, nl.ds(slot * tiles, tiles), :]
        found = [marks_sb, new.v_sb[:, :, :, shape.head_dim : shape.head_dim + 1]]
        if last == tiles:
            return found
        # of a head of 128 or more each whole slot has a last tile of its own
        part = [
            new.k_sb[0 : min(shape.depth, 128), :, s * tiles + last, :]
            for s in range(llama.slots_of(shape))
        ]
        return [*found, *part, new.v_sb[:, last, :, 0 : shape.head_dim]]

    marks, ones, *zeros = made(make, dtype)
    wanted = np.ones((llama.AUGMENTED, shape.kv_heads, tiles, 128))
    wanted[0] = 0.0
    assert_same(marks, wanted, dtype)
    assert_same(ones, np.ones((128, tiles, shape.kv_heads, 1)), dtype)
    for each in zeros:
        assert_same(each, np.zeros(each.shape), dtype)


@pytest.mark.parametrize("window", [1, 2, 100, 127, 128, 129, 255, 256, 257, 300])
def test_window(window: int, dtype: torch.dtype) -> None:
    """Keys that are too old are hidden, tile by tile: a mask where that splits a tile of keys."""
    tiles = []

    def make(of):
        made_of = llama.Window.of(window, of)
        tiles.append(made_of.back)
        tiles.extend(at for at, _ in made_of.masks)
        return [mask_sb for _, mask_sb in made_of.masks]

    masks = made(make, dtype)
    back, *at = tiles
    age = np.arange(128)[:, None] - np.arange(128) + 128 * np.arange(5)[:, None, None]
    old = age >= window
    assert [tile for tile in range(back + 1) if old[tile].any()] == at
    assert old[back + 1 :].all() and not old[back].all()
    hidden = -3.0e4 if dtype == torch.float16 else -1.5e38
    for tile, got in zip(at, masks, strict=True):
        assert_same(got, np.where(old[tile], hidden, 0.0), dtype)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_rows_of_a_sequence(count: int, dtype: torch.dtype) -> None:
    """Which rows of queries are a sequence's, in a decode step."""
    heads = llama.HeadShape(6, 2, 64)

    def make(of):
        qk_sb = nisa.memset((128, heads.q_tiles + heads.stacks, count), 0.0, of)
        cache = llama.CachedSequences(0, count, 0, None, None, None)
        return [llama.decode_queries(qk_sb, cache, heads)[1]]

    (got,) = made(make, dtype)
    assert_same(got, np.kron(np.eye(count), np.ones((1, 6))), dtype)
