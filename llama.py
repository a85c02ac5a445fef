"""Llama for AWS Trainium: NKI kernels, and the NxD-Inference modules that call them.

One file to upload: it imports torch, numpy, transformers and the Neuron SDK, nothing else. Read it
from top to bottom: limits of the core, the weight layout, tile helpers, kernels in model order, the
modules, and how a Hugging Face checkpoint becomes the weights of this model.

Axis letters used throughout:

    T  tokens of one call (batch times sequence)     H  hidden size
    K  contraction size of a product                 N  output features of a product
    P  partitions of a tile (at most 128)            F  intermediate size of the MLP
    D  head dimension                                B, S  batch, sequence length

Buffers end in ``_hbm``, ``_sb`` (SBUF) and ``_psum``. Kernels take and return HBM tensors; the
helpers above them work on tiles that are already on chip. Interfaces follow NxD Inference 0.1 to
0.6 (github.com/aws-neuron/neuronx-distributed-inference), the kernel language SDK 2.21.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    NeuronBaseForCausalLM,
    NeuronBaseModel,
)
from torch import nn
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN

# --- Limits of a NeuronCore-v2 (aws-neuron-sdk v2.21.1, general/nki/programming_model.rst) --------

P_MAX = 128  # partitions of SBUF, PSUM and the TensorE array
MOVING_MAX = 512  # free size of the moving matmul operand; one PSUM bank of fp32


# --- Weight layout --------------------------------------------------------------------------------
#
#   tensor               shape per rank              partition axis   written by
#   HF weight            [N, K]                      -                checkpoint
#   kernel weight (HBM)  [blocks, 128, k_tiles, nb]  the 128          block_weight(), at load time
#   kernel weight (SBUF) [128, k_tiles, nb]          contraction      load_weight_block()
#
# A block holds nb <= 512 output features: element [b, p, k, n] is W[b * nb + n, k * 128 + p]. One
# load brings a whole block, and each partition reads k_tiles * nb elements that are contiguous in
# HBM: 2.8 KiB for the smallest product of SmolLM2-135M, 16 KiB for Llama-3.2-1B (DMA wants 2 KiB
# or more per row). Prefill and decode use the same blocks, so no weight is on the device twice.


class BlockLayout(NamedTuple):
    """How an [N, K] weight is cut: ``blocks`` blocks of ``nb`` features, ``k_tiles`` of 128 rows."""

    n: int
    k: int
    blocks: int
    nb: int
    k_tiles: int

    @classmethod
    def of(cls, n: int, k: int) -> BlockLayout:
        blocks = math.ceil(n / MOVING_MAX)
        nb = math.ceil(math.ceil(n / blocks) / 16) * 16  # rows stay multiples of 32 bytes
        return cls(n, k, math.ceil(n / nb), nb, math.ceil(k / P_MAX))

    @property
    def block_size(self) -> int:
        return P_MAX * self.k_tiles * self.nb


def block_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [blocks, 128 * k_tiles * nb], zero-padded at both edges."""
    layout = BlockLayout.of(*weight.shape)
    rows, columns = layout.blocks * layout.nb, layout.k_tiles * P_MAX
    padded = weight.new_zeros(rows, columns)
    padded[: layout.n, : layout.k] = weight
    tiled = padded.view(layout.blocks, layout.nb, layout.k_tiles, P_MAX)
    return tiled.permute(0, 3, 2, 1).reshape(layout.blocks, layout.block_size)


# --- Tile helpers: everything here works on SBUF and PSUM tiles -----------------------------------


def load_weight_block(weight_hbm, block, layout):
    """Block ``block`` of a kernel weight -> [128, k_tiles, nb] @ SBUF, one contiguous row each."""
    blocked_hbm = weight_hbm.reshape((layout.blocks, P_MAX, layout.k_tiles, layout.nb))
    weight_sb = nl.ndarray((P_MAX, layout.k_tiles, layout.nb), weight_hbm.dtype, buffer=nl.sbuf)
    weight_sb[...] = nl.load(blocked_hbm[block])
    return weight_sb


