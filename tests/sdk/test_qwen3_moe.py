"""The baseline Qwen3-MoE and what the 2026 contest's files import, against Hugging Face."""

import argparse

import pytest
import torch
from neuronx_distributed_inference.models.config import (
    MoENeuronConfig,
    NeuronConfig,
    OnDeviceSamplingConfig,
)
from neuronx_distributed_inference.models.layer_boundary_marker import ModuleMarkerEndWrapper
from neuronx_distributed_inference.models.qwen3_moe import modeling_qwen3_moe
from neuronx_distributed_inference.utils.argparse_utils import StringOrIntegers

from tests import greedy

# Heads times their size is twice the hidden size.
MODELS = modeling_qwen3_moe
SHAPE = dict(
    hidden_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=212,
    max_position_embeddings=512,
    num_experts=24,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
PROMPT = [5, 17, 101, 3, 44, 9]


@pytest.mark.parametrize("tp_degree", [1, 4])
def test_logits_equal_hugging_face(tp_degree, qwen, tmp_path):
    """A decode step reads four of 24 experts, a prompt of six tokens takes all of them."""
    model, app = qwen(tp_degree=tp_degree, blockwise_matmul_config={"use_torch_block_wise": True})
    tokens, logits = greedy.alone(model, PROMPT, 5)
    (found,), (got,) = greedy.logits(app, [PROMPT], 5)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)
    saved = MODELS.Qwen3MoeInferenceConfig.load(tmp_path / "compiled").neuron_config
    assert saved.router_config.dtype == torch.float32 and saved.normalize_top_k_affinities
    assert saved.blockwise_matmul_config.use_torch_block_wise


def test_refusals(qwen):
    with pytest.raises(
        ValueError, match=r"mlp_only_layers \[1\] and decoder_sparse_step 1, expect"
    ):
        qwen(load=False, shape={"mlp_only_layers": [1]})
    with pytest.raises(ValueError, match="moe_intermediate_size 26 does not divide among 4 ranks"):
        qwen(tp_degree=4, shape={"moe_intermediate_size": 26})
    with pytest.raises(NotImplementedError, match="moe_ep_degree 2, expected 0 and 1"):
        qwen(tp_degree=1, moe_ep_degree=2)


def test_names_of_the_contest(monkeypatch):
    """A configuration of experts is 0.9's where the environment names no release, whatever else
    the process has imported; what a sampler does by default follows it."""
    monkeypatch.delenv("NEURON_CPU_NXDI", raising=False)
    for sampling in (OnDeviceSamplingConfig(), {}):
        own = MoENeuronConfig(on_device_sampling_config=sampling)
        assert own.contract.version == "0.9" and not own.on_device_sampling_config.do_sample
    assert NeuronConfig().contract.version == "0.1"
    named = OnDeviceSamplingConfig(do_sample=True)
    assert MoENeuronConfig(on_device_sampling_config=named).on_device_sampling_config.do_sample
    assert ModuleMarkerEndWrapper()(1, 2) == (1, 2) and ModuleMarkerEndWrapper()(3) == 3
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", nargs="+", action=StringOrIntegers)
    assert parser.parse_args(["--at", "1", "2"]).at == [1, 2]
    assert parser.parse_args(["--at", "auto"]).at == "auto"
    with pytest.raises(argparse.ArgumentTypeError, match="'auto' alone or integers"):
        parser.parse_args(["--at", "auto", "1"])
