"""Quantised weights, int8 or fp8, and caches in fp8, for llama.py.

A device with less memory than the model needs this file: weights stay int8 or fp8 in HBM, and
their products are scaled. All scales of a kernel are one tensor [128, sum of columns] in fp32, in
the kernel's order of use. Features in PSUM take a column a tile; the features of V, which lie in
rows, take their scales on each partition. A norm's gain is not in quantised weights: it has columns
of its own. TensorE takes fp8 as it is and integers after a copy into bf16. Keys and values in fp8
are read as they lie.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from torch import nn

from llama import (
    FEW_TOKENS,
    LONG_PIECE_BYTES,
    P_MAX,
    KernelWeight,
    NeuronLlamaAttention,
    NeuronLlamaHead,
    NeuronLlamaMLP,
    Sbuf,
    StateDict,
    Tokens,
    in_runs,
    pad_tiles,
    spans,
    weight_pieces,
    whole_tiles,
)
from models.weights import OfRanks, Projections
from models.adapters import of_ranks

# NxDI's names
QUANTISED_DTYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LAST_STEP_BYTES = 1536  # the last pieces of a weight shrink by so much
EVEN_TURNS, SOFTMAX_TURNS = "gs", "gsgssgss"  # engines that cast, alone or beside a softmax


# --- In kernels -----------------------------------------------------------------------------------


def quantised_pieces(tiles, k_tiles, tokens, last, row_bytes):
    """``weight_pieces`` of a weight whose integers stand in bf16 next to their bytes. Few tokens
    take a sixth at most: DMA is twice as fast, and the first product waits for a whole piece. The
    last pieces shrink by LAST_STEP_BYTES each, since DMA may outrun the conversion by no more."""
    tile_bytes = 3 * k_tiles * P_MAX
    if tokens > FEW_TOKENS:
        return weight_pieces(tiles, tile_bytes, tokens, last, row_bytes)
    most = max(1, LONG_PIECE_BYTES // tile_bytes)
    most = min(most, math.ceil(tiles / 6))
    return (
        shrinking(tiles, most, LAST_STEP_BYTES / (k_tiles * P_MAX)) if last else spans(tiles, most)
    )


def shrinking(length, most, step):
    """(start, size) of pieces that cover ``length``, the last ``step`` long (one at least), each
    before it longer by a step, up to ``most``."""
    found, end = [], length
    while end:
        size = max(1, min(most, end, int(step * (len(found) + 1))))
        end -= size
        found.insert(0, (end, size))
    return found


def in_bfloat16(weight_sb, turns):
    """Convert integers [128, tiles, k_tiles, 128] @ SBUF to a type that TensorE takes (it takes fp8
    directly). ScalarE (s) and GpSimdE (g) take ``turns`` at runs of a tile, and TensorE follows
    both: together they outrun DMA by a quarter. Short runs keep GpSimdE from holding VectorE off
    SBUF."""
    wide_sb, k_tiles = nl.ndarray(weight_sb.shape, nl.bfloat16), weight_sb.shape[2]
    engines = {"s": nisa.scalar_engine, "g": nisa.gpsimd_engine}
    for tile in nl.affine_range(weight_sb.shape[1]):
        for n, (at, size) in enumerate(spans(k_tiles, math.ceil(4 / len(turns)))):
            wide_sb[:, tile, nl.ds(at, size)] = nisa.tensor_copy(
                weight_sb[:, tile, nl.ds(at, size)],
                dtype=nl.bfloat16,
                engine=engines[turns[n % len(turns)]],
            )
    return wide_sb


def scale_columns(scales_hbm, counts):
    """Scales of a kernel's quantised weights @ HBM -> parts of so many columns @ SBUF, or Nones."""
    if scales_hbm is None:
        return [None] * len(counts)
    scales_sb, starts = nl.load(scales_hbm), [sum(counts[:at]) for at in range(len(counts))]
    return [scales_sb[:, nl.ds(start, count)] for start, count in zip(starts, counts)]


def times_features(x, features_sb, dtype=nl.float32):
    """x [128, tiles, T] times one number a feature, [128, tiles] -> the same @ SBUF."""
    (_, tiles, tokens), out_sb = x.shape, nl.ndarray(x.shape, dtype)
    if tokens < tiles:
        for token in nl.affine_range(tokens):
            out_sb[:, :, token] = nisa.tensor_tensor(x[:, :, token], features_sb, nl.multiply)
    else:
        for tile in nl.affine_range(tiles):
            out_sb[:, tile, :] = nisa.tensor_scalar(
                x[:, tile, :], nl.multiply, features_sb[:, nl.ds(tile, 1)]
            )
    return out_sb


class Gain(NamedTuple):
    """A norm's gain [128, H/128] @ SBUF, which quantised weights do not contain, and the hidden
    states times the gain, by the first token of their Block."""

    gain_sb: Sbuf
    made: Dict[int, Any]

    def of(self, tokens):
        """Tokens [128, H/128, T] times the gain: in a tile of their own, because the sum's store,
        which reads theirs, stands in line behind the weights."""
        block, x_sb = tokens
        if block.start not in self.made:
            self.made[block.start] = times_features(x_sb, self.gain_sb, x_sb.dtype)
        return Tokens(block, self.made[block.start])


# --- In modules -----------------------------------------------------------------------------------
#
# A kernel's last weight carries all weights' scales, None where no weight is quantised.


def with_scales(weight: KernelWeight, columns: int) -> None:
    """Room for a kernel's scales next to its last weight."""
    weight.columns = columns
    weight.register_parameter("scale", None)


