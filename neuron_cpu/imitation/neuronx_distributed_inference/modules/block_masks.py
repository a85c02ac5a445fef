"""Who sees whom over a cache of blocks: masks that a graph makes from shapes and counts."""

from typing import Tuple

import torch


def prior_and_active(attention_mask: torch.Tensor, new: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(B, prefix) of cached tokens that count -> bool (B, 1, new, prefix) and the triangle of new
    tokens with each other (B, 1, new, new).

    NxDI's own path shows padding behind the prefix, too; its kernel does not.
    """
    batch, prefix = attention_mask.shape
    prior = attention_mask.to(torch.bool)[:, None, None].expand(batch, 1, new, prefix)
    active = torch.ones((new, new), dtype=torch.bool, device=attention_mask.device).tril()
    return prior, active[None, None].expand(batch, 1, new, new)


def chunk_mask(num_queries: torch.Tensor, tokens: int) -> torch.Tensor:
    """New tokens of each sequence (sequences,), end to end -> bool (1, 1, tokens, tokens): each
    sees those of its sequence up to itself; padding behind all sees padding."""
    places = torch.arange(tokens, device=num_queries.device)
    owner = (places[:, None] >= num_queries.cumsum(0)).sum(1)
    seen = (owner[:, None] == owner) & (places[:, None] >= places)
    return seen[None, None]


def last_rows(hidden: torch.Tensor, num_queries: torch.Tensor) -> torch.Tensor:
    """Hidden states (1, tokens, H) of a chunk -> those of each sequence's last token (1, sequences,
    H), zeros where a sequence has none."""
    ends = num_queries.long().cumsum(0)
    rows = hidden[:, (ends - 1).clamp_min(0)]
    return torch.where((num_queries > 0)[None, :, None], rows, 0.0)
