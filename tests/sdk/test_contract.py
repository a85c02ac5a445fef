"""NxDI 0.1 and 0.6, of which NEURON_CPU_NXDI chooses one."""

import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS, contract
from neuronx_distributed_inference.models.config import NeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.models.llama import modeling_llama
from neuronx_distributed_inference.modules.kvcache.cache_lines import CacheLines

from neuron_cpu.errors import StandInError
from tests import greedy
from tests.crossed import crossed

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7]]


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", request.param)
    return request.param


@pytest.mark.parametrize(("version", "tp_degree"), crossed(VERSIONS, [1, 2]), indirect=["version"])
def test_baseline_agrees_with_hugging_face(version, tiny_llama, application, tp_degree):
    model, folder = tiny_llama()
    app = application(
        folder,
        batch_size=2,
        tp_degree=tp_degree,
        enable_bucketing=True,
        context_encoding_buckets=[8, 16, 32],
        token_generation_buckets=[16, 48],
    )
    greedy.assert_equal(app, model, PROMPTS, 14)


def test_unknown_version_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.3")
    with pytest.raises(
        StandInError, match="NEURON_CPU_NXDI names NxDI '0.3', .* of 0.1, 0.6, 0.9; .* --libraries"
    ):
        contract()


def test_a_layer_with_the_other_number_of_results_is_refused(
    version, tiny_llama, application, monkeypatch
):
    original = modeling_llama.NeuronLlamaDecoderLayer.forward

    def wrong(self, hidden_states, **kwargs):
        results = original(self, hidden_states, **kwargs)
        return results[:4] if len(results) == 5 else (*results, None)

    monkeypatch.setattr(modeling_llama.NeuronLlamaDecoderLayer, "forward", wrong)
    _, folder = tiny_llama()
    expected = "5 in NxDI" if version == "0.6" else "4 in NxDI"
    with pytest.raises(ValueError, match=f"Layer 0 .* items, expected {expected}"):
        application(folder, load=False)


def test_config_fields_come_and_go(version):
    first = version == "0.1"
    config = NeuronConfig()
    for name in ("is_paged_attention", "quantized_kernel_lower_bound", "trace_tokengen_model"):
        assert hasattr(config, name) == first
    for name in ("logical_nc_config", "k_cache_transposed", "is_mlp_quantized"):
        assert hasattr(config, name) != first
    if not first:
        assert not config.is_mlp_quantized()
        assert NeuronConfig(quantized_mlp_kernel_enabled=True).is_mlp_quantized()
        assert NeuronConfig(activation_quantization_type="dynamic").is_mlp_quantized()
    assert (config.rpl_reduce_dtype is None) != first
    assert (config.attn_kernel_enabled is None) != first
    assert config.save_sharded_checkpoint == first
    assert OnDeviceSamplingConfig().do_sample == first


def test_bucket_rules(version, tiny_llama, application):
    """A prompt as long as a bucket stays in it in 0.1 and moves to the next one in 0.6."""
    _, folder = tiny_llama()
    app = application(
        folder,
        load=False,
        enable_bucketing=True,
        context_encoding_buckets=[8, 16, 32],
        token_generation_buckets=[16, 48],
    )
    ids = torch.full((1, 8), 5)
    mask = torch.ones_like(ids)
    chosen = app.context_encoding_model.choose_bucket(ids, mask, torch.arange(8)[None])
    assert chosen == (8 if version == "0.1" else 16)
    position = torch.tensor([[15]])
    by_position = app.token_generation_model.choose_bucket(ids[:, :1], mask, position)
    assert by_position == 16
    long_mask = torch.ones((1, 16), dtype=torch.int64)
    by_mask = app.token_generation_model.choose_bucket(ids[:, :1], long_mask, position)
    assert by_mask == (16 if version == "0.1" else 48)


class ReadsAfterwards(NeuronConfig):
    """As the contest's file has it: the base sees the keyword first and leaves it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.nki_enabled = kwargs.pop("enable_nki", False)


class AndThen(ReadsAfterwards):
    pass


@pytest.mark.parametrize("cls", [ReadsAfterwards, AndThen])
def test_a_keyword_that_a_subclass_reads_is_not_ignored(cls, caplog):
    assert cls(enable_nki=True).nki_enabled
    assert caplog.text == ""
    cls(enable_nki=True, enable_nkl=True)
    assert "['enable_nkl']" in caplog.text


@pytest.mark.parametrize(("release", "damaged"), [("0.1", 0), ("0.6", 4)])
def test_a_row_that_fills_a_batch_writes_at_its_release_s_place(release, damaged, monkeypatch):
    """At position 0 in 0.1.0; later where the first row writes."""
    monkeypatch.setenv("NEURON_CPU_NXDI", release)
    lines = CacheLines(NeuronConfig(max_batch_size=2))
    lines.prefill(torch.tensor([0, 1]), torch.ones(2, 5))
    lines.decode(torch.tensor([0]), torch.tensor([[4]]))
    with pytest.raises(ValueError, match=f"has overwritten its position {damaged} in NxDI"):
        lines.decode(torch.tensor([1]), torch.tensor([[5]]))
