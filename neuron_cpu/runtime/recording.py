"""The events of one sub-model and bucket: the record that every consumer reads.

`graph.trace` fills a GraphRecord. `operators.json` and the driver's tables read its products and
kernels, the driver's estimate reads all of its events, collectives and data movement included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import bmm_flop, mm_flop

from neuron_cpu.core.program.digest import fingerprint

KERNEL, COLLECTIVE, TORCH = "kernel", "collective", "torch"

_RENAMING = (
    "_reshape_alias _unsafe_view alias as_strided detach detach_ empty empty_like expand "
    "lift_fresh narrow new_empty permute reshape select slice split split_with_sizes squeeze t "
    "transpose unbind unfold unsqueeze view"
)
_MOVING = "_to_copy arange clone copy_ fill_ full ones zero_ zeros"
# Operators that rename data or describe it otherwise: nothing moves, nothing is computed.
METADATA_ONLY = frozenset(_RENAMING.split())
# Those that compute nothing: operators.json leaves them out.
_MOVES = METADATA_ONLY.union(_MOVING.split())

_PRODUCTS = frozenset({"mm", "bmm", "mv", "dot"})
_PRODUCTS_WITH_ADDEND = frozenset({"addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv"})


@dataclass(frozen=True)
class Dot:
    """One matrix product: operand shapes and the dimensions that they share."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]
    batch: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, shapes: Sequence[tuple[int, ...]]) -> Dot | None:
        """The product that the aten operator `name` computes on tensors of `shapes`, or None.

        Attention of PyTorch's own arrives here as its two batched products, because the tracer's
        meta device has no fused operator for it.
        """
        if name in _PRODUCTS_WITH_ADDEND:
            shapes = shapes[1:]
        elif name not in _PRODUCTS:
            return None
        lhs, rhs = shapes[:2]
        if len(lhs) == 3:
            return cls(lhs, rhs, (2,), (1,), (0,))
        return cls(lhs, rhs, (len(lhs) - 1,), (0,))

    @property
    def macs(self) -> int:
        """Multiply-accumulates, of which PyTorch's counter makes two operations each."""
        if self.batch:
            return bmm_flop(self.lhs, self.rhs) // 2
        rows = self.lhs if len(self.lhs) == 2 else (1, *self.lhs)
        columns = self.rhs if len(self.rhs) == 2 else (*self.rhs, 1)
        return mm_flop(rows, columns) // 2


@dataclass(frozen=True)
class TensorShape:
    """The known properties of a tensor while only shapes are traced; `weight`: a view of one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool = True
    weight: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, wherever they lie."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def storage_of(tensor: torch.Tensor) -> int:
    """What a tensor and its views share."""
    return tensor.untyped_storage()._cdata


def shapes_of(
    tensors: Sequence[torch.Tensor], weights: Container[int] = ()
) -> tuple[TensorShape, ...]:
    """The tensors' shapes; `weights`: the storages of weights."""
    return tuple(
        TensorShape(tuple(t.shape), t.dtype, t.is_contiguous(), storage_of(t) in weights)
        for t in tensors
    )


@dataclass(frozen=True)
class Event:
    """One thing that a rank runs.

    Attributes:
        where: path of the module inside the model that asked for it, "" for the model itself.
        kind: KERNEL, COLLECTIVE or TORCH.
        name: of the kernel, the collective ("all-reduce", ...) or the aten operator.
        inputs, outputs: the tensors among the arguments, in order, and among the results.
        macs: of a matrix product or a kernel.
        program: the traced Program of a kernel.
    """

    where: str
    kind: str
    name: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    macs: int = 0
    program: Any = None

    @property
    def is_product(self) -> bool:
        return self.kind == TORCH and self.name in _PRODUCTS | _PRODUCTS_WITH_ADDEND

    @property
    def factors(self) -> tuple[TensorShape, ...]:
        """A kernel's inputs; of a product the two factors, without an addend."""
        return self.inputs if self.kind == KERNEL else self.inputs[-2:]


def _row(
    operator: str,
    in_kernel: bool,
    name: str,
    shapes: Sequence[Sequence[int]] = (),
    macs: int = 0,
    count: int = 1,
    program: str = "",
) -> dict[str, Any]:
    """One row of operators.json: the path of the module inside the model, the kernel's or the
    operator's name, its shapes and its work; a kernel's `program` as its fingerprint."""
    return vars() | {"shapes": [*map(list, shapes)]}


@dataclass
class Counts:
    """The work of a graph, to compare a run with its trace.

    Attributes:
        rows: (KERNEL or TORCH, name, shapes of inputs or factors, MACs, a kernel's fingerprint).
        others: operators of PyTorch -> how many there are, and elements of their results.
    """

    rows: Counter = field(default_factory=Counter)
    others: dict[str, list[int]] = field(default_factory=dict)

    def add_other(self, name: str, results: Sequence[Any]) -> None:
        """An operator that is no product; one that computes nothing is left out."""
        if name not in _MOVES:
            # in place or not: a graph that is kept writes caches in place
            entry = self.others.setdefault(name.rstrip("_"), [0, 0])
            entry[0] += 1
            entry[1] += sum(math.prod(getattr(result, "shape", ())) for result in results)

    def as_json(self) -> dict[str, Any]:
        rows = [
            _row("", ran == KERNEL, name, shapes, macs, count, program)
            for (ran, name, shapes, macs, program), count in self.rows.items()
        ]
        return {"operators": rows, "others": self.others}


def sizes(bucket: int | Sequence[int]) -> tuple[int, int]:
    """New tokens of a prompt, or the length that a step sees; cached tokens of a prompt."""
    if isinstance(bucket, int):
        return bucket, 0
    new, prior = bucket
    return (new, prior) if new > 1 else (prior, 0)


@dataclass
class GraphRecord:
    """The parts of one sub-model and bucket, in the order in which they run."""

    tag: str
    bucket: int | list[int]  # or new tokens and cached ones, tiles of them in a chunk
    events: list[Event] = field(default_factory=list)

    @property
    def operators(self) -> list[dict[str, Any]]:
        """The kernels and matrix products, one row each."""
        return [
            _row(
                e.where,
                e.kind == KERNEL,
                e.name,
                [t.shape for t in e.factors],
                e.macs,
                program="" if e.program is None else fingerprint(e.program),
            )
            for e in self.events
            if e.kind == KERNEL or e.is_product
        ]

    @property
    def elementwise(self) -> dict[str, Counter]:
        """How often each module runs each other operator that computes."""
        found: dict[str, Counter] = {}
        for event in self.events:
            if event.kind == TORCH and not event.is_product and event.name not in _MOVES:
                found.setdefault(event.where, Counter())[event.name] += 1
        return found

    @property
    def others(self) -> dict[str, list[int]]:
        """Operators of PyTorch but products, as `Counts` has them."""
        counts = Counts()
        for event in self.events:
            if event.kind == TORCH and not event.is_product:
                counts.add_other(event.name, event.outputs)
        return counts.others

    @property
    def instructions(self) -> int:
        """Traced instructions of all kernel calls."""
        return sum(len(event.program) for event in self.events if event.program is not None)

    def as_json(self) -> dict[str, Any]:
        plain = [
            _row(path, False, ", ".join(sorted(names)), count=sum(names.values()))
            for path, names in self.elementwise.items()
        ]
        size, prior = sizes(self.bucket)
        return {
            "submodel": self.tag,
            "bucket": size,
            "prior": prior,
            "instructions": self.instructions,
            "operators": self.operators + plain,
            "others": self.others,
        }
