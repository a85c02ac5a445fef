"""Mixtral for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

A second single file beside llama.py, in the same manner; it shares nothing with it when it runs.
What differs from a Llama: behind each attention stands a router, which gives every token to its
best few experts, each an MLP, and adds up what they make of it (Jiang et al. 2024, "Mixtral of
Experts"). Prefill runs all experts on all tokens, so that none is dropped; a decode step of few
tokens reads only the weights of the experts that were chosen.

Axis letters used throughout:

    T  tokens of one call (batch times sequence)     H  hidden size, a multiple of 128
    K  contraction size of a product                 N  output features of a product
    E  experts                                       I  intermediate size of one expert, per rank
    C  choices: T times the experts of a token       D  head dimension
    L  cached tokens                                 B, S  batch, new tokens of a sequence

Every weight lies as TensorE takes it, contraction first [K, N], with kernels and without, so both
ways share modules and checkpoint conversion. Activations between modules are rows [B, S, H], in
front of a product columns [K, T]. Norms, rotations and the router's softmax are PyTorch.
Interfaces follow NxD Inference 0.1 to 0.6, the kernel language SDK 2.21.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from torch import nn
from transformers import MixtralForCausalLM

P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
MOVING_MAX = 512  # free size of the moving matmul operand; one PSUM bank of fp32
EXPERT_TOKENS = 256  # of one pass over all experts: sums, inputs and inner features fit in SBUF
EXPERT_COLUMNS = 256  # of an expert's weight, loaded at once: rows of 512 bytes in bf16
PIECE_BYTES = 32768  # per partition of a plain weight, loaded at once
HIDDEN = -1.5e38  # the score of a key that a query does not see, in fp32
StateDict = Dict[str, torch.Tensor]


# --- Tile helpers ---------------------------------------------------------------------------------


def spans(length: int, most: int) -> List[Tuple[int, int]]:
    """(start, size) of the pieces of ``most`` that cover ``length``; the last may be smaller."""
    return [(at, min(most, length - at)) for at in range(0, length, most)]


def load_tiled(x_hbm, rows, columns):
    """``columns`` (start, size) of [rows, F] @ HBM -> [128, tiles, size] @ SBUF."""
    start, size = columns
    tiles = spans(rows, P_MAX)
    x_sb = nl.ndarray((P_MAX, len(tiles), size), x_hbm.dtype)
    for tile, (at, height) in enumerate(tiles):
        x_sb[0:height, tile, :] = nl.load(x_hbm[nl.ds(at, height), nl.ds(start, size)])
    return x_sb


def product(weight_sb, column, width, x_sb, rows):
    """``W[:, column : column + width].T @ x`` -> [width, tokens] @ PSUM, summed over all rows."""
    acc_psum = nl.zeros((width, x_sb.shape[2]), nl.float32, buffer=nl.psum)
    for tile, (_, height) in enumerate(spans(rows, P_MAX)):
        acc_psum[...] += nisa.nc_matmul(
            weight_sb[0:height, tile, nl.ds(column, width)], x_sb[0:height, tile, :]
        )
    return acc_psum


def swiglu(gate_psum, up_psum, dtype):
    """silu(gate) * up, both rounded to the model's type first, as PyTorch has them."""
    gate_sb = nisa.tensor_copy(gate_psum, dtype=dtype)
    up_sb = nisa.tensor_copy(up_psum, dtype=dtype)
    return nisa.tensor_tensor(nisa.activation(nl.silu, gate_sb), up_sb, nl.multiply, dtype=dtype)


def turned(x_sb):
    """[P, F] @ SBUF, both at most 128 -> [F, P]: a product with the identity."""
    turned_psum = nl.ndarray((x_sb.shape[1], x_sb.shape[0]), nl.float32, buffer=nl.psum)
    turned_psum[...] = nisa.nc_transpose(x_sb)
    return nisa.tensor_copy(turned_psum, dtype=x_sb.dtype)


# --- Attention ------------------------------------------------------------------------------------
#
# Flash attention (Dao et al. 2022): queries on partitions pass 512 keys at a time and keep sums
# relative to the largest score so far (Milakov and Gimelshein 2018).


