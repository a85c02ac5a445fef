"""Whole applications against Hugging Face's LlamaForCausalLM, in fp32."""

from __future__ import annotations

import pytest
import torch

PROMPTS = [[7, 3, 9, 11, 200, 45, 6], [5, 6, 7], [90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100]]
STEPS = 12


def assert_same_as_reference(model, app, generate, reference, prompts=PROMPTS, steps=STEPS):
    """Tokens equal and logits within 1e-4 of the largest one, row by row."""
    output = generate(app, prompts, steps, return_dict_in_generate=True, output_logits=True)
    width = output.sequences.shape[1] - steps
    for row, prompt in enumerate(prompts):
        tokens, logits = reference(model, prompt, steps)
        got = torch.stack([step[row] for step in output.logits])
        error = (got - logits).abs().max() / logits.abs().max()
        assert error < 1e-4, f"row {row}: relative error {error}"
        assert output.sequences[row, width:].tolist() == tokens.tolist()


@pytest.mark.parametrize("tp_degree", [1, 2, 4, 8])
def test_tensor_parallel_degrees(tiny_llama, application, generate, reference, tp_degree):
    """6 query and 2 key-value heads: replicated at 4, padded as well at 4 and 8."""
    model, folder = tiny_llama()
    app = application(folder, batch_size=3, tp_degree=tp_degree)
    assert_same_as_reference(model, app, generate, reference)


@pytest.mark.parametrize(
    "option",
    [
        {"fused_qkv": True},
        {"vocab_parallel": True},
        {"sequence_parallel_enabled": True},
        {"padding_side": "left"},
        {"padding_side": "left", "max_context_length": 48},
        {"rpl_reduce_dtype": "float32"},
        {"is_continuous_batching": True, "ctx_batch_size": 1},
        {
            "enable_bucketing": True,
            "context_encoding_buckets": [8, 16, 32],
            "token_generation_buckets": [16, 24, 48],
        },
        {
            "padding_side": "left",
            "enable_bucketing": True,
            "context_encoding_buckets": [16, 32],
            "token_generation_buckets": [16, 24, 48],
        },
    ],
    ids=lambda option: "-".join(option),
)
def test_options_change_no_result(tiny_llama, application, generate, reference, option):
    model, folder = tiny_llama()
    app = application(folder, batch_size=3, tp_degree=2, **option)
    assert_same_as_reference(model, app, generate, reference)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_degree"),
    [(9, 3, 2), (9, 3, 3), (12, 2, 8), (5, 5, 2), (8, 1, 4), (4, 4, 8), (6, 3, 4), (10, 2, 4)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_grouped_heads_that_do_not_divide(
    tiny_llama, application, generate, reference, heads, kv_heads, tp_degree, fused
):
    model, folder = tiny_llama(
        hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    app = application(folder, tp_degree=tp_degree, fused_qkv=fused)
    assert_same_as_reference(model, app, generate, reference, prompts=PROMPTS[:1], steps=5)


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ],
    ids=lambda shape: "-".join(shape),
)
def test_model_variants(tiny_llama, application, generate, reference, shape):
    model, folder = tiny_llama(**shape)
    torch.manual_seed(3)
    if shape.get("attention_bias"):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    app = application(folder, batch_size=3, tp_degree=2)
    assert_same_as_reference(model, app, generate, reference)


def test_thirty_two_decode_steps(tiny_llama, application, generate, reference):
    model, folder = tiny_llama(num_hidden_layers=3)
    app = application(folder, seq_len=64)
    assert_same_as_reference(model, app, generate, reference, prompts=PROMPTS[:1], steps=32)


def test_rows_do_not_depend_on_their_neighbours(tiny_llama, application, generate):
    _, folder = tiny_llama()
    app = application(folder, batch_size=3, tp_degree=2)
    together = generate(app, PROMPTS, STEPS)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(app, [prompt, PROMPTS[2], [8, 8, 8, 9]], STEPS)
        assert alone[0].tolist() == together[row].tolist()


def test_fewer_rows_than_compiled(tiny_llama, application, generate):
    _, folder = tiny_llama()
    app = application(folder, batch_size=3)
    together = generate(app, PROMPTS, STEPS)
    assert generate(app, PROMPTS[:1], STEPS)[0].tolist() == together[0].tolist()


def test_more_rows_than_compiled_are_refused(tiny_llama, application, generate):
    _, folder = tiny_llama()
    app = application(folder, batch_size=2)
    with pytest.raises(ValueError, match="batch of 3 rows.*batch_size 2.*is_continuous_batching"):
        generate(app, PROMPTS, 2)
