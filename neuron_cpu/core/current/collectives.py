"""``nki.collectives``: a kernel runs as one rank here, so a group of one is a copy.

Groups of several ranks need the kernels of all of them at once, which nothing here runs.
"""

from __future__ import annotations

from typing import Any

from ..device.errors import refuse
from .copies import tensor_copy
from .operands import NkiInstruction, operator, tensor
from .registers import VirtualRegister
from .transfers import dma_copy


class ReplicaGroup:
    """Lists of ranks that work together; the lists are disjoint."""

    def __init__(self, groups: Any) -> None:
        self.groups = [list(ranks) for ranks in groups]
        members = [rank for ranks in self.groups for rank in ranks]
        if len(set(members)) != len(members):
            raise refuse(
                "sim_replica_group", f"ReplicaGroup({groups}), expected disjoint lists of ranks"
            )

    @property
    def size(self) -> int:
        """Ranks that work together."""
        return max(map(len, self.groups), default=1)


def _alone(what: str, srcs: Any, dsts: Any, group: Any, name: str | None) -> NkiInstruction | None:
    """The collective of a group of one rank: every destination is its source."""
    size = group.size if isinstance(group, ReplicaGroup) else max(map(len, group))
    if size > 1:
        raise NotImplementedError(f"nki.collectives.{what} over {size} ranks")
    made = None
    sources, targets = _listed(srcs), _listed(dsts)
    for k, (src, dst) in enumerate(zip(sources, targets)):
        source, target = tensor(src, what), tensor(dst, what)
        copy = tensor_copy if source.on_chip and target.on_chip else dma_copy
        made = copy(target, source, name=None if name is None else f"{name}{k or ''}")
    return made


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def all_reduce(
    srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: Any = None, name: str | None = None
) -> NkiInstruction | None:
    """Element-wise reduction over the ranks, to all of them."""
    operator(op, "all_reduce")
    return _alone("all_reduce", srcs, dsts, replica_group, name)


def all_gather(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: int,
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """The ranks' tensors one behind the other, to all of them."""
    return _alone("all_gather", srcs, dsts, replica_group, name)


def reduce_scatter(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: int,
    op: Any,
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """Element-wise reduction over the ranks, a part to each."""
    operator(op, "reduce_scatter")
    return _alone("reduce_scatter", srcs, dsts, replica_group, name)


def all_to_all(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    collective_dim: int,
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """Part k of every rank to rank k."""
    return _alone("all_to_all", srcs, dsts, replica_group, name)


def collective_permute(
    srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None, name: str | None = None
) -> NkiInstruction | None:
    """Tensors from source to target ranks."""
    ranks = {rank for pair in source_target_pairs for rank in pair}
    return _alone("collective_permute", srcs, dsts, [sorted(ranks)], name)


def collective_permute_implicit(
    srcs_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: Any,
    channel_ids: Any = (0,),
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """A step around the ring of the ranks."""
    what = "collective_permute_implicit"
    return _alone(what, srcs_by_channel, dsts_by_channel, replica_group, name)


def collective_permute_implicit_reduce(
    srcs0_by_channel: Any,
    srcs1_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: Any,
    op: Any,
    channel_ids: Any = (0,),
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """A step around the ring that reduces two local tensors first."""
    raise NotImplementedError("nki.collectives.collective_permute_implicit_reduce")


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: Any, replica_group: Any, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """The rank whose data a ring step processes; the own one in a group of one."""
    return rank_id()


def all_gather_v(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    metadata_tensor: Any,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """``all_gather`` of parts whose sizes are data."""
    raise NotImplementedError("nki.collectives.all_gather_v")


def all_to_all_v(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    metadata_tensor: Any,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: Any = None,
    name: str | None = None,
) -> NkiInstruction | None:
    """``all_to_all`` of parts whose sizes are data."""
    raise NotImplementedError("nki.collectives.all_to_all_v")


def rank_id(name: str | None = None) -> VirtualRegister:
    """The rank that runs the kernel: 0."""
    return VirtualRegister(0, frozen=True)
