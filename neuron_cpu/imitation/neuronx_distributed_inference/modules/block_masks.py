"""Who sees whom over a cache of blocks: masks that a graph makes from shapes and counts."""

import torch


def among_new(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """The triangle of new tokens with each other, bool (B, 1, new, new)."""
    active = torch.ones((new, new), dtype=torch.bool, device=attention_mask.device).tril()
    return active[None, None].expand(len(attention_mask), 1, new, new)


def of_prefix(attention_mask: torch.Tensor) -> torch.Tensor:
    """The caller's mask int32 (B, prefix), which NxDI hands to layers as it is -> bool (B, 1, 1,
    prefix); any other as it is.

    NxDI's own path shows padding behind the prefix, too; its kernel does not.
    """
    if attention_mask.dim() == 4:
        return attention_mask
    return attention_mask.to(torch.bool)[:, None, None]


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
