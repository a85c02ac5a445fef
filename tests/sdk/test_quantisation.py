"""Caches in fp8: the SDK's casts, against float ones."""

import torch
from neuronx_distributed.quantised import direct_cast_quantize

from tests import greedy
from tests.sdk.test_generation import PROMPTS

FP8 = torch.float8_e4m3fn


def test_cache_in_fp8(tiny_llama, application):
    """Prefill's logits are exact; those of later steps are a float model's with rounded keys."""
    model, folder = tiny_llama()
    app = application(folder, tp_degree=2, kv_cache_quant=True)
    text, (got,) = greedy.logits(app, PROMPTS[:1], 6)
    _, expected = greedy.alone(model, PROMPTS[0], 6)
    scale = expected.abs().max()
    assert float((got[0] - expected[0]).abs().max() / scale) < 1e-4
    tokens = torch.tensor([PROMPTS[0] + text[0].tolist()])
    second = _with_rounded_cache(model, tokens[:, : len(PROMPTS[0])], tokens[:, len(PROMPTS[0])])
    assert float((got[1] - second).abs().max() / scale) < 1e-4
    assert float((got[1] - expected[1]).abs().max() / scale) > 1e-4  # the cache is rounded


def _with_rounded_cache(model, prompt, token):
    """Logits of a step behind a prompt whose keys and values went through fp8."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model(prompt, past_key_values=cache)
    for layers in (cache.key_cache, cache.value_cache):
        layers[:] = [layer.to(FP8).to(layer.dtype) for layer in layers]
    return model(token[None], past_key_values=cache).logits[0, -1].detach()


def test_cast_to_the_devices_range():
    """Beyond 240, where OCP's type goes on to 448, nothing finite is promised."""
    values = torch.tensor([1.0, -240.0, 247.0, 249.0, -448.0, 1e4])
    cast = direct_cast_quantize(values, FP8).float()
    assert cast[:3].tolist() == [1.0, -240.0, 240.0]
    assert bool(cast[3:].isnan().all())
