"""Models, batches and lengths beyond those of test_shapes.py: within SBUF and PSUM, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.llama.every import llama
from tests.llama.test_head_sizes import Layer as Exact
from tests.llama.test_head_sizes import assert_equal
from tests.llama.test_kernels import trace_with
from tests.llama.test_shapes import Layer, Model, check_traced


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


@pytest.mark.full
@pytest.mark.parametrize("rows", [64, 128])
def test_rows_of_the_head_that_have_no_room_at_once_trace(rows: int) -> None:
    """1002 tiles of 128 logits a row: 128 rows would take 250 KiB."""
    hidden = 2048 if rows == 64 else 128
    model = Model(hidden, 32, 8, 64, 8192, 128256)
    check_traced(*Layer(model, 1, "meta").head(rows))


def test_sequences_whose_cached_keys_have_no_room_at_once_trace() -> None:
    """Keys of each of eight would stay, in 24 KiB."""
    model = Model(640, 32, 4, 128, 2560, 32000)
    name, args, macs = Layer(model, 1, "meta").chunk(8, 128, 1000)
    assert getattr(llama, name).trace(*args).macs >= macs


@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 256)])
def test_new_values_that_come_back_from_hbm(heads, monkeypatch):
    """Of as many sequences as have no room for a tile each."""
    trace_with(monkeypatch, "VALUE_BYTES", 0)
    monkeypatch.setattr(llama, "CACHE_BYTES", 0)  # sequences one by one
    layer = Exact(llama.HeadShape(*heads), 3, 1)
    keys, values, bias = layer.caches(40)
    if heads[2] < 256:  # else the kernel of several tokens takes one, too
        cache = llama.cache_in_runs(keys, values, bias, 128 // keys.shape[1])
        assert_equal("attention_decode_kernel", *layer.inputs, *cache, layer.heads, *layer.own)
    layer = Exact(llama.HeadShape(*heads), 3, 5)
    keys, values, bias = layer.caches(40)
    triangle = torch.ones((3, 5, 5), dtype=torch.bool).tril()
    given = *llama.cache_in_runs(keys, values, bias), llama._mask_bias(triangle, torch.float32)
    assert_equal("attention_chunk_kernel", *layer.inputs, *given, layer.heads, *layer.own)


LLAMA_2_7B = Model(4096, 32, 32, 128, 11008, 32000)


@pytest.mark.parametrize(
    ("model", "degree", "batch", "past"),
    [
        (LLAMA_2_7B, 2, 1, 2048),  # a KV head for each query head: 196 KiB of a sequence's keys
        (LLAMA_2_7B, 1, 4, 640),
        ("Llama-3.1-8B", 1, 128, 64),  # new values in 256 KiB
        pytest.param(Model(4096, 28, 4, 256, 11008, 32000), 1, 128, 2048, marks=pytest.mark.full),
    ],
)
def test_a_step_over_any_cache_traces(model, degree, batch, past):
    layer = Layer(model, degree, "meta")
    if llama.is_decode_step(batch, past, layer.heads, 2, named=False):
        name, args, macs = layer.decode(batch, past)
    else:
        name, args, macs = layer.chunk(batch, 1, past)
    assert getattr(llama, name).trace(*args).macs >= macs


@pytest.mark.parametrize("named", [False, True])
def test_a_step_of_many_kv_heads_takes_the_kernel_of_blocks(named):
    """Of Llama-2-7B at degree 1 beyond 512 keys, of Llama-3.2-1B at degree 2 never."""
    many, few = llama.HeadShape(32, 32, 128), llama.HeadShape(16, 4, 64)
    assert not llama.is_decode_step(1, 2048, many, 2, named)
    assert llama.is_decode_step(1, 2048, few, 2, named)
    assert not llama.is_decode_step(1, 2049, few, 2, named)


def test_prompts_over_keys_that_come_back_from_hbm(monkeypatch):
    """A block at a time, one set of heads after another, a tile of keys at a time."""
    monkeypatch.setattr(llama, "RESIDENT_BYTES", 0)
    trace_with(monkeypatch, "SCRATCH_BYTES", 0)
    layer = Exact(llama.HeadShape(6, 6, 32), 2, 600)
    assert_equal("attention_prefill_kernel", *layer.inputs, layer.heads, 2, None, *layer.own)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "batch", "length"),
    [
        (LLAMA_2_7B, 1, 1024),
        (LLAMA_2_7B, 2, 640),
        (Model(3200, 32, 32, 100, 8640, 32000), 2, 1024),  # OpenLlama-3B
        (Model(2048, 32, 32, 64, 8192, 49152), 2, 1024),  # SmolLM-1.7B
        (Model(3072, 8, 8, 256, 12288, 32000), 1, 1536),
    ],
)
def test_prompts_of_many_kv_heads_trace(model, batch, length):
    name, args, macs = Layer(model, 1, "meta").prefill(batch, length)
    assert getattr(llama, name).trace(*args).macs >= macs


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [LLAMA_2_7B, Model(2048, 32, 32, 64, 8192, 49152), Model(3072, 8, 8, 256, 12288, 32000)],
)
def test_the_longest_chunk_of_many_kv_heads_traces(model):
    layer = Layer(model, 1, "meta")
    most = llama.chunk_tokens(model.hidden, layer.heads, 2)
    name, args, macs = layer.chunk(1, most, 1024)
    assert getattr(llama, name).trace(*args).macs >= macs


@pytest.mark.full
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([64, 576, 896, 1920, 2048, 2176, 2560, 3072, 4096]),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (7, 1), (8, 2), (16, 16), (32, 8), (32, 32)]),
    st.sampled_from([16, 32, 64, 80, 96, 100, 128, 256]),
    st.sampled_from([(1, 2), (1, 129), (2, 77), (1, 640), (3, 256), (2, 512)]),
    st.sampled_from([1, 100, 640, 1024, 2048, 4096]),
)
def test_any_layer_traces(hidden, heads, head_dim, sizes, past):
    """Within SBUF and PSUM: a prompt, the step behind it, and five tokens of a draft."""
    layer = Layer(Model(hidden, *heads, head_dim, 2 * hidden, 1000), 1, "meta")
    batch, length = sizes
    step = llama.is_decode_step(batch, past, layer.heads, 2, named=False)
    for name, args, macs in (
        layer.prefill(batch, length),
        layer.decode(batch, past) if step else layer.chunk(batch, 1, past),
        layer.chunk(batch, 5, past),
        layer.mlp(batch * length),
    ):
        assert getattr(llama, name).trace(*args).macs >= macs
