"""Medusa: a tree of guesses by heads of the model's own, checked in one call."""

from __future__ import annotations

import importlib

import pytest
import torch
from neuronx_distributed.utils.medusa_utils import generate_medusa_buffers
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from harness.session.speculation import Tree
from neuron_cpu.errors import CheckpointError
from tests.sdk.test_fused_speculation import HEADS_OF_64

PROMPT = [7, 3, 9, 11, 200, 7, 3, 9]
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [3]]
HEADS, LENGTH = 3, 32


def write_heads(folder, model, seed=None):
    """Heads that guess a token again, as nothing is learnt; random ones for a seed."""
    state, size = {}, model.config.hidden_size
    generator = torch.Generator().manual_seed(seed or 0)
    for head in range(HEADS):
        linear = torch.zeros(size, size)
        if seed is not None:
            linear = torch.randn((size, size), generator=generator) / 4
        state[f"medusa_head_{head}.0.linear.weight"] = linear
        state[f"medusa_head_{head}.0.linear.bias"] = torch.zeros(size)
        state[f"medusa_head_{head}.1.weight"] = model.lm_head.weight.detach().clone()
    torch.save(state, folder / "medusa_heads.pt")


def build(folder, module=modeling_llama, **more):
    model_cls = module.NeuronLlamaForCausalLM
    config_cls = model_cls.get_config_cls()
    options = dict(
        seq_len=LENGTH,
        max_context_length=24,
        torch_dtype="float32",
        is_medusa=True,
        num_medusa_heads=HEADS,
        medusa_speculation_length=len(TREE) + 1,
        medusa_tree=TREE,
        on_device_sampling_config={"do_sample": True, "top_k": 10},
    )
    neuron_config = config_cls.get_neuron_config_cls()(**{**options, **more})
    config = config_cls(neuron_config, load_config=load_pretrained_config(str(folder)))
    app = model_cls(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


def generated(app, steps):
    calls = []
    app.medusa_speculation_model.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([PROMPT])
    text = Tree(app).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=steps, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return text[0, len(PROMPT) :].tolist(), len(calls)


QUICK = {("0.6", "nki", 1)}
CASES = [(v, kind, tp) for v in VERSIONS for kind in ("sdk", "torch", "nki") for tp in (1, 2)]


@pytest.mark.parametrize(
    ("version", "kind", "tp_degree"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.full) for c in CASES],
)
def test_the_text_is_the_greedy_one(tiny_llama, reference, monkeypatch, version, kind, tp_degree):
    """To the last place of the cache, by heads that know nothing and by random ones."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**HEADS_OF_64)
    steps = LENGTH - len(PROMPT)
    expected = reference(model, PROMPT, steps)[0].tolist()
    more = {"tp_degree": tp_degree}
    if kind != "sdk":
        more |= {"module": importlib.import_module("llama_extended"), "enable_nki": kind == "nki"}
    for seed in (None, 1):
        write_heads(folder, model, seed)
        app = build(folder, **more)
        text, calls = generated(app, steps)
        assert text == expected
        assert calls < steps
    assert hasattr(app, "token_generation_model") == (version == "0.1")


@pytest.mark.parametrize("module", [modeling_llama, importlib.import_module("llama_extended")])
def test_the_model_says_how_long_a_tree_is(tiny_llama, monkeypatch, module):
    """The base class reads `medusa_speculation_length` of the model that it is the base of."""
    model, folder = tiny_llama(**HEADS_OF_64)
    write_heads(folder, model)
    set_before = module.NeuronLlamaModel.setup_attr_for_model

    def forget(self, config):
        set_before(self, config)
        del self.medusa_speculation_length

    monkeypatch.setattr(module.NeuronLlamaModel, "setup_attr_for_model", forget)
    with pytest.raises(AttributeError, match="no attribute 'medusa_speculation_length'"):
        build(folder, module)


def test_the_buffers_of_a_small_tree_by_hand():
    made = generate_medusa_buffers([[0, 1], [0], [2], [0, 1, 0]])
    assert made["medusa_position_ids"].tolist() == [0, 1, 1, 2, 3]
    assert made["tree_indices"].tolist() == [0, 1, 3, 12, 21]
    assert made["retrieve_indices"].tolist() == [[0, 2, -1, -1], [0, 1, 3, 4]]
    assert made["medusa_attn_mask"].tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    with pytest.raises(ValueError, match=r"path \[1, 0\], expected its beginning \[1\]"):
        generate_medusa_buffers([[0], [1, 0]])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_medusa_heads": 0}, "num_medusa_heads of at least 1, got 0"),
        ({"medusa_speculation_length": 1}, "medusa_speculation_length of at least 2, got 1"),
        ({"on_device_sampling_config": None}, "top_k of at least 10, got 0"),
        ({"on_device_sampling_config": {"top_k": 9}}, "top_k of at least 10, got 9"),
        ({"batch_size": 2}, "a batch of one, got 2"),
        ({"quantized": True, "quantized_checkpoints_path": "q"}, "not quantised.* got quantized"),
        ({"padding_side": "left"}, "right padding"),
        ({"max_context_length": 8}, "medusa_speculation_length 8 is a context-encoding bucket"),
    ],
)
def test_settings_that_no_medusa_graph_has_are_refused(tiny_llama, changes, told):
    _, folder = tiny_llama()
    with pytest.raises(ValueError, match=told):
        build(folder, **changes)


def test_heads_and_trees_that_do_not_fit_are_refused(tiny_llama):
    model, folder = tiny_llama()
    with pytest.raises(FileNotFoundError, match="holds no medusa_heads.pt"):
        build(folder)
    write_heads(folder, model)
    with pytest.raises(CheckpointError, match=r"expected medusa_head_3.0.linear.weight .*got none"):
        build(folder, num_medusa_heads=4)
    heads = torch.load(folder / "medusa_heads.pt")
    torch.save(heads | {"medusa_head_1.1.weight": torch.zeros(210, 48)}, folder / "medusa_heads.pt")
    with pytest.raises(CheckpointError, match=r"shape \(211, 48\), got \(210, 48\)"):
        build(folder)
    write_heads(folder, model)
    with pytest.raises(ValueError, match="A decode call has 8 tokens a row"):
        generated(build(folder, medusa_speculation_length=9), 4)
