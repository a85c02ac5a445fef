"""Run all iterations of an independent loop at once: from a Program to few, large operations.

A traced Program is unrolled: the product of two matrices is thousands of 128 x 512 instructions,
each too small to be worth a call. Iterations of ``affine_range`` and of the launch grid do not
depend on each other (verify proves it), so the loop can be *distributed*: its first instruction
for all iterations, then its second, and so on. ``roll`` finds iterations that are the same but for
offsets that grow linearly, and gives their operands one more leading axis. Matmuls that accumulate
into the same PSUM region get that axis as part of their contraction.

The result equals instruction-by-instruction execution to the bit, except for the order of fp32
accumulation inside merged matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device.dtypes import Shape
from ..instructions.entry import OpSpec
from ..program.attributes import Attrs
from ..program.program import Instruction, Program
from ..program.storage import Frame, Loop, Storage
from ..program.view import View, contiguous

# Elements that the tiles of joined iterations may take together: 16 MiB of fp32. Every joined
# iteration has tiles of its own, so attention over 8192 tokens would need gigabytes without it;
# prefill over 1024 tokens is as fast with this as with 64 times more or 16 times less.
JOINED_ELEMENTS = 1 << 22


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of a Ref: one storage, or the storages of all iterations side by side.

    Attributes:
        size: elements.
        storage: the storage it stands for (the first iteration's, where it stands for many).
        path: frames of the loops inside which it was created.
    """

    storage: Storage
    size: int
    path: tuple[Frame, ...]

    @property
    def constant(self) -> bool:
        return self.storage.role in ("input", "const")


@dataclass(slots=True, eq=False)
class Ref:
    """A view with leading batch axes: memory, element offset, sizes, strides, element type."""

    memory: Memory
    offset: int
    shape: Shape
    strides: Shape
    dt: Any
    by_data: tuple[Ref, int, int, tuple[int, int]] | None = None

    def over(self, shape: Shape, strides: Shape) -> Ref:
        """Elements of the same memory from the same offset on, over other axes."""
        return Ref(self.memory, self.offset, shape, strides, self.dt)


@dataclass(slots=True, eq=False)
class Op:
    """An instruction over ``batch`` leading axes, of which ``contract`` are summed (matmul)."""

    instruction: Instruction
    dst: tuple[Ref, ...]
    src: tuple[Ref, ...]
    attrs: Attrs
    batch: int = 0
    contract: Shape = ()

    @property
    def spec(self) -> OpSpec:
        return self.instruction.op

    def refs(self) -> list[Ref]:
        """Every view it touches, index tiles of indirect operands included."""
        own = [*self.dst, *self.src]
        return own + [r.by_data[0] for r in own if r.by_data is not None]


