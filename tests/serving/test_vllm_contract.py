"""What vLLM on Neuron calls of a model class, in its order and with its arguments, on `llama.py`.

Facts: upstreaming-to-vllm 2.24.0, model_executor/model_loader/neuronx_distributed.py (the class is
looked up, configured, loaded from a compiled folder or compiled into it, and called) and
worker/neuronx_distributed_model_runner.py (what the arguments hold).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from tests import greedy
from tests.crossed import full

SLOTS, LONGEST = 3, 32
PROMPTS = ([9, 40, 77, 12, 90, 31, 8], [100, 101, 102], [7, 7, 200, 33], [250, 3, 90, 11, 60, 5])
TOKENS = 4


def load(folder, device_samples):
    """As `load_weights` does it: the class by the checkpoint's architecture, a folder by a hash."""
    import models.extended as llama

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = {"LlamaForCausalLM": (llama, "NeuronLlamaForCausalLM")}[architecture]
    model_class = getattr(*model_class)
    options: dict[str, Any] = {
        "tp_degree": 1,
        "ctx_batch_size": 1,
        "batch_size": SLOTS,
        "max_context_length": LONGEST,
        "seq_len": LONGEST,
        "enable_bucketing": True,
        "is_continuous_batching": SLOTS > 1,
        "quantized": False,
        "torch_dtype": "float32",
        "padding_side": "right",
        "pa_block_size": LONGEST,
        "pa_num_blocks": SLOTS,
        "is_block_kv_layout": False,
        "enable_nki": True,  # as override_neuron_config says it
    }
    if device_samples:
        sampling = OnDeviceSamplingConfig(dynamic=True, deterministic=False)
        options["on_device_sampling_config"] = sampling
    neuron_config_class = model_class.get_neuron_config_cls()
    neuron_config = neuron_config_class(**options)
    load_config = load_pretrained_config(str(folder))
    config = model_class.get_config_cls()(neuron_config, load_config=load_config)
    name = hashlib.md5(config.to_json_string().encode(), usedforsecurity=False).hexdigest()
    compiled = folder / "neuron-compiled-artifacts" / name
    try:
        model = model_class(str(compiled))
        model.load(str(compiled))
    except (FileNotFoundError, ValueError):
        model = model_class(str(folder), config)
        model.compile(str(compiled))
        model.load(str(compiled))
    return model


class Runner:
    """The runner's calls: prompts one by one, then all that live, its rows sorted by slot."""

    def __init__(self, model, device_samples):
        self.model, self.device_samples = model, device_samples
        self.tokens: dict[int, list[int]] = {}

    def call(self, ids, positions, slots):
        blocks, order = torch.sort(torch.tensor(slots))
        output = self.model(
            torch.tensor(ids)[order],
            attention_mask=None,
            position_ids=torch.tensor(positions)[order],
            seq_ids=blocks,
            sampling_params=torch.ones(len(slots), 3),
            prev_hidden=None,
            adapter_ids=None,
        )
        if self.device_samples:
            found = output.hidden_states
            assert found.shape == (len(slots),)
        else:
            found = output.logits[:, -1, :].argmax(-1)
        if len(slots) != 1:
            found = found[torch.argsort(order)]
        return found.tolist()

    def prefill(self, slot, prompt):
        """Right-padded with zeros, positions too: the mask is inferred from them."""
        padding = [0] * (len(prompt) % 3)
        ids, positions = [*prompt, *padding], [*range(len(prompt)), *padding]
        self.tokens[slot] = [*prompt, *self.call([ids], [positions], [slot])]

    def step(self):
        slots = list(self.tokens)  # in the order in which they came
        rows = [self.tokens[slot] for slot in slots]
        found = self.call([row[-1:] for row in rows], [[len(row) - 1] for row in rows], slots)
        for slot, token in zip(slots, found, strict=True):
            self.tokens[slot].append(token)


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Greedy tokens of Hugging Face's Llama in fp32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32).eval()

    def answer(prompt, tokens):
        return [*prompt, *greedy.tokens(model, [prompt], tokens)[0].tolist()]

    return answer


@pytest.fixture
def folder(tiny_model, monkeypatch, tmp_path):
    """A folder of the model that compiled folders may be put into."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work") + "/")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize(
    ("version", "device_samples"), [("0.1", False), ("0.6", True), full("0.6", False)]
)
def test_vllm_s_calls_give_each_request_its_text(
    folder, reference, monkeypatch, version, device_samples
):
    """Prompts arrive between steps, one slot is used twice, and kernels compute all of it."""
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    runner = Runner(load(folder, device_samples), device_samples)
    for slot, prompt in zip((2, 0, 1), PROMPTS, strict=False):
        runner.prefill(slot, prompt)
        runner.step()
    finished = runner.tokens.pop(0)
    runner.prefill(0, PROMPTS[3])
    for _ in range(TOKENS):
        runner.step()
    assert finished == reference(PROMPTS[1], len(finished) - len(PROMPTS[1]))
    for slot, prompt in zip((2, 1, 0), (PROMPTS[0], *PROMPTS[2:]), strict=True):
        assert runner.tokens[slot] == reference(prompt, len(runner.tokens[slot]) - len(prompt))
    again = Runner(load(folder, device_samples), device_samples)  # from the compiled folder
    again.prefill(1, PROMPTS[0])
    assert again.tokens[1] == reference(PROMPTS[0], 1)
