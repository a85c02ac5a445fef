"""The projections of grouped-query attention under tensor parallelism.

A head stays whole on a rank. Where counts do not divide, query heads are padded with zeros and
key-value heads replicated: each rank's query heads meet their own key-value heads. The functions
below decide the counts; `preshard_hook` arranges the full weights.
"""

import enum
from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed.keywords import refuse_others
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.utils import divide, get_number_of_extra_heads
from neuronxcc.nki._private_kernels.qkv import rmsnorm_qkv_isa_kernel
from torch import nn

from neuron_cpu.runtime.ranks import Group

from ...contract import contract
from .utils import transpose_parallel_linear_layer

StateDict = dict[str, torch.Tensor]
Input = torch.Tensor | None  # which a call may leave out


class GQA(enum.Enum):
    """The way to treat key-value heads that ranks cannot share evenly."""

    CONVERT_TO_MHA = "convert-to-mha"
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"


def determine_sharding_strategy(
    tp_degree: int, source_key_value_heads: int, desired_sharding_strategy: GQA | None = None
) -> GQA:
    """REPLICATE unless the degree is no multiple of the key-value heads."""
    strategy = desired_sharding_strategy or GQA.REPLICATE_TO_TP_DEGREE
    if strategy is GQA.REPLICATE_TO_TP_DEGREE and tp_degree % source_key_value_heads != 0:
        return GQA.CONVERT_TO_MHA
    return strategy


def get_shardable_head_counts(
    tp_degree: int, num_attention_heads: int, num_key_value_heads: int, sharding_strategy: GQA
) -> tuple[int, int]:
    """Query and key-value heads of all ranks, after padding and replication."""
    queries = num_attention_heads + get_number_of_extra_heads(num_attention_heads, tp_degree)
    if num_attention_heads == num_key_value_heads:
        return queries, queries
    if num_key_value_heads >= tp_degree and num_key_value_heads % tp_degree == 0:
        return queries, num_key_value_heads
    if sharding_strategy is GQA.REPLICATE_TO_TP_DEGREE:
        return queries, tp_degree
    return queries, queries


def replicate_kv(tensor: Input, source_heads: int, repeats: int, head_dim: int) -> Input:
    """Rows (heads * D, ...) with each head `repeats` times in a row."""
    if tensor is None or repeats == 1:
        return tensor
    by_head = tensor.reshape(source_heads, head_dim, *tensor.shape[1:])
    return by_head.repeat_interleave(repeats, dim=0).reshape(-1, *tensor.shape[1:])


def maybe_pad_tail(tensor: Input, source_heads: int, target_heads: int, head_dim: int) -> Input:
    """Rows (heads * D, ...) with zero heads appended."""
    if tensor is None or target_heads <= source_heads:
        return tensor
    zeros = tensor.new_zeros(((target_heads - source_heads) * head_dim, *tensor.shape[1:]))
    return torch.cat([tensor, zeros], dim=0)


