"""Requests that come and go on cache lines of one model, in the submission's process.

The calls are those of vLLM's runner on Neuron (neuronx_distributed_model_runner.py): one prompt a
prefill, then one token a step of every line in use, in the order of the lines; masks are inferred.
Over a cache of blocks every call names each row's blocks, and chunks replace prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

from harness.processes.worker import Draw, Host, Part, Role, Row, check_numbers
from harness.session.adapters import numbered

_FAILED = "The model fails while it generates"


def forget(host: Host, role: str) -> None:
    """All lines are free."""
    host.models[Role(role)].reset()


def prefill(
    host: Host,
    role: str,
    line: int,
    ids: Sequence[int],
    draw: Draw,
    adapter: int,
    blocks: Sequence[int] = (),
    computed: int = 0,
) -> list[int]:
    """Cache a prompt on a line, or in blocks which hold its first `computed` tokens already; the
    token behind it, in a list."""
    positions = torch.arange(len(ids))[None]
    rows = [Row(line, 0, 0, Draw(*draw), adapter, tuple(blocks))]
    where = _places(host, [(blocks, computed, len(ids))]) if blocks else {}
    return _forward(host, role, torch.tensor([list(ids)]), positions, rows, where)


def decode(host: Host, role: str, rows: Sequence[Row]) -> list[int]:
    """One step of all lines in use, which come in ascending order; the next token of each."""
    rows = [Row(*row)._replace(draw=Draw(*row[3])) for row in rows]
    tokens = torch.tensor([[row.token] for row in rows])
    positions = torch.tensor([[row.position] for row in rows])
    where: dict[str, torch.Tensor] = {}
    if rows[0].blocks:
        where = _places(host, [(row.blocks, row.position, row.position + 1) for row in rows])
    return _forward(host, role, tokens, positions, rows, where)


def chunk(host: Host, role: str, parts: Sequence[Part]) -> list[int]:
    """Tokens of several sequences in one row; the token behind each part."""
    parts = [Part(*part)._replace(draw=Draw(*part[2])) for part in parts]
    spans = [(part.blocks, part.start, part.start + len(part.tokens)) for part in parts]
    where = _places(host, spans)
    where["slot_mapping"] = where["slot_mapping"][where["slot_mapping"] >= 0]
    for name in ("full_context_lens", "computed_context_lens"):
        where[name] = where[name].flatten()
    tokens = torch.tensor([[token for part in parts for token in part.tokens]])
    positions = torch.tensor([[place for _, start, end in spans for place in range(start, end)]])
    rows = [Row(line, 0, 0, part.draw, 0) for line, part in enumerate(parts)]
    return _forward(host, role, tokens, positions, rows, where)


def _places(host: Host, spans: Sequence[tuple[Sequence[int], int, int]]) -> dict[str, torch.Tensor]:
    """NxDI's arguments for rows of (blocks, first new token, end): a block table, a slot for each
    new token and -1 behind a row's, and the numbers of all and of computed tokens."""
    assert host.job.settings.blocks is not None
    size = host.job.settings.blocks.size
    width = host.job.settings.seq_len // size
    tables = [[*blocks, *[0] * (width - len(blocks))] for blocks, _, _ in spans]
    slots = [
        [blocks[place // size] * size + place % size for place in range(start, end)]
        for blocks, start, end in spans
    ]
    longest = max(map(len, slots))
    return {
        "block_table": torch.tensor(tables),
        "slot_mapping": torch.tensor([row + [-1] * (longest - len(row)) for row in slots]),
        "full_context_lens": torch.tensor([[end] for _, _, end in spans]),
        "computed_context_lens": torch.tensor([[start] for _, start, _ in spans]),
    }


def _forward(
    host: Host,
    role: str,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    rows: Sequence[Row],
    where: Mapping[str, torch.Tensor],
) -> list[int]:
    """One call of the model: tokens and positions [rows, T], or [1, T] of a chunk, and `where` in
    the cache they go, where it has no lines -> a token for each row."""
    settings, draws = host.job.settings, [row.draw for row in rows]
    model: Any = host.models[Role(role)]
    adapted = settings.adapters is not None
    chunks = settings.blocks is not None and settings.blocks.chunks
    # A row for each, whoever samples: NxDI's own default has as many as the batch, and a chunk, one
    # row of the model itself, takes those of all sequences.
    padding = draws[-1:] * (settings.batch_size - len(draws)) if chunks else []
    params = _device_params([*draws, *padding], settings.global_topk or settings.top_k)
    lines = [0] if chunks else [row.line for row in rows]
    with host.told_as_the_submission(_FAILED), torch.inference_mode():
        output: Any = model(
            input_ids=tokens,
            position_ids=positions,
            seq_ids=torch.tensor(lines),
            sampling_params=params,
            adapter_ids=numbered(model, [row.adapter for row in rows]) if adapted else None,
            **where,
        )
        if settings.on_device_sampling:
            return output.hidden_states.reshape(-1).tolist()[: len(rows)]
        logits = output.logits[0, : len(rows)] if chunks else output.logits[:, -1, :]
        logits = logits.float()
        check_numbers(logits)
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
