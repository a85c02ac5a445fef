"""A prompt whose parts groups of ranks attend to: text, groups, heads, refusals."""

from __future__ import annotations

import importlib

import pytest
import torch
from neuronx_distributed.ranks import Group, RankPool, rank_context
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.attention import attention_process_groups as groups
from neuronx_distributed_inference.modules.attention.utils import (
    get_context_parallel_reordered_tp_mapping,
    get_kv_head_indices_context_parallel_full_tp_decode,
)
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

SHAPE = dict(
    hidden_size=128,
    intermediate_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=216,
)
PROMPTS = [[5, 9, 2, 44, 17, 3, 61, 70, 12, 33, 8, 91, 4, 20, 6, 31, 77], [8, 1]]


@pytest.fixture(autouse=True)
def later_version(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")


def build(module, folder, **changes):
    """An application of the file, compiled and loaded."""
    model = module.NeuronLlamaForCausalLM
    options = dict(seq_len=48, max_context_length=32, batch_size=2, torch_dtype="float32")
    options.update({"tp_degree": 4, "cp_degree": 2, **changes})
    neuron_config = model.get_config_cls().get_neuron_config_cls()(**options)
    config = model.get_config_cls()(neuron_config, load_config=load_pretrained_config(str(folder)))
    app = model(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


@pytest.fixture(params=["the SDK's file"])
def module(request):
    return modeling_llama if request.param != "llama.py" else importlib.import_module("llama")


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
