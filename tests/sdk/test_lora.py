"""Adapters side by side in one batch, each as peft answers with it on Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.modules.lora_serving import LoraServingConfig
from safetensors.torch import load_file, save_file

from neuron_cpu.errors import CheckpointError
from tests.adapters import ATTENTION, MLP, as_peft, continued, write_adapter

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [9, 8, 150, 31, 77]]
STEPS = 6


@pytest.fixture
def serving(tiny_llama, application, monkeypatch, tmp_path):
    """Factory of (model, folder, application) with adapters of these folders by id."""

    def make(adapters, version="0.6", lora=None, shape=None, **options):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        model, folder = tiny_llama(**(shape or {}))
        made = {
            name: write_adapter(tmp_path / name, model, seed=seed, **adapter)
            for seed, (name, adapter) in enumerate(adapters.items(), 1)
        }
        config = {"max_loras": len(made), "lora_ckpt_paths": {k: str(v) for k, v in made.items()}}
        app = application(folder, lora_config=config | (lora or {}), **options)
        return model, made, app

    return make


def assert_each_as_peft(model, made, app, generate, reference, ids):
    output = generate(
        app, PROMPTS, STEPS, adapter_ids=ids, return_dict_in_generate=True, output_logits=True
    )
    width = max(map(len, PROMPTS))
    texts = []
    for row, (prompt, name) in enumerate(zip(PROMPTS, ids, strict=True)):
        alone = model if name == "0" else as_peft(model, made[name])
        tokens, logits = reference(alone, prompt, STEPS)
        got = torch.stack([step[row] for step in output.logits])
        assert (got - logits).abs().max() / logits.abs().max() < 1e-4
        assert output.sequences[row, width:].tolist() == tokens.tolist()
        texts.append((reference(model, prompt, STEPS)[0].tolist() == tokens.tolist(), name))
    assert all(same == (name == "0") for same, name in texts)  # adapters change the answers


@pytest.mark.parametrize(("version", "tp_degree"), [("0.6", 1), ("0.6", 2)])
def test_a_batch_of_three_adapters(serving, generate, reference, version, tp_degree):
    """Ranks 4 and 20: one is padded to the other, which raises max_lora_rank; one for attention
    only."""
    adapters = {"one": {"rank": 4}, "two": {"rank": 20, "targets": ATTENTION}}
    model, made, app = serving(adapters, version, batch_size=3, tp_degree=tp_degree)
    assert app.neuron_config.lora_config.max_lora_rank == 20
    assert app.neuron_config.lora_config.target_modules == sorted((*ATTENTION, *MLP))
    assert_each_as_peft(model, made, app, generate, reference, ["two", "0", "one"])


@pytest.mark.parametrize(
    ("adapter", "lora"),
    [({"use_rslora": True}, {}), ({"lora_alpha": 0}, {}), ({}, {"lora_memory_transpose": False})],
    ids=["rank-stabilised", "without alpha", "not transposed"],
)
def test_scales_and_layouts(serving, generate, reference, adapter, lora):
    model, made, app = serving({"one": adapter}, lora=lora, batch_size=3, tp_degree=2)
    if "lora_alpha" in adapter:  # NxDI's scale is 1 then, peft's 0
        path = made["one"] / "adapter_config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"lora_alpha": content["r"]}))
    assert_each_as_peft(model, made, app, generate, reference, ["one", "0", "one"])


def test_adapters_follow_their_requests_through_continuous_batching(serving, reference):
    """Fewer rows than the batch, in another order than their lines."""
    model, made, app = serving(
        {"one": {}, "two": {}}, batch_size=3, is_continuous_batching=True, ctx_batch_size=1
    )
    names = {2: "two", 0: "one"}
    answers = {line: tokens for line, tokens, _ in continued(app, names, PROMPTS, 4)}
    for (line, name), prompt in zip(names.items(), PROMPTS):
        expected = reference(as_peft(model, made[name]), prompt, 4)[0].tolist()
        assert answers[line] == [*prompt, *expected]


def test_products_of_adapters_are_counted(serving, tiny_llama, application):
    """A token of decode: r (in + out) for each of the seven layers, on top of the base model's."""
    model, made, app = serving({"one": {}}, lora={"max_lora_rank": 4})
    _, folder = tiny_llama()
    plain = application(folder)

    def macs(one) -> int:
        text = (Path(one.model_path) / "compiled" / "operators.json").read_text()
        graphs = json.loads(text)["graphs"]
        return next(g["macs"] for g in graphs if g["submodel"] == "token_generation_model")

    sizes = [w.shape for n, w in model.named_parameters() if n.split(".")[-2] in (*ATTENTION, *MLP)]
    assert macs(app) - macs(plain) == sum(4 * (rows + columns) for rows, columns in sizes)


