"""How much of the work runs in NKI kernels: multiply-accumulates (MACs) by graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from harness.figures.graphs import DECODE, PREFILL, Graph, prompt_calls
from harness.settings import Speculation


@dataclass(frozen=True)
class NkiShare:
    """Two ratios, the products outside of kernels, and kernels whose work nobody counted."""

    contest: float  # MACs in NKI over all MACs, smallest bucket of prefill and decode, once each
    weighted: float  # the same with each graph weighted by how often one generation runs it
    outside: list[str]  # "sub-model: operator (share of its MACs)"
    warnings: list[str]


def nki_share(
    graphs: Sequence[Graph],
    prompt_tokens: int,
    new_tokens: int,
    chunk: Optional[int] = None,
    speculation: Optional[Speculation] = None,
) -> NkiShare:
    """The NKI share of one generation of `new_tokens` tokens behind a prompt, of which calls
    after a first take `chunk` tokens. Steps of speculation count once for each token."""
    alone = any(graph.submodel == DECODE for graph in graphs)
    step, tokens = (speculation.submodel, speculation.length) if speculation else (DECODE, 1)
    first = [bucket_of(graphs, name, 0) for name in (PREFILL, DECODE if alone else step)]
    longest, most = (
        max((g.bucket for g in graphs if g.submodel == name), default=prompt_tokens)
        for name in (PREFILL, DECODE)
    )
    calls = prompt_calls(prompt_tokens, longest, chunk, most) + [
        (step, position + tokens)
        for position in range(prompt_tokens, prompt_tokens + new_tokens - 1)
    ]
    runs = [(bucket_of(graphs, *call), 1) for call in calls]
    return NkiShare(
        contest=_ratio([(graph, 1) for graph in first]),
        weighted=_ratio(runs),
        outside=[line for graph in first if graph for line in outside_lines(graph)],
        warnings=[
            f"{graph.submodel}, bucket {graph.bucket}: no MAC count for the kernels "
            f"{', '.join(graph.uncounted_kernels)}; their work is missing from the NKI share."
            for graph in graphs
            if graph.uncounted_kernels
        ],
    )


def bucket_of(graphs: Sequence[Graph], submodel: str, length: int) -> Optional[Graph]:
    """The smallest graph of a sub-model that holds `length` tokens, or the largest."""
    ordered = sorted((g for g in graphs if g.submodel == submodel), key=lambda g: g.bucket)
    if not ordered:
        return None
    return next((graph for graph in ordered if graph.bucket >= length), ordered[-1])


def _ratio(runs: Sequence[tuple[Optional[Graph], int]]) -> float:
    total = sum(graph.macs * times for graph, times in runs if graph)
    inside = sum(graph.nki_macs * times for graph, times in runs if graph)
    return inside / total if total else 0.0


def outside_lines(graph: Graph) -> list[str]:
    """Each product outside NKI with its share of the graph's MACs."""
    return [
        f"{graph.submodel}: {row.operator or row.name} ({row.macs / graph.macs:.2%})"
        for row in graph.grouped()
        if not row.in_kernel and row.macs
    ]
