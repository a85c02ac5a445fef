"""Replay a Program on the CPU: fp32 arithmetic, rounding where the hardware rounds.

Operand views are resolved once per Plan; kernel inputs are bound without copying (memory.py).
``merge`` joins the iterations of independent loops (merge.py); a ``shadow`` keeps all in fp32 and
rounds nothing, for comparison.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import torch

from ..device import dtypes
from ..device.dtypes import BFLOAT16, DType, Tensors
from ..device.errors import executing
from ..device.pause import without_garbage_collection
from ..program.program import Program
from ..program.regions import place
from . import merge
from .doubts import watched
from .flow import LARGEST
from .instances import WrittenByBoth, instance_rows
from .lasting import constants, lasting
from .memory import (
    DIRECT,
    TWINS,
    Arena,
    allocate,
    allocate_twin,
    gather_index,
    put,
    reader,
    reinterpreted,
    rows_inside,
    scatter,
    take,
    widen,
)
from .merge import Op, Ref
from .packing import give_back, pack_new, packs_of
from .products import Step, matmul_step
from .repeats import join_repeats
from .short import Program as Short
from .short import Recording
from .threads import large, one, shared


# --- operations -----------------------------------------------------------------------------------
def _rearranges(op: Op) -> bool:
    """True where a result may lie over elements that the instruction still has to read."""
    in_place = op.instruction.op.flow in ("copy", "elementwise")
    return any(
        ref.memory is target.memory
        and not (
            in_place
            and (ref.offset, ref.shape, ref.strides)
            == (target.offset, target.shape, target.strides)
        )
        for ref in op.src
        for target in op.dst
    )


def _is_reversed(ref: Ref) -> bool:
    return any(step < 0 and size > 1 for step, size in zip(ref.strides, ref.shape))


def _moved(op: Op) -> Callable[[Ref], bool]:
    """The operands of an Op that are no torch view: operands that run backwards, and operands of
    products that data place (other instructions read such operands themselves)."""
    if op.instruction.op.multiplies:
        return lambda ref: ref.by_data is not None or _is_reversed(ref)
    return lambda ref: ref.by_data is None and _is_reversed(ref)


def _copying_step(op: Op, arena: Arena, moved: Callable[[Ref], bool]) -> Step:
    """An Op with operands that torch views cannot be: it works on copies of them."""

    # Each of them becomes a contiguous copy in its own order, under a memory that lives for this
    # step only; results are scattered back to their places afterwards.
    def forward(ref: Ref) -> Ref:
        if not moved(ref):
            return ref
        memory = merge.Memory(ref.memory.storage, math.prod(ref.shape), ())
        arena.flat[id(memory)] = arena.of(ref.memory)[gather_index(ref, arena).reshape(-1)]
        return Ref(memory, 0, ref.shape, merge.contiguous(ref.shape), ref.dt)

    def step() -> None:
        dst, src = tuple(map(forward, op.dst)), tuple(map(forward, op.src))
        make_step(Op(op.instruction, dst, src, op.attrs, op.batch, op.contract), arena)()
        for ref, copy in zip([*op.dst, *op.src], [*dst, *src]):
            if copy is ref:
                continue
            values = arena.flat.pop(id(copy.memory))
            if any(ref is target for target in op.dst):
                scatter(arena.of(ref.memory), gather_index(ref, arena).reshape(-1), values)

    return step


def make_step(op: Op, arena: Arena) -> Step:
    """One Op as a function without arguments, its views resolved."""
    # Three kinds of operations have steps of their own; the rest is read, compute, round, write.
    moved = _moved(op)
    if any(map(moved, [*op.dst, *op.src])):
        return _copying_step(op, arena, moved)
    if op.attrs.skip:
        return _skipping_step(op, arena)
    if op.instruction.op.multiplies:
        return matmul_step(op, arena)
    spec, attrs = op.instruction.op, op.attrs
    compute, bits, mask = spec.compute, attrs.bits, attrs.mask
    assert compute is not None  # all but products, which were dealt with
    raw = attrs.raw and not arena.shadow  # which keeps operands in another type
    keep = None if mask is None else torch.from_numpy(np.array(mask))
    inputs = [reader(r, arena, not raw, bits) for r in op.src]
    if _rearranges(op):  # copies and transposes return views of their input
        inputs = [lambda read=read: read().clone() for read in inputs]  # type: ignore[misc]
    if any(r.by_data is not None for r in op.dst) or attrs.accumulate:
        return _scatter_step(op, arena, inputs, raw, bits)
    # Everything above is decided once; what follows runs at every call, so one result, the usual
    # case, has a function without a loop.
    outs = [(arena.viewer(r), arena.kept(r)) for r in op.dst]
    if any(0 in r.strides for r in op.dst) and any(
        n > 1 and not s for ref in op.dst for n, s in zip(ref.shape, ref.strides)
    ):
        return _sinking_step(op, arena, inputs, raw)
    if len(outs) == 1:
        out, dt = outs[0]
        if keep is None and (raw or dt in DIRECT):
            return lambda: _copy(out(), compute(attrs, [f() for f in inputs]))
        return lambda: put(out(), compute(attrs, [f() for f in inputs]), dt, bits, keep)

    def several() -> None:
        for (out, dt), values in zip(outs, compute(attrs, [f() for f in inputs])):
            if raw and keep is None:
                _copy(out(), values)
                continue
            put(out(), values, dt, bits, keep if values.shape == op.dst[0].shape else None)

    return several


def _told(step: Step, line: str) -> Step:
    """The same step, whose warnings name the line that recorded it."""

    def told() -> None:
        with executing(line):
            step()

    return told


def _copy(out: torch.Tensor, values: torch.Tensor) -> None:
    """``put`` of all elements into their own type, or one that torch rounds to."""
    if values.shape != out.shape and values.numel() == out.numel():
        values = values.reshape(out.shape)
    out.copy_(values)


def _scatter_step(op: Op, arena: Arena, inputs: list, raw: bool, bits: bool) -> Step:
    """Indirect stores, and read-modify-write in HBM (duplicate rows add up)."""
    attrs = op.attrs
    assert attrs.mask is None  # a transfer by data is recorded once for each box of its mask

    def store(ref: Ref, values: torch.Tensor) -> None:
        if ref.by_data is None and not attrs.accumulate:
            out, dt = arena.view(ref), arena.kept(ref)
            _copy(out, values) if raw else put(out, values, dt, bits, None)
            return
        at = gather_index(ref, arena).reshape(-1)
        _put_at(ref, arena, at, values.expand(ref.shape).reshape(-1), raw, attrs.accumulate)

    return _each(op, inputs, store)


def _each(op: Op, inputs: list, store: Callable[[Ref, torch.Tensor], None]) -> Step:
    """Compute, and ``store`` each of the results."""
    attrs, compute = op.attrs, op.instruction.op.compute
    assert compute is not None  # products accumulate in PSUM

    def step() -> None:
        found = compute(attrs, [f() for f in inputs])
        for ref, values in zip(op.dst, found if len(op.dst) > 1 else (found,)):
            store(ref, values)

    return step


def _put_at(
    ref: Ref, arena: Arena, at: torch.Tensor, values: torch.Tensor, raw: bool, adds: bool
) -> None:
    """Values into numbered elements of a memory. Duplicates: index_add_ adds each of them up, in
    fp32, before one rounding."""
    flat, dt = arena.of(ref.memory), arena.kept(ref)
    if adds:
        total = widen(flat, dt, False).clone().index_add_(0, at, values.to(torch.float32))
        put(flat, total, dt, False, None)
    else:
        scatter(flat, at, values if raw else dtypes.encode(values, dt))


def _sinking_step(op: Op, arena: Arena, inputs: list, raw: bool) -> Step:
    """Results of which one writes its elements over each other: the last one stays."""
    assert op.attrs.mask is None  # the current language has no masks

    def store(ref: Ref, values: torch.Tensor) -> None:
        axes = list(zip(ref.shape, ref.strides))
        last = tuple(slice(-1, None) if not s else slice(None) for _, s in axes)
        kept = tuple(1 if not s else n for n, s in axes)
        out = arena.view(ref.over(kept, ref.strides))
        values = values.expand(ref.shape) if values.ndim == len(ref.shape) else values
        values = values.reshape(ref.shape)[last]
        _copy(out, values) if raw else put(out, values, arena.kept(ref), op.attrs.bits, None)

    return _each(op, inputs, store)


def _skipping_step(op: Op, arena: Arena) -> Step:
    """A transfer that leaves rows out of bounds unchanged: it moves elements one by one."""
    attrs, compute = op.attrs, op.instruction.op.compute
    assert compute is not None
    target, raw = op.dst[0], attrs.raw and not arena.shadow

    def step() -> None:
        keep = torch.ones(target.shape, dtype=torch.bool)
        inputs = []
        for ref in op.src:
            at, inside = gather_index(ref, arena, skip=True), rows_inside(ref, arena)
            values = arena.of(ref.memory)[at]
            inputs.append(values if raw else widen(values, arena.kept(ref), False))
            moved = inside.expand(ref.shape)
            if op.instruction.op.flow == "permute":
                moved = compute(attrs, [moved])
            keep &= moved.reshape(target.shape)
        keep &= rows_inside(target, arena).expand(target.shape)
        values = compute(attrs, inputs).expand(target.shape)
        places = gather_index(target, arena, skip=True)[keep]
        _put_at(target, arena, places, values[keep], raw, attrs.accumulate)

    return step


# Where results are larger than that, most of the time is arithmetic, and to follow all elements
# takes seconds (five for the attention to 640 tokens): only those of memories of FEW elements are.
SMALL = 1 << 15
FEW = 1 << 12
# Runs of a plan before the one that is recorded: many plans never run as often. A large plan is
# recorded for 0.6 s (attention to 640 tokens) and saves 15 ms a run: not while a first prompt waits
# for its layers.
RECORDED, LARGE_RECORDED = 4, 64
LONGEST = 1 << 13  # operations of a large plan that is recorded
SHORT = 128  # operations of a large plan that is recorded like a small one (0.3 s)


# --- replay ---------------------------------------------------------------------------------------
class Plan:
    """A Program made ready to run again and again on one thread.

    Args:
        merge_loops: join independent iterations; default from NKI_CPU_MERGE (1).
        shadow: keep all float tiles in fp32 and round nothing.

    ``NKI_CPU_RANGES=0`` leaves arguments unchecked that a function of ScalarE is not stated for,
    and values of which sources leave open what becomes of them (doubts.py).
    """

    @without_garbage_collection()
    def __init__(
        self, program: Program, merge_loops: bool | None = None, shadow: bool = False
    ) -> None:
        if merge_loops is None:
            merge_loops = os.environ.get("NKI_CPU_MERGE", "1") != "0"
        self.ranges = os.environ.get("NKI_CPU_RANGES", "1") != "0" and not shadow
        # Lower, find out which memories are the caller's, lay out the others, resolve the views.
        self.program = program
        self.arena = Arena(shadow)
        # Instances that choose rows by data are watched one by one.
        self.rows = instance_rows(program)
        both = program.written_by_both
        self.both = WrittenByBoth(program, both) if both else None
        merging = merge_loops and self.rows is None and not both
        self._records = merging and not shadow
        self.ops = merge.lower(program, merging)
        if merging:
            self.ops = join_repeats(self.ops, program)
        if self.rows is not None:
            self.rows.prepare(self.ops)
        self.external: dict[int, merge.Memory] = {}
        for op in self.ops:
            for ref in op.refs():
                if ref.memory.storage.role in ("input", "output"):
                    self.external[ref.memory.storage.id] = ref.memory
        self.written = {r.memory.storage.id for op in self.ops for r in op.dst}
        results = [math.prod(ref.shape) for op in self.ops for ref in op.dst]
        self._small = self._records and sum(results) <= SMALL * len(results)
        self._records = self._small or self._records and len(self.ops) <= LONGEST
        self._soon = self._small or len(self.ops) <= SHORT
        once, kept = lasting(self.ops)
        self._share_memory(kept)
        self.arena.moving = {id(m) for m in self.external.values()}
        if merging:
            self.arena.lasting = kept | constants(self.ops)
        self.arena.large = large(self.ops)
        self.steps = [self._step(op) for op in self.ops]
        self._again = [at for at in range(len(self.ops)) if at not in once]
        self._runs = 0
        self._short: Short | None = None

    def _step(self, op: Op) -> Step:
        instruction, limited = op.instruction, op.instruction.op.limited
        step = make_step(op, self.arena)
        step = shared(step) if id(op) in self.arena.large else step
        if self.both is not None:
            step = self.both.watching(step, op, self.arena)
        # What nobody wrote has no value that one could judge: another tensor's lies there.
        doubtful, told = None, any(ref.by_data is not None for ref in op.refs())  # may be outside
        if self.ranges and instruction.source not in self.program.unwritten_at:
            doubtful = watched(step, op, self.arena, self.program.open_values)
            told |= doubtful is not None or (limited is not None and limited(op.attrs))
        return _told(doubtful or step, place(self.program, instruction)) if told else step

    def _share_memory(self, kept: set[int]) -> None:
        """On-chip tensors that are never live together share memory, by type; ``kept`` do not.

        The blocks of a kernel then use the same few pages again and again: fresh ones cost more
        than the arithmetic on them.
        """
        self._share_types()
        last: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            for ref in op.refs():
                last[id(ref.memory)] = at
        # Small tiles have memory of their own, as long as it is little: what becomes of their
        # elements can then be followed (flow.py).
        tiles = {id(r.memory): r.memory.size for op in self.ops for r in op.refs()}
        own = {key for key, size in tiles.items() if size <= TWINS and self._small}
        own = own if sum(tiles[key] for key in own) <= merge.JOINED_ELEMENTS else set()
        # Walk the operations: what appears takes a free block or a new one, and gives it back after
        # the operation that uses it last. Blocks are only ever shared in program order.
        free: dict[torch.dtype, Tensors] = {}
        ends: dict[int, list[tuple[DType, torch.Tensor]]] = {}
        for at, op in enumerate(self.ops):
            for ref in op.refs():
                memory = ref.memory
                storage = memory.storage
                if storage.role != "local" or id(memory) in self.arena.flat or id(memory) in kept:
                    continue
                dt = self.arena.dtype(storage)
                if id(memory) in own:
                    twin = dt is BFLOAT16 and storage.ground is None
                    made = allocate_twin(memory.size) if twin else allocate(memory.size, dt)
                    self.arena.flat[id(memory)] = made
                    continue
                block = take(free.setdefault(dt.torch, []), memory.size)
                if block is None:
                    block = allocate(memory.size, dt)
                self.arena.flat[id(memory)] = block[: memory.size]
                ends.setdefault(last[id(memory)], []).append((dt, block))
            for dt, block in ends.pop(at, ()):
                free.setdefault(dt.torch, []).append(block)

    def _share_types(self) -> None:
        """Tiles that the kernel reads as types of several sizes have one block of memory."""
        memories = {r.memory.storage: r.memory for op in self.ops for r in op.refs()}
        blocks: dict[int, torch.Tensor] = {}
        for alias, base in self.program.aliases:
            if base.role != "local":
                continue
            if base.id not in blocks:
                blocks[base.id] = allocate(base.size, base.dtype)
                if base in memories:
                    self.arena.flat[id(memories[base])] = blocks[base.id]
            if alias in memories:
                self.arena.flat[id(memories[alias])] = reinterpreted(blocks[base.id], alias)

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of the kernel for ``inputs`` (contiguous, in the order of ``program.inputs``).

        Mutable inputs are updated in place (a shadow run updates fp32 copies of them).
        """
        results = self.start(inputs, self._short is not None and not self._short.has_steps)
        # In this mode tensors made in either mode may be written: a plan's buffers belong to the
        # mode of the first call, mutable inputs to any. What callers get is made outside of it.
        with torch.inference_mode(), one():
            pack_new(self.arena)
            if self.rows is not None:
                for k in range(len(self.ops)):
                    self.step(k)
            elif self._records and self._runs == (RECORDED if self._soon else LARGE_RECORDED):
                self._short = self._recorded()
            elif self._short is not None and self._short.bind():
                for line in self._short.lines:
                    line()
            else:
                for memory in self.external.values():
                    self.arena.flatten(memory)
                for at in self._again if self._runs else range(len(self.ops)):  # what lasts: once
                    self.steps[at]()
        self._runs += 1
        return self.finish(results)

    def _recorded(self) -> Short:
        """Run once more, and give the short form of all further runs."""
        outer = {key: self.arena.flat[key] for key in self.arena.moving if key in self.arena.flat}
        recording = Recording(self.arena, outer)
        for at in self._again:
            recording.step(self.steps[at], self.ops[at])
        made = recording.program(LARGEST if self._small else FEW)
        del recording
        give_back()  # 110 MiB of the embedded model's plans
        return made

    def start(self, inputs: Tensors, short: bool = False) -> dict[int, torch.Tensor]:
        """Bind inputs and fresh outputs: the memories of all outputs by storage id.

        Args:
            short: whether they are bound as they are, which short forms take.
        """
        results: dict[int, torch.Tensor] = {}
        if self.rows is not None:
            self.rows.start()
        for storage, values in zip(self.program.inputs, inputs):
            memory = self.external.get(storage.id)
            if memory is not None:
                self.arena.bind(memory, values, short)
                packs = None if storage.id in self.written else packs_of(values)
                if packs is not None and self.arena.dtype(storage) is storage.dtype:
                    self.arena.packs[id(memory)] = packs
                if storage.id in self.written:  # a mutable parameter, updated in place
                    values = self.arena.of(memory).view(storage.shape)
            if storage.mutable:
                results[storage.id] = values
        others = {alias: base for alias, base in self.program.aliases if base.role != "local"}
        made = [others.get(s, s) for s in self.program.outputs]
        made += [base for base in others.values() if base.role == "output"]
        for storage in made:
            if storage.id in results or storage.role == "input":
                continue
            made_as = self.arena.dtype(storage)
            memory = self.external.get(storage.id)
            flat = allocate(storage.size, made_as, memory is not None and short)
            results[storage.id] = flat.view(storage.shape)
            if memory is not None:
                self.arena.flat[id(memory)] = flat
        hosts = dict(zip(self.program.inputs, inputs))
        for alias, base in others.items():
            if base.data is None:
                # the caller's memory, or an output's, as another type
                same = reinterpreted(hosts[base] if base in hosts else results[base.id], alias)
                results[alias.id] = same.reshape(alias.shape)
                memory = self.external.get(alias.id)
                if memory is not None:
                    self.arena.bind(memory, same)
        return results

    def step(self, number: int) -> None:
        """Execute one operation."""
        if self.rows is not None:
            self.rows.note(self.ops[number], self.arena, self.program)
        self.steps[number]()
        if self.rows is not None:
            self.rows.settle(self.arena)

    def finish(self, results: dict[int, torch.Tensor]) -> Tensors:
        """Let go of the caller's memory and give the outputs in order."""
        if self.both is not None:
            self.both.finish()
        for memory in self.external.values():
            self.arena.flat.pop(id(memory), None)
        self.arena.packs.clear()
        return [results[storage.id] for storage in self.program.outputs]
