"""Mixtral for AWS Trainium: a mixture of experts in the place of Llama's MLP.

Built on llama_extended.py, which has attention, norms, head and caches. What differs from a Llama:
behind each attention stands a router, which gives every token to its best few experts, each an
MLP, and adds up what they make of it (Jiang et al. 2024, "Mixtral of Experts"). Prefill runs all
experts on all tokens, so that none is dropped; a decode step of few tokens reads only the weights
of the experts that were chosen.

Axis letters used throughout, beside those of llama.py:

    E  experts                                       I  intermediate size of one expert, per rank
    C  choices: T times the experts of a token

Weights of experts lie as TensorE takes them, contraction first [K, N], with kernels and without, so
both ways share modules and checkpoint conversion. Hidden states leave the kernels' layout for the
router and the experts, which take columns [H, T]; the norm before them and the router's softmax are
PyTorch.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple, Type

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed_inference.models.config import InferenceConfig
from torch import nn

import llama_extended
from llama import (
    P_MAX,
    Columns,
    NeuronLlamaRMSNorm,
    StateDict,
    in_blocks,
    in_runs,
    is_nki_enabled,
    kernel_layout,
    linear_kernel,
    option,
    pad_to,
    psum_zeros,
    spans,
    whole_tiles,
)  # fmt: skip

EXPERT_TOKENS = 256  # of one pass over all experts: sums, inputs and inner features fit in SBUF
EXPERT_COLUMNS = 256  # of an expert's weight, loaded at once: rows of 512 bytes in bf16
NeuronConfigNKI = llama_extended.NeuronConfigNKI


# --- Kernels --------------------------------------------------------------------------------------


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
    acc_psum = psum_zeros((width, x_sb.shape[2]))
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
            both_psum = psum_zeros((P_MAX, 2 * i_tiles))
            for k in nl.static_range(h_tiles):
                weight_sb = gathered(gate_up_hbm, gate_rows_sb, choice * h_tiles + k)
                for tile in nl.static_range(2 * i_tiles):
                    both_psum[:, nl.ds(tile, 1)] += nisa.nc_matmul(
                        weight_sb[:, nl.ds(tile * P_MAX, P_MAX)], x_sb[:, k, nl.ds(token, 1)]
                    )
            inner_sb = swiglu(both_psum[:, 0:i_tiles], both_psum[:, i_tiles : 2 * i_tiles], dtype)
            made_psum = psum_zeros((P_MAX, h_tiles))
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

NOT_HERE = (
    "flash_decoding_enabled", "k_cache_transposed", "sequence_parallel_enabled", "vocab_parallel",
    "lora_config", "quantized", "is_chunked_prefill", "is_medusa", "enable_eagle_speculation",
)  # fmt: skip


class MixtralInferenceConfig(llama_extended.LlamaInferenceConfig):
    """The Hugging Face configuration's attributes and a NeuronConfigNKI."""

    covered = f"whole tiles of {P_MAX} hidden features, and heads that llama_extended.py takes"

    def check_covered(self) -> None:
        asked = [name for name in NOT_HERE if option(self, name)]
        asked += ["cp_degree"] if option(self, "cp_degree", 1) > 1 else []
        if asked:
            raise ValueError(f"{asked[0]} is not modelled by this file; leave it out.")
        window, longest = getattr(self, "sliding_window", None), self.neuron_config.seq_len
        if window is not None and window < longest:
            raise ValueError(
                f"sliding_window {window} is shorter than seq_len {longest}, and every token of "
                "this file sees all before it; choose a shorter seq_len."
            )

    def lacking(self) -> List[Tuple[bool, str]]:
        whole = self.hidden_size % P_MAX == 0
        return [(not whole, f"hidden_size {self.hidden_size}"), *super().lacking()]

    def get_required_attributes(self) -> List[str]:
        return [*super().get_required_attributes(), "num_local_experts", "num_experts_per_tok"]


