"""Tiny seeded Llamas, and applications around them, for the tests of the SDK stand-in."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import neuron_cpu

neuron_cpu.ensure_sdk()

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests.tiny_model import ODD  # noqa: E402

DEFAULT_SHAPE = ODD | dict(max_position_embeddings=512, rms_norm_eps=1e-5)


@pytest.fixture(autouse=True)
def private_work_dir(tmp_path, monkeypatch):
    """Each test traces into a compiler folder of its own, and rank threads stay single."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "nxd_model"))
    monkeypatch.delenv("NEURON_CPU_NXDI", raising=False)
    yield


@pytest.fixture
def tiny_llama(tmp_path):
    """Factory of (Hugging Face model in fp32, its folder) for a changed DEFAULT_SHAPE."""
    counter = iter(range(1000))

    def make(seed=0, **shape):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**DEFAULT_SHAPE, **shape})).eval()
        folder = tmp_path / f"checkpoint{next(counter)}"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def application():
    """Factory of a compiled and loaded baseline application for a checkpoint folder."""

    def make(folder, load=True, model_cls=None, **neuron):
        from neuronx_distributed_inference.models.config import NeuronConfig
        from neuronx_distributed_inference.models.llama.modeling_llama import (
            LlamaInferenceConfig,
            NeuronLlamaForCausalLM,
        )
        from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

        options = {"seq_len": 48, "max_context_length": 32, "torch_dtype": "float32", **neuron}
        config = LlamaInferenceConfig(
            NeuronConfig(**options), load_config=load_pretrained_config(str(folder))
        )
        app = (model_cls or NeuronLlamaForCausalLM)(str(folder), config)
        app.compile(folder / "compiled")
        if load:
            app.load(folder / "compiled")
        return app

    return make


@pytest.fixture
def qwen(tmp_path, monkeypatch, request):
    """Factory of (Hugging Face model, application) of a Qwen3-MoE: of the test module's SHAPE, and
    of the classes in its MODELS."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_CPU_NKI", "2.29")  # warns of Python that a parser refuses
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))

    def make(version="0.9", load=True, shape=None, dtype="float32", **neuron):
        from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        monkeypatch.setenv("NEURON_CPU_NXDI", version)
        torch.manual_seed(0)
        given = {**request.module.SHAPE, **(shape or {})}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**given)).eval()
        model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
        model_cls = request.module.MODELS.NeuronQwen3MoeForCausalLM
        config_cls = model_cls.get_config_cls()
        options = {"seq_len": 48, "max_context_length": 32, "torch_dtype": dtype, **neuron}
        config = config_cls(
            config_cls.get_neuron_config_cls()(**options),
            load_config=load_pretrained_config(str(tmp_path)),
        )
        app = model_cls(str(tmp_path), config)
        if load:
            app.compile(tmp_path / "compiled")
            app.load(tmp_path / "compiled")
        return model, app

    return make
