"""Quantised checkpoints, the user's or the driver's: their folders, and whether they fit. The
checks read JSON and safetensors headers only; a pickle is checked when it is loaded.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import cache_folder, check_writable_folder
from harness.inputs import models, schema
from harness.settings import Settings

FOLDER = "quantised"
MODULES = "modules_to_not_convert"
_SCALES = (".scale", ".weight_scale")  # NxDI's name, and other tools' (0.2 and later)
# Compilation of fp8 needs the first (NxDI's inference_demo, 0.1 and later) and the second (later).
FP8_ENVIRONMENT = ("XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def with_checkpoint(settings: Settings, model: models.ModelFolder) -> Settings:
    """The settings with the path of the quantised checkpoint, checked where it exists."""
    if settings.kv_cache_quant or settings.quantization_dtype != "int8":
        for name in FP8_ENVIRONMENT:
            os.environ.setdefault(name, "1")
    if not settings.quantized:
        return settings
    path = settings.quantized_checkpoints_path
    if path is None:
        path = cache_folder() / FOLDER / _name(settings, model)
    if path.exists():
        check(path, model, settings.quantization_type)
    elif "quantization_config" in model.config:
        raise UserError(
            f"{model.path}/config.json has a quantization_config, by which transformers would "
            "quantise the float weights first; take that entry out."
        )
    else:
        check_writable_folder(path)
    return replace(settings, quantized_checkpoints_path=path)


def _name(settings: Settings, model: models.ModelFolder) -> str:
    """A name that differs wherever the checkpoint would differ."""
    skipped, identity = settings.modules_to_not_convert, models.checkpoint_identity(model.path)
    content = json.dumps([settings.quantization_type, skipped, identity], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{model.name}-{settings.quantization_dtype}-{digest}"


def identity(settings: Settings) -> dict[str, list[Any]] | None:
    """The identity of the quantised checkpoint; None without one."""
    path = settings.quantized_checkpoints_path
    if not settings.quantized or path is None or not path.exists():
        return None
    if path.is_dir():
        return models.checkpoint_identity(path)
    stat = path.stat()
    return {str(path): [stat.st_size, stat.st_mtime_ns]}


def check(path: Path, model: models.ModelFolder, quantization_type: str) -> None:
    """Refuse a folder without scales, or with tensors of other shapes than the model's."""
    if not path.is_dir():
        return
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"The quantised folder {path} holds no safetensors, expected "
            "files of save_quantized_state_dict; name another path, and one is made there."
        )
    shapes: dict[str, list[int]] = {}
    for file in files:
        found = models.entries_of(file)
        shapes.update({name.removeprefix("model."): one.shape for name, one in found.items()})
    if not any(name.endswith(_SCALES) for name in shapes):
        raise UserError(
            f"{path} holds a plain checkpoint without scales, expected a quantised one, with "
            "X.scale or X.weight_scale beside X.weight; name a new path, where one is made, or "
            "leave --quantized out."
        )
    expected = models.expected_shapes(model)
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    for name, shape in expected.items():
        _check_tensor(path, name.removeprefix("model."), shape, shapes, quantization_type)


def _check_tensor(
    path: Path, name: str, shape: list[int], shapes: dict[str, list[int]], quantization_type: str
) -> None:
    if shapes.get(name, shape) != shape:
        raise UserError(
            f"The tensor {name} in {path} does not fit the model: expected shape {shape}, got "
            f"{shapes[name]}; quantise this model's checkpoint."
        )
    per_channel = quantization_type == "per_channel_symmetric"
    fits = [[shape[0], 1]] if per_channel else [[1], []]
    for ending in _SCALES:
        scale = name.removesuffix(".weight") + ending
        if shapes.get(scale, fits[0]) not in fits:
            raise UserError(
                f"The tensor {scale} in {path} does not fit: expected shape {fits[0]} by "
                f"{quantization_type}, got {shapes[scale]}; quantise again, or give the other "
                "--quantization-type."
            )


def read_module_list(path: Path) -> list[str]:
    """Names out of NxDI's JSON: `{"model": {"modules_to_not_convert": [...]}}`, or the inner
    object alone."""
    content = schema.read_json(path)
    names = content.get("model", content)
    names = names.get(MODULES) if isinstance(names, dict) else None
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise UserError(
            f"{path} must hold a list of names under {MODULES}, alone or inside of 'model', got "
            f"{json.dumps(content)[:80]}; write it as NxDI's inference_demo reads it."
        )
    return names