def inner_size(config: InferenceConfig) -> int:
    """Intermediate size of an expert on one rank, padded to whole tiles."""
    return whole_tiles(config.intermediate_size // config.neuron_config.tp_degree) * P_MAX


# --- Modules --------------------------------------------------------------------------------------


class RankWeight(ColumnParallelLinear):
    """The weight [K, N] of one rank; the checkpoint has the ranks' weights one below another.

    It is a ColumnParallelLinear so that the SDK's loader cuts it, whichever way it is parallel.
    """

    def __init__(self, k: int, n: int, config: InferenceConfig) -> None:
        own = config.neuron_config
        given = dict(bias=False, gather_output=False, dtype=own.torch_dtype)
        super().__init__(n, k * own.tp_degree, **given)


class Router(nn.Module):
    """Which experts a token goes to, and how much each counts; equal on all ranks."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        self.experts, self.each = config.num_local_experts, config.num_experts_per_tok
        self.nki_enabled, size = is_nki_enabled(config), config.hidden_size
        shape = self.experts, size
        if self.nki_enabled:  # in kernel layout
            shape = P_MAX, whole_tiles(self.experts) * size
        dtype = config.neuron_config.torch_dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, H] -> affinities [T, k] that sum to 1, and their experts [T, k].

        The softmax is over all experts, in fp32; the best k are then scaled to a sum of 1.
        """
        if self.nki_enabled:
            logits = linear_kernel(in_blocks(rows, 1), self.weight)[:, : self.experts]
        else:
            logits = torch.matmul(rows, self.weight.t())
        _, chosen = torch.topk(logits, self.each, dim=-1)
        shares = torch.softmax(logits.to(torch.float32), dim=-1).gather(-1, chosen)
        return (shares / shares.sum(-1, keepdim=True)).to(rows.dtype), chosen


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

    def forward(self, hidden: Any, norm: nn.Module, given: Dict[str, Any]) -> Any:
        """hidden + experts(norm(hidden)): [B, S, H], or Columns with kernels."""
        total = hidden.rows() if self.nki_enabled else hidden
        rows = norm(total).flatten(0, 1)
        affinities, chosen = self.router(rows)
        # as NxD decides: weights are picked where that reads fewer than all experts have
        few = total.shape[1] == 1 and chosen.numel() < self.experts
        mixed = self.chosen_experts if few else self.all_experts
        partial = mixed(rows.t().contiguous(), affinities, chosen)
        dtype = option(self.config, "rpl_reduce_dtype", None) or partial.dtype
        whole = reduce_from_tensor_model_parallel_region(partial.to(dtype)).to(partial.dtype)
        total = total + whole.t().reshape(total.shape)
        return Columns.of(total) if self.nki_enabled else total

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


class MixtralDecoderLayer(llama_extended.NeuronLlamaDecoderLayer):
    """Norm, attention, residual; norm, experts, residual."""

    mlp_cls: Type[nn.Module] = MixtralExperts

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.post_attention_layernorm = NeuronLlamaRMSNorm(size, eps)  # no kernel has it


class NeuronMixtralModel(llama_extended.NeuronLlamaModel):
    """Embedding, decoder layers, final norm and head, as the NxDI base class calls them."""

    layer_cls: Type[nn.Module] = MixtralDecoderLayer


# --- Weights: from a Hugging Face checkpoint to this model's --------------------------------------


def by_ranks(weight: torch.Tensor, tp: int, dim: int) -> torch.Tensor:
    """A weight [.., K, N] cut along ``dim`` -> the ranks' [K', N'], one below another."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in weight.chunk(tp, dim=dim)])


def padded(weight: torch.Tensor, dim: int, tp: int, size: int) -> torch.Tensor:
    """Each rank's share of ``dim``, filled up with zeros to ``size``: silu(0) * 0 adds nothing."""
    return torch.cat([pad_to(share, dim, size) for share in weight.chunk(tp, dim=dim)], dim=dim)


def convert_experts(state: StateDict, prefix: str, config: InferenceConfig) -> None:
    """One layer: experts stacked, everything contraction first."""
    tp, inner = config.neuron_config.tp_degree, inner_size(config)
    theirs, own = f"{prefix}block_sparse_moe.", f"{prefix}mlp."
    router = state.pop(f"{theirs}gate.weight")
    in_kernel = is_nki_enabled(config)
    state[f"{own}router.weight"] = kernel_layout(in_runs(router, 1)) if in_kernel else router

    def stacked(name: str) -> torch.Tensor:  # [E, K, N]
        numbers = range(config.num_local_experts)
        return torch.stack([state.pop(f"{theirs}experts.{e}.{name}.weight").t() for e in numbers])

    gate, up = (padded(stacked(name), 2, tp, inner) for name in ("w1", "w3"))
    both = [torch.cat(parts, dim=2) for parts in zip(gate.chunk(tp, 2), up.chunk(tp, 2))]
    state[f"{own}gate_up_proj.weight"] = by_ranks(torch.cat(both, dim=2), tp, 2)
    state[f"{own}down_proj.weight"] = by_ranks(padded(stacked("w2"), 1, tp, inner), tp, 1)


class NeuronMixtralForCausalLM(llama_extended.NeuronLlamaForCausalLM):
    """What the driver compiles, loads and generates with."""

    _model_cls = NeuronMixtralModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: StateDict, config: InferenceConfig
    ) -> StateDict:
        """Hugging Face names and shapes (without ``model.``) -> this model's."""
        return llama_extended.converted(state_dict, config, convert_experts)

    @classmethod
    def get_config_cls(cls) -> Type[MixtralInferenceConfig]:
        return MixtralInferenceConfig
