"""Layers with adapters: base(x) + B(A(x)), with an A and a B for each row of a batch.

Layouts are NxDI's (`modules/lora_serving/lora_layer.py`). With the largest rank r and n one above
the number of adapters, A is (n, in, r) and B (n, r, out); without `lora_memory_transpose` the last
two dimensions are swapped. An adapter is sharded like its base: B of a column-parallel layer along
out, A of a row-parallel layer along in.
"""

import re
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from neuronx_distributed.deferred import parameter_device
from neuronx_distributed.parallel_layers.layers import (
    BaseParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    _sharded_parameter,
)
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from torch import nn

from .config import LoraServingConfig


class LoraWeight(BaseParallelLinear):
    """One matrix for each adapter; `forward(x (B, S, in), ids (B,))` -> (B, S, out)."""

    def __init__(
        self, sizes: Tuple[int, int, int], sharded: bool, dim: int, transposed: bool, like: Any
    ) -> None:
        super().__init__()
        self.transposed = transposed
        shape, dim = (sizes, dim) if transposed else ((sizes[0], sizes[2], sizes[1]), 3 - dim)
        dtype = like.weight.dtype
        if sharded:
            size = like.tensor_parallel_group.size()
            self.weight = _sharded_parameter(shape, dim, 1, size, dtype, None, torch.nn.init.zeros_)
            return
        zeros = torch.zeros(shape, dtype=dtype, device=parameter_device())
        self.weight = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
        chosen = torch.index_select(self.weight, 0, adapter_ids)
        return torch.matmul(x, chosen if self.transposed else chosen.transpose(1, 2))


class MultiLoraModule(nn.Module):
    """A layer and its adapters; without `adapter_ids` the layer alone."""

    shards = (False, False)  # whether A is sharded along its inputs, and B along its outputs

    def __init__(self, base_layer: nn.Module, lora_config: LoraServingConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.transposed = lora_config.lora_memory_transpose
        self.count, self.rank = lora_config.max_loras + 1, lora_config.max_lora_rank
        inputs, outputs = self._sizes()
        first = (self.count, inputs, self.rank)
        last = (self.count, self.rank, outputs)
        row, column = self.shards
        self.lora_A = LoraWeight(first, row, 1, self.transposed, base_layer)
        self.lora_B = LoraWeight(last, column, 2, self.transposed, base_layer)

    def _sizes(self) -> Tuple[int, int]:
        """This rank's inputs and outputs."""
        return self.base_layer.weight.shape[1], self.base_layer.weight.shape[0]

    def _whole(self) -> Tuple[int, int]:
        """All ranks' inputs and outputs, padding included."""
        if not isinstance(self.base_layer, BaseParallelLinear):
            return self._sizes()
        return self.base_layer.input_size, self.base_layer.output_size

    def checkpoint_size(self, kind: str) -> int:
        """A checkpoint's features of A (in) or B (out), without the layer's padding."""
        inputs, outputs = self._whole()
        pad = getattr(self.base_layer, "pad_size", 0)
        row, column = self.shards
        return inputs - pad * row if kind == "lora_A" else outputs - pad * column

    def empty(self, path: str) -> Dict[str, torch.Tensor]:
        """Zeros in the shape of the whole tensors, by their names in a checkpoint."""
        inputs, outputs = self._whole()
        sizes = {"lora_A": (inputs, self.rank), "lora_B": (self.rank, outputs)}
        dtype = self.base_layer.weight.dtype
        return {
            f"{path}.{kind}.weight": torch.zeros(
                (self.count, *(size if self.transposed else size[::-1])), dtype=dtype
            )
            for kind, size in sizes.items()
        }

    def preshard_hook(self, state_dict: Dict[str, torch.Tensor], prefix: str) -> None:
        """Run the base layer's hook under its own name, then move its tensors below."""
        hook = getattr(self.base_layer, "preshard_hook", None)
        if hook is not None:
            hook(state_dict, prefix)

    def forward(self, x: torch.Tensor, adapter_ids: Optional[torch.Tensor]) -> Any:
        result = self.base_layer(x)
        if adapter_ids is None:
            return result
        return result + self._adapted(x, adapter_ids).to(result.dtype)

    def _adapted(self, x: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self.lora_A(x, adapter_ids), adapter_ids)


class MultiLoraLinear(MultiLoraModule):
    """The adapter of an nn.Linear."""


class MultiLoraColumnParallelLinear(MultiLoraModule):
    """The outputs stay sharded, and B's outputs with them."""

    shards = (False, True)


class MultiLoraRowParallelLinear(MultiLoraModule):
    """A's outputs, r numbers a token, are summed over the ranks; the base's sum is made already."""

    shards = (True, False)

    def _adapted(self, x: torch.Tensor, adapter_ids: torch.Tensor) -> torch.Tensor:
        partial = self.lora_A(x, adapter_ids)
        group = self.base_layer.tensor_parallel_group
        return self.lora_B(reduce_from_tensor_model_parallel_region(partial, group), adapter_ids)


_CLASSES = {
    ColumnParallelLinear: MultiLoraColumnParallelLinear,
    RowParallelLinear: MultiLoraRowParallelLinear,
    nn.Linear: MultiLoraLinear,
}


def is_lora_module(module: nn.Module) -> bool:
    """Whether `module` has adapters, and so takes `adapter_ids`."""
    return isinstance(module, MultiLoraModule)


def adapted(module: nn.Module, x: torch.Tensor, adapter_ids: Optional[torch.Tensor]) -> Any:
    """`module(x)`, with the ids where the module takes them."""
    return module(x, adapter_ids) if is_lora_module(module) else module(x)


def wrapped(model: nn.Module) -> Iterator[Tuple[str, MultiLoraModule]]:
    """Path and layer of every layer with adapters."""
    for path, module in model.named_modules():
        if isinstance(module, MultiLoraModule):
            yield path, module


def wrap_model_with_lora(model: nn.Module, config: LoraServingConfig) -> None:
    """Replace the layers that `target_modules` names, by leaf names or as a pattern. ValueError
    where no layer matches, or where one has a class without adapters."""
    paths = [path for path, _ in model.named_modules() if path]
    parents = {path.rpartition(".")[0] for path in paths}
    found = [p for p in paths if p not in parents and is_target(p, config.target_modules)]
    if not found:
        raise ValueError(
            f"No module of the model is one of the adapters' target_modules "
            f"{config.target_modules}, expected leaves such as q_proj; leave enable_nki and "
            "fused_qkv off, whose layers have other names."
        )
    for path in found:
        parent, _, leaf = path.rpartition(".")
        holder = model.get_submodule(parent)
        base = getattr(holder, leaf)
        kind = _CLASSES.get(type(base))
        if kind is None or getattr(base, "gather_output", False) or leaf == "lm_head":
            raise ValueError(
                f"{path} is a {type(base).__name__}, expected a linear layer between the norms "
                "whose outputs are not gathered; leave it out of target_modules."
            )
        setattr(holder, leaf, kind(base, config))


def is_target(path: str, targets: Any) -> bool:
    """Whether `target_modules` names a module."""
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return any(path == target or path.endswith(f".{target}") for target in targets or ())


def move_base_weights(model: nn.Module, state_dict: Dict[str, torch.Tensor]) -> None:
    """`X.weight` of a wrapped layer X becomes `X.base_layer.weight`, its bias likewise."""
    for path, _ in wrapped(model):
        for kind in ("weight", "bias"):
            if f"{path}.{kind}" in state_dict:
                state_dict[f"{path}.base_layer.{kind}"] = state_dict.pop(f"{path}.{kind}")
