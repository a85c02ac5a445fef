"""Numbers of low-rank adapters, which differ between NxDI's releases.

Up to 0.6 number 0 is the model itself. From 0.7 on number 0 is the first adapter, and the model has
no number: an extra last adapter, which no checkpoint fills, takes its place and adds zeros.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed_inference.modules.lora_serving import LoraServingConfig

from harness.inputs.features import BASE

_MANAGER = "lora_model_manager"  # of an application, from 0.7 on


def room_for_adapters(adapters: int, rows: int) -> dict[str, int]:
    """Fields of LoraServingConfig for a release: 0.7 takes no more rows of a batch than it has
    room for adapters, and keeps the adapter of each row."""
    if "dynamic_multi_lora" not in inspect.signature(LoraServingConfig).parameters:
        return {}
    return {"max_loras": max(adapters + 1, rows), "batch_size": rows}


def name_the_model(model: Any) -> None:
    """Let a release that names adapters only know the model itself by its name, too."""
    manager = getattr(model, _MANAGER, None)
    if manager is not None:
        manager.lora_adapter_id_mapping[BASE] = manager.lora_config.max_loras - 1


def named(model: Any, names: Sequence[str]) -> torch.Tensor:
    """The release's numbers of adapters by their names [rows]."""
    known = [BASE, *model.config.neuron_config.lora_config.lora_ckpt_paths]
    return numbered(model, [known.index(name) for name in names]).to(torch.int32)


def numbered(model: Any, adapters: Sequence[int]) -> torch.Tensor:
    """The release's numbers of adapters [rows], of which 0 is the model itself, 1 the first."""
    manager, numbers = getattr(model, _MANAGER, None), torch.tensor(adapters)
    return numbers if manager is None else (numbers - 1) % manager.lora_config.max_loras
