"""Runs of small equal instructions become one.

An instruction of a few elements occupies its engine for the 64 cycles that any instruction takes.
Where the iterations of a short loop over independent elements differ only by a step along the free
axis, the compiler issues them as one instruction with one more free axis: 65 536 products of three
columns became 512 in a published convolution, once its loop of 2048 was written as blocks of 64.

Loops of more than JOINED iterations stay as they are. With an operand in PSUM, of UNROLLED
iterations each what does not overlap is joined (docs/cost_model.md, join).
"""

import itertools
from collections.abc import Iterator, Sequence

from ...device.spec import CORE, Engine
from ...instructions.vector import ReduceAttrs
from ...program.program import Instruction
from ...program.storage import Frame, Storage
from ...program.view import View
from .work import Work, automatic

JOINED = 128  # iterations of a loop that is joined; see above
UNROLLED = 4  # iterations that longer loops join
FLOWS = ("elementwise", "copy", "fill", "reduce")  # independent of the elements beside them


def join(work: Work) -> list[Instruction]:
    """Join what the innermost loops repeat."""
    instructions = work.instructions
    result: list[Instruction] = []
    for start, stop in _loops(instructions):
        body = instructions[start:stop]
        if _iterations(body[0].frame) <= 1:
            result.extend(body)
        elif _iterations(body[0].frame) <= JOINED:
            result.extend(_joined(work, body))
        else:
            result.extend(_joined_in_parts(work, body))
    return result


def _loops(instructions: list[Instruction]) -> Iterator[tuple[int, int]]:
    """Consecutive instructions of one execution of one innermost loop."""
    start = 0
    for _, run in itertools.groupby(instructions, key=lambda i: i.frame and i.frame.loop):
        stop = start + len(list(run))
        yield start, stop
        start = stop


def _iterations(frame: Frame | None) -> int:
    """Iterations of the affine loop that a frame belongs to; 0 where it belongs to none."""
    return frame.loop.n if frame is not None and frame.loop.kind == "affine" else 0


def _joined(work: Work, body: list[Instruction]) -> list[Instruction]:
    """The loop's instructions, each joined over the iterations.

    A loop that also does something larger stays as it is: its small instructions would have to wait
    for each other across iterations that otherwise overlap.
    """
    rounds = _rounds(body)
    if rounds is None:
        return body
    columns = list(zip(*rounds))
    if not all(_alike(column) for column in columns):
        return body
    tiles = _Tiles(work, rounds)
    joined = [_one([tiles.rewritten(i) for i in column]) for column in columns]
    return body if any(i is None for i in joined) else [i for i in joined if i is not None]


def _rounds(body: list[Instruction]) -> list[list[Instruction]] | None:
    """Instructions by iteration; None where the iterations differ in more than their views."""
    rounds: list[list[Instruction]] = []
    before: Frame | None = None
    for instruction in body:
        if instruction.frame is not before:
            rounds.append([])
            before = instruction.frame
        rounds[-1].append(instruction)
    first = [(i.op, i.source) for i in rounds[0]]
    alike = all([(i.op, i.source) for i in r] == first for r in rounds[1:])
    return rounds if alike and len(rounds) > 1 else None


def _alike(column: Sequence[Instruction]) -> bool:
    """Small instructions of the same kind and shape."""
    head = column[0]
    if head.op.engine not in (Engine.VECTOR, Engine.SCALAR) or head.op.flow not in FLOWS:
        return False
    if isinstance(head.attrs, ReduceAttrs) and head.attrs.order is not None:
        return False
    if len(head.dst) != 1 or head.attrs.mask is not None or head.attrs.accumulate:
        return False
    views = (*head.src, *head.dst)
    if max(v.free_size for v in views) >= CORE.min_ii or any(len(v.shape) > 3 for v in views):
        return False
    shapes = [v.shape for v in views]
    return all(
        i.attrs.key() == head.attrs.key() and [v.shape for v in (*i.src, *i.dst)] == shapes
        for i in column
    )