class Queries(NamedTuple):
    """Up to 128 queries @ SBUF: q [D, rows]; in fp32 their largest score so far, negated [rows, 1],
    and the sums of values, and of ones behind them, by weights relative to it [rows, D + 1]."""

    q_sb: Any
    lowest_sb: Any
    sums_sb: Any

    @classmethod
    def of(cls, rows_hbm):
        """Queries [rows, D] @ HBM that have seen no key."""
        rows, dim = rows_hbm.shape
        lowest_sb = nisa.memset((rows, 1), -2 * HIDDEN, nl.float32)
        sums_sb = nisa.memset((rows, dim + 1), 0.0, nl.float32)
        return cls(turned(nl.load(rows_hbm)), lowest_sb, sums_sb)

    def scores(self, k_sb, bias_sb=None):
        """q . k / sqrt(D) of up to 512 keys [D, keys], and their bias [1, keys] -> [rows, keys]."""
        (dim, rows), keys = self.q_sb.shape, k_sb.shape[1]
        scores_psum = nl.zeros((rows, keys), nl.float32, buffer=nl.psum)
        scores_psum[...] += nisa.nc_matmul(self.q_sb, k_sb)
        if bias_sb is not None:  # of all queries the same: a product with a row of ones
            ones_sb = nisa.memset((1, rows), 1.0, bias_sb.dtype)
            scores_psum[...] += nisa.nc_matmul(ones_sb, bias_sb)
        return nisa.tensor_scalar(scores_psum, nl.multiply, dim**-0.5, dtype=nl.float32)

    def see(self, scores_sb, v_sb, first=0):
        """Add the values [128, tiles, D + 1] from tile ``first`` on of keys with these scores
        [rows, keys]."""
        own_sb = nisa.tensor_reduce(nl.max, scores_sb, axis=1, negate=True)
        lowest_sb = nisa.tensor_tensor(self.lowest_sb, own_sb, nl.minimum)
        factor_sb = nisa.activation(nl.exp, self.lowest_sb, bias=lowest_sb, scale=-1.0)
        weights_sb = nisa.activation(nl.exp, scores_sb, bias=lowest_sb, dtype=v_sb.dtype)
        added_psum = nl.zeros(self.sums_sb.shape, nl.float32, buffer=nl.psum)
        for tile, (at, keys) in enumerate(spans(scores_sb.shape[1], P_MAX)):
            turned_sb = turned(weights_sb[:, nl.ds(at, keys)])
            added_psum[...] += nisa.nc_matmul(turned_sb, v_sb[0:keys, first + tile, :])
        kept_sb = nisa.tensor_scalar(self.sums_sb, nl.multiply, factor_sb)
        self.sums_sb[...] = nisa.tensor_tensor(kept_sb, added_psum, nl.add)
        self.lowest_sb[...] = nisa.tensor_copy(lowest_sb)

    def context(self, dtype):
        """Weighted values [rows, D] by the sum of their weights."""
        dim = self.q_sb.shape[0]
        share_sb = nisa.reciprocal(self.sums_sb[:, dim : dim + 1])
        return nisa.tensor_scalar(self.sums_sb[:, 0:dim], nl.multiply, share_sb, dtype=dtype)


def load_keys(k_hbm, v_hbm, first, count):
    """Keys and values from row ``first`` on of [rows, D] @ HBM -> keys [D, count] and values [128,
    tiles, D + 1] @ SBUF, the last column ones."""
    dim, tiles = k_hbm.shape[1], spans(count, P_MAX)
    k_sb = nl.ndarray((dim, count), k_hbm.dtype)
    v_sb = nisa.memset((P_MAX, len(tiles), dim + 1), 1.0, v_hbm.dtype)
    for tile, (at, height) in enumerate(tiles):
        rows = nl.ds(first + at, height)
        k_sb[:, nl.ds(at, height)] = turned(nl.load(k_hbm[rows, :]))
        v_sb[0:height, tile, 0:dim] = nl.load(v_hbm[rows, :])
    return k_sb, v_sb


def as_tokens(x_hbm):
    """[.., D] @ HBM -> [rows, D]."""
    return x_hbm.reshape((math.prod(x_hbm.shape[:-1]), x_hbm.shape[-1]))


