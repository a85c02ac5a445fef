"""The cache as blocks that sequences own in any order: a table names them, slots say where to
write.

Slot `block * pa_block_size + offset` is one token's place for keys and values, on every layer. Slot
-1 is no place: the token goes to a block that is never read.
"""

import math
from typing import Any, List, Optional, Sequence

import torch
from neuronx_distributed.quantization.dequantize import direct_cast_dequantize
from neuronx_distributed.quantization.quantize import direct_cast_quantize

from .kv_cache_manager import KVCacheManager

_LANES = 128  # blocks of a sequence from which on NxDI cuts none


class BlockKVCacheManager(KVCacheManager):
    """Caches K0, V0, K1, V1, ... in blocks, by `pa_num_blocks` and `pa_block_size`.

    Each is (blocks + 1, block, kv heads, D); the last block takes tokens without a slot. A sequence
    of fewer than 128 blocks cuts a block into t parts: (blocks + 1, t, block / t, kv heads, D).
    """

    _NUM_EXTRA_RESERVED_BLOCK = 1

    def _init_kv_shape(self, config: Any) -> None:
        neuron_config = config.neuron_config
        self.pa_num_blocks = neuron_config.pa_num_blocks
        self.pa_block_size = block = neuron_config.pa_block_size
        super()._init_kv_shape(config)
        _, heads, length, head_dim = self.v_shape
        longest = math.ceil(length / block)
        self.block_tiling_factor = 1
        blocks = self.pa_num_blocks + self._NUM_EXTRA_RESERVED_BLOCK
        shape: Sequence[int] = (blocks, block, heads, head_dim)
        if longest < _LANES:
            parts = min(2 ** math.ceil(math.log2(_LANES / longest)), block)
            self.block_tiling_factor = parts
            shape = (blocks, parts, block // parts, heads, head_dim)
        self.block_tiling = self.block_tiling_factor > 1
        self.k_shape = self.v_shape = tuple(shape)

    def get_cache(  # type: ignore[override]
        self,
        seq_len: int = 0,
        skip_slice: bool = False,
        active_block_table: Optional[torch.Tensor] = None,
        is_for_context_encoding: bool = False,
        **_: Any,
    ) -> List[List[torch.Tensor]]:
        """[K, V] of every layer, the table's blocks as (B, kv heads, blocks * block size, D).
        `active_block_table` is (B, blocks)."""
        del seq_len, skip_slice, is_for_context_encoding
        layers = len(self.past_key_values) // 2
        caches = [list(self.past_key_values[2 * idx : 2 * idx + 2]) for idx in range(layers)]
        caches = [[self._gathered(cache, active_block_table) for cache in kv] for kv in caches]
        if not self.quant:
            return caches
        return [[direct_cast_dequantize(c, self.dequant_dtype) for c in kv] for kv in caches]

    def _gathered(self, cache: torch.Tensor, table: Optional[torch.Tensor]) -> torch.Tensor:
        """The blocks of a table (B, n) in its order: (B, kv heads, n * block size, D)."""
        if table is None:
            raise ValueError("A cache of blocks is read through an active_block_table, got none.")
        blocks = _as_bytes(cache)[table.long()]  # (B, n, ...)
        found = blocks.reshape(len(table), -1, *cache.shape[-2:]).transpose(1, 2)
        return found.view(cache.dtype) if found.dtype != cache.dtype else found

    def update_cache(  # type: ignore[override]
        self,
        new_key_values: Sequence[Sequence[torch.Tensor]],
        scatter_index: Optional[torch.Tensor] = None,
        **_: Any,
    ) -> List[torch.Tensor]:
        """Write every layer's new keys and values (B, kv heads, T, D) to the slots (B, T)."""
        if scatter_index is None:
            raise ValueError("A cache of blocks is written through a slot mapping, got none.")
        slots = scatter_index.reshape(-1).long()
        for idx, kv_per_layer in enumerate(new_key_values):
            for cache, new in zip(
                self.past_key_values[2 * idx : 2 * idx + 2], kv_per_layer, strict=True
            ):
                self._write(cache, new, slots)
        return list(self.past_key_values)

    def _write(self, cache: torch.Tensor, new: torch.Tensor, slots: torch.Tensor) -> None:
        """Write new (B, kv heads, T, D) to the slots (B * T)."""
        new = direct_cast_quantize(new, self.quant_dtype) if self.quant else new.to(cache.dtype)
        rows = _as_bytes(new).transpose(1, 2).flatten(0, 1)  # (B * T, kv heads, D)
        slots = torch.where(slots < 0, self.pa_num_blocks * self.pa_block_size, slots)
        stored = _as_bytes(cache)
        stored.view(-1, *stored.shape[-2:])[slots] = rows


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as uint8: PyTorch indexes no fp8, and moving bytes gives the same."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def generate_tokengen_slot_mapping(
    position_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Slots (B, 1) of new tokens at positions (B, 1), of sequences with tables (B, n). A row whose
    given slot is -1 keeps it."""
    block = torch.gather(block_table, 1, (position_ids // block_size).long())
    slots = block * block_size + position_ids % block_size
    return torch.where(slot_mapping >= 0, slots, -1)
