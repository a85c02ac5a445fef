"""mixtral.py against Hugging Face, with kernels and without, and its kernels by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from neuronx_distributed_inference.utils.hf_adapter import (
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from transformers import MixtralConfig, MixtralForCausalLM

import mixtral
from tests.sdk.test_block_tables import BEHIND_A_PREFIX, Blocks

# Odd on purpose: inner sizes of a rank that are no whole tiles, heads of 32, a prime of experts.
SHAPE = dict(
    hidden_size=128,
    intermediate_size=208,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=210,
    max_position_embeddings=512,
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=None,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
PROMPTS = [[5, 17, 101, 3, 44, 9, 12], [7, 7, 8]]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Factory of (Hugging Face model in fp32, its folder)."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))

    def make(**shape):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**{**SHAPE, **shape})).eval()
        model.save_pretrained(tmp_path / "checkpoint")
        return model, tmp_path / "checkpoint"

    return make


def application(folder: Path, **neuron):
    options = {"seq_len": 32, "max_context_length": 16, "torch_dtype": "float32", **neuron}
    config = mixtral.MixtralInferenceConfig(
        mixtral.NeuronConfigNKI(**options), load_config=load_pretrained_config(str(folder))
    )
    model = mixtral.NeuronMixtralForCausalLM(str(folder), config)
    model.compile(folder / "compiled")
    model.load(folder / "compiled")
    return model


def greedy(model, prompts, steps=5):
    """Tokens and logits [steps, rows, V], prompts padded on the right."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in prompts])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in prompts])
    generator = model if hasattr(model, "generate") else HuggingFaceGenerationAdapter(model)
    output = generator.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=steps,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[:, width:], torch.stack(output.logits)


@pytest.mark.parametrize(
    ("kernels", "degree"),
    [(False, 1), (True, 1), (True, 2), pytest.param(False, 2, marks=pytest.mark.full)],
)
def test_logits_equal_hugging_face(kernels, degree, checkpoint):
    model, folder = checkpoint()
    tokens, logits = greedy(model, PROMPTS[:1])
    app = application(folder, tp_degree=degree, enable_nki=kernels)
    got, found = greedy(app, PROMPTS[:1])
    assert torch.equal(got, tokens)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)


def test_a_prompt_behind_a_prefix_in_blocks(checkpoint, monkeypatch):
    """Blocks that others have filled are gathered in front of attention."""
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    model, folder = checkpoint()
    live = Blocks(application(folder, **BEHIND_A_PREFIX))
    prompt = [*range(3, 40)]
    with torch.no_grad():
        live.share_a_prefix(prompt, model(torch.tensor([prompt])).logits[0, -1])


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_prompt_padded_on_the_left(kernels, checkpoint):
    """Kernels and PyTorch hide the same keys: a prompt of seven tokens in a bucket of sixteen."""
    model, folder = checkpoint()
    app = application(folder, enable_nki=kernels, padding_side="left", batch_size=2)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in PROMPTS])
    mask = (torch.arange(width) >= torch.tensor([[width - len(row)] for row in PROMPTS])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = app(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    for row, prompt in enumerate(PROMPTS):
        wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.full), True])
def test_chunks_of_a_prompt_behind_the_cache(kernels, checkpoint):
    """Six tokens fill the cache, eight come in two chunks: queries of a chunk see those before."""
    model, folder = checkpoint()
    app = application(folder, enable_nki=kernels, speculation_length=4, tp_degree=2)
    ids = torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(2))
    wanted = model(ids).logits
    app(input_ids=ids[:, :6], position_ids=torch.arange(6)[None])
    for at in (6, 10):
        rows = torch.arange(at, at + 4)
        given = {"attention_mask": torch.ones(1, at), "position_ids": rows[None]}
        found = app(input_ids=ids[:, rows], **given).logits
        torch.testing.assert_close(found, wanted[:, rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.full), True])
def test_batches_take_all_experts_in_decode(kernels, checkpoint):
    """Two rows of two choices among three experts: no fewer than all of them."""
    model, folder = checkpoint(num_local_experts=3, tie_word_embeddings=True)
    app = application(folder, batch_size=2, enable_nki=kernels)
    _, found = greedy(app, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        _, logits = greedy(model, [prompt])
        torch.testing.assert_close(found[:, row], logits[:, 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_expert_kernels_equal_the_sum_by_hand(tokens):
    """Tokens that agree, tokens that differ, and experts that nobody chose; 300 take two passes."""
    experts, hidden, inner, each = 4, 128, 256, 2
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((hidden, tokens), generator=generator)
    gate_up = torch.randn((experts, hidden, 2 * inner), generator=generator) / 8
    down = torch.randn((experts, inner, hidden), generator=generator) / 8
    chosen = torch.stack([torch.randperm(3, generator=generator)[:each] for _ in range(tokens)])
    affinities = torch.rand((tokens, each), generator=generator)
    expected = torch.zeros((hidden, tokens), dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(chosen[token].tolist(), affinities[token].double()):
            gate, up = (gate_up[expert].double().t() @ x[:, token].double()).chunk(2)
            made = down[expert].double().t() @ (torch.nn.functional.silu(gate) * up)
            expected[:, token] += share * made
    weights = torch.zeros(tokens, experts).scatter(1, chosen, affinities).t().contiguous()
    got = mixtral.all_experts_kernel(x, weights, gate_up, down)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)
    if tokens > 3:
        return
    flat = chosen.reshape(-1)
    rows = [mixtral.MixtralExperts.rows_of(flat, size) for size in (hidden, inner)]
    spread = affinities.reshape(1, -1).expand(128, -1).contiguous()
    flat_weights = gate_up.reshape(-1, 2 * inner), down.reshape(-1, hidden)
    got = mixtral.chosen_experts_kernel(x, spread, *rows, *flat_weights)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "neuron", "told"),
    [
        ({}, {"tp_degree": 3}, "intermediate_size 208 is not divisible by .* degree 3"),
        ({"sliding_window": 16}, {}, "sliding_window 16 is shorter than seq_len 32"),
        ({"hidden_size": 96}, {"enable_nki": True}, "do not cover hidden_size 96"),
        ({"head_dim": 160}, {"enable_nki": True}, "do not cover head_dim 160"),
        ({}, {"sequence_parallel_enabled": True, "tp_degree": 2}, "sequence_parallel_enabled is"),
    ],
)
def test_what_is_not_modelled_is_refused(shape, neuron, told, checkpoint):
    _, folder = checkpoint(**shape)
    with pytest.raises(ValueError, match=told):
        application(folder, **neuron)
