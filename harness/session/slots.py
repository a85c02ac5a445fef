"""Requests that come and go on cache lines of one model: what runs beside the submission.

The calls are those of vLLM's runner on Neuron (neuronx_distributed_model_runner.py): one prompt a
prefill, then one token a step of every line in use, in the order of the lines; masks are inferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

from harness.session.roles import Role
from harness.session.rows import Draw, Row
from harness.session.worker import Host

_FAILED = "The model fails while it generates"


def forget(host: Host, role: str) -> None:
    """All lines are free."""
    host.models[Role(role)].reset()


def prefill(
    host: Host, role: str, line: int, ids: Sequence[int], draw: Draw, adapter: int
) -> list[int]:
    """Cache a prompt on a line; the token behind it, in a list."""
    positions = torch.arange(len(ids))[None]
    rows = [Row(line, 0, 0, Draw(*draw), adapter)]
    return _forward(host, role, torch.tensor([list(ids)]), positions, rows)


def decode(host: Host, role: str, rows: Sequence[Row]) -> list[int]:
    """One step of all lines in use, which come in ascending order; the next token of each."""
    rows = [Row(line, token, place, Draw(*draw), ids) for line, token, place, draw, ids in rows]
    tokens = torch.tensor([[row.token] for row in rows])
    positions = torch.tensor([[row.position] for row in rows])
    return _forward(host, role, tokens, positions, rows)


def _forward(
    host: Host,
    role: str,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    rows: Sequence[Row],
) -> list[int]:
    """One call of the model: tokens and positions [rows, T] -> a token for each row."""
    settings, draws = host.job.settings, [row.draw for row in rows]
    adapted = settings.adapters is not None
    params: Optional[torch.Tensor] = None
    if settings.on_device_sampling:
        params = _device_params(draws, settings.global_topk or settings.top_k)
    with host.told_as_the_submission(_FAILED), torch.inference_mode():
        output: Any = host.models[Role(role)](
            input_ids=tokens,
            position_ids=positions,
            seq_ids=torch.tensor([row.line for row in rows]),
            sampling_params=params,
            adapter_ids=torch.tensor([row.adapter for row in rows]) if adapted else None,
        )
        if settings.on_device_sampling:
            return output.hidden_states.reshape(-1).tolist()
        logits = output.logits[:, -1, :].float()
    return [_choose(row, draw) for row, draw in zip(logits, draws, strict=True)]


def _device_params(draws: Sequence[Draw], candidates: int) -> torch.Tensor:
    """fp32 [rows, 3]: top-k, top-p and temperature as the graph takes them; top-k 1 is greedy."""
    return prepare_sampling_params(
        len(draws),
        [candidates if draw.temperature else 1 for draw in draws],
        [draw.top_p for draw in draws],
        [draw.temperature or 1.0 for draw in draws],
    )


def _choose(logits: torch.Tensor, draw: Draw) -> int:
    """The best token of logits [V], or one drawn: of the top_k best, the least with mass top_p."""
    if not draw.temperature:
        return int(logits.argmax())
    best, order = (logits / draw.temperature).sort(descending=True)
    probabilities = torch.softmax(best[: draw.top_k or None], -1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= draw.top_p] = 0  # the best one stays: nothing is before it
    generator = torch.Generator().manual_seed((draw.seed * 1_000_003 + draw.number) % 2**63)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
