"""lab/decode_step.py: its bound and its times."""

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


def test_one_kernel_is_shorter_than_seven(small):
    one, many = (decode_step.milliseconds(small, module) for module in (models.step, llama))
    assert (one[1], many[1]) == (1, 7)
    assert decode_step.bound_ns(small) / 1e6 < one[0] < many[0]
