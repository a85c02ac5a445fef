"""Converts a GGUF file of a Llama model to a Hugging Face folder: config, bf16 weights, tokenizer.

The transformers loader would need one more dependency and takes 25 s for the embedded model. It
leaves out Llama 3's scaling of frequencies, splits all byte-level text as GPT-2 does, and exchanges
the first token and the end token (transformers 4.51, integrations/ggml.py); this takes about 5 s.
Formats: the GGUF specification of ggml-org/ggml, and what transformers 4.45 to 4.51 read.
"""

import json
import math
from pathlib import Path
from typing import Any, Callable, Optional

from harness.errors import UserError

_FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies, [head_dim / 2]
# Types of tokens in tokenizer.ggml.token_type.
_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # never in text; in text, but whole

# How byte-level text is cut before it is merged, by tokenizer.ggml.pre. Llama 3's expression is the
# one that it was published with (meta-llama/llama3, llama/tokenizer.py).
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = ("gpt-2", "llama-bpe", "smollm")
# Frequencies of Llama 3.1 to 3.3 (their config.json); the factor differs, 8 or 32.
_LLAMA_3_FREQUENCIES = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(gguf_path: Path, folder: Path, on_tensor: Callable[[int, int], None]) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer into `folder`.

    `on_tensor(done, total)` is called for each tensor. Peak memory is about three times the bf16
    weights: the memory-mapped file, one tensor in fp32, and the bf16 weights themselves.

    Raises:
        UserError: the file is none of a Llama model, or has what is not read here.
    """
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Theirs reads empty values behind the end of a file, as many as a header says."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *a: Any, **order: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends before what its header says")
            return super()._get(offset, dtype, count, *a, **order)

    try:
        reader = Reader(str(gguf_path))
        config = _config(reader)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(reader, config))
        _write_tokenizer(reader, config, folder)
        _write_weights(reader, config, folder, on_tensor)
    except _Unread as error:
        raise UserError(f"{gguf_path} cannot be converted: {error}.") from error
    except (*_WRONG, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:120]
        raise UserError(
            f"{gguf_path} is no whole GGUF file of a Llama model ({type(error).__name__}: "
            f"{reason}); download it again."
        ) from error


_WRONG = ValueError, LookupError, TypeError, AttributeError, ArithmeticError


class _Unread(Exception):
    """The parts of the file that this module does not read, in words."""


def _field(reader: Any, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _needed(reader: Any, name: str) -> Any:
    if name not in reader.fields:
        raise _Unread(f"it has no {name}")
    return _field(reader, name)


def _config(reader: Any) -> dict[str, Any]:
    """config.json in the style of transformers 4.x, which every later version reads alike."""
    _check_architecture(reader)
    heads = _needed(reader, "llama.attention.head_count")
    hidden = _needed(reader, "llama.embedding_length")
    head_dim = _field(reader, "llama.attention.key_length", hidden // heads)
    rotated = _field(reader, "llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise _Unread(f"it rotates {rotated} of a head's {head_dim} features, expected all")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _needed(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _needed(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _needed(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _needed(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv", heads),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": round(_needed(reader, "llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_scaling": _rope_scaling(reader, head_dim),
        "rope_theta": _rope_theta(reader),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(_needed(reader, "tokenizer.ggml.tokens")),
    }


def _check_architecture(reader: Any) -> None:
    architecture = _needed(reader, "general.architecture")
    if architecture != "llama":
        raise _Unread(f"its architecture is {architecture!r}, expected 'llama'")
    if _field(reader, "split.count", 1) > 1:
        raise _Unread("it is one of several parts; merge them with llama-gguf-split --merge")
    if _field(reader, "llama.expert_count", 0):
        raise _Unread("it is a mixture of experts, expected one MLP a layer")


def _rope_theta(reader: Any) -> float:
    return _field(reader, "llama.rope.freq_base", 10_000.0)


def _rope_scaling(reader: Any, head_dim: int) -> Optional[dict[str, Any]]:
    """The entry of config.json for Llama 3's divisors, or for a linear scaling."""
    kind = _field(reader, "llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _needed(reader, "llama.rope.scaling.factor")}
    if kind != "none":
        raise _Unread(f"its rotary scaling is {kind!r}, expected 'linear', Llama 3's or none")
    found = next((t.data for t in reader.tensors if t.name == _FREQUENCIES), None)
    if found is None:
        return None
    factor = round(float(max(found)), 6)
    expected = _llama_3_divisors(factor, head_dim, _rope_theta(reader))
    whole = len(found) == len(expected)
    if not whole or not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, expected)):
        raise _Unread("its rotary frequencies are scaled, and not as Llama 3.1 to 3.3 scale them")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3_FREQUENCIES}


