"""The router: it decides which experts a token goes to (NxD's modules.moe.routing)."""

from typing import Any, Tuple

import torch
from torch import nn

from ...keywords import refuse_others


class RouterTopK(nn.Module):
    """Scores all experts and names the best `top_k` of each token; ranks agree."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        act_fn: str = "softmax",
        **later: Any,
    ) -> None:
        super().__init__()
        refuse_others(
            "RouterTopK", later, sequence_parallel_enabled=..., sequence_dimension=..., device=...,
            tensor_model_parallel_group=..., jitter_eps=0.0, bias=False,
            apply_act_fn_over_topk=False, store_transposed_weights=...,
        )  # fmt: skip
        if act_fn != "softmax":
            raise NotImplementedError(
                f"RouterTopK got act_fn={act_fn!r}, expected 'softmax': other affinities are not "
                "modelled."
            )
        self.num_experts, self.top_k, self.act_fn = num_experts, top_k, act_fn
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=False, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Logits (T, E), affinities (T, E) and indices (T, k) of tokens (T, H).

        The product has the router's own type. The softmax runs in fp64 and returns in the
        activations' type. The logits decide the choice.
        """
        logits = self.linear_router(hidden_states.to(self.linear_router.weight.dtype))
        affinities = torch.softmax(logits.to(torch.float64), dim=-1).to(hidden_states.dtype)
        _, indices = torch.topk(logits, self.top_k, dim=-1)
        return logits, affinities, indices
