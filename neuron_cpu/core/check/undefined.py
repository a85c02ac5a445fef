"""Undefined data, exact per element and by value flow.

Kernels legally compute on tail rows that nobody loaded, as long as nothing of it stays in HBM. So
an element that was never written is followed through every instruction, as ``OpSpec.flow`` says,
and refused where it is stored, unless a later store replaces it. A storage is in one of three
states: never written, wholly defined, or a map with one entry per element. The map holds booleans
(undefined or not); once a store fails, the program is walked again with *codes* instead, which say
for every undefined element which element that nobody wrote it comes from. Both walks are the same
code: joining is ``np.maximum``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.dtypes import Shape
from ..device.errors import NkiError, for_time, refuse, warn
from ..device.spec import CORE
from ..instructions.copies import PermuteAttrs, ShuffleAttrs
from ..instructions.gpsimd import KeepAttrs, LocalGatherAttrs, RandomAttrs
from ..instructions.ranks import CollectiveAttrs
from ..instructions.vector import ReduceAttrs
from ..program.placement import grounds, overlapping
from ..program.program import Instruction, Program
from ..program.regions import box_text, covers_storage, elements, grounded, place, window
from ..program.storage import Storage
from ..program.view import View
from . import unwritten

Map = np.ndarray  # bool, or int64 codes: 0 is defined


def check_values(program: Program) -> None:
    """Refuse stores of undefined data and outputs that nobody writes; warn of partial outputs.

    Raises:
        NkiError: ``sim_undefined_data`` (a warning in `only_timed`) or
            ``err_tensor_output_not_written_to``.
    """
    # Booleans first: a byte an element. Codes take eight, and only a refusal needs to name origins.
    walk = _Walk(program, codes=False)
    stored = walk.run()
    if stored is None and any(walk.left(at) for at in walk.spoiled):
        stored = _Walk(program, codes=True).remaining()
    if stored is not None:
        error = _Walk(program, codes=True).blame(stored)
        if not for_time() or error.identifier != "sim_undefined_data":
            raise error
        return warn(error.identifier, error.message, error.source)
    if walk.spoiled:
        error = _Walk(program, codes=True).blame(min(map(min, walk.spoiled.values())))
        if error.identifier != "sim_undefined_data":  # tiles that share addresses, not padding
            raise error
        warn(error.identifier, f"{error.message}; later stores replace them", error.source)
    for output in grounds(program.outputs):
        state = walk.map(output)
        # where data say which part is written, this call's may have said none
        if state is not None and state.all() and not program.for_values:
            mend = (
                f"store to it, nisa.dma_copy(dst={output.name or 'it'}, src=tile), where dst "
                "comes first, mend trip counts and masks, or do not return it"
            )
            raise refuse(
                "err_tensor_output_not_written_to",
                f"output {output.label()} is returned but never stored to, expected a store to "
                f"every element; {unwritten.not_run(program, output) or mend}",
                f"{program.name} ({output.source})" if output.source else program.name,
            )
        if state is not None and state.any():
            warn(
                "sim_output_partly_written",
                f"output {output.label()} is written in part: {int(np.count_nonzero(state))} "
                f"elements are missing, {box_text(state != 0, output)} first, expected all of "
                f"them; store the rest{unwritten.reasons(program)}, or make the output smaller",
                f"{program.name} ({output.source})" if output.source else program.name,
            )


class _Walk:
    """One pass over the instructions.

    Attributes:
        state: per storage id a map, or the regions written so far while nobody has asked for one,
            or None where all of it is defined; absent: never written.
        whole: by a storage's size and the regions written, whether they leave nothing.
        clean: per storage id the keys of regions known to be defined while others are not. Only a
            write of undefined data, or one over a shared address, can change that: it drops all.
        written: per storage id elements written since the map was last searched for a set one.
        base: per storage id the code of its first element; codes of all storages follow each other.
        apart: operands, by id, as views of one block of a tensor.
        sharing: tiles that the kernel itself has placed over each other, by storage id.
        overwriter: per storage id the last instruction that wrote over a part of it.
        spoiled: per storage id in HBM the stores that brought undefined data, by number.
    """

    def __init__(self, program: Program, codes: bool) -> None:
        self.program, self.codes = program, codes
        self.kind: type = np.int64 if codes else bool  # of a map's entries
        self.state: dict[int, Map | list[View] | None] = {}
        self.whole: dict[tuple, bool] = {}
        self.clean: dict[int, set[tuple]] = {}
        self.written: dict[int, int] = {}
        self.base: dict[int, int] = {}
        self.sharing = overlapping(program) if program.direct_allocation else {}
        self.overwriter: dict[int, Instruction] = {}
        self.spoiled: dict[int, list[int]] = {}
        # A message names tensors as the kernel made them; without codes there is none.
        apart = not codes and not self.sharing
        self.apart = _by_blocks(program) if apart else {}
        self.at = 0  # the instruction that is walked
        total = 1  # code 0 means defined
        self.memories = grounds(program.storages)
        for storage in self.memories:
            self.base[storage.id] = total
            total += storage.size
            if storage.role in ("input", "const"):
                self.state[storage.id] = None

    def run(self, until: int | None = None) -> int | None:
        """Walk all instructions (or ``until`` many).

        Returns:
            The number of a store of undefined data into rows that nobody can follow.
        """
        state, clean, apart = self.state, self.clean, self.apart
        for k, instruction in enumerate(self.program.instructions[:until]):
            self.at = k
            attrs = instruction.attrs
            # Most instructions read defined regions only. That is decided by look-ups, without a
            # map: tracing an instruction costs 60 us, and this check should not double it.
            dirty = False
            used = instruction.src
            if attrs.accumulate:
                used += instruction.dst
            for view in used:
                view = apart.get(id(view), view)
                at = (view.storage.ground or view.storage).id
                if at not in state or view.by_data is not None:
                    dirty = True
                elif state[at] is not None:
                    known = clean.get(at)
                    if known is None or (view.offset, view.shape, view.strides) not in known:
                        dirty = True
            mask = attrs.mask
            # The rest has its operands' maps joined, element by element.
            if dirty and _onto_itself(instruction):
                continue  # what nobody wrote stays as it is
            if dirty or instruction.dst[0].by_data is not None:
                if self._spread(instruction, mask):
                    return k
            else:
                for view in instruction.dst:
                    self._define(view, mask)
            if self.sharing:
                self._overwrite(instruction)
        return None

    def left(self, at: int) -> bool:
        """Whether any element of a storage is undefined."""
        flat = self.state[at]
        return isinstance(flat, np.ndarray) and bool(flat.any())

    def remaining(self) -> int | None:
        """The number of the first store whose undefined data nobody has replaced at the end."""
        self.run()
        for storage in self.memories:
            if storage.id not in self.spoiled or (flat := self.map(storage)) is None:
                continue
            base = self.base[storage.id]  # codes of its own are elements that nobody stored to
            foreign = (flat != 0) & ((flat < base) | (flat >= base + storage.size))
            for k in self.spoiled[storage.id]:
                views = [v.grounded() for v in self.program.instructions[k].dst]
                if any(v.storage is storage and window(foreign, v).any() for v in views):
                    return k
        return None

    # --- reading ----------------------------------------------------------------------------------
    def fresh(self, storage: Storage) -> Map:
        """The map of a storage that nobody wrote."""
        if not self.codes:
            return np.ones(storage.size, bool)
        base = self.base[storage.id]
        return np.arange(base, base + storage.size, dtype=np.int64)

    def map(self, storage: Storage) -> Map | None:
        """The map of a storage, None where all of it is defined."""
        flat = self.state.get(storage.id, [])
        if isinstance(flat, list):
            pieces, flat = flat, self.fresh(storage)
            for view in pieces:
                window(flat, view)[...] = 0
            self.state[storage.id] = flat
        return flat

    def read(self, view: View) -> Map | None:
        """The undefined elements of ``view`` ([shape] map), or None."""
        view = self.apart.get(id(view), view)
        common = view.grounded()
        if common is not view:  # an element is undefined where one of its parts is
            found = self.read(common)
            return None if found is None else found.max(axis=-1)
        if view.by_data is not None:
            return self._read_rows(view)
        flat = self.map(view.storage)
        if flat is None:
            return None
        # Searching a region costs a pass over it, so a region found clean is remembered by its key.
        found = window(flat, view)
        if found.any():
            return found
        self.clean.setdefault(view.storage.id, set()).add(view.key())
        return None

    def _read_rows(self, view: View) -> Map | None:
        """Rows chosen by data: undefined if the index is, or if no row that it may name is defined.

        Which one is read is known on the device only. Packers of tokens write a part of their
        scratch and read that part (public kernels whose cases were exact on a trn2): as long as
        some offset reads defined elements alone, data decide, and a run shows NaN elsewhere.
        """
        assert view.by_data is not None
        index = self.read(view.by_data[0])
        flat = self.map(view.storage)
        if flat is not None and self.program.cores > 1 and view.storage.buffer == "shared_hbm":
            flat = self._without_other_core(view.storage, flat)
        worst = None if flat is None or not flat.any() else _never_defined(flat, view)
        whole = None if worst is None else np.full(view.shape, worst)
        return _join([whole, None if index is None else _by_rows(_rows(index), view.shape)])

    def _without_other_core(self, storage: Storage, flat: Map) -> Map:
        """The map without elements that another core writes at known places, perhaps earlier."""
        own, flat = self.program.instructions[self.at].core, flat.copy()
        for instruction in self.program.instructions:
            for view in instruction.dst:
                if view.storage is storage and view.by_data is None and instruction.core != own:
                    window(flat, view)[...] = 0
        return flat

    # --- writing ----------------------------------------------------------------------------------
    def _define(self, view: View, mask: Any) -> None:
        """Everything that an instruction writes into ``view`` is defined."""
        view = self.apart.get(id(view), view)
        if view.storage.ground is not None:
            view, mask = grounded(view, mask)
        storage = view.storage
        at = storage.id
        if view.by_data is not None:
            self.state[at] = None  # which rows is known on the device only: give it the benefit
            return
        # A map is made only for storages that are written in parts; whole tiles need none.
        flat = self.state.get(at, ...)
        if flat is None:
            return
        if mask is not None:
            whole = self.map(storage)
            assert whole is not None
            whole[elements(view, mask)] = 0
        else:
            if covers_storage(view):
                self.state[at] = None
                return
            known = self.clean.setdefault(at, set())
            key = view.key()
            if key in known:
                return
            known.add(key)
            if isinstance(flat, np.ndarray):
                window(flat, view)[...] = 0
            elif flat is ...:
                self.state[at] = [view]
            else:
                flat.append(view)
        total = self.written[at] = self.written.get(at, 0) + view.size
        if total >= storage.size:
            self._complete(storage)

    def _complete(self, storage: Storage) -> None:
        """Notice when the last undefined element of a storage is gone.

        A search costs a pass over the storage, so it waits until as much has been written as would
        fill it: few passes, however small the pieces are. Kernels repeat few sets of regions.
        """
        at = storage.id
        self.written[at] = 0
        pieces = self.state[at]
        form = (storage.size, *map(View.key, pieces)) if isinstance(pieces, list) else ()
        whole = self.whole.get(form)
        if whole is None:
            self.map(storage)
            whole = not self.left(at)
        if form:
            self.whole[form] = whole
        if whole:
            self.state[at] = None

    def _spread(self, instruction: Instruction, mask: Any) -> bool:
        """Carry undefined elements to the results; True if rows that data choose take them."""
        sources = [self.read(view) for view in instruction.src]
        attrs = instruction.attrs
        if any(found is not None for found in sources):
            self.program.unwritten_at.add(instruction.source)
        for number, view in enumerate(instruction.dst):
            # What the operands bring, what stays of an accumulator, and what the index leaves open.
            found = _result(instruction, sources, number)
            if attrs.accumulate:
                found = _join([found, self.read(view)])
            if view.by_data is not None:
                index = self.read(view.by_data[0])
                if index is not None:
                    found = _join([found, _by_rows(_rows(index), view.shape)])
            # Elements outside of the mask keep what they were, defined or not.
            if found is not None:
                found = np.broadcast_to(found, view.shape)
                if not (found if mask is None else found[mask]).any():
                    found = None
            if found is None:
                self._define(view, mask)
                continue
            if not view.storage.on_chip:  # it leaves the chip
                self.stored = found if mask is None else np.where(mask, found, 0)
                if view.by_data is not None:
                    return True
                self.spoiled.setdefault(view.grounded().storage.id, []).append(self.at)
            self._write(view, found, mask)
        return False

    def _write(self, view: View, found: Map, mask: Any) -> None:
        view = self.apart.get(id(view), view)
        common, mask = grounded(view, mask)
        if common is not view:
            view, found = common, np.broadcast_to(found[..., None], common.shape)
        at = view.storage.id
        flat = self.map(view.storage)
        if flat is None:  # defined until now
            flat = self.state[at] = np.zeros(view.storage.size, self.kind)
        if mask is None:
            window(flat, view)[...] = found
        else:
            flat[elements(view, mask)] = found[mask]
        self.clean.pop(at, None)

    def _overwrite(self, instruction: Instruction) -> None:
        """Mark the elements that the instruction overwrote in tiles that share its memory.

        Only with direct allocation. The lost elements become fresh again, as if never written, so
        that the walk finds a later read of them like any other undefined data.
        """
        for view in [v.grounded() for v in instruction.dst]:
            for tile, other in self.sharing.get(view.storage.id, ()):
                lost, at = other.hit_by(tile, view), other.storage.id
                if lost is None or at not in self.state:
                    continue
                flat = self.map(other.storage)
                if flat is None:
                    flat = self.state[at] = np.zeros(other.storage.size, self.kind)
                blocks = (-1, other.partitions, other.storage.free_size)
                flat.reshape(blocks)[lost] = self.fresh(other.storage).reshape(blocks)[lost]
                self.clean.pop(at, None)
                self.overwriter[at] = instruction

    # --- blame ------------------------------------------------------------------------------------
    def blame(self, at: int) -> NkiError:
        """The refusal of store ``at``: which elements nobody wrote, and where they came out."""
        # Walk again, with codes, up to the store that failed; then let it fail once more.
        self.run(at)
        store = self.program.instructions[at]
        self._spread(store, store.attrs.mask)
        # Several storages may be to blame: the one created last is nearest to the mistake.
        codes = self.stored[self.stored != 0]
        newest = int(codes.max())
        storage = [one for one in self.memories if self.base[one.id] <= newest][-1]
        base = self.base[storage.id]
        mine = codes[(codes >= base) & (codes < base + storage.size)] - base
        # Joining keeps the largest code of each element, so some origins are gone from the codes;
        # elements that are still fresh at the store are shown with them.
        flags = np.zeros(storage.size, bool)
        flags[mine] = True
        flat = self.map(storage)
        if flat is not None:
            flags |= flat == self.fresh(storage)
        return self._refusal(store, storage, flags, codes.size)

    def _refusal(
        self, store: Instruction, storage: Storage, flags: np.ndarray, count: int
    ) -> NkiError:
        """``flags``: which elements of ``storage`` are undefined."""
        region = box_text(flags, storage)
        where = place(self.program, store)
        writer = self.overwriter.get(storage.id)
        if writer is not None:
            return refuse(
                "sim_allocation_overlap",
                f"{store.op.name} to {store.dst[0].storage.label()} stores {count} elements that "
                f"come from {region} of {storage.label()} after {writer.op.name} (line "
                f"{writer.source.line if writer.source else 'unknown'}) wrote "
                f"{writer.dst[0].storage.label()} over it, expected tiles that share addresses to "
                "be live one after the other; move one of them",
                where,
            )
        target, source = store.dst[0].storage, storage.label()
        mend = unwritten.mend(self.program, store, storage, region, bool(flags.all()))
        return refuse(
            "sim_undefined_data",
            f"{store.op.name} to {target.label()} stores {count} undefined "
            f"elements: {region} of {source}, created at {self._created(storage)}, is not "
            f"written by then, expected every element that reaches HBM to be written first; {mend}",
            where,
        )

    def _created(self, storage: Storage) -> str:
        """The line that created the storage: its own, or the line of its first write or use."""
        if storage.source is not None:
            return str(storage.source)
        for instruction in self.program.instructions:
            if any(v.storage.memory is storage for v in (*instruction.dst, *instruction.src)):
                return str(instruction.source)
        return "an unknown line"


def _by_blocks(program: Program) -> dict[int, View]:
    """Operands, by id, in storages that stand for one block of a tensor each.

    Blocks are mostly written whole, which takes no map, and those in parts take a small one. A
    tensor stays as it is where a view takes several of its blocks, or data choose.
    """
    if not any(storage.paxis for storage in program.storages):
        return {}
    views = {id(v): v for i in program.instructions for v in (*i.dst, *i.src)}
    together = {
        v.storage
        for one in views.values()
        for v in ((one, one.by_data[0]) if one.by_data else (one,))
        if v is not one or v.by_data or v.storage.ground or len(v.blocks()) > 1
    }
    made: dict[tuple[int, int], Storage] = {}
    moved: dict[int, View] = {}
    first = 1 + max((storage.id for storage in program.storages), default=0)
    for at, view in views.items():
        storage = view.storage
        if storage.paxis and storage not in together:
            number = view.blocks().start
            block = made.get((storage.id, number))
            if block is None:
                shape = storage.shape[storage.paxis :]
                block = Storage(first + len(made), shape, storage.dtype, storage.buffer)
                made[storage.id, number] = block
            offset = view.offset - number * block.size
            moved[at] = View(block, offset, view.shape, view.strides, view.dt)
    return moved


def _onto_itself(instruction: Instruction) -> bool:
    """Whether it copies a region onto itself, as kernels do to wait for earlier writes."""
    attrs = instruction.attrs
    if not instruction.op.is_copy or attrs.mask is not None or len(instruction.src) != 1:
        return False
    source, target = instruction.src[0], instruction.dst[0]
    same = source.storage is target.storage and source.key() == target.key()
    plain = source.by_data is None and target.by_data is None and not attrs.accumulate
    return same and plain and source.dt is target.dt


# --- how undefined elements spread ----------------------------------------------------------------
# One function for each way in which results depend on operands (OpSpec.flow): from the operands'
# maps, None where all is defined, to the map of the first result, or to one that broadcasts to it.
Maps = list[Map | None]


def _join(maps: Maps) -> Map | None:
    """Undefined where any of the maps says so."""
    found: Map | None = None
    for one in maps:
        if one is not None:
            found = one if found is None else np.maximum(found, one)
    return found


def _result(instruction: Instruction, sources: Maps, number: int) -> Map | None:
    """The undefined elements of result ``number``, in its shape, or None."""
    if all(s is None for s in sources):
        return None
    view = instruction.dst[number]
    found = FLOW[instruction.op.flow](instruction, sources, view.shape)
    if found is None:
        return None
    # A second result is the sum of the first one's rows; other instructions give all alike.
    if number and instruction.attrs.reduce_axes:
        found = found.max(axis=tuple(range(-instruction.attrs.reduce_axes, 0)))
    return found.reshape(view.shape) if found.size == view.size else found


def _reduce(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """One undefined element spoils the whole reduction over the last axes."""
    found = _join(sources)
    if found is None:
        return None
    attrs = ReduceAttrs.of(instruction)
    if attrs.order is not None:
        found = found.transpose(attrs.order)
    return found.max(axis=tuple(range(-attrs.axes, 0)))


def _matmul(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """A whole row of the product for a column of the stationary operand, and the reverse."""
    rows, columns = (None if s is None else _columns(s) for s in sources[:2])
    found = _join(
        [None if rows is None else rows[:, None], None if columns is None else columns[None, :]]
    )
    size = (instruction.src[0].free_size, instruction.src[1].free_size)
    return None if found is None else np.broadcast_to(found, size)


def _of_first(spread: Callable[[Any, Map], Map]) -> Callable[[Instruction, Maps, Shape], Any]:
    """The flow from the first operand alone: the result of ``spread`` on its map."""
    return lambda i, sources, shape: None if sources[0] is None else spread(i, sources[0])


def _by_rows(rows: Map | None, shape: Shape) -> Map | None:
    """A value for each partition, on all of its elements."""
    if rows is None:
        return None
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _columns(found: Map) -> Map:
    return found.reshape(found.shape[0], -1).max(axis=0)


def _never_defined(flat: Map, view: View) -> Any:
    """What undefined elements are worth that every run-time offset of ``view`` reads; or None."""
    assert view.by_data is not None
    tile, step, length, _ = view.by_data
    alike = tile.size == 1 or not view.strides[0]  # one offset for all rows, or rows of one table
    shape, strides = (
        (view.shape, view.strides)
        if tile.size == 1
        else ((1 if alike else view.shape[0], *view.shape[1:]), view.strides)
    )
    reach = view.offset + sum((n - 1) * s for n, s in zip(shape, strides))
    count = min(length, (flat.size - 1 - reach) // step + 1) if step > 0 else 0
    if count < 1:
        return flat.max()
    bad = flat != 0
    regions: np.ndarray = np.ndarray((count, *shape), bool, bad, view.offset, (step, *strides))
    kept = 1 if tile.size == 1 else 2  # axes of offsets, and of rows that have one each
    wrong = regions.any(axis=tuple(range(kept, regions.ndim)))
    return flat.max() if wrong.all(axis=0).any() else None


def _rows(found: Map) -> Map:
    return found.reshape(found.shape[0], -1).max(axis=1)


def _scan(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """To everything that follows on the free axis."""
    found = _join(sources)
    if found is None:
        return None
    flat = np.broadcast_to(found, shape).reshape(shape[0], -1)
    return np.maximum.accumulate(flat, axis=1).reshape(shape)


def _all(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """To every result element of the same partition; of all partitions where counts differ."""
    rows = [None if s is None else _rows(s) for s in sources]
    if any(r is not None and r.size not in (1, shape[0]) for r in rows):
        rows = [None if r is None else r.max(keepdims=True) for r in rows]
    return _by_rows(_join(rows), shape)


def _lanes(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """Partitions permuted inside quadrants; a kept one is the destination's own."""
    moved, own = [*sources, None][:2]
    at, keep = ShuffleAttrs.of(instruction).sources(shape[0])
    kept = keep.reshape(-1, *(1,) * (len(shape) - 1))
    if moved is not None:
        moved = np.where(kept, 0, moved[at])
    if own is not None:
        own = np.where(kept, own, 0)
    return _join([moved, own])


