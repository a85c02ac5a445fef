"""One sub-model (prefill or decode): its buckets, its padding, its calls."""

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed.deferred import deferred_parameters
from neuronx_distributed.keywords import refuse_others
from torch import nn

from neuron_cpu.runtime import executed, rounding
from neuron_cpu.runtime.ranks import RankPool

from ..contract import building_under
from ..modules.autobucketing import bucket_above, context_encoder_bucket, token_generation_bucket
from ..modules.generation.sampling import prepare_sampling_params
from ..modules.kvcache.cache_lines import CacheLines

CONTEXT_ENCODING_MODEL_TAG = "context_encoding_model"
TOKEN_GENERATION_MODEL_TAG = "token_generation_model"
SPECULATION_MODEL_TAG = "speculation_model"
SUBMODEL_TAGS = (CONTEXT_ENCODING_MODEL_TAG, TOKEN_GENERATION_MODEL_TAG, SPECULATION_MODEL_TAG)

# Position of padding in a prompt: never the row's largest, except for one-token prompts.
_PAD_POSITION = 1

logger = logging.getLogger("Neuron")
Tensors = Sequence[torch.Tensor]


def base_compile_work_dir() -> str:
    """The compiler's scratch folder, from BASE_COMPILE_WORK_DIR."""
    return os.environ.get("BASE_COMPILE_WORK_DIR", "/tmp/nxd_model/")


class DecoderModelInstance:
    """Builds a sub-model's traced module; weights are bound later."""

    def __init__(
        self, model_cls: Callable[..., nn.Module], config: Any, **model_init_kwargs: Any
    ) -> None:
        self.model_cls = model_cls
        self.config = config
        self.neuron_config = config.neuron_config
        self.model_init_kwargs = model_init_kwargs
        self.module: nn.Module | None = None

    def _construct(self) -> nn.Module:
        """The module as its constructor leaves it, without the parameters' values."""
        with building_under(self.neuron_config.contract), deferred_parameters():
            return self.model_cls(self.config, **self.model_init_kwargs)

    def load_module(self) -> nn.Module:
        """The module in eval mode, with floating parameters and buffers cast to `torch_dtype`.

        Parameters named *scale stay fp32, and fp8 ones stay fp8. Parameters have no values yet, but
        buffers have: the cast damages a precise buffer here exactly as on a device.
        """
        module = self._construct()
        module.eval()
        if getattr(self.neuron_config, "cast_type", "config") == "config":
            self._cast(module)
        self.module = module
        return module

    def _cast(self, module: nn.Module) -> None:
        dtype = self.neuron_config.torch_dtype
        eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if not tensor.is_floating_point() or tensor.dtype in eight_bits:
                continue
            tensor.data = tensor.data.to(torch.float32 if name.endswith("scale") else dtype)

    def buffers_rounded_by_cast(self) -> list[tuple[str, torch.dtype, float]]:
        """(name, dtype, largest relative error) of the buffers that `load_module` damages."""
        if getattr(self.neuron_config, "cast_type", "config") != "config":
            return []
        module = self._construct()
        damaged = []
        for name, buffer in module.named_buffers():
            if not buffer.is_floating_point() or name.endswith("scale"):
                continue
            rounded = buffer.to(self.neuron_config.torch_dtype).to(buffer.dtype)
            error = (rounded - buffer).abs() / buffer.abs().clamp_min(1e-30)
            if bool((rounded != buffer).any()):
                damaged.append((name, buffer.dtype, float(error.max())))
        return damaged

    def get(self, bucket_rank: int | None, **_: Any) -> tuple[nn.Module, dict[Any, int]]:
        """The module set to one bucket, and the cache that each extra output is an alias of."""
        if self.module is None:
            self.load_module()
        if bucket_rank is not None:
            use_bucket(self.module, self.neuron_config.buckets[bucket_rank])
        first = own_outputs(self.neuron_config)
        caches = self.module.kv_mgr.past_key_values
        return self.module, {cache: first + i for i, cache in enumerate(caches)}


def own_outputs(neuron_config: Any) -> int:
    """The number of a graph's outputs before the caches."""
    return 2 if neuron_config.output_logits else 1


def use_bucket(module: nn.Module, bucket: int) -> None:
    """Set a module to the length of one graph."""
    module.n_positions = bucket


