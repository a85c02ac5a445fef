"""The SDK stand-in's own models of Llama's family, against Hugging Face in fp32."""

import importlib
from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.models.config import NeuronConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from harness.inputs.submission import BASELINES
from tests import greedy
from tests.crossed import full
from tests.tiny_model import ODD

SHAPE = ODD | dict(max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
FAMILY = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "yarn": LlamaConfig(**SHAPE, rope_scaling=YARN),
    "dynamic": LlamaConfig(**SHAPE, rope_scaling=dict(rope_type="dynamic", factor=2.0)),
}


@pytest.fixture
def baseline(tmp_path):
    """Factory of (Hugging Face model, the SDK's own application)."""

    def make(name, load=True, **neuron):
        config = FAMILY[name] if isinstance(name, str) else name
        model = greedy.seeded(config)
        folder = Path(tmp_path)
        model.save_pretrained(folder)
        module, cls = BASELINES[config.model_type]
        kind = getattr(importlib.import_module(module), cls)
        options = {"seq_len": 48, "max_context_length": 32, "torch_dtype": "float32", **neuron}
        asked = kind.get_config_cls()(
            NeuronConfig(**options), load_config=load_pretrained_config(str(folder))
        )
        app = kind(str(folder), asked)
        app.compile(folder / "compiled")
        if load:
            app.load(folder / "compiled")
        return model, app

    return make


@pytest.mark.parametrize(
    ("name", "options"),
    [
        full("mistral", {}),
        full("qwen2", {"tp_degree": 2}),
        full("qwen2", {"fused_qkv": True}),
        full("qwen3", {"tp_degree": 2}),
        full("yarn", {}),
        full("dynamic", {}),
    ],
)
@pytest.mark.parametrize("version", ["0.1", full("0.6")])
def test_logits_equal_hugging_face(name, options, version, baseline, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, app = baseline(name, **options)
    prompt = torch.randint(3, 200, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    _, logits = greedy.alone(model, prompt, 6)
    found = greedy.logits(app, [prompt], 6)[1][0]
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)


def test_what_is_not_modelled_is_refused(baseline):
    with pytest.raises(ValueError, match="'dynamic' reaches max_position_embeddings 64, got seq"):
        baseline("dynamic", load=False, seq_len=80)
    some = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8)
    with pytest.raises(NotImplementedError, match="use_sliding_window gives some layers"):
        baseline(some, load=False)
    with pytest.raises(NotImplementedError, match="sliding_window 8 meets several tokens a step"):
        baseline("mistral", load=False, speculation_length=4)