def _cores(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """A partition's own data, and the indices of all partitions that share its list."""
    data, index = (None if s is None else _rows(s) for s in sources[:2])
    if index is not None:
        each = LocalGatherAttrs.of(instruction).each
        index = np.repeat(index.reshape(-1, each).max(axis=1), each)
    return _by_rows(_join([data, index]), shape)


def _groups(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """To all partitions of a GpSimd core."""
    found = _join([None if s is None else _rows(s) for s in sources])
    if found is None:
        return None
    each = CORE.gpsimd_partitions
    return _by_rows(np.repeat(found.reshape(-1, each).max(axis=1), each), shape)


def _dropout(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """Element by element; a seed that is undefined spoils everything."""
    at = RandomAttrs.of(instruction).seed_at
    seed = None if at is None else sources[at]
    whole = None if seed is None else np.broadcast_to(seed.max(), shape)
    return _join([*(s for k, s in enumerate(sources) if k != at), whole])


def _ranks(instruction: Instruction, sources: Maps, shape: Shape) -> Map | None:
    """The flow from any sent element to all received elements."""
    worst = [s.max() for s in sources[: CollectiveAttrs.of(instruction).sent] if s is not None]
    return np.broadcast_to(max(worst), shape) if worst else None


FLOW: dict[str, Callable[[Instruction, Maps, Shape], Map | None]] = {
    "elementwise": lambda i, sources, shape: _join(sources),
    "meeting": lambda i, sources, shape: _join(sources),
    "kept": _of_first(lambda i, x: np.where(KeepAttrs.of(i).keep, x, 0)),  # else a constant
    "copy": _of_first(lambda i, x: x),
    "transpose": _of_first(lambda i, x: x.reshape(x.shape[0], -1).T),
    "permute": _of_first(lambda i, x: x.transpose(PermuteAttrs.of(i).order)),
    "partitions": _of_first(lambda i, x: x.max(axis=0, keepdims=True)),  # one row from all
    "first": lambda i, s, shape: None if s[0] is None else np.broadcast_to(s[0].max(), shape),
    "random": _of_first(lambda i, x: np.broadcast_to(x.max(), i.dst[0].shape)),  # from the seed
    "fill": lambda i, sources, shape: None,
    "reduce": _reduce, "matmul": _matmul, "scan": _scan, "all": _all, "lanes": _lanes,
    "cores": _cores, "groups": _groups, "dropout": _dropout, "ranks": _ranks,
}  # fmt: skip
