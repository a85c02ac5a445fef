"""Public Llama configurations by name, for work that needs shapes and no weights."""

from typing import Any

# config.json of the models named, fields that shapes and NxDI's config classes read
_LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


def _scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3(
    hidden: int, inner: int, layers: int, heads: int, head_dim: int, factor: float, tied: bool
) -> dict[str, Any]:
    return _LLAMA3 | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "rope_scaling": _scaling(factor),
        "tie_word_embeddings": tied,
    }


MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, 32.0, True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, 32.0, True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, 8.0, False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 128, 8.0, False),
    "smollm2-135m": _LLAMA3
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
}
