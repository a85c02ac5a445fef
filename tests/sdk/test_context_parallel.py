"""A prompt whose parts groups of ranks attend to: text, groups, heads, refusals."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import _gather_along_dim
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.attention import attention_process_groups as groups
from neuronx_distributed_inference.modules.attention.utils import (
    get_context_parallel_reordered_tp_mapping,
    get_kv_head_indices_context_parallel_full_tp_decode,
)
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from neuron_cpu.runtime.ranks import Group, RankPool, rank_context
from tests.sdk.test_flash_decoding import KERNEL_SHAPE, SHAPE
from tests.sdk.test_submission import build as build_submission

PROMPTS = [[5, 9, 2, 44, 17, 3, 61, 70, 12, 33, 8, 91, 4, 20, 6, 31, 77], [8, 1]]


@pytest.fixture(autouse=True)
def later_version(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")


def build(module, folder, **changes):
    options = {"torch_dtype": "float32", "tp_degree": 4, "cp_degree": 2, **changes}
    return build_submission(module, folder, **options)


@pytest.mark.parametrize(
    ("tp_degree", "cp_degree", "changes"),
    [
        (4, 2, dict()),
        (8, 4, dict()),
        (8, 8, dict(num_key_value_heads=8)),  # every rank decodes with another head
        pytest.param(8, 2, dict(num_key_value_heads=4), marks=pytest.mark.full),
        pytest.param(2, 2, dict(num_key_value_heads=1), marks=pytest.mark.full),
    ],
)
def test_text_is_that_of_hugging_face(
    module, tiny_llama, generate, reference, tp_degree, cp_degree, changes
):
    model, folder = tiny_llama(**{**SHAPE, **changes})
    app = build(module, folder, tp_degree=tp_degree, cp_degree=cp_degree)
    got = generate(app, PROMPTS, 7)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 7)[0].tolist()


def test_groups_of_ranks():
    """Those of a part split the heads, those with the same place in it have the same ones."""
    assert groups.get_tp_cp_group_mesh(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups.get_cp_group_mesh(8, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    config = SimpleNamespace(neuron_config=SimpleNamespace(cp_degree=4))
    pool = RankPool(8)

    def meet():
        groups.init_context_parallel_attention_process_groups(config)
        both = (
            groups.get_context_parallel_attention_tp_group(),
            (groups.get_context_parallel_attention_cp_group()),
        )
        own = parallel_state.get_tensor_model_parallel_group().rank()
        mine = torch.tensor([own])
        return [_gather_along_dim(mine, 0, group).tolist() for group in both]

    met = pool.run([meet] * 8)
    pool.close()
    assert met[5] == [[4, 5], [1, 3, 5, 7]] and met[2] == [[2, 3], [0, 2, 4, 6]]


def test_groups_that_nobody_made():
    with rank_context(Group(0, 2)), pytest.raises(AssertionError, match="expected init_context"):
        groups.get_context_parallel_attention_cp_group()


@pytest.mark.parametrize(
    ("kv", "tp", "cp"), [(4, 4, 2), (2, 8, 2), (8, 8, 8), (2, 8, 8), (8, 16, 4)]
)
def test_a_rank_decodes_with_a_head_of_its_prompt(kv, tp, cp):
    size = tp // cp
    order = get_context_parallel_reordered_tp_mapping(tp, cp)
    kept = get_kv_head_indices_context_parallel_full_tp_decode(kv, tp, cp)
    assert sorted(order) == list(range(tp))
    of_prompt = [[head * kv // max(kv, size) for head in range(max(kv, size))]] * cp
    for rank in range(tp):
        place, each = rank % size, max(kv, size) // size
        heads = of_prompt[rank // size][place * each : (place + 1) * each]
        assert heads[kept[rank]] == order[rank] * kv // tp


def test_fewer_ranks_than_heads():
    with pytest.raises(AssertionError, match="8 KV heads needs as many ranks"):
        get_kv_head_indices_context_parallel_full_tp_decode(8, 4, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(cp_degree=3), "expected a divisor of tp_degree 4"),
        (dict(cp_degree=0), "expected a divisor of tp_degree 4"),
        (dict(sequence_parallel_enabled=True), "meets sequence_parallel_enabled|expected no seq"),
        (dict(flash_decoding_enabled=True), "meets flash_decoding_enabled|expected no flash"),
        (dict(tp_degree=8, cp_degree=2, num_key_value_heads=8, num_attention_heads=16), None),
        (dict(tp_degree=16, cp_degree=2), "divides the 8 query heads, .* got 16 ranks in groups"),
        (dict(tp_degree=12, cp_degree=2), "divides the 8 query heads, .* got 12 ranks in groups"),
        (dict(max_context_length=31), "31 tokens, expected a multiple of cp_degree 2"),
    ],
)
def test_what_it_does_not_go_with(module, tiny_llama, changes, told):
    heads = {name: changes.pop(name) for name in list(changes) if name.startswith("num_")}
    shape = {"intermediate_size": 96, "vocab_size": 240, "hidden_size": 96 * 2, "head_dim": 16}
    _, folder = tiny_llama(**{**SHAPE, **shape, **heads})
    if told is None:
        build(module, folder, **changes)
        return
    with pytest.raises(Exception, match=told):
        build(module, folder, **changes)


def test_prompts_are_in_kernels(tiny_llama):
    """The graph of a prompt has no product of PyTorch's; ranks meet five times a layer."""
    _, folder = tiny_llama(**KERNEL_SHAPE)
    build(importlib.import_module("llama_extended"), folder, enable_nki=True)
    found = json.loads((folder / "compiled" / "operators.json").read_text())
    prompt, step = found["graphs"]
    ran = [each["name"] for each in prompt["operators"] if each["ran"] == "kernel"]
    names = "attention_projection", "attention_share", "attention_output", "swiglu_mlp", "linear"
    assert set(ran) == {f"{name}_kernel" for name in names}
    assert all(graph["macs"] == graph["nki_macs"] for graph in (prompt, step))
    assert "attention_decode_kernel" in [each["name"] for each in step["operators"]]


