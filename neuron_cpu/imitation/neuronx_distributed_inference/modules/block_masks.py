"""Masks for a cache of blocks, which a graph makes from shapes and counts."""

import torch


def among_new(input_ids: torch.Tensor) -> torch.Tensor:
    """The triangle of new tokens (B, new) with each other, bool (B, 1, new, new)."""
    rows, new = input_ids.shape
    active = torch.ones((new, new), dtype=torch.bool, device=input_ids.device).tril()
    return active[None, None].expand(rows, 1, new, new)


def of_prefix(attention_mask: torch.Tensor) -> torch.Tensor:
    """The caller's mask int32 (B, prefix) as bool (B, 1, 1, prefix); another mask unchanged.

    NxDI passes the caller's mask on unchanged, and its own path shows padding behind the prefix;
    its kernel does not.
    """
    if attention_mask.dim() == 4:
        return attention_mask
    return attention_mask.to(torch.bool)[:, None, None]
