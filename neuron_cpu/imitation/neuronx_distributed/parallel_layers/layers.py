"""Linear layers and embeddings with weights that are sharded across ranks (NxD 0.10 names).

A constructor makes one rank's parameters, and tags that tell the checkpoint loader how to slice the
full tensor. Linear layers compute `x @ W.T` with PyTorch: bf16 operands, fp32 accumulation, one
rounding. While an application builds its model, parameters lie on the meta device.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

from neuron_cpu.runtime.ranks import Group

from ..deferred import parameter_device
from ..keywords import refuse_others
from . import parallel_state
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
    warn_of_constant_rank,
)
from .utils import (
    EmbeddingUtility,
    divide,
    get_padding_length,
    set_tensor_model_parallel_attributes,
)

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
StateDict = dict[str, torch.Tensor]


def _sharded_parameter(
    shape: tuple[int, ...],
    dim: int,
    stride: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device | None,
    init_method: Callable[[torch.Tensor], Any] | None,
) -> Parameter:
    """One rank's shard of shape `shape`, with tags that cut `size` parts along `dim`."""
    device = parameter_device() or device
    weight = Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    _initialize_parameter_cpu(weight, dim, size, init_method or _default_init, stride=stride)
    return weight


def _initialize_parameter_cpu(
    param: Parameter,
    partition_dim: int,
    num_partitions: int,
    init_method: Callable[[torch.Tensor], Any],
    return_master_param: bool = False,
    *,
    param_dtype: torch.dtype = torch.float32,
    stride: int = 1,
) -> None:
    """Tag one rank's shard and give it values, for a model's own layers.

    NxD cuts the shard from a whole parameter and returns that. Here the shard is drawn by itself
    and nothing is returned: checkpoints bring the values.
    """
    del param_dtype, return_master_param
    set_tensor_model_parallel_attributes(param, True, partition_dim, stride, num_partitions)
    if not param.is_meta:
        with torch.no_grad():
            init_method(param)


def _replicated_bias(size: int, dtype: torch.dtype, device: torch.device | None) -> Parameter:
    """Zeros (size,), the same on every rank."""
    device = parameter_device() or device
    return Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)


# Keywords of later NxD versions that change nothing without gradients or tiling, and one that only
# the real libraries honour.
_KEYWORDS = {
    "rank_ordering": None, "tile_cc": ..., "keep_padded_output": False,
    "pad_alignment_size_per_rank": 1, "sequence_parallel_enabled": False,
}  # fmt: skip


def _default_init(weight: torch.Tensor) -> None:
    """Uniform in +-1/sqrt(inputs), as nn.Linear starts."""
    bound = weight.shape[-1] ** -0.5
    weight.uniform_(-bound, bound)


def pad_tensor(tensor: torch.Tensor, dim: int, amount: int) -> torch.Tensor:
    """`tensor` with `amount` zeros appended along `dim`; the tensor itself where amount is 0."""
    if amount == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = amount
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


class LinearWithAsyncCommunication(torch.autograd.Function):
    """The product of the layers: `apply(input, weight, bias, ...)` in NxD's order of arguments. A
    model subclasses it to put a kernel where `forward` multiplies. There is no backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        async_grad_allreduce: bool,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None = 0,
        save_for_backward: bool = True,
        process_group: Group | None = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """`input (..., K) @ weight (N, K).T + bias`."""
        asked = {"sequence_parallel_enabled": sequence_parallel_enabled}
        refuse_others("LinearWithAsyncCommunication", asked, **_KEYWORDS)
        return F.linear(input, weight, bias)


def linear_with_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    async_grad_allreduce: bool,
    sequence_parallel_enabled: bool,
    sequence_dimension: int | None = 0,
    autograd_func_class: type[torch.autograd.Function] = LinearWithAsyncCommunication,
    save_for_backward: bool = True,
    process_group: Group | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`autograd_func_class.apply` on the other arguments: `input (..., K) @ weight (N, K).T`.

    `reduce_dtype` (NxD 0.10.1) is passed on only where the caller names it: classes for either
    version fit.
    """
    arguments = (
        input,
        weight,
        bias,
        async_grad_allreduce,
        sequence_parallel_enabled,
        sequence_dimension,
        save_for_backward,
        process_group,
    )
    if reduce_dtype is not None:
        arguments += (reduce_dtype,)
    if autograd_func_class is LinearWithAsyncCommunication:
        return LinearWithAsyncCommunication.forward(None, *arguments)  # spares autograd's part
    return autograd_func_class.apply(*arguments)