@nki.jit
def attention_prefill_kernel(q_hbm, k_hbm, v_hbm, bias_hbm=None):
    """Causal attention of whole prompts: q [B, heads, S, D], k and v [B, kv_heads, S, D] -> [B,
    heads, S, D]. bias [B, S], or None: 0 for keys that count, as low as can be for padding.

    Keys of a head stay in SBUF for all queries that share it; what lies behind a query is left out.
    """
    (batch, heads, length, _), kv_heads = q_hbm.shape, k_hbm.shape[1]
    out_hbm = nl.ndarray(q_hbm.shape, q_hbm.dtype, buffer=nl.shared_hbm)
    group, out_rows_hbm, bias_sb = heads // kv_heads, as_tokens(out_hbm), None
    for owner in nl.static_range(batch * kv_heads):
        k_sb, v_sb = load_keys(as_tokens(k_hbm), as_tokens(v_hbm), owner * length, length)
        if bias_hbm is not None:
            bias_sb = nl.load(bias_hbm[nl.ds(owner // kv_heads, 1), :])
        for head in nl.static_range(group):
            for at, rows in spans(length, P_MAX):
                own = nl.ds((owner * group + head) * length + at, rows)
                queries = Queries.of(as_tokens(q_hbm)[own, :])
                for first, keys in spans(at + rows, MOVING_MAX):
                    seen = nl.ds(first, keys)
                    own_bias_sb = None if bias_sb is None else bias_sb[:, seen]
                    scores_sb = queries.scores(k_sb[:, seen], own_bias_sb)
                    if first + keys > at + 1:
                        query, key = nl.arange(rows)[:, None], nl.arange(keys)[None, :]
                        scores_sb = nisa.affine_select(
                            at + query >= first + key, scores_sb, on_false_value=HIDDEN
                        )
                    queries.see(scores_sb, v_sb, first // P_MAX)
                nl.store(out_rows_hbm[own, :], queries.context(q_hbm.dtype))
    return out_hbm


@nki.jit
def attention_decode_kernel(q_hbm, k_hbm, v_hbm, past_k_hbm, past_v_hbm, bias_hbm, active_hbm):
    """Attention of new tokens over a cache and themselves: q [B, kv_heads, group * S, D], new k and
    v [B, kv_heads, S, D], cached ones [B, kv_heads, L, D] -> [B, kv_heads, group * S, D].

    bias [B, L] is 0 for cached keys that count; active [B, group * S, S] for new ones, by query.
    The cache is read once.
    """
    (batch, kv_heads, rows, _), new = q_hbm.shape, k_hbm.shape[2]
    length = past_k_hbm.shape[2]
    out_hbm = nl.ndarray(q_hbm.shape, q_hbm.dtype, buffer=nl.shared_hbm)
    past, active_rows_hbm = (as_tokens(past_k_hbm), as_tokens(past_v_hbm)), as_tokens(active_hbm)
    for owner in nl.static_range(batch * kv_heads):
        sequence, out_rows_hbm = owner // kv_heads, as_tokens(out_hbm)
        parts = [(nl.ds(owner * rows + at, size), at, size) for at, size in spans(rows, P_MAX)]
        tiles = [Queries.of(as_tokens(q_hbm)[own, :]) for own, _, _ in parts]
        for first, keys in spans(length, MOVING_MAX):
            k_sb, v_sb = load_keys(*past, owner * length + first, keys)
            bias_sb = nl.load(bias_hbm[nl.ds(sequence, 1), nl.ds(first, keys)])
            for queries in tiles:
                queries.see(queries.scores(k_sb, bias_sb), v_sb)
        for first, keys in spans(new, MOVING_MAX):
            k_sb, v_sb = load_keys(as_tokens(k_hbm), as_tokens(v_hbm), owner * new + first, keys)
            for queries, (_, at, size) in zip(tiles, parts):
                mask = nl.ds(sequence * rows + at, size), nl.ds(first, keys)
                mask_sb = nl.load(active_rows_hbm[mask])
                scores_sb = nisa.tensor_tensor(queries.scores(k_sb), mask_sb, nl.add)
                queries.see(scores_sb, v_sb)
        for queries, (own, _, _) in zip(tiles, parts):
            nl.store(out_rows_hbm[own, :], queries.context(q_hbm.dtype))
    return out_hbm


# --- Projections and experts ----------------------------------------------------------------------


@nki.jit
def linear_kernel(x_hbm, weight_hbm):
    """Linear layer: x [K, T], weight [K, N] -> [N, T], type of x, sums in fp32.

    The weights of 128 features are stationary and up to 512 tokens move. Sizes may be odd.
    """
    (inner, tokens), outer = x_hbm.shape, weight_hbm.shape[1]
    out_hbm = nl.ndarray((outer, tokens), x_hbm.dtype, buffer=nl.shared_hbm)
    row_bytes = x_hbm.itemsize * math.ceil(inner / P_MAX)
    step = max(P_MAX, PIECE_BYTES // row_bytes // P_MAX * P_MAX)
    for start, count in spans(tokens, MOVING_MAX):
        x_sb = load_tiled(x_hbm, inner, (start, count))
        for first, columns in spans(outer, step):
            weight_sb = load_tiled(weight_hbm, inner, (first, columns))
            for at, width in spans(columns, P_MAX):
                out_psum = product(weight_sb, at, width, x_sb, inner)
                out_sb = nisa.tensor_copy(out_psum, dtype=x_hbm.dtype)
                nl.store(out_hbm[nl.ds(first + at, width), nl.ds(start, count)], out_sb)
    return out_hbm


@nki.jit
def all_experts_kernel(x_hbm, affinity_hbm, gate_up_hbm, down_hbm):
    """Every expert on every token, weighted: sum over e of affinity[e] * down(silu(gate) * up).

    x [H, T], affinity [E, T] (0 where a token has not chosen an expert), gate_up [E, H, 2I] (gate,
    then up), down [E, I, H] -> [H, T]. H and I are whole tiles. Expert outputs are rounded to the
    model's type before they are weighted, the sum over experts is fp32.
    """
    (hidden, tokens), dtype = x_hbm.shape, x_hbm.dtype
    experts, inner = down_hbm.shape[0], down_hbm.shape[1]
    out_hbm = nl.ndarray((hidden, tokens), dtype, buffer=nl.shared_hbm)
    ones_sb = nisa.memset((1, P_MAX), 1.0, dtype)
    for start, count in spans(tokens, EXPERT_TOKENS):
        x_sb = load_tiled(x_hbm, hidden, (start, count))
        sum_sb = nisa.memset((P_MAX, hidden // P_MAX, count), 0.0, nl.float32)
        for expert in nl.static_range(experts):
            # gate and up [128, I/128, T]: features on partitions, as down contracts them
            inner_sb = nl.ndarray((P_MAX, inner // P_MAX, count), dtype)
            for first, columns in spans(inner, EXPERT_COLUMNS):
                gate_sb = load_tiled(gate_up_hbm[expert], hidden, (first, columns))
                up_sb = load_tiled(gate_up_hbm[expert], hidden, (inner + first, columns))
                for at, width in spans(columns, P_MAX):
                    gate_psum = product(gate_sb, at, width, x_sb, hidden)
                    up_psum = product(up_sb, at, width, x_sb, hidden)
                    inner_sb[:, (first + at) // P_MAX, :] = swiglu(gate_psum, up_psum, dtype)
            # a token's affinity on all partitions: a product with a column of ones
            own_sb = nl.load(affinity_hbm[nl.ds(expert, 1), nl.ds(start, count)])
            affinity_sb = nisa.tensor_copy(nisa.nc_matmul(ones_sb, own_sb), dtype=dtype)
            for first, columns in spans(hidden, EXPERT_COLUMNS):
                down_sb = load_tiled(down_hbm[expert], inner, (first, columns))
                for at, width in spans(columns, P_MAX):
                    tile = (first + at) // P_MAX
                    made_sb = nisa.tensor_copy(
                        product(down_sb, at, width, inner_sb, inner), dtype=dtype
                    )
                    weighted_sb = nisa.tensor_tensor(
                        made_sb, affinity_sb, nl.multiply, dtype=nl.float32
                    )
                    sum_sb[:, tile, :] = nisa.tensor_tensor(sum_sb[:, tile, :], weighted_sb, nl.add)
        for tile, (at, height) in enumerate(spans(hidden, P_MAX)):
            out_sb = nisa.tensor_copy(sum_sb[:, tile, :], dtype=dtype)
            nl.store(out_hbm[nl.ds(at, height), nl.ds(start, count)], out_sb)
    return out_hbm


def gathered(weight_hbm, rows_sb, at):
    """The 128 rows [128, F] of a weight that one column of ``rows_sb`` names, by indirect DMA."""
    partition, column = nl.arange(P_MAX)[:, None], nl.arange(weight_hbm.shape[1])[None, :]
    return nl.load(weight_hbm[rows_sb[partition, at], column])


@nki.jit
def chosen_experts_kernel(x_hbm, affinity_hbm, gate_rows_hbm, down_rows_hbm, gate_up_hbm, down_hbm):
    """The chosen experts of few tokens: only their weights are read.

    x [H, T]; affinity [128, C], the same on each partition; which rows of the weights belong to a
    choice: int32 [128, C * H/128] of gate_up [E * H, 2I] and [128, C * I/128] of down [E * I, H],
    128 rows a column -> [H, T]. Choices of one token lie side by side. Roundings are those of
    ``all_experts_kernel``.
    """
    (hidden, tokens), dtype = x_hbm.shape, x_hbm.dtype
    choices, inner = affinity_hbm.shape[1], gate_up_hbm.shape[1] // 2
    h_tiles, i_tiles = hidden // P_MAX, inner // P_MAX
    out_hbm = nl.ndarray((hidden, tokens), dtype, buffer=nl.shared_hbm)
    x_sb = load_tiled(x_hbm, hidden, (0, tokens))
    affinity_sb = nl.load(affinity_hbm)
    gate_rows_sb, down_rows_sb = nl.load(gate_rows_hbm), nl.load(down_rows_hbm)
    for token in nl.static_range(tokens):
        sum_sb = nisa.memset((P_MAX, h_tiles), 0.0, nl.float32)
        for number in nl.static_range(choices // tokens):
            choice = token * (choices // tokens) + number
            # gate and up side by side in one bank, a column for 128 features; a row of 2I elements
            # is 128 stationary columns after the other
            both_psum = nl.zeros((P_MAX, 2 * i_tiles), nl.float32, buffer=nl.psum)
            for k in nl.static_range(h_tiles):
                weight_sb = gathered(gate_up_hbm, gate_rows_sb, choice * h_tiles + k)
                for tile in nl.static_range(2 * i_tiles):
                    both_psum[:, nl.ds(tile, 1)] += nisa.nc_matmul(
                        weight_sb[:, nl.ds(tile * P_MAX, P_MAX)], x_sb[:, k, nl.ds(token, 1)]
                    )
            inner_sb = swiglu(both_psum[:, 0:i_tiles], both_psum[:, i_tiles : 2 * i_tiles], dtype)
            made_psum = nl.zeros((P_MAX, h_tiles), nl.float32, buffer=nl.psum)
            for k in nl.static_range(i_tiles):
                weight_sb = gathered(down_hbm, down_rows_sb, choice * i_tiles + k)
                for tile in nl.static_range(h_tiles):
                    made_psum[:, nl.ds(tile, 1)] += nisa.nc_matmul(
                        weight_sb[:, nl.ds(tile * P_MAX, P_MAX)], inner_sb[:, nl.ds(k, 1)]
                    )
            made_sb = nisa.tensor_copy(made_psum, dtype=dtype)
            weighted_sb = nisa.tensor_scalar(
                made_sb, nl.multiply, affinity_sb[:, nl.ds(choice, 1)], dtype=nl.float32
            )
            sum_sb[...] = nisa.tensor_tensor(sum_sb, weighted_sb, nl.add)
        out_sb = nisa.tensor_copy(sum_sb, dtype=dtype)
        for tile in nl.static_range(h_tiles):
            nl.store(
                out_hbm[nl.ds(tile * P_MAX, P_MAX), nl.ds(token, 1)], out_sb[:, nl.ds(tile, 1)]
            )
    return out_hbm


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood, and
    ``prompt_in_chunks``, which tells that calls of ``speculation_length`` tokens feed a prompt.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.prompt_in_chunks = bool(kwargs.pop("prompt_in_chunks", False))
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        super().__init__(**kwargs)


class MixtralInferenceConfig(InferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1
        neuron_config = self.neuron_config
        for name in (
            "flash_decoding_enabled", "k_cache_transposed", "sequence_parallel_enabled",
            "vocab_parallel", "lora_config", "quantized", "is_chunked_prefill",
        ):  # fmt: skip
            if getattr(neuron_config, name, False):
                raise ValueError(f"{name} is not modelled by this file; leave it out.")
        if getattr(neuron_config, "cp_degree", 1) > 1:
            raise ValueError("cp_degree is not modelled by this file; leave it out.")
        tp = neuron_config.tp_degree
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(self, name) % tp:
                raise ValueError(
                    f"{name} {getattr(self, name)} is not divisible by the tensor-parallel degree "
                    f"{tp}; choose a degree that divides it."
                )
        window = getattr(self, "sliding_window", None)
        if window is not None and window < neuron_config.seq_len:
            raise ValueError(
                f"sliding_window {window} is shorter than seq_len {neuron_config.seq_len}, and "
                "every token of this file sees all before it; choose a shorter seq_len."
            )
        if is_nki_enabled(self) and self.hidden_size % P_MAX:
            raise ValueError(
                f"The kernels take a hidden_size of whole tiles of {P_MAX}, got "
                f"{self.hidden_size}; run without --enable-nki."
            )
        if is_nki_enabled(self) and head_dim_of(self) > P_MAX:
            raise ValueError(
                f"The kernels take heads of at most {P_MAX} features, got {head_dim_of(self)}; run "
                "without --enable-nki."
            )

    def get_required_attributes(self) -> List[str]:
        return [
            "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
            "num_key_value_heads", "num_local_experts", "num_experts_per_tok", "pad_token_id",
            "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps",
        ]  # fmt: skip

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


def is_nki_enabled(config: InferenceConfig) -> bool:
    return bool(getattr(config.neuron_config, "nki_enabled", False))


def head_dim_of(config: InferenceConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def inner_size(config: InferenceConfig) -> int:
    """Intermediate size of an expert on one rank, padded to whole tiles."""
    return math.ceil(config.intermediate_size // config.neuron_config.tp_degree / P_MAX) * P_MAX


# --- Modules --------------------------------------------------------------------------------------


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """[B, S, K] -> [K, B * S]."""
    return x.reshape(-1, x.shape[-1]).t().contiguous()


def as_rows(y: torch.Tensor, batch: int) -> torch.Tensor:
    """[N, B * S] -> [B, S, N]."""
    return y.t().reshape(batch, -1, y.shape[0])


def reduced(y: torch.Tensor, config: InferenceConfig) -> torch.Tensor:
    """The ranks' partial results, summed in the type that the configuration names."""
    dtype = getattr(config.neuron_config, "rpl_reduce_dtype", None) or y.dtype
    return reduce_from_tensor_model_parallel_region(y.to(dtype)).to(y.dtype)


class RankWeight(ColumnParallelLinear):
    """The weight [K, N] of one rank; the checkpoint has the ranks' weights one below another.

    It is a ColumnParallelLinear so that the SDK's loader cuts it, whichever way it is parallel.
    """

    def __init__(self, k: int, n: int, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        super().__init__(
            n, k * neuron_config.tp_degree, bias=False, gather_output=False,
            dtype=neuron_config.torch_dtype,
        )  # fmt: skip
        self.nki_enabled = is_nki_enabled(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Columns [K, T] -> [N, T]."""
        return linear(x, self.weight, self.nki_enabled)


def linear(x: torch.Tensor, weight: torch.Tensor, nki_enabled: bool) -> torch.Tensor:
    """x [K, T], weight [K, N] -> [N, T]."""
    return linear_kernel(x, weight) if nki_enabled else torch.matmul(weight.t(), x)


class MixtralRMSNorm(nn.Module):
    """RMSNorm over features (Zhang and Sennrich 2019), in fp32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Router(nn.Module):
    """Which experts a token goes to, and how much each counts; equal on all ranks."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.experts, self.each = config.num_local_experts, config.num_experts_per_tok
        self.nki_enabled = is_nki_enabled(config)
        dtype = config.neuron_config.torch_dtype
        self.weight = nn.Parameter(torch.empty(config.hidden_size, self.experts, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Columns [H, T] -> affinities [T, k] that sum to 1, and their experts [T, k].

        The softmax is over all experts, in fp32; the best k are then scaled to a sum of 1.
        """
        logits = linear(x, self.weight, self.nki_enabled).t()
        _, chosen = torch.topk(logits, self.each, dim=-1)
        shares = torch.softmax(logits.to(torch.float32), dim=-1).gather(-1, chosen)
        return (shares / shares.sum(-1, keepdim=True)).to(x.dtype), chosen


class MixtralExperts(nn.Module):
    """Router and experts: a mixture of MLPs, each sharded over the ranks like a Llama's."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.nki_enabled = config, is_nki_enabled(config)
        self.experts, self.hidden = config.num_local_experts, config.hidden_size
        self.inner = inner_size(config)
        self.router = Router(config)
        self.gate_up_proj = RankWeight(self.experts * self.hidden, 2 * self.inner, config)
        self.down_proj = RankWeight(self.experts * self.inner, self.hidden, config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        x, (batch, length) = as_columns(hidden), hidden.shape[:2]
        affinities, chosen = self.router(x)
        # as NxD decides: weights are picked where that reads fewer than all experts have
        few = length == 1 and chosen.numel() < self.experts
        partial = (self.chosen_experts if few else self.all_experts)(x, affinities, chosen)
        return as_rows(reduced(partial, self.config), batch)

    def all_experts(
        self, x: torch.Tensor, affinities: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Columns [H, T] -> this rank's part of the weighted sum over all experts [H, T]."""
        gate_up = self.gate_up_proj.weight.reshape(self.experts, self.hidden, 2 * self.inner)
        down = self.down_proj.weight.reshape(self.experts, self.inner, self.hidden)
        none = torch.zeros((x.shape[1], self.experts), dtype=x.dtype, device=x.device)
        weights = none.scatter(1, chosen, affinities).t().contiguous()
        if self.nki_enabled:
            return all_experts_kernel(x, weights, gate_up, down)
        gate, up = torch.matmul(gate_up.transpose(1, 2), x).chunk(2, dim=1)
        made = torch.matmul(down.transpose(1, 2), nn.functional.silu(gate) * up)
        return (made.float() * weights[:, None].float()).sum(0).to(x.dtype)

    def chosen_experts(
        self, x: torch.Tensor, affinities: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """The same from the weights of the chosen experts only."""
        flat = chosen.reshape(-1)
        if self.nki_enabled:
            rows = [self.rows_of(flat, size) for size in (self.hidden, self.inner)]
            spread = affinities.reshape(1, -1).expand(P_MAX, -1).contiguous()
            weights = self.gate_up_proj.weight, self.down_proj.weight
            return chosen_experts_kernel(x, spread, *rows, *weights)
        gate_up = self.gate_up_proj.weight.reshape(self.experts, self.hidden, -1)[flat]
        down = self.down_proj.weight.reshape(self.experts, self.inner, -1)[flat]
        each = x.t().repeat_interleave(chosen.shape[1], dim=0)[:, :, None]  # [C, H, 1]
        gate, up = torch.matmul(gate_up.transpose(1, 2), each).chunk(2, dim=1)
        made = torch.matmul(down.transpose(1, 2), nn.functional.silu(gate) * up)[:, :, 0]
        weighted = made.float() * affinities.reshape(-1, 1).float()
        return weighted.reshape(*chosen.shape, -1).sum(1).t().to(x.dtype)

    @staticmethod
    def rows_of(flat: torch.Tensor, size: int) -> torch.Tensor:
        """Experts [C] -> their rows in a weight of ``size`` rows an expert, int32 [128, C * tiles]:
        128 rows a column."""
        within = torch.arange(size, device=flat.device)
        rows = flat[:, None] * size + within  # [C, size]
        return rows.reshape(-1, P_MAX).t().to(torch.int32).contiguous()


class MixtralAttention(nn.Module):
    """Grouped-query attention, in kernels but for the rotation."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim_of(config)
        self.nki_enabled = is_nki_enabled(config)
        self.left_padding = config.neuron_config.padding_side == "left"
        tp = config.neuron_config.tp_degree
        self.queries, self.keys = config.num_attention_heads // tp, config.num_key_value_heads // tp
        width = (self.queries + 2 * self.keys) * self.head_dim
        self.qkv_proj = RankWeight(config.hidden_size, width, config)
        self.o_proj = RankWeight(self.queries * self.head_dim, config.hidden_size, config)
        # a list: the loader would cast a buffer to the model's type, and cost bf16 its positions
        self.frequencies = [
            config.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)
        ]

    def forward(self, hidden: torch.Tensor, **given: Any) -> Tuple[Any, ...]:
        """[B, S, H] -> attention [B, S, H], (K, V) [B, heads, S, D], cos, sin.

        ``given`` by the base class: position_ids [B, S]; attention_mask and active_mask, True where
        keys count; past_key_value, and cos_cache and sin_cache of the layer before, or None.
        """
        batch = hidden.shape[0]
        cos, sin = given.get("cos_cache"), given.get("sin_cache")
        if cos is None:
            cos, sin = self.tables(given["position_ids"], hidden.dtype)
        heads = self.qkv_proj(as_columns(hidden)).unflatten(0, (-1, self.head_dim))
        heads = heads.unflatten(2, (batch, -1)).permute(2, 0, 3, 1)  # [B, heads, S, D]
        q, k, v = heads.split([self.queries, self.keys, self.keys], dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mask, active, past = (
            given.get(name) for name in ("attention_mask", "active_mask", "past_key_value")
        )
        if mask.dim() == 2:  # of a prefix in blocks of the cache: the caller's int32 [B, prefix]
            mask = mask.to(torch.bool)[:, None, None]
        if past is not None and active is None:
            active = torch.ones((batch, 1, 1, 1), dtype=torch.bool, device=q.device)
        seen = [(k, v, mask)] if past is None else [(*past, mask), (k, v, active)]
        attend = self.attend_with_kernels if self.nki_enabled else self.attend
        context = attend(q, seen).transpose(1, 2).flatten(2)
        out = as_rows(reduced(self.o_proj(as_columns(context)), self.config), batch)
        return out, (k, v), cos, sin

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """position_ids [B, S] -> cos, sin [B, S, D / 2], angles in fp32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.to(torch.float32)[:, :, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def attend_with_kernels(
        self, q: torch.Tensor, seen: Sequence[Tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        """``attend`` in kernels: whole prompts, or new tokens behind a cache."""
        *others, (k, v, mask) = seen
        if not others:
            padding = key_bias(mask[:, 0, -1], q.dtype) if self.left_padding else None
            return attention_prefill_kernel(q.contiguous(), k.contiguous(), v.contiguous(), padding)
        ((past_k, past_v, past_mask),), group = others, self.queries // self.keys
        rows = q.reshape(q.shape[0], self.keys, -1, self.head_dim)  # queries of a KV head together
        active = key_bias(mask[:, 0], q.dtype).repeat(1, group, 1)
        bias = key_bias(past_mask[:, 0, 0], q.dtype)
        inputs = rows, k.contiguous(), v.contiguous(), past_k, past_v, bias, active
        return attention_decode_kernel(*inputs).reshape(q.shape)

    def attend(self, q: torch.Tensor, seen: Sequence[Tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """One softmax over all (keys, values, mask) that are ``seen``: the cache and new tokens."""
        group, root = self.queries // self.keys, math.sqrt(self.head_dim)
        scores = []
        for keys, _, mask in seen:
            scored = torch.matmul(q, keys.repeat_interleave(group, dim=1).transpose(2, 3)) / root
            lowest = torch.finfo(scored.dtype).min
            scores.append(torch.where(mask, scored, lowest).to(torch.float32))
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(q.dtype)
        parts = weights.split([part.shape[-1] for part in scores], dim=-1)
        context, *more = (
            torch.matmul(part, values.repeat_interleave(group, dim=1))
            for part, (_, values, _) in zip(parts, seen)
        )
        return context + more[0] if more else context


def key_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: 0 where the mask is True, else half of the lowest number."""
    lowest = torch.finfo(dtype).min / 2
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of [B, n, S, D], halves of a head as pairs."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MixtralDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, experts, residual."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.self_attn = MixtralAttention(config)
        self.block_sparse_moe = MixtralExperts(config)
        self.input_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Tuple[Any, ...]:
        """[B, S, H] -> the same, (K, V), cos, sin; a fifth item where ``residual`` is passed, as
        NxDI 0.3 and later do."""
        made, *results = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden = hidden_states + made
        hidden = hidden + self.block_sparse_moe(self.post_attention_layernorm(hidden))
        return hidden, *results, *([None] if "residual" in kwargs else [])


class MixtralHead(RankWeight):
    """The LM head, sharded over the vocabulary; logits are gathered unless the device samples."""

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        tp = config.neuron_config.tp_degree
        super().__init__(config.hidden_size, config.vocab_size // tp, config)
        self.gathers = gather_output

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """[B, S, H] -> logits [B, S, V] (of this rank where the device samples)."""
        logits = as_rows(super().forward(as_columns(x)), x.shape[0])
        return gather_from_tensor_model_parallel_region(logits) if self.gathers else logits


class NeuronMixtralModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.on_device_sampling = neuron_config.on_device_sampling_config is not None
        self.tp_degree = neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = neuron_config.max_batch_size
        self.buckets = neuron_config.buckets

    def init_model(self, config: InferenceConfig) -> None:
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=config.neuron_config.torch_dtype,
            shard_across_embedding=True,
        )
        self.layers = nn.ModuleList(
            MixtralDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = MixtralHead(config, gather_output=not self.on_device_sampling)


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------


def by_ranks(weight: torch.Tensor, tp: int, dim: int) -> torch.Tensor:
    """A weight [.., K, N] cut along ``dim`` -> the ranks' [K', N'], one below another."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in weight.chunk(tp, dim=dim)])


def padded(weight: torch.Tensor, dim: int, tp: int, size: int) -> torch.Tensor:
    """Each rank's share of ``dim``, filled up with zeros to ``size``: silu(0) * 0 adds nothing."""
    shares = []
    for share in weight.chunk(tp, dim=dim):
        shape = list(share.shape)
        shape[dim] = size - shape[dim]
        shares.append(torch.cat((share, share.new_zeros(shape)), dim=dim))
    return torch.cat(shares, dim=dim)


def convert_layer(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """One layer: heads of a rank side by side, experts stacked, everything contraction first."""
    tp, inner = config.neuron_config.tp_degree, inner_size(config)
    attention, experts = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
    qkv = [state.pop(f"{attention}{name}_proj.weight").t().chunk(tp, dim=1) for name in "qkv"]
    state[f"{attention}qkv_proj.weight"] = torch.cat(
        [torch.cat(parts, dim=1) for parts in zip(*qkv)]
    )
    out = state[f"{attention}o_proj.weight"]
    state[f"{attention}o_proj.weight"] = by_ranks(out.t(), tp, 0)
    state[f"{experts}router.weight"] = state.pop(f"{experts}gate.weight").t()

    def stacked(name: str) -> torch.Tensor:  # [E, K, N]
        numbers = range(config.num_local_experts)
        return torch.stack([state.pop(f"{experts}experts.{e}.{name}.weight").t() for e in numbers])

    gate, up = (padded(stacked(name), 2, tp, inner) for name in ("w1", "w3"))
    both = [torch.cat(parts, dim=2) for parts in zip(gate.chunk(tp, 2), up.chunk(tp, 2))]
    state[f"{experts}gate_up_proj.weight"] = by_ranks(torch.cat(both, dim=2), tp, 2)
    state[f"{experts}down_proj.weight"] = by_ranks(padded(stacked("w2"), 1, tp, inner), tp, 1)


class NeuronMixtralForCausalLM(NeuronBaseForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronMixtralModel

    def enable_speculation(self, *args: Any, **kwargs: Any) -> None:
        """With the single-token graph, which NxDI 0.2 and later leave out: generation needs it."""
        super().enable_speculation(*args, **kwargs)
        decodes = hasattr(self, "token_generation_model")
        if getattr(self.neuron_config, "prompt_in_chunks", False) and not decodes:
            self.enable_token_generation()

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> MixtralForCausalLM:
        return MixtralForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's."""
        state, tp = dict(state_dict), config.neuron_config.tp_degree
        for layer in range(config.num_hidden_layers):
            convert_layer(state, f"layers.{layer}.", config)
        head = state.get("lm_head.weight", state["embed_tokens.weight"])
        state["lm_head.weight"] = by_ranks(head.t(), tp, 1)
        state["rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
        return state

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """A tied head has been made of the embedding already."""

    @classmethod
    def get_config_cls(cls) -> Type[MixtralInferenceConfig]:
        return MixtralInferenceConfig
