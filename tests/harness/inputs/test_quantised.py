"""Flags of quantisation, and quantised folders that do not fit, refused before anything is long."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import UserError
from harness.inputs import command_line, models, quantised
from tests.tiny_model import write_tiny_model


def parsed(*flags):
    return command_line.parse(["--mode", "generate", *flags])


def test_one_flag_for_all(tmp_path):
    settings = parsed("--quantize", "fp8", "--kv-cache-quant")
    asked = settings.neuron_config()
    assert asked["quantization_dtype"] == "f8e4m3" and asked["kv_cache_quant"] is True
    assert asked["quantization_type"] == "per_channel_symmetric"
    assert settings.quantised_words == "f8e4m3 weights, one scale a channel; keys and values in fp8"
    plain = parsed().neuron_config()
    assert not {"quantized", "kv_cache_quant", "quantized_checkpoints_path"} & plain.keys()
    path = str(tmp_path / "q")
    settings = parsed("--quantized", "--quantized-checkpoints-path", path)
    assert settings.neuron_config()["quantization_type"] == "per_tensor_symmetric"
    assert settings.neuron_config()["quantized_checkpoints_path"] == path
    settings = parsed("--quantize", "int8", "--quantization-type", "per_tensor_symmetric")
    assert settings.neuron_config()["quantization_type"] == "per_tensor_symmetric"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantized"], "needs --quantized-checkpoints-path"),
        (["--quantized-checkpoints-path", "x"], "needs --quantized or --quantize"),
        (["--quantization-type", "per_channel_symmetric"], "needs --quantized or --quantize"),
        (["--quantize", "int8", "--quantized"], "says all of --quantized"),
        (["--quantize", "int8", "--quantization-dtype", "f8e4m3"], "says all of --quantized"),
    ],
)
def test_flags_that_contradict(flags, message):
    with pytest.raises(UserError, match=message):
        parsed(*flags)


@pytest.mark.parametrize("content", [{"modules_to_not_convert": ["lm_head"]}, {"model": {}}, []])
def test_lists_of_modules(tmp_path, content):
    """NxDI's file, alone or beside that of a draft; per tensor it would be ignored."""
    file = tmp_path / "modules.json"
    flags = ["--quantize", "int8", "--modules-to-not-convert-file", str(file)]
    file.write_text(json.dumps(content))
    if isinstance(content, list) or "model" in content:
        with pytest.raises(UserError):
            parsed(*flags)
        return
    assert parsed(*flags).modules_to_not_convert == ["lm_head"]
    file.write_text(json.dumps({"model": content, "draft_model": {}}))
    assert parsed(*flags).modules_to_not_convert == ["lm_head"]
    with pytest.raises(UserError, match="per_channel_symmetric"):
        parsed(*flags, "--quantization-type", "per_tensor_symmetric")


def test_folders_that_do_not_fit(tmp_path):
    model = models.check_folder(write_tiny_model(tmp_path / "model"))
    folder = tmp_path / "quantised"
    folder.mkdir()
    plain = load_file(model.path / "model.safetensors")
    name = "layers.0.mlp.up_proj"
    rows = plain[f"model.{name}.weight"].shape[0]
    scales = {f"{name}.scale": torch.ones(rows, 1)}

    def refused(message, tensors, kind="per_channel_symmetric"):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(UserError, match=message):
            quantised.check(folder, model, kind)

    with pytest.raises(UserError, match="holds no safetensors"):
        quantised.check(folder, model, "per_channel_symmetric")
    refused("a plain checkpoint without scales", plain)
    refused(rf"got \[{rows}, 1\]", plain | scales, "per_tensor_symmetric")
    refused(r"expected shape \[\d+, 1\]", plain | {f"{name}.weight_scale": torch.ones(rows + 1, 1)})
    narrow = {f"model.{name}.weight": torch.ones(rows, 3)}
    refused(r"does not fit the model", plain | scales | narrow)
    save_file(plain | scales, folder / "model.safetensors")
    quantised.check(folder, model, "per_channel_symmetric")


def test_a_checkpoint_is_known_by_its_files(tmp_path):
    """None where there is none; another one has another identity, so nothing is reused for it."""
    path = tmp_path / "weights.safetensors"
    settings = parsed("--quantized", "--quantized-checkpoints-path", str(path))
    assert quantised.identity(settings) is None
    path.write_bytes(b"one")
    found = quantised.identity(settings)
    assert list(found) == [str(path)] and found[str(path)][0] == 3
    path.write_bytes(b"other")
    assert quantised.identity(settings) != found
    assert quantised.identity(parsed()) is None