class Lowering:
    """Turns instructions into Ops, keeping track of memories that were joined."""

    def __init__(self, merge: bool = True) -> None:
        self.merge = merge
        self.memories: dict[int, Memory] = {}
        self.joined: dict[int, tuple[Memory, int]] = {}  # id(memory) -> (joined one, base offset)
        self.kept: list[Memory] = []  # joined memories stay alive, so that ids stay unique
        self.paths: dict[int, tuple[Frame, ...]] = {}

    def path(self, frame: Frame | None) -> tuple[Frame, ...]:
        if frame is None:
            return ()
        found = self.paths.get(id(frame))
        if found is None:
            found = self.paths[id(frame)] = tuple(frame.path())
        return found

    def ref(self, view: View) -> Ref:
        storage = view.storage
        memory = self.memories.get(storage.id)
        if memory is None:
            # outputs and constants are one tensor, wherever a loop asked for them
            path = self.path(storage.frame) if storage.role == "local" else ()
            memory = Memory(storage, storage.size, path)
            self.memories[storage.id] = memory
        # Joined memories may have been joined again by an outer loop.
        offset = view.offset
        while id(memory) in self.joined:
            memory, base = self.joined[id(memory)]
            offset += base
        indirect = None
        if view.by_data is not None:
            indirect = (self.ref(view.by_data[0]), *view.by_data[1:])
        return Ref(memory, offset, view.shape, view.strides, view.dt, indirect)

    def op(self, i: Instruction) -> Op:
        return Op(i, tuple(self.ref(v) for v in i.dst), tuple(self.ref(v) for v in i.src), i.attrs)

    def lower(self, instructions: list[Instruction], depth: int = 0) -> list[Op]:
        """Ops of a run of instructions that share their outermost ``depth`` frames."""
        ops: list[Op] = []
        at = 0
        while at < len(instructions):
            # What stands in no deeper loop is an Op of its own.
            path = self.path(instructions[at].frame)
            if len(path) <= depth or not self.merge:
                ops.append(self.op(instructions[at]))
                at += 1
                continue
            # The rest of this execution of the loop, cut into its iterations.
            loop = path[depth].loop
            end = at
            iterations: list[tuple[Frame, list[Instruction]]] = []
            while end < len(instructions):
                inner = self.path(instructions[end].frame)
                if len(inner) <= depth or inner[depth].loop is not loop:
                    break
                if not iterations or iterations[-1][0] is not inner[depth]:
                    iterations.append((inner[depth], []))
                iterations[-1][1].append(instructions[end])
                end += 1
            ops += self.roll(loop, iterations, depth)
            at = end
        return ops

    # --- rolling ----------------------------------------------------------------------------------
    def roll(
        self, loop: Loop, iterations: list[tuple[Frame, list[Instruction]]], depth: int
    ) -> list[Op]:
        """Ops of a whole loop, its equal iterations joined."""
        if loop.kind == "sequential" or len(iterations) == 1:
            return [op for _, body in iterations for op in self.lower(body, depth + 1)]
        # Inner loops first: their bodies are few Ops with batch axes by the time they are compared.
        bodies = [(frame, self.lower(body, depth + 1)) for frame, body in iterations]
        described = [describe(ops, _locals_of(frame, depth)) for frame, ops in bodies]
        result: list[Op] = []
        start = 0
        while start < len(bodies):
            # The longest run of equal iterations, as many of them as the memory for their tiles
            # allows; where they cannot be joined after all, the first is left as it is.
            end = equal_run(described, start)
            is_local = _locals_of(bodies[start][0], depth)
            end = min(end, start + most_joined(bodies[start][1], is_local))
            if end - start > 1:
                group = [ops for _, ops in bodies[start:end]]
                joined = self.join(group, described[start:end], bodies[start][0], depth)
                if joined is not None:
                    result += joined
                    start = end
                    continue
                end = start + 1
            result += bodies[start][1]
            start = end
        return result

    def join(
        self, group: list[list[Op]], described: list[tuple], frame: Frame, depth: int
    ) -> list[Op] | None:
        """One list of Ops for all iterations of ``group``; None where that changes results."""
        # Iterations are equal but for a constant step of every offset, and for flags: the first may
        # start an accumulation that the others continue.
        n, first = len(group), group[0]
        is_local = _locals_of(frame, depth)
        plan = batch_strides(first, n, described, is_local)
        if plan is None:
            return None
        # Every iteration has tiles of its own. They come to lie side by side in one memory, where
        # Ops that were lowered before, or will be later, find them through ``joined``.
        locals_ = local_memories(first, is_local)
        fresh = {}
        for memory in locals_:
            fresh[id(memory)] = Memory(memory.storage, memory.size * n, memory.path[:depth])
        for k, ops in enumerate(group):
            own = _locals_of(_frame_at(ops, depth, frame, k), depth)
            for mine, theirs in zip(locals_, local_memories(ops, own)):
                self.joined[id(theirs)] = (fresh[id(mine)], k * mine.size)
                self.kept.append(theirs)
        return [batched(op, n, strides, fresh) for op, strides in zip(first, plan)]


def _frame_at(ops: list[Op], depth: int, first: Frame, k: int) -> Frame:
    """The loop frame at ``depth`` of an iteration's Ops."""
    if k == 0:
        return first
    frame = ops[0].instruction.frame
    assert frame is not None
    return frame.path()[depth]


IsLocal = Callable[[Memory], bool]  # whether a memory is one iteration's own


def _locals_of(frame: Frame, depth: int) -> IsLocal:
    """Which memories were created in an iteration, ``frame``, of a loop ``depth`` loops deep."""

    def is_local(memory: Memory) -> bool:
        path = memory.path
        return len(path) > depth and path[depth] is frame

    return is_local


