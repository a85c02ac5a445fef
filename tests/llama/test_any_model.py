"""Models, batches and lengths beyond those of test_shapes.py: within SBUF and PSUM, or refused."""

import pytest
import torch

from tests.crossed import full
from tests.llama.every import llama
from tests.llama.test_head_sizes import Layer as Exact
from tests.llama.test_head_sizes import assert_equal
from tests.llama.test_kernels import trace_with
from tests.llama.test_shapes import Layer, Model


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


def test_new_values_that_come_back_from_hbm(monkeypatch):
    """Of as many sequences as have no room for a tile each."""
    trace_with(monkeypatch, "VALUE_BYTES", 0)
    heads = llama.HeadShape(4, 2, 64)
    layer = Exact(heads, 3, 5)
    keys, values, bias = layer.caches(40)
    triangle = torch.ones((3, 5, 5), dtype=torch.bool).tril()
    given = *llama.cache_in_runs(keys, values, bias), llama._mask_bias(triangle, torch.float32)
    assert_equal("attention_chunk_kernel", *layer.inputs, *given, layer.heads, *layer.own)


LLAMA_2_7B = Model(4096, 32, 32, 128, 11008, 32000)  # a KV head for each query head
SMOL_1_7B = Model(2048, 32, 32, 64, 8192, 49152)


@pytest.mark.parametrize(
    ("model", "degree", "phase", "sizes"),
    [
        full(Model(128, 32, 8, 64, 8192, 128256), 1, "head", (128,)),  # rows would take 250 KiB
        full(Model(640, 32, 4, 128, 2560, 32000), 1, "chunk", (8, 128, 1000)),
        (LLAMA_2_7B, 2, "chunk", (1, 1, 2048)),  # 196 KiB of a sequence's keys
        full(LLAMA_2_7B, 1, "chunk", (4, 1, 640)),
        full("Llama-3.1-8B", 1, "chunk", (128, 1, 64)),  # new values in 256 KiB
        full(LLAMA_2_7B, 1, "prefill", (1, 1024)),
        full(Model(3200, 32, 32, 100, 8640, 32000), 1, "prefill", (2, 1024)),  # OpenLlama-3B
        *(full(model, 1, "chunk", (1, 0, 1024)) for model in (LLAMA_2_7B, SMOL_1_7B)),
    ],
)
def test_what_has_no_room_at_once_traces(model, degree, phase, sizes):
    """Of a chunk 0 stands for the most tokens that the kernels take."""
    layer = Layer(model, degree, "meta")
    most = llama.chunk_tokens(layer.model.hidden, layer.heads, 2)
    name, args, macs = getattr(layer, phase)(*(most if size == 0 else size for size in sizes))
    assert getattr(llama, name).trace(*args).macs >= macs


def test_prompts_over_keys_that_come_back_from_hbm(monkeypatch):
    """A block at a time, one set of heads after another, a tile of keys at a time."""
    monkeypatch.setattr(llama, "RESIDENT_BYTES", 0)
    trace_with(monkeypatch, "SCRATCH_BYTES", 0)
    layer = Exact(llama.HeadShape(6, 6, 32), 2, 600)
    assert_equal("attention_prefill_kernel", *layer.inputs, layer.heads, 2, None, *layer.own)
