"""Continuous batching: the cache lines in use, and those that a call leaves unreadable.

A decode graph computes its whole batch. Rows that a call leaves out are filled in. In NxDI these
rows silently write keys and values into lines of waiting sequences, unless `apply_seq_ids_mask`
(0.6) sends them to a position that is never read. The stand-in always sends them there,
and refuses to read a line that a device would have damaged.
"""

from typing import Any

import torch


class CacheLines:
    """The tokens that each line holds, and the place where NxDI would have overwritten one."""

    def __init__(self, neuron_config: Any) -> None:
        self._contract = neuron_config.contract
        self._size = neuron_config.max_batch_size
        self._spared = getattr(neuron_config, "apply_seq_ids_mask", False)
        self.forget()

    def forget(self) -> None:
        """Free all lines."""
        self._tokens: dict[int, int] = {}
        self._damaged: dict[int, int] = {}  # line -> position that another row's token took

    def prefill(self, seq_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Put prompts on lines `seq_ids` (B,), as long as `mask` (B, S) has ones."""
        for line, tokens in zip(self._checked(seq_ids), mask.sum(1).tolist(), strict=True):
            self._tokens[line] = tokens
            self._damaged.pop(line, None)

    def decode(self, seq_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Add tokens at `positions` (B, T) of lines `seq_ids` (B,); ValueError for a damaged line.

        A line that the call leaves out is damaged where a row that fills the batch overwrites a
        token of it.
        """
        lines = self._checked(seq_ids)
        for line in lines:
            if line in self._damaged:
                raise ValueError(self._sentence(line))
        for line, last in zip(lines, positions.amax(1).tolist(), strict=True):
            self._tokens[line] = last + 1
        if self._spared:
            return
        place = 0 if self._contract.idle_rows_are_zeros else int(positions[0, 0])
        for line, tokens in self._tokens.items():
            if line not in lines and place < tokens:
                self._damaged[line] = place

    def _sentence(self, line: int) -> str:
        mend = "decode all sequences in every call"
        if self._contract.has_field("apply_seq_ids_mask"):
            mend += ", or set apply_seq_ids_mask"
        return (
            f"Sequence id {line} goes on after a call that left it out, and the row that filled "
            f"its place there has overwritten its position {self._damaged[line]} in NxDI "
            f"{self._contract.version}, expected every live sequence in every call; {mend}."
        )

    def _checked(self, seq_ids: torch.Tensor) -> list[int]:
        """The lines' numbers; ValueError for a number that the cache lacks, or that occurs
        twice."""
        lines = seq_ids.tolist()
        if len(set(lines)) != len(lines) or not all(0 <= line < self._size for line in lines):
            raise ValueError(
                f"seq_ids are {lines}, expected different numbers from 0 to {self._size - 1}, one "
                "cache line each; public sources leave open what the device does with others."
            )
        return lines
