"""Races: elements that two independent iterations touch, found from the recorded accesses.

The compiler may reorder the iterations of ``affine_range`` and the instances of a launch grid, so
what one of them writes no other may write or read (err_unexpected_output_dependencies in
nki.errors.rst; loop iterators in programming_model.rst). Two forms of accumulation are no
dependence: matmuls that accumulate into PSUM, and ``x = x op y`` with an associative operator,
provided that nothing inside the loop reads the running value. Rows that an index tile chooses are
known on the device only and left out.

Every execution of a loop is checked by itself, at every level of nesting, for each tensor that was
created outside of it and written inside. A per-element map holds who wrote the element last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import refuse
from .program import Frame, Instruction, Loop, Program, Storage
from .regions import box_text, elements, place, window
from .tensor import Tensor

ASSOCIATIVE = frozenset({"add", "maximum", "minimum", "multiply"})
INDEPENDENT = frozenset({"affine", "grid"})
SHARED = -1  # owner of elements that several iterations accumulate into


@dataclass
class _Access:
    """One operand of one instruction, as a loop of several iterations sees it.

    Attributes:
        kind: "write", "read", or the name of the accumulation that it takes part in.
    """

    instruction: Instruction
    view: Tensor
    kind: str
    iteration: int = 0

    @property
    def mask(self) -> np.ndarray | None:
        """Elements of the view that are touched, or None for all (an index tile is read whole)."""
        indexed = any(
            v.indirect is not None and v.indirect[0] is self.view for v in self.instruction.src
        )
        return None if indexed else self.instruction.attrs.get("mask")

    def get(self, flat: np.ndarray) -> np.ndarray:
        """What a per-element array holds for the touched elements, one axis if masked."""
        mask = self.mask
        return window(flat, self.view) if mask is None else flat[elements(self.view, mask)]

    def put(self, flat: np.ndarray, values: Any) -> None:
        """Set the touched elements of a per-element array."""
        mask = self.mask
        if mask is None:
            window(flat, self.view)[...] = values
        else:
            flat[elements(self.view, mask)] = values


@dataclass
class _Group:
    """Accesses of one loop to one storage, at most one of each (iteration, region, kind)."""

    loop: Loop
    storage: Storage
    writes: dict[tuple, _Access] = field(default_factory=dict)
    reads: dict[tuple, _Access] = field(default_factory=dict)


def check_races(program: Program) -> None:
    """Refuse iterations of one independent loop that touch each other's elements.

    Raises:
        NkiError: ``err_unexpected_output_dependencies`` with both iterations, lines and elements.
    """
    for group in _groups(program):
        found = _conflict(group)
        if found is not None:
            raise _refusal(program, group, *found)


# --- collecting -----------------------------------------------------------------------------------
def _groups(program: Program) -> Iterable[_Group]:
    """Accesses by (loop, storage), where the storage is older than the loop and written in it."""
    written = {
        view.storage
        for instruction in program.instructions
        for view in instruction.dst
        if view.storage.frame is not instruction.frame
    }
    if not written:
        return ()
    groups: dict[tuple[int, int], _Group] = {}
    independent: dict[Frame, list[Frame]] = {}
    for instruction in program.instructions:
        frame = instruction.frame
        if frame is None:
            continue
        loops = independent.get(frame)
        if loops is None:
            loops = [f for f in frame.path() if f.loop.kind in INDEPENDENT and f.loop.n > 1]
            independent[frame] = loops
        if not loops:
            continue
        for access in _accesses(instruction, written):
            outside = access.view.storage.frame
            level = 0 if outside is None else outside.depth
            for at in loops:
                if at.depth > level:
                    _note(groups, at, access)
    return [group for group in groups.values() if group.writes]


def _note(groups: dict[tuple[int, int], _Group], at: Frame, access: _Access) -> None:
    storage = access.view.storage
    key = (id(at.loop), storage.id)
    group = groups.get(key)
    if group is None:
        group = groups[key] = _Group(at.loop, storage)
    view = access.view
    kept = group.reads if access.kind == "read" else group.writes
    mask = id(access.instruction.attrs.get("mask"))
    name = (at.i, view.offset, view.shape, view.strides, mask, access.kind)
    if name not in kept:
        kept[name] = _Access(access.instruction, view, access.kind, at.i)


def _accesses(instruction: Instruction, written: set[Storage]) -> Iterable[_Access]:
    """Operands on ``written`` storages; an accumulation is one access, not a read and a write."""
    frame = instruction.frame
    updated = None
    found = []
    for view in instruction.dst:
        storage = view.storage
        if storage not in written or storage.frame is frame or view.indirect is not None:
            continue
        kind, own = _kind(instruction, view)
        updated = own if own is not None else updated
        found.append(_Access(instruction, view, kind))
    for view in instruction.src:
        if view.indirect is not None:
            view = view.indirect[0]
        storage = view.storage
        if storage in written and storage.frame is not frame and view is not updated:
            found.append(_Access(instruction, view, "read"))
    return found


def _kind(instruction: Instruction, dst: Tensor) -> tuple[str, Tensor | None]:
    """How the result is written, and the operand that an accumulation updates in place."""
    attrs = instruction.attrs
    if "start" in attrs or "accumulate" in attrs:
        return "matmul accumulation", None
    name = instruction.op.name
    if name == "tensor_tensor":
        operator, at = attrs["op"], instruction.src
    elif name == "tensor_scalar" and "op1" not in attrs and "reduce_axes" not in attrs:
        operator, at = attrs["op0"], instruction.src[:1]
    else:
        return "write", None
    if operator not in ASSOCIATIVE:
        return "write", None
    same = [v for v in at if v.storage is dst.storage and v.key() == dst.key()]
    return (f"accumulation with {operator}", same[0]) if len(same) == 1 else ("write", None)


# --- comparing ------------------------------------------------------------------------------------
def _conflict(group: _Group) -> tuple[_Access, _Access, np.ndarray] | None:
    """The first pair of accesses of different iterations that exclude each other, and where."""
    if len({a.iteration for a in (*group.writes.values(), *group.reads.values())}) < 2:
        return None
    owner = np.zeros(group.storage.size, np.int32)  # iteration + 1 of the writer, 0: nobody
    total = 0
    for write in group.writes.values():
        write.put(owner, write.iteration + 1)
        total += write.view.size
    if np.count_nonzero(owner) != total:  # some elements are written more than once
        found = _between_writes(group, owner)
        if found is not None:
            return found
    exclusive = {name[:-1] for name, a in group.writes.items() if a.kind == "write"}
    for name, read in group.reads.items():
        if name[:-1] in exclusive:
            continue  # the iteration reads what it alone wrote
        near = read.get(owner)
        bad = (near != 0) & (near != read.iteration + 1)
        if bad.any():
            return _writer(group, read, bad)
    return None


def _between_writes(group: _Group, owner: np.ndarray) -> tuple[_Access, _Access, np.ndarray] | None:
    """Compare writes in program order; afterwards ``owner`` says SHARED where many accumulate."""
    owner[...] = 0
    kinds = sorted({a.kind for a in group.writes.values()})
    last = np.zeros(group.storage.size, np.int8)  # 1 + number of the kind of the last write
    for write in group.writes.values():
        near, kind = write.get(owner), write.get(last)
        mine, own = write.iteration + 1, kinds.index(write.kind) + 1
        others = (near != 0) & (near != mine)
        bad = others if write.kind == "write" else others & (kind != own)
        if bad.any():
            return _writer(group, write, bad)
        write.put(owner, np.where(others, SHARED, mine))
        write.put(last, own)
    return None


def _writer(
    group: _Group, access: _Access, bad: np.ndarray
) -> tuple[_Access, _Access, np.ndarray] | None:
    """The write that ``access`` meets at the elements ``bad`` of its view."""
    mine = np.zeros(group.storage.size, bool)
    access.put(mine, bad)
    for write in group.writes.values():
        if write is access or write.iteration == access.iteration:
            continue
        if write.kind == access.kind and write.kind != "write":
            continue
        met = write.get(mine)
        if met.any():
            flags = np.zeros(group.storage.size, bool)
            write.put(flags, met)
            return write, access, flags
    return None


def _refusal(
    program: Program, group: _Group, write: _Access, other: _Access, flags: np.ndarray
) -> Exception:
    loop = group.loop
    where = "launch grid" if loop.kind == "grid" else f"affine_range at {loop.source}"
    unit = "instance" if loop.kind == "grid" else "iteration"
    does = "reads" if other.kind == "read" else "also writes"
    mend = (
        "give every instance its own part of the tensor"
        if loop.kind == "grid"
        else "index the tensor with the loop variable, create it inside the loop, or use "
        "nl.sequential_range"
    )
    return refuse(
        "err_unexpected_output_dependencies",
        f"{unit} {write.iteration} of the {where} writes {box_text(flags, group.storage)} of "
        f"{group.storage.label()} (line {_line(write)}), which {unit} {other.iteration} {does} "
        f"(line {_line(other)}), expected {unit}s that touch only what they alone write; {mend}",
        place(program, other.instruction),
    )


def _line(access: _Access) -> str:
    source = access.instruction.source
    return str(source.line) if source is not None else "unknown"
