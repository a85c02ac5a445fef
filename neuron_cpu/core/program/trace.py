"""Recording: the kernel's Python body runs once and every API call appends an Instruction.

Nothing is computed here (except in eager mode), so a kernel cannot look at values, exactly as under
the device compiler. ``affine_range`` and ``sequential_range`` run their bodies with concrete ints
and mark the instructions with the iteration they belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.dtypes import DType
from ..device.errors import name_kernel, refuse, user_frame, warn
from .index import Mask
from .program import Instruction, Program
from .storage import Frame, Loop, Source, Storage
from .view import View, compose

if TYPE_CHECKING:
    from ..instructions.entry import OpSpec

_local = threading.local()
EMPTY = "empty"


def active() -> Tracer | None:
    """The tracer of the kernel that this thread is tracing, if any."""
    return getattr(_local, "tracer", None)


def current(what: str) -> Tracer:
    """The active tracer, or the documented refusal for API calls outside of a kernel."""
    tracer = getattr(_local, "tracer", None)
    if tracer is None:
        raise refuse(
            "err_nki_api_outside_of_nki_kernel",
            f"{what} is called outside of a kernel, expected a function decorated with @nki.jit on "
            "the call stack; move the call into the kernel",
        )
    return tracer


def region(mask: Any, shape: tuple[int, ...]) -> Any:
    """What a mask leaves of an operand region.

    Returns:
        None (all of it), EMPTY, a tuple of slices (a box), or a boolean array of ``shape``.
    """
    if mask is None or mask is True:
        return None
    if isinstance(mask, (bool, np.bool_)):
        return None if mask else EMPTY
    if not isinstance(mask, Mask):
        raise refuse(
            "err_unsupported_expression_in_mask",
            f"mask of type {type(mask).__name__}, expected comparisons of index expressions joined "
            "with '&'; use nl.where for conditions on data",
        )
    keep = mask.evaluate(shape)
    if keep.all():
        return None
    if not keep.any():
        return EMPTY
    keep = np.broadcast_to(keep, shape)
    box = []
    inside = 1
    for axis in range(len(shape)):
        others = tuple(a for a in range(len(shape)) if a != axis)
        used = np.flatnonzero(keep.any(axis=others))
        box.append(slice(int(used[0]), int(used[-1]) + 1))
        inside *= int(used[-1] - used[0] + 1)
    return tuple(box) if inside == np.count_nonzero(keep) else keep


def boxes(keep: np.ndarray) -> Iterator[tuple[slice, ...]]:
    """The boxes that a boolean array consists of: runs of equal slices, axis after axis."""
    start = 0
    while start < len(keep):
        end = start + 1
        while end < len(keep) and np.array_equal(keep[end], keep[start]):
            end += 1
        if keep.ndim == 1 and keep[start]:
            yield (slice(start, end),)
        elif keep.ndim > 1 and keep[start].any():
            for rest in boxes(keep[start]):
                yield (slice(start, end), *rest)
        start = end


_shared_attrs: dict[tuple, dict[str, Any]] = {}


def shared_attrs(attrs: dict[str, Any]) -> dict[str, Any]:
    """One dict for all instructions with the same few attributes; nobody changes them in place."""
    if any(type(v) not in (bool, str) for v in attrs.values()):  # 0, 0.0 and -0.0 are equal keys
        return attrs
    return _shared_attrs.setdefault(tuple(attrs.items()), attrs)


class Tracer:
    """Builds one Program.

    Attributes:
        program: what has been recorded so far.
        frame: innermost loop iteration.
        code: code object of the kernel function, to tell its top level from callees.
        machine: executes each instruction at once in eager mode, else None.
        view_type: class of the tensors that the front end gives kernels.
    """

    def __init__(
        self,
        program: Program,
        code: Any = None,
        machine: Any = None,
        view_type: type[View] = View,
    ) -> None:
        self.program, self.code, self.machine = program, code, machine
        self.view_type = view_type
        self.frame: Frame | None = None
        self.grid_index: tuple[int, ...] = ()
        self.loops = 0
        self.meetings = Meetings()
        self.views: dict[tuple, View] = {}
        self.started: dict[int, _Started] = {}  # zeros-initialised PSUM tiles by storage id
        self.recorded = program.instructions.append
        self.shared: list[Storage] = []  # shared_hbm tensors: one set for all grid instances
        self.shared_next = 0
        self.random: tuple[Any, int] = (0, 0)  # seed (a number or a tile), draws since it was set
        self.sums: View | None = None  # ScalarE's running sums (reduce_cmd)

    def __enter__(self) -> Tracer:
        self._outer = active()
        self._outer_name = name_kernel(self.program.name)
        _local.tracer = self
        return self

    def __exit__(self, *exc: object) -> None:
        name_kernel(self._outer_name)
        _local.tracer = self._outer

    # --- storages ---------------------------------------------------------------------------------
    def storage(
        self, shape: Sequence[int], dtype: DType, buffer: str, role: str = "local", name: str = ""
    ) -> Storage:
        """A new storage of this program."""
        program = self.program
        made = Storage(len(program.storages), tuple(shape), dtype, buffer, role)
        made.frame, made.birth, made.name = self.frame, len(program.instructions), name
        program.storages.append(made)
        return made

    def whole(self, storage: Storage) -> View:
        """All of a storage, as kernels see it."""
        return self.view_type.whole(storage)

    def begin_instance(self) -> None:
        """A grid instance starts: its shared_hbm tensors are those of the first instance."""
        self.shared_next = 0
        self.meetings.phase = 0

    def shared_storage(self, shape: tuple[int, ...], dtype: DType) -> Storage:
        """The next shared_hbm tensor of this instance."""
        at = self.shared_next
        self.shared_next += 1
        if at == len(self.shared):
            made = self.storage(shape, dtype, "shared_hbm", "output")
            made.frame = None
            self.shared.append(made)
        found = self.shared[at]
        if found.shape != shape or found.dtype is not dtype:
            raise refuse(
                "sim_shared_hbm_differs",
                f"grid instances create different shared_hbm tensors, {found.label()} and "
                f"{shape} {dtype}, expected the same in every instance",
            )
        return found

    def place(self) -> Source | None:
        frame = user_frame(2)
        return None if frame is None else Source.at(frame)

    # --- instructions -----------------------------------------------------------------------------
    def emit(
        self,
        op: OpSpec,
        dst: tuple[View, ...],
        src: tuple[View, ...],
        attrs: dict[str, Any],
    ) -> Instruction:
        """Check one instruction and append it."""
        for view in dst:
            if view.oob:
                view.check_bounds()
        for view in src:
            if view.oob:
                view.check_bounds()
            if view.storage.redirect is not None:
                self._materialise(view.storage)
            elif view.storage.zero_init and not view.storage.needs_zero:
                self._note_zero_read(view)
        if len(attrs) < 2:
            attrs = shared_attrs(attrs)
        same = self.same
        src = tuple([same(v) for v in src])
        instruction = Instruction(op, dst, src, attrs, self.frame, self.place())
        op.check(instruction)
        self.recorded(instruction)
        if self.meetings.phase:
            self.meetings.phases[id(instruction)] = self.meetings.phase
        if self.machine is not None:
            self.machine.run(instruction)
        return instruction

    def same(self, view: View) -> View:
        """One object for all operands that are the same region: programs repeat few regions."""
        if view.indirect is not None:
            return view
        key = (view.storage.id, view.offset, view.shape, view.strides, view.dt, view.paxis)
        return self.views.setdefault(key, view)

    def result(
        self,
        op: OpSpec,
        shape: tuple[int, ...],
        dtype: DType,
        src: tuple[View, ...],
        attrs: dict[str, Any],
        mask: Any = None,
        buffer: str = "sbuf",
    ) -> View:
        """Record an element-wise instruction into a fresh tile and return the tile.

        All of ``src`` have ``shape``; a mask cuts source and destination alike.
        """

        fresh = self.storage(shape, dtype, buffer)
        out = self.whole(fresh)
        cut = None if mask is None else region(mask, shape)
        dst = out
        if cut is EMPTY:
            return out
        if isinstance(cut, tuple):
            dst = out.slice_box(cut)
            src = tuple(s.slice_box(cut) for s in src)
        elif cut is not None:
            attrs = {**attrs, "mask": cut}
        fresh.producer = self.emit(op, (dst,), src, attrs)
        return out

    # --- assignment -------------------------------------------------------------------------------
    def assign(self, view: View, value: Any) -> None:
        """``view[...] = value``: move the fresh result there, or copy, or fill with a constant."""
        from ..instructions import isa

        if isinstance(value, (int, float, np.generic)):
            isa.fill(view, value)
            return
        if isinstance(value, isa.LoopReduction):
            value.into(view)
            return
        if not isinstance(value, View):
            raise refuse(
                "sim_assignment_type",
                f"value of type {type(value).__name__} assigned to {view.label()}, expected a "
                "tensor or a number",
            )
        if value.storage is view.storage and value.key() == view.key():
            return  # t[...] += x hands the updated view back to us
        self._check_writable(view)
        if self._was_skipped(value):
            return  # the destination keeps its content
        source = self._conform(value, view)
        if not self._redirect(view, source):
            isa.copy_into(view, source)

    def _was_skipped(self, value: View) -> bool:
        """True for a result whose mask selected nothing, so that no instruction was recorded."""
        fresh = value.storage
        return (
            fresh.producer is None
            and fresh.source is None
            and fresh.birth == len(self.program.instructions)
        )

    def _check_writable(self, view: View) -> None:
        if not view.storage.on_chip:
            raise refuse(
                "err_unsupported_memory",
                f"assignment into {view.label()}, expected a tensor in sbuf or psum; write HBM "
                "tensors with nl.store",
            )

    def _conform(self, value: View, view: View) -> View:
        """``value`` with the shape of ``view`` (size-1 axes and free-axis broadcasting)."""
        if value.shape == view.shape:
            return value
        if value.size == view.size and [s for s in value.shape if s != 1] == [
            s for s in view.shape if s != 1
        ]:
            return value.reshape(view.shape)
        if value.size > view.size:
            raise refuse(
                "err_store_dst_shape_smaller_than_other_shape",
                f"value of shape {value.shape} assigned to a region of shape {view.shape}, "
                "expected equal shapes; slice the value or enlarge the destination",
            )
        return value.expand(view.shape)

    def _redirect(self, view: View, value: View) -> bool:
        """Let the instruction that produced ``value`` write into ``view`` instead."""
        from ..instructions import isa

        fresh = value.storage
        last = fresh.producer
        if last is None or not self.program.instructions or fresh.redirect is not None:
            return False
        if self.program.instructions[-1] is not last or not value.is_full():
            return False
        if view.storage.buffer not in last.op.writes or len(last.dst) != 1:
            return False
        target = view if view.shape == fresh.shape else None
        if target is None:
            if view.size != fresh.size:
                return False
            try:
                target = view.reshape(fresh.shape)
            except Exception:
                return False
        moved = compose(last.dst[0], target)
        if moved is None:
            return False
        before = last.dst, last.attrs
        if last.attrs.get("raw") and moved.dt is not last.dst[0].dt:
            if last.op.flow != "copy":  # a transpose moves bits, its cast is an instruction
                return False
            last.attrs = {k: v for k, v in last.attrs.items() if k != "raw"}
        last.dst = (moved,)
        try:
            last.op.check(last)
        except Exception:
            last.dst, last.attrs = before
            return False
        fresh.redirect = view
        isa.note_written(moved)
        if self.machine is not None:
            self.machine.run(last)
        return True

    def _materialise(self, fresh: Storage) -> None:
        """A redirected result is used after all: give it its own tile back and copy from it."""
        from ..instructions import isa

        last, view = fresh.producer, fresh.redirect
        fresh.redirect = None
        fresh.producer = None
        assert last is not None and view is not None
        whole = self.whole(fresh)
        moved = last.dst[0]
        inner = _place_in(whole, moved, view)
        last.dst = (inner,)
        copy = isa.copy_instruction(moved, inner, last.frame, last.source)
        program = self.program.instructions
        program.insert(_last_index(program, last) + 1, copy)
        phases = self.meetings.phases
        if id(last) in phases:
            phases[id(copy)] = phases[id(last)]

    def in_place(self, view: View, name: str, value: Any) -> View:
        """``view += value``: PSUM accumulation of a matmul, else an element-wise update."""
        from ..instructions import isa
        from ..language import nl as language

        last = self.program.instructions[-1] if self.program.instructions else None
        if isinstance(value, View) and self._was_skipped(value):
            return view
        if (
            name == "add"
            and view.storage.buffer == "psum"
            and isinstance(value, View)
            and value.storage.producer is last
            and last is not None
            and last.op.name == "nc_matmul"
            and value.storage.redirect is None
        ):
            isa.accumulate(self, view, value, last)
            return view
        warn(
            "sim_inplace_operator",
            f"in-place '{name}' on {view.label()} is no matmul accumulation in PSUM, which SDK "
            "releases before 2.23 may miscompute; write x[...] = nl." + name + "(x, y)",
        )
        self.assign(view, getattr(language, name)(view, value))
        return view

    def _note_zero_read(self, view: View) -> None:
        started = self.started.get(view.storage.id)
        if started is None or not started.covers(view):
            view.storage.needs_zero = True

    def mark_started(self, view: View) -> bool:
        """Note that a matmul accumulates into ``view``; True when it is the first to do so."""
        started = self.started.get(view.storage.id)
        if started is None:
            started = self.started[view.storage.id] = _Started(view.storage.size)
        if started.covers(view):
            return False
        if not started.add(view):
            raise refuse(
                "sim_accumulation_region",
                f"matmul accumulates into a region of {view.storage.label()} that an earlier one "
                "covered in part, expected the same or a disjoint region; use one PSUM tile for "
                "each accumulation group",
            )
        return True

    def mark_written(self, view: View) -> None:
        """Note that an instruction wrote into a PSUM tile at an explicit address."""
        started = self.started.get(view.storage.id)
        if started is None:
            started = self.started[view.storage.id] = _Started(view.storage.size)
        started.overwrite(view)

    # --- loops ------------------------------------------------------------------------------------
    def loop(self, kind: str, indices: range) -> Iterator[int]:
        """Run a loop body once per index, marking what it records."""
        made = Loop(self.loops, kind, len(indices), self.place())
        self.loops += 1
        outer = self.frame
        try:
            for position, value in enumerate(indices):
                self.frame = Frame(made, position, outer)
                yield value
        finally:
            self.frame = outer

    def at_kernel_level(self) -> bool:
        """True in the kernel's own body, outside of loops and called functions."""
        frame = user_frame(2)
        loop = self.frame
        inside = loop is not None and loop.loop.kind != "grid"
        return not inside and (frame is None or self.code is None or frame.f_code is self.code)

    def eager_values(self, view: View) -> np.ndarray:
        if self.machine is None:
            raise refuse(
                "err_dynamic_control_flow_not_supported",
                f"values of {view.label()} are asked for while tracing, where nothing is computed; "
                "set NKI_CPU_EAGER=1 to execute each instruction as it is recorded",
            )
        return self.machine.values(view)

    # --- finishing --------------------------------------------------------------------------------
    def finish(self) -> Program:
        """Insert the zero fills that are real and return the program."""
        from ..instructions import isa

        program = self.program
        fills = [s for s in program.storages if s.needs_zero]
        for storage in sorted(fills, key=lambda s: s.birth, reverse=True):
            at = storage.birth
            program.instructions.insert(at, isa.zero_fill(storage))
        self.meetings.order(program)
        program.storages = _used_storages(program)
        return program


