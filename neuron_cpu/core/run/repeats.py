"""Puts loops that Python unrolled together again: repetitions become one operation.

A ``for`` over Python's own ``range`` leaves no trace but operations that repeat. Where a stretch of
them follows itself with offsets that grow linearly, and no iteration touches what another one
writes, it is distributed as a loop of ``affine_range`` is (merge.py): same instructions, same
results to the bit. Independence is found here, element by element, since nobody has declared it.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..program.program import Program
from . import merge

LONGEST = 64  # operations of an iteration
ROUNDS = 4  # of loops in loops
TRACKED = 1 << 22  # elements of a memory whose writers are told apart
MULTIPLES = 4  # of the shortest period of a stretch, that are tried, too
MISSES = 4  # iterations in a row that depend on the next one: then the rest most likely do


def join_repeats(ops: list[merge.Op], program: Program) -> list[merge.Op]:
    """The same operations, repeated stretches joined where that changes no result."""
    if merge.mixes_types(program):
        return ops
    shared = {storage.id for pair in program.aliases for storage in pair}
    for _ in range(ROUNDS):
        shorter = _Repeats(ops, shared).joined()
        if len(shorter) == len(ops):
            break
        ops = shorter
    return ops


class _Repeats:
    """One pass over a list of operations.

    Args:
        shared: storages that lie over another one's elements.
    """

    def __init__(self, ops: list[merge.Op], shared: set[int]) -> None:
        self.ops, self.shared = ops, shared
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for at, op in enumerate(ops):
            for ref in op.refs():
                self.first.setdefault(id(ref.memory), at)
                self.last[id(ref.memory)] = at
        # How many memories are in use on both sides of a place: iterations are cut where few are.
        edges = np.zeros(len(ops) + 1, dtype=np.int64)
        for memory, start in self.first.items():
            edges[start + 1] += 1
            edges[self.last[memory] + 1] -= 1
        self.open = np.cumsum(edges)

    def joined(self) -> list[merge.Op]:
        """Join the stretch that saves most first; overlapping stretches wait for the next pass."""
        taken = np.zeros(len(self.ops), dtype=bool)
        instead: dict[int, tuple[int, list[merge.Op]]] = {}
        for start, period, count in self._stretches():
            end = start + period * count
            if taken[start:end].any():
                continue
            made = self._join(start, period, count)
            if len(made) < end - start:
                taken[start:end] = True
                instead[start] = (end, made)
        result: list[merge.Op] = []
        at = 0
        while at < len(self.ops):
            end, made = instead.get(at, (at + 1, self.ops[at : at + 1]))
            result += made
            at = end
        return result

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """(start, operations of an iteration, iterations) of equal stretches, best first."""
        numbers: dict[object, int] = {}
        kinds = np.array([numbers.setdefault(_kind(op), len(numbers)) for op in self.ops])
        found = []
        shortest: dict[tuple[int, int], int] = {}
        for period in range(1, min(LONGEST, len(kinds) // 2) + 1):
            same = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(np.int8)
            edges = np.flatnonzero(np.diff(same))
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist()):
                count = (end - start) // period + 1
                base = shortest.setdefault((start, end + period), period)
                if count > 1 and (period % base or period <= MULTIPLES * base):
                    spare = end + period - start - count * period
                    found.append(((count - 1) * period, self._cut(start, period, count, spare)))
        found.sort(key=lambda one: -one[0])
        return (stretch for _, stretch in found)

    def _cut(self, start: int, period: int, count: int, spare: int) -> tuple[int, int, int]:
        """Where iterations begin: an iteration fewer is worth a cut through fewer memories."""

        def cost(shift: int) -> tuple[int, int]:
            own = count if shift <= spare else count - 1
            if own < 2:
                return (len(self.ops), shift)
            cuts = self.open[start + shift + period : start + shift + own * period : period]
            return (int(cuts.max()), shift)

        shift = min(range(period), key=cost)
        return (start + shift, period, count if shift <= spare else count - 1)

    def _join(self, start: int, period: int, count: int) -> list[merge.Op]:
        """The operations of a stretch, runs of its iterations joined."""
        places = range(start, start + period * count, period)
        bodies = [self.ops[at : at + period] for at in places]
        owns = [self._locals_of(at, at + period) for at in places]
        described = [merge.describe(body, own) for body, own in zip(bodies, owns)]
        result: list[merge.Op] = []
        at, misses = 0, 0
        while at < count and misses < MISSES:
            end = min(merge.equal_run(described, at), at + merge.most_joined(bodies[at], owns[at]))
            made = None
            if end - at > 1:
                ops, is_local, n = bodies[at], owns[at], end - at
                plan = merge.batch_strides(ops, n, described[at:end], is_local)
                if plan is not None and self._independent(ops, plan, n, is_local):
                    fresh = {
                        id(memory): merge.Memory(memory.storage, memory.size * n, ())
                        for memory in merge.local_memories(ops, is_local)
                    }
                    made = [merge.batched(op, n, each, fresh) for op, each in zip(ops, plan)]
            misses = misses + 1 if made is None else 0
            result += bodies[at] if made is None else made
            at = at + 1 if made is None else end
        return [*result, *itertools.chain(*bodies[at:])]

    def _locals_of(self, start: int, end: int) -> merge.IsLocal:
        """Which memories nothing outside of these operations touches."""

        def is_local(memory: merge.Memory) -> bool:
            key = id(memory)
            inside = start <= self.first[key] and self.last[key] < end
            return inside and memory.storage.role == "local"

        return is_local

    def _independent(
        self, ops: list[merge.Op], plan: list[list[int]], n: int, is_local: merge.IsLocal
    ) -> bool:
        """True where no iteration touches an element that another one writes."""
        uses: dict[int, list[tuple[merge.Ref, int, bool]]] = {}
        for op, strides in zip(ops, plan):
            if 0 in strides[: len(op.dst)]:  # sums in PSUM keep their order
                return False
            for at, (ref, stride) in enumerate(zip([*op.dst, *op.src], strides)):
                if not is_local(ref.memory):
                    uses.setdefault(id(ref.memory), []).append((ref, stride, at < len(op.dst)))
        return all(
            self._apart(touched, n)
            for touched in uses.values()
            if any(written for _, _, written in touched)
        )

    def _apart(self, touched: list[tuple[merge.Ref, int, bool]], n: int) -> bool:
        """Whether every written element of one memory is a single iteration's."""
        memory = touched[0][0].memory
        storage = memory.storage
        if storage.role == "input" or storage.id in self.shared or memory.size > TRACKED:
            return False
        if any(ref.dt.itemsize != storage.dtype.itemsize for ref, _, _ in touched):
            return False
        owner = np.full(memory.size, -1, dtype=np.int32)
        for ref, stride, written in sorted(touched, key=lambda use: not use[2]):  # writes first
            steps = [4 * step for step in (stride, *ref.strides)]
            view = as_strided(owner[ref.offset :], (n, *ref.shape), steps)
            own = np.arange(n, dtype=np.int32).reshape(n, *(1,) * len(ref.shape))
            if ((view != -1) & (view != own)).any():
                return False
            if written:
                view[...] = own
        return True


def _kind(op: merge.Op) -> object:
    """Equal for operations that may be iterations of each other; nothing's equal for the rest."""
    refs = [*op.dst, *op.src]
    empty = any(ref.by_data is not None or math.prod(ref.shape) == 0 for ref in refs)
    if empty or not op.dst or op.spec.meets:
        return object()
    views = tuple((r.shape, r.strides, r.dt.name, r.memory.storage.dtype.name) for r in refs)
    return (
        op.spec.name,
        op.instruction.source,
        op.batch,
        op.contract,
        op.attrs.key(),
        op.attrs.group,
        views,
    )
