"""A cache whose positions the ranks of one KV head share: text, rows, masks, refusals."""

from __future__ import annotations

import importlib

import pytest
import torch
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.flashdecode.utils import get_cache_size, mask_util
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

SHAPE = dict(
    hidden_size=128,
    intermediate_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=216,
)
PROMPTS = [[5, 9, 2, 44, 17, 3, 61], [8, 1]]


def build(module, folder, **changes):
    """An application of the file, compiled and loaded."""
    model = module.NeuronLlamaForCausalLM
    options = dict(seq_len=48, max_context_length=32, batch_size=2, torch_dtype="float32")
    options.update({"tp_degree": 4, "flash_decoding_enabled": True, **changes})
    neuron_config = model.get_config_cls().get_neuron_config_cls()(**options)
    config = model.get_config_cls()(neuron_config, load_config=load_pretrained_config(str(folder)))
    app = model(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


@pytest.fixture(params=["the SDK's file", "llama.py"])
def module(request):
    return modeling_llama if request.param != "llama.py" else importlib.import_module("llama")


@pytest.mark.parametrize("version", ["0.1", "0.3", "0.4", "0.6"])
@pytest.mark.parametrize("tp_degree", [4, 8])
def test_text_is_that_of_hugging_face(
    module, tiny_llama, generate, reference, monkeypatch, version, tp_degree
):
    if tp_degree == 8 and version != "0.3":
        pytest.skip("one version at the higher degree")
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**SHAPE)
    app = build(module, folder, tp_degree=tp_degree)
    got = generate(app, PROMPTS, 7)  # each member keeps several of the new tokens
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 7)[0].tolist()


def test_each_rank_keeps_its_share(module, tiny_llama, generate):
    """Two ranks of a KV head: half the rows each, and 128 that are reserved."""
    _, folder = tiny_llama(**SHAPE)
    app = build(module, folder)
    generate(app, PROMPTS, 2)
    caches = [m.kv_mgr.past_key_values[0] for m in app.traced_model[0].modules]
    assert [tuple(cache.shape) for cache in caches] == [(2, 1, 24 + 128, 16)] * 4
    even, odd = caches[0][0, 0], caches[1][0, 0]
    assert not torch.equal(even[:4], odd[:4]) and even[:4].any() and odd[:3].any()


def test_several_new_tokens_a_step(tiny_llama, generate, reference, monkeypatch):
    """A prompt beyond the largest prefill goes in by calls of several tokens (0.4 and later)."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")
    _, folder = tiny_llama(**SHAPE)
    app = build(modeling_llama, folder, speculation_length=3, batch_size=1)
    plain = build(modeling_llama, folder, speculation_length=3, batch_size=1, tp_degree=2,
                  flash_decoding_enabled=False)  # fmt: skip
    ids, places = torch.tensor([[7, 8, 9]]), torch.tensor([[7, 8, 9]])
    logits = []
    for one in (app, plain):
        generate(one, PROMPTS[:1], 1)
        mask = (torch.arange(48) < 7).int()[None]
        out = one(input_ids=ids, attention_mask=mask, position_ids=places,
                  seq_ids=torch.zeros(1, dtype=torch.int32))  # fmt: skip
        logits.append(out.logits)
    assert logits[0].shape[1] == 3 and torch.allclose(*logits, atol=1e-4)


def test_masks_show_each_position_once():
    places = torch.tensor([[6], [3]])
    seen = torch.arange(16)[None, None, None] < places[:, None, :, None]
    shown = torch.zeros(2, 16)
    active = []
    for member in range(4):
        new, prior = mask_util(places, torch.tensor([4 + member]), 4, 4 + 128, seen)
        assert torch.equal(prior, mask_util(places, torch.tensor([member]), 4, 4 + 128)[1])
        shown[:, member::4] += prior[:, 0, 0, :4]
        assert not prior[..., 4:].any()
        active.append(new[:, 0, 0, 0])
    assert torch.equal(shown.bool(), seen[:, 0, 0]) and shown.max() == 1
    owners = torch.stack(active, 1).int()
    assert owners.sum(1).eq(1).all() and torch.equal(owners.argmax(1), places[:, 0] % 4)


def test_sizes_of_a_ranks_cache():
    assert get_cache_size(640, 4) == 160 + 128 and get_cache_size(641, 4, is_ctx=True) == 161


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(speculation_length=3), "one new token a step in NxDI 0.1"),
        (dict(padding_side="left"), "padding_side='left' would put"),
    ],
)
def test_what_it_does_not_go_with(tiny_llama, changes, told):
    _, folder = tiny_llama(**SHAPE)
    with pytest.raises(NotImplementedError, match=told):
        build(modeling_llama, folder, **changes)


@pytest.mark.parametrize("tp_degree", [1, 2, 3, 16])
def test_degrees_without_ranks_to_share(tiny_llama, tp_degree):
    _, folder = tiny_llama(**SHAPE)
    with pytest.raises(ValueError, match=f"above the 2 KV heads .* got {tp_degree}; choose"):
        build(importlib.import_module("llama"), folder, tp_degree=tp_degree)


def test_kernels_leave_it_out(tiny_llama):
    _, folder = tiny_llama(**{**SHAPE, "head_dim": 64})
    with pytest.raises(ValueError, match="a cache whose positions several ranks share"):
        build(importlib.import_module("llama"), folder, enable_nki=True)
