"""Low-rank adapters for llama.py (LoRA, Hu et al. 2021): W x + B A x, of several in one batch.

A server of one model with many adapters needs this file. NxDI's ``lora_config`` names folders as
PEFT saves them, and every row of a batch carries its adapter's number. The ranks of all adapters
lie side by side as rows, R of them. One product makes A x of all; rows that are not the token's
adapter's become zero. B contracts all rows into the bank of PSUM that W x fills. So a token without
an adapter adds zeros, and TensorE pays for the ranks of all adapters together.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.checkpoint import load_file
from torch import nn

from llama import (
    ATTENTION_TARGETS,
    MLP_TARGETS,
    MOVING_MAX,
    P_MAX,
    Columns,
    Hbm,
    NeuronLlamaAttention,
    NeuronLlamaDecoderLayer,
    NeuronLlamaMLP,
    StateDict,
    pad_tiles,
    psum,
    spans,
    times_gain,
    whole_tiles,
)
from models.weights import KernelRows, OfRanks, Projections, SharedSizes, spread_kv, spread_queries

IDLE_TARGET = "idle_adapter"  # NxDI changes this module where the kernels' adapters are ours


# --- In kernels -----------------------------------------------------------------------------------


class Adapters(NamedTuple):
    """The adapters of one projection @ HBM, a term of its Linear: A [128, K/128 * R] and B [R, N],
    features in the orders of the weight, and ones for a token's ranks [R, T], else zeros."""

    a_hbm: Hbm
    b_hbm: Hbm
    chosen_hbm: Hbm

    def inputs(self, x_sb, token):
        """A x of the tokens from number ``token`` on, x_sb [128, K/128, T] -> tiles [ranks, T] @
        SBUF of up to 128 ranks, zero for the ranks of other tokens' adapters."""
        (_, k_tiles, tokens), found = x_sb.shape, []
        ranks = self.b_hbm.shape[0]
        a_sb = nl.load(self.a_hbm).reshape((P_MAX, k_tiles, ranks))
        for first, count in spans(ranks, P_MAX):
            rows = nl.ds(first, count)
            chosen_sb = nl.load(self.chosen_hbm[rows, nl.ds(token, tokens)])
            inputs_sb = nl.ndarray((count, tokens), x_sb.dtype)
            for start, size in spans(tokens, MOVING_MAX):
                columns = nl.ds(start, size)
                inputs_psum = psum((count, size))
                for k in nl.affine_range(k_tiles):
                    inputs_psum[...] += nisa.nc_matmul(a_sb[:, k, rows], x_sb[:, k, columns])
                inputs_sb[:, columns] = nisa.tensor_tensor(
                    inputs_psum, chosen_sb[:, columns], nl.multiply
                )
            found.append(inputs_sb)
        return found

    def rows(self, tile, tiles):
        """B of some tiles of features -> [ranks, tiles * 128] @ SBUF, up to 128 ranks each."""
        columns = nl.ds(tile * P_MAX, tiles * P_MAX)
        return [
            nl.load(self.b_hbm[nl.ds(*rows), columns]) for rows in spans(self.b_hbm.shape[0], P_MAX)
        ]


def split_adapters(adapters, k_tiles, n_tiles):
    """Split the adapters @ HBM of a kernel's projections, which lie side by side (or three Nones):
    for each projection of so many tiles of K and of N its Adapters, one or none."""
    if adapters[0] is None:
        return [()] * len(n_tiles)
    (a_hbm, b_hbm, chosen_hbm), found, a_start, b_start = adapters, [], 0, 0
    for k, n in zip(k_tiles, n_tiles):
        size, width = k * b_hbm.shape[0], n * P_MAX
        a_part, b_part = a_hbm[:, nl.ds(a_start, size)], b_hbm[:, nl.ds(b_start, width)]
        found.append((Adapters(a_part, b_part, chosen_hbm),))
        a_start, b_start = a_start + size, b_start + width
    return found


