"""Low-rank adapters in the kernels, several in one batch, each as peft has it on Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.utils.hf_adapter import (
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import llama

ALL = [*llama.ATTENTION_TARGETS, *llama.MLP_TARGETS]
SHAPE = dict(
    hidden_size=192,
    intermediate_size=136,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=212,
    max_position_embeddings=64,
    initializer_range=0.15,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [9, 8, 150, 31, 77]]
STEPS = 4


def adapted(model: LlamaForCausalLM, folder: Path, seed: int, **config) -> Path:
    """An adapter that peft has made and saved, its B not zero."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **config}
    peft = get_peft_model(LlamaForCausalLM(model.config), LoraConfig(**options))
    peft.save_pretrained(str(folder))
    return folder


def reference(checkpoint: Path, adapter: Path | None, tokens: list[int]) -> torch.Tensor:
    """Logits behind each token, by transformers and peft."""
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0]


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Factory of (checkpoint, adapters' folders, application) with kernels."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))

    def make(adapters, version="0.2", shape=None, lora=None, **neuron):
        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | (shape or {}))).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # gains of norms, which A is multiplied by
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "checkpoint")
        made = {
            name: adapted(model, tmp_path / name, seed, **config)
            for seed, (name, config) in enumerate(adapters.items(), 1)
        }
        config = {"max_loras": len(made), "max_lora_rank": 1, **(lora or {})}
        config["lora_ckpt_paths"] = {name: str(path) for name, path in made.items()}
        options = {"seq_len": 32, "max_context_length": 16, "torch_dtype": "float32", **neuron}
        options |= {"enable_nki": True, "lora_config": config}
        path = tmp_path / "checkpoint"
        app = llama.NeuronLlamaForCausalLM(
            str(path),
            llama.LlamaInferenceConfig(
                llama.NeuronConfigNKI(**options), load_config=load_pretrained_config(str(path))
            ),
        )
        app.compile(tmp_path / "compiled")
        app.load(tmp_path / "compiled")
        return path, made, app

    return make


def assert_each_as_peft(checkpoint, made, app, names):
    """A batch whose rows have adapters of these names, "0" for none: logits within 1e-4 of the
    largest."""
    width = max(map(len, PROMPTS))
    ids, mask = torch.zeros((3, width), dtype=torch.int64), torch.zeros((3, width), dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    output = HuggingFaceGenerationAdapter(app).generate(
        ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0,
        max_new_tokens=STEPS, adapter_ids=names, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        got = torch.stack([step[row] for step in output.logits])
        tokens = [*prompt, *output.sequences[row, width:].tolist()]
        expected = reference(checkpoint, made.get(name), tokens)[len(prompt) - 1 : -1]
        assert (got - expected).abs().max() / expected.abs().max() < 1e-4
        base = reference(checkpoint, None, tokens)[len(prompt) - 1 : -1]
        changes = (got - base).abs().max() / base.abs().max() > 1e-2
        assert changes == (name != "0")


@pytest.mark.parametrize("tp_degree", [1, 2])
def test_a_batch_of_three_adapters(serving, tp_degree):
    """Ranks 4 and 20, one for attention's queries and values only, and a row without any."""
    adapters = {"one": {}, "two": {"r": 20, "target_modules": ["q_proj", "v_proj"]}}
    checkpoint, made, app = serving(adapters, batch_size=3, tp_degree=tp_degree)
    assert_each_as_peft(checkpoint, made, app, ["two", "0", "one"])
