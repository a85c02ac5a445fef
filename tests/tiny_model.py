"""A tiny seeded Llama folder for tests of the driver and the SDK stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
}


def write_tiny_model(folder, seed=0, **changes):
    """A seeded random Llama checkpoint with a byte-level tokenizer (ids 3 to 258 are the bytes).

    Two query and two key/value heads of 64, so that degrees 1 and 2 both work.
    """
    import torch
    from safetensors.torch import save_file

    config = TINY_CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    )
    generator = torch.Generator().manual_seed(seed)
    save_file(
        {
            name: _random_weight(name, shape, generator)
            for name, shape in _tiny_shapes(config).items()
        },
        str(folder / "model.safetensors"),
    )
    _write_byte_tokenizer(folder)
    return folder


def _random_weight(name, shape, generator):
    """bf16; the head is large, so that the two best logits rarely stand close together."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * values).to(torch.bfloat16)
    scale = 1.0 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5
    return (scale * values).to(torch.bfloat16)


def _tiny_shapes(config):
    from harness.inputs.models import ModelFolder, expected_shapes

    return expected_shapes(ModelFolder(Path("tiny"), "tiny", config))


def _write_byte_tokenizer(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(folder))


def opened(model, folder, *arguments):
    """A session of the driver with graphs of 64 tokens for one rank, compiled into ``folder``."""
    from harness.inputs import command_line
    from harness.session.opening import open_session

    asked = ["--mode", "generate", "--prompt", "hello", "--tp-degree", 1, "--seq-len", 64]
    asked += ["--model-path", model, "--compiled-model-path", folder, *arguments]
    return open_session(command_line.parse([str(word) for word in asked]))


# What configurations of Llama's relatives have in common, but for heads and the MLP.
SMALL: dict[str, Any] = dict(
    hidden_size=192,
    num_hidden_layers=2,
    head_dim=64,
    vocab_size=212,
    max_position_embeddings=64,
    initializer_range=0.15,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
# Odd on purpose: no size but the number of layers and of key heads is a power of two.
ODD: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=208,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
# A Qwen3 with experts that the kernels of the 2026 contest's entries take at degree 4.
TINY_EXPERTS: dict[str, Any] = dict(
    model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=1024, head_dim=128,
    num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1, num_experts=16,
    num_experts_per_tok=8, moe_intermediate_size=512, norm_topk_prob=True, mlp_only_layers=[],
    decoder_sparse_step=1,
)  # fmt: skip

if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]), **TINY_EXPERTS)
