"""A cache whose positions the ranks of one KV head share: text, rows, masks, refusals."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.flashdecode.utils import get_cache_size, mask_util
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.sdk.test_submission import build as build_submission

SHAPE = dict(
    hidden_size=128,
    intermediate_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=216,
)
KERNEL_SHAPE = {**SHAPE, "hidden_size": 512, "intermediate_size": 256, "head_dim": 64}
PROMPTS = [[5, 9, 2, 44, 17, 3, 61], [8, 1]]


def build(module, folder, **changes):
    options = {"torch_dtype": "float32", "tp_degree": 4, "flash_decoding_enabled": True, **changes}
    return build_submission(module, folder, **options)


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


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.full)])
def test_several_new_tokens_a_step(tiny_llama, generate, monkeypatch, kernels):
    """A prompt beyond the largest prefill goes in by calls of several tokens (0.4 and later)."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")
    _, folder = tiny_llama(**(KERNEL_SHAPE if kernels else SHAPE))
    module = importlib.import_module("llama_extended") if kernels else modeling_llama
    options = {"enable_nki": True} if kernels else {}
    app = build(module, folder, speculation_length=3, batch_size=1, **options)
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


@pytest.mark.parametrize("version", ["0.1", "0.6"])
def test_keys_that_are_other_ranks_are_refused(tiny_llama, monkeypatch, version):
    """The library fills its caches with what the layer returns, which makes decode steps wrong."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    whole = modeling_llama.NeuronAttentionBase
    monkeypatch.setattr(whole, "_filter_kv_for_flash_decoding", lambda self, K, V, q_len: (K, V))
    _, folder = tiny_llama(**SHAPE)
    with pytest.raises(ValueError, match="prompt of 32 positions brings keys of 32 .* expected 16"):
        build(modeling_llama, folder)


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
        build(importlib.import_module("llama_extended"), folder, tp_degree=tp_degree)


@pytest.mark.parametrize(
    ("tp_degree", "changes"),
    [
        (4, dict(seq_len=47, max_context_length=31)),
        pytest.param(8, dict(seq_len=49, batch_size=3), marks=pytest.mark.full),
    ],
)
def test_text_with_kernels_is_that_of_hugging_face(
    tiny_llama, generate, reference, tp_degree, changes
):
    model, folder = tiny_llama(**KERNEL_SHAPE)
    llama = importlib.import_module("llama_extended")
    app = build(llama, folder, tp_degree=tp_degree, enable_nki=True, **changes)
    prompts = [*PROMPTS, [3, 90, 41]][: changes.get("batch_size", 2)]
    got = generate(app, prompts, 9)
    for row, prompt in enumerate(prompts):
        assert got[row].tolist() == reference(model, prompt, 9)[0].tolist()


def test_decode_is_in_kernels(tiny_llama):
    """A step's graph has no product of PyTorch's."""
    _, folder = tiny_llama(**KERNEL_SHAPE)
    build(importlib.import_module("llama_extended"), folder, enable_nki=True)
    found = json.loads((folder / "compiled" / "operators.json").read_text())
    step = found["graphs"][-1]
    ran = [each["name"] for each in step["operators"] if each["ran"] == "kernel"]
    names = "attention_projection", "attention_share", "attention_output", "swiglu_mlp", "linear"
    assert set(ran) == {f"{name}_kernel" for name in names}
    assert step["macs"] == step["nki_macs"]


FAMILY = {
    "heads of 80": LlamaConfig(**KERNEL_SHAPE | {"head_dim": 80}),
    "heads of 128": LlamaConfig(**KERNEL_SHAPE | {"head_dim": 128}),
    "bias": Qwen2Config(**KERNEL_SHAPE),
    "head norms": Qwen3Config(**KERNEL_SHAPE),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILY)
def test_the_family_with_kernels(name, tmp_path, generate, reference):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILY[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "checkpoint")
    app = build(importlib.import_module("llama_extended"), tmp_path / "checkpoint", enable_nki=True)
    got = generate(app, PROMPTS, 6)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 6)[0].tolist()


@pytest.mark.full
def test_a_cache_in_fp8_with_kernels(tiny_llama, generate):
    """As the same in PyTorch: what is cached is rounded alike."""
    _, folder = tiny_llama(**KERNEL_SHAPE)
    options = dict(return_dict_in_generate=True, output_logits=True)
    found = []
    for kernels in (False, True):
        llama = importlib.import_module("llama_extended")
        app = build(llama, folder, kv_cache_quant=True, enable_nki=kernels)
        found.append(torch.cat(generate(app, PROMPTS, 6, **options).logits))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_windows_are_left_out(tmp_path, tiny_llama):
    """They count positions, of which a rank has every g-th."""
    window = MistralConfig(**SHAPE, sliding_window=8)
    AutoModelForCausalLM.from_config(window).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="sliding_window 8 counts rows of a cache"):
        build(importlib.import_module("llama_extended"), tmp_path / "checkpoint")


def test_more_queries_than_a_kernel_takes(tiny_llama, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")
    _, folder = tiny_llama(**KERNEL_SHAPE)
    with pytest.raises(Exception, match="at most 128 queries .* got 160; choose a .* at most 32"):
        build(importlib.import_module("llama_extended"), folder, speculation_length=40, seq_len=64,
              enable_nki=True)  # fmt: skip