def broadcast_row(row_hbm, partitions):
    """[1, H] @ HBM -> [partitions, H] fp32 @ SBUF: a ones-matmul copies the row exactly."""
    width = row_hbm.shape[1]
    row_sb = nl.ndarray((1, width), row_hbm.dtype, buffer=nl.sbuf)
    row_sb[...] = nl.load(row_hbm)
    ones_sb = nl.ndarray((1, partitions), row_hbm.dtype, buffer=nl.sbuf)
    ones_sb[...] = nisa.memset((1, partitions), 1.0, row_hbm.dtype)
    full_sb = nl.ndarray((partitions, width), nl.float32, buffer=nl.sbuf)
    for start in nl.static_range(0, width, MOVING_MAX):
        size = min(MOVING_MAX, width - start)
        piece_psum = nl.ndarray((partitions, size), nl.float32, buffer=nl.psum)
        piece_psum[...] = nisa.nc_matmul(ones_sb, row_sb[:, nl.ds(start, size)])
        full_sb[:, nl.ds(start, size)] = nisa.tensor_copy(piece_psum)
    return full_sb


def rmsnorm_tile(x_sb, gain_sb, eps):
    """RMSNorm of [T, H] @ SBUF, T on partitions -> the same shape and type.

    fp32 throughout, one rounding at the end, as the reference does (Zhang and Sennrich 2019).
    """
    tokens, hidden = x_sb.shape
    eps_sb = nl.ndarray((tokens, 1), nl.float32, buffer=nl.sbuf)
    eps_sb[...] = nisa.memset((tokens, 1), eps, nl.float32)
    squares_sb = nl.ndarray((tokens, hidden), nl.float32, buffer=nl.sbuf)
    total_sb = nl.ndarray((tokens, 1), nl.float32, buffer=nl.sbuf)
    squares_sb[...] = nisa.activation_reduce(
        nl.square, x_sb, reduce_op=nl.add, reduce_res=total_sb, dtype=nl.float32
    )
    rstd_sb = nl.ndarray((tokens, 1), nl.float32, buffer=nl.sbuf)
    rstd_sb[...] = nisa.activation(nl.rsqrt, total_sb, bias=eps_sb, scale=1.0 / hidden)
    scaled_sb = nl.ndarray((tokens, hidden), nl.float32, buffer=nl.sbuf)
    scaled_sb[...] = nisa.tensor_scalar(x_sb, nl.multiply, rstd_sb, dtype=nl.float32)
    out_sb = nl.ndarray((tokens, hidden), x_sb.dtype, buffer=nl.sbuf)
    out_sb[...] = nisa.tensor_tensor(scaled_sb, gain_sb, nl.multiply)
    return out_sb


