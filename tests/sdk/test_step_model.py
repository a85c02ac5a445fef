"""models/step.py as a model: prompts by models/today.py's kernels, one kernel a decode step."""

import importlib

import pytest
import torch
from neuronx_distributed_inference.contract import VERSIONS

from tests import greedy
from tests.crossed import full
from tests.sdk.test_submission import PROMPTS, build
from tests.sdk.test_submission import SHAPE as ONE_KV_HEAD

SHAPE = {**ONE_KV_HEAD, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def step():
    return importlib.import_module("models.step")


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")


def equal(app, model, steps=5):
    greedy.assert_equal(app, model, PROMPTS, steps)


EACH = [v if v == VERSIONS[-1] else full(v) for v in VERSIONS]


@pytest.mark.parametrize("version", EACH)
@pytest.mark.parametrize("tp_degree", [full(1), 2])
def test_tokens_of_hugging_face(step, tiny_llama, monkeypatch, version, tp_degree):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    model, folder = tiny_llama(**SHAPE)
    app = build(step, folder, torch_dtype="float32", tp_degree=tp_degree, enable_nki=True)
    equal(app, model)


@pytest.mark.parametrize("sampling", [full({}), {"do_sample": False}])
def test_four_ranks_of_two_cores(step, tiny_llama, sampling, monkeypatch):
    """The head's logits on the host, or the device's own greedy token."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    model, folder = tiny_llama(**{**SHAPE, "vocab_size": 812})  # two tiles for each rank
    more = {"on_device_sampling_config": sampling} if sampling else {}
    app = build(step, folder, torch_dtype="float32", tp_degree=4, enable_nki=True, **more)
    equal(app, model)


def test_several_tokens_are_those_of_one_after_another(step, tiny_llama):
    model, folder = tiny_llama(**SHAPE)
    app = build(
        step,
        folder,
        torch_dtype="float32",
        tp_degree=2,
        enable_nki=True,
        batch_size=1,
        speculation_length=4,
        max_context_length=24,
    )
    prompt, expected = PROMPTS[0], greedy.alone(model, PROMPTS[0], 5)
    ids = torch.tensor([prompt])
    positions = torch.arange(len(prompt))[None]
    app.forward(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions)
    tokens = expected[0][None, :4]
    positions = len(prompt) + torch.arange(4)[None]
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    logits = app.forward(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[0]
    assert torch.allclose(logits, expected[1][1:5], atol=2e-4)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (dict(padding_side="left"), "left padding"),
        (dict(is_continuous_batching=True), "continuous batching"),
        (dict(on_device_sampling_config={"top_k": 5, "do_sample": True}), "sampling on the device"),
    ],
)
def test_settings_that_a_step_does_not_have_are_refused(step, tiny_llama, setting, told):
    _, folder = tiny_llama(**SHAPE)
    with pytest.raises(ValueError, match=told):
        build(step, folder, tp_degree=1, enable_nki=True, **setting)
