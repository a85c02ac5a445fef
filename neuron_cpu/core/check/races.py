"""Races: elements that two independent iterations touch, found from the recorded accesses.

The compiler may reorder the iterations of ``affine_range`` and the instances of a launch grid, so
what one of them writes no other may write or read (err_unexpected_output_dependencies in
nki.errors.rst; loop iterators in programming_model.rst). Two forms of accumulation are no
dependence: matmuls that accumulate into PSUM, and ``x = x op y`` with an associative operator,
provided that nothing inside the loop reads the running value. Rows that an index tile chooses are
known on the device only and left out.

Every execution of a loop is checked by itself, at every level of nesting, for each tensor that was
created outside of it and written inside. The regions of most tensors meet only where an iteration
uses what is its own. The others get a map that holds who wrote each element last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device.errors import refuse, warn
from ..program.program import Instruction, Program
from ..program.regions import box, box_text, elements, grounded, place, relations, window
from ..program.storage import Frame, Loop, Storage
from ..program.view import View

ASSOCIATIVE = frozenset({"add", "maximum", "minimum", "multiply"})
INDEPENDENT = frozenset({"affine", "grid"})
SHARED = -1  # owner of elements that several iterations accumulate into

Use = tuple[Instruction, View, str, "np.ndarray | None"]  # the fields of an _Access
Tile = tuple[Storage, int]  # of a tensor, by the number of its block
Around = dict["Frame | None", tuple[Frame, ...]]  # by iteration, those of independent loops
Uses = dict[str, dict[Frame, None]]  # by kind, the iterations that use a region


@dataclass
class _Access:
    """One operand of one instruction, as a loop of several iterations sees it.

    Attributes:
        kind: "write", "read", or the name of the accumulation that it takes part in.
        mask: elements of the view that are touched, or None for all.
    """

    instruction: Instruction
    view: View
    kind: str
    mask: np.ndarray | None
    iteration: int

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The entries of a storage's map for the elements that the access touches."""
        mask = self.mask
        return window(flat, self.view) if mask is None else flat[elements(self.view, mask)]

    def put(self, flat: np.ndarray, values: Any) -> None:
        """Set them."""
        if self.mask is None:
            window(flat, self.view)[...] = values
        else:
            flat[elements(self.view, self.mask)] = values


@dataclass
class _Group:
    """Accesses of one loop to one storage, at most one of each (iteration, region, kind)."""

    loop: Loop
    storage: Storage
    writes: dict[tuple, _Access] = field(default_factory=dict)
    reads: dict[tuple, _Access] = field(default_factory=dict)

    def all(self) -> list[_Access]:
        return [*self.writes.values(), *self.reads.values()]


def check_races(program: Program) -> None:
    """Refuse iterations of one independent loop that touch each other's elements.

    Raises:
        NkiError: ``err_unexpected_output_dependencies`` with both iterations, lines and elements.
    """
    # First collect, for each loop and tensor, one access of every kind; then compare those of
    # different iterations. Loops inside loops are groups of their own, so each level is checked.
    twice = None
    for group in _groups(program):
        copies = group.loop.kind == "grid" and program.copies
        if copies:
            found = _conflict_of_copies(group, program)
        elif group.loop.kind == "grid" and program.cores > 1 and not group.storage.on_chip:
            found = _conflict_of_cores(group, program)
        else:
            found = _conflict(group)
        if found is not None:
            raise _refusal(program, group, *found)
        if copies and not group.storage.on_chip:
            twice = twice or group
    if twice is not None:
        _tell_copies(program, twice)


# --- collecting -----------------------------------------------------------------------------------
def _groups(program: Program) -> Iterable[_Group]:
    """Accesses by (loop, storage), where the storage is older than the loop and written in it."""
    # A race needs a write, and a tensor that is older than the iteration it is written in: tiles of
    # one iteration, most of all, drop out here.
    around: Around = {None: ()}
    written = {
        view.storage.memory
        for instruction in program.instructions
        for view in instruction.dst
        if view.storage.frame is not instruction.frame is not None
        if _independent(instruction.frame, view.storage.memory, around)
    }
    if not program.copies:
        written = _doubtful(program, written)
    groups: dict[tuple[int, int], _Group] = {}
    for access, loops in _in_loops(program, written):
        for at in loops:
            _note(groups, at, *access)
    return [group for group in groups.values() if group.writes]