def transpose_tile(x_sb):
    """[T, K] @ SBUF, T on partitions -> [128, k_tiles, T] with the contraction on partitions.

    Rows past K of the last tile stay unwritten: no product reads them.
    """
    tokens, k = x_sb.shape
    out_sb = nl.ndarray((P_MAX, math.ceil(k / P_MAX), tokens), x_sb.dtype, buffer=nl.sbuf)
    for tile in nl.affine_range(k // P_MAX):
        tile_psum = nl.ndarray((P_MAX, tokens), x_sb.dtype, buffer=nl.psum)
        tile_psum[...] = nisa.nc_transpose(x_sb[:, nl.ds(tile * P_MAX, P_MAX)])
        out_sb[:, tile, :] = nisa.tensor_copy(tile_psum)
    if k % P_MAX:
        full, tail = k // P_MAX, k % P_MAX
        tail_psum = nl.ndarray((tail, tokens), x_sb.dtype, buffer=nl.psum)
        tail_psum[...] = nisa.nc_transpose(x_sb[:, nl.ds(full * P_MAX, tail)])
        out_sb[0:tail, full, :] = nisa.tensor_copy(tail_psum)
    return out_sb


def project_block(xt_sb, weight_sb, k, size):
    """One block of ``x @ W.T``: [128, k_tiles, T] and [128, k_tiles, nb] -> [T, size] fp32 @ PSUM.

    Tokens are stationary: the result has tokens on partitions, ready to be stored in rows.
    """
    tokens = xt_sb.shape[2]
    acc_psum = nl.zeros((tokens, size), nl.float32, buffer=nl.psum)
    for tile in nl.affine_range(k // P_MAX):
        acc_psum[...] += nisa.nc_matmul(xt_sb[:, tile, :], weight_sb[:, tile, 0:size])
    if k % P_MAX:
        full, tail = k // P_MAX, k % P_MAX
        acc_psum[...] += nisa.nc_matmul(xt_sb[0:tail, full, :], weight_sb[0:tail, full, 0:size])
    return acc_psum


def project_tile(xt_sb, weight_hbm, out_hbm, row, layout):
    """``x @ W.T`` for up to 128 tokens: streams W block by block, stores rows of ``out_hbm``."""
    tokens = xt_sb.shape[2]

    def one_block(block, size):
        weight_sb = load_weight_block(weight_hbm, block, layout)
        acc_psum = project_block(xt_sb, weight_sb, layout.k, size)
        out_sb = nl.ndarray((tokens, size), out_hbm.dtype, buffer=nl.sbuf)
        out_sb[...] = nisa.tensor_copy(acc_psum)
        nl.store(out_hbm[nl.ds(row, tokens), nl.ds(block * layout.nb, size)], out_sb)

    last = layout.n - (layout.blocks - 1) * layout.nb
    full_blocks = layout.blocks if last == layout.nb else layout.blocks - 1
    for block in nl.affine_range(full_blocks):
        one_block(block, layout.nb)
    if last != layout.nb:
        one_block(layout.blocks - 1, last)


def token_tiles(tokens):
    """(start, size) of each tile of at most 128 tokens; sizes are known while tracing."""
    return [(start, min(P_MAX, tokens - start)) for start in range(0, tokens, P_MAX)]


# --- Kernels, in the order of the model -----------------------------------------------------------


@nki.jit
def rmsnorm_kernel(x_hbm, gain_hbm, eps):
    """RMSNorm: x [T, H], gain [1, H] -> [T, H], type of x."""
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    tokens, hidden = x_hbm.shape
    gain_sb = broadcast_row(gain_hbm, min(tokens, P_MAX))
    for start, size in token_tiles(tokens):
        x_sb = nl.ndarray((size, hidden), x_hbm.dtype, buffer=nl.sbuf)
        x_sb[...] = nl.load(x_hbm[nl.ds(start, size), :])
        normed_sb = rmsnorm_tile(x_sb, gain_sb[0:size, :], eps)
        nl.store(out_hbm[nl.ds(start, size), :], normed_sb)
    return out_hbm


@nki.jit
def linear_kernel(x_hbm, weight_hbm, n):
    """Linear layer: x [T, K], kernel weight of [n, K] -> [T, n], type of x.

    QKV projection (q, k and v rows in one weight), output projection and LM head.
    """
    tokens, k = x_hbm.shape
    out_hbm = nl.ndarray((tokens, n), x_hbm.dtype, buffer=nl.shared_hbm)
    layout = BlockLayout.of(n, k)
    for start, size in token_tiles(tokens):
        x_sb = nl.ndarray((size, k), x_hbm.dtype, buffer=nl.sbuf)
        x_sb[...] = nl.load(x_hbm[nl.ds(start, size), :])
        project_tile(transpose_tile(x_sb), weight_hbm, out_hbm, start, layout)
    return out_hbm


@nki.jit
def swiglu_mlp_kernel(x_hbm, gate_hbm, up_hbm, down_hbm, f):
    """SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    x [T, H]; kernel weights of gate and up [f, H] and of down [H, f] -> [T, H], type of x. gate and
    up are rounded to x's type before SiLU and before the product, as the reference rounds them.
    """
    tokens, hidden = x_hbm.shape
    out_hbm = nl.ndarray((tokens, hidden), x_hbm.dtype, buffer=nl.shared_hbm)
    wide, narrow = BlockLayout.of(f, hidden), BlockLayout.of(hidden, f)
    for start, size in token_tiles(tokens):
        x_sb = nl.ndarray((size, hidden), x_hbm.dtype, buffer=nl.sbuf)
        x_sb[...] = nl.load(x_hbm[nl.ds(start, size), :])
        product_sb = gated_product(transpose_tile(x_sb), gate_hbm, up_hbm, wide)
        project_tile(transpose_tile(product_sb), down_hbm, out_hbm, start, narrow)
    return out_hbm


def gated_product(xt_sb, gate_hbm, up_hbm, layout):
    """silu(x @ gate.T) * (x @ up.T) -> [T, F] @ SBUF in x's type."""
    tokens, dtype = xt_sb.shape[2], xt_sb.dtype
    product_sb = nl.ndarray((tokens, layout.n), dtype, buffer=nl.sbuf)

    def one_block(block, size):
        columns = nl.ds(block * layout.nb, size)
        gate_w_sb = load_weight_block(gate_hbm, block, layout)
        gate_psum = project_block(xt_sb, gate_w_sb, layout.k, size)
        gate_sb = nl.ndarray((tokens, size), dtype, buffer=nl.sbuf)
        gate_sb[...] = nisa.tensor_copy(gate_psum)
        silu_sb = nl.ndarray((tokens, size), dtype, buffer=nl.sbuf)
        silu_sb[...] = nisa.activation(nl.silu, gate_sb)
        up_w_sb = load_weight_block(up_hbm, block, layout)
        up_psum = project_block(xt_sb, up_w_sb, layout.k, size)
        up_sb = nl.ndarray((tokens, size), dtype, buffer=nl.sbuf)
        up_sb[...] = nisa.tensor_copy(up_psum)
        product_sb[:, columns] = nisa.tensor_tensor(silu_sb, up_sb, nl.multiply)

    last = layout.n - (layout.blocks - 1) * layout.nb
    full_blocks = layout.blocks if last == layout.nb else layout.blocks - 1
    for block in nl.affine_range(full_blocks):
        one_block(block, layout.nb)
    if last != layout.nb:
        one_block(layout.blocks - 1, last)
    return product_sb


# --- Configuration --------------------------------------------------------------------------------


class NeuronConfigNKI(NeuronConfig):
    """NeuronConfig with ``nki_enabled``: run the kernels of this file (default False).

    The driver says ``enable_nki``, a saved configuration ``nki_enabled``; both are understood.
    """

    def __init__(self, **kwargs: Any) -> None:
        saved = kwargs.pop("nki_enabled", False)
        self.nki_enabled = bool(kwargs.pop("enable_nki", saved))
        super().__init__(**kwargs)


class LlamaInferenceConfig(InferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    def add_derived_config(self) -> None:
        self.num_cores_per_group = 1

    def get_required_attributes(self) -> List[str]:
        return [
            "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
            "pad_token_id", "vocab_size", "max_position_embeddings", "rope_theta",
            "rms_norm_eps", "hidden_act",
        ]  # fmt: skip

    @classmethod
    def get_neuron_config_cls(cls) -> Type[NeuronConfigNKI]:
        return NeuronConfigNKI


class Sizes(NamedTuple):
    """Sizes that modules and checkpoint conversion share; ``*_rank`` are per tensor-parallel rank.

    KV heads that the degree does not divide are padded with zero heads (and their query heads with
    them), which changes no result: a zero head's output meets zero columns of the output weight.
    """

    head_dim: int
    group: int
    kv_heads: int
    q_heads: int
    kv_rank: int
    q_rank: int
    f_rank: int
    vocab_rank: int

    @classmethod
    def of(cls, config: InferenceConfig) -> Sizes:
        tp = config.neuron_config.tp_degree
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        group = heads // kv
        for name, size in (("intermediate_size", config.intermediate_size),
                           ("vocab_size", config.vocab_size)):  # fmt: skip
            if size % tp:
                raise ValueError(
                    f"{name} {size} is not divisible by the tensor-parallel degree {tp}; choose a "
                    "degree that divides it."
                )
        kv_padded = math.ceil(kv / tp) * tp
        return cls(
            head_dim, group, kv_padded, kv_padded * group, kv_padded // tp,
            kv_padded * group // tp, config.intermediate_size // tp, config.vocab_size // tp,
        )  # fmt: skip


def is_nki_enabled(config: InferenceConfig) -> bool:
    return bool(getattr(config.neuron_config, "nki_enabled", False))


# --- Modules --------------------------------------------------------------------------------------


class NeuronLlamaRMSNorm(nn.Module):
    """RMSNorm over the last axis; fp32 inside, one rounding to the input's type."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, nki_enabled: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.nki_enabled = nki_enabled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.nki_enabled:
            rows = hidden.reshape(-1, hidden.shape[-1])
            normed = rmsnorm_kernel(rows, self.weight.reshape(1, -1), self.eps)
            return normed.reshape(hidden.shape)
        x = hidden.to(torch.float32)
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * rstd * self.weight.to(torch.float32)).to(hidden.dtype)


class BlockedWeight(ColumnParallelLinear):
    """A weight in kernel layout, [blocks, block_size] per rank.

    It is a ColumnParallelLinear so that the SDK's loader cuts it for the ranks: the full tensor is
    the ranks' blocks one after another, whichever way the product itself is parallel.
    """

    def __init__(self, n: int, k: int, tp_degree: int, dtype: torch.dtype) -> None:
        layout = BlockLayout.of(n, k)
        super().__init__(
            layout.block_size,
            layout.blocks * tp_degree,
            bias=False,
            gather_output=False,
            dtype=dtype,
        )
        self.n = n

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        """x [..., K] -> [..., n], this rank's share (column) or partial sum (row parallel)."""
        rows = x.reshape(-1, x.shape[-1])
        return linear_kernel(rows, self.weight, self.n).reshape(*x.shape[:-1], self.n)


def column_linear(config: InferenceConfig, k: int, n: int, bias: bool = False) -> nn.Module:
    """Plain column-parallel layer in the model's type; its output stays sharded."""
    return ColumnParallelLinear(
        k, n, bias=bias, gather_output=False, dtype=config.neuron_config.torch_dtype
    )


def row_linear(config: InferenceConfig, k: int, n: int, bias: bool = False) -> nn.Module:
    """Plain row-parallel layer: sharded input, all-reduced output."""
    neuron_config = config.neuron_config
    return RowParallelLinear(
        k, n, bias=bias, input_is_parallel=True, dtype=neuron_config.torch_dtype,
        reduce_dtype=getattr(neuron_config, "rpl_reduce_dtype", None) or neuron_config.torch_dtype,
    )  # fmt: skip


class NeuronLlamaMLP(nn.Module):
    """SwiGLU MLP: one kernel per rank and an all-reduce, or three parallel layers."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        sizes, hidden = Sizes.of(config), config.hidden_size
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        bias = bool(getattr(config, "mlp_bias", False))
        self.nki_enabled = is_nki_enabled(config)
        self.f_rank = sizes.f_rank
        if self.nki_enabled:
            _refuse_for_kernels(bias, "mlp_bias")
            _refuse_for_kernels(config.hidden_act != "silu", f"hidden_act {config.hidden_act}")
            self.gate_proj = BlockedWeight(sizes.f_rank, hidden, tp, dtype)
            self.up_proj = BlockedWeight(sizes.f_rank, hidden, tp, dtype)
            self.down_proj = BlockedWeight(hidden, sizes.f_rank, tp, dtype)
        else:
            self.act_fn = ACT2FN[config.hidden_act]
            self.gate_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.up_proj = column_linear(config, hidden, config.intermediate_size, bias)
            self.down_proj = row_linear(config, config.intermediate_size, hidden, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        if not self.nki_enabled:
            return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        rows = hidden.reshape(-1, hidden.shape[-1])
        partial = swiglu_mlp_kernel(
            rows, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, self.f_rank
        )
        return reduce_from_tensor_model_parallel_region(partial).reshape(hidden.shape)


def _refuse_for_kernels(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(
            f"The kernels do not cover {what}, expected a Llama with SiLU and without biases; run "
            "without --enable-nki."
        )


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of the rotary position embedding, half-rotation convention (Su et al. 2021).

    Frequencies are a Python list: the loader casts every buffer to the model's type, which would
    cost bf16 models their positions. Scaling "llama3" and "linear" follow the Hugging Face config.
    """

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.dim = Sizes.of(config).head_dim
        self.inv_freq = _inverse_frequencies(config, self.dim)

    def get_inv_freqs(self, device: Optional[torch.device] = None) -> torch.Tensor:
        return torch.tensor(self.inv_freq, dtype=torch.float32, device=device)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> Tuple[torch.Tensor, ...]:
        """position_ids [B, S] -> cos, sin [B, S, D] in ``dtype``, computed in fp32 elementwise."""
        inv_freq = self.get_inv_freqs(position_ids.device)
        angles = position_ids[:, :, None].to(torch.float32) * inv_freq[None, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _inverse_frequencies(config: InferenceConfig, dim: int) -> List[float]:
    """1 / theta^(2i/D), scaled as ``rope_scaling`` says (transformers, modeling_rope_utils)."""
    base = [config.rope_theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    scaling = getattr(config, "rope_scaling", None)
    if scaling is None:
        return base
    scaling = dict(scaling) if isinstance(scaling, dict) else vars(scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor", 1.0)
    if kind == "default":
        return base
    if kind == "linear":
        return [f / factor for f in base]
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind}, expected llama3, linear or default.")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # rotations within the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        return frequency * (smooth + (1 - smooth) / factor)

    return [scaled(f) for f in base]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, heads, S, D] with cos, sin [B, S, D]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]


class NeuronLlamaAttention(nn.Module):
    """Grouped-query attention; returns the new tokens' K and V for the base class's cache."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.sizes = sizes = Sizes.of(config)
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        hidden, dim = config.hidden_size, sizes.head_dim
        bias = bool(getattr(config, "attention_bias", False))
        self.nki_enabled = is_nki_enabled(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.split = [heads * dim for heads in (sizes.q_rank, sizes.kv_rank, sizes.kv_rank)]
        if self.nki_enabled:
            _refuse_for_kernels(bias, "attention_bias")
            self.qkv_proj = BlockedWeight(sum(self.split), hidden, tp, dtype)
            self.o_proj = BlockedWeight(hidden, sizes.q_rank * dim, tp, dtype)
        else:
            self.q_proj = column_linear(config, hidden, sizes.q_heads * dim, bias)
            self.k_proj = column_linear(config, hidden, sizes.kv_heads * dim, bias)
            self.v_proj = column_linear(config, hidden, sizes.kv_heads * dim, bias)
            self.o_proj = row_linear(config, sizes.q_heads * dim, hidden, bias)

    def project_qkv(self, hidden: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """[B, S, H] -> q [B, q_rank, S, D], k and v [B, kv_rank, S, D]."""
        if self.nki_enabled:
            parts = torch.split(self.qkv_proj(hidden), self.split, dim=-1)
        else:
            parts = (self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden))
        batch, length = hidden.shape[:2]
        return tuple(
            part.reshape(batch, length, -1, self.sizes.head_dim).transpose(1, 2) for part in parts
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        active_mask: Optional[torch.Tensor] = None,
        cos_cache: Optional[torch.Tensor] = None,
        sin_cache: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, Tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
        q, k, v = self.project_qkv(hidden_states)
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(position_ids, hidden_states.dtype)
        q, k = rotate(q, cos_cache, sin_cache), rotate(k, cos_cache, sin_cache)
        if past_key_value is None:
            context = self.attend_prefill(q, k, v, attention_mask)
        else:
            context = self.attend_decode(q, k, v, past_key_value, attention_mask, active_mask)
        batch, _, length, _ = context.shape
        merged = context.transpose(1, 2).reshape(batch, length, -1)
        if self.nki_enabled:
            output = reduce_from_tensor_model_parallel_region(self.o_proj(merged))
        else:
            output = self.o_proj(merged)
        return output, (k, v), cos_cache, sin_cache

    def scores(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scaled and masked scores in fp32; the product is rounded to the model's type before."""
        product = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.sizes.head_dim)
        masked = torch.where(mask, product, torch.finfo(product.dtype).min)
        return masked.to(torch.float32)

    def repeat(self, kv: torch.Tensor) -> torch.Tensor:
        """[B, kv_rank, S, D] -> [B, q_rank, S, D]: each KV head serves its group."""
        return kv.repeat_interleave(self.sizes.group, dim=1)

    def attend_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of all new tokens among themselves; mask bool [B, 1, S, S]."""
        weights = torch.softmax(self.scores(q, self.repeat(k), mask), dim=-1).to(q.dtype)
        return torch.matmul(weights, self.repeat(v))

    def attend_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        past: Tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        active_mask: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Attention over the cache (mask bool [B, 1, S, P]) and the new tokens, one softmax."""
        past_k, past_v = (self.repeat(cache) for cache in past)
        if active_mask is None:
            active_mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
        prior = self.scores(q, past_k, mask)
        active = self.scores(q, self.repeat(k), active_mask)
        weights = torch.softmax(torch.cat((prior, active), dim=-1), dim=-1).to(q.dtype)
        split = prior.shape[-1]
        return torch.matmul(weights[..., :split], past_v) + torch.matmul(
            weights[..., split:], self.repeat(v)
        )


class NeuronLlamaDecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        nki_enabled = is_nki_enabled(config)
        self.self_attn = NeuronLlamaAttention(config)
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = NeuronLlamaRMSNorm(
            config.hidden_size, config.rms_norm_eps, nki_enabled
        )
        self.post_attention_layernorm = NeuronLlamaRMSNorm(
            config.hidden_size, config.rms_norm_eps, nki_enabled
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.Tensor] = None,
        past_key_value: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        **kwargs: Any,
    ) -> Tuple[Any, ...]:
        """Hidden states, (K, V), cos, sin; a fifth item where the base passes ``residual``.

        NxDI 0.3 and later hand a ``residual`` keyword to every layer and read five results; before
        that they read exactly four.
        """
        attended, present, cos, sin = self.self_attn(
            self.input_layernorm(hidden_states),
            attention_mask,
            position_ids,
            past_key_value,
            kwargs.get("active_mask"),
            kwargs.get("cos_cache"),
            kwargs.get("sin_cache"),
        )
        hidden = hidden_states + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        results = (hidden, present, cos, sin)
        return (*results, None) if "residual" in kwargs else results


class NeuronLlamaHead(BlockedWeight):
    """LM head in kernel layout; logits are gathered unless the device samples."""

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        sizes, neuron_config = Sizes.of(config), config.neuron_config
        super().__init__(
            sizes.vocab_rank, config.hidden_size, neuron_config.tp_degree, neuron_config.torch_dtype
        )
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        logits = super().forward(x)
        return gather_from_tensor_model_parallel_region(logits) if self.gather_output else logits


class NeuronLlamaModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.on_device_sampling = neuron_config.on_device_sampling_config is not None
        self.tp_degree = neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = Sizes.of(config).q_heads
        self.num_key_value_heads = Sizes.of(config).kv_heads
        self.max_batch_size = neuron_config.max_batch_size
        self.buckets = neuron_config.buckets

    def init_model(self, config: InferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=neuron_config.torch_dtype,
            shard_across_embedding=not neuron_config.vocab_parallel,
            pad=True,
        )
        gather = not self.on_device_sampling
        if is_nki_enabled(config):
            self.lm_head = NeuronLlamaHead(config, gather)
        else:
            self.lm_head = ColumnParallelLinear(
                config.hidden_size, config.vocab_size, bias=False, gather_output=gather,
                dtype=neuron_config.torch_dtype, pad=True,
            )  # fmt: skip
        self.layers = nn.ModuleList(
            NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = NeuronLlamaRMSNorm(
            config.hidden_size, config.rms_norm_eps, is_nki_enabled(config)
        )


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------

StateDict = Dict[str, torch.Tensor]


def pad_heads(weight: torch.Tensor, heads: int, head_dim: int, dim: int) -> torch.Tensor:
    """Zero heads appended along ``dim`` until there are ``heads`` of them."""
    missing = heads * head_dim - weight.shape[dim]
    if missing == 0:
        return weight
    shape = list(weight.shape)
    shape[dim] = missing
    return torch.cat((weight, weight.new_zeros(shape)), dim=dim)


def block_for_ranks(parts: List[torch.Tensor], tp: int, dim: int) -> torch.Tensor:
    """Kernel layout of every rank's share, one after another.

    ``parts`` are [N_i, K] weights whose shares are stacked (q, k, v); ``dim`` is the sharded one.
    """
    shares = zip(*(part.chunk(tp, dim=dim) for part in parts))
    return torch.cat([block_weight(torch.cat(share)) for share in shares])


def convert_layer(state: StateDict, prefix: str, sizes: Sizes, tp: int, nki_enabled: bool) -> None:
    """Pad the heads of one layer, and put its weights in kernel layout for the kernels."""
    attention = f"{prefix}self_attn."
    for name, heads in (("q", sizes.q_heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
        for kind in ("weight", "bias"):
            key = f"{attention}{name}_proj.{kind}"
            if key in state:
                state[key] = pad_heads(state[key], heads, sizes.head_dim, 0)
    out = f"{attention}o_proj.weight"
    state[out] = pad_heads(state[out], sizes.q_heads, sizes.head_dim, 1)
    if not nki_enabled:
        return
    qkv = [state.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
    state[f"{attention}qkv_proj.weight"] = block_for_ranks(qkv, tp, 0)
    state[out] = block_for_ranks([state[out]], tp, 1)
    for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
        key = f"{prefix}mlp.{name}_proj.weight"
        state[key] = block_for_ranks([state[key]], tp, dim)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's.

        Runs before the SDK ties the head to the embedding, so a tied head is made here: with kernels
        it has its own layout.
        """
        tp, nki_enabled = config.neuron_config.tp_degree, is_nki_enabled(config)
        sizes = Sizes.of(config)
        state = dict(state_dict)
        for layer in range(config.num_hidden_layers):
            convert_layer(state, f"layers.{layer}.", sizes, tp, nki_enabled)
        if nki_enabled:
            head = state.get("lm_head.weight", state["embed_tokens.weight"])
            state["lm_head.weight"] = block_for_ranks([head], tp, 0)
        state["rank_util.rank"] = torch.arange(tp, dtype=torch.int32)
        return state

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: StateDict) -> None:
        """Tie a plain head to the embedding; a head in kernel layout is there already."""
        if "lm_head.weight" not in state_dict:
            state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> Type[LlamaInferenceConfig]:
        return LlamaInferenceConfig
