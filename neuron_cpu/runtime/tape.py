"""A compiled graph: the operators of a traced forward, which any rank can run again.

`Capture` writes it while `graph.GraphRecorder` traces rank 0's module on shapes. A node is an
operator of PyTorch, a kernel call or a collective; tensors among its arguments are references to
inputs, weights, states, constants and results of earlier nodes. Nothing else of the model is left:
every rank runs the same nodes on its own weights and states, as on the device.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from neuron_cpu.core.language.specialisation import Hole, filled
from neuron_cpu.errors import CompileError

from . import rounding
from .collectives import BROADCAST, Collective
from .recording import storage_of

FORMAT = "neuron_cpu graph 3"
_META = torch.device("meta")
# Operators that a graph's last reader of a state may run in place: an update of one token would
# copy the whole cache otherwise. Name of the operator -> of the one in place.
_IN_PLACE = {
    "aten::scatter.src": "aten::scatter_.src",
    "aten::scatter.value": "aten::scatter_.value",
    "aten::index_put": "aten::index_put_",
    "aten::index_copy": "aten::index_copy_",
}
_OF_FIRST = Collective(BROADCAST)
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_MOVING = tuple(
    f"aten::{name}"
    for name in ("scatter", "gather", "index", "cat", "where", "flip", "slice_scatter")
)


@dataclass
class Node:
    """One step of a graph.

    Attributes:
        call: "namespace::name.overload" of an operator, a kernel, or a collective.
        arguments: positional ones and those by name, with holes for tensors.
        results: number of each tensor among the results, in order.
        writes: whether it changes an argument.
        draws: whether it draws random numbers, which are rank 0's on all ranks.
        dead: tensors that nobody reads behind it.
    """

    call: Any
    arguments: tuple[Any, Any]
    results: list[int]
    writes: bool = False
    draws: bool = False
    dead: tuple[int, ...] = ()


@dataclass
class Tape:
    """A graph.

    Attributes:
        inputs: tensors of a call, in order; with their shapes and dtypes.
        weights, states: name -> number; states are kept between calls.
        constants: number -> value.
        outputs: what the forward returned, with holes.
        aliases: position among the flattened outputs -> state that takes it over.
    """

    inputs: list[int] = field(default_factory=list)
    input_types: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    types: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    aliases: dict[int, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The graph as a file has it; kernels by the names of their functions."""
        buffer = io.BytesIO()
        try:
            pickle.dump((FORMAT, self), buffer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CompileError(
                f"A graph cannot be written ({error}), expected kernels that are functions of a "
                "module and arguments that pickle takes; define the named objects at module level."
            ) from error
        return buffer.getvalue()

    @staticmethod
    def from_bytes(content: bytes) -> Tape:
        """The graph of a file that `to_bytes` made; CompileError for any other."""
        try:
            form, tape = pickle.loads(content)
        except Exception as error:  # foreign bytes can mean anything to pickle
            raise CompileError(
                f"A graph of {len(content)} bytes is not one of neuron_cpu or is cut short "
                f"({type(error).__name__}), expected what its compiler wrote; compile again."
            ) from error
        if form != FORMAT:
            raise CompileError(f"A graph is {form!r}, expected {FORMAT!r}; compile again.")
        tape.nodes = [_resolved(node) for node in tape.nodes]
        return tape

    def finish(self, memory: dict[int, int]) -> None:
        """Drop unread nodes, let caches be updated in place, record where tensors die.

        `memory` names the storage of each tensor, which views share.
        """
        needed = set(_numbers(self.outputs))
        kept: list[Node] = []
        read_later = {memory.get(n, -n) for n in needed}
        states = set(self.states.values())
        alive = set(needed)
        for node in reversed(self.nodes):
            if not (node.writes or node.draws or not needed.isdisjoint(node.results)):
                continue
            read = set(_numbers(node.arguments))
            needed |= read
            kept.append(node)
            node.dead = tuple((read | set(node.results)) - alive)
            alive |= read | set(node.results)
            name = _IN_PLACE.get(node.call) if isinstance(node.call, str) else None
            if name is not None:
                target = int(node.arguments[0][0])
                if target in states and memory[target] not in read_later:
                    node.call, node.writes = name, True
            read_later |= {memory.get(n, -n) for n in read}
        self.weights = {name: n for name, n in self.weights.items() if n in needed}
        self.nodes = kept[::-1]

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        weights: dict[str, torch.Tensor],
        states: dict[str, torch.Tensor],
    ) -> list[Any]:
        """One call on one rank; returns the outputs that are no states, and updates `states`."""
        values: dict[int, Any] = dict(self.constants)
        values.update(zip(self.inputs, inputs))
        values.update((number, weights[name]) for name, number in self.weights.items())
        values.update((number, states[name]) for name, number in self.states.items())
        for node in self.nodes:
            run_node(node, values)
            for number in node.dead:
                values.pop(number, None)
        made = [values[o] if isinstance(o, Hole) else o for o in self.outputs]
        for position, name in self.aliases.items():
            states[name] = rounding.settled(made[position])
        return [value for k, value in enumerate(made) if k not in self.aliases]


def run_node(node: Node, values: dict[int, Any]) -> None:
    """Run one step; its results join `values`."""
    args, kwargs = (filled(part, values) for part in node.arguments)
    try:
        result = node.call(*args, **kwargs)
    except NotImplementedError:
        result = _moved_as_bytes(node, args, kwargs)
    if node.draws:
        result = _OF_FIRST(result)
    if node.results:
        made = [result] if isinstance(result, torch.Tensor) else tensors_of(result)
        values.update(zip(node.results, made))