def local_memories(ops: Iterable[Op], is_local: IsLocal) -> list[Memory]:
    """An iteration's own memories, in order of first use."""
    found: dict[int, Memory] = {}
    for op in ops:
        for ref in op.refs():
            if is_local(ref.memory):
                found.setdefault(id(ref.memory), ref.memory)
    return list(found.values())


def most_joined(ops: list[Op], is_local: IsLocal) -> int:
    """How many iterations may be joined, by the elements of an iteration's own tiles."""
    # Those that only repeat a kernel input will not exist.
    loaded = {
        id(op.dst[0].memory)
        for op in ops
        if op.spec.is_dma and op.spec.is_copy and op.attrs.raw and op.src[0].memory.constant
    }
    own = local_memories(ops, is_local)
    elements = sum(memory.size for memory in own if id(memory) not in loaded)
    return max(1, JOINED_ELEMENTS // max(1, elements))


def describe(ops: list[Op], is_local: IsLocal) -> tuple[tuple, tuple, np.ndarray]:
    """(parts that must be equal, matmul group flags, offsets) of one iteration."""
    # An iteration's own tiles are named by their order of use, so that they equal the next one's;
    # all other memories must be the same. Offsets are kept apart: they may differ.
    numbers: dict[int, int] = {}
    shape: list[tuple] = []
    flags: list[str] = []
    offsets: list[int] = []
    for op in ops:
        refs = op.refs()
        described: list[Any] = [op.spec.name, op.batch, op.contract, op.attrs.key()]
        for ref in refs:
            memory = ref.memory
            if is_local(memory):
                number = numbers.setdefault(id(memory), len(numbers))
                key: tuple = ("local", number, memory.size, memory.storage.dtype.name)
            else:
                key = ("outer", id(memory))
            described.append((key, ref.shape, ref.strides, ref.dt.name, ref.by_data is None))
            offsets.append(ref.offset)
        shape.append(tuple(described))
        flags.append(op.attrs.group)
    return tuple(shape), tuple(flags), np.array(offsets, dtype=np.int64)


def equal_run(described: list[tuple], start: int) -> int:
    """End of the longest run from ``start`` of equal iterations with linearly growing offsets."""
    shape, flags, first = described[start]
    later: tuple | None = None
    step = None
    end = start + 1
    while end < len(described):
        other, other_flags, offsets = described[end]
        if other != shape:
            break
        # The second iteration sets the step and the flags that all later ones must have.
        difference = offsets - described[end - 1][2]
        if step is None:
            step, later = difference, other_flags
            if not all(b == a or (a, b) == ("start", "add") for a, b in zip(flags, other_flags)):
                break
        elif other_flags != later or not np.array_equal(difference, step):
            break
        end += 1
    return end


def batch_strides(
    ops: list[Op], n: int, described: list[tuple], is_local: IsLocal
) -> list[list[int]] | None:
    """Stride of the new axis for every ref of every Op; None where iterations must stay apart.

    ``ops`` are the first iteration's; ``described`` are the descriptions of the first two.
    """
    # Where the flags differ the first starts an accumulation that the others continue.
    step = described[1][2] - described[0][2]
    starts = [a != b for a, b in zip(described[0][1], described[1][1])]
    plan: list[list[int]] = []
    at = 0
    for op, first in zip(ops, starts):
        strides = []
        for ref in op.refs():
            delta = int(step[at])
            at += 1
            local = is_local(ref.memory)
            if ref.by_data is not None or (local and delta):
                return None
            if delta < 0:  # torch views count upwards only
                return None
            strides.append(ref.memory.size if local else delta)
        if not _may_batch(op, strides, first, ops) or not _apart(op, n, strides):
            return None
        plan.append(strides)
    return plan


def _may_batch(op: Op, strides: list[int], first: bool, ops: list[Op]) -> bool:
    """True where the Op's iterations write apart, or all accumulate into one PSUM region."""
    # A result that moves on with the iterations: each writes its own part. If it is a matmul that
    # only the first iteration starts, the others would accumulate into something unwritten.
    if all(strides[: len(op.dst)]):
        return not first
    # One region for all: a sum over the iterations, as long as nothing else touches it in the loop.
    if not op.spec.multiplies:
        return False
    target = op.dst[0].memory
    others = (o for o in ops if not o.spec.multiplies)
    if any(r.memory is target for o in others for r in o.refs()):
        return False
    return first or op.attrs.accumulate


def _apart(op: Op, n: int, strides: list[int]) -> bool:
    """True where no two elements of a result, over all ``n`` iterations, are the same element.

    Accumulation is no race, so verify lets it write overlapping regions; one torch call may not.
    """
    # Axes from the shortest step: each has to step over all that the shorter ones reach.
    for ref, stride in zip(op.dst, strides):
        reach = 0
        axes = [(stride, n), *zip(ref.strides, ref.shape)]
        for step, size in sorted(a for a in axes if a[0] and a[1] > 1):
            if step <= reach:
                return False
            reach += step * (size - 1)
    return True


def batched(op: Op, n: int, strides: list[int], fresh: dict[int, Memory]) -> Op:
    refs = []
    for ref, stride in zip([*op.dst, *op.src], strides):
        made = ref.over((n, *ref.shape), (stride, *ref.strides))
        made.memory = fresh.get(id(ref.memory), ref.memory)
        refs.append(made)
    # The new axis comes first, so axes that were contracted before move on by one.
    count = len(op.dst)
    contract = tuple(c + 1 for c in op.contract)
    if strides[0] == 0:
        contract = (0, *contract)
    return Op(
        op.instruction, tuple(refs[:count]), tuple(refs[count:]), op.attrs, op.batch + 1, contract
    )


def users(ops: list[Op]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The places of the operations that write each memory, by its id, and of those that read it."""
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for at, op in enumerate(ops):
        for number, ref in enumerate(op.refs()):
            side = writers if number < len(op.dst) else readers
            side.setdefault(id(ref.memory), []).append(at)
    return writers, readers


# --- loads read in place --------------------------------------------------------------------------
def elide_loads(ops: list[Op]) -> list[Op]:
    """Drop copies of constant HBM data into tiles that are only read: readers read HBM itself.

    A decode step would otherwise copy all weights once more: 1.24 GB for each token of Llama-3.2-1B
    at degree 2, beside the reading that the products need anyway.
    """
    # Who writes and who reads each memory; a tile must have the copy, or its parts, alone.
    writers, readers = (
        {key: [ops[at] for at in places] for key, places in of.items()} for of in users(ops)
    )
    dropped: set[int] = set()
    for key, parts in writers.items():
        if not all(_elidable(op, writers) for op in parts):
            continue
        pair = _whole(parts)
        axes = None if pair is None else _source_axes(*pair)
        if pair is None or axes is None:
            continue
        if _redirect_readers(readers.get(key, []), pair[0].memory, pair[1], axes):
            dropped.update(map(id, parts))
    return [op for op in ops if id(op) not in dropped]


def _elidable(op: Op, writers: dict[int, list[Op]]) -> bool:
    if not op.spec.is_copy or not op.attrs.raw or op.attrs.mask is not None:
        return False
    target, source = op.dst[0], op.src[0]
    if target.memory.storage.role != "local" or target.by_data or source.by_data:
        return False
    if target.dt is not target.memory.storage.dtype or source.dt is not source.memory.storage.dtype:
        return False
    return source.memory.constant and id(source.memory) not in writers


def _whole(parts: list[Op]) -> tuple[Ref, Ref] | None:
    """(target, source) of a copy in equal parts that follow each other; None of other parts."""
    pairs = [(op.dst[0], op.src[0]) for op in parts]
    kinds = {(t.shape, t.strides, s.strides, id(s.memory)) for t, s in pairs}
    starts = [(t.offset, s.offset) for t, s in pairs]
    steps = {(t - a, s - b) for (a, b), (t, s) in zip(starts, starts[1:])}
    if len(kinds) > 1 or len(steps) > 1 or min(map(min, steps), default=0) < 0:
        return None
    for by in steps:  # an axis more
        target, source = (
            r.over((len(parts), *r.shape), (step, *r.strides)) for r, step in zip(pairs[0], by)
        )
        return target, source
    return pairs[0]


Axis = tuple[int, int, int]  # (size, stride in the tile's memory, stride in the source)


def _source_axes(target: Ref, source: Ref) -> list[Axis] | None:
    """Axes that map the tile's memory onto the source, outermost first; None if it has gaps."""
    # Sorted by the tile's strides, axes that continue each other on both sides become one. The tile
    # is covered exactly where each stride is the number of elements of all faster axes.
    axes = [(n, t, s) for n, t, s in zip(target.shape, target.strides, source.strides) if n > 1]
    axes.sort(key=lambda a: -a[1])
    joined: list[Axis] = []
    for axis in axes:
        if joined:
            size, stride, step = joined[-1]
            if stride == axis[0] * axis[1] and step == axis[0] * axis[2]:
                joined[-1] = (size * axis[0], axis[1], axis[2])
                continue
        joined.append(axis)
    expected = 1
    for size, stride, _ in reversed(joined):
        if stride != expected:
            return None
        expected *= size
    return joined if target.offset == 0 and expected == target.memory.size else None


def _redirect_readers(users: list[Op], memory: Memory, source: Ref, axes: list[Axis]) -> bool:
    # All readers or none: a tile that one of them still needs has to be copied anyway.
    replacements = []
    for op in users:
        if any(r.by_data is not None for r in [*op.dst, *op.src]):
            return False
        refs = []
        for ref in op.src:
            if ref.memory is memory:
                moved = _compose(ref, source, axes)
                if moved is None:
                    return False
                refs.append(moved)
            else:
                refs.append(ref)
        replacements.append((op, tuple(refs)))
    for op, moved_refs in replacements:
        op.src = moved_refs
    return True


def _digits(value: int, axes: list[Axis]) -> list[int]:
    digits = []
    for _, stride, _ in axes:
        digit, value = divmod(value, stride)
        digits.append(digit)
    return digits


def _compose(ref: Ref, source: Ref, axes: list[Axis]) -> Ref | None:
    """The same elements read from the source; None where an axis of ``ref`` is no source axis."""
    if ref.dt is not ref.memory.storage.dtype:
        return None
    # Offset and strides as digits of the tile's axes; each digit counts steps of the source's axis.
    # A view that carries from one axis into the next has no stride in the source.
    start = _digits(ref.offset, axes)
    last = list(start)
    strides = []
    for size, stride in zip(ref.shape, ref.strides):
        if size == 1 or stride == 0:
            strides.append(0)
            continue
        if stride < 0:
            return None
        steps = _digits(stride, axes)
        for k, step in enumerate(steps):
            last[k] += step * (size - 1)
        strides.append(sum(step * axis[2] for step, axis in zip(steps, axes)))
    if any(end >= axis[0] for end, axis in zip(last, axes)):
        return None
    offset = source.offset + sum(d * axis[2] for d, axis in zip(start, axes))
    return Ref(source.memory, offset, ref.shape, tuple(strides), ref.dt)


def lower(program: Program, merge: bool = True) -> list[Op]:
    """The Ops that compute ``program``: merged, or one per instruction."""
    merge = merge and not mixes_types(program)
    lowering = Lowering(merge)
    ops = lowering.lower(program.instructions)
    for op in ops:  # memories joined after an Op was built
        op.dst = tuple(_resolve(r, lowering) for r in op.dst)
        op.src = tuple(_resolve(r, lowering) for r in op.src)
    return elide_loads(ops) if merge else ops


def mixes_types(program: Program) -> bool:
    """Whether a memory that is written is read as types of several sizes: then every instruction
    stands for itself."""
    mixed = {base for _, base in program.aliases}
    fixed = ("input", "const")
    if all(base.role in fixed for base in mixed):
        grounds = {base.ground for base in mixed}
        return any(v.storage.ground in grounds for i in program for v in i.dst if v.storage.ground)
    return True


def _resolve(ref: Ref, lowering: Lowering) -> Ref:
    memory, offset = ref.memory, ref.offset
    while id(memory) in lowering.joined:
        memory, base = lowering.joined[id(memory)]
        offset += base
    indirect = ref.by_data
    if indirect is not None:
        indirect = (_resolve(indirect[0], lowering), *indirect[1:])
    return Ref(memory, offset, ref.shape, ref.strides, ref.dt, indirect)


__all__ = [
    "IsLocal", "Lowering", "Memory", "Op", "Ref", "batch_strides", "batched", "contiguous",
    "describe", "elide_loads", "equal_run", "local_memories", "lower", "mixes_types", "most_joined",
]  # fmt: skip