class RankedModel:
    """The loaded sub-model on all ranks: `model(bucket, *inputs)` -> rank 0's outputs.

    `modules` are this process's ranks, each with its shard of the weights. Modules of other
    sub-models share weights and caches. New cache tensors that a module returns are copied into the
    caches.
    """

    def __init__(self, pool: RankPool, modules: Sequence[nn.Module], num_outputs: int) -> None:
        self.pool = pool
        self.modules = list(modules)
        self.num_outputs = num_outputs
        self.executed: dict[str, list[executed.Counts]] = {}  # by bucket, of watched calls

    def __call__(self, bucket: int, *inputs: torch.Tensor) -> Any:
        functions = [partial(self._run, module, bucket, inputs) for module in self.modules]
        outputs = self.pool.run(functions)[0]
        return outputs[0] if self.num_outputs == 1 else outputs

    def _run(self, module: nn.Module, bucket: int, inputs: Tensors) -> list[torch.Tensor]:
        use_bucket(module, bucket)
        # A model may write into its inputs; ranks share them.
        own = inputs if self.pool.size == 1 else tuple(tensor.clone() for tensor in inputs)
        with rounding.of_graph():
            kept = self.executed.setdefault(str(bucket), [])
            outputs = executed.counted(kept, lambda: module(*own))
        # On the device an output cache is an alias of the input cache. The cache manager writes in
        # place and returns the cache itself; a model that builds new tensors pays one copy.
        caches = module.kv_mgr.past_key_values
        for cache, new in zip(caches, outputs[self.num_outputs :], strict=True):
            if new.data_ptr() != cache.data_ptr():
                cache.data.copy_(new)
        return list(outputs[: self.num_outputs])


