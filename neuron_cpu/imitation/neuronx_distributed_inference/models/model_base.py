"""The traced language model, and the application that routes calls to prefill and decode.

Follows NxDI 0.1.0 (`models/model_base.py`) in names, signatures, shapes and the order of steps;
contract.py lists what later versions change.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.mappings import _gather_along_dim
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..contract import ENVIRONMENT_VARIABLE
from ..modules.autobucketing import generate_buckets
from ..modules.generation.sampling import Sampler, prepare_sampling_params, validate_sampling_params
from ..modules.kvcache.cache_lines import CacheLines
from ..modules.kvcache.kv_cache_manager import KVCacheManager
from .application_base import NeuronApplicationBase
from .config import InferenceConfig
from .model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    SPECULATION_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)

logger = logging.getLogger("Neuron")
Caches = list[list[torch.Tensor]]
Input = torch.Tensor | None  # which a call may leave out


class NeuronBaseModel(nn.Module):
    """The module of one graph; a subclass fills in the layers.

    `setup_attr_for_model` sets on_device_sampling, tp_degree, hidden_size, num_attention_heads,
    num_key_value_heads, max_batch_size, buckets. `init_model` sets embed_tokens, layers, norm,
    lm_head. `n_positions` is the current graph's bucket.
    """

    def __init__(self, config: InferenceConfig, optimize_inference: bool = True) -> None:
        super().__init__()
        neuron_config = config.neuron_config
        self.config = config
        self.neuron_config = neuron_config
        self.batch_size = neuron_config.batch_size
        self.n_positions = neuron_config.n_positions
        self.vocab_size = config.vocab_size
        self.speculation_length = neuron_config.speculation_length
        self.padding_side = neuron_config.padding_side
        self.max_length = neuron_config.max_length
        self.sequence_parallel_enabled = neuron_config.sequence_parallel_enabled
        self.sequence_dimension = None
        self.rank_util = SPMDRank(world_size=neuron_config.tp_degree)
        self.contract = neuron_config.contract
        self.setup_attr_for_model(config)
        self.init_model(config)
        if optimize_inference:
            self.init_inference_optimization(config)

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        raise NotImplementedError("A model sets its sizes in setup_attr_for_model.")

    def init_model(self, config: InferenceConfig) -> None:
        raise NotImplementedError("A model builds its layers in init_model.")

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        """Make the caches, and the sampler where the device samples."""
        if self.on_device_sampling:
            self.sampler = Sampler(config.neuron_config)
        self.kv_mgr = KVCacheManager(config, num_kv_head=self.num_key_value_heads)

    # -- masks -----------------------------------------------------------------------------------

    def create_attn_mask(
        self,
        attention_mask: torch.Tensor,
        is_for_context_encoding: bool,
        is_for_speculation: bool,
        **_later: Any,
    ) -> torch.Tensor:
        """The mask: bool (B, 1, S, S) for prefill, (B, 1, T, P) over prior tokens for decode."""
        if is_for_context_encoding:
            return self._create_context_attn_mask(attention_mask)
        if is_for_speculation:
            return self._create_prior_mask(attention_mask, self.speculation_length)
        return self._create_prior_mask(attention_mask, 1)

    def _create_context_attn_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """The causal mask; left padding hides the padding columns, too."""
        size = self.n_positions
        mask = torch.ones((size, size), dtype=torch.bool, device=attention_mask.device).tril()
        mask = mask[None, None].expand(self.batch_size, 1, size, size)
        if self.padding_side == "left":
            mask = mask & (attention_mask == 1)[:, None, None, :]
        return mask

    def _create_prior_mask(self, attention_mask: torch.Tensor, active: int) -> torch.Tensor:
        """The prior tokens that each of `active` new tokens sees: all that the 2-D mask shows."""
        mask = attention_mask[:, None, None, :].expand(self.batch_size, 1, active, self.n_positions)
        return mask.to(torch.bool)

    def _create_active_mask(self, active: int, device: torch.device) -> torch.Tensor:
        """The new tokens that each new token sees, bool (B, 1, T, T); speculation only."""
        mask = torch.ones((active, active), dtype=torch.bool, device=device).tril()
        return mask[None, None].expand(self.batch_size, 1, active, active)

    # -- forward ---------------------------------------------------------------------------------

    def _is_context_encoding(self, input_ids: torch.Tensor) -> bool:
        return input_ids.shape[-1] > 1 and input_ids.shape[-1] != self.speculation_length

    def _is_for_speculation(self, input_ids: torch.Tensor) -> bool:
        return input_ids.shape[-1] > 1 and input_ids.shape[-1] == self.speculation_length

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        prev_hidden: Input = None,
        adapter_ids: Input = None,
        accepted_indices: Input = None,
        current_length: Input = None,
        medusa_mask: Input = None,
        scatter_index: Input = None,
        slot_mapping: Input = None,
        active_block_table: Input = None,
        num_queries: Input = None,
        computed_context_lens: Input = None,
        tile_q_indices: Input = None,
        tile_block_tables: Input = None,
        tile_masks: Input = None,
        inputs_embeds: Input = None,
        **_later: Any,
    ) -> list[torch.Tensor]:
        """One call of one graph.

        Inputs: input_ids and position_ids (B, T), attention_mask (B, bucket), seq_ids (B), all
        int32, and sampling_params (B, 3) fp32. Returns [logits (B, T', V) fp32 or tokens (B, ...)
        int32, the logits again under `output_logits`, then every cache]; T' is 1 except under
        speculation. For a cache of blocks `block_inputs` has slots, tables and lengths, and the
        mask (B, prefix) shows cached tokens. A previous hidden state, Medusa's inputs and tiles are
        empty.
        """
        rows = input_ids, attention_mask, position_ids, seq_ids, sampling_params
        prefill = self._is_context_encoding(input_ids)
        speculation = self._is_for_speculation(input_ids)
        order = None if prefill else self._order_in_cache(seq_ids)
        input_ids, attention_mask, position_ids, seq_ids, sampling_params = _in_order(rows, order)
        mask = self.create_attn_mask(attention_mask, prefill, speculation)
        active_mask = None  # a new token sees the new ones before it
        if speculation:
            active_mask = self._create_active_mask(input_ids.shape[-1], mask.device)
        hidden, caches = self._run_layers(
            prefill,
            seq_ids,
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            active_mask=active_mask,
            inputs_embeds=inputs_embeds,
            adapter_ids=adapter_ids,
        )
        # Only the last token's logits are asked for: the head is the widest product of all.
        asked = self._last_token(hidden, position_ids) if prefill else hidden
        outputs = self._choose(self._head(asked), sampling_params, speculation)
        return [*_in_order(outputs, None if order is None else torch.argsort(order)), *caches]

    def _order_in_cache(self, seq_ids: torch.Tensor) -> Input:
        """The batch row of each cache line, where a graph sorts rows by sequence id; else None.
        Cache line i belongs to sequence id i."""
        continuous = self.neuron_config.is_continuous_batching
        return torch.argsort(seq_ids) if continuous and self.contract.graph_sorts_rows else None

    def _run_layers(
        self, prefill: bool, seq_ids: torch.Tensor, **inputs: Any
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The new tokens' hidden states and the written caches, by the version's calls."""
        if self.contract.body_updates_cache:
            return self.get_model_output(
                update_cache=True, is_for_context_encoding=prefill, seq_ids=seq_ids, **inputs
            )
        past = None if prefill else self.kv_mgr.get_cache(self.n_positions)
        hidden, new_key_values = self.get_model_output(past_key_values=past, **inputs)
        caches = self.kv_mgr.update_cache(
            is_for_context_encoding=prefill,
            seq_ids=seq_ids,
            position_ids=inputs["position_ids"],
            new_key_values=new_key_values,
            seq_len=self.n_positions,
        )
        return hidden, caches

    def _last_token(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, 1, H): the row of the largest position, the last row if left-padded."""
        if self.padding_side == "left":
            return hidden[:, -1:, :]
        index = torch.argmax(position_ids, dim=1, keepdim=True)
        index = index[:, :, None].expand(-1, 1, self.hidden_size)
        return torch.gather(hidden, 1, index)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V or V/tp) in fp32; Contract says which padded tokens are hidden."""
        head, logits = self.lm_head, self.lm_head(hidden).float()
        padding = getattr(head, "pad_size", 0) if self.contract.masks_padded_vocabulary else 0
        if padding:
            group, width = head.tensor_parallel_group, logits.shape[-1]
            rank = self.rank_util.get_rank().to(torch.int64) % group.size()
            last = torch.ones_like(rank, dtype=torch.bool)
            last = last if head.gather_output else rank == group.size() - 1
            hidden = (torch.arange(width, device=logits.device) >= width - padding) & last
            logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
        return logits

    def _choose(
        self, logits: torch.Tensor, sampling_params: torch.Tensor, speculation: bool
    ) -> list[torch.Tensor]:
        """Logits, or the device's tokens and, where asked for, gathered logits."""
        if not self.on_device_sampling:
            return [logits]
        if speculation:
            rows = [
                self.sampler(logits[:, step, :], sampling_params) for step in range(logits.shape[1])
            ]
            tokens = torch.stack(rows, dim=1)
        else:
            tokens = self.sampler(logits[:, -1, :], sampling_params)
        if not self.neuron_config.output_logits:
            return [tokens]
        gathered = logits
        if not getattr(self.lm_head, "gather_output", True):
            gathered = _gather_along_dim(logits, -1, self.lm_head.tensor_parallel_group)
            gathered = gathered[..., : self.vocab_size]
        return [tokens, gathered]

    def get_model_output(
        self,
        input_ids: Input = None,
        attention_mask: Input = None,
        position_ids: Input = None,
        past_key_values: Caches | None = None,
        active_mask: Input = None,
        inputs_embeds: Input = None,
        prev_hidden: Input = None,
        adapter_ids: Input = None,
        rotary_position_ids: Input = None,
        update_cache: bool = False,
        is_for_context_encoding: bool = False,
        seq_ids: Input = None,
        scatter_index: Input = None,
        active_block_table: Input = None,
        **later: Any,
    ) -> tuple[torch.Tensor, Sequence[Any]]:
        """Embedding, layers and final norm: hidden (B, T, H), and the layers' new (K, V).

        With `update_cache` (NxDI 0.6) it reads and writes the caches and returns their
        flat list. With a cache of blocks, layers get `active_block_table` and `scatter_index`.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden.shape[1]
        position_ids = position_ids.view(-1, length).long()
        prefill = is_for_context_encoding
        if update_cache and not prefill and past_key_values is None:
            past_key_values = self.kv_mgr.get_cache(self.n_positions)
        common: dict[str, Any] = dict(
            attention_mask=attention_mask,
            position_ids=position_ids,
            active_mask=active_mask,
            adapter_ids=adapter_ids,
        )
        common.update(self.contract.layer_inputs)
        common.update(self._later_keywords(rotary_position_ids, seq_ids, prefill))
        if self.contract.passes_residual:
            common.update(
                later,
                active_block_table=active_block_table,
                scatter_index=scatter_index,
                is_for_speculation=self._is_for_speculation(input_ids),
            )
        hidden, new_key_values = self._layers_forward(hidden, past_key_values, common)
        hidden = self.norm(hidden)
        if not update_cache:
            return hidden, new_key_values
        caches = self.kv_mgr.update_cache(
            is_for_context_encoding=prefill,
            seq_ids=seq_ids,
            position_ids=position_ids,
            new_key_values=new_key_values,
            seq_len=self.n_positions,
            scatter_index=scatter_index,
        )
        return hidden, caches

    def _later_keywords(
        self, rotary_position_ids: Any, seq_ids: Any, prefill: bool
    ) -> dict[str, Any]:
        """Keywords that NxDI 0.6 passes to layers, and 0.1 does not."""
        if not self.contract.passes_residual:
            return {}
        return {
            "rotary_position_ids": rotary_position_ids,
            "seq_ids": seq_ids,
            "kv_mgr": getattr(self, "kv_mgr", None),
            "get_kv_per_layer": False,
            "update_kv_per_layer": False,
            "is_for_context_encoding": prefill,
            "seq_len": self.n_positions,
            "residual": None,
            "local_mask": None,
        }

    def _layers_forward(
        self, hidden: torch.Tensor, past_key_values: Caches | None, common: dict[str, Any]
    ) -> tuple[torch.Tensor, list[Any]]:
        """Run all decoder layers; the first layer's rotary angles serve the others."""
        expected = 5 if self.contract.passes_residual else 4
        cos_cache = sin_cache = residual = None
        new_key_values = []
        for idx, layer in enumerate(self.layers):
            if self.contract.passes_residual:
                common["idx"], common["residual"] = idx, residual
            outputs = layer(
                hidden,
                past_key_value=None if past_key_values is None else past_key_values[idx],
                cos_cache=cos_cache,
                sin_cache=sin_cache,
                **common,
            )
            if len(outputs) != expected:
                raise ValueError(
                    f"Layer {idx} ({type(layer).__name__}) returned {len(outputs)} items, expected "
                    f"{expected} in NxDI {self.contract.version} (hidden, (K, V), cos, sin"
                    f"{', residual' if expected == 5 else ''}); return the residual exactly when "
                    "the layer was called with that keyword, or set "
                    f"{ENVIRONMENT_VARIABLE} to the version that the file was written for (four "
                    "items: 0.1, five: 0.6)."
                )
            hidden, key_value, cos_cache, sin_cache = outputs[:4]
            new_key_values.append(key_value)
            if expected == 5:
                residual = outputs[4]
        # Only this option makes layers leave their last addition to the next one; a residual that
        # a layer returns without it has been added already and is dropped, as NxDI does.
        if getattr(self.neuron_config, "qkv_kernel_fuse_residual_add", False):
            hidden = residual + hidden
        return hidden, new_key_values


def _in_order(tensors: Sequence[torch.Tensor], order: Input) -> Sequence[torch.Tensor]:
    """The tensors with their rows in `order`; unchanged where that is None."""
    if order is None:
        return tensors
    return [torch.index_select(tensor, 0, order) for tensor in tensors]


class NeuronBaseForCausalLM(NeuronApplicationBase):
    """A causal language model: prefill and decode sub-models behind one `forward`."""

    _model_cls: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text_config = self.config.get_text_config()
        self.vocab_size = self.text_config.vocab_size
        self.padding_side = self.neuron_config.padding_side
        self.kv_cache_populated = False
        self.sampler: Sampler | None = None
        self.default_sampling_params = prepare_sampling_params(
            self.neuron_config.batch_size, top_k=[1], top_p=[1.0], temperature=[1.0]
        )
        self.cache_lines = CacheLines(self.neuron_config)
        self.model_wrapper = self.get_model_wrapper_cls()
        self.enable_context_encoding()
        speculates = self.neuron_config.speculation_length > 0
        replaced = speculates and self.neuron_config.contract.speculation_replaces_decode
        if getattr(self.neuron_config, "trace_tokengen_model", True) and not replaced:
            self.enable_token_generation()
        if speculates:
            length = self.neuron_config.speculation_length
            if length in self.context_encoding_model.neuron_config.buckets:
                raise ValueError(  # calls tell graphs apart by shape
                    f"speculation_length {length} is a context-encoding bucket, too, and NxDI "
                    "would take the prompt of that bucket for speculation; choose another "
                    "speculation_length."
                )
            self.enable_speculation()

    @staticmethod
    def get_model_wrapper_cls() -> type:
        return ModelWrapper

    # -- sub-models ------------------------------------------------------------------------------

    def _submodel(
        self, tag: str, rows: int, tokens: int, priority: int | None = None, **init: Any
    ) -> ModelWrapper:
        """A wrapper with a copy of the configuration: `rows` of a batch, new `tokens` of each."""
        config, prefill = copy.deepcopy(self.config), tag == CONTEXT_ENCODING_MODEL_TAG
        own = config.neuron_config
        own.batch_size, own.n_active_tokens, own.bucket_n_active_tokens = rows, tokens, prefill
        own.buckets = self._buckets(prefill)
        if own.contract.marks_prefill:
            own.is_prefill_stage = prefill
        wrapper = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=tag,
            compiler_args=self.get_compiler_args(),
            priority_model_idx=priority,
            model_init_kwargs=init,
        )
        wrapper.cache_lines = self.cache_lines
        self.models.append(wrapper)
        return wrapper

    def _buckets(self, prefill: bool) -> list[int]:
        """Lengths of a sub-model's graphs."""
        config = self.neuron_config
        longest = config.max_context_length if prefill else config.max_length
        given = config.context_encoding_buckets if prefill else config.token_generation_buckets
        if not config.enable_bucketing:
            return [longest]
        return given or generate_buckets(128, longest)

    def enable_context_encoding(self, **model_init_kwargs: Any) -> None:
        """Prefill: a bucket's tokens, written to the caches from their start."""
        config = self.neuron_config
        sizes = config.ctx_batch_size, config.max_context_length
        self.context_encoding_model = self._submodel(
            CONTEXT_ENCODING_MODEL_TAG, *sizes, **model_init_kwargs
        )

    def enable_token_generation(
        self, enable_wlt_optimization: bool = True, **model_init_kwargs: Any
    ) -> None:
        """Decode: one token a row, over the cached prefix of a bucket's length."""
        rows, priority = self.neuron_config.tkg_batch_size, 0 if enable_wlt_optimization else None
        self.token_generation_model = self._submodel(
            TOKEN_GENERATION_MODEL_TAG, rows, 1, priority, **model_init_kwargs
        )

    def enable_speculation(self) -> None:
        """Decode: `speculation_length` candidate tokens a row in one call."""
        config = self.neuron_config
        sizes = config.spec_batch_size, config.speculation_length
        self.speculation_model = self._submodel(SPECULATION_MODEL_TAG, *sizes)

    # -- calls -----------------------------------------------------------------------------------

    def get_required_kwargs(self) -> list[str]:
        """Keywords of `forward` that the generation adapter must pass on."""
        return []

    def reset(self) -> None:
        """Begin a new sequence with the next call; masks hide the caches' old values."""
        self.kv_cache_populated = False
        self.cache_lines.forget()

    def forward(
        self,
        input_ids: Input = None,
        seq_ids: Input = None,
        attention_mask: Input = None,
        position_ids: Input = None,
        past_key_values: Any | None = None,
        inputs_embeds: Input = None,
        sampling_params: Input = None,
        prev_hidden: Input = None,
        labels: Input = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        adapter_ids: Input = None,
        medusa_args: Any = None,
        return_dict: bool | None = None,
        llava_args: list[Any] | None = None,
        input_capture_hook: Any = None,
        slot_mapping: Input = None,
        block_table: Input = None,
        full_context_lens: Input = None,
        computed_context_lens: Input = None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, 1, V) fp32 of the last tokens, or `tokens` under on-device sampling.

        input_ids, position_ids and attention_mask are (B, T): prefill where T > 1 and a position is
        0, else decode. The decode mask covers the tokens before the new one. `seq_ids` (B) names
        cache lines (default: 0..B-1). A cache of blocks takes the last four arguments
        (BlockArguments) and whole prompts, of which only uncached tokens are computed. ValueError
        for inputs that no graph serves.
        """
        del past_key_values, labels, use_cache, output_attentions, output_hidden_states
        del return_dict, llava_args, medusa_args
        if inputs_embeds is not None:
            raise NotImplementedError("neuron_cpu takes input_ids only, no embeddings.")
        inputs = self._default_inputs(
            input_ids, attention_mask, position_ids, seq_ids, sampling_params
        )
        blocks = (slot_mapping, block_table, full_context_lens, computed_context_lens)
        if any(value is not None for value in blocks):
            raise ValueError(
                "A call names blocks of the cache, expected none, as this model's cache has lines; "
                "leave them out."
            )
        if input_capture_hook is not None:
            input_capture_hook(self, [*inputs, prev_hidden, adapter_ids])
        submodel = self._route(input_ids, inputs[2])
        return self._construct_output(submodel(*inputs, prev_hidden, adapter_ids))

    def _default_inputs(
        self,
        input_ids: Input,
        attention_mask: Input,
        position_ids: Input,
        seq_ids: Input,
        sampling_params: Input,
    ) -> list[torch.Tensor]:
        """A sub-model's five inputs, int32 and fp32, with defaults filled in."""
        if isinstance(input_ids, str):
            raise ValueError(
                "input_ids are a text, expected token ids [batch, tokens]; write "
                "AutoTokenizer.from_pretrained(FOLDER)(TEXT, return_tensors='pt').input_ids."
            )
        if input_ids is None or position_ids is None:
            raise ValueError(
                "forward needs input_ids and position_ids, got one; for a prompt write "
                "position_ids=torch.arange(input_ids.shape[1]).expand_as(input_ids)."
            )
        rows = input_ids.shape[0]
        if seq_ids is None:
            seq_ids = torch.arange(rows)
        if attention_mask is None:
            attention_mask = self._infer_attention_mask(position_ids)
        if sampling_params is None:
            sampling_params = self.default_sampling_params  # of the whole batch
        elif self.on_device_sampling:
            config = self.neuron_config
            validate_sampling_params(
                sampling_params, config.on_device_sampling_config, config.contract.takes_zeros
            )
        self._check_prompt(input_ids, attention_mask, position_ids)
        given = [input_ids, attention_mask, position_ids, seq_ids]
        types = [t.dtype for t in given]
        if {*types} - {torch.int32, torch.int64} or sampling_params.dtype != torch.float32:
            raise ValueError(
                f"input_ids, attention_mask, position_ids and seq_ids are {types}, and "
                f"sampling_params {sampling_params.dtype}, expected integers of 32 or 64 bits and "
                "float32, because graphs take no other and NxDI casts none; cast them."
            )
        if seq_ids.dim() != 1:
            raise ValueError(
                f"seq_ids have {seq_ids.dim()} dimensions, expected one, (batch,); flatten them."
            )
        return [*(t.to(torch.int32) for t in given), sampling_params]

    def _infer_attention_mask(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Ones up to each row's largest position (prompt), or before it (decode)."""
        if position_ids.shape[-1] > 1:
            return (position_ids >= torch.arange(position_ids.shape[-1])).to(torch.int32)
        last = position_ids.amax(dim=1, keepdim=True)
        return (torch.arange(max(int(last.max()), 1)) < last).to(torch.int32)

    def _check_prompt(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> None:
        """Refuse one-token prompts, which the SDK would answer from an unfilled cache."""
        if int(position_ids.min()) != 0:
            return
        shortest = input_ids.shape[1]
        if shortest > 1 and self.padding_side == "right":
            shortest = int(attention_mask.sum(dim=1).min())
        if shortest < 2:
            raise ValueError(
                "A prompt has only one token, expected at least two in every row, because NxDI "
                "takes a single token for a decode step; lengthen the prompt."
            )

    def _is_prefill(self, position_ids: torch.Tensor) -> bool:
        return int(position_ids.min()) == 0

    def _route(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> ModelWrapper:
        """The sub-model for this call, as NxDI chooses it."""
        length = input_ids.shape[-1]
        if length > 1 and self._is_prefill(position_ids):
            self.kv_cache_populated = True
            return self.context_encoding_model
        if length > 1:
            if length != self.neuron_config.speculation_length:
                raise ValueError(
                    f"A decode call has {length} tokens a row, expected 1 or the compiled "
                    f"speculation_length ({self.neuron_config.speculation_length}); a prompt "
                    "must begin at position 0."
                )
            return self.speculation_model
        if not hasattr(self, "token_generation_model"):
            version = self.neuron_config.contract.version
            raise ValueError(
                f"A decode call has one token a row, and NxDI {version} compiles no such graph "
                "beside a speculation model, expected "
                f"{self.neuron_config.speculation_length} tokens; call enable_token_generation() "
                "in the model's enable_speculation, or leave speculation_length out."
            )
        return self.token_generation_model

    def _construct_output(self, outputs: Any) -> CausalLMOutputWithPast:
        """Logits or tokens in the shape that a caller of a Hugging Face model expects."""
        first, logits = outputs if isinstance(outputs, list) else (outputs, None)
        if not self.on_device_sampling:
            logits, hidden = first, first
        else:
            hidden = first if logits is None else []
        result = CausalLMOutputWithPast(logits=logits, hidden_states=hidden)
        result.tokens = first
        return result

    # -- information -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")