class Meetings:
    """Points where grid instances wait for each other (nl.all_reduce).

    Instances are traced one after the other. What an instance records after its k-th meeting is in
    phase k; at the end all instructions are put in the order of phases, so that every instance has
    brought its part before any goes on. Between meetings instances are independent.

    Attributes:
        phase: meetings that the instance being traced has reached.
        phases: phase of each instruction by id, where it is not 0.
        open: parts brought so far, by meeting and group of instances.
    """

    def __init__(self) -> None:
        self.phase = 0
        self.phases: dict[int, float] = {}
        self.open: dict[tuple, list[tuple[View, View]]] = {}

    def order(self, program: Program) -> None:
        """Sort the instructions by phase.

        Raises:
            NkiError: some instances of a group did not reach a meeting that others wait at.
        """
        if self.open:
            raise refuse(
                "sim_all_reduce_incomplete",
                f"all_reduce in {program.name} is reached by some grid instances only, expected "
                "all that differ on its program_axes; call it outside of conditions",
                program.name,
            )
        if self.phases:
            program.instructions.sort(key=lambda i: self.phases.get(id(i), 0))


def _used_storages(program: Program) -> list[Storage]:
    """Storages that an instruction or the caller touches: results that were moved elsewhere go."""
    used = {id(v.storage) for i in program.instructions for v in (*i.dst, *i.src)}
    used |= {
        id(v.indirect[0].storage)
        for i in program.instructions
        for v in (*i.dst, *i.src)
        if v.indirect is not None
    }
    kept = [s for s in program.storages if id(s) in used or s.role != "local" or s.address]
    for storage in kept:  # what only tracing needs
        storage.producer = storage.redirect = None
    return kept