@pytest.mark.full
def test_parts_of_several_spans(tiny_llama, generate):
    """Queries beyond those that share a mask: logits as without parts."""
    _, folder = tiny_llama(**{**KERNEL_SHAPE, "num_hidden_layers": 1})
    prompt = [torch.arange(1150).mul(7).remainder(200).tolist()]
    options = dict(return_dict_in_generate=True, output_logits=True)
    sizes = dict(batch_size=1, seq_len=1200, max_context_length=1200, tp_degree=2)
    found = []
    for cp_degree in (1, 2):
        llama = importlib.import_module("llama_extended")
        app = build(llama, folder, enable_nki=True, cp_degree=cp_degree, **sizes)
        found.append(torch.cat(generate(app, prompt, 3, **options).logits))
    torch.testing.assert_close(*found, rtol=0, atol=5e-4)


def test_left_padding(module, tiny_llama, generate, reference):
    """In PyTorch alone: in kernels a part's own padding would count."""
    model, folder = tiny_llama(**KERNEL_SHAPE)
    app = build(module, folder, padding_side="left")
    got = generate(app, PROMPTS, 4)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 4)[0].tolist()
    if module is not modeling_llama:
        with pytest.raises(ValueError, match="do not cover left padding in parts of a prompt"):
            build(module, folder, padding_side="left", enable_nki=True)
        _, folder = tiny_llama(**{**KERNEL_SHAPE, "head_dim": 256})
        with pytest.raises(ValueError, match="do not cover parts of prompts of heads of 256"):
            build(module, folder, enable_nki=True)


