"""Weights of llama.py with what stands beside them: rows of any kind, checkpoints with more.

Adapters, scales and biases are cut for the ranks and ordered for the kernels as the weights that
they belong to; ``Projections`` says how.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

from llama import (
    ATTENTION_TARGETS, MLP_TARGETS, Sizes, StateDict, in_runs, layouts_of_ranks, times_gain,
)  # fmt: skip

OfRanks = Sequence[torch.Tensor]  # what each tensor-parallel rank has of something, in their order


class KernelRows(ColumnParallelLinear):
    """[rows, N] per rank: what a kernel reads as it lies, as a ``KernelWeight`` of llama.py."""

    def __init__(
        self, n: int, tp_degree: int, dtype: torch.dtype, rows: int = 1, **group: Any
    ) -> None:
        given = dict(bias=False, gather_output=False, dtype=dtype, **group)
        super().__init__(n, rows * tp_degree, **given)
        self.tp_degree = tp_degree


class Projections(NamedTuple):
    """Projections of one kernel in a checkpoint, and how ``tp`` ranks share them.

    All but the ``output`` contract hidden states, behind a norm with ``gain``, and that one makes
    hidden states; all ranks have these, in runs. What else a projection reads or makes is cut:
    ``cuts``, by name and in the kernel's order, give each rank its rows of such features, ordered
    as its kernel has them.
    """

    state: StateDict
    cuts: Dict[str, Callable[[torch.Tensor], OfRanks]]
    output: Optional[str]
    gain: torch.Tensor
    tp: int

    @classmethod
    def of_attention(
        cls, state: StateDict, attention: str, gain: torch.Tensor, sizes: Sizes
    ) -> Projections:
        """Those of one layer's attention."""
        names = [f"{attention}{name}" for name in ATTENTION_TARGETS]
        queries, keys = (heads_in_tiles(sizes, group) for group in (sizes.group, 1))
        cuts = dict(zip(names, (queries, keys, lambda rows: rows.chunk(sizes.tp), queries)))
        return cls(state, cuts, names[-1], gain, sizes.tp)

    @classmethod
    def of_mlp(cls, state: StateDict, mlp: str, gain: torch.Tensor, tp: int) -> Projections:
        """Those of one layer's MLP."""
        names = [f"{mlp}{name}" for name in MLP_TARGETS]
        cuts = dict.fromkeys(names, lambda rows: rows.chunk(tp))
        return cls(state, cuts, names[-1], gain, tp)

    @classmethod
    def of_head(cls, state: StateDict, head: str, gain: torch.Tensor, tp: int) -> Projections:
        """That of a head."""
        cuts = {head: lambda rows: [in_runs(share, 0) for share in rows.chunk(tp)]}
        return cls(state, cuts, None, gain, tp)

    def output_rows(self, name: str, rows: torch.Tensor) -> OfRanks:
        """Rows of what a projection makes, [N, ..]."""
        return [in_runs(rows, 0)] * self.tp if name == self.output else self.cuts[name](rows)

    def input_columns(self, name: str, columns: torch.Tensor) -> OfRanks:
        """Columns of what it contracts, [.., K]."""
        if name != self.output:
            return [in_runs(columns, 1)] * self.tp
        return [rows.t() for rows in self.cuts[name](columns.t())]

    def converted(self, with_gain: bool) -> List[OfRanks]:
        """Each projection's weights [N, K], out of the checkpoint, those behind the norm times its
        gain, unless the norm is a module."""
        found = []
        for name in self.cuts:
            weight = self.state.pop(f"{name}.weight")
            if name == self.output:
                found.append([in_runs(share, 0) for share in self.input_columns(name, weight)])
                continue
            weight = times_gain(weight, self.gain) if with_gain else weight
            found.append([in_runs(share, 1) for share in self.output_rows(name, weight)])
        return found

    def convert(self, with_gain: bool) -> None:
        """Put them in kernel layout, those of Q, K and V in one tensor."""
        shares, names = self.converted(with_gain), [*self.cuts]
        if len(names) > len(MLP_TARGETS):
            together = [torch.cat(share) for share in zip(*shares[:-1])]
            attention = names[0].rpartition(".")[0]
            shares, names = [together, shares[-1]], [f"{attention}.qkv_proj", names[-1]]
        for name, of_ranks in zip(names, shares):
            self.state[f"{name}.weight"] = layouts_of_ranks(of_ranks)


def heads_in_tiles(sizes: Sizes, group: int) -> Callable[[torch.Tensor], OfRanks]:
    """A cut of rows of heads, ``group`` for each KV head, which then lie in a rank's tiles."""
    return lambda rows: [sizes.of_rank.order(x, group) for x in rows.chunk(sizes.tp)]
