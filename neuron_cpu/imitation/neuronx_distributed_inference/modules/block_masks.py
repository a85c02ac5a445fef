"""Who sees whom over a cache of blocks: masks that a graph makes from shapes and counts."""

import torch


def among_new(input_ids: torch.Tensor) -> torch.Tensor:
    """The triangle of new tokens (B, new) with each other, bool (B, 1, new, new)."""
    rows, new = input_ids.shape
    active = torch.ones((new, new), dtype=torch.bool, device=input_ids.device).tril()
    return active[None, None].expand(rows, 1, new, new)


def of_prefix(attention_mask: torch.Tensor) -> torch.Tensor:
    """The caller's mask int32 (B, prefix), which NxDI hands to layers as it is -> bool (B, 1, 1,
    prefix); any other as it is.

    NxDI's own path shows padding behind the prefix, too; its kernel does not.
    """
    if attention_mask.dim() == 4:
        return attention_mask
    return attention_mask.to(torch.bool)[:, None, None]