def test_layers_that_know_nothing_of_it():
    """A prompt's keys of the heads of decode steps are told of, and not cut from."""
    neuron_config = modeling_llama.LlamaInferenceConfig.get_neuron_config_cls()(
        tp_degree=4, cp_degree=2, seq_len=8, torch_dtype="float32"
    )
    config = SimpleNamespace(
        neuron_config=neuron_config, num_cores_per_group=1, num_hidden_layers=1,
        num_attention_heads=4, hidden_size=8,
    )  # fmt: skip
    rank, places = SimpleNamespace(get_rank=lambda: torch.tensor([3])), torch.arange(4)[None]
    with rank_context(Group(3, 4)):
        manager = KVCacheManager(config, num_kv_head=4, global_rank=rank)
    new = torch.arange(2.0)[None, :, None, None].expand(1, 2, 4, 2)
    ids = torch.zeros(1, dtype=torch.int32)
    keys, _ = manager.update_kv_by_layer_id(0, True, ids, places, [new, new], 8)
    assert keys[:, :, :4].eq(1).all() and keys[:, :, 4:].eq(0).all()
    with pytest.raises(ValueError, match="keys of 1 heads under cp_degree 2, expected 2"):
        manager.update_kv_by_layer_id(0, True, ids, places, [new[:, :1]] * 2, 8)
    with pytest.raises(AssertionError, match="expected global_rank"):
        KVCacheManager(config, num_kv_head=4)


def test_versions_without_it_have_no_such_field(tiny_llama, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.3")
    config = modeling_llama.LlamaInferenceConfig.get_neuron_config_cls()(tp_degree=4, cp_degree=2)
    with pytest.raises(AttributeError, match="expected only in 0.4 or later"):
        _ = config.cp_degree


@pytest.mark.parametrize(
    ("tp_degree", "cp_degree", "shape", "changes"),
    [
        (4, 2, dict(), dict()),
        pytest.param(8, 4, dict(), dict(batch_size=3), marks=pytest.mark.full),
        pytest.param(8, 8, dict(num_key_value_heads=8), dict(), marks=pytest.mark.full),
        pytest.param(
            4, 2, dict(num_key_value_heads=4, head_dim=128), dict(max_context_length=26),
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_text_with_kernels_is_that_of_hugging_face(
    tiny_llama, generate, reference, tp_degree, cp_degree, shape, changes
):
    model, folder = tiny_llama(**{**KERNEL_SHAPE, **shape})
    changes = {"tp_degree": tp_degree, "cp_degree": cp_degree, **changes}
    app = build(importlib.import_module("llama_extended"), folder, enable_nki=True, **changes)
    prompts = [*PROMPTS, [3, 90, 41]][: changes.get("batch_size", 2)]
    got = generate(app, prompts, 7)
    for row, prompt in enumerate(prompts):
        assert got[row].tolist() == reference(model, prompt, 7)[0].tolist()


FAMILY = {
    "heads of 24": LlamaConfig(**KERNEL_SHAPE | {"head_dim": 24}),
    "bias": Qwen2Config(**KERNEL_SHAPE),
    "head norms": Qwen3Config(**KERNEL_SHAPE),
    "window": MistralConfig(**KERNEL_SHAPE, sliding_window=5),
    "biases": LlamaConfig(**KERNEL_SHAPE, attention_bias=True),
}


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.4", "0.6"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_family(name, version, tmp_path, generate, reference, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILY[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "checkpoint")
    llama = importlib.import_module("llama_extended")
    for kernels in (False, True):
        if kernels and name in ("window", "biases"):
            with pytest.raises(ValueError, match="do not cover"):
                build(llama, tmp_path / "checkpoint", enable_nki=True)
            continue
        got = generate(build(llama, tmp_path / "checkpoint", enable_nki=kernels), PROMPTS, 6)
        for row, prompt in enumerate(PROMPTS):
            assert got[row].tolist() == reference(model, prompt, 6)[0].tolist()
