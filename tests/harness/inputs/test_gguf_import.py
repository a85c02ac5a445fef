"""The embedded model's conversion, on a file of its form: weights, tokenizer, damaged files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from harness.errors import UserError
from harness.inputs import gguf_import, models

SIZES = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "rope_scaling", "tie_word_embeddings"),
    *("max_position_embeddings", "eos_token_id"),
}
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
IN_BYTES, KIND = "model.embed_tokens.weight", GGMLQuantizationType.Q8_0


def interleave(weight, heads):
    """llama.cpp's row order from Hugging Face's, written out row by row."""
    rows = weight.shape[0] // heads
    result = np.empty_like(weight)
    for head in range(heads):
        for index in range(rows // 2):
            result[head * rows + 2 * index] = weight[head * rows + index]
            result[head * rows + 2 * index + 1] = weight[head * rows + rows // 2 + index]
    return result


@pytest.fixture
def tiny_gguf(tiny_model, tmp_path):
    """The tiny model's folder as a GGUF file, one tensor of it in bytes."""
    path = tmp_path / "tiny.gguf"
    config, out = json.loads((tiny_model / "config.json").read_text()), GGUFWriter(path, "llama")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    for name, weight in load_file(str(tiny_model / "model.safetensors")).items():
        values = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = interleave(values, config[heads])
        stored = name.removeprefix("model.").replace("layers.", "blk.")
        stored = "output_norm.weight" if stored == "norm.weight" else stored
        for theirs, own in NAMES.items():
            stored = stored.replace(theirs, own)
        in_bytes = {"raw_dtype": KIND} if name == IN_BYTES else {}
        out.add_tensor(stored, quants.quantize(values, KIND) if in_bytes else values, **in_bytes)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12", "hel"]
    tokens += [f"[unused{index}]" for index in range(320 - len(tokens))]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    out.add_token_merges(["h e", "1 2", "he l"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template("{{ '<|im_start|>' + messages[0]['content'] + '<|im_end|>' }}")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_gguf_file_gives_its_folder_back(tiny_gguf, tiny_model, tmp_path):
    steps = []
    gguf_import.convert(tiny_gguf, tmp_path, lambda *step: steps.append(step))
    kept, made = (load_file(str(f / "model.safetensors")) for f in (tiny_model, tmp_path))
    assert kept.keys() == made.keys()
    stored = quants.dequantize(quants.quantize(kept[IN_BYTES].float().numpy(), KIND), KIND)
    kept[IN_BYTES] = torch.from_numpy(stored).to(torch.bfloat16)
    assert all(torch.equal(kept[name], made[name]) for name in kept)
    assert steps == [(i + 1, len(made)) for i in range(len(made))]
    configs = [models.check_folder(f).config for f in (tiny_model, tmp_path)]
    assert configs[1]["use_cache"] is True and "rope_parameters" not in configs[1]
    assert all(configs[1][name] == value for name, value in configs[0].items() if name in SIZES)


def test_the_tokenizer_splits_digits_and_gives_text_back(tiny_gguf, tmp_path):
    gguf_import.convert(tiny_gguf, tmp_path, lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(tokenizer).__name__ == "PreTrainedTokenizerFast"
    ids = tokenizer("help 12")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["hel", "p", "Ġ", "1", "2"]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    text = "  naïve 你好 \t\n x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "h"}])
    assert (chat[0], chat[-1], len(chat)) == (1, 2, 3)


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1000])
def test_files_cut_short_are_one_sentence(kept, tiny_gguf, tmp_path):
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:kept])
    with pytest.raises(UserError, match="tiny.gguf is not the embedded model's file"):
        gguf_import.convert(tiny_gguf, tmp_path, lambda *_: None)