class ModelWrapper(nn.Module):
    """A sub-model as the application calls it. It is an nn.Module, so that hooks can time it."""

    def __init__(
        self,
        config: Any,
        model_cls: Callable[..., nn.Module],
        tag: str = "",
        compiler_args: str | None = None,
        priority_model_idx: int | None = None,
        *,
        model_init_kwargs: dict[str, Any] | None = None,
        **later: Any,
    ) -> None:
        refuse_others("ModelWrapper", later, pipeline_execution=False, return_ranked_to_cpu=...)
        super().__init__()
        self.config = config
        self.neuron_config = config.neuron_config
        if config.pad_token_id is None:
            config.pad_token_id = 0
        self.model_cls = model_cls
        self.tag = tag
        self.model: Any = None  # the RankedModel, once it is compiled or loaded
        self.priority_model_idx = priority_model_idx
        self.model_init_kwargs = model_init_kwargs or {}
        self.compiler_workdir = os.path.join(base_compile_work_dir(), tag)
        self.compiler_args = compiler_args or ""  # nothing here reads them
        self.contract = self.neuron_config.contract
        # which lines are in use: one record for all sub-models, where an application has several
        self.cache_lines = CacheLines(self.neuron_config)

    @property
    def is_prefill(self) -> bool:
        return self.tag == CONTEXT_ENCODING_MODEL_TAG

    def get_model_instance(self) -> DecoderModelInstance:
        return DecoderModelInstance(self.model_cls, self.config, **self.model_init_kwargs)

    def input_generator(self) -> list[tuple[torch.Tensor, ...]]:
        """Example inputs of every bucket: ids, mask, positions, sequence ids, sampling
        parameters."""
        return [self._example(bucket) for bucket in self.neuron_config.buckets]

    def _example(self, bucket: int) -> tuple[torch.Tensor, ...]:
        batch = self.neuron_config.batch_size
        active = (
            bucket
            if self.neuron_config.bucket_n_active_tokens
            else self.neuron_config.n_active_tokens
        )
        fill = torch.ones if self.contract.passes_dummies else torch.zeros
        inputs = (
            fill((batch, active), dtype=torch.int32),
            fill((batch, bucket), dtype=torch.int32),
            torch.arange(active, dtype=torch.int32).expand(batch, active),
            torch.arange(batch, dtype=torch.int32),
            prepare_sampling_params(batch),
        )
        return self._with_dummies(inputs)

    def _with_dummies(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The five inputs, and zeros int32 (B) for the previous hidden state and adapter ids, which
        NxDI 0.6 passes."""
        if not self.contract.passes_dummies:
            return inputs
        none = torch.zeros(len(inputs[0]), dtype=torch.int32)
        return (*inputs, none, none)

    def forward(self, *args: torch.Tensor | None) -> Any:
        """One call, padded to a bucket and to the compiled batch, in several parts if needed.

        `args` are the five inputs, and None for a previous hidden state and adapter ids. Returns
        logits (B, 1, V) fp32, or tokens.
        """
        if self.model is None:
            raise RuntimeError("Forward was called before load(); call load() first.")
        if any(value is not None for value in args[5:]):
            raise NotImplementedError(
                "A call has a previous hidden state, or adapter ids for a model without adapters, "
                "expected neither; leave them out."
            )
        # Graphs have fixed shapes: first the width is brought to a bucket, then the rows to the
        # compiled batch.
        inputs = [t.to(torch.int32) if t.dtype == torch.int64 else t for t in args[:5]]
        rows, batch, drawn = len(inputs[0]), self.neuron_config.batch_size, len(inputs[4])
        if rows > batch and not self.neuron_config.is_continuous_batching:
            raise ValueError(
                f"{self.tag} got a batch of {rows} rows, expected at most the compiled batch_size "
                f"{batch}; compile for a larger batch or turn is_continuous_batching on."
            )
        if drawn < rows or (drawn > rows == batch):
            raise ValueError(
                f"{self.tag} got {drawn} rows of sampling parameters (NxDI's default has one for "
                f"each of the batch), expected {rows}, one a prompt; pass "
                f"sampling_params=prepare_sampling_params({rows})."
            )
        inputs[4] = inputs[4][:rows]
        bucket, inputs = self._pad_to_bucket(inputs)
        if rows == batch:
            self._note_lines(inputs)
            return self.model(bucket, *self._with_dummies(tuple(inputs)))
        # Fewer rows than the batch, or several batches of a continuous one: cache lines belong to
        # sequence ids, not to rows, so the parts may run one after the other.
        parts = [
            self._run_part([tensor[start : start + batch] for tensor in inputs], bucket)
            for start in range(0, rows, batch)
        ]
        if isinstance(parts[0], list):
            return [torch.cat(column) for column in zip(*parts, strict=True)]
        return torch.cat(parts)

    def _run_part(self, inputs: list[torch.Tensor], bucket: int) -> Any:
        """Run one compiled batch at most: missing rows are filled in, and their results dropped."""
        rows = inputs[0].shape[0]
        missing = self.neuron_config.batch_size - rows
        self._note_lines(inputs)
        if missing:
            inputs = self._fill_rows(inputs, missing)
        back = slice(0, rows)
        continuous = self.neuron_config.is_continuous_batching and not self.is_prefill
        if missing and continuous and not self.contract.graph_sorts_rows:
            order = torch.argsort(inputs[3])  # a batch row is the cache line of the same number
            inputs = [tensor[order] for tensor in inputs]
            back = torch.argsort(order)[:rows]
        outputs = self.model(bucket, *self._with_dummies(tuple(inputs)))
        if isinstance(outputs, list):
            return [output[back] for output in outputs]
        return outputs[back]

    def _note_lines(self, inputs: list[torch.Tensor]) -> None:
        """Record the cache lines in use; ValueError for a call that a device answers wrongly.

        A whole batch keeps the caller's order, which must be that of the lines where the graph does
        not sort.
        """
        if not self.neuron_config.is_continuous_batching:
            return
        _, mask, positions, lines = inputs[:4]
        if self.is_prefill:
            self.cache_lines.prefill(lines, mask)
            return
        whole = len(lines) == self.neuron_config.batch_size
        if whole and not self.contract.graph_sorts_rows and bool((lines.diff() < 0).any()):
            raise ValueError(
                f"{self.tag} got seq_ids {lines.tolist()}, expected a whole batch in ascending "
                f"order, because NxDI {self.contract.version} takes batch row i for cache line i; "
                "sort the rows by their seq_ids."
            )
        self.cache_lines.decode(lines, positions)

    def _fill_rows(self, inputs: list[torch.Tensor], missing: int) -> list[torch.Tensor]:
        """Add rows that change no live cache line.

        Prefill repeats the first row with its sequence id, so that equal values are written twice.
        Decode takes unused sequence ids at the last position: no prior mask shows it before the
        line's own token overwrites it.
        """
        filled = [torch.cat([t, t[:1].expand(missing, *t.shape[1:])]) for t in inputs]
        if self.is_prefill and self.neuron_config.is_continuous_batching:
            return filled
        # Two rows must not write one line in one call: their order would decide.
        used = set(inputs[3].tolist())
        unused = [i for i in range(self.neuron_config.max_batch_size) if i not in used]
        filled[3] = torch.cat([inputs[3], inputs[3].new_tensor(unused[:missing])])
        if not self.is_prefill:
            filled[2][-missing:] = self.neuron_config.max_length - 1
        return filled

    def _pad_to_bucket(self, inputs: list[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """Choose the bucket, and pad the 2-D inputs on the right to its width."""
        input_ids, mask, positions, *rest = inputs
        longest, left = self.neuron_config.max_length, self.neuron_config.padding_side == "left"
        if left and mask.shape[1] != longest:
            raise ValueError(
                f"{self.tag} got {mask.shape[1]} columns padded on the left, expected {longest}, "
                "the whole seq_len, because NxDI fills up to a bucket on the right whatever "
                "padding_side says, and answers from the last column; pad every prompt to "
                f"{longest}, with max_context_length as long."
            )
        bucket = self.choose_bucket(input_ids, mask, positions)

        def fit(tensor: torch.Tensor, value: int) -> torch.Tensor:
            # only masks and padding lie outside the bucket (see choose_bucket)
            kept = tensor[:, -bucket:] if left else tensor[:, :bucket]
            return F.pad(kept, (0, bucket - kept.shape[1]), value=value)

        # A decode step has one token whatever the bucket; its mask alone has the bucket's width.
        if self.is_prefill:
            input_ids = fit(input_ids, self.config.pad_token_id)
            positions = fit(positions, _PAD_POSITION)
        return bucket, [input_ids, fit(mask, 0), positions, *rest]

    def choose_bucket(
        self, input_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> int:
        """The length of the graph for this call; ValueError where none is long enough."""
        buckets = self.neuron_config.buckets
        if self.is_prefill:
            return self._prefill_bucket(input_ids, mask, buckets)
        last = int(positions.max())
        if last >= buckets[-1]:
            raise ValueError(
                f"{self.tag} got position {last}, expected less than the largest bucket "
                f"{buckets[-1]}; compile with a larger seq_len or stop generating earlier."
            )
        # The cache is read up to the bucket, so it has to hold the largest position; a mask that
        # is wider than that moves later versions to the next bucket.
        by_position = buckets[token_generation_bucket(positions, buckets)]
        if not self.contract.pads_to_bucket:
            return by_position
        width = mask.shape[1]
        if self.tag == SPECULATION_MODEL_TAG and self.contract.bucket_holds_speculation:
            width += input_ids.shape[1]
        return max(buckets[bucket_above(width, buckets)], by_position)

    def _prefill_bucket(
        self, input_ids: torch.Tensor, mask: torch.Tensor, buckets: list[int]
    ) -> int:
        width = input_ids.shape[1]
        if width > buckets[-1]:
            raise ValueError(
                f"The prompt has {width} tokens, expected at most {buckets[-1]}, the largest "
                "context-encoding bucket; compile with a larger max_context_length or shorten it."
            )
        if self.contract.pads_to_bucket:
            return buckets[bucket_above(width, buckets)]
        chosen = buckets[context_encoder_bucket(input_ids, buckets, self.config.pad_token_id)]
        # Columns that some row needs: up to the last 1, or all of them with left padding.
        needed = int(mask.sum(dim=1).max()) if self.neuron_config.padding_side == "right" else width
        if chosen < needed:
            fitting = next(bucket for bucket in buckets if bucket >= needed)
            logger.warning(
                "The prompt of %d tokens holds the padding token %s, so NxDI 0.1 would choose "
                "bucket %d and lose %d tokens on the device; bucket %d is used here.",
                needed,
                self.config.pad_token_id,
                chosen,
                needed - chosen,
                fitting,
            )
            return fitting
        return chosen
