"""GGUF files of Llama models: tokenizers against own readings of them, scaling, what is refused."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from harness.errors import UserError
from harness.inputs import gguf_import, models

LLAMA_3 = regex.compile(  # as tiktoken's users have it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SIZES = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings"),
    *("max_position_embeddings", "eos_token_id"),
}


def interleave(weight, heads):
    """llama.cpp's row order from Hugging Face's, written out row by row."""
    rows = weight.shape[0] // heads
    result = np.empty_like(weight)
    for head in range(heads):
        for index in range(rows // 2):
            result[head * rows + 2 * index] = weight[head * rows + index]
            result[head * rows + 2 * index + 1] = weight[head * rows + rows // 2 + index]
    return result


NAMES = {  # of llama.cpp
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


class Writer:
    """The tiny model's folder as a GGUF file, one tensor of it in bytes."""

    def __init__(self, path, folder, architecture="llama", in_bytes=""):
        self.path, self.out = path, GGUFWriter(str(path), architecture)
        config = json.loads((folder / "config.json").read_text())
        out = self.out
        out.add_block_count(config["num_hidden_layers"])
        out.add_context_length(config["max_position_embeddings"])
        out.add_embedding_length(config["hidden_size"])
        out.add_feed_forward_length(config["intermediate_size"])
        out.add_head_count(config["num_attention_heads"])
        out.add_head_count_kv(config["num_key_value_heads"])
        out.add_layer_norm_rms_eps(config["rms_norm_eps"])
        out.add_rope_freq_base(config["rope_theta"])
        out.add_eos_token_id(config["eos_token_id"])
        out.add_bos_token_id(config["bos_token_id"])
        for name, weight in load_file(str(folder / "model.safetensors")).items():
            values = weight.float().numpy()
            if "q_proj" in name or "k_proj" in name:
                values = interleave(values, config["num_attention_heads"])
            stored = name.removeprefix("model.").replace("layers.", "blk.")
            stored = "output_norm.weight" if stored == "norm.weight" else stored
            for theirs, own in NAMES.items():
                stored = stored.replace(theirs, own)
            kind = GGMLQuantizationType.Q8_0
            if name == in_bytes:
                out.add_tensor(stored, quants.quantize(values, kind), raw_dtype=kind)
            else:
                out.add_tensor(stored, values)

    def bytes_as_tokens(self, folder, pre="gpt-2"):
        vocabulary = AutoTokenizer.from_pretrained(str(folder)).get_vocab()
        tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
        tokens += [f"[unused{index}]" for index in range(320 - len(tokens))]
        self.byte_level(tokens, [], pre)

    def byte_level(self, tokens, merges, pre):
        self.out.add_tokenizer_model("gpt2")
        self.out.add_tokenizer_pre(pre)
        self.out.add_token_list(tokens)
        self.out.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        self.out.add_token_merges(merges)

    def close(self):
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()
        return self.path


@pytest.fixture
def write(tiny_model, tmp_path):
    return lambda *more: Writer(tmp_path / "tiny.gguf", tiny_model, *more)


def converted(path):
    folder = path.parent / "hf"
    folder.mkdir()
    gguf_import.convert(path, folder, lambda done, total: None)
    return folder


def test_a_gguf_file_gives_its_folder_back(write, tiny_model):
    writer = write()
    writer.bytes_as_tokens(tiny_model)
    folder = converted(writer.close())
    kept, made = (load_file(str(f / "model.safetensors")) for f in (tiny_model, folder))
    assert kept.keys() == made.keys()
    assert all(torch.equal(kept[name], made[name]) for name in kept)
    configs = [models.check_folder(f).config for f in (tiny_model, folder)]
    assert configs[1]["use_cache"] is True
    assert all(configs[1][name] == value for name, value in configs[0].items() if name in SIZES)
    texts = [
        AutoTokenizer.from_pretrained(str(f))("hé 12\n")["input_ids"] for f in (tiny_model, folder)
    ]
    assert texts[0] == texts[1]


def test_bytes_with_scales_and_a_tokenizer_that_splits_digits(write, tiny_model, tmp_path):
    name, kind = "model.embed_tokens.weight", GGMLQuantizationType.Q8_0
    writer = write("llama", name)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12", "hel"]
    tokens += [f"[unused{index}]" for index in range(320 - len(tokens))]
    writer.byte_level(tokens, ["h e", "1 2", "he l"], "smollm")
    writer.out.add_chat_template("{{ '<|im_start|>' + messages[0]['content'] + '<|im_end|>' }}")
    folder, steps = tmp_path, []
    gguf_import.convert(writer.close(), folder, lambda *step: steps.append(step))
    kept, made = (load_file(str(f / "model.safetensors")) for f in (tiny_model, folder))
    stored = quants.dequantize(quants.quantize(kept[name].float().numpy(), kind), kind)
    assert torch.equal(made[name], torch.from_numpy(stored).to(torch.bfloat16))
    assert steps == [(i + 1, len(made)) for i in range(len(made))]
    assert "rope_parameters" not in models.check_folder(folder).config
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert type(tokenizer).__name__ == "PreTrainedTokenizerFast"
    ids = tokenizer("help 12")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["hel", "p", "Ġ", "1", "2"]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    text = "  naïve 你好 \t\n x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "h"}])
    assert (chat[0], chat[-1], len(chat)) == (1, 2, 3)