def _joined_in_parts(work: Work, body: list[Instruction]) -> list[Instruction]:
    """A long loop that uses PSUM: of UNROLLED iterations each, what does not overlap is joined."""
    if not any(v.storage.buffer == "psum" for v in (*body[0].src, *body[-1].src, *body[-1].dst)):
        return body
    rounds = _rounds(body)
    if rounds is None:
        return body
    result: list[Instruction] = []
    for start in range(0, len(rounds), UNROLLED):
        part = rounds[start : start + UNROLLED]
        columns = list(zip(*part))
        if len(part) == 1 or not all(_alike(column) for column in columns):
            return body
        tiles = _Tiles(work, part)
        for column in columns:
            moved = [tiles.rewritten(i) for i in column]
            one = _one(moved) if _apart(moved) else None
            result.extend(moved if one is None else [one])
    return result


def _apart(column: Sequence[Instruction]) -> bool:
    """Whether no operand shares elements with the same one of the next iteration."""
    first, second = column[0], column[1]
    return all(
        abs(b.offset - a.offset) > sum((n - 1) * s for n, s in zip(a.shape[1:], a.strides[1:]))
        for a, b in zip((*first.src, *first.dst), (*second.src, *second.dst))
    )


class _Tiles:
    """Tiles that every iteration made for itself, put side by side in one."""

    def __init__(self, work: Work, rounds: list[list[Instruction]]) -> None:
        self.count = len(rounds)
        self.wide: dict[int, tuple[Storage, int]] = {}
        for number, instruction in enumerate(rounds[0]):
            for place, view in enumerate(instruction.dst):
                own = [r[number].dst[place].storage for r in rounds]
                if view.storage.id in self.wide or not _private(own, rounds):
                    continue
                tile = view.storage
                shape = (tile.shape[0], self.count * tile.free_size)
                made = work.tile(shape, tile.dtype, tile.buffer, _outside(instruction))
                made.name, made.source = tile.name, tile.source
                for k, storage in enumerate(own):
                    self.wide[storage.id] = made, k * tile.free_size

    def rewritten(self, instruction: Instruction) -> Instruction:
        """The instruction with its views of private tiles moved into the wide ones."""
        dst = tuple([self._moved(v) for v in instruction.dst])
        src = tuple([self._moved(v) for v in instruction.src])
        return Instruction(
            instruction.op, dst, src, instruction.attrs, _outside(instruction), instruction.source
        )

    def _moved(self, view: View) -> View:
        found = self.wide.get(view.storage.id)
        if found is None:
            return view
        storage, at = found
        partition, column = divmod(view.offset, view.storage.free_size)
        strides = (storage.free_size, *view.strides[1:])
        offset = partition * storage.free_size + at + column
        return View(storage, offset, view.shape, strides, view.dt)


def _outside(instruction: Instruction) -> Frame | None:
    """The iteration around the innermost loop."""
    return None if instruction.frame is None else instruction.frame.parent


def _private(own: list[Storage], rounds: list[list[Instruction]]) -> bool:
    """Whether each iteration made one of these tiles in itself, all of one shape."""
    head = own[0]
    size = head.free_size * head.dtype.itemsize
    return (
        len({s.id for s in own}) == len(own)
        and all(automatic(s) and s.shape == head.shape and s.paxis == 0 for s in own)
        and all(s.frame is r[0].frame for s, r in zip(own, rounds))
        and (head.buffer == "sbuf" or size * len(own) <= CORE.psum_bank_bytes)
    )


def _one(column: list[Instruction]) -> Instruction | None:
    """All iterations of one instruction as one; None where they do not lie in equal steps."""
    head = column[0]
    views = []
    for place in range(len(head.src) + len(head.dst)):
        view = _stretched([(*i.src, *i.dst)[place] for i in column])
        if view is None:
            return None
        views.append(view)
    src, dst = tuple(views[: len(head.src)]), tuple(views[len(head.src) :])
    return Instruction(head.op, dst, src, head.attrs, head.frame, head.source)


def _stretched(every: list[View]) -> View | None:
    """Views in equal steps along the free axis as one, the iterations as its first free axis."""
    head = every[0]
    step = every[1].offset - head.offset
    for number, view in enumerate(every):
        if view.storage is not head.storage or view.strides != head.strides:
            return None
        if view.offset - head.offset != number * step or view.by_data is not None:
            return None
    if step < 0 or head.offset % head.storage.free_size + step * (len(every) - 1) >= (
        head.storage.free_size
    ):
        return None
    shape = (head.shape[0], len(every), *head.shape[1:])
    strides = (head.strides[0], step, *head.strides[1:])
    return View(head.storage, head.offset, shape, strides, head.dt, head.paxis)