def add_terms(acc_psum, rows, inputs, tile, token):
    """Rows times inputs, both up to 128 ranks @ SBUF, added to products [128, tiles, tokens] @ PSUM
    of tiles from ``tile`` on."""
    for rows_sb, inputs_sb in zip(rows, inputs):
        for at in nl.affine_range(acc_psum.shape[1]):
            acc_psum[:, at, :] += nisa.nc_matmul(
                rows_sb[:, nl.ds((tile + at) * P_MAX, P_MAX)],
                inputs_sb[:, nl.ds(token, acc_psum.shape[2])],
            )


# --- In modules -----------------------------------------------------------------------------------


def adapter_ranks(config: InferenceConfig) -> int:
    """Rows that the ranks of all adapters take together in the kernels, 0 without any."""
    lora = config.neuron_config.lora_config
    return 0 if lora is None else lora.max_loras * lora.max_lora_rank


def adapter_targets(config: InferenceConfig) -> Set[str]:
    """Names of the projections that some adapter changes."""
    if not adapter_ranks(config):
        return set()
    paths = config.neuron_config.lora_config.lora_ckpt_paths
    return {name for path in paths.values() for name in peft_config(path)["target_modules"]}


def check_adapters(config: InferenceConfig) -> None:
    """ValueError for adapters of a release, or of a model, that does not read them."""
    lora = config.neuron_config.lora_config
    if lora is not None and not hasattr(lora, "lora_memory_transpose"):
        raise ValueError(
            "lora_config needs NxDI 0.2 or later, where adapters are read and number 0 is none of "
            "them, got an earlier one; leave it out."
        )
    if lora is None or getattr(config.neuron_config, "nki_enabled", False):
        return
    if getattr(config, "model_type", "") == "qwen2" or getattr(config, "attention_bias", False):
        raise ValueError(
            "lora_config meets biases of projections, expected none without kernels, because NxDI "
            "looks for them beside the adapters' layers; give --enable-nki, or leave it out."
        )


class KernelAdapters(nn.Module):
    """A and B of a kernel's projections as ``split_adapters`` reads them, by sizes of a rank: the
    tiles of K and the features N of each. Nothing where no adapter changes one of ``targets``."""

    def __init__(
        self, config: InferenceConfig, targets: Tuple[str, ...], k_tiles: List[int], n: List[int]
    ) -> None:
        super().__init__()
        self.present = bool(adapter_targets(config) & set(targets))
        if not self.present:
            return
        tp, dtype = config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        ranks, features = adapter_ranks(config), sum(whole_tiles(size) for size in n) * P_MAX
        self.a = KernelRows(sum(k_tiles) * ranks, tp, dtype, P_MAX)
        self.b = KernelRows(features, tp, dtype, ranks)

    def operands(self, columns: Columns) -> Tuple[Optional[torch.Tensor], ...]:
        """The operands that a kernel takes after its others."""
        return (self.a.weight, self.b.weight, columns.chosen) if self.present else (None,) * 3


