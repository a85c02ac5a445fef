"""NeuronConfig and InferenceConfig: defaults, checks, aliases, JSON."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from neuronx_distributed_inference.contract import contract
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig, to_dict
from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

# NxDI 0.1.0 models/config.py: what a NeuronConfig with seq_len=64, batch_size=3 holds.
DEFAULTS = {
    "batch_size": 3,
    "padding_side": "right",
    "seq_len": 64,
    "n_active_tokens": 64,
    "n_positions": 64,
    "on_cpu": False,
    "output_logits": False,
    "torch_dtype": torch.bfloat16,
    "overrides_torch_dtype": False,
    "rpl_reduce_dtype": torch.bfloat16,
    "max_context_length": 64,
    "max_new_tokens": None,
    "max_length": 64,
    "vocab_parallel": False,
    "fused_qkv": False,
    "sequence_parallel_enabled": False,
    "attn_cls": "NeuronLlamaAttention",
    "ctx_batch_size": 3,
    "tkg_batch_size": 3,
    "max_batch_size": 3,
    "is_continuous_batching": False,
    "on_device_sampling_config": None,
    "async_mode": False,
    "enable_bucketing": False,
    "buckets": [64],
    "bucket_n_active_tokens": False,
    "context_encoding_buckets": None,
    "token_generation_buckets": None,
    "quantized": False,
    "quantization_type": "per_tensor_symmetric",
    "quantization_dtype": "int8",
    "kv_cache_quant": False,
    "trace_tokengen_model": True,
    "speculation_length": 0,
    "spec_batch_size": 3,
    "is_medusa": False,
    "num_medusa_heads": 0,
    "is_paged_attention": False,
    "pa_num_blocks": 3,
    "pa_block_size": 64,
    "lora_config": None,
    "tp_degree": 1,
    "pp_degree": 1,
    "ep_degree": 1,
    "world_size": 1,
    "start_rank_id": 0,
    "local_ranks_size": 1,
    "save_sharded_checkpoint": True,
    "qk_layernorm": False,
    "flash_decoding_enabled": False,
    "kv_cache_tiling": False,
    "attn_kernel_enabled": False,
    "qkv_kernel_enabled": False,
    "mlp_kernel_enabled": False,
    "quantized_kernel_lower_bound": 1200.0,
    "logical_neuron_cores": 1,
    "cc_pipeline_tiling_factor": 2,
    "target": None,
    "weights_to_skip_layout_optimization": [],
}


def test_defaults():
    config = NeuronConfig(seq_len=64, batch_size=3)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_a_logical_core_has_two_physical_ones_in_0_9_where_the_chip_has(monkeypatch):
    found = {}
    for chip in ("", "trn1", "trn2", "trn3"):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
        for version in ("0.6", "0.9"):
            monkeypatch.setenv("NEURON_CPU_NXDI", version)
            found[chip, version] = contract().physical_cores
    assert {place for place, cores in found.items() if cores == 2} == {
        ("trn2", "0.9"),
        ("trn3", "0.9"),
    }
    assert set(found.values()) == {1, 2}


@pytest.mark.parametrize(
    "options",
    [
        {"is_medusa": True},
        {"enable_fused_speculation": True},
        {"enable_eagle_speculation": True},
        {"token_tree_config": {"0": ["1"]}},
        {"flash_decoding_enabled": True},
        {"cp_degree": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_the_libraries_have_is_refused_by_name(monkeypatch, options):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    with pytest.raises(NotImplementedError, match="asks for .*expected it to be off.*--libraries"):
        NeuronConfig(**options)


def test_steps_that_begin_early_are_taken_with_a_warning(monkeypatch, caplog):
    """Uploads of the 2026 contest ask for them in their files."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    assert NeuronConfig(async_mode=True).async_mode
    assert "async_mode changes nothing" in caplog.text


def test_buckets_are_sorted_and_limited():
    config = NeuronConfig(seq_len=64, context_encoding_buckets=[64, 16, 32])
    assert config.context_encoding_buckets == [16, 32, 64]
    with pytest.raises(AssertionError, match="Bucket 65 exceeds max_context_length.*at most 64"):
        NeuronConfig(seq_len=64, context_encoding_buckets=[65])
    with pytest.raises(AssertionError, match="Bucket 65 exceeds max_length"):
        NeuronConfig(seq_len=64, token_generation_buckets=[16, 65])


def test_settings_that_exclude_each_other():
    with pytest.raises(AssertionError, match="quantized_checkpoints_path"):
        NeuronConfig(quantized=True)
    with pytest.raises(AssertionError, match="quantized_mlp_kernel_enabled"):
        NeuronConfig(rmsnorm_quantize_kernel_enabled=True)
    with pytest.raises(ValueError, match="padding_side must be.*got 'middle'"):
        NeuronConfig(padding_side="middle")


def test_required_attributes():
    with pytest.raises(AssertionError, match=r"lacks the attributes \['hidden_size'"):
        LlamaInferenceConfig(NeuronConfig())


def test_pretrained_config_takes_one_source(tiny_llama):
    model, folder = tiny_llama()
    hook = load_pretrained_config(hf_config=model.config)
    assert LlamaInferenceConfig(NeuronConfig(), load_config=hook).hidden_size == 48
    for arguments in ({}, {"model_path_or_name": str(folder), "hf_config": model.config}):
        with pytest.raises(ValueError, match="exactly one"):
            load_pretrained_config(**arguments)


def test_save_and_load(tiny_llama, tmp_path):
    _, folder = tiny_llama(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    )
    neuron = NeuronConfig(
        tp_degree=2, torch_dtype="float16", on_device_sampling_config={"top_k": 5}, seq_len=96
    )
    config = LlamaInferenceConfig(neuron, load_config=load_pretrained_config(str(folder)))
    config.save(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "neuron_config.json").read_text())
    assert stored["neuron_config"]["torch_dtype"] == "float16"
    loaded = LlamaInferenceConfig.load(tmp_path / "saved")
    assert to_dict(loaded) == to_dict(config)
    assert loaded.rope_scaling["rope_type"] == "llama3"
    assert loaded.neuron_config.on_device_sampling_config.top_k == 5


def test_attribute_map_survives_copies():
    def hook(config):
        config.attribute_map = {"n_embd": "hidden_size"}
        config.hidden_size = 8

    config = InferenceConfig(NeuronConfig(), load_config=hook)
    assert config.n_embd == 8
    config.n_embd = 16
    assert config.hidden_size == 16
    duplicate = copy.deepcopy(config)
    duplicate.n_embd = 32
    assert (duplicate.hidden_size, config.hidden_size) == (32, 16)
