"""Runs modules again without kernels where the real library runs: on its graphs, see `repeater`.

A graph of the library has no modules left, but knows which of its nodes each module's call took,
what went in and what came out. The run with kernels is looked at first; the reference models then
run the same calls, and at the begin of each module its nodes run once more, on what the module with
kernels was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from harness.figures.divergence import NKI_TOKENS, PREFILL_PHASE, Error
from harness.processes.worker import Host, Role
from harness.session.model import run_plainly
from neuron_cpu.runtime.tape import Call, Tape, run_node

Name = tuple[str, int]  # of a call: the module, and how often it has been called before


@dataclass
class Seen:
    """The inputs and results of the calls in one graph's run on one rank."""

    given: dict[Name, list[torch.Tensor]] = field(default_factory=dict)
    made: dict[Name, list[torch.Tensor]] = field(default_factory=dict)
    repeated: dict[Name, Optional[torch.Tensor]] = field(default_factory=dict)


@dataclass
class Run:
    """One call of a graph: sub-model, bucket, inputs, and what each rank saw."""

    tag: str
    bucket: int
    inputs: list[torch.Tensor]
    ranks: dict[int, Seen] = field(default_factory=dict)


class Tap:
    """Looks at one run on one rank; with `other` it repeats that one's calls on this graph."""

    def __init__(self, tape: Tape, seen: Seen, other: Optional[Seen] = None) -> None:
        self._tape, self._seen, self._other = tape, seen, other
        self._starts: dict[int, list[tuple[Name, Call]]] = {}
        self._ends: dict[int, list[tuple[Name, Call]]] = {}
        self._calls: dict[Name, Call] = {}
        for name, call in named_calls(tape):
            self._calls[name] = call
            self._starts.setdefault(call.nodes[0], []).append((name, call))
            self._ends.setdefault(call.nodes[1], []).append((name, call))

    def __call__(self, position: int, values: dict[int, Any]) -> None:
        for name, call in self._ends.get(position, ()):
            self._seen.made[name] = [values[ref.number].clone() for ref in call.made]
        for name, call in self._starts.get(position, ()):
            self._seen.given[name] = [values[ref.number].clone() for ref in call.given]
            if self._other is not None and name in self._other.given:
                self._seen.repeated[name] = self._repeat(name, call, values)

    def _repeat(self, name: Name, call: Call, values: dict[int, Any]) -> Optional[torch.Tensor]:
        """The call on the other's inputs; None where it takes others than that one."""
        assert self._other is not None
        given = list(self._other.given[name])
        for earlier in handed_on(self._other, name):
            if earlier in self._calls and given:
                changed = self._segment(self._calls[earlier], values, given[:1])
                given[:1] = [] if changed is None else [changed]
        return self._segment(call, values, given)

    def _segment(
        self, call: Call, values: dict[int, Any], given: Sequence[torch.Tensor]
    ) -> Optional[torch.Tensor]:
        forms = [values[ref.number].shape for ref in call.given[: len(given)]]
        if not call.made or [tensor.shape for tensor in given] != forms:
            return None
        own, nodes = dict(values), self._tape.nodes[call.nodes[0] : call.nodes[1]]
        for node in nodes:
            target = node.arguments[0][0] if node.writes and node.arguments[0] else None
            number = getattr(target, "number", None)
            if number in own:  # the run itself goes on from its own
                own[number] = own[number].clone()
        for ref, tensor in zip(call.given, given):
            own[ref.number] = tensor.to(own[ref.number].dtype)
        for node in nodes:
            run_node(node, own)
        return own[call.made[0].number]


def named_calls(tape: Tape) -> list[tuple[Name, Call]]:
    """The calls in the order of their ends."""
    count: Counter[str] = Counter()
    found = []
    for call in tape.calls:
        found.append(((call.where, count[call.where]), call))
        count[call.where] += 1
    return found


def handed_on(seen: Seen, name: Name) -> list[Name]:
    """Modules right before this one that returned their input: a later kernel does their work."""
    before: list[Name] = []
    for other in seen.made:
        if other == name:
            break
        before = [*before, other] if handed_on_itself(seen, other) else []
    return before


def errors(
    host: Host,
    ids: Sequence[int],
    comparable: Callable[[str, str], bool],
    phases: dict[str, str],
    make: Callable[..., Error],
    rows: Callable[[Any, int], Any],
    layer: Callable[[str], bool],
) -> tuple[list[Error], list[Error]]:
    """Each module's own errors, and errors that grow by layer (prefill)."""
    runs = _watched(host, ids)
    twins = [_repeated(host, role, runs) for role in (Role.TORCH, Role.SHADOW)]
    own, grown = [], []
    for number, run in enumerate(runs):
        phase, seen = phases.get(run.tag, ""), run.ranks[0]
        others = [twin[number].ranks[0] for twin in twins]
        tape = _graphs(host, Role.NKI)[run.tag][run.bucket].tape
        for name, _ in named_calls(tape):
            module, made = name[0], seen.made.get(name)
            if not made or not comparable(module, phase) or handed_on_itself(seen, name):
                continue
            again = [other.repeated.get(name) for other in others]
            if all(value is not None and value.shape == made[0].shape for value in again):
                parts = [rows(value, len(ids)) for value in (made[0], *again)]
                own.append(make(phase, module, *parts))
            alone = [other.made.get(name) for other in others]
            if phase == PREFILL_PHASE and layer(module) and all(alone):
                parts = [rows(value[0], len(ids)) for value in (made, *alone) if value]
                grown.append(make(phase, module, *parts))
    return own, grown


def handed_on_itself(seen: Seen, name: Name) -> bool:
    """Whether the module returned its input."""
    given, made = seen.given.get(name), seen.made[name]
    if not given or not made:
        return False
    return given[0].shape == made[0].shape and torch.equal(given[0], made[0])


def _graphs(host: Host, role: Role) -> Any:
    return host.models[role].traced_model.graphs()


def _watched(host: Host, ids: Sequence[int]) -> list[Run]:
    """The run with kernels: a prompt and a decode step."""
    runs: list[Run] = []
    graphs = [
        (tag, bucket, graph)
        for tag, buckets in _graphs(host, Role.NKI).items()
        for bucket, graph in enumerate(buckets)
    ]
    for tag, bucket, graph in graphs:
        graph.forward = _noting(graph, tag, bucket, runs)
    try:
        run_plainly(host, Role.NKI, ids, NKI_TOKENS)
    finally:
        for _, _, graph in graphs:
            graph.tap = None
            del graph.forward
    return runs


def _noting(graph: Any, tag: str, bucket: int, runs: list[Run]) -> Callable[[Any], Any]:
    whole = graph.forward

    def forward(inputs: list[torch.Tensor]) -> Any:
        run = Run(tag, bucket, [tensor.clone() for tensor in inputs])
        runs.append(run)
        graph.tap = lambda rank: Tap(graph.tape, run.ranks.setdefault(rank, Seen()))
        return whole(inputs)

    return forward


def _repeated(host: Host, role: Role, runs: Sequence[Run]) -> list[Run]:
    """The same calls on a reference model, whose modules run on the inputs of the modules of
    `runs`."""
    found = []
    for run in runs:
        graph = _graphs(host, role)[run.tag][run.bucket]
        own = Run(run.tag, run.bucket, run.inputs)
        graph.tap = lambda rank, graph=graph, own=own, run=run: Tap(
            graph.tape, own.ranks.setdefault(rank, Seen()), run.ranks[rank]
        )
        try:
            graph.forward(run.inputs)
        finally:
            graph.tap = None
        found.append(own)
    return found
