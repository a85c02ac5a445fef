"""Rotary embeddings, head layouts, the decode softmax, and transposed parallel weights."""

from typing import Any, NoReturn

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import copy_tensor_model_parallel_attributes
from torch import nn


def move_heads_front(
    tensor: torch.Tensor,
    bsz: int,
    seq_len: int,
    num_head: int,
    head_dim: int,
    layernorm: nn.Module | None = None,
) -> torch.Tensor:
    """(B, S, heads * D) -> (B, heads, S, D) contiguous, with an optional norm over D."""
    tensor = tensor.view(bsz, seq_len, num_head, head_dim)
    if layernorm is not None:
        tensor = layernorm(tensor)
    return tensor.transpose(1, 2).contiguous()


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """(B, Hkv, S, D) -> (B, Hkv * n_rep, S, D): each head n_rep times in a row."""
    if n_rep == 1:
        return hidden_states
    batch, heads, length, head_dim = hidden_states.shape
    expanded = hidden_states[:, :, None].expand(batch, heads, n_rep, length, head_dim)
    return expanded.reshape(batch, heads * n_rep, length, head_dim)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The half-rotation: (first, second) halves of the last dimension -> (-second, first)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q, k (B, H, S, D) by cos, sin (B, S, D), in the dtype of the operands."""
    del position_ids  # already in cos and sin
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class RotaryEmbedding(nn.Module):
    """Angles of rotary position embeddings: base^(-2i/dim) times the position.

    Frequencies are made on the first use. The loader casts buffers that a constructor makes, and
    bf16 frequencies give wrong angles.
    """

    def __init__(
        self, dim: int, max_position_embeddings: int = 2048, base: float = 10000.0
    ) -> None:
        super().__init__()
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.register_buffer("inv_freq", None, persistent=False)

    def get_inv_freqs(self, device: torch.device | None = None) -> torch.Tensor:
        """Frequencies, fp32 (dim/2,)."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        return 1.0 / (self.base**exponents)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (B, S, dim) of positions (B, S), computed in fp32, in `x`'s dtype."""
        if self.inv_freq is None:
            self.inv_freq = self.get_inv_freqs(x.device)
        freqs = position_ids[:, :, None].float() * self.inv_freq[None, None, :].float()
        angles = torch.cat((freqs, freqs), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def manual_softmax(
    prior_scores: torch.Tensor, active_scores: torch.Tensor, is_speculation: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over two score tensors (..., P) and (..., A), in two parts, fp32."""
    del is_speculation  # a single active score is its own maximum
    prior, active = prior_scores.float(), active_scores.float()
    peak = torch.maximum(prior.amax(dim=-1, keepdim=True), active.amax(dim=-1, keepdim=True))
    prior, active = (prior - peak).exp(), (active - peak).exp()
    total = prior.sum(dim=-1, keepdim=True) + active.sum(dim=-1, keepdim=True)
    return prior / total, active / total


def distributed_softmax(prior_scores: torch.Tensor, active_scores: torch.Tensor) -> Any:
    """`manual_softmax`: no other rank shares a KV head here."""
    return parallel_state.get_kv_shared_group()


def transpose_parallel_linear_layer(parallel_layer: torch.Tensor) -> nn.Parameter:
    """A parallel linear's transposed weight, sharded along the other dimension.

    A column-parallel (N/tp, K) becomes (K, N/tp), the layout of a kernel's moving operand.
    `get_tensor_from_state_dict(prefix, sd)` and `set_tensor_to_state_dict(prefix, value, sd)` of
    the result keep the usual layout in checkpoints.
    """
    transposed = nn.Parameter(parallel_layer.detach().T.contiguous(), requires_grad=False)
    for name, value in vars(parallel_layer).items():
        setattr(transposed, name, value)
    copy_tensor_model_parallel_attributes(transposed, parallel_layer)
    transposed.partition_dim = 1 - parallel_layer.partition_dim

    def get_tensor_from_state_dict(
        prefix: str, state_dict: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        return state_dict[prefix + "weight"].t()

    def set_tensor_to_state_dict(
        prefix: str, tensor: torch.Tensor, state_dict: dict[str, torch.Tensor]
    ) -> None:
        state_dict[prefix + "weight"] = tensor.t()

    transposed.get_tensor_from_state_dict = get_tensor_from_state_dict
    transposed.set_tensor_to_state_dict = set_tensor_to_state_dict
    return transposed


def preprocess_quantized_linear_layer(layer: Any) -> NoReturn:
    """Refused: the layout of fp8 weights for a closed kernel."""
    raise NotImplementedError(
        f"{type(layer).__name__}: the quantised MLP kernel is the SDK's own and closed; "
        "leave quantized_mlp_kernel_enabled off."
    )
