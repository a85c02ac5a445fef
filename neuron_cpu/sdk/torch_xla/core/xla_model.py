"""The names of torch_xla.core.xla_model that model files and NxD use. No XLA device exists here.

Collectives take `groups` as lists of global ranks; the ranks that run a graph meet in them.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from neuron_cpu.runtime import collectives
from neuron_cpu.runtime.collectives import Collective, groups_of
from neuron_cpu.runtime.graph import collective

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"

Groups = Sequence[Sequence[int]] | None
Tensors = TypeVar("Tensors", torch.Tensor, list[torch.Tensor])


def xla_device() -> torch.device:
    """The device on which the stand-in computes: the CPU."""
    return torch.device("cpu")


def mark_step() -> None:
    """Do nothing: the stand-in executes at once."""


def get_ordinal(defval: int = 0) -> int:
    return defval


get_local_ordinal = get_ordinal


def xrt_world_size(defval: int = 1) -> int:
    return defval


def is_master_ordinal(local: bool = True) -> bool:
    return True


def master_print(*values: Any) -> None:
    print(*values)


def rendezvous(tag: str, *_: Any) -> None:
    """Do nothing: one process is here."""


def all_reduce(
    reduce_type: str,
    inputs: Tensors,
    scale: float = 1.0,
    groups: Groups = None,
    cctx: Any = None,
    pin_layout: bool = True,
) -> Tensors:
    """The reduced tensor; a list is reduced in place and returned."""
    del cctx, pin_layout
    call = Collective(collectives.ALL_REDUCE, groups_of(groups), reduce_type)
    if isinstance(inputs, torch.Tensor):
        return _scaled(collective(call, inputs), scale)
    for tensor in inputs:
        tensor.copy_(_scaled(collective(call, tensor), scale))
    return inputs


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
    **_: Any,
) -> torch.Tensor:
    """The parts of a group's ranks, concatenated along `dim`."""
    del pin_layout
    call = Collective(collectives.ALL_GATHER, groups_of(groups), dim=dim % value.dim())
    return _into(output, collective(call, value))


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
    **_: Any,
) -> torch.Tensor:
    """This rank's part of the reduced tensor, one of `shard_count` along `scatter_dim`."""
    del shard_count, pin_layout
    dim = scatter_dim % input.dim()
    call = Collective(collectives.REDUCE_SCATTER, groups_of(groups), reduce_type, dim)
    return _into(output, _scaled(collective(call, input), scale))


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
    **_: Any,
) -> torch.Tensor:
    """Send parts along one dimension to the group's ranks, and join those received along
    another."""
    del split_count, pin_layout
    own, other = split_dimension, concat_dimension
    call = Collective(collectives.ALL_TO_ALL, groups_of(groups), dim=own, other_dim=other)
    return collective(call, value)


def collective_permute(value: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The tensor of this rank's source; zeros where it has none."""
    made = tuple((int(source), int(target)) for source, target in pairs)
    return collective(Collective(collectives.PERMUTE, pairs=made), value)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor * scale


def _into(output: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if output is None else output.copy_(result)
