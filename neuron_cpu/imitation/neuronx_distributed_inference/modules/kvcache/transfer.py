"""One sequence's keys and values from one loaded model to another: prefill here, decode there.

The SDK has this since 2.24 as disaggregated inference (beta), over its own transport from device to
device; what travels is the same, the rows of one cache line on every layer and rank, and the first
token. Both sides need the same sharding and layout of caches, because rows go from rank to rank.
Names here are the stand-in's own.
"""

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Sequence

import torch

from neuron_cpu.errors import CollectiveError

from .transfer_line import TransferLine


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
        """What travels, but for the numbers in front."""
        return sum(rows.nbytes for rows in self.rows)


def _caches(model: Any) -> List[torch.Tensor]:
    """K0, V0, ... of all ranks in this process (lines, kv heads, max_length, D), whatever order
    keys are stored in; ValueError for caches of another layout."""
    config = model.neuron_config
    for name in ("is_block_kv_layout", "flash_decoding_enabled"):
        if getattr(config, name, False):
            raise ValueError(
                "Keys and values are taken from the line of one sequence, which has all of them, "
                f"got {name} True, expected it to be off; leave it out on both sides."
            )
    if config.padding_side != "right":
        raise ValueError(
            "Keys and values are taken from the first positions of a line, got padding_side "
            f"{config.padding_side!r}, expected 'right'; pad on the right."
        )
    turned = getattr(config, "k_cache_transposed", False)
    caches = [
        (number, cache.data)
        for module in model.models[0].model.modules
        for number, cache in enumerate(module.kv_mgr.past_key_values)
    ]
    return [
        cache.transpose(2, 3) if turned and number % 2 == 0 else cache for number, cache in caches
    ]


def export_kv(model: Any, seq_id: int, length: int, token: int) -> SequenceState:
    """Copies of line `seq_id`, of which a prefill has filled the first `length` positions."""
    rows = [cache[seq_id, :, :length].contiguous().clone() for cache in _caches(model)]
    return SequenceState(length, token, rows)


def _layout(tensors: Sequence[torch.Tensor]) -> List[Any]:
    """Type, heads and head size of each, of lines or of rows."""
    return [(str(t.dtype), t.shape[-3], t.shape[-1]) for t in tensors]


def _check(model: Any, ours: Sequence[Any], theirs: Sequence[Any], length: int) -> None:
    longest = model.neuron_config.max_length
    if list(ours) != list(theirs) or not 0 < length < longest:
        raise ValueError(
            f"The sequence has {len(theirs)} tensors of {theirs[:1]} and {length} tokens, "
            f"expected {len(ours)} of {ours[:1]} and fewer tokens than max_length {longest}; load "
            "both models at one degree, from one config."
        )


def import_kv(model: Any, seq_id: int, state: SequenceState) -> None:
    """Write a sequence into line `seq_id`, where decode goes on as if it had been filled there.

    ValueError where the caches have other heads, layers or types, or are too short.
    """
    caches = _caches(model)
    _check(model, _layout(caches), _layout(state.rows), state.length)
    for cache, rows in zip(caches, state.rows):
        cache[seq_id, :, : state.length] = rows
    model.kv_cache_populated = True
    model.cache_lines.prefill(torch.tensor([seq_id]), torch.ones(1, state.length))


_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # the number of a type in a header is its place


def send_kv(state: SequenceState, line: TransferLine) -> None:
    """Send a sequence to the process at the other end of a line."""
    first = state.rows[0]
    layout = [len(state.rows), _DTYPES.index(first.dtype), first.shape[0], first.shape[2]]
    line.send(torch.tensor([state.length, state.token, *layout]))
    line.send(torch.cat([rows.reshape(-1).view(torch.uint8) for rows in state.rows]))


class Header(NamedTuple):
    """What comes in front of a sequence."""

    length: int
    token: int
    count: int  # of tensors
    dtype: int  # place in _DTYPES
    heads: int
    head_dim: int


def receive_header(line: TransferLine) -> Header:
    """Wait for the next sequence; CollectiveError where the other side is gone or mute."""
    numbers = torch.empty(len(Header._fields), dtype=torch.int64)
    line.receive(numbers)
    return Header(*numbers.tolist())


def receive_rows(model: Any, header: Header, line: TransferLine) -> SequenceState:
    """The sequence behind a header, for the caches of `model`.

    ValueError where it does not fit them, before anything is reserved for it; CollectiveError
    where the other side is gone.
    """
    if not 0 <= header.dtype < len(_DTYPES) or not 0 <= header.count < 1 << 20:
        raise CollectiveError("What arrived is no sequence; start both sides from one version.")
    dtype, length = _DTYPES[header.dtype], header.length
    theirs = [(str(dtype), header.heads, header.head_dim)] * header.count
    _check(model, _layout(_caches(model)), theirs, length)
    # one message for all, as each costs milliseconds on a busy machine
    rows = torch.empty((header.count, header.heads, length, header.head_dim), dtype=dtype)
    line.receive(rows)
    return SequenceState(length, header.token, list(rows))
