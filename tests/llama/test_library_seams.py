"""What NxDI's base class asks of `llama.py` and its own model lacks, without NxDI beside it."""

from types import SimpleNamespace

import pytest
from torch import nn

import llama
import models.cached
import models.ranks


def bare(kind):
    """A model that nothing has set up."""
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model


def test_the_model_says_how_long_a_tree_is(monkeypatch):
    """The base reads `medusa_speculation_length` of the model, whose Medusa ended there."""
    monkeypatch.setattr(llama.NeuronLlamaModel, "setup_attr_for_model", lambda self, config: None)
    model = bare(models.cached.CachedModel)
    asked = SimpleNamespace(medusa_speculation_length=5)
    model.setup_attr_for_model(SimpleNamespace(neuron_config=asked))
    assert model.medusa_speculation_length == 5


def test_caches_keep_all_tokens_under_a_window(monkeypatch):
    """The base of 0.7 keeps a window's tokens where the model has `sliding_window`."""

    def as_in_llama(self, config):
        self.sliding_window = config.sliding_window

    monkeypatch.setattr(llama.NeuronLlamaModel, "setup_attr_for_model", as_in_llama)
    monkeypatch.setattr(models.ranks, "parts_of_prompt", lambda config: 2)
    model = bare(models.ranks.SharedModel)
    model.setup_attr_for_model(SimpleNamespace(sliding_window=16))
    assert model.sliding_window is None


@pytest.mark.parametrize("later", [True, False])
def test_kernels_get_caches_of_fp8_as_they_lie(monkeypatch, later):
    """NxDI 0.8 and later read caches by a method, earlier ones by a type."""
    monkeypatch.setattr(llama.NeuronLlamaModel, "init_inference_optimization", lambda *_: None)
    model = bare(models.cached.CachedModel)
    as_it_was = {"_dequantize_cache": None} if later else {"quant_dtype": "fp8"}
    model.kv_mgr = SimpleNamespace(**as_it_was)
    monkeypatch.setattr(models.cached, "has_attention_kernels", lambda _: True)
    asked = SimpleNamespace(kv_cache_quant=True, torch_dtype=None)
    model.init_inference_optimization(SimpleNamespace(neuron_config=asked))
    if later:
        assert model.kv_mgr._dequantize_cache("as it lies", 0, is_key=True) == "as it lies"
    else:
        assert model.kv_mgr.dequant_dtype == "fp8"
