"""Adapters' checkpoints: PEFT folders, their demands, and their tensors in the model's layout.

Keys are matched by layer number, block and leaf ("0", "self_attn", "q_proj"), as NxDI does
(`modules/lora_serving/lora_checkpoint.py`); other parts of a key do not count.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
from safetensors.torch import load_file

from neuron_cpu.errors import CheckpointError

from .config import LoraServingConfig
from .lora_module import MultiLoraModule, is_target, wrapped

Place = Tuple[str, ...]  # (layer, block, leaf), or (leaf,) outside of the layers
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# What PEFT can train and this product of two matrices is not.
_OTHER_KINDS = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


@dataclass(frozen=True)
class Adapter:
    """The contents of `adapter_config.json`."""

    folder: Path
    rank: int
    scale: float
    target_modules: List[str]


def read_config(name: str, folder: str) -> Adapter:
    """The adapter's configuration. FileNotFoundError where a file is missing, ValueError for
    another kind of adapter."""
    path = Path(folder)
    for needed in (_CONFIG, _WEIGHTS):
        if not (path / needed).is_file():
            raise FileNotFoundError(
                f"Adapter {name} has no {needed} in {path}, expected a folder as PEFT saves it."
            )
    content = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    rank, alpha, targets = (content.get(k) for k in ("r", "lora_alpha", "target_modules"))
    other = [kind for kind in _OTHER_KINDS if content.get(kind)]
    if other or content.get("bias", "none") != "none" or not isinstance(targets, list):
        raise ValueError(
            f"Adapter {name} in {path} uses {other or 'biases or a pattern of target_modules'}, "
            "expected plain LoRA with a list of target_modules; train it without."
        )
    if type(rank) is not int or rank < 1:
        raise ValueError(f"Adapter {name} in {path} has rank {rank!r}, expected at least 1.")
    # NxDI takes 1 for an alpha that is missing or 0
    scale = 1.0 if not alpha else alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)
    return Adapter(path, rank, scale, sorted(targets))


def resolve(config: LoraServingConfig) -> None:
    """The ranks and targets that checkpoints ask for; ValueError for more than fit."""
    adapters = [read_config(*entry) for entry in config.lora_ckpt_paths.items()]
    if len(adapters) > config.max_loras:
        raise ValueError(
            f"max_loras is {config.max_loras}, expected room for {len(adapters)} checkpoints; "
            "raise it."
        )
    config.max_lora_rank = max([config.max_lora_rank, *(one.rank for one in adapters)])
    union = sorted({target for one in adapters for target in one.target_modules})
    given = config.target_modules
    if given is None or (isinstance(given, list) and not set(union) <= set(given)):
        config.target_modules = union


def add_adapters(model: Any, state_dict: Dict[str, torch.Tensor]) -> None:
    """Put the adapters' whole tensors into a checkpoint, scaled and padded to the largest rank.
    CheckpointError for a tensor that does not fit its layer, or that no layer takes."""
    config = model.neuron_config.lora_config
    layers = dict(wrapped(model))
    for path, layer in layers.items():
        state_dict.update(layer.empty(path))
    places = {_place(path): path for path in layers}
    for name, folder in config.lora_ckpt_paths.items():
        adapter = read_config(name, folder)
        for key, tensor in load_file(str(adapter.folder / _WEIGHTS)).items():
            stem, kind = _parts(name, key)
            place = places.get(_place(stem))
            if place is None and not is_target(stem, config.target_modules):
                continue  # as NxDI: a model may read those itself
            if place is None:
                raise CheckpointError(
                    f"Adapter {name} has a tensor {key} that no layer takes, expected one for each "
                    f"of {sorted(places)[:3]}...; train it on modules of this model."
                )
            whole = state_dict[f"{place}.{kind}.weight"][config.indices[name]]
            _fill(whole, tensor, adapter, kind, f"{name}: {key}", layers[place])


def _fill(
    whole: torch.Tensor,
    tensor: torch.Tensor,
    adapter: Adapter,
    kind: str,
    what: str,
    layer: MultiLoraModule,
) -> None:
    """Copy A (r, in), scaled, or B (out, r) into its row of a layer's tensor."""
    given = tensor.t() if layer.transposed else tensor  # (in, r) and (r, out), or as PEFT has it
    across = 1 if (kind == "lora_A") == layer.transposed else 0  # the dimension of the rank
    expected = layer.checkpoint_size(kind)
    if given.shape[across] != adapter.rank or given.shape[1 - across] != expected:
        raise CheckpointError(
            f"Adapter tensor {what} has shape {list(tensor.shape)}, expected rank {adapter.rank} "
            f"and {expected} features; choose a tensor-parallel degree that divides the heads, or "
            "the model that it was trained on."
        )
    scaled = given.float() * (adapter.scale if kind == "lora_A" else 1.0)
    whole[: given.shape[0], : given.shape[1]] = scaled.to(whole.dtype)


def _parts(name: str, key: str) -> Tuple[str, str]:
    """("...q_proj", "lora_A") of PEFT's "...q_proj.lora_A.weight"."""
    found = re.fullmatch(r"(.+)\.(lora_A|lora_B)(?:\.default)?\.weight", key)
    if found is None:
        raise CheckpointError(f"Adapter {name} has a tensor {key}, expected ...lora_A or B.weight.")
    return found[1], found[2]


def _place(path: str) -> Place:
    parts = path.split(".")
    if "layers" not in parts[:-2]:
        return (parts[-1],)
    number = parts.index("layers") + 1
    return (parts[number], parts[number + 1], parts[-1])
