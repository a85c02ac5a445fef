"""Weights of llama.py with additions: rows of any kind, checkpoints with more tensors.

Adapters, scales and biases are cut for the ranks and ordered for the kernels like their weights, as
``Projections`` describes.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from neuronx_distributed_inference.models.config import InferenceConfig

from llama import (
    ATTENTION_TARGETS,
    MLP_TARGETS,
    HeadShape,
    StateDict,
    check_degree,
    in_runs,
    layouts_of_ranks,
    pad_to,
    times_gain,
)

OfRanks = Sequence[torch.Tensor]  # each tensor-parallel rank's part, in the ranks' order


class SharedSizes(NamedTuple):
    """How ranks share heads, at any degree.

    A degree that holds the number of KV heads several times replicates each head as often, and a
    replica serves its part of the head's queries, as in NxDI. Zero heads (and zero query heads) pad
    the rest: a zero head's output meets zero columns of the output weight.
    """

    tp: int
    head_dim: int
    replicas: int
    group: int  # query heads per replica of a KV head
    kv_heads: int  # it includes replicas and zero heads

    @classmethod
    def of(cls, config: InferenceConfig, ranks: Optional[int] = None) -> SharedSizes:
        """The SharedSizes over as many ranks as split the heads, all by default."""
        check_degree(config, "intermediate_size", "vocab_size")
        tp = ranks or config.neuron_config.tp_degree
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        replicas = max(1, tp // kv)
        return cls(
            tp=tp,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            replicas=replicas,
            group=math.ceil(heads // kv / replicas),
            kv_heads=math.ceil(kv * replicas / tp) * tp,
        )

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def of_rank(self) -> HeadShape:
        return HeadShape(self.q_heads // self.tp, self.kv_heads // self.tp, self.head_dim)


def spread_queries(weight: torch.Tensor, kv: int, sizes: SharedSizes, dim: int) -> torch.Tensor:
    """Query heads along ``dim`` in the order of the replicas of their ``kv`` KV heads."""
    per_head = sizes.replicas * sizes.group * sizes.head_dim
    padded = [pad_to(group, dim, per_head) for group in weight.chunk(kv, dim=dim)]
    return pad_to(torch.cat(padded, dim=dim), dim, sizes.q_heads * sizes.head_dim)


def spread_kv(weight: torch.Tensor, sizes: SharedSizes) -> torch.Tensor:
    """Rows of KV heads, each head once per replica."""
    heads = weight.unflatten(0, (-1, sizes.head_dim))
    replicated = heads.repeat_interleave(sizes.replicas, dim=0).flatten(0, 1)
    return pad_to(replicated, 0, sizes.kv_heads * sizes.head_dim)


def spread_heads(
    state: StateDict,
    attention: str,
    kv: int,
    sizes: SharedSizes,
    kinds: Sequence[Sequence[str]] = (("weight",), ("weight",)),
) -> None:
    """Tensors of one layer's attention for replicated and padded heads: of Q, K and V those
    ``kinds`` that have a row for each feature of a head, of the output those with a column."""
    for name in ATTENTION_TARGETS:
        dim = 1 if name == "o_proj" else 0
        for key in (f"{attention}{name}.{kind}" for kind in kinds[dim]):
            if key not in state or state[key].numel() == 1:  # one scale serves all rows
                continue
            if name in ("k_proj", "v_proj"):
                state[key] = spread_kv(state[key], sizes)
            else:
                state[key] = spread_queries(state[key], kv, sizes, dim)


class KernelRows(ColumnParallelLinear):
    """[rows, N] per rank that a kernel reads as they lie, as it reads llama.py's
    ``KernelWeight``."""

    def __init__(
        self, n: int, tp_degree: int, dtype: torch.dtype, rows: int = 1, **group: Any
    ) -> None:
        given = dict(bias=False, gather_output=False, dtype=dtype, **group)
        super().__init__(n, rows * tp_degree, **given)
        self.tp_degree = tp_degree


class Projections(NamedTuple):
    """Projections of one kernel in a checkpoint, and how ``tp`` ranks share them.

    All but the ``output`` contract hidden states, behind a norm with ``gain``, and that one makes
    hidden states; all ranks have these, in runs. Other tensors that a projection reads or makes are
    cut: ``cuts``, by name and in the kernel's order, give each rank its rows of such features,
    ordered as its kernel has them.
    """

    state: StateDict
    cuts: Dict[str, Callable[[torch.Tensor], OfRanks]]
    output: Optional[str]
    gain: torch.Tensor
    tp: int

    @classmethod
    def of_attention(
        cls, state: StateDict, attention: str, gain: torch.Tensor, sizes: SharedSizes
    ) -> Projections:
        """The projections of a layer's attention."""
        names = [f"{attention}{name}" for name in ATTENTION_TARGETS]
        queries, keys = (heads_in_tiles(sizes, group) for group in (sizes.group, 1))
        cuts = dict(zip(names, (queries, keys, lambda rows: rows.chunk(sizes.tp), queries)))
        return cls(state, cuts, names[-1], gain, sizes.tp)

    @classmethod
    def of_mlp(cls, state: StateDict, mlp: str, gain: torch.Tensor, tp: int) -> Projections:
        """The projections of a layer's MLP."""
        names = [f"{mlp}{name}" for name in MLP_TARGETS]
        cuts = dict.fromkeys(names, lambda rows: rows.chunk(tp))
        return cls(state, cuts, names[-1], gain, tp)

    @classmethod
    def of_head(cls, state: StateDict, head: str, gain: torch.Tensor, tp: int) -> Projections:
        """The projection of a head."""
        cuts = {head: lambda rows: [in_runs(share, 0) for share in rows.chunk(tp)]}
        return cls(state, cuts, None, gain, tp)

    def output_rows(self, name: str, rows: torch.Tensor) -> OfRanks:
        """The rows of a projection's results, [N, ..]."""
        return [in_runs(rows, 0)] * self.tp if name == self.output else self.cuts[name](rows)

    def input_columns(self, name: str, columns: torch.Tensor) -> OfRanks:
        """The columns that a projection contracts, [.., K]."""
        if name != self.output:
            return [in_runs(columns, 1)] * self.tp
        return [rows.t() for rows in self.cuts[name](columns.t())]

    def converted(self, with_gain: bool) -> List[OfRanks]:
        """Each projection's weights [N, K] out of the checkpoint; weights behind the norm are
        multiplied by its gain, unless the norm is a module."""
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
        """Put the weights in kernel layout, with Q, K and V in one tensor."""
        shares, names = self.converted(with_gain), [*self.cuts]
        if len(names) > len(MLP_TARGETS):
            together = [torch.cat(share) for share in zip(*shares[:-1])]
            attention = names[0].rpartition(".")[0]
            shares, names = [together, shares[-1]], [f"{attention}.qkv_proj", names[-1]]
        for name, of_ranks in zip(names, shares):
            self.state[f"{name}.weight"] = layouts_of_ranks(of_ranks)


def heads_in_tiles(sizes: SharedSizes, group: int) -> Callable[[torch.Tensor], OfRanks]:
    """A cut of rows of heads, ``group`` for each KV head, which then lie in a rank's tiles."""
    return lambda rows: [sizes.of_rank.order(x, group) for x in rows.chunk(sizes.tp)]
