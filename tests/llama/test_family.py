"""llama.py with checkpoints of the wider family, against Hugging Face in fp32."""

import pytest
import torch
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests import greedy
from tests.crossed import full
from tests.llama.every import llama
from tests.tiny_model import SMALL

SHAPE = SMALL | dict(intermediate_size=128, num_attention_heads=3, num_key_value_heads=1)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
FAMILY = {
    "bias": Qwen2Config(**SHAPE),
    "head norms": Qwen3Config(**SHAPE | {"tie_word_embeddings": True}),
    "head norms of 128": Qwen3Config(**SHAPE | {"head_dim": 128, "num_key_value_heads": 3}),
    "window": MistralConfig(**SHAPE, sliding_window=8),
    "window over heads of 256": MistralConfig(**SHAPE | {"head_dim": 256}, sliding_window=5),
    "yarn": LlamaConfig(**SHAPE, rope_scaling=YARN),
    "yarn by other names": LlamaConfig(
        **SHAPE,
        rope_scaling=dict(
            type="yarn", factor=2.0, mscale=0.7, mscale_all_dim=1.0, beta_fast=8, beta_slow=2
        ),
    ),
    "yarn with its amplitude": LlamaConfig(
        **SHAPE, rope_scaling=dict(rope_type="yarn", factor=2.0, attention_factor=0.8)
    ),
    "dynamic": LlamaConfig(**SHAPE, rope_scaling=dict(rope_type="dynamic", factor=2.0)),
    "windows of some layers": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8),
    "heads of 80": LlamaConfig(**SHAPE | {"head_dim": 80}),
    "heads of 96": LlamaConfig(**SHAPE | {"head_dim": 96}),
    "bias of 48": Qwen2Config(**SHAPE | {"head_dim": 48, "num_key_value_heads": 3}),
    "heads of 256": LlamaConfig(**SHAPE | {"head_dim": 256}),
    "head norms of 256": Qwen3Config(**SHAPE | {"head_dim": 256}),
}
OUTSIDE = {"heads of 75": LlamaConfig(**SHAPE | {"head_dim": 75})}
ALWAYS = {("head norms", True), ("window", True)}  # ranks below have biases


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Factory of (Hugging Face model with biases and gains of their own, its folder)."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))

    def make(name):
        model = greedy.seeded((FAMILY | OUTSIDE)[name])
        model.save_pretrained(tmp_path / "checkpoint")
        return model, tmp_path / "checkpoint"

    return make


def application(folder, **neuron):
    options = {"seq_len": 32, "max_context_length": 16, "torch_dtype": "float32", **neuron}
    config = llama.LlamaInferenceConfig(
        llama.NeuronConfigNKI(**options), load_config=load_pretrained_config(str(folder))
    )
    model = llama.NeuronLlamaForCausalLM(str(folder), config)
    model.compile(folder / "compiled")
    model.load(folder / "compiled")
    return model


def logits(model, tokens=13, steps=6):
    """Of greedy tokens behind a seeded prompt."""
    ids = torch.randint(3, 200, (1, tokens), generator=torch.Generator().manual_seed(1))
    return greedy.logits(model, ids.tolist(), steps)[1][0]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        (name, kernels) if (name, kernels) in ALWAYS else full(name, kernels)
        for name in FAMILY
        if name != "windows of some layers"
        for kernels in (False, True)
    ],
)
def test_logits_equal_hugging_face(name, kernels, checkpoint):
    model, folder = checkpoint(name)
    found = logits(application(folder, enable_nki=kernels))
    atol = 2e-4 if kernels else 1e-4  # of logits up to 9; yarn's larger scores leave 1.5e-4
    torch.testing.assert_close(found, logits(model), rtol=0, atol=atol)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["bias", "head norms of 128", "window", "heads of 80", "heads of 96", "heads of 256"]
)
def test_ranks_share_the_heads(name, checkpoint):
    """One key/value head is replicated, three are padded to four."""
    model, folder = checkpoint(name)
    found = logits(application(folder, enable_nki=True, tp_degree=2))
    torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "neuron", "told"),
    [
        ("heads of 75", {"enable_nki": True}, "do not cover head_dim 75"),
        ("window", {"padding_side": "left"}, "sliding_window 8 counts from the right"),
        ("windows of some layers", {}, "use_sliding_window gives some layers a window"),
        ("dynamic", {"seq_len": 80}, "rope_scaling 'dynamic' changes with each token beyond"),
    ],
)
def test_what_stays_outside_is_refused(name, neuron, told, checkpoint):
    _, folder = checkpoint(name)
    with pytest.raises(ValueError, match=told):
        application(folder, **neuron)
