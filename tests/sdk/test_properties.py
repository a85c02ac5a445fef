"""Random configurations against Hugging Face's LlamaForCausalLM, in fp32."""

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests import greedy

STEPS = 4
SEQ_LEN = 32

shapes = st.fixed_dictionaries(
    {
        "group": st.integers(1, 8),
        "num_key_value_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 6, 64, 128]),
        "intermediate_size": st.integers(3, 60),
        "vocab_size": st.integers(20, 90),
        "num_hidden_layers": st.integers(1, 2),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "scaled": st.booleans(),
    }
)
runs = st.fixed_dictionaries(
    {
        "tp_degree": st.sampled_from([1, 2, 3, 4]),
        "padding_side": st.sampled_from(["right", "left"]),
        "fused_qkv": st.booleans(),
        "vocab_parallel": st.booleans(),
        "enable_bucketing": st.booleans(),
        "context_encoding_buckets": st.lists(st.integers(4, 20), max_size=2, unique=True),
        "token_generation_buckets": st.lists(st.integers(8, 30), max_size=2, unique=True),
    }
)
lengths = st.lists(st.integers(2, 20), min_size=1, max_size=4)


def model_shape(drawn):
    """Keywords of a LlamaConfig; hidden size = heads x head_dim, odd where those are."""
    shape = dict(drawn)
    heads = shape.pop("group") * shape["num_key_value_heads"]
    shape["num_attention_heads"] = heads
    shape["hidden_size"] = heads * shape["head_dim"]
    if shape.pop("scaled"):
        shape["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    shape["initializer_range"] = 0.6 / shape["hidden_size"] ** 0.5
    return shape


@seed(20250114)
@settings(
    max_examples=5,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=shapes, run=runs, rows=lengths)
def test_logits_agree(tiny_llama, application, drawn, run, rows):
    shape = model_shape(drawn)
    model, folder = tiny_llama(**shape)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    run = dict(run)
    longest = 21 if run["padding_side"] == "right" else SEQ_LEN  # NxDI pads on the left to no less
    run["context_encoding_buckets"] = [*run["context_encoding_buckets"], longest]
    run["token_generation_buckets"] = [*run["token_generation_buckets"], SEQ_LEN]
    app = application(
        folder, batch_size=len(rows), seq_len=SEQ_LEN, max_context_length=longest, **run
    )
    generator = torch.Generator().manual_seed(sum(rows))
    prompts = [
        torch.randint(1, shape["vocab_size"], (length,), generator=generator).tolist()
        for length in rows
    ]
    for row, (found, got) in enumerate(zip(*greedy.logits(app, prompts, STEPS), strict=True)):
        tokens, logits = greedy.alone(model, prompts[row], STEPS)
        assert float((got - logits).abs().max() / logits.abs().max()) < 1e-4
        assert found.tolist() == tokens.tolist()