def _moved_as_bytes(node: Node, args: Any, kwargs: Any) -> Any:
    """Run an operator that PyTorch's CPU build lacks in fp8 on the same bytes."""
    name = node.call.name() if isinstance(node.call, torch._ops.OpOverload) else ""
    kinds = {tensor.dtype for tensor in tensors_of((args, kwargs))} & _FP8
    if len(kinds) != 1 or not name.startswith(_MOVING):
        raise
    (kind,) = kinds

    def as_bytes(tree: Any) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t.view(torch.uint8) if t.dtype == kind else t, tree
        )

    return node.call(*as_bytes(args), **as_bytes(kwargs)).view(kind)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    return _leaves(tree, torch.Tensor)


def _numbers(tree: Any) -> list[int]:
    return [*map(int, _leaves(tree, Hole))]


def _leaves(tree: Any, kind: type) -> list[Any]:
    """Written out, because PyTorch's general tree took about a third of the time of a trace."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [leaf for branch in tree for leaf in _leaves(branch, kind)]


def _resolved(node: Node) -> Node:
    """The node with the operator that its name stands for."""
    if isinstance(node.call, str):
        space, _, name = node.call.partition("::")
        name, _, overload = name.partition(".")
        node.call = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    return node


class Capture:
    """Writes a Tape while a forward is traced."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._count = 0
        self._known: dict[int, tuple[int, torch.Tensor]] = {}  # by id: number, and the tensor
        self._written: dict[int, tuple[int, torch.Tensor]] = {}  # constants' storages
        self.examples: dict[int, torch.Tensor] = {}  # inputs that the graph is traced with

    def new(self, tensor: torch.Tensor) -> int:
        """A number for `tensor`, which later nodes may read."""
        self._count += 1
        self._known[id(tensor)] = self._count, tensor
        return self._count

    def ref(self, tensor: torch.Tensor) -> Hole:
        """The hole of `tensor`; a tensor new to the capture is a constant."""
        known = self._known.get(id(tensor))
        if known is not None:
            return Hole(known[0])
        written = None if tensor.is_meta else self._written.get(storage_of(tensor))
        if written is not None:
            return self._view(tensor, written[0])
        if tensor.is_meta:
            raise CompileError(
                f"A tensor of shape {list(tensor.shape)} without values is not the graph's, "
                "expected inputs, weights and tensors computed from them; make it in forward."
            )
        number = self.new(tensor)
        with _disable_current_modes():
            self.tape.constants[number] = tensor.detach().clone()
        return Hole(number)

    def refs(self, tree: Any) -> Any:
        """The arguments with holes for their tensors."""
        if isinstance(tree, torch.Tensor):
            return self.ref(tree)
        if isinstance(tree, (list, tuple)):
            parts = [self.refs(part) for part in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        if isinstance(tree, dict):
            return {key: self.refs(part) for key, part in tree.items()}
        return torch.device("cpu") if tree == _META else tree

    def forget(self, tensor: torch.Tensor) -> None:
        """Record that a constant changed: earlier readers keep its earlier value."""
        if id(tensor) in self._known and not tensor.is_meta:
            del self._known[id(tensor)]

    def becomes_traced(self, tensor: torch.Tensor) -> None:
        """A constant is about to be written with what depends on inputs: from here on it and its
        views are memory of the call."""
        storage = storage_of(tensor)
        if tensor.is_meta or storage in self._written:
            return
        with _disable_current_modes():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        self._known = {
            key: entry
            for key, entry in self._known.items()
            if entry[1].is_meta or storage_of(entry[1]) != storage
        }
        self._written[storage] = self._add("aten::clone", ((self.ref(whole),), {})), tensor

    def _view(self, tensor: torch.Tensor, whole: int) -> Hole:
        place = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        number = self._add("aten::as_strided", ((Hole(whole), *place), {}))
        self._known[id(tensor)] = number, tensor
        return Hole(number)

    def _add(self, call: Any, arguments: tuple[Any, Any]) -> int:
        self._count += 1
        self.tape.nodes.append(Node(call, arguments, [self._count]))
        return self._count

    def node(self, call: Any, arguments: tuple[Any, Any], results: Any, **marks: Any) -> None:
        """Add a step; `arguments` have holes already, `results` are the tensors that it made."""
        numbers = [self.new(tensor) for tensor in tensors_of(results)]
        self.tape.nodes.append(Node(call, arguments, numbers, **marks))

    def example(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of `tensor` for the example inputs; None where other tensors decide."""
        ref = self.ref(tensor)
        needed, steps = {int(ref)}, []
        for node in reversed(self.tape.nodes):
            if needed.isdisjoint(node.results):
                continue
            if node.writes or not isinstance(node.call, str):
                return None
            needed = needed - set(node.results) | set(_numbers(node.arguments))
            steps.append(_resolved(replace(node)))
        values = {**self.tape.constants, **self.examples}
        if not needed <= values.keys():
            return None
        with _disable_current_modes():
            for node in reversed(steps):
                run_node(node, values)
            return values[ref]

    def finish(self, outputs: Any, aliases: dict[int, str]) -> Tape:
        """The whole graph; `aliases` has the state that each aliased output goes to."""
        self.tape.outputs = [
            self.ref(value) if isinstance(value, torch.Tensor) else value
            for value in pytree.tree_leaves(outputs)
        ]
        self.tape.aliases = aliases
        self.tape.finish({number: storage_of(tensor) for number, tensor in self._known.values()})
        return self.tape
