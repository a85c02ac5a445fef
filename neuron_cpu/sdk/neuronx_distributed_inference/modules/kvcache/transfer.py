"""One sequence's keys and values from one loaded model to another: prefill here, decode there.

The SDK has this since 2.24 as disaggregated inference (beta), over its own transport from device to
device; what travels is the same, the rows of one cache line on every layer and rank, and the first
token. Both sides need the same sharding and layout of caches, because rows go from rank to rank.
Names here are the stand-in's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List

import torch
import torch.distributed as dist


@dataclass
class SequenceState:
    """A prompt in the caches, and the token behind it.

    Attributes:
        length: tokens of the prompt.
        token: the one that prefill has given, which decode begins with.
        rows: (kv heads of a rank, length, D) for K0, V0, K1, ... of every rank in this process, one
            rank after the other.
    """

    length: int
    token: int
    rows: List[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """What travels, but for the two numbers."""
        return sum(rows.nbytes for rows in self.rows)


def _caches(model: Any) -> List[torch.Tensor]:
    """K0, V0, ... of all ranks in this process (lines, kv heads, max_length, D); ValueError for
    caches of another layout."""
    if model.is_block_kv_layout:
        raise ValueError(
            "Keys and values are taken from a line of the cache, got is_block_kv_layout True, "
            "expected a cache of lines; leave it out on both sides."
        )
    if model.neuron_config.padding_side != "right":
        raise ValueError(
            "Keys and values are taken from the first positions of a line, got padding_side "
            f"{model.neuron_config.padding_side!r}, expected 'right'; pad on the right."
        )
    modules = model.models[0].model.modules
    return [cache.data for module in modules for cache in module.kv_mgr.past_key_values]


def export_kv(model: Any, seq_id: int, length: int, token: int) -> SequenceState:
    """Copies of line `seq_id`, of which a prefill has filled the first `length` positions."""
    rows = [cache[seq_id, :, :length].clone() for cache in _caches(model)]
    return SequenceState(length, token, rows)


def import_kv(model: Any, seq_id: int, state: SequenceState) -> None:
    """Write a sequence into line `seq_id`, where decode goes on as if it had been filled there.

    ValueError where the caches have other heads, layers or types, or are too short.
    """
    caches = _caches(model)
    ours = [(str(c.dtype), c.shape[1], c.shape[3]) for c in caches]
    theirs = [(str(r.dtype), r.shape[0], r.shape[2]) for r in state.rows]
    if ours != theirs or state.length >= model.neuron_config.max_length:
        raise ValueError(
            f"The sequence has {len(theirs)} tensors of {theirs[:1]} and {state.length} tokens, "
            f"expected {len(ours)} of {ours[:1]} and fewer tokens than max_length "
            f"{model.neuron_config.max_length}; load both models at one degree, from one config."
        )
    for cache, rows in zip(caches, state.rows):
        cache[seq_id, :, : state.length] = rows
    model.kv_cache_populated = True
    model.cache_lines.prefill(torch.tensor([seq_id]), torch.ones(1, state.length))


def send_kv(state: SequenceState, to: int, group: Any = None) -> None:
    """Send a sequence to another process of `group`."""
    shape = state.rows[0].shape
    numbers = [state.length, state.token, len(state.rows), shape[0], shape[2]]
    dist.send(torch.tensor(numbers), to, group=group)
    for rows in state.rows:
        dist.send(rows.contiguous().view(-1).view(torch.uint8), to, group=group)


def receive_kv(dtype: torch.dtype, sender: int, group: Any = None) -> SequenceState:
    """The next sequence from another process; `dtype` is that of the caches."""
    numbers = torch.empty(5, dtype=torch.int64)
    dist.recv(numbers, sender, group=group)
    length, token, count, heads, head_dim = numbers.tolist()
    rows = [torch.empty((heads, length, head_dim), dtype=dtype) for _ in range(count)]
    for tensor in rows:
        dist.recv(tensor.view(-1).view(torch.uint8), sender, group=group)
    return SequenceState(length, token, rows)
