"""What the imitation once took and NxD Inference does not, found by `tests/real/seams.py`."""

import pytest
import torch
from neuronx_distributed_inference.models.config import MoENeuronConfig, NeuronConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from transformers import PretrainedConfig


@pytest.mark.parametrize("part", ["NeuronLlamaAttention", "NeuronLlamaMLP"])
def test_parts_of_a_layer_get_all_that_they_get_of_the_library(
    part, tiny_llama, application, monkeypatch
):
    """A file whose attention or MLP takes fewer keywords ended in the library alone."""
    given = {}
    kind = getattr(modeling_llama, part)
    original = kind.forward

    def forward(self, *args, **kwargs):
        given.update(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    monkeypatch.setattr(kind, "forward", forward)
    application(tiny_llama()[1], load=False)
    if part == "NeuronLlamaMLP":
        assert set(given) == {"rmsnorm", "adapter_ids"}
    else:
        assert {"rmsnorm", "residual", "rotary_position_ids", "kv_mgr", "seq_ids"} < set(given)
    assert given["adapter_ids"].dtype == torch.int32


def test_an_unknown_cast_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    with pytest.raises(ValueError, match="cast_type is 'none', expected config or as-declared"):
        NeuronConfig(cast_type="none")


def test_an_attention_kernel_without_that_of_qkv_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.9")
    with pytest.raises(AssertionError, match="needs qkv_kernel_enabled"):
        MoENeuronConfig(attn_block_tkg_nki_kernel_enabled=True)


@pytest.mark.parametrize(
    ("version", "given", "stored"),
    [
        ("0.6", {"kv_cache_quant": True}, torch.float8_e4m3fn),
        ("0.9", {"kv_cache_quant": True}, torch.bfloat16),
        ("0.9", {"kv_cache_quant": True, "kv_quant_config": {}}, torch.float8_e4m3fn),
    ],
)
def test_caches_are_fp8_where_the_release_makes_them_so(version, given, stored, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    config = PretrainedConfig(
        neuron_config=MoENeuronConfig(torch_dtype="bfloat16", **given),
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=32,
    )
    assert KVCacheManager(config, num_kv_head=2).past_key_values[0].dtype == stored
