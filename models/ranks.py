"""Several ranks for one attention, for llama.py: flash decoding and context parallelism.

Flash decoding: if there are more ranks than KV heads, the ranks of a head share its positions, and
each weighs its own keys and values. One kernel then does the residual sum, norm, QKV and RoPE,
another the output, since ranks exchange the tensors between them. Context parallelism: groups of
ranks have parts of a prompt, and ranks with the same heads exchange keys and values, in PyTorch.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.mappings import (
    _reduce_scatter_along_dim,
    gather_from_sequence_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group
from torch import nn
from torch_xla.core import xla_model as xm

from llama import (
    ATTENTION_TARGETS,
    P_MAX,
    Columns,
    Hidden,
    NeuronLlamaDecoderLayer,
    NeuronLlamaModel,
    StateDict,
    SumOfColumns,
    Tokens,
    _mask_bias,
    cache_in_runs,
    grouped,
    is_nki_enabled,
    option,
    store_product,
    token_blocks,
    token_chunk,
)
from models.families import (
    CACHED,
    FamilyMLP,
    convert_norm_of_all_heads,
    convert_terms,
    has_attention_kernels,
)
from models.weights import SharedSizes, spread_heads
from models.queries import QueryGroup, attention_constants, new_keys, project_blocks, score_banks
from models.layers import AnyMLP, AnyProjections, layer_of
from models.cached import (
    AnyCache,
    CachedAttention,
    attend_few,
    cache_blocks,
    chunk_tokens,
    store_weights,
)


# --- Kernels --------------------------------------------------------------------------------------


@nki.jit
def attention_projection_kernel(
    x_hbm,
    delta_hbm,
    norm,
    qkv_w_hbm,
    cos_hbm,
    sin_hbm,
    heads,
    length,
    qkv_b_hbm=None,
    gains_hbm=None,
    scales_hbm=None,
    a_hbm=None,
    b_hbm=None,
    chosen_hbm=None,
):
    """Do everything before attention where ranks exchange queries or keys: residual sum, norm, QKV,
    RoPE.

    Operands are those of the other kernels, with ``length`` tokens a sequence. -> rotated queries
    and keys in tiles of heads [128, q_tiles + stacks, T], queries times ``score_scales``; keys and
    values in rows [T, kv_heads * D]; and x + delta where there is a delta.
    """
    (features, tokens), shape, dtype = x_hbm.shape, x_hbm.shape, x_hbm.dtype
    tiles = heads.q_tiles + heads.stacks
    qk_hbm = nl.ndarray((P_MAX, tiles, tokens), dtype, buffer=nl.shared_hbm)
    keys_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    values_hbm = nl.ndarray((tokens, heads.kv_features), dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm if delta_hbm is None else nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    layer = layer_of(
        Hidden(x_hbm, delta_hbm, stream_hbm),
        norm,
        heads,
        (qkv_w_hbm, None),
        (cos_hbm, sin_hbm),
        (qkv_b_hbm, gains_hbm),
        scales_hbm,
        (a_hbm, b_hbm, chosen_hbm),
    )
    most_tokens = chunk_tokens(features, heads, x_hbm.itemsize, scales_hbm is not None)
    for some in grouped(token_blocks(features, tokens, length), most_tokens):
        # queries and keys [128, tiles, count], values [tokens, kv_heads * D]: H/128 passes of a
        # block's tokens for each tile of features; the weights pass once for some blocks
        for rows in project_blocks(some, layer):
            # TensorE transposes keys into rows for the cache, 128 tokens a pass; the other ranks
            # take queries and keys as they lie, a row of tiles * count on each partition
            rows.store_keys(keys_hbm, values_hbm)
            block = rows.tokens.block
            nl.store(qk_hbm[:, :, nl.ds(block.start, block.count)], rows.qk_sb)
    results = qk_hbm, keys_hbm, values_hbm
    return results if delta_hbm is None else (*results, stream_hbm)


@nki.jit
def attention_share_kernel(
    q_hbm, k_hbm, v_hbm, keys_hbm, values_hbm, bias_hbm, active_hbm, heads, batch
):
    """Attend with tokens that are projected already, over the keys of several ranks.

    Queries, new keys and values [T, kv_heads * D] come from ``attention_projection_kernel``; the
    cache and active [B, n, n] are those of ``attention_chunk_kernel``, the keys this rank's share.
    -> context and, of up to 128 queries of a KV head, head by head, the negated maximum of their
    scores and the sum of their weights [B, kv_heads, queries, 2] in fp32.
    """
    length, dtype = q_hbm.shape[2] // batch, q_hbm.dtype
    context_hbm = nl.ndarray(q_hbm.shape, dtype, buffer=nl.shared_hbm)
    shape = (batch, heads.kv_heads, heads.group * length, 2)
    weights_hbm = nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm)
    constants = attention_constants(length, heads, dtype)
    cache = AnyCache(keys_hbm, values_hbm, bias_hbm)
    for sequence in nl.static_range(batch):
        # a sequence's tokens, as a projection leaves them
        columns = nl.ds(sequence * length, length)
        qk_sb = nl.ndarray((P_MAX, heads.q_tiles + heads.stacks, length), dtype)
        # a tile at a time: the compiler refuses loads that leave out elements between rows
        for tile in nl.static_range(heads.q_tiles):
            qk_sb[:, tile, :] = nl.load(q_hbm[:, tile, columns])
        for stack in nl.static_range(heads.stacks):
            qk_sb[:, heads.q_tiles + stack, :] = nl.load(k_hbm[:, stack, columns])
        new = new_keys(length, heads, dtype, nl.load(active_hbm[sequence]), hides=True)
        new.append(0, qk_sb, 0, nl.load(v_hbm[columns, :]))
        # tokens attend to the keys before them and to themselves, a set of KV heads at a time
        context_sb = nl.ndarray((P_MAX, heads.q_tiles, length), dtype)
        for banks in score_banks([(0, 0, 0, length)], heads, length):
            blocks = cache_blocks(cache, sequence, banks, heads, (sequence, 1))
            group = QueryGroup(banks, blocks, new, [qk_sb], constants, [context_sb])
            store_weights(weights_hbm[sequence], banks[0], attend_few(group))
        nl.store(context_hbm[:, :, columns], context_sb)
    return context_hbm, weights_hbm


@nki.jit
def attention_output_kernel(
    context_hbm,
    out_w_hbm,
    features,
    length,
    heads,
    scales_hbm=None,
    a_hbm=None,
    b_hbm=None,
    chosen_hbm=None,
):
    """The output projection by itself: context [128, q_tiles, T] -> partial output [H, T], H being
    ``features``, of sequences of ``length`` tokens. Scales and adapters are those of all four
    projections."""
    tokens = context_hbm.shape[2]
    out_hbm = nl.ndarray((features, tokens), context_hbm.dtype, buffer=nl.shared_hbm)
    layer = layer_of(
        Hidden(out_hbm, out_hbm=out_hbm),
        None,
        heads,
        (None, out_w_hbm),
        (None, None),
        (None, None),
        scales_hbm,
        (a_hbm, b_hbm, chosen_hbm),
    )
    most_tokens = token_chunk(context_hbm.itemsize * heads.q_tiles)
    for some in grouped(token_blocks(features, tokens, length), most_tokens):
        # contexts [128, q_tiles, count] as attention leaves them, then the output [128, H/128,
        # count]: q_tiles passes of a block's tokens for each tile; the weight passes once
        contexts = [
            Tokens(block, nl.load(context_hbm[:, :, nl.ds(block.start, block.count)]))
            for block in some
        ]
        store_product(layer.out, contexts, out_hbm)
    return out_hbm


# --- Modules --------------------------------------------------------------------------------------


class SharedAttention(CachedAttention):
    """Flash decoding: the ranks of a KV head have a share of its positions each.

    The masks, made by the base class, show a new token on the rank that will keep it.
    """

    def __init__(self, config: InferenceConfig, ranks: Optional[int] = None, **group: Any) -> None:
        super().__init__(config, ranks, **group)
        self.cores_of_kv = config.num_cores_per_group
        if self.cores_of_kv > 1:
            self.rank_util = SPMDRank(self.sizes.tp)

    def forward(self, hidden: Any, norm: Any, given: Dict[str, Any]) -> Tuple[Any, ...]:
        output, present, *tables = super().forward(hidden, norm, given)
        if given.get("past_key_value") is None and self.cores_of_kv > 1:
            present = self.share_of_prompt(present)
        return output, present, *tables

    def share_of_prompt(self, present: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, ...]:
        """Flash decoding: the positions of a prompt's keys and values [B, kv_rank, S, D] that this
        rank keeps, [B, kv_rank, ceil(S / ranks), D]. Nobody sees positions beyond the prompt."""
        length, ranks = present[0].shape[2], self.cores_of_kv
        number = self.rank_util.get_rank().long() % ranks
        places = torch.arange(0, length, ranks, device=number.device) + number
        return tuple(x.index_select(2, places.clamp_max(length - 1)) for x in present)

    def kernel_results(self, hidden, norm, tables, given) -> Tuple[Any, ...]:
        """Flash decoding in kernels: between them queries travel, maxima and sums, and the weighted
        contexts, each rank's heads in fp32 -> results of a decode kernel."""
        past, mask, active_mask = (given.get(name) for name in CACHED)
        if past is None or self.cores_of_kv == 1:
            return super().kernel_results(hidden, norm, tables, given)
        ranks, rank = parallel_state.get_kv_shared_group(), self.sizes.of_rank
        x, operands = hidden.stream, self.operands(hidden)
        qk, k, v, *stream = attention_projection_kernel(
            x, hidden.delta, norm, self.qkv_proj.weight, *tables, rank, hidden.shape[1], *operands
        )
        q, new_keys = qk.split([rank.q_tiles, rank.stacks], 1)
        q = gather_from_sequence_parallel_region(q, 1, process_group=ranks)
        heads = rank._replace(q_heads=rank.q_heads * ranks.size())
        bias = _mask_bias(mask[:, 0, 0].bool(), x.dtype)  # integers, for several tokens
        context, weights = attention_share_kernel(
            q,
            new_keys,
            v,
            *cache_in_runs(*past, bias),
            self.active_bias(active_mask, hidden),
            heads,
            hidden.shape[0],
        )
        context = context * share_of_keys(weights[:, 0], hidden.shape[1], ranks)
        context = _reduce_scatter_along_dim(context, 1, process_group=ranks).to(x.dtype)
        partial = attention_output_kernel(
            context, self.o_proj.weight, len(x), hidden.shape[1], rank, *operands[2:]
        )
        return partial, k, v, *stream

    def active_bias(
        self, active_mask: Optional[torch.Tensor], hidden: Columns
    ) -> Optional[torch.Tensor]:
        """The bias of the base class, for few enough queries for the kernel of a share."""
        if active_mask is not None and self.cores_of_kv > 1:
            active_mask = active_mask.bool()  # NxDI makes integers of a share's
            tokens = active_mask.shape[-1]
            queries = tokens * self.sizes.of_rank.q_heads * self.cores_of_kv
            if queries > P_MAX:
                raise ValueError(
                    f"The kernels take at most {P_MAX} queries of a KV head whose positions "
                    f"several ranks share, got {queries}; choose a speculation_length of at most "
                    f"{P_MAX * tokens // queries}."
                )
        return super().active_bias(active_mask, hidden)

    def attend(
        self, q: torch.Tensor, visible: List[Tuple[torch.Tensor, ...]], softmax: Any = torch.softmax
    ) -> torch.Tensor:
        """Attend in PyTorch: the queries of all these ranks come together, [B, ranks * q_rank, S,
        D]. Each rank weighs its own keys and values, and gets the sums of its heads over the
        ranks."""
        if len(visible) == 1 or self.cores_of_kv == 1:
            return super().attend(q, visible, softmax)
        ranks = parallel_state.get_kv_shared_group()
        q = gather_from_sequence_parallel_region(q, 1, process_group=ranks)
        context = super().attend(q, visible, softmax_of_ranks)
        return _reduce_scatter_along_dim(context, 1, process_group=ranks)