def _in_loops(program: Program, written: set[Storage]) -> Iterator[tuple[Use, tuple[Frame, ...]]]:
    """Accesses to ``written`` with the iterations of independent loops around them, outermost
    first, from those on that the tensor is older than."""
    around: Around = {None: ()}
    for instruction in program.instructions if written else ():
        if instruction.frame is not None:
            for access in _accesses(instruction, written):
                loops = _independent(instruction.frame, access[1].storage, around)
                if loops:
                    yield access, loops


def _independent(frame: Frame, storage: Storage, around: Around) -> tuple[Frame, ...]:
    """The iterations of independent loops that the storage is older than; ``around``: all that were
    asked for before. A tensor made inside of a loop is another one in each of its iterations."""
    found = around.get(frame)
    if found is None:
        found, at = (), frame
        for at in frame.path():
            if at.loop.n > 1 and at.loop.kind in INDEPENDENT:
                found += (at,)
        around[frame] = found
    outside = storage.frame
    return found if outside is None else tuple([at for at in found if at.depth > outside.depth])


def _doubtful(program: Program, written: set[Storage]) -> set[Storage]:
    """Tensors of which iterations may touch each other's elements, as far as boxes tell."""
    found: set[Storage] = set()
    around: Around = {None: ()}
    together = _together(program, written, around)
    # Regions by tile (all of a tensor without block axes), each with its uses by kind.
    tiles: dict[Tile, dict[tuple, Uses]] = {}
    left = {storage for storage, _ in together}
    for instruction in program.instructions if left else ():
        frame = instruction.frame
        if frame is None:
            continue
        for _, view, kind, _ in _accesses(instruction, left):
            blocks = view.blocks()
            if len(blocks) > 1:
                found.add(view.storage)
            elif (tile := (view.storage, blocks.start)) in together:
                regions = tiles.setdefault(tile, {})
                regions.setdefault(view.key(), {}).setdefault(kind, {})[frame] = None
    for (storage, block), regions in tiles.items():
        if storage not in found and _meet(storage, block, regions, around):
            found.add(storage)
    return found


def _together(program: Program, written: set[Storage], around: Around) -> set[Tile]:
    """Tiles that an iteration writes while another one of the same independent loop uses them."""
    tiles: dict[Tile, dict[Frame, bool]] = {}  # iterations that use a tile, and whether they write
    found: set[Tile] = set()
    for instruction in program.instructions if written else ():
        frame = instruction.frame
        if frame is None:
            continue
        for written_to, views in ((True, instruction.dst), (False, instruction.src)):
            for view in views:
                if view.by_data is not None:
                    if written_to:
                        continue
                    view = view.by_data[0]
                storage = view.storage.ground or view.storage
                if storage not in written or storage.frame is frame:
                    continue
                blocks = view.blocks()
                if len(blocks) > 1 or storage is not view.storage:
                    found.update((storage, number) for number in view.grounded().blocks())
                    continue
                uses = tiles.setdefault((storage, blocks.start), {})
                if written_to or frame not in uses:
                    uses[frame] = written_to
    for tile, uses in tiles.items():
        if len(uses) > 1:
            writers = [frame for frame, writes in uses.items() if writes]
            if writers and _exclude(tile[0], writers, uses, around):
                found.add(tile)
    return found