def test_ids_that_there_are_none_of(serving, generate):
    _, _, app = serving({"one": {}}, batch_size=3)
    with pytest.raises(KeyError, match="no adapter 'three'"):
        generate(app, PROMPTS, 1, adapter_ids=["one", "0", "three"])
    with pytest.raises(ValueError, match="2 adapter_ids, expected one for each of 3"):
        generate(app, PROMPTS, 1, adapter_ids=["one", "0"])
    with pytest.raises(ValueError, match="from 0 .none. to 1"):
        app(
            input_ids=torch.tensor([[5, 6]]),
            position_ids=torch.tensor([[0, 1]]),
            adapter_ids=torch.tensor([2]),
        )


def test_adapters_without_a_configuration_are_refused(tiny_llama, application):
    _, folder = tiny_llama()
    app = application(folder)
    with pytest.raises(NotImplementedError, match="compile with a lora_config"):
        app(
            input_ids=torch.tensor([[5, 6]]),
            position_ids=torch.tensor([[0, 1]]),
            adapter_ids=torch.tensor([0]),
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"version": "0.1"}, NotImplementedError, "needs NxDI 0.6"),
        ({"fused_qkv": True}, NotImplementedError, "meets fused_qkv"),
        ({"lora": {"lora_shard_linear_layer": True}}, NotImplementedError, "lora_shard_linear"),
        ({"lora": {"max_loras": 0}}, ValueError, "room for 1 checkpoints"),
        ({"lora": {"target_modules": ["lm_head", *ATTENTION, *MLP]}}, ValueError, "lm_head is a"),
        ({"tp_degree": 4}, CheckpointError, "divides the heads"),
    ],
)
def test_what_does_not_go_together_is_refused(serving, options, error, message):
    with pytest.raises(error, match=message):
        serving({"one": {}}, **options)


def test_checkpoints_that_do_not_fit_are_refused(tiny_llama, application, monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    model, folder = tiny_llama()

    def compiled(path, **lora):
        config = {"lora_ckpt_paths": {"one": str(path)}, **lora}
        application(folder, load=False, lora_config=config)

    with pytest.raises(FileNotFoundError, match="no adapter_config.json"):
        compiled(tmp_path / "none")
    made = write_adapter(tmp_path / "one", model)
    content = json.loads((made / "adapter_config.json").read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora"),
        ({"r": 0}, "rank 0"),
        ({"target_modules": "all-linear"}, "pattern of target_modules"),
    ):
        (made / "adapter_config.json").write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            compiled(made)
    (made / "adapter_config.json").write_text(json.dumps(content | {"r": 5}))
    with pytest.raises(CheckpointError, match="expected rank 5"):
        compiled(made)
    (made / "adapter_config.json").write_text(json.dumps(content))
    tensors = load_file(str(made / "adapter_model.safetensors"))
    stray = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 48)}
    save_file(tensors | stray, str(made / "adapter_model.safetensors"))
    with pytest.raises(CheckpointError, match="no layer takes"):
        compiled(made)


def test_lists_of_ids_and_folders():
    config = LoraServingConfig(lora_ckpt_paths=["one : /a/b", "two:/c"])
    assert config.lora_ckpt_paths == {"one": "/a/b", "two": "/c"}
    assert config.indices == {"0": 0, "one": 1, "two": 2}
    for entries in (["one : /a", "one : /b"], ["one"]):
        with pytest.raises(ValueError, match="an id of its own"):
            LoraServingConfig(lora_ckpt_paths=entries)
