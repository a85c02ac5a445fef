"""One GGUF file of a Llama model into a Hugging Face folder: config, bf16 weights, tokenizer.

The transformers loader would need one more dependency and 25 s, and gives the tokenizer of this
model a wrong end token and an unwanted first one; this takes about 5 s. Formats: the GGUF
specification of ggml-org/ggml, and what transformers 4.45 to 4.51 read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

# GGUF name -> Hugging Face name, below `blk.{i}.` and `model.layers.{i}.`.
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of tokens that text never contains


def convert(gguf_path: Path, folder: Path, on_tensor: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer into `folder`.

    `on_tensor(done, total)` is called after each tensor. Peak memory is about three times the bf16
    weights: the memory-mapped file, one tensor in fp32, and the bf16 weights themselves.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_path))
    config = _config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_tokenizer(reader, config, folder)
    _write_weights(reader, config, folder, on_tensor)


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _config(reader: Any) -> dict[str, Any]:
    """config.json in the style of transformers 4.x, which every later version reads alike."""
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_scaling": None,
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(reader: Any, config: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE with every digit a token of its own (pre-tokenizer "smollm").

    Saved as PreTrainedTokenizerFast, the one class name that transformers 4.x and 5.x share.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"The GGUF tokenizer must be ('gpt2', 'smollm'), got {kind}.")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config["bos_token_id"]],
        eos_token=tokens[config["eos_token_id"]],
        pad_token=tokens[config["pad_token_id"]],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))


def _write_weights(
    reader: Any, config: dict[str, Any], folder: Path, on_tensor: Callable[[int, int], None]
) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [hidden], fp32
        if tensor.name.endswith("attn_q.weight"):
            values = _interleaved_to_halves(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = _interleaved_to_halves(values, config["num_key_value_heads"])
        weights[_hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
        on_tensor(done, len(reader.tensors))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"


def _interleaved_to_halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order, which pairs RoPE's two halves: rows (heads, d/2, 2) -> (2, d/2).

    Shapes: [heads * d, in] in and out.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