def _meet(storage: Storage, block: int, regions: dict[tuple, Uses], around: Around) -> bool:
    """Whether an iteration may touch what another one writes."""
    uses, shape = list(regions.values()), storage.shape[storage.paxis :]
    start = block * (storage.size // storage.tiles)
    within = tuple([box(shape, offset - start, *rest) for offset, *rest in regions])
    for near, some in zip(relations(within)[0], uses):
        # accumulations of one kind exclude only what is of another
        for own, writers in some.items():
            for other in near if own != "read" else ():
                for kind, frames in uses[other].items():
                    if own == kind != "write":
                        continue
                    if _exclude(storage, writers, frames, around):
                        return True
    return False


def _exclude(
    storage: Storage, writers: Iterable[Frame], users: Iterable[Frame], around: Around
) -> bool:
    """Whether a user stands in another iteration of an independent loop than a writer does."""
    owner: dict[Loop, int] = {}  # the only iteration of each loop that writes, or SHARED
    for frame in writers:
        for at in _independent(frame, storage, around):
            if owner.setdefault(at.loop, at.i) != at.i:
                owner[at.loop] = SHARED
    return any(
        owner.get(at.loop, at.i) != at.i
        for frame in users
        for at in _independent(frame, storage, around)
    )


def _note(
    groups: dict[tuple[int, int], _Group],
    at: Frame,
    instruction: Instruction,
    view: View,
    kind: str,
    mask: np.ndarray | None,
) -> None:
    key = (id(at.loop), view.storage.id)
    group = groups.get(key)
    if group is None:
        group = groups[key] = _Group(at.loop, view.storage)
    # An inner loop repeats the same region again and again: its first access stands for all.
    kept = group.reads if kind == "read" else group.writes
    name = (at.i, view.offset, view.shape, view.strides, id(mask), kind)
    if name not in kept:
        kept[name] = _Access(instruction, view, kind, mask, at.i)


def _accesses(instruction: Instruction, written: set[Storage]) -> Iterator[Use]:
    """Operands on ``written`` storages, in elements that all types of their memory share; an
    accumulation is one access, not a read and a write."""
    frame, mask = instruction.frame, instruction.attrs.mask
    updated = None
    for view in instruction.dst:
        storage = view.storage.ground or view.storage
        if storage not in written or storage.frame is frame or view.by_data is not None:
            continue
        # The operand that is accumulated into belongs to the write: it is no read of its own.
        kind, own = _kind(instruction, view)
        updated = own if own is not None else updated
        common, touched = grounded(view, mask)
        yield instruction, common, kind, touched
    for view in instruction.src:
        touched = mask
        if view.by_data is not None:  # the rows are data; the index tile itself is read whole
            view, touched = view.by_data[0], None
        storage = view.storage.ground or view.storage
        if storage in written and storage.frame is not frame and view is not updated:
            common, touched = grounded(view, touched)
            yield instruction, common, "read", touched


def _kind(instruction: Instruction, dst: View) -> tuple[str, View | None]:
    """How the result is written, and the operand that an accumulation updates in place."""
    if instruction.op.multiplies and instruction.attrs.group:
        return "matmul accumulation", None
    update = None if instruction.op.updates is None else instruction.op.updates(instruction)
    if update is None or update[0] not in ASSOCIATIVE:
        return "write", None
    operator, operands = update
    same = [v for v in operands if v.storage is dst.storage and v.key() == dst.key()]
    return (f"accumulation with {operator}", same[0]) if len(same) == 1 else ("write", None)


# --- comparing ------------------------------------------------------------------------------------
def _conflict(group: _Group) -> tuple[_Access, _Access] | None:
    """The first pair of accesses of different iterations that exclude each other."""
    kinds = sorted({a.kind for a in group.writes.values()})
    if not group.reads and len(kinds) == 1 and kinds != ["write"]:
        return None  # an accumulation whose running value nobody reads
    if len({a.iteration for a in group.all()}) < 2:
        return None
    owner = np.zeros(group.storage.size, np.int32)  # iteration + 1 of the writer, 0: nobody
    late = _between_writes(group, owner, kinds)
    if late is not None:
        return _partner(group, late), late
    # Read against write: what is read must be nobody's or the iteration's own.
    exclusive = {name[:-1] for name, a in group.writes.items() if a.kind == "write"}
    for name, read in group.reads.items():
        if name[:-1] in exclusive:
            continue  # the iteration reads what it alone wrote
        near = read.of(owner)
        if ((near != 0) & (near != read.iteration + 1)).any():
            return _partner(group, read), read
    return None


def _conflict_of_cores(group: _Group, program: Program) -> tuple[_Access, _Access] | None:
    """The first pair that excludes each other between the two cores of a kernel of `nki`.

    Elements that both write are no conflict here: both cores write undivided parts equally. Whether
    it is alike shows when it runs (``run/instances.py``).
    """
    retyped = any(base is group.storage for _, base in program.aliases)
    if retyped or any(write.kind != "write" for write in group.writes.values()):
        return _conflict(group)
    nothing = np.zeros(group.storage.size, np.int8)
    written: dict[int, np.ndarray] = {}
    for write in group.writes.values():
        write.put(written.setdefault(write.iteration, nothing.copy()), 1)
    if len(written) > 1 and np.logical_and.reduce(list(written.values())).any():
        program.written_by_both.add(group.storage)
    for read in group.reads.values():
        own = read.of(written.get(read.iteration, nothing)) == 1
        for core, theirs in written.items():
            if core != read.iteration and ((read.of(theirs) == 1) & ~own).any():
                return _partner(group, read), read
    return None


def _conflict_of_copies(group: _Group, program: Program) -> tuple[_Access, _Access] | None:
    """The first pair that excludes each other among instances that all do the same.

    They write the same values, whoever comes last, but where one reads what it writes later only:
    that may be the other's result already, as with an update in place.
    """
    if len({a.iteration for a in group.all()}) < 2:
        return None  # a tile of one instance
    place_of = {id(instruction): k for k, instruction in enumerate(program.instructions)}
    first = min(a.iteration for a in group.all())
    own = sorted(
        (a for a in group.all() if a.iteration == first), key=lambda a: place_of[id(a.instruction)]
    )
    ever, so_far = np.zeros((2, group.storage.size), np.int8)
    for access in own:
        if access.kind != "read":
            access.put(ever, 1)
    for access in own:
        if access.kind == "read":
            if ((access.of(ever) == 1) & (access.of(so_far) == 0)).any():
                late = next(w for w in group.writes.values() if _shared(w, access).any())
                others = (a for a in group.reads.values() if a.iteration != late.iteration)
                return late, next(a for a in others if a.view.key() == access.view.key())
        elif access.kind != "write":
            found = (w for w in group.writes.values() if w.iteration != access.iteration)
            return next(w for w in found if w.view.key() == access.view.key()), access
        else:
            access.put(so_far, 1)
    return None


def _tell_copies(program: Program, group: _Group) -> None:
    write = next(iter(group.writes.values()))
    warn(
        "sim_copies_of_a_kernel",
        f"all {group.loop.n} instances of {program.name} compute the same and write all of "
        f"{group.storage.label()}, expected each to take its part; divide the work by "
        "nl.program_id, or launch one",
        place(program, write.instruction),
        advice=True,  # devices have run kernels launched so
    )


def _between_writes(group: _Group, owner: np.ndarray, kinds: list[str]) -> _Access | None:
    """The first write that excludes an earlier one, in program order.

    Afterwards ``owner`` says SHARED where several iterations accumulate.
    """
    last = np.zeros(group.storage.size, np.int8)  # 1 + number of the kind of the last write
    for write in group.writes.values():
        # Excluded are plain writes over another iteration's element, and an accumulation over what
        # was written in another way; two accumulations of one kind commute.
        near = write.of(owner)
        mine, own = write.iteration + 1, kinds.index(write.kind) + 1
        others = (near != 0) & (near != mine)
        excluded = write.kind == "write" or write.of(last) != own
        if (others & excluded).any():
            return write
        write.put(owner, np.where(others, SHARED, mine))
        write.put(last, own)
    return None


def _partner(group: _Group, access: _Access) -> _Access:
    """The first write of another iteration that ``access`` excludes."""
    for write in group.writes.values():
        compatible = write.kind == access.kind and write.kind != "write"
        if write.iteration != access.iteration and not compatible and _shared(write, access).any():
            return write
    raise AssertionError("a conflict has two sides")


def _shared(a: _Access, b: _Access) -> np.ndarray:
    """Flags of the elements that both accesses touch."""
    flags = np.zeros(a.view.storage.size, np.int8)
    a.put(flags, 1)
    b.put(flags, b.of(flags) + 1)
    return flags == 2


def _refusal(program: Program, group: _Group, write: _Access, other: _Access) -> Exception:
    loop = group.loop
    where = "launch grid" if loop.kind == "grid" else f"affine_range at {loop.source}"
    unit = "instance" if loop.kind == "grid" else "iteration"
    does = "reads" if other.kind == "read" else "also writes"
    apart = abs(write.view.offset - other.view.offset)
    mend = (
        "index the tensor with the loop variable, create it inside the loop, or use "
        "nl.sequential_range"
    )
    if write.kind == other.kind == "write" and group.storage.on_chip:
        mend = f"add to it with += where the iterations' parts are summed, or {mend}"
    if loop.kind == "grid":
        mend = "give every instance its own part of the tensor"
    elif other.kind != "read" and apart and write.view.shape == other.view.shape:
        sizes = zip(write.view.shape, write.view.strides)
        size, step = next((s for s in sizes if s[1] <= apart), (1, 1))
        mend = (
            f"let them begin {size} apart, as i * {size}, not {apart // step}: each writes {size}"
        )
    region = box_text(_shared(write, other), group.storage)
    return refuse(
        "err_unexpected_output_dependencies",
        f"{unit} {write.iteration} of the {where} writes {region} of {group.storage.label()} (line "
        f"{_line(write)}), which {unit} {other.iteration} {does} (line {_line(other)}), expected "
        f"{unit}s that touch only what they alone write; {mend}",
        place(program, other.instruction),
    )


def _line(access: _Access) -> str:
    source = access.instruction.source
    return str(source.line) if source is not None else "unknown"
