"""lab/decode_step.py: its bound, its times, and the stream that it draws."""

import pytest

import llama
import models.step
from harness.model_shapes import MODEL_SHAPES
from lab import decode_step, roofline


@pytest.fixture
def small(monkeypatch):
    """Three layers of 256 features."""
    shape = MODEL_SHAPES["llama-3.2-1b"] | dict(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=3,
        vocab_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    monkeypatch.setitem(MODEL_SHAPES, "small", shape)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    return decode_step.Row("trn1", "small", 2, 1, 128)


def test_the_bound_is_that_of_the_roofline():
    row = decode_step.Row("trn1", "llama-3.2-1b", 2, 1, 640)
    limits = roofline.floor(MODEL_SHAPES[row.model], roofline.Row("decode", 1, 640, 1.0), 272.0)
    assert decode_step.bound_ns(row) == pytest.approx(limits.bound)


@pytest.mark.full
def test_calls_and_collectives_cost_what_they_say(small):
    one, many = (decode_step.times(small, module) for module in (models.step, llama))
    assert (one[1], many[1]) == (1, 7)
    for found, kernels, _ in (one, many):
        first, second = (found[call, 10_000.0] for call in decode_step.LAUNCHES)
        assert second - first == pytest.approx(kernels * 208_000)
        slower = found[2_000.0, 26_000.0] - found[2_000.0, 10_000.0]
        # six all-reduces, embedding, logits; nothing hides them in so small a model
        assert slower == pytest.approx(8 * 16_000, rel=0.05)


def test_the_stream_of_a_layer(small):
    lines = decode_step.stream(decode_step.times(small, models.step)[2], 1)
    arrives, collective, tensor, *_ = lines
    assert arrives.startswith("arrives") and collective.startswith("collective")
    assert collective.count("=") >= 2 * 26 / 4 - 2
    assert tensor.startswith("TensorE") and set(tensor[11:]) <= set(decode_step.SHADES)