def softmax_of_ranks(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax over the keys of all ranks of a KV head, which exchange maxima and sums [B, heads, S,
    1]."""
    ranks = parallel_state.get_kv_shared_group()
    maxima = scores.amax(dim, keepdim=True)
    maxima = gather_from_sequence_parallel_region(maxima, 3, process_group=ranks)
    powers = torch.exp(scores - maxima.amax(dim, keepdim=True))
    sums = powers.sum(dim, keepdim=True)
    sums = gather_from_sequence_parallel_region(sums, 3, process_group=ranks)
    return powers / sums.sum(dim, keepdim=True)


class PartAttention(SharedAttention):
    """Context parallelism (NxDI 0.4 and later): attention of a prompt that groups of ranks share.

    A group splits the heads; ranks with the same heads exchange keys and values. Its layers are
    those of decode steps, cut for fewer ranks. The base class gives it whole prompts and receives
    keys and values of all heads of the group's rank.
    """

    def __init__(self, config: InferenceConfig) -> None:
        from neuronx_distributed_inference.modules.attention import (
            attention_process_groups as groups,  # NxDI before 0.4 has no such module
        )

        tp, parts = config.neuron_config.tp_degree, parts_of_prompt(config)
        groups.init_context_parallel_attention_process_groups(config)
        group = groups.get_context_parallel_attention_tp_group()
        super().__init__(config, tp // parts, tensor_model_parallel_group=group)
        self.group, self.others = group, groups.get_context_parallel_attention_cp_group()
        self.parts, self.rank_util = parts, SPMDRank(tp)

    def part_of_rank(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's part of a dimension, by a tensor, since all ranks share one graph."""
        size = x.shape[dim] // self.parts
        if x.shape[dim] % self.parts:
            raise ValueError(
                f"A prompt's graph has {x.shape[dim]} tokens, expected a multiple of cp_degree "
                f"{self.parts}; change max_context_length or context_encoding_buckets."
            )
        part = self.rank_util.get_rank().long() // self.sizes.tp
        return x.index_select(dim, part * size + torch.arange(size, device=x.device))

    def exchanged(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All parts, of ranks with the same heads."""
        return gather_from_sequence_parallel_region(x, dim, process_group=self.others)

    def attend_with_torch(self, hidden, norm, tables, given):
        """A part's queries over the keys of all parts; its output joins the others'."""
        tables = self.halves(tables, len(hidden))
        cos, sin = (self.part_of_rank(table, 1) for table in tables)
        q, *new = self.project(norm(self.part_of_rank(hidden, 1)), (cos, sin), given)
        keys, values = self.exchanged(torch.stack(new), 3)
        context = self.attend(q, [(keys, values, self.part_of_rank(given["attention_mask"], 2))])
        output = self.o_proj(context.transpose(1, 2).flatten(2))
        return hidden + self.exchanged(output, 1), (keys, values)


class WholeSequence(NeuronLlamaDecoderLayer):
    """Sequence parallelism: a sharded sequence is gathered once, for all layers. The products hide
    the norm of all ranks, and one all-reduce moves the bytes of a reduce-scatter and a gather."""

    def forward(self, hidden_states: Any, **given: Any) -> Tuple[Any, ...]:
        length = given["position_ids"].shape[1]
        if torch.is_tensor(hidden_states) and hidden_states.shape[1] != length:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        return super().forward(hidden_states, **given)


def rows_of_rank(whole: torch.Tensor) -> torch.Tensor:
    """[B, S, H], equal on all ranks -> the rows of each: the maximum, scattered as by NxDI."""
    return _reduce_scatter_along_dim(whole, 1, xm.REDUCE_MAX)


class ShareOfColumns(SumOfColumns):
    """The end of a sharded sequence, in kernels."""

    def forward(self, columns: Columns) -> torch.Tensor:
        return rows_of_rank(super().forward(columns))


class ShareOfNorm(CustomRMSNorm):
    """The same in PyTorch."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rows_of_rank(super().forward(hidden))


class SharedLayer(WholeSequence):
    """A decoder layer with an attention of its own for prompts that groups of ranks share."""

    attention_cls: Type[nn.Module] = SharedAttention
    mlp_cls: Type[nn.Module] = AnyMLP
    plain_cls = SharedAttention, FamilyMLP

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        if parts_of_prompt(config) > 1:
            self.prompt_attn = PartAttention(config)

    def attention(self, given: Dict[str, Any]) -> nn.Module:
        prompt = given.get("past_key_value") is None and parts_of_prompt(self.config) > 1
        return self.prompt_attn if prompt else self.self_attn


class SharedModel(NeuronLlamaModel):
    """The model whose heads and prompts ranks share."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        super().setup_attr_for_model(config)
        self.sliding_window = None  # NxDI 0.7 would keep a window's tokens; these layers need all
        if parts_of_prompt(config) == 1:  # else the cache's manager counts replicas
            sizes = SharedSizes.of(config)
            self.num_attention_heads, self.num_key_value_heads = sizes.q_heads, sizes.kv_heads

    def final_norm(self, config: InferenceConfig) -> nn.Module:
        if not option(config, "sequence_parallel_enabled"):
            return super().final_norm(config)
        if is_nki_enabled(config):
            return ShareOfColumns()
        return ShareOfNorm(config.hidden_size, config.rms_norm_eps)


def share_of_keys(weights: torch.Tensor, tokens: int, ranks: Any) -> torch.Tensor:
    """The share of this rank's keys in each query's softmax, [heads, B * n] fp32, from the negated
    maximum and the sum of the queries' weights there [B, heads * n, 2]. The ranks exchange
    these."""
    every = gather_from_sequence_parallel_region(weights[None], 0, process_group=ranks)
    lowest = every[..., 0].amin(0)
    total = (torch.exp(lowest - every[..., 0]) * every[..., 1]).sum(0)
    share = torch.exp(lowest - weights[..., 0]) * weights[..., 1] / total
    return share.unflatten(1, (-1, tokens)).transpose(0, 1).flatten(1)


# --- Configuration --------------------------------------------------------------------------------


def cores_of_a_kv_head(config: InferenceConfig) -> int:
    """Flash decoding: ranks that keep the positions of one KV head among them."""
    heads, tp = config.num_attention_heads, config.neuron_config.tp_degree
    kv = config.num_key_value_heads
    if heads % tp or tp % kv or tp <= kv:
        raise ValueError(
            f"flash_decoding_enabled shares a KV head among ranks, expected a degree above the "
            f"{kv} KV heads that is a multiple of them and divides the {heads} query heads, "
            f"got {tp}; choose another tp_degree or leave it out."
        )
    return calculate_num_cores_per_group(heads, kv, tp)


def check_ranks(config: InferenceConfig) -> None:
    """ValueError for options that several ranks cannot share."""
    check_whole_sequence(config)
    if config.neuron_config.flash_decoding_enabled:
        config.num_cores_per_group = cores_of_a_kv_head(config)
    if parts_of_prompt(config) > 1:
        check_parts_of_prompt(config)


def check_whole_sequence(config: InferenceConfig) -> None:
    """Sequence parallelism. Left padding: NxDI 0.3 and later read the wrong row. A parallel
    vocabulary: releases differ in who sums the embedding."""
    neuron_config = config.neuron_config
    left, vocab_parallel = neuron_config.padding_side == "left", neuron_config.vocab_parallel
    if neuron_config.sequence_parallel_enabled and (left or vocab_parallel):
        raise ValueError(
            "sequence_parallel_enabled takes prompts padded on the right and a whole vocabulary, "
            f"got padding_side {neuron_config.padding_side!r} and vocab_parallel "
            f"{vocab_parallel}; leave these out."
        )


def check_parts_of_prompt(config: InferenceConfig) -> None:
    """Context parallelism: a rank decodes with one of the KV heads that it has in prompts."""
    neuron_config, kv = config.neuron_config, config.num_key_value_heads
    # over blocks NxDI's own layers answer wrongly as well
    others = ("flash_decoding_enabled", "sequence_parallel_enabled", "quantized", "lora_config")
    for name in (*others, "is_block_kv_layout"):
        if getattr(neuron_config, name, None):
            raise ValueError(
                f"cp_degree {neuron_config.cp_degree} gives groups of ranks parts of a prompt, "
                f"expected no {name}; leave one of them out."
            )
    tp, heads = neuron_config.tp_degree, config.num_attention_heads
    ranks = tp // neuron_config.cp_degree
    if tp % kv or heads % tp or (ranks % kv and kv % ranks):
        raise ValueError(
            f"cp_degree {neuron_config.cp_degree} takes a degree that is a multiple of the "
            f"{kv} KV heads and divides the {heads} query heads, and groups of ranks that "
            f"share out the KV heads, got {tp} ranks in groups of {ranks}; choose others."
        )


def parts_of_prompt(config: InferenceConfig) -> int:
    """Context parallelism: parts of a prompt, each with a group of ranks of its own; 1 without."""
    return option(config, "cp_degree", 1)


# --- In checkpoints -------------------------------------------------------------------------------


def convert_parts(
    state: StateDict, prefix: str, config: InferenceConfig, kinds: Sequence[Sequence[str]]
) -> Dict[str, SharedSizes]:
    """Heads of one layer's two attentions, for prompts and for steps: the SharedSizes of each by
    the beginning of its tensors' names. A rank decodes with keys and values of its own part of the
    prompt, as NxDI orders ranks."""
    attention, of_prompt, sizes = (
        f"{prefix}self_attn.",
        f"{prefix}prompt_attn.",
        SharedSizes.of(config),
    )
    kv, parts = config.num_key_value_heads, parts_of_prompt(config)
    found = {attention: sizes}
    if parts > 1:
        size = sizes.tp // parts
        found[of_prompt] = SharedSizes.of(config, size)
        keys = [key for key in state if key.startswith(attention)]
        state |= {key.replace(attention, of_prompt): state[key] for key in keys}
        state[f"{of_prompt}rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
        spread_heads(state, of_prompt, kv, found[of_prompt], kinds)
    spread_heads(state, attention, kv, sizes, kinds)
    if parts > 1:
        shards = [rank % size * parts + rank // size for rank in range(sizes.tp)]
        for dim, name, kind in every_kind(kinds):
            key = f"{attention}{name}.{kind}"
            if key in state and state[key].numel() > 1:
                cut = state[key].chunk(len(shards), dim)
                state[key] = torch.cat([cut[shard] for shard in shards], dim)
    if getattr(config, "num_cores_per_group", 1) > 1:
        state[f"{attention}rank_util.rank"] = torch.arange(sizes.tp, dtype=torch.int32)
    return found


def every_kind(kinds: Sequence[Sequence[str]]) -> List[Tuple[int, str, str]]:
    """(dimension of heads, projection, kind of tensor) of attention."""
    dims = [(int(name == "o_proj"), name) for name in ATTENTION_TARGETS]
    return [(dim, name, kind) for dim, name in dims for kind in kinds[dim]]


# Attention's tensors with heads: in rows of Q, K and V, and in columns of the output.
OF_HEADS = ("weight", "bias", "scale", "lora_B"), ("weight", "lora_A")


def convert_attention(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """Spread the heads of one layer, and put its weights in kernel layout for the kernels."""
    attentions = convert_parts(state, prefix, config, OF_HEADS)
    convert_norm_of_all_heads(state, f"{prefix}self_attn.", config)
    if has_attention_kernels(config):
        gain = state.pop(f"{prefix}input_layernorm.weight")
        for name, sizes in attentions.items():
            convert_terms(state, name, sizes)
            AnyProjections.of_attention(state, name, gain, sizes).convert()