class AdaptedMLP(NeuronLlamaMLP):
    """The MLP with adapters."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        inner //= config.neuron_config.tp_degree
        tiles = [whole_tiles(hidden)] * 2 + [whole_tiles(inner)]
        self.adapters = KernelAdapters(config, MLP_TARGETS, tiles, [inner, inner, hidden])


class AdaptedAttention(NeuronLlamaAttention):
    """The same."""

    def make_kernel_weights(self, **group: Any) -> None:
        super().make_kernel_weights(**group)
        hidden, rank = self.config.hidden_size, self.sizes.of_rank
        tiles = [whole_tiles(hidden)] * 3 + [rank.q_tiles]
        n = [rank.q_tiles * P_MAX, rank.stacks * P_MAX, rank.kv_features, hidden]
        self.adapters = KernelAdapters(self.config, ATTENTION_TARGETS, tiles, n)


class AdaptedLayer(NeuronLlamaDecoderLayer):
    """Chooses the adapters of each row of the batch, [B] numbers from 1 on, 0 for none."""

    def forward(self, hidden_states: Any, **given: Any) -> Tuple[Any, ...]:
        if self.nki_enabled and adapter_ranks(self.config):
            columns = Columns.of(hidden_states)
            if columns.chosen is None:
                columns = columns._replace(chosen=self.chosen(columns, given.get("adapter_ids")))
            hidden_states = columns
        return super().forward(hidden_states, **given)

    def chosen(self, columns: Columns, ids: Optional[torch.Tensor]) -> torch.Tensor:
        """[R, T]: ones for the ranks that are a token's."""
        lora, length = self.config.neuron_config.lora_config, columns.shape[1]
        device = columns.stream.device
        if ids is None:
            raise ValueError(
                "A graph gets no adapter_ids, expected a number for each row, because this "
                "release of NxDI leaves them out of graphs over a cache of blocks; leave "
                "lora_config or the blocks out, or take NxDI 0.9."
            )
        first = 0 if hasattr(lora, "dynamic_multi_lora") else 1  # NxDI 0.7 and later, else before
        numbers = torch.arange(first, first + lora.max_loras, device=device)
        rows = numbers.repeat_interleave(lora.max_lora_rank)[:, None] == ids.reshape(1, -1)
        return rows.to(columns.stream.dtype).repeat_interleave(length, 1)


def add_idle_layer(model: nn.Module, config: InferenceConfig) -> None:
    """Add a layer that nothing runs through: NxDI numbers the adapters, and changes layers of their
    names."""
    neuron_config = config.neuron_config
    model.idle_adapter = nn.Linear(1, 1, bias=False, dtype=neuron_config.torch_dtype)
    neuron_config.lora_config.target_modules = [IDLE_TARGET]


def keep_numbers(model: nn.Module) -> None:
    """Make the layers choose adapters by number. NxDI 0.7 keeps a sequence's adapters at its row of
    the batch, and hands layers the row instead of the number."""
    if hasattr(model, "lora_weight_manager"):
        model.lora_weight_manager.update_lora_adapter_ids = lambda numbers, rows: numbers


def spread_adapters(model: nn.Module, config: InferenceConfig) -> None:
    """Make NxDI's reader of adapters spread heads as ``spread_heads`` does those of weights, for
    layers in PyTorch: by itself it fills the first rows of a layer that has more heads."""
    owner = getattr(model, "lora_weight_manager", model)  # of NxDI 0.7 and later
    checkpoint = getattr(owner, "lora_checkpoint", None)
    if checkpoint is None:  # a reader that refuses what does not fit
        return
    read, sizes = checkpoint._get_module_checkpoint, SharedSizes.of(config)
    with_heads = {f"{name}.lora_B" for name in ATTENTION_TARGETS[:3]} | {"o_proj.lora_A"}

    def spread(name: str, adapter: Any) -> Optional[torch.Tensor]:
        weight, last = read(name, adapter), ".".join(name.split(".")[-2:])
        if weight is None or last not in with_heads:
            return weight
        if last[0] in "kv":
            return spread_kv(weight, sizes)
        return spread_queries(weight, config.num_key_value_heads, sizes, int(last[0] == "o"))

    checkpoint._get_module_checkpoint = spread


# --- In checkpoints -------------------------------------------------------------------------------


def peft_config(folder: str) -> Dict[str, Any]:
    """The settings of an adapter as PEFT saved them."""
    content = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    others = set(content["target_modules"]) - {*ATTENTION_TARGETS, *MLP_TARGETS}
    if others:
        raise ValueError(
            f"The adapter {folder} changes {', '.join(sorted(others))}, expected some of "
            f"{', '.join((*ATTENTION_TARGETS, *MLP_TARGETS))}; train it on those."
        )
    return content


