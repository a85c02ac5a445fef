"""Arithmetic of flash decoding."""

from typing import Optional, Tuple

import torch


def calculate_num_cores_per_group(num_attn_heads: int, num_kv_heads: int, tp_degree: int) -> int:
    """Ranks that share one key-value head: min(tp, query heads) / key-value heads, if whole."""
    ranks = min(tp_degree, num_attn_heads)
    if ranks % num_kv_heads != 0:
        raise AssertionError(
            f"Flash decoding would share {num_kv_heads} key-value heads among {ranks} ranks, "
            "expected a multiple of the heads; leave flash_decoding_enabled off, or choose a "
            "tensor-parallel degree that is one."
        )
    return ranks // num_kv_heads


EXTRA_RESERVED_SPACE = 128  # rows behind a rank's share of the sequence; the last one is garbage


def get_cache_size(seq_len: int, num_cores_per_group: int, is_ctx: bool = False) -> int:
    """Rows of a rank's cache for `seq_len` positions, of a prompt without the reserved ones."""
    rows = -(-seq_len // num_cores_per_group)
    return rows if is_ctx else rows + EXTRA_RESERVED_SPACE


def owned(position_ids: torch.Tensor, member: torch.Tensor, cores: int) -> torch.Tensor:
    """Which positions (B, n) lie on this member of its group: p mod g is its number."""
    return position_ids % cores == member


def mask_util(
    pos_ids: torch.Tensor,
    rank_id: torch.Tensor,
    num_cores_per_group: int,
    cache_size: int,
    seen: Optional[torch.Tensor] = None,
    active_mask: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """What new tokens see on this rank: bool active (B, 1, n, n) and prior (B, 1, n, cache_size).

    Row j of the cache holds position j g + member. It counts where `seen` (B, 1, n, positions)
    shows it, or else where it lies before the first new token. A new token counts on its owner.
    """
    member = rank_id.long() % num_cores_per_group
    new = pos_ids.shape[-1]
    rows = torch.arange(cache_size, device=pos_ids.device) * num_cores_per_group + member
    if seen is None:
        prior = (rows < pos_ids[:, :1])[:, None, None, :].expand(-1, 1, new, -1)
    else:
        inside = rows < seen.shape[-1]
        prior = seen[..., torch.where(inside, rows, 0)] & inside
    active = owned(pos_ids, member, num_cores_per_group)[:, None, None, :]
    active = active.expand(-1, 1, new, -1)
    return active if active_mask is None else active & active_mask, prior
