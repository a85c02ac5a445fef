"""Recording: the kernel's Python body runs once and every API call appends an Instruction.

Nothing is computed here (except in eager mode), so a kernel cannot look at values, exactly as under
the device compiler. ``affine_range`` and ``sequential_range`` run their bodies with concrete ints
and mark the instructions with the iteration they belong to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.dtypes import DType, Shape
from ..device.errors import name_kernel, refuse, user_frame, warn
from ..device.refusals import speaking
from .attributes import Attrs
from .program import Instruction, Program
from .storage import Frame, Loop, Source, Storage
from .view import View, form_of

if TYPE_CHECKING:
    from ..instructions.entry import OpSpec


# --- points where instances of a launch grid wait for each other (``nl.all_reduce``) --------------
class Meetings:
    """Phases between the points where instances meet.

    Instances are traced one after the other. Instructions of an instance after its k-th meeting are
    in phase k; at the end all instructions are put in the order of phases, so that every instance
    has brought its part before any goes on. Between meetings instances are independent.

    Attributes:
        phase: meetings that the instance being traced has reached.
        last: the kernel's line of the last of them.
        phases: phase of each instruction by id, where it is not 0.
        open: parts brought so far, by meeting and group of instances.
    """

    def __init__(self) -> None:
        self.phase = 0
        self.last: str | None = None
        self.phases: dict[int, float] = {}
        self.open: dict[tuple, list[tuple[View, View]]] = {}

    def join(self, added: Instruction, other: Instruction) -> None:
        """Put an instruction that was not recorded in its turn into the phase of another."""
        if id(other) in self.phases:
            self.phases[id(added)] = self.phases[id(other)]

    def order(self, program: Program) -> None:
        """Sort the instructions by phase.

        Raises:
            NkiError: some instances of a group did not reach a meeting that others wait at.
        """
        if self.open:
            raise refuse(
                "sim_all_reduce_incomplete",
                f"{next(iter(self.open))[1]} in {program.name} is reached by some grid instances "
                "only, expected all that take part in it; call it outside of conditions",
                program.name,
            )
        if self.phases:  # a stable sort: inside a phase the order of recording stays
            program.instructions.sort(key=lambda i: self.phases.get(id(i), 0))


_local = threading.local()


# --- the tracer in force --------------------------------------------------------------------------
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
            "the call stack; write @nki.jit above its def, or move the call into the kernel",
        )
    return tracer


def _break(*args: Any, **kwargs: Any) -> Any:
    """``breakpoint()``: says in a kernel that is only traced what it cannot show there."""
    tracer = active()
    if tracer is not None and tracer.machine is None:
        warn(
            "sim_breakpoint",
            "breakpoint() in a kernel that is traced: a device's compiler fails on it "
            "(aws-neuron-sdk 1057), and tiles have no values yet, expected it in eager mode alone; "
            "set NKI_CPU_EAGER=1",
        )
        if sys.stdin is None or not sys.stdin.isatty():
            return None
    return _debugger(*args, **kwargs)


_debugger, sys.breakpointhook = sys.breakpointhook, _break


@contextmanager
def shared(tracer: Tracer) -> Iterator[None]:
    """Record with the tracer of another thread inside the block."""
    _local.tracer = tracer
    before = name_kernel(tracer.program.name)
    try:
        with speaking(tracer.program.today):
            yield
    finally:
        name_kernel(before)
        _local.tracer = None


class Tracer:
    """Builds one Program.

    Attributes:
        program: what has been recorded so far.
        frame: innermost loop iteration.
        code: code object of the kernel function, to tell its top level from callees.
        machine: executes each instruction at once in eager mode, else None.
        root: the frame of a core since its last meeting with the other one, else None.
        turns: which core is being recorded, where they are recorded in step.
        view_type: class of the tensors that the front end gives kernels.
    """

    def __init__(
        self, program: Program, code: Any = None, machine: Any = None, view_type: type[View] = View
    ) -> None:
        self.program, self.code, self.machine = program, code, machine
        self.view_type = view_type
        self.frame: Frame | None = None
        self.root: Frame | None = None
        self.turns: Any = None
        self.grid_index: Shape = ()
        self.loops = 0
        self.in_order = 0  # blocks around what is recorded that forbid to reorder it
        self.meetings = Meetings()
        self.views: dict[tuple, View] = {}  # one object for each region, see ``emit``
        self.attrs: dict[tuple, Attrs] = {}  # see ``shared_attrs``
        self.known: set[int] = set()  # ids of its values
        self.legal: set[tuple] = set()  # see ``OpSpec.check``
        self.recorded = program.instructions.append
        self.shared: list[Storage] = []  # shared_hbm tensors: one set for all grid instances
        self.shared_next = 0
        # addresses that the kernel's own functions gave, by place and iteration
        self.placed: dict[tuple, list[list[Shape]]] = {}
        self.random: tuple[Any, int] = (0, 0)  # seed (a number or a tile), draws since it was set
        self.sums: View | None = None  # ScalarE's running sums (reduce_cmd)
        self.accumulators: dict[str, Any] = {}  # the current language's, by engine
        self.columns: dict[Storage, Any] = {}  # of tensors that data place, by tile (columns.py)
        self.prepared: Any = None  # the first half of a collective that waits for its second
        self.phase_loops: list[Loop] = []  # of its cores between their meetings
        self.senders: dict[tuple, int] = {}  # whom each core receives from at a meeting
        self.identities: dict[tuple, View] = {}  # and its shared constants on chip
        # what is written of scale tiles, so far
        self.scales: dict[int, tuple[int, np.ndarray]] = {}
        self.fills: dict[Storage, Any] = {}  # what has been put into a tile, see ``is_zero``
        self.filled = 0

    def __enter__(self) -> Tracer:
        self._outer = active()
        self._outer_name = name_kernel(self.program.name)
        self._language = speaking(self.program.today)
        self._language.__enter__()
        _local.tracer = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._language.__exit__(None, None, None)
        name_kernel(self._outer_name)
        _local.tracer = self._outer

    def is_zero(self, view: View) -> bool:
        """Whether nothing but fills with zero has written the tile of a view."""
        instructions = self.program.instructions
        for instruction in instructions[self.filled :]:
            for written in instruction.dst:
                value = getattr(instruction.attrs, "value", None)
                plain = not instruction.src and isinstance(value, (int, float))
                before = self.fills.get(written.storage, value)
                self.fills[written.storage] = value if plain and before == value else None
        self.filled = len(instructions)
        storage = view.storage
        return self.fills.get(storage, storage.initial) == 0

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
        """View all of a storage, as kernels see it."""
        return self.view_type.whole(storage)

    def begin_instance(self) -> None:
        """Start a grid instance: it shares the shared_hbm tensors of the first instance."""
        self.shared_next = 0
        self.meetings.phase = 0
        self.root = None
        self.accumulators.clear()
        self.prepared = None
        self.sums = None  # what another instance left in ScalarE's registers is nobody's

    def shared_storage(self, shape: Shape, dtype: DType) -> Storage:
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
                f"{shape} {dtype}, expected the same in every instance; "
                "take shapes from arguments, not from nl.program_id",
            )
        return found

    def place(self) -> Source | None:
        """The line of the kernel, or of a function that it calls, which is running."""
        frame = user_frame(2)
        return None if frame is None else Source.at(frame)

    # --- instructions -----------------------------------------------------------------------------
    def emit(
        self, op: OpSpec, dst: tuple[View, ...], src: tuple[View, ...], attrs: Attrs
    ) -> Instruction:
        """Check one instruction and append it.

        Raises:
            NkiError: it reaches outside of a tensor, or compiler or hardware would refuse it.
        """
        # Masks have cut the operands by now, so what is outside still is really accessed.
        for view in dst:
            if view.oob:
                view.check_bounds()
        columns, shared = self.columns, self.views
        operands = []
        for view in src:
            if view.oob:
                view.check_bounds()
            storage = view.storage
            if storage.watcher is not None:  # may give an earlier instruction another result
                storage.watcher.before_read(view)
            if columns and storage in columns:
                columns[storage](view, op, reads=True)
            # Sharing equal operands and attributes saves 170 bytes an instruction (480 instead of
            # 650 in a matmul kernel); programs have up to 10^5 of them.
            if view.by_data is None:
                view = shared.setdefault((storage.id, view.offset, form_of(view)), view)
            operands.append(view)
        legal: set[tuple] | None = self.legal
        if id(attrs) not in self.known:
            attrs = self.shared_attrs(attrs)
            legal = legal if id(attrs) in self.known else None
        at = user_frame(3)  # who calls this is the simulator's own
        source = None if at is None else Source.at(at)
        instruction = Instruction(op, dst, tuple(operands), attrs, self.frame, source)
        op.check(instruction, legal)
        self.recorded(instruction)
        # id() serves as the key because the program keeps the instruction alive.
        if self.meetings.phase:
            self.meetings.phases[id(instruction)] = self.meetings.phase
        if self.machine is not None:
            self.machine.run(instruction)
        for view in dst:
            storage = view.storage
            # products keep their own account of what they accumulate into
            if storage.groups is not None and not op.multiplies:
                storage.groups.written(view, zeros=getattr(attrs, "value", None) == 0)
            if columns and storage in columns:
                columns[storage](view, op, reads=False)
        return instruction

    def shared_attrs(self, attrs: Attrs) -> Attrs:
        """One object for all instructions with the same few attributes.

        Files of instructions keep the most usual ones as constants, which ``known`` finds by id.
        """
        key = attrs.identity()
        if key is None:
            return attrs
        shared = self.attrs.setdefault(key, attrs)
        self.known.add(id(shared))  # which the dict keeps alive
        return shared

    # --- loops ------------------------------------------------------------------------------------
    def loop(self, kind: str, indices: range) -> Iterator[int]:
        """Run a loop body once per index, marking its instructions.

        Every execution of the statement is a Loop of its own: an inner loop has one for each
        iteration of the outer, so iterations of equal loops are never taken for each other.
        """
        made = Loop(self.loops, kind, len(indices), self.place())
        self.loops += 1
        outer = self.frame
        try:
            for position, value in enumerate(indices):
                self.frame = Frame(made, position, self._now(outer))
                yield value
        finally:  # a break in the kernel closes the generator here
            self.frame = self._now(outer)

    def _now(self, frame: Frame | None) -> Frame | None:
        """The frame, or the core's frame since cores met inside of it.

        A phase between two meetings is the outermost thing there is: loops around it end there.
        """
        if self.root is None or frame is None or frame.path()[0] is self.root:
            return frame
        return self.root

    def at_kernel_level(self) -> bool:
        """True in the kernel's own body, outside of loops and called functions."""
        frame = user_frame(2)
        loop = self.frame
        inside = loop is not None and loop.loop.kind != "grid"
        return not inside and (frame is None or self.code is None or frame.f_code is self.code)

    def eager_values(self, view: View) -> np.ndarray:
        """Current values of a view, where instructions are executed as they are recorded."""
        if self.machine is None:
            raise refuse(
                "err_dynamic_control_flow_not_supported",
                f"values of {view.label()} are asked for while tracing, where nothing is computed, "
                "expected code that asks for none; make results with nl.ndarray(shape, dtype, "
                "buffer=nl.shared_hbm), not with numpy, or set NKI_CPU_EAGER=1 to execute each "
                "instruction as it is recorded",
            )
        return self.machine.values(view)

    # --- finishing --------------------------------------------------------------------------------
    def finish(self) -> Program:
        """Put grid instances in order, drop storages that nothing uses, return the program."""
        program = self.program
        self.meetings.order(program)
        # Those that an instruction or the caller touches: results that were moved elsewhere go.
        views = [v for i in program.instructions for v in (*i.dst, *i.src)]
        used = {v.storage for v in views}
        used |= {v.by_data[0].storage for v in views if v.by_data is not None}
        kept = [s for s in program.storages if s in used or s.role != "local" or s.address]
        for storage in kept:  # what only tracing needs
            storage.producer = storage.watcher = storage.groups = None
        program.storages = kept
        return program