def read_adapter(folder: str) -> Iterable[Tuple[str, str, torch.Tensor]]:
    """(projection, "A" or "B", tensor [r, K] or [N, r]) of an adapter as PEFT saves it.

    alpha / r goes to A, or alpha / sqrt(r) where the adapter is rank-stabilised (Kalajdzievski
    2023); NxDI takes 1 for an alpha that is 0.
    """
    content = peft_config(folder)
    alpha, power = content.get("lora_alpha"), 0.5 if content.get("use_rslora") else 1.0
    # NxDI's reader, because transformers 4.45 reads no file without metadata
    for key, tensor in load_file(str(Path(folder) / "adapter_model.safetensors")).items():
        found = re.search(r"(layers\.\d+\.\w+\.\w+)\.lora_([AB])(\.default)?\.weight$", key)
        if found is None:
            raise ValueError(
                f"The adapter {folder} has a tensor {key}, expected ...lora_A.weight or "
                "...lora_B.weight of layers; train it on those."
            )
        scale = alpha / len(tensor) ** power if alpha and found[2] == "A" else 1.0
        yield found[1], found[2], tensor.float() * scale


def add_adapters(state: StateDict, config: InferenceConfig) -> None:
    """A [ranks, K] and B [N, ranks] of all adapters, next to each weight that one of them changes;
    an adapter of a smaller rank has zeros behind its own."""
    lora, ranks = config.neuron_config.lora_config, adapter_ranks(config)
    state[f"{IDLE_TARGET}.weight"] = torch.zeros(1, 1)
    for number, folder in enumerate(lora.lora_ckpt_paths.values()):
        for name, kind, tensor in read_adapter(folder):
            weight = state.get(f"{name}.weight")
            rank, features = tensor.shape if kind == "A" else tensor.shape[::-1]
            expected = None if weight is None else weight.shape[1 if kind == "A" else 0]
            if features != expected or rank > lora.max_lora_rank:
                raise ValueError(
                    f"The adapter {folder} has lora_{kind} {list(tensor.shape)} for {name}, "
                    f"expected a rank of at most {lora.max_lora_rank} and {expected} features; "
                    "take one that was trained on this model."
                )
            shape = (ranks, features) if kind == "A" else (features, ranks)
            whole = state.setdefault(f"{name}.lora_{kind}", torch.zeros(shape))
            ranks_of = slice(number * lora.max_lora_rank, number * lora.max_lora_rank + rank)
            whole[ranks_of if kind == "A" else (slice(None), ranks_of)] = tensor


def convert_adapters(layers: Projections) -> None:
    """Make the tensors of KernelAdapters: A [R, K] and B [N, R] of all projections side by side,
    zeros where one has none; nothing where none has."""
    state, some = layers.state, [name for name in layers.cuts if f"{name}.lora_A" in layers.state]
    if not some:
        return
    ranks, down, across = len(state[f"{some[0]}.lora_A"]), [], []
    for name in layers.cuts:
        n, k = state[f"{name}.weight"].shape
        a = state.pop(f"{name}.lora_A", torch.zeros(ranks, k))
        b = state.pop(f"{name}.lora_B", torch.zeros(n, ranks))
        every = layers.input_columns(
            name, a if name == layers.output else times_gain(a, layers.gain)
        )
        tiled = [pad_tiles(share, 1).unflatten(1, (-1, P_MAX)) for share in every]
        down.append([share.permute(2, 1, 0).flatten(1) for share in tiled])
        across.append([pad_tiles(share, 0).t() for share in layers.output_rows(name, b)])
    module = some[0].rpartition(".")[0]
    state[f"{module}.adapters.a.weight"] = of_ranks(*down)
    state[f"{module}.adapters.b.weight"] = of_ranks(*across)


def of_ranks(*parts: OfRanks) -> torch.Tensor:
    """The share of each rank: its parts side by side, and the ranks below each other."""
    return torch.cat([torch.cat(share, 1) for share in zip(*parts)])
