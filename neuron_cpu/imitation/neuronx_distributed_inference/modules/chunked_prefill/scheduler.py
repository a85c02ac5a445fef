"""Which cached keys which queries of a chunk look at, as tiles of both.

The sequences' cached tokens, each padded to whole blocks, are laid end to end and cut into tiles of
keys; the chunk's tokens stand end to end, too, and are cut into tiles of queries. A pair of tiles
counts where a sequence has tokens in both.
"""

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch

REUSE = 1000  # times the blocks of the cache: the number that stands for "the tile before, again"


class TilePlan(NamedTuple):
    """Inputs of a chunk's graph.

    tile_q_indices (tiles,) int32, tile_block_tables (tiles, kv tile / block) int32, tile_masks
    (tiles, q tile, kv tile) bool.
    """

    tile_q_indices: torch.Tensor
    tile_block_tables: torch.Tensor
    tile_masks: torch.Tensor


class GridTileScheduler:
    """Tiles of a chunk whose sequences have so many new and cached tokens.

    Args:
        query_lens, context_lens: of each sequence.
        block_tables: the blocks of each sequence, in order.
        tiles: (queries, keys) of one.
        block_size, num_blocks: of the cache.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        tiles: Tuple[int, int],
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._q_tile, self._kv_tile = tiles
        self._block, self._reuse = block_size, num_blocks * REUSE
        # of each query and each column of keys: whose it is; columns without a token are nobody's
        self._owners = [row for row, count in enumerate(query_lens) for _ in range(count)]
        self._columns: List[int] = []
        self._blocks: List[int] = []
        for row, (length, table) in enumerate(zip(context_lens, block_tables, strict=True)):
            used = math.ceil(length / block_size)
            self._blocks += [int(block) for block in table[:used]]
            self._columns += [row] * length + [-1] * (used * block_size - length)

    def plan(self) -> TilePlan:
        """Pairs column by column, without padding."""
        pairs = [
            (q, kv)
            for kv in range(math.ceil(len(self._columns) / self._kv_tile))
            for q in range(math.ceil(len(self._owners) / self._q_tile))
            if self._mask(q, kv).any()
        ]
        width = self._kv_tile // self._block
        tables = torch.full((len(pairs), width), self._reuse, dtype=torch.int32)
        for tile, (_, kv) in enumerate(pairs):
            if tile and pairs[tile - 1][1] == kv:
                continue
            blocks = self._blocks[kv * width : (kv + 1) * width]
            tables[tile] = 0
            tables[tile, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        masks = [self._mask(*pair) for pair in pairs]
        empty = torch.zeros((0, self._q_tile, self._kv_tile), dtype=torch.bool)
        queries = torch.tensor([q for q, _ in pairs], dtype=torch.int32)
        return TilePlan(queries, tables, torch.stack(masks) if masks else empty)

    def _mask(self, q: int, kv: int) -> torch.Tensor:
        """bool (q tile, kv tile): the query's sequence is the column's, and the column has one."""

        def padded(owners: List[int], at: int, size: int, nobody: int) -> torch.Tensor:
            part = owners[at * size : (at + 1) * size]
            return torch.tensor(part + [nobody] * (size - len(part)))

        queries = padded(self._owners, q, self._q_tile, -2)
        return queries[:, None] == padded(self._columns, kv, self._kv_tile, -1)


def padded_plan(plan: TilePlan, tiles: int) -> TilePlan:
    """The same with so many tiles; those behind hide everything."""
    missing = tiles - len(plan.tile_q_indices)
    return TilePlan(
        *(torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) for part in plan)
    )


def tiles_as_cache(
    caches: Sequence[torch.Tensor], plan: TilePlan, tokens: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (1, kv heads, tiles * kv tile, D) of a plan's tiles, from the caches (blocks,
    kv heads, block, D), and which of them each of `tokens` queries sees, bool (1, 1, tokens, keys).

    A tile that several tiles of queries look at comes once for each, and each sees its own.
    """
    queries, tables, masks = plan
    count, q_tile, kv_tile = masks.shape
    blocks, heads, _, head_dim = caches[0].shape
    order = torch.arange(count, device=tables.device)
    fresh = torch.where(tables[:, 0] < blocks, order, 0)
    tables = tables[torch.cummax(fresh, 0).values].long()  # those again: as the last one before
    keys, values = (
        cache[tables].permute(2, 0, 1, 3, 4).reshape(1, heads, count * kv_tile, head_dim)
        for cache in caches
    )
    own = torch.arange(math.ceil(tokens / q_tile), device=queries.device)[:, None] == queries
    seen = own[:, None, :, None] & masks.transpose(0, 1)  # (q tiles, q tile, tiles, kv tile)
    return keys, values, seen.reshape(-1, count * kv_tile)[None, None, :tokens]