class _Started:
    """Which elements of a zeros-initialised PSUM tile something wrote: regions, or a map."""

    __slots__ = ("flat", "keys", "size")

    def __init__(self, size: int) -> None:
        self.keys: set[tuple] = set()
        self.size = size
        self.flat: np.ndarray | None = None  # made once a region is not the whole tile

    def covers(self, view: View) -> bool:
        if view.key() in self.keys:
            return True
        if self.flat is not None:
            return bool(_window(self.flat, view).all())
        return bool(self.keys)  # the only region so far is the whole tile

    def add(self, view: View) -> bool:
        """Note a region; False where it overlaps an earlier one in part."""
        if view.is_full() and not self.keys:
            self.keys.add(view.key())
            return True
        if self.flat is None:
            self.flat = np.zeros(self.size, bool)
        window = _window(self.flat, view)
        if window.any():
            return False
        window[...] = True
        self.keys.add(view.key())
        return True

    def overwrite(self, view: View) -> None:
        """Note a region that may overlap earlier ones."""
        if not self.add(view):
            assert self.flat is not None
            _window(self.flat, view)[...] = True
            self.keys.add(view.key())


def _last_index(instructions: list[Instruction], wanted: Instruction) -> int:
    for k in range(len(instructions) - 1, -1, -1):
        if instructions[k] is wanted:
            return k
    raise ValueError("instruction is not part of the program")


