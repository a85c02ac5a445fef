"""The target's hidden state in front of the next token, kept on the device between rounds."""

from typing import Any

import torch
from torch import nn


class HiddenState(nn.Module):
    """NxDI 0.1: one hidden state a row, `hidden_states` (B, 1, H)."""

    def __init__(self, neuron_config: Any, hidden_size: int) -> None:
        super().__init__()
        shape = (neuron_config.max_batch_size, 1, hidden_size)
        empty = torch.zeros(shape, dtype=neuron_config.torch_dtype)
        self.hidden_states = nn.Parameter(empty, requires_grad=False)

    def set_state(
        self, seq_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Keep hidden (B, 1, H)."""
        del seq_ids, position_ids
        self.hidden_states[: len(hidden)].copy_(hidden)

    def get_state(self, seq_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, 1, H): what was kept last."""
        del position_ids
        return self.hidden_states[: len(seq_ids)].clone()


class HiddenStateRollingBuffer(nn.Module):
    """NxDI 0.2 and later: `hidden_states` (max_batch + 1, 2k, H), by sequence and position mod 2k.

    A round is written by the position after it and read at that position, so two rounds in flight
    (async) do not meet.
    """

    def __init__(self, neuron_config: Any, hidden_size: int) -> None:
        super().__init__()
        self.places = 2 * neuron_config.speculation_length
        shape = (neuron_config.max_batch_size + 1, self.places, hidden_size)
        empty = torch.zeros(shape, dtype=neuron_config.torch_dtype)
        self.hidden_states = nn.Parameter(empty, requires_grad=False)

    def set_state(
        self, seq_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Keep hidden (B, 1, H) for the round at position_ids (B, 1)."""
        places = position_ids.long()[:, 0] % self.places
        self.hidden_states.index_put_((seq_ids.long(), places), hidden[:, 0])

    def get_state(self, seq_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, 1, H): what was kept for the round at position_ids (B, 1)."""
        places = position_ids.long()[:, 0] % self.places
        return self.hidden_states[seq_ids.long(), places][:, None]