def _llama_3_divisors(factor: float, head_dim: int, theta: float) -> list[float]:
    """Llama 3.1's divisor of each frequency, by transformers' own rule."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA_3_FREQUENCIES}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, rope_theta=theta, rope_scaling=scaling
    )
    here = torch.device("cpu")
    plain, scaled = (ROPE_INIT_FUNCTIONS[kind](config, here)[0] for kind in ("default", "llama3"))
    return (plain / scaled).tolist()


def _generation_config(reader: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The end of a text and, where it is another token, of a turn."""
    ends = [config["eos_token_id"], _field(reader, "tokenizer.ggml.eot_token_id")]
    ends = sorted({end for end in ends if end is not None})
    kept = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    given = {key: value for key, value in kept.items() if value is not None}
    return given | {"eos_token_id": ends[0] if len(ends) == 1 else ends}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(reader: Any, config: dict[str, Any], folder: Path) -> None:
    """Saved as PreTrainedTokenizerFast, the one class name that transformers 4.x and 5.x share."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    kind = _needed(reader, "tokenizer.ggml.model")
    pre = _field(reader, "tokenizer.ggml.pre")
    tokens = _needed(reader, "tokenizer.ggml.tokens")
    if kind != "gpt2" or pre not in _BYTE_LEVEL:
        raise _Unread(
            f"its tokenizer is {kind!r} cut as {pre!r}, expected 'gpt2' cut as "
            f"{', '.join(_BYTE_LEVEL)}; take the model's folder from Hugging Face"
        )
    tokenizer = _byte_level(reader, tokens, pre)
    kinds = _field(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    for number, special in ((_CONTROL_TOKEN, True), (_USER_DEFINED_TOKEN, False)):
        whole = [token for token, kind in zip(tokens, kinds) if kind == number]
        added = [AddedToken(token, normalized=False, special=special) for token in whole]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _begin_with_first_token(reader, tokenizer, tokens, pre == "llama-bpe")
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **_named_tokens(reader, tokens),
    )
    fast.save_pretrained(str(folder))


def _named_tokens(reader: Any, tokens: list[str]) -> dict[str, str]:
    """The special tokens (`bos_token`, ...) that the file names."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {new: _field(reader, f"tokenizer.ggml.{old}_token_id") for old, new in names.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _begin_with_first_token(reader: Any, tokenizer: Any, tokens: list[str], begins: bool) -> None:
    """Plain text begins with the first token where the file says so, or its kind of model does.

    A chat template writes its own.
    """
    from tokenizers import processors

    first = _field(reader, "tokenizer.ggml.bos_token_id")
    if first is not None and _field(reader, "tokenizer.ggml.add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[first], "$A"], special_tokens=[(tokens[first], first)]
        )


def _byte_level(reader: Any, tokens: list[str], pre: str) -> Any:
    """BPE over bytes, each written as a letter, with the merges that the file lists."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a piece that is a token as it is, whether or not merges lead there.
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    cut: list[Any] = []
    if pre == "llama-bpe":
        cut.append(pre_tokenizers.Split(Regex(_LLAMA_3), behavior="isolated"))
    elif pre == "smollm":
        cut.append(pre_tokenizers.Digits(individual_digits=True))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_weights(
    reader: Any, config: dict[str, Any], folder: Path, on_tensor: Callable[[int, int], None]
) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    names, weights = _names(config), dict[str, torch.Tensor]()
    for done, tensor in enumerate(reader.tensors, start=1):
        on_tensor(done, len(reader.tensors))
        if tensor.name == _FREQUENCIES:  # config.json has them
            continue
        values = dequantize(tensor.data, tensor.tensor_type)  # [out, in] or [hidden], fp32
        if tensor.name.endswith("attn_q.weight"):
            values = _interleaved_to_halves(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = _interleaved_to_halves(values, config["num_key_value_heads"])
        if tensor.name not in names:
            raise _Unread(f"it has a tensor {tensor.name}, which no Llama has here")
        weights[names[tensor.name]] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF's name of each parameter -> transformers' own."""
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM

    table = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(LlamaConfig(**config)).named_parameters()]
    return {f"{table.get_name(name.removesuffix('.weight'))}.weight": name for name in names}


def _interleaved_to_halves(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order, which pairs RoPE's two halves: rows (heads, d/2, 2) -> (2, d/2).

    Shapes: [heads * d, in] in and out.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