def test_a_changed_file_is_converted_anew(write, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writer = write()
    writer.bytes_as_tokens(tiny_model)
    path = writer.close()
    first = models.located(path)
    assert models.located(path) == first and first[1] == "tiny"
    path.write_bytes(path.read_bytes() + b"\0")
    assert models.located(path)[0] != first[0]


def test_config_says_how_frequencies_are_scaled(write, tiny_model):
    writer = write()
    writer.bytes_as_tokens(tiny_model, "llama-bpe")
    divisors = np.array(gguf_import._llama_3_divisors(8.0, 64, 10000.0), dtype=np.float32)
    assert divisors[0] == 1 and divisors[-1] == 8  # a short wave, and one beyond the old context
    writer.out.add_tensor("rope_freqs.weight", divisors)
    writer.out.add_eot_token_id(5)
    folder = converted(writer.close())
    model = models.check_folder(folder)
    assert model.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert model.generation["eos_token_id"] == [2, 5]


def merged(piece, ranks):
    """Byte-pair merging, by definition: the pair of least rank first, the leftmost of them."""
    while True:
        pairs = [
            (ranks[pair], at) for at, pair in enumerate(itertools.pairwise(piece)) if pair in ranks
        ]
        if not pairs:
            return piece
        at = min(pairs)[1]
        piece = [*piece[:at], piece[at] + piece[at + 1], *piece[at + 2 :]]


TEXTS = (
    "It's 123456 o'clock,\n\n  WE'LL go",
    "  naïve 你好 \t\n x",
    "a1b22c333d4444!!\r\n?",
    "",
    "hello hello!\nhello",
)


def test_llama_3_cuts_text_as_it_was_published(write):
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "3 4", "h e", "l l", "he ll", "hell o", "Ġ hello", "' s", "! Ċ"]
    tokens = ["<|pad|>", "<|begin_of_text|>", "<|eot_id|>", *alphabet]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"[unused{index}]" for index in range(320 - len(tokens))]
    writer = write()
    writer.byte_level(tokens, merges, "llama-bpe")
    tokenizer = AutoTokenizer.from_pretrained(str(converted(writer.close())))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    for text in TEXTS:
        expected = ["<|begin_of_text|>"]
        for piece in LLAMA_3.findall(text):
            whole = "".join(part for part, _ in letters.pre_tokenize_str(piece))
            expected += [whole] if whole in tokens else merged(list(whole), ranks)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == expected
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def wrong_frequencies(writer):
    writer.out.add_tensor("rope_freqs.weight", np.linspace(1, 8, 32, dtype=np.float32))


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "yarn": (lambda w: w.out.add_string("llama.rope.scaling.type", "yarn"), "'yarn'"),
    "frequencies": (wrong_frequencies, "not as Llama 3.1 to 3.3"),
    "experts": (lambda w: w.out.add_expert_count(8), "mixture of experts"),
    "parts": (lambda w: w.out.add_uint16("split.count", 2), "llama-gguf-split --merge"),
    "rotation": (lambda w: w.out.add_rope_dimension_count(32), "rotates 32 of a head's 64"),
    "bias": (
        lambda w: w.out.add_tensor("blk.0.attn_q.bias", np.zeros(4, np.float32)),
        "blk.0.attn_q.bias",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_read_is_refused_by_name(case, write, tiny_model):
    spoil, told = WRONG[case]
    writer = write()
    writer.bytes_as_tokens(tiny_model)
    spoil(writer)
    with pytest.raises(UserError, match=f"tiny.gguf cannot be converted: .*{told}"):
        converted(writer.close())


@pytest.mark.parametrize(
    ("model", "pre"), [("gpt2", "tekken"), ("bert", "none"), ("llama", "none")]
)
def test_other_tokenizers_are_refused(model, pre, write):
    writer = write()
    writer.out.add_tokenizer_model(model)
    writer.out.add_tokenizer_pre(pre)
    writer.out.add_token_list(["a"])
    with pytest.raises(UserError, match=f"its tokenizer is '{model}' cut as '{pre}'"):
        converted(writer.close())


def test_other_architectures_are_refused(write):
    with pytest.raises(UserError, match="its architecture is 'qwen2', expected 'llama'"):
        converted(write("qwen2").close())


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1000])
def test_files_cut_short_are_one_sentence(kept, write, tiny_model):
    writer = write()
    writer.bytes_as_tokens(tiny_model)
    path = writer.close()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="tiny.gguf .*(no whole GGUF file|cannot be converted)"):
        converted(path)


ONE_KEY = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9)


@pytest.mark.parametrize(
    "rest",
    [struct.pack("<IQ", 4, 1 << 60), struct.pack("<IQ", 9, 1) * 100_000, struct.pack("<IQ", 8, 9)],
    ids=["an endless array", "arrays of arrays", "an array of nothing"],
)
def test_a_header_that_says_more_than_there_is(rest, tmp_path):
    """Their reader would take all memory for the first one, and a minute."""
    (tmp_path / "tiny.gguf").write_bytes(ONE_KEY + rest)
    with pytest.raises(UserError, match="no whole GGUF file"):
        converted(tmp_path / "tiny.gguf")
