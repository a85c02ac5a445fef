"""The submission, llama.py, on every NxDI version that the stand-in can be."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from neuronx_distributed_inference.contract import VERSIONS
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7]]
# Heads of 64, as Llama has them; three query heads over one key-value head, padded at degree 2.
SHAPE = dict(
    hidden_size=192,
    intermediate_size=200,
    num_attention_heads=3,
    num_key_value_heads=1,
    num_hidden_layers=1,
    vocab_size=212,
    initializer_range=0.1,
)


@pytest.fixture(scope="module")
def submission():
    return importlib.import_module("llama")


def build(submission, folder, **neuron):
    """The submission's application, compiled and loaded."""
    model_cls = submission.NeuronLlamaForCausalLM
    config_cls = model_cls.get_config_cls()
    options = {"seq_len": 48, "max_context_length": 32, "batch_size": 2, **neuron}
    neuron_config = config_cls.get_neuron_config_cls()(**options)
    config = config_cls(neuron_config, load_config=load_pretrained_config(str(folder)))
    app = model_cls(str(folder), config)
    app.compile(folder / "compiled")
    app.load(folder / "compiled")
    return app


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("enable_nki", [False, True], ids=["torch", "nki"])
def test_tokens_of_hugging_face(
    submission, tiny_llama, generate, reference, monkeypatch, version, tp_degree, enable_nki
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**SHAPE)
    app = build(
        submission, folder, torch_dtype="float32", tp_degree=tp_degree, enable_nki=enable_nki
    )
    got = generate(app, PROMPTS, 5)
    for row, prompt in enumerate(PROMPTS):
        assert got[row].tolist() == reference(model, prompt, 5)[0].tolist()


def test_nothing_private_is_imported(submission):
    """Neither closed kernels nor the repository's own packages: the file is uploaded alone."""
    source = Path(submission.__file__).read_text(encoding="utf-8")
    for name in ("_private_kernels", "starfish", "neuron_cpu", "harness"):
        assert f"import {name}" not in source
        assert f"from {name}" not in source
        assert f".{name}" not in source