def maybe_pad_interleaved(
    tensor: Input, source_heads: int, target_heads: int, groups: int, head_dim: int
) -> Input:
    """Rows (heads * D, ...) with zero heads at the end of each of `groups` equal groups."""
    if tensor is None or target_heads <= source_heads:
        return tensor
    tail = tensor.shape[1:]
    by_group = tensor.reshape(groups, source_heads // groups * head_dim, *tail)
    extra = (target_heads - source_heads) // groups * head_dim
    return torch.cat([by_group, by_group.new_zeros((groups, extra, *tail))], dim=1).reshape(
        -1, *tail
    )


def group_or_all(given: Group | None) -> Group | None:
    """The group given, else all ranks' group; None before there are ranks."""
    if given is None and parallel_state.model_parallel_is_initialized():
        return parallel_state.get_tensor_model_parallel_group()
    return given


class BaseGroupQueryAttention(nn.Module):
    """Head counts of both projection modules, and the renaming of checkpoint keys."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        tensor_model_parallel_group: Group | None = None,
    ) -> None:
        super().__init__()
        self.contract = contract()
        group = self.tensor_model_parallel_group = group_or_all(tensor_model_parallel_group)
        if group is not None and tp_degree != group.size():
            raise AssertionError(
                f"TP degree {tp_degree} and tensor parallel group size {group.size()} must match"
            )
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.tp_degree, self.dtype, self.bias = tp_degree, dtype, bias
        self._src_num_attention_heads = num_attention_heads
        self._src_num_key_value_heads = num_key_value_heads
        self.sharding_strategy = determine_sharding_strategy(
            tp_degree, num_key_value_heads, desired_sharding_strategy
        )
        self.num_attention_heads, self.num_key_value_heads = get_shardable_head_counts(
            tp_degree, num_attention_heads, num_key_value_heads, self.sharding_strategy
        )

    def get_num_attention_heads(self) -> int:
        return self.num_attention_heads

    def get_num_key_value_heads(self) -> int:
        return self.num_key_value_heads

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        raise NotImplementedError("Subclasses arrange their own weights.")

    def replace_prefixes(
        self, old_prefix: str, new_prefix: str, model_state_dict: StateDict
    ) -> None:
        """Rename, in place, every key that contains `old_prefix`."""
        for key in [key for key in model_state_dict if old_prefix in key]:
            model_state_dict[key.replace(old_prefix, new_prefix)] = model_state_dict.pop(key)

    def _pad_queries(self, tensor: Input) -> Input:
        """The full query rows, with zero heads where the strategy wants them."""
        source, target = self._src_num_attention_heads, self.num_attention_heads
        # A rank takes a run of query heads and one KV head: zeros at the end of each group keep the
        # queries of a KV head on its own ranks, where zeros at the very end would shift them.
        if self.sharding_strategy is GQA.REPLICATE_TO_TP_DEGREE:
            groups = self._src_num_key_value_heads
            return maybe_pad_interleaved(tensor, source, target, groups, self.head_dim)
        return maybe_pad_tail(tensor, source, target, self.head_dim)

    def _spread_kv(self, tensor: Input) -> Input:
        """The full key or value rows, replicated and padded to the target count."""
        source, target = self._src_num_key_value_heads, self.num_key_value_heads
        if target == source:
            return tensor
        if self.sharding_strategy is GQA.REPLICATE_TO_TP_DEGREE:
            return replicate_kv(tensor, source, target // source, self.head_dim)
        # CONVERT_TO_MHA: a KV head for each query head, zero ones beside the zero queries.
        heads = self._src_num_attention_heads
        tensor = replicate_kv(tensor, source, heads // source, self.head_dim)
        return maybe_pad_tail(tensor, heads, target, self.head_dim)


class GroupQueryAttention_QKV(BaseGroupQueryAttention):
    """The three input projections: children q_proj, k_proj, v_proj, or Wqkv when fused.

    `forward(hidden)`: (B, S, H) -> Q (B, S, heads/tp * D), K, V (B, S, kv heads/tp * D). In NxDI
    0.6 the residual is a fourth item.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        gather_output: bool = True,
        fused_qkv: bool = False,
        clip_qkv: float | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: Group | None = None,
        rms_norm_eps: float | None = None,
        qkv_kernel_enabled: bool = False,
        **later: Any,
    ) -> None:
        refuse_others(
            "GroupQueryAttention_QKV",
            later,
            logical_neuron_cores=...,
            logical_nc_config=...,
            qkv_kernel_nbsd_layout=...,
            on_cpu=...,
            fused_rmsnorm_skip_gamma=False,
            tiling_factor=...,
            seq_len_threshold_for_cc_tiling=...,
            rank_ordering=None,
        )
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        if fused_qkv and gather_output:
            raise ValueError(
                "Gathering states followed by fused qkv is not allowed; pass gather_output=False."
            )
        self.gather_output, self.fused_qkv, self.clip_qkv = gather_output, fused_qkv, clip_qkv
        self.qkv_kernel_enabled = qkv_kernel_enabled
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.rms_norm_eps = rms_norm_eps
        query_width = self.num_attention_heads * head_dim
        kv_width = self.num_key_value_heads * head_dim
        if fused_qkv:
            self.Wqkv = self._linear(query_width + 2 * kv_width)
            if qkv_kernel_enabled:  # kernels read the weight as (H, outputs)
                self.Wqkv.weight = transpose_parallel_linear_layer(self.Wqkv.weight)
            self._tag_fused(self.Wqkv.weight)
            if bias:
                self._tag_fused(self.Wqkv.bias)
        else:
            self.q_proj = self._linear(query_width)
            self.k_proj = self._linear(kv_width)
            self.v_proj = self._linear(kv_width)

    def _linear(self, width: int) -> nn.Module:
        if self.tensor_model_parallel_group is None:
            return nn.Linear(self.hidden_size, width, bias=self.bias, dtype=self.dtype)
        return ColumnParallelLinear(
            self.hidden_size,
            width,
            bias=self.bias,
            gather_output=self.gather_output,
            dtype=self.dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
        )

    def _tag_fused(self, parameter: torch.Tensor) -> None:
        """Tell the sharder that the rows are q, k and v, to be sliced separately."""
        parameter.fused_qkv = True
        parameter.num_attention_heads = self.num_attention_heads
        parameter.num_key_value_heads = self.num_key_value_heads
        parameter.head_dim = self.head_dim

    def forward(
        self,
        hidden_states: torch.Tensor,
        rmsnorm: nn.Module | None = None,
        adapter_ids: Input = None,
        residual: Input = None,
    ) -> tuple[Any, ...]:
        del adapter_ids
        if self.qkv_kernel_enabled:
            if not self.fused_qkv:
                raise AssertionError("qkv_kernel_enabled needs fused_qkv=True; set both or none.")
            states = self._kernel_qkv_forward(hidden_states, True, rmsnorm)
        else:
            states = self._native_qkv_forward(hidden_states)
        return (*states, residual) if self.contract.passes_residual else tuple(states)

    def _native_qkv_forward(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Q, K and V through the linear layers."""
        if self.fused_qkv:
            states = self._split_fused_qkv(self.Wqkv(hidden_states))
        else:
            states = tuple(proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.clip_qkv is not None:
            states = tuple(state.clamp(-self.clip_qkv, self.clip_qkv) for state in states)
        return states

    def _kernel_qkv_forward(
        self, hidden_states: torch.Tensor, fused_rmsnorm: bool, rmsnorm: nn.Module | None
    ) -> Sequence[torch.Tensor]:
        """Norm and Wqkv in the SDK's closed kernel, refused here; a subclass has its own."""
        del fused_rmsnorm, rmsnorm
        return rmsnorm_qkv_isa_kernel(hidden_states, self.Wqkv.weight)

    def _split_fused_qkv(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(B, S, this rank's q, k and v columns) -> the three of them."""
        shards = 1 if self.tensor_model_parallel_group is None else self.tp_degree
        query_end = divide(self.num_attention_heads, shards) * self.head_dim
        key_end = query_end + divide(self.num_key_value_heads, shards) * self.head_dim
        return torch.tensor_split(fused, (query_end, key_end), dim=-1)

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        """`prefix` is `....self_attn.qkv_proj.weight`: move q, k, v below it, replicate and pad."""
        module, _, _ = prefix.rpartition(".weight")  # ....self_attn.qkv_proj
        parent = module.rpartition(".")[0]
        for name in ("Wqkv",) if self.fused_qkv else ("q_proj", "k_proj", "v_proj"):
            self.replace_prefixes(f"{parent}.{name}.", f"{module}.{name}.", model_state_dict)
        for kind in ("weight", "bias"):
            if self.fused_qkv:
                self._spread_fused(model_state_dict, f"{module}.Wqkv.{kind}")
            else:
                self._spread_separate(model_state_dict, module, kind)

    def _spread_separate(self, state_dict: StateDict, module: str, kind: str) -> None:
        spreads = {
            "q_proj": self._pad_queries,
            "k_proj": self._spread_kv,
            "v_proj": self._spread_kv,
        }
        for name, spread in spreads.items():
            key = f"{module}.{name}.{kind}"
            if key in state_dict:
                state_dict[key] = spread(state_dict[key])

    def _spread_fused(self, state_dict: StateDict, key: str) -> None:
        if key not in state_dict:
            return
        query_rows = self._src_num_attention_heads * self.head_dim
        kv_rows = self._src_num_key_value_heads * self.head_dim
        q, k, v = torch.split(state_dict[key], [query_rows, kv_rows, kv_rows], dim=0)
        state_dict[key] = torch.cat(
            [self._pad_queries(q), self._spread_kv(k), self._spread_kv(v)], dim=0
        )


class GroupQueryAttention_O(BaseGroupQueryAttention):
    """The output projection: child o_proj, row-parallel over the (padded) query heads."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        input_is_parallel: bool = False,
        layer_name: str = "o_proj",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: Group | None = None,
        rpl_reduce_dtype: torch.dtype | None = None,
        **later: Any,
    ) -> None:
        refuse_others(
            "GroupQueryAttention_O",
            later,
            out_proj_kernel_enabled=False,
            logical_nc_config=...,
            tiling_factor=...,
            rank_ordering=None,
        )
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        self.layer_name = layer_name
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.rpl_reduce_dtype = rpl_reduce_dtype
        width = self.num_attention_heads * head_dim
        if self.tensor_model_parallel_group is None:
            self.o_proj: nn.Module = nn.Linear(width, hidden_size, bias=bias, dtype=dtype)
        else:
            self.o_proj = RowParallelLinear(
                width,
                hidden_size,
                bias=bias,
                input_is_parallel=input_is_parallel,
                dtype=dtype,
                sequence_parallel_enabled=sequence_parallel_enabled,
                sequence_dimension=sequence_dimension,
                tensor_model_parallel_group=self.tensor_model_parallel_group,
                reduce_dtype=rpl_reduce_dtype,
            )

    def forward(self, attention_output: torch.Tensor, adapter_ids: Input = None) -> torch.Tensor:
        """(B, S, heads/tp * D) -> (B, S, H), summed over the ranks."""
        del adapter_ids
        return self.o_proj(attention_output)

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        """`prefix` is `....self_attn.o_proj.weight`: move o below it, pad its input columns."""
        module, _, _ = prefix.rpartition(".weight")  # ....self_attn.o_proj
        parent = module.rpartition(".")[0]
        for kind in ("weight", "bias"):
            old, new = f"{parent}.{self.layer_name}.{kind}", f"{module}.o_proj.{kind}"
            if old in model_state_dict:
                self.replace_prefixes(old, new, model_state_dict)
        key = f"{module}.o_proj.weight"
        if key in model_state_dict:
            model_state_dict[key] = self._pad_queries(model_state_dict[key].t()).t()
