"""Low-rank adapters with seeded weights, as PEFT saves them, and what peft makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    content |= {"target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def as_peft(model: Any, folder: Path) -> Any:
    """A copy of a Hugging Face model with the adapter, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