class BaseParallelLinear(nn.Module):
    """The attributes by which the checkpoint loader recognises a sharded linear.
    `autograd_func_class` multiplies in `_forward_impl`; subclasses replace either."""

    autograd_func_class: type[torch.autograd.Function] = LinearWithAsyncCommunication

    def __init__(self) -> None:
        super().__init__()
        self._forward_impl = linear_with_async_allreduce

    def _init_weight(self, weight: torch.Tensor) -> None:
        """Give a weight its start values, by a subclass's `arg_init_method` where there is one."""
        (getattr(self, "arg_init_method", None) or _default_init)(weight)

    def _group_of(self, group: Group | None) -> Group:
        return group or parallel_state.get_tensor_model_parallel_group()

    def _refuse_padding_in_training(self) -> None:
        if getattr(self, "pad", False) and self.training:
            raise RuntimeError("Layers with pad=True are for inference only; call eval() first.")


class ColumnParallelLinear(BaseParallelLinear):
    """Linear with sharded outputs: weight (output/tp, input), sliced along dim 0.

    `forward(x)`: (..., input) -> (..., output/tp), or (..., output) with `gather_output`. `pad`
    adds zero rows up to a multiple of tp; a gathered result drops them. The bias is sharded like
    the outputs, and whole where outputs are gathered. `skip_bias_add` returns the pair (output,
    bias).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        *,
        tensor_model_parallel_group: Group | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        **later: Any,
    ) -> None:
        super().__init__()
        later["sequence_parallel_enabled"] = sequence_parallel_enabled
        refuse_others("ColumnParallelLinear", later, **_KEYWORDS)
        del keep_master_weight  # concerns training
        self.tensor_parallel_group = self._group_of(tensor_model_parallel_group)
        size = self.tensor_parallel_group.size()
        self.input_size = input_size
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.pad_size = get_padding_length(output_size, size) if pad else 0
        self.output_size = output_size + self.pad_size
        self.output_size_per_partition = divide(self.output_size, size)
        self.stride, self.dtype, self.reduce_dtype = stride, dtype, reduce_dtype
        # The two names by which subclasses decide what their forward has to do.
        self.async_tensor_model_parallel_allreduce = size > 1
        self.add_bias = bias
        shard = (self.output_size_per_partition, input_size)
        self.weight = _sharded_parameter(shard, 0, stride, size, dtype, device, init_method)
        if not bias:
            self.register_parameter("bias", None)
        elif gather_output:
            self.bias = _replicated_bias(output_size, dtype, device)
        else:
            self.bias = _sharded_parameter(
                shard[:1], 0, stride, size, dtype, device, nn.init.zeros_
            )

    def forward(self, input: torch.Tensor) -> Output:
        self._refuse_padding_in_training()
        input = copy_to_tensor_model_parallel_region(input, self.tensor_parallel_group)
        output = self._forward_impl(
            input=input,
            weight=self.weight,
            bias=None,
            async_grad_allreduce=self.async_tensor_model_parallel_allreduce,
            sequence_parallel_enabled=False,
            autograd_func_class=self.autograd_func_class,
            process_group=self.tensor_parallel_group,
        )
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tensor_parallel_group)
            if self.pad_size:
                output = output.narrow(-1, 0, self.output_size - self.pad_size)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        """Pad the full weight (key `prefix`) and a sharded bias with zero rows before slicing."""
        if not self.pad_size:
            return
        keys = [prefix]
        if not self.gather_output:
            keys.append(prefix.rpartition("weight")[0] + "bias")
        for key in keys:
            tensor = model_state_dict.get(key)
            if tensor is not None:
                model_state_dict[key] = pad_tensor(tensor, 0, self.output_size - tensor.shape[0])


class RowParallelLinear(BaseParallelLinear):
    """Linear with sharded inputs: weight (output, input/tp), sliced along dim 1.

    `forward(x)`: (..., input/tp) with `input_is_parallel`, else (..., input) -> (..., output). The
    ranks' sum is taken in `reduce_dtype` (None: the layer's dtype). Every rank holds the bias, and
    adds it after the sum.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Group | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        **later: Any,
    ) -> None:
        super().__init__()
        later["sequence_parallel_enabled"] = sequence_parallel_enabled
        refuse_others("RowParallelLinear", later, **_KEYWORDS)
        del keep_master_weight  # concerns training
        self.tensor_parallel_group = self._group_of(tensor_model_parallel_group)
        size = self.tensor_parallel_group.size()
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add = skip_bias_add
        self.reduce_output = reduce_output
        self.reduce_dtype = reduce_dtype or dtype
        self.pad = pad
        self.pad_size = get_padding_length(input_size, size) if pad else 0
        self.input_size = input_size + self.pad_size
        self.input_size_per_partition = divide(self.input_size, size)
        self.stride, self.dtype = stride, dtype
        shard = (output_size, self.input_size_per_partition)
        self.weight = _sharded_parameter(shard, 1, stride, size, dtype, device, init_method)
        self.add_bias = bias
        whole = _replicated_bias(output_size, dtype, device) if bias else None
        self.register_parameter("bias", whole)

    def forward(self, input_: torch.Tensor) -> Output:
        self._refuse_padding_in_training()
        if not self.input_is_parallel:
            if self.pad_size:
                input_ = F.pad(input_, (0, self.pad_size))
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tensor_parallel_group)
        partial = self._forward_impl(
            input=input_,
            weight=self.weight,
            bias=None,
            async_grad_allreduce=False,
            sequence_parallel_enabled=False,
            autograd_func_class=self.autograd_func_class,
            process_group=self.tensor_parallel_group,
        )
        output = self._reduce(partial)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def _reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial products in `reduce_dtype`, and return to their own dtype."""
        if not self.reduce_output:
            return partial
        original = partial.dtype
        partial = partial.to(self.reduce_dtype)
        return reduce_from_tensor_model_parallel_region(partial, self.tensor_parallel_group).to(
            original
        )

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        """Pad the full weight (key `prefix`) with zero columns before it is sliced."""
        tensor = model_state_dict.get(prefix)
        if self.pad_size and tensor is not None:
            model_state_dict[prefix] = pad_tensor(tensor, 1, self.input_size - tensor.shape[1])


class ParallelEmbedding(nn.Module):
    """An embedding, sharded over its features or over the vocabulary.

    `shard_across_embedding`: weight (V, H/tp), and the lookup is all-gathered. Otherwise: weight
    (V/tp, H); a rank looks up its own rows, zeros elsewhere, and the ranks' sum is reduced.
    `forward(ids)`: (B, S) integers -> (B, S, H). `use_spmd_rank` reads the rank from a checkpoint
    tensor (`rank_util`), as a graph for all ranks must.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[torch.Tensor], Any] = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Group | None = None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        **later: Any,
    ) -> None:
        super().__init__()
        later["sequence_parallel_enabled"] = sequence_parallel_enabled
        refuse_others("ParallelEmbedding", later, **_KEYWORDS)
        del norm_type, scale_grad_by_freq, sparse  # concern training
        if max_norm is not None:
            raise NotImplementedError("ParallelEmbedding with max_norm is not supported; drop it.")
        group = tensor_model_parallel_group or parallel_state.get_tensor_model_parallel_group()
        size = group.size()
        self.tensor_parallel_group = group
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.pad, self.dtype = pad, dtype
        padded = embedding_dim if shard_across_embedding else num_embeddings
        self.pad_size = get_padding_length(padded, size) if pad else 0
        per_partition = divide(padded + self.pad_size, size)
        if shard_across_embedding:
            shard, dim = (num_embeddings, per_partition), 1
        else:
            shard, dim = (per_partition, embedding_dim), 0
            start, end = EmbeddingUtility.range_from_per_partition_vocab_size(
                per_partition, group.rank(), size
            )
            self.start_index, self.end_index = start, end
        self.rank_util = SPMDRank(size) if use_spmd_rank and dim == 0 else None
        self.weight = _sharded_parameter(shard, dim, 1, size, dtype, device, init_method)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if self.pad and self.training:
            raise RuntimeError("Layers with pad=True are for inference only; call eval() first.")
        if self.shard_across_embedding:
            return self._gather(F.embedding(input_.long(), self.weight))
        rows = self._own_rows(input_.long())
        return reduce_from_tensor_model_parallel_region(rows, self.tensor_parallel_group)

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's (B, S, H/tp) -> (B, S, H)."""
        whole = gather_from_tensor_model_parallel_region(local, self.tensor_parallel_group)
        return whole.narrow(-1, 0, self.embedding_dim) if self.pad_size else whole

    def _own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, S, H): this rank's rows of the table, zeros for other ids."""
        rows = self.weight.shape[0]
        if self.rank_util is None and self.tensor_parallel_group.size() > 1:
            warn_of_constant_rank("A lookup in a sharded vocabulary", "use_spmd_rank=True")
        start = 0 if self.rank_util is None else self.rank_util.get_rank() * rows
        local = ids - start
        mine = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return torch.where(mine.unsqueeze(-1), found, torch.zeros((), dtype=found.dtype))

    def preshard_hook(self, model_state_dict: StateDict, prefix: str) -> None:
        """Pad the full table (key `prefix`) with zeros before it is sliced."""
        tensor = model_state_dict.get(prefix)
        if self.pad_size and tensor is not None:
            dim = 1 if self.shard_across_embedding else 0
            model_state_dict[prefix] = pad_tensor(tensor, dim, self.pad_size)


class SPMDRank(nn.Module):
    """The rank as a tensor: the checkpoint holds arange(world_size), a rank loads its element."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.rank = Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        set_tensor_model_parallel_attributes(self.rank, True, 0, 1, num_partitions=world_size)

    def get_rank(self) -> torch.Tensor:
        """This rank's number, int32 of shape (1,)."""
        return self.rank

    def forward(self) -> torch.Tensor:
        return self.rank
