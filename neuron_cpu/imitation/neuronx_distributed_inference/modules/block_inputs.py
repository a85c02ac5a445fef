"""Turns a caller's blocks into a graph's inputs: buckets, padding, checks.

A caller gives whole prompts, their blocks, and the number of cached tokens. A graph gets the other
tokens, and cached ones where its columns have room.
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from .autobucketing import Pair, prefix_caching_bucket

_PAD_POSITION = 1  # as of every prompt: never the row's largest
Tensors = List[torch.Tensor]


class BlockArguments(NamedTuple):
    """The last four arguments of an application's `forward`.

    block_table (rows, blocks) has a sequence's blocks in order, then padding. slot_mapping, (1, n)
    for a prompt and (rows, 1) for a step, has the place of each new token's keys and values, -1 for
    none. full_context_lens and computed_context_lens (rows, 1) count a sequence's tokens, and those
    that are cached.
    """

    slot_mapping: Optional[torch.Tensor]
    block_table: Optional[torch.Tensor]
    full_context_lens: Optional[torch.Tensor]
    computed_context_lens: Optional[torch.Tensor]

    def checked(self, config: Any, rows: int) -> BlockArguments:
        """int64, contexts (rows,); ValueError for an argument that is missing or outside the
        cache."""
        missing = [name for name, value in self._asdict().items() if value is None]
        if missing:
            raise ValueError(
                f"A model with caches of blocks got no {missing[0]}, expected slot_mapping, "
                "block_table, full_context_lens and computed_context_lens; pass all four."
            )
        slots, table, full, computed = (value.long() for value in self if value is not None)
        full, computed = full.reshape(-1), computed.reshape(-1)
        if table.dim() != 2 or not len(table) == len(full) == len(computed):
            raise ValueError(
                f"block_table is {list(table.shape)} for contexts of {len(full)} and "
                f"{len(computed)} sequences, expected (rows, blocks) and one of each a row."
            )
        if len(table) != rows:
            raise ValueError(f"block_table has {len(table)} rows, expected {rows} as input_ids.")
        if bool((computed < 0).any()) or bool((full <= computed).any()):
            raise ValueError(
                f"Contexts of {full.tolist()} tokens have {computed.tolist()} computed ones, "
                "expected fewer in every sequence, because the last token's logits are needed."
            )
        most = config.pa_num_blocks
        if int(table.max()) >= most or int(slots.max()) >= most * config.pa_block_size:
            raise ValueError(
                f"A block table or slot reaches block {int(table.max())} and slot "
                f"{int(slots.max())}, expected less than {most} blocks of {config.pa_block_size}."
            )
        if int(full.max()) > table.shape[1] * config.pa_block_size:
            raise ValueError(
                f"block_table has {table.shape[1]} blocks of {config.pa_block_size} a row, "
                f"expected enough for {int(full.max())} tokens."
            )
        return BlockArguments(slots, table.clamp_min(0), full, computed)


def _fit(tensor: torch.Tensor, width: int, value: int) -> torch.Tensor:
    """The last axis cut, or padded at the end, to a width."""
    return F.pad(tensor[..., :width], (0, max(0, width - tensor.shape[-1])), value=value)


def prefill(
    config: Any, inputs: Tensors, blocks: BlockArguments, pad_token: int
) -> Tuple[Pair, Tensors]:
    """Bucket and inputs of a prompt (1, n): the five, then slots, table, queries, computed.

    The mask (1, prefix) shows cached tokens that are not computed again. A bucket without prefix
    has zeros of one axis for mask and table.
    """
    slots, table, full, computed = blocks
    total, queries = int(full[0]), int(full[0] - computed[0])
    if slots.shape[-1] < queries:
        raise ValueError(
            f"slot_mapping has {slots.shape[-1]} slots, expected one for each of {queries} tokens."
        )
    if inputs[0].shape[1] < total:
        raise ValueError(
            f"input_ids has {inputs[0].shape[1]} tokens, expected the whole prompt of {total}."
        )
    (new, prefix), again = prefix_caching_bucket(queries, total - queries, config.buckets)
    start = total - queries - again
    ids = _fit(inputs[0][:, start:total], new, pad_token)
    positions = _fit(torch.arange(start, total)[None], new, _PAD_POSITION)
    slots = torch.cat([slots.new_full((1, again), -1), slots.reshape(1, -1)[:, :queries]], 1)
    mask, own = torch.zeros(1), torch.zeros(1)
    if prefix:
        mask = (torch.arange(prefix) < start)[None]
        used = math.ceil(start / config.pa_block_size)
        own = _fit(table[:, :used], prefix // config.pa_block_size, 0)
    counts = torch.tensor([[queries]]), torch.tensor([[start]])
    found = [ids, mask, positions, *inputs[3:], _fit(slots, new, -1), own, *counts]
    return [new, prefix], _as_int32(found)


def decode(config: Any, inputs: Tensors, blocks: BlockArguments) -> Tuple[Pair, Tensors]:
    """Bucket [1, length] and inputs of a step (rows, 1), filled up to the compiled batch. Rows that
    fill it repeat the first row with slot -1."""
    slots, table, _, computed = blocks
    longest = int(computed.max())
    lengths = [length for _, length in config.buckets]
    length = next((length for length in lengths if length > longest), None)
    if length is None:
        raise ValueError(
            f"A sequence has {longest} cached tokens, expected less than the largest bucket "
            f"{lengths[-1]}; compile with a larger seq_len or stop generating earlier."
        )
    mask = torch.arange(length) < computed[:, None]
    table = _fit(table, math.ceil(length / config.pa_block_size), 0)
    slots = slots.reshape(len(table), -1)[:, :1]
    counts = torch.ones_like(computed)[:, None], computed[:, None]
    found = [inputs[0], mask, *inputs[2:], slots, table, *counts]
    missing = config.batch_size - len(table)
    if missing:
        found = [torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) for part in found]
        found[len(inputs)] = _fit(slots.T, config.batch_size, -1).T
    return [1, length], _as_int32(found)


def _as_int32(tensors: Tensors) -> Tensors:
    """The inputs as int32, except the fifth, the sampling parameters."""
    return [part if at == 4 else part.to(torch.int32) for at, part in enumerate(tensors)]