class QuantisedMLP(NeuronLlamaMLP):
    """The MLP with scales where its weights are quantised."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        inner = whole_tiles(config.intermediate_size // config.neuron_config.tp_degree)
        with_scales(self.down_proj, 2 * (inner + whole_tiles(config.hidden_size)))


class QuantisedAttention(NeuronLlamaAttention):
    """The same."""

    def make_kernel_weights(self, **group: Any) -> None:
        super().make_kernel_weights(**group)
        rank, hidden = self.sizes.of_rank, whole_tiles(self.config.hidden_size)
        with_scales(self.o_proj, rank.q_tiles + rank.stacks + rank.kv_features + 2 * hidden)


class QuantisedHead(NeuronLlamaHead):
    """The same."""

    def __init__(self, config: InferenceConfig, gather_output: bool) -> None:
        super().__init__(config, gather_output)
        with_scales(self, whole_tiles(self.vocabulary) + whole_tiles(config.hidden_size))


def hold(weight: KernelWeight, name: str, columns: int, dtype: torch.dtype) -> None:
    """Give the weight or the scale its type; the loader cuts both for the ranks alike. Tags come
    last: NxD's ``init_on_device`` makes parameters anew, with tags as arguments. While NxD traces,
    a layer's ``master_weight`` is its weight; a checkpoint would have to hold it."""
    if name == "weight" and getattr(weight, "master_weight", None) is not None:
        weight.master_weight = None
    zeros = torch.zeros(P_MAX, columns, dtype=dtype)
    setattr(weight, name, nn.Parameter(zeros, requires_grad=False))
    held, parts = getattr(weight, name), weight.tp_degree
    set_tensor_model_parallel_attributes(held, True, 0, 1, num_partitions=parts)


def quantise_kernel_weights(model: nn.Module, neuron_config: NeuronConfig) -> None:
    """Quantise kernel weights, as NxDI's ``convert`` does for plain layers, except in modules that
    stay unconverted, and make a scale for every kernel that reads one."""
    stay = getattr(neuron_config, "modules_to_not_convert", None) or ()
    dtype = QUANTISED_DTYPES[neuron_config.quantization_dtype]
    for path, module in model.named_modules():
        if "medusa_head" in path:  # Hugging Face checkpoints have none, so these stay float
            continue
        kernel = {n: w for n, w in module.named_children() if isinstance(w, KernelWeight)}
        for name, weight in kernel.items():
            known = f"{path}.{name}".replace("qkv_proj", "q_proj")  # the checkpoint's name
            if any(part in known for part in stay):
                continue
            hold(weight, "weight", weight.weight.shape[1], dtype)
            last = [*kernel.values()][-1]
            hold(last, "scale", last.columns, torch.float32)


# --- In checkpoints -------------------------------------------------------------------------------


def check_quantised(config: InferenceConfig) -> None:
    """ValueError for a type of weights that layers in PyTorch take for another one, silently."""
    neuron_config = config.neuron_config
    name = neuron_config.quantization_dtype
    if not neuron_config.quantized or getattr(neuron_config, "nki_enabled", False):
        return
    if name == "f8e5m2" and not hasattr(neuron_config, "windowed_context_encoding_size"):
        raise ValueError(
            "quantization_dtype f8e5m2 is int8 to the layers of NxDI before 0.7, expected int8 or "
            "f8e4m3; take one of those, a later release, or the kernels (--enable-nki)."
        )


def as_integers(state: StateDict) -> StateDict:
    """fp8 moves as the bytes that it is: not every release of PyTorch joins or pads it."""
    return {
        name: tensor.view(torch.int8) if tensor.dtype in QUANTISED_DTYPES.values() else tensor
        for name, tensor in state.items()
    }


def as_quantised(state: StateDict, neuron_config: NeuronConfig) -> StateDict:
    """The way back."""
    dtype = QUANTISED_DTYPES[neuron_config.quantization_dtype]
    return {
        name: tensor.view(dtype) if tensor.dtype is torch.int8 else tensor
        for name, tensor in state.items()
    }


def in_columns(scale: torch.Tensor) -> torch.Tensor:
    """[N, 1] in the order of a kernel weight's rows -> [128, N/128]."""
    return pad_tiles(scale, 0).reshape(-1, P_MAX).t()


def convert_scales(layers: Projections) -> bool:
    """Whether a weight is quantised: scales have a row for each output feature, or one in all, ones
    for weights in float, and the norm's gain stands behind those that contract it."""
    state, columns = layers.state, []
    scales = {name: state.pop(f"{name}.scale", None) for name in layers.cuts}
    if all(scale is None for scale in scales.values()):
        return False
    for name, scale in scales.items():
        rows = torch.ones(1, 1) if scale is None else scale.float().reshape(-1, 1)
        every = layers.output_rows(name, rows.expand(len(state[f"{name}.weight"]), 1))
        # V's features lie in rows: each partition has the scales of all
        across = name.endswith("v_proj")
        columns.append([x.t().expand(P_MAX, -1) if across else in_columns(x) for x in every])
    gains: OfRanks = [in_columns(in_runs(layers.gain.float()[:, None], 0))] * layers.tp
    columns.insert(len(columns) - (layers.output in scales), gains)
    state[f"{[*scales][-1]}.scale"] = of_ranks(*columns)
    inputs = {state[f"{name}.weight"].dtype for name in layers.cuts if name.endswith(INPUTS)}
    if len(inputs) > 1:
        raise ValueError(
            "One kernel multiplies with q, k and v: expected all of them or none quantised; name "
            "all three or none in modules_to_not_convert."
        )
    return True


INPUTS = ("q_proj", "k_proj", "v_proj")
