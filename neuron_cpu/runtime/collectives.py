"""Collectives as a graph has them: between ranks of groups that cover the world."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from .ranks import Group, current_group, unwatched

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, PERMUTE, BROADCAST = "all-to-all", "permute", "broadcast"
_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


@dataclass(frozen=True)
class Collective:
    """One collective; called on a rank it meets the others.

    Attributes:
        kind: ALL_REDUCE, ...
        groups: global ranks of each group; () for one of all.
        reduce: "sum", "max", ...; of those that reduce.
        dim, other_dim: along which parts are joined, or split and joined.
        pairs: source and target of a permutation.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...] = ()
    reduce: str = "sum"
    dim: int = 0
    other_dim: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    def size(self) -> int:
        """The number of ranks of a group, by default of the whole world."""
        if self.groups:
            return len(self.groups[0])
        group = current_group()
        return 1 if group is None else group.size()

    def __post_init__(self) -> None:
        if self.reduce not in _REDUCE:
            raise ValueError(
                f"A collective reduces by {self.reduce!r}, expected one of {sorted(_REDUCE)}; take "
                "a REDUCE_ constant of torch_xla.core.xla_model."
            )

    def __call__(self, tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
        group = group or current_group()
        if group is None or group.size() == 1:
            with unwatched():
                return self.results([tensor])[0]
        label = f"{self.kind} ({self.reduce}, dim {self.dim}) of {tensor.dtype}{[*tensor.shape]}"
        return group.exchange(label, tensor, self._combine)

    def _combine(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.kind == PERMUTE:
            made = [torch.zeros_like(part) for part in parts]
            for source, target in self.pairs:
                made[target] = parts[source].clone()  # the source may write to its own
            return made
        results = list(parts)
        for members in self.groups or (tuple(range(len(parts))),):
            for member, result in zip(members, self.results([parts[m] for m in members])):
                results[member] = result
        return results

    def results(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The result of each rank of a group for the ranks' `parts`, in their order."""
        count = len(parts)
        if self.kind == ALL_GATHER:
            return _each_its_own(torch.cat(list(parts), dim=self.dim), count)
        if self.kind == ALL_TO_ALL:
            split = [part.chunk(count, dim=self.dim) for part in parts]
            return [torch.cat([own[k] for own in split], self.other_dim) for k in range(count)]
        if self.kind == PERMUTE:
            return list(parts)
        if self.kind == BROADCAST:
            return _each_its_own(parts[0], count)
        whole = reduce(_REDUCE[self.reduce], parts)
        if self.kind == ALL_REDUCE:
            return _each_its_own(whole, count)
        return list(whole.chunk(count, dim=self.dim))


def _each_its_own(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The tensor for each rank, which may write to it."""
    return [whole, *(whole.clone() for _ in range(count - 1))]


def groups_of(groups: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Replica groups as they come: lists of lists, or nothing for one of all."""
    return tuple(tuple(int(rank) for rank in group) for group in groups or ())
