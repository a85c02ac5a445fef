"""The key-value cache: one rank's storage, and the writes of prefill and decode.

Caches are module parameters: on a device they are a graph's inputs and outputs in shared memory.
The stand-in writes in place, so that a decode step touches one position. Layout: (batch, the rank's
key-value heads, length, head_dim).
"""

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import divide
from neuronx_distributed.quantised import direct_cast_dequantize, direct_cast_quantize
from torch import nn

from ..attention.gqa import determine_sharding_strategy, get_shardable_head_counts

_QUANTIZED_DTYPE = torch.float8_e4m3fn


class KVCacheManager(nn.Module):
    """Caches K0, V0, K1, V1, ... as `past_key_values`, zeros of the model's dtype.

    With `kv_cache_quant` (in 0.9 `kv_quant_config`) they are stored as fp8 (e4m3), cast
    without a scale, and read as `dequant_dtype`, the model's. The call that makes keys and values
    uses them unrounded.
    """

    def __init__(self, config: Any, num_kv_head: int, global_rank: Any = None, **_later: Any):
        super().__init__()
        neuron_config = config.neuron_config
        self.padding_side = neuron_config.padding_side
        self.is_continuous_batching = neuron_config.is_continuous_batching
        self.num_kv_head = num_kv_head
        asked = getattr(neuron_config, "kv_quant_config", neuron_config.kv_cache_quant or None)
        self.quant = asked is not None
        self.quant_dtype, self.dequant_dtype = _QUANTIZED_DTYPE, neuron_config.torch_dtype
        self._init_kv_shape(config)
        stored = self.quant_dtype if self.quant else neuron_config.torch_dtype
        shapes = [self.k_shape, self.v_shape] * config.num_hidden_layers
        self.past_key_values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=stored), requires_grad=False) for shape in shapes
        )

    def _get_num_kv_heads_per_rank(self, config: Any) -> int:
        """A rank's heads after the sharding strategy's padding or replication."""
        tp_degree = config.neuron_config.tp_degree
        strategy = determine_sharding_strategy(tp_degree, self.num_kv_head)
        _, heads = get_shardable_head_counts(
            tp_degree, config.num_attention_heads, self.num_kv_head, strategy
        )
        return divide(heads, tp_degree) if parallel_state.model_parallel_is_initialized() else heads

    def _init_kv_shape(self, config: Any) -> None:
        neuron_config = config.neuron_config
        batch = getattr(neuron_config, "kv_cache_batch_size", neuron_config.max_batch_size)
        batch += getattr(neuron_config, "kv_cache_padding_size", 0)
        heads = self._get_num_kv_heads_per_rank(config)
        length = neuron_config.max_length
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.k_shape = self.v_shape = self.kv_shape = (batch, heads, length, head_dim)

    def get_kv_by_layer_id(self, idx: int, seq_len: int, skip_slice: bool = False, **_: Any):
        """[K, V] of layer `idx`: the first `seq_len` positions, the last ones if left-padded."""
        keys, values = self.past_key_values[2 * idx], self.past_key_values[2 * idx + 1]
        if not skip_slice:
            start = 0 if self.padding_side == "right" else self.kv_shape[2] - seq_len
            keys = keys.narrow(2, start, seq_len)
            values = values.narrow(2, start, seq_len)
        if not self.quant:
            return [keys, values]
        return [direct_cast_dequantize(cache, self.dequant_dtype) for cache in (keys, values)]

    def get_cache(
        self, seq_len: int, skip_slice: bool = False, **_: Any
    ) -> list[list[torch.Tensor]]:
        """[K, V] of every layer, views of the caches unless they are quantised."""
        layers = len(self.past_key_values) // 2
        return [self.get_kv_by_layer_id(idx, seq_len, skip_slice) for idx in range(layers)]

    def update_kv_by_layer_id(
        self,
        idx: int,
        is_for_context_encoding: bool,
        seq_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv_per_layer: Sequence[torch.Tensor],
        seq_len: int,
        scatter_index: torch.Tensor | None = None,
        kv_active_mask: torch.Tensor | None = None,
        kvcache_buffer: list[list[torch.Tensor]] | None = None,
        **_: Any,
    ) -> list[torch.Tensor]:
        """Write one layer's new keys and values (B, H, T, D); returns its full caches."""
        del seq_len, kv_active_mask  # the new tensors say how long they are
        if kvcache_buffer is None:
            caches = [self.past_key_values[2 * idx], self.past_key_values[2 * idx + 1]]
        else:
            caches = list(kvcache_buffer[idx])
        for cache, new in zip(caches, kv_per_layer, strict=True):
            if self.quant:  # PyTorch cannot scatter fp8; moving bytes is the same
                new = direct_cast_quantize(new, self.quant_dtype)
                cache, new = cache.view(torch.uint8), new.view(torch.uint8)
            else:
                new = new.to(cache.dtype)
            if is_for_context_encoding:
                self._write_prefix(cache, new, seq_ids)
            elif self.padding_side == "left":
                cache.copy_(torch.cat([cache[:, :, new.shape[2] :], new], dim=2))
            else:
                index = position_ids if scatter_index is None else scatter_index
                self._write_positions(cache, new, index)
        return caches

    def _write_prefix(self, cache: torch.Tensor, new: torch.Tensor, seq_ids: torch.Tensor) -> None:
        """Prefill: write `new` (B, H, S, D) to the beginning of the cache. With continuous batching
        row b goes to cache line `seq_ids[b]`."""
        region = cache.narrow(2, 0, new.shape[2])
        if self.is_continuous_batching:
            region.index_copy_(0, seq_ids.long(), new)
        else:
            region[: new.shape[0]].copy_(new)

    @staticmethod
    def _write_positions(cache: torch.Tensor, new: torch.Tensor, positions: torch.Tensor) -> None:
        """Decode: write `new` (B, H, T, D) to `positions` (B, T) of rows 0..B-1."""
        index = positions.long()[:, None, :, None].expand_as(new)
        cache[: new.shape[0]].scatter_(2, index, new)

    def update_cache(
        self,
        is_for_context_encoding: bool,
        seq_ids: torch.Tensor,
        position_ids: torch.Tensor,
        new_key_values: Sequence[Sequence[torch.Tensor]],
        seq_len: int,
        scatter_index: torch.Tensor | None = None,
        kv_active_mask: torch.Tensor | None = None,
        kvcache_buffer: list[list[torch.Tensor]] | None = None,
        **_: Any,
    ) -> list[torch.Tensor]:
        """Write every layer's new keys and values; returns the flat list of full caches."""
        del kv_active_mask  # of flash decoding
        updated: list[torch.Tensor] = []
        for idx, kv_per_layer in enumerate(new_key_values):
            updated += self.update_kv_by_layer_id(
                idx,
                is_for_context_encoding,
                seq_ids,
                position_ids,
                kv_per_layer,
                seq_len,
                scatter_index=scatter_index,
                kvcache_buffer=kvcache_buffer,
            )
        return updated
