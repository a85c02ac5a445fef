"""Which instruction must wait for which: dependences through overlapping views.

Views are compared as boxes in the index space of their storage (with a step where a view takes
every n-th element), so that two tiles of one tensor do not wait for each other. A view that is no
box counts as the smallest box around it, which can only make a schedule longer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..device.spec import Engine
from ..program.placement import grounds
from ..program.program import Instruction, Program
from ..program.regions import Box, box_of, relations
from ..program.storage import Storage
from ..program.view import View

Edges = list[tuple[int, ...]]
Access = tuple["_Tracked", int]  # a region of one storage

JOINED = 6  # more predecessors of one region than this share a join


class _Tracked:
    """Last writer and later readers of each region of one storage.

    Attributes:
        writer: last instruction that wrote the whole region, -1 for none.
        readers: instructions (or joins of them) that read it since.
        sources: the writers that a reader waits for, None after a write until somebody asks.
    """

    __slots__ = ("boxes", "ids", "inside", "readers", "sources", "touching", "writer")

    def __init__(self) -> None:
        self.ids: dict[tuple, int] = {}
        self.boxes: list[Box] = []
        self.touching: list[list[int]] = []
        self.inside: list[list[int]] = []
        self.writer: list[int] = []
        self.readers: list[list[int]] = []
        self.sources: list[tuple[int, ...] | None] = []

    def region(self, view: View) -> int:
        key = (view.storage.id, view.offset, view.shape, view.strides)
        found = self.ids.get(key)
        if found is None:
            found = self.ids[key] = len(self.boxes)
            self.boxes.append(self._box(view))
        return found

    def _box(self, view: View) -> Box:
        return box_of(view)

    def close(self) -> None:
        """All regions are known."""
        self.touching, self.inside = relations(tuple(self.boxes))
        self.writer = [-1] * len(self.boxes)
        self.readers = [[] for _ in self.boxes]
        self.sources = [None] * len(self.boxes)


class _Blocks:
    """A tensor with block axes that every instruction takes block by block, or whole blocks of."""

    __slots__ = ("parts", "size")

    def __init__(self, storage: Storage) -> None:
        self.size = storage.size // storage.tiles
        self.parts: dict[int, _Tracked] = defaultdict(_Tracked)

    def accesses(self, view: View) -> list[Access]:
        """The region in each block."""
        blocks = view.blocks()
        if len(blocks) == 1:
            return [self._access(blocks.start, view)]
        return [self._access(number, View.block(view.storage, number)) for number in blocks]

    def _access(self, number: int, view: View) -> Access:
        state = self.parts[number]
        return state, state.region(view)

    def close(self) -> None:
        """All regions are known."""
        for state in self.parts.values():
            state.close()


class _Placed(_Tracked):
    """All tensors of one memory that the kernel placed itself: regions are addresses, so tiles
    that share bytes wait for each other whatever tensor they belong to."""

    __slots__ = ()

    def _box(self, view: View) -> Box:
        """(partitions, bytes) of the view."""
        storage = view.storage
        block = view.offset // (storage.shape[storage.paxis] * storage.free_size)
        rows, places = storage.address[block].reach(view)
        return (rows[0], rows[-1], 1), (places[0], places[-1], 1)


def reads_of(instruction: Instruction) -> list[View]:
    """Operand views, index tiles of indirect rows included."""
    views = list(instruction.src)
    for view in (*instruction.src, *instruction.dst):
        if view.by_data is not None:
            views.append(view.by_data[0])
    return views


def _tracked_storages(program: Program) -> dict[int, _Tracked | _Blocks]:
    """Storages that can carry a dependence: on chip, or HBM that the kernel writes and reads."""
    read: set[int] = set()
    written: set[int] = set()
    across: set[int] = set()  # storages of which a view takes parts of several blocks
    blocks = any(storage.paxis for storage in program.storages)
    for instruction in program.instructions:
        for view in (*instruction.src, *instruction.dst) if blocks else ():
            if view.storage.paxis and view.by_data is None and _parts_of_blocks(view):
                across.add(view.storage.id)
        if instruction.op.engine is Engine.DMA:
            read.update(v.storage.memory.id for v in instruction.src)
            written.update(v.storage.memory.id for v in instruction.dst)
    both = read & written
    placed = {"sbuf": _Placed(), "psum": _Placed()}
    tracked: dict[int, _Tracked | _Blocks] = {}
    for storage in grounds(program.storages):
        if storage.address is not None:
            tracked[storage.id] = placed[storage.buffer]
        elif storage.paxis and storage.id not in across:
            tracked[storage.id] = _Blocks(storage)
        elif storage.on_chip or storage.id in both:
            tracked[storage.id] = _Tracked()
    return tracked


def _parts_of_blocks(view: View) -> bool:
    """Whether a view reaches into several blocks and takes less than all of them."""
    blocks = view.blocks()
    return len(blocks) > 1 and view.size != len(blocks) * (view.storage.size // view.storage.tiles)


def _whole(view: View) -> View:
    """Data-dependent rows may lie anywhere in their storage."""
    return view if view.by_data is None else View.whole(view.storage)


class Dependences:
    """The instructions for which every instruction must wait.

    An instruction that waits for many others waits for a *join* of them instead, a node without
    work, and whoever waits for the same set shares it: the number of edges stays proportional to
    the number of operands although every engine may leave program order.

    Attributes:
        values: per instruction, whose results it reads.
        orders: per instruction, who must only be over before it writes (write after read or write).
        joins: predecessors of each join; join ``k`` is node ``len(values) + k`` in all edges.
    """

    __slots__ = ("first_join", "joins", "orders", "values")

    def __init__(self, instructions: int) -> None:
        self.values: Edges = []
        self.orders: Edges = []
        self.joins: Edges = []
        self.first_join = instructions

    def join(self, before: Iterable[int]) -> int:
        """The number of a new node that is over when all of ``before`` are."""
        self.joins.append(tuple(before))
        return self.first_join + len(self.joins) - 1

    def add(self, at: int, reads: list[Access], writes: list[Access]) -> None:
        """Enter the next instruction in program order."""
        # Read after write: the last writers of all that the region touches, found once for all its
        # readers until somebody writes there.
        value: set[int] = set()
        for state, region in reads:
            found = state.sources[region]
            if found is None:
                writer = state.writer
                before = {writer[other] for other in state.touching[region]}
                before.discard(-1)
                found = (self.join(before),) if len(before) > JOINED else tuple(before)
                state.sources[region] = found
            value.update(found)
        order: set[int] = set()
        for state, region in writes:
            self._overwrite(state, region, at, order)
        for state, region in reads:
            state.readers[region].append(at)
        # Who waits for the value waits for its end, too.
        order -= value
        order.discard(-1)
        self.values.append(tuple(value))
        self.orders.append(tuple(order))

    def _overwrite(self, state: _Tracked, region: int, at: int, order: set[int]) -> None:
        writer, readers, sources = state.writer, state.readers, state.sources
        # Write after write and after read. Many readers become a join, which stands for them from
        # now on: the next writer of an overlapping region waits for it as well.
        for other in state.touching[region]:
            order.add(writer[other])
            reading = readers[other]
            if len(reading) > JOINED:
                reading[:] = [self.join(reading)]
            order.update(reading)
            sources[other] = None
        # Regions that are overwritten in part only keep their writer; whoever reads them waits for
        # both, since this region touches them.
        for other in state.inside[region]:
            writer[other] = at
            readers[other] = []
        order.discard(at)  # two results in one region


def dependences(program: Program) -> Dependences:
    """Read after write, write after read and write after write of every instruction."""
    tracked = _tracked_storages(program)
    # First all regions: how they lie to each other is found out once, then edges are look-ups.
    accesses = []
    mixed = any(storage.ground is not None for storage in program.storages)
    for instruction in program.instructions:
        sources: Sequence[View] = instruction.src
        targets: Sequence[View] = instruction.dst
        if mixed:
            sources, targets = [v.grounded() for v in sources], [v.grounded() for v in targets]
        if any(v.by_data is not None for v in (*sources, *targets)):
            sources = [_whole(v.grounded()) for v in reads_of(instruction)]
            targets = [_whole(v) for v in targets]
        accesses.append((_regions(tracked, sources), _regions(tracked, targets)))
    for state in set(tracked.values()):
        state.close()
    found = Dependences(len(accesses))
    for at, (reads, writes) in enumerate(accesses):
        found.add(at, reads, writes)
    _add_order(program, found)
    return found


def _add_order(program: Program, found: Dependences) -> None:
    """The kernel's own order; the compiler may have replaced some of these instructions."""
    if not program.edges:
        return
    number = {id(i): k for k, i in enumerate(program.instructions)}
    for before, after in program.edges:
        first, second = number.get(id(before)), number.get(id(after))
        if first is None or second is None or first >= second:
            continue
        if first not in (*found.values[second], *found.orders[second]):
            found.orders[second] = (*found.orders[second], first)


def _regions(tracked: dict[int, _Tracked | _Blocks], views: Sequence[View]) -> list[Access]:
    found = []
    for view in views:
        state = tracked.get(view.storage.id)
        if isinstance(state, _Tracked):
            found.append((state, state.region(view)))
        elif state is not None:
            found.extend(state.accesses(view))
    return found
