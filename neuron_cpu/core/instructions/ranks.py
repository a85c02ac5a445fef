"""Collectives that a kernel issues itself (``nki.collectives``, SDK 2.28 and later).

One instruction stands for a rank's part: it sends its sources and receives its destinations. The
ranks meet when it is executed (``device/ranks.py``). Reductions are computed in fp32 in the order
of the group and rounded once; integers exactly. Sources: aws-neuron-sdk v2.32.0,
nki/api/nki/collectives/__init__.py.
"""

from collections.abc import Callable

import torch

from ..device import ranks
from ..device.dtypes import Tensors
from ..device.errors import refuse
from ..program.attributes import RAW, Attrs, among, constants
from ..program.program import Instruction, Program
from ..program.storage import Frame
from .copies import DMA_COPY, EXCHANGE, dma
from .entry import MANY, no_cycles

COMBINE: dict[str, Callable] = {
    "add": torch.add,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@constants
class CollectiveAttrs(Attrs):
    """Attributes of a collective as one rank takes part in it.

    Attributes:
        kind: which one.
        members: ranks of the group, in its order.
        place: of the rank among them.
        op: operator of a reduction.
        dim: axis along which parts follow each other.
        sender: place of the rank whose tensors a permutation receives; None: it keeps its own.
        sent: how many of the sources are sent; the others are what destinations held.
        known: receive counts are given in the metadata.
        placed: receive displacements are, too.
        core: the physical core of a logical one that issued it; None for all.
    """

    kind: str
    members: tuple[int, ...]
    place: int
    sent: int
    op: str = among(COMBINE, default="add")
    dim: int = 0
    sender: int | None = None
    known: bool = False
    placed: bool = False
    core: int | None = None

    def misfit(self) -> str:
        if self.kind not in KINDS:
            return f"kind {self.kind!r}, expected one of {sorted(KINDS)}"
        return Attrs.misfit(self)


def _collect(attrs: CollectiveAttrs, xs: Tensors) -> torch.Tensor | Tensors:
    lead = xs[: attrs.sent]
    shapes = [(tuple(x.shape), x.dtype) for x in lead]
    label = f"{attrs.kind} of {shapes} {attrs.op}"
    parts = ranks.own().meet(label, attrs.members, lead)
    made = KINDS[attrs.kind](attrs, parts, xs[attrs.sent :])
    return made[0] if len(made) == 1 else made


def _sum(attrs: CollectiveAttrs, tensors: Tensors) -> torch.Tensor:
    """Join tensors in the order of the group; integers come in their stored type."""
    wide = [x if x.is_floating_point() else x.to(torch.int64) for x in tensors]
    total = wide[0]
    for x in wide[1:]:
        total = COMBINE[attrs.op](total, x)
    return total


def _all_reduce(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    return [_sum(attrs, list(of_all)) for of_all in zip(*parts)]


def _reduce_scatter(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    whole = _all_reduce(attrs, parts, held)
    return [x.chunk(len(attrs.members), attrs.dim)[attrs.place] for x in whole]


def _all_to_all(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    n = len(attrs.members)
    return [
        torch.cat([x.chunk(n, attrs.dim)[attrs.place] for x in of_all], attrs.dim)
        for of_all in zip(*parts)
    ]


def _permute(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    return held if attrs.sender is None else parts[attrs.sender]


def _permute_reduce(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    """Each rank reduces its two tensors of a channel first; the predecessor's result comes."""
    assert attrs.sender is not None
    theirs = parts[attrs.sender]
    half = len(theirs) // 2
    return [_sum(attrs, [a, b]) for a, b in zip(theirs[:half], theirs[half:])]


def _varying(attrs: CollectiveAttrs, parts: list[Tensors], held: Tensors) -> Tensors:
    """Parts whose sizes are data: rows of the metadata are send counts and displacements, then
    receive counts and displacements, in elements, a column for each rank.

    Without receive displacements each sender has an equal part of the target (vLLM Neuron's
    all_gather_v, and deepep-trn's transport on a trn2).
    """
    n = len(attrs.members)
    target, told = held[0].reshape(-1).clone(), held[1].reshape(-1, n).to(torch.int64)
    slot, counts = target.numel() // n, []
    for k, (source, metadata) in enumerate(parts):
        rows = metadata.reshape(-1, n).to(torch.int64)
        column = 0 if attrs.kind == "all_gather_v" else attrs.place
        count, start = int(rows[0, column]), int(rows[1, column])
        begin = int(told[3, k]) if attrs.placed else k * slot
        end = target.numel() if attrs.placed else begin + slot
        if start + count > source.numel() or begin + count > end:
            raise refuse(
                "sim_collective_counts",
                f"{attrs.kind} takes {count} elements from {start} of {source.numel()} to {begin} "
                f"of {target.numel()}, expected them inside of both parts; correct the metadata",
            )
        if attrs.known and int(told[2, k]) != count:
            raise refuse(
                "sim_collective_counts",
                f"{attrs.kind} receives {count} elements of rank {attrs.members[k]}, expected the "
                f"{int(told[2, k])} of the metadata; correct one of them",
            )
        target[begin : begin + count] = source.reshape(-1)[start : start + count]
        counts.append(count)
    told[2] = torch.tensor(counts)
    return [target.reshape(held[0].shape), told.to(held[1].dtype).reshape(held[1].shape)]


KINDS: dict[str, Callable[[CollectiveAttrs, list[Tensors], Tensors], Tensors]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": lambda attrs, parts, held: [torch.cat(x, attrs.dim) for x in zip(*parts)],
    "all_to_all": _all_to_all,
    "collective_permute": _permute,
    "collective_permute_implicit": _permute,
    "collective_permute_implicit_reduce": _permute_reduce,
    "all_gather_v": _varying,
    "all_to_all_v": _varying,
}


def moved_bytes(instruction: Instruction) -> float:
    """Bytes that the rank sends: around a ring (n - 1) / n of the whole tensor for a gather, a
    scatter or an exchange, twice that for an all-reduce, all of it for a permutation."""
    attrs = CollectiveAttrs.of(instruction)
    n = len(attrs.members)
    views = instruction.src[: attrs.sent]
    if attrs.kind.endswith("_v"):
        views = views[:1]
    size = float(sum(v.size * v.dt.itemsize for v in views))
    if attrs.kind.startswith("all_gather"):
        size *= n
    if attrs.kind == "collective_permute_implicit_reduce":
        return size / 2
    if "permute" in attrs.kind:
        return size
    return (2 if attrs.kind == "all_reduce" else 1) * size * (n - 1) / n


COLLECTIVE = dma(
    "collective",
    "ranks",
    CollectiveAttrs,
    _collect,
    no_cycles,
    meets=True,
    note="SDK 2.28: nki.collectives; ranks meet, each with its own tensors",
    operands=(1, MANY),
    results=MANY,
)


def by_core(program: Program) -> list[Program]:
    """The program itself where one core runs it, or the program of each core."""
    if program.cores == 1:
        return [program]
    return [_of_core(program, core) for core in range(program.cores)]


def _of_core(program: Program, core: int) -> Program:
    made = Program(program.name, program.grid, program.function)
    made.storages, made.inputs, made.outputs = program.storages, program.inputs, program.outputs
    made.output_shapes, made.core, made.today = program.output_shapes, program.core, program.today
    made.direct_allocation = program.direct_allocation
    renamed: dict[int, Instruction] = {}
    for instruction in program.instructions:
        part = _part(instruction, core)
        if part is not None:
            made.instructions.append(part)
            if program.edges:
                renamed[id(instruction)] = part
    made.edges = [
        (renamed[id(a)], renamed[id(b)])
        for a, b in program.edges
        if id(a) in renamed and id(b) in renamed
    ]
    return made


def _part(instruction: Instruction, core: int) -> Instruction | None:
    """The part of an instruction that ``core`` does, outside of the loop over the cores."""
    if instruction.op is EXCHANGE:
        # the other core comes to the meeting as late as this one, whose tile is of the same shape
        views = (instruction.dst[core],), (instruction.src[core],)
        return Instruction(DMA_COPY, *views, RAW, None, instruction.source)
    if instruction.op is COLLECTIVE:  # of both cores, or of the one that it names
        return instruction if CollectiveAttrs.of(instruction).core in (None, core) else None
    frame = instruction.frame
    root: Frame | None = frame
    while root is not None and root.parent is not None:
        root = root.parent
    if root is None or root.loop.kind != "grid" or root.i != core:
        return None
    kept = None if frame is root else frame
    made = instruction.op, instruction.dst, instruction.src, instruction.attrs
    return Instruction(*made, kept, instruction.source)