class Values:
    """Access to the values of a front end's tensors, known in eager mode only."""

    __slots__ = ()

    def numpy(self: Any) -> np.ndarray:
        """Current values (eager mode only)."""
        return current(f"{type(self).__name__}.numpy").eager_values(self)

    def __array__(self: Any, *_: Any, **__: Any) -> np.ndarray:
        return self.numpy()

    def __repr__(self: Any) -> str:
        told = self.label()
        if self.storage.on_chip:
            told += f", {self.shape[0]} partitions"
        if self.storage.source is not None:
            told += f", made at {self.storage.source}"
        tracer = active()
        if tracer is None or tracer.machine is None:
            told += "; print(tile) shows values with NKI_CPU_EAGER=1"
        return f"<{told}>"

    def __str__(self: Any) -> str:
        tracer = active()
        if tracer is not None and tracer.machine is not None:
            return f"{self.label()}\n{self.numpy()}"
        return repr(self)


def observe_loop(kind: str, name: str) -> Callable[..., Iterator[int]]:
    """The public iterator ``name``: ``(stop)``, ``(start, stop)`` or ``(start, stop, step)``."""

    def iterate(*args: Any, **_: Any) -> Iterator[int]:
        tracer = current(f"nl.{name}")
        for value in args:
            if not isinstance(value, (int, np.integer)):
                raise refuse(
                    "sim_loop_bound",
                    f"nl.{name} got a bound of type {type(value).__name__}, expected integers "
                    "known while tracing; compute trip counts with //",
                )
        return tracer.loop(kind, range(*(int(a) for a in args)))

    iterate.__name__ = name
    iterate.__doc__ = f"``nl.{name}(stop)`` / ``(start, stop[, step])``: {kind} loop iterator."
    return iterate
