"""Low-rank adapters with seeded weights, in folders as PEFT saves them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    rank: int = 4,
    seed: int = 1,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """An adapter of a Hugging Face model; `strength` scales what it adds."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] not in targets:
            continue
        for kind, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            if kind == "B":
                values *= strength
            tensors[f"base_model.model.{path}.lora_{kind}.weight"] = values
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    content = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def merged(model: Any, folder: Path, scale: float = 2.0) -> Any:
    """A copy of the model with W + scale * B A in the place of W: what PEFT computes."""
    result, tensors = copy.deepcopy(model), load_file(str(folder / "adapter_model.safetensors"))
    for name, weight in result.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in tensors:
            added = tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
            weight.data += scale * added.to(weight.dtype)
    return result