def _place_in(whole: View, moved: View, view: View) -> View:
    """The box of ``whole`` that corresponds to ``moved`` inside ``view``."""
    if moved.shape == whole.shape:
        return whole
    offset = 0
    rest = moved.offset - view.offset
    order = sorted(range(len(view.strides)), key=lambda a: -view.strides[a])
    starts = [0] * len(view.shape)
    for axis in order:
        if view.strides[axis] and view.shape[axis] > 1:
            starts[axis], rest = divmod(rest, view.strides[axis])
    for start, stride in zip(starts, whole.strides):
        offset += start * stride
    return View(whole.storage, offset, moved.shape, whole.strides, whole.dt)


def _window(flat: np.ndarray, view: View) -> np.ndarray:
    """The elements of ``view`` in a flat per-element array of its storage."""
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[view.offset :], view.shape, tuple(s * item for s in view.strides)
    )


def observe_loop(kind: str, name: str) -> Callable[..., Iterator[int]]:
    """The public iterator ``name``: ``(stop)``, ``(start, stop)`` or ``(start, stop, step)``."""

    def iterate(*args: Any, **_: Any) -> Iterator[int]:
        tracer = current(f"nl.{name}")
        for value in args:
            if not isinstance(value, (int, np.integer)):
                raise refuse(
                    "sim_loop_bound",
                    f"nl.{name} got a bound of type {type(value).__name__}, expected integers "
                    "known while tracing; compute trip counts from shapes",
                )
        return tracer.loop(kind, range(*(int(a) for a in args)))

    iterate.__name__ = name
    iterate.__doc__ = f"``nl.{name}(stop)`` / ``(start, stop[, step])``: {kind} loop iterator."
    return iterate
