"""NeuronConfig and InferenceConfig: defaults, checks, aliases, JSON."""

import json

import pytest
from neuronx_distributed_inference.contract import contract
from neuronx_distributed_inference.models.config import NeuronConfig, to_dict
from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config


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
        {"quantized": True},
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
