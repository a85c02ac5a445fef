"""Chooses the next token: greedy, top-k, top-p and temperature, for each row of the batch.

On a device logits are sharded over the vocabulary, and distributed operators find the candidates.
On the CPU (`on_cpu`) the whole row is there. Both share the arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed.largest import argmax as nxd_argmax
from neuronx_distributed.largest import topk as nxd_topk
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import _broadcast
from torch import nn
from torch_neuronx.xla_impl.ops import TopK

from neuron_cpu.errors import StandInError
from neuron_cpu.runtime.ranks import is_tracing

from ...contract import contract

Values = float | int | Sequence[float]

# What a rejected candidate's score becomes: exp(-3000) is 0 in fp32.
_REJECTED = -3000.0


def prepare_sampling_params(
    batch_size: int, top_k: Values = (1,), top_p: Values = (1.0,), temperature: Values = (1.0,)
) -> torch.Tensor:
    """top_k, top_p and temperature, fp32 (batch_size, 3), from one value each or one a row."""
    given = [torch.as_tensor(value).reshape(-1).float() for value in (top_k, top_p, temperature)]
    lengths = [len(value) for value in given]
    if lengths not in ([1] * 3, [batch_size] * 3):
        raise AssertionError(
            f"top_k, top_p and temperature have {lengths} values, expected one of each, or of each "
            f"one a row ({batch_size})."
        )
    return torch.stack([value.expand(batch_size) for value in given], dim=1)


def validate_sampling_params(
    params: torch.Tensor, on_device_sampling_config: Any, zero: bool = False
) -> None:
    """Refuse rows of (top_k, top_p, temperature) that the sampler cannot follow. `zero` allows a
    top_k and a temperature of 0 (Contract.takes_zeros)."""
    limit, least = on_device_sampling_config.global_topk, 0 if zero else 1
    top_k, top_p, temperature = params.unbind(dim=1)
    off = (top_k > limit) | ((top_k < least) & (top_k != -1)) | (top_k != top_k.floor())
    if bool(off.any()):
        raise ValueError(
            f"top_k must be -1 or a whole number from {least} to global_topk={limit}, got "
            f"{top_k.tolist()}."
        )
    if bool(((top_p <= 0) | (top_p > 1)).any()):
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p.tolist()}.")
    if bool((temperature < 0).any()) or (not zero and bool((temperature == 0).any())):
        raise ValueError(
            f"temperature must {'not be negative' if zero else 'be above 0'}, got "
            f"{temperature.tolist()}."
        )
    if bool(((temperature == 0) & (top_k < 1)).any()):
        raise ValueError("temperature 0 takes the best token, expected top_k 1 with it.")


class Sampler(nn.Module):
    """Tokens from logits: `forward(logits (B, V or V/tp), params (B, 3))` -> (B,) int32.

    A greedy row takes the first maximum. Another row keeps `global_topk` candidates, then the best
    `top_k` (none: every candidate is as likely), then as many as have a probability of at most
    `top_p` together, and draws one at its temperature. A graph that is not `dynamic` takes `top_p`
    and temperatures only where its configuration has some; on the CPU the call's own values count.
    `deterministic` draws at the distribution's middle.
    """

    def __init__(self, neuron_config: Any, do_sample: bool | None = None) -> None:
        super().__init__()
        config = neuron_config.on_device_sampling_config
        if config is None:
            raise AssertionError("Sampler needs an OnDeviceSamplingConfig in the NeuronConfig.")
        self.neuron_config = neuron_config
        self.on_device_sampling = config.on_device_sampling_config
        self.do_sample = config.do_sample if do_sample is None else do_sample
        self.dynamic = config.dynamic
        self.divides = config.temperature != 1.0
        self.cuts = config.top_p < 1.0
        self.deterministic = config.deterministic
        self.global_topk = config.global_topk
        self.top_k = config.top_k
        self.on_cpu = neuron_config.on_cpu
        self.contract = contract()

    def forward(
        self,
        token_logits: torch.Tensor,
        sampling_params: torch.Tensor,
        return_values: bool = False,
        rank_id: torch.Tensor | None = None,
    ) -> Any:
        """Tokens, or with `return_values` the candidates (..., k) and their probabilities."""
        del rank_id
        if not (self.on_cpu or is_tracing()) and token_logits.isnan().any():
            raise StandInError(
                "The logits that the graph samples from are NaN, expected numbers, as a device "
                "would take any token; look for NaN in the checkpoint, or for the kernel that "
                "makes them."
            )
        if return_values:
            return self.candidates(token_logits, sampling_params)
        if not self.samples():
            if self._sharded():
                return nxd_argmax(token_logits, dim=-1, gather_dim=-1).to(torch.int32)
            return torch.argmax(token_logits, dim=-1)
        indices, probabilities = self.candidates(token_logits, sampling_params)
        return torch.gather(indices, -1, self.draw(probabilities)).squeeze(-1).to(torch.int32)

    def candidates(
        self, logits: torch.Tensor, sampling_params: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 (..., k), best first, and probabilities, of logits (B, V) or (B, T, V). One
        candidate where every token is the best one."""
        values, indices = self._candidates(logits.float())
        if not self.samples():
            return indices[..., :1], torch.ones_like(values[..., :1])
        return indices, self._distribution(values, sampling_params)

    def samples(self) -> bool:
        """Whether rows may differ from the arg-maximum; a graph needs it as a constant."""
        if self.contract.samples_above_top_1_only:
            top_k = self.top_k if isinstance(self.top_k, (list, tuple)) else [self.top_k]
            return bool(self.do_sample and (self.dynamic or any(k > 1 for k in top_k)))
        return bool(self.do_sample or self.dynamic)

    def _sharded(self) -> bool:
        return not self.on_cpu and parallel_state.model_parallel_is_initialized()

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The `global_topk` largest logits (B, k), sorted, and their tokens."""
        k = self.global_topk
        if self._sharded():
            return nxd_topk(logits, k, dim=-1, gather_dim=-1)
        return TopK.apply(logits, k)

    def _distribution(self, values: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Probabilities (..., k) of sorted candidates after top-k, temperature and top-p."""
        shape = (-1, *[1] * (values.dim() - 1))
        top_k, top_p, temperature = (params[:, i].to(values.dtype).view(shape) for i in range(3))
        rank = torch.arange(values.shape[-1], device=values.device)
        values = values.masked_fill(rank >= top_k, _REJECTED)
        if self.dynamic or (bool((temperature != 1).any()) if self.on_cpu else self.divides):
            values = values / temperature
        if self.dynamic or (bool((top_p < 1).any()) if self.on_cpu else self.cuts):
            reached = torch.softmax(values, dim=-1).cumsum(dim=-1)
            outside = (reached > torch.maximum(reached.min(), top_p)) & (rank > 0)
            values = values.masked_fill(outside, _REJECTED)
        return torch.softmax(values, dim=-1)

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Indices (..., 1), drawn by inverting the cumulative distribution, equal on every rank.
        `deterministic` draws at its middle."""
        shape, device = (*probabilities.shape[:-1], 1), probabilities.device
        if self.deterministic:
            point = torch.full(shape, 0.5, device=device)
        else:
            point = torch.rand(shape, device=device)
            point = _broadcast(point) if self._sharded() else point
        passed = (probabilities.cumsum(dim=-1) < point).sum(dim=-1, keepdim=True)
        return passed.clamp_max(probabilities.shape[-1] - 1)
