"""Makes each rank's tensors from a full checkpoint (rules of NxD's trace/trace.py).

1. `preshard_hook(state_dict, prefix)` runs top-down, and not below a module that has one. Hooks
rename, replicate or pad full tensors. 2. Keys that the model does not name are dropped. 3. A
parallel layer's own parameters are sliced by their tags; all others are replicated.
`get_tensor_from_state_dict(prefix, state_dict)` of a parameter, where there is one, reads it.
"""

from collections.abc import Iterator

import torch
from torch import nn

from neuron_cpu.errors import CheckpointError

from ..parallel_layers.layers import BaseParallelLinear, ParallelEmbedding, SPMDRank

StateDict = dict[str, torch.Tensor]
QUANTISED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
_SHARDED_MODULES = (BaseParallelLinear, ParallelEmbedding, SPMDRank)


def invoke_preshard_hook(module: nn.Module, checkpoint: StateDict, prefix: str) -> None:
    """Run the hooks of `module` and below; a hook gets the key of its own `weight`."""
    hook = getattr(module, "preshard_hook", None)
    if hook is not None:
        hook(checkpoint, prefix + "weight")
        return
    for name, child in module.named_children():
        invoke_preshard_hook(child, checkpoint, f"{prefix}{name}.")


def preprocess_checkpoint(model: nn.Module, checkpoint: StateDict) -> list[str]:
    """Run the hooks and drop unknown keys, both in place; the result tells what was dropped."""
    invoke_preshard_hook(model, checkpoint, "")
    wanted = set(model.state_dict().keys())
    unused = sorted(key for key in checkpoint if key not in wanted)
    for key in unused:
        del checkpoint[key]
    return unused


def _own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(prefix, module, name, tensor) of every parameter and persistent buffer."""
    wanted = set(model.state_dict().keys())
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, tensor in list(module._parameters.items()) + list(module._buffers.items()):
            if tensor is not None and prefix + name in wanted:
                yield prefix, module, name, tensor


def create_local_weight(
    rank: int,
    world_size: int,
    full_weight: torch.Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
) -> torch.Tensor:
    """The view of `full_weight` for `rank`, `per_partition_size` wide along `partition_dim`. A
    `stride` s above 1 means s fused matrices; each is sliced by itself."""
    if stride == 1:
        return full_weight.narrow(partition_dim, rank * per_partition_size, per_partition_size)
    pieces = torch.split(full_weight, per_partition_size // stride, dim=partition_dim)
    return torch.cat(list(pieces[rank::world_size]), dim=partition_dim)


def _fused_qkv_slice(full: torch.Tensor, parameter: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's rows of q, k and v, cut from the fused matrix (q, then k, then v)."""
    size, dim = parameter.num_partitions, parameter.partition_dim
    query_rows = parameter.num_attention_heads * parameter.head_dim
    key_rows = parameter.num_key_value_heads * parameter.head_dim
    parts = torch.split(full, [query_rows, key_rows, key_rows], dim=dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim=dim)


def _local_tensor(
    full: torch.Tensor, module: nn.Module, parameter: torch.Tensor, rank: int, key: str
) -> torch.Tensor:
    """This rank's part of `full`. An error names a tensor of another shape than the parameter's."""
    local = full
    expected = list(parameter.shape)
    sharded = isinstance(module, _SHARDED_MODULES) and getattr(
        parameter, "tensor_model_parallel", False
    )
    if sharded:
        dim, size = parameter.partition_dim, parameter.num_partitions
        expected[dim] *= size
    if list(full.shape) != expected:
        raise CheckpointError(
            f"Tensor {key} of the checkpoint has shape {list(full.shape)}, expected {expected} "
            "from the model's config; use the config.json that belongs to this checkpoint."
        )
    if sharded and size > 1:
        if getattr(parameter, "fused_qkv", False):
            local = _fused_qkv_slice(full, parameter, rank)
        else:
            stride = getattr(parameter, "partition_stride", 1)
            local = create_local_weight(rank, size, full, dim, parameter.shape[dim], stride)
    stored = {tensor.dtype for tensor in (full, parameter)} & QUANTISED
    if stored and full.dtype != parameter.dtype:
        raise CheckpointError(
            f"Tensor {key} of the checkpoint is {full.dtype}, expected {parameter.dtype} by the "
            "model, which the SDK would not notice; convert the checkpoint's to the model's type."
        )
    if not (local.is_floating_point() or parameter.is_floating_point()):
        # NxDI 0.1 hands over int64 ranks for the int32 parameter; the device narrows them.
        local = local.to(parameter.dtype)
    return local


def get_sharded_checkpoint(
    checkpoint: StateDict, model: nn.Module, rank: int, tp_degree: int
) -> tuple[StateDict, list[str]]:
    """Contiguous tensors of `rank` for `model`, and the parameters that the checkpoint lacks.

    `checkpoint` is the result of `preprocess_checkpoint`. A tensor that needs no slicing is not
    copied. State that a model keeps between calls belongs to no checkpoint and is not reported.
    """
    del tp_degree  # each parameter knows into how many parts it is cut
    local: StateDict = {}
    missing: list[str] = []
    for prefix, module, name, parameter in _own_parameters(model):
        key = prefix + name
        reader = getattr(parameter, "get_tensor_from_state_dict", None)
        if reader is None:
            full = checkpoint.get(key)
        else:
            try:
                full = reader(prefix, checkpoint)
            except KeyError:
                full = None
        if full is None:
            if "past_key_values" not in key:
                missing.append(key)
            continue
        local[key] = _local_tensor(full, module, parameter, rank, key).contiguous()
    return local, missing
