"""A traced kernel: storages, instructions and their loops.

A Program is a flat list. Loops are unrolled while tracing; every instruction keeps the frame of the
loop iteration it came from, so that consumers can check iterations against each other or run all of
them at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..device.dtypes import Shape
from ..device.spec import in_force
from .attributes import Attrs
from .storage import Frame, Source, Storage
from .view import View

if TYPE_CHECKING:
    from ..instructions.entry import OpSpec


@dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One device instruction.

    Attributes:
        op: its entry in the instruction table.
        dst, src: operand views, in the order of the table entry.
        attrs: constants of the instruction, of the class that its entry names.
        frame: loop iteration, None at top level.
        source: line of the kernel.
    """

    op: OpSpec
    dst: tuple[View, ...]
    src: tuple[View, ...]
    attrs: Attrs
    frame: Frame | None
    source: Source | None

    def __repr__(self) -> str:
        outs, sources = (", ".join(v.brief() for v in views) for views in (self.dst, self.src))
        return f"{outs} = {self.op.name}({sources}, {self.attrs!r})"

    def accesses(self) -> Iterator[tuple[bool, View]]:
        """(whether it is written, view) of every operand, results first and index tiles last."""
        for view in self.dst:
            yield True, view
        for view in self.src:
            yield False, view
            if view.by_data is not None:
                yield False, view.by_data[0]
        for view in self.dst:
            if view.by_data is not None:
                yield False, view.by_data[0]

    @property
    def core(self) -> int | None:
        """The core, or the instance of a launch grid, that it belongs to; None for all."""
        return None if self.frame is None else self.frame.path()[0].i

    @property
    def moves_only(self) -> bool:
        """Whether the instruction only moves data through TensorE, as a transpose does."""
        return self.op.moves is not None and self.op.moves(self)

    @property
    def tensor_macs(self) -> int:
        """Multiply-accumulates on TensorE, including those that only move data."""
        return 0 if self.op.macs is None else self.op.macs(self)

    @property
    def macs(self) -> int:
        """Multiply-accumulates: K x M x N of a matmul, 0 for transposes and everything else."""
        return 0 if self.moves_only else self.tensor_macs


class Program:
    """A traced and checked kernel specialisation.

    Attributes:
        name: kernel function's name.
        instructions: in program order.
        inputs, outputs: HBM storages, in argument and return order.
        output_shapes: shapes that the kernel returns them in; a reshape keeps the storage.
        storages: all storages, in order of creation.
        function: the Python function, for the checks on its source.
        macs: multiply-accumulates of all matmuls that are not transposes.
        returns: False where the outputs are parameters that the kernel stores into.
        core: the generation that it was traced for.
        cores: physical cores that run it together, each its own instances of the grid.
        mixed_placement: tensors with addresses may stand beside others (the current language).
        copies: no instance of the grid asked which one it is, so all of them do the same.
        written_by_both: tensors in HBM of which two cores write elements with nothing between.
        for_values: its control flow follows the data that it was traced with, and no other.
        aliases: storages that read a kernel input as another type, and that input.
        names: instructions that the kernel has named, by the index of their instance of the grid.
        result_form: how results are nested, None for a tensor.
        edges: pairs of instructions that the kernel orders beyond what data demand.
        today: a kernel of `nki` (SDK 2.29 and later), whose compiler keeps the writer's order.
        open_values: values of which sources leave open what becomes of them are told (the current
            language's, run/doubts.py).
        warnings: of tracing, where whoever traced it keeps them (oracle/recorder.py).
        unwritten_at: lines whose operands hold elements that nobody wrote (check/undefined.py).
        plans: what replays it, by the object that stands for the thread: a plan ends with either.
    """

    def __init__(self, name: str, grid: Shape, function: Callable | None) -> None:
        self.name, self.grid, self.function = name, grid, function
        self.instructions: list[Instruction] = []
        self.storages: list[Storage] = []
        self.inputs: list[Storage] = []
        self.outputs: list[Storage] = []
        self.output_shapes: list[Shape] = []
        self.returns = True
        self.direct_allocation = False
        self.core = in_force()
        self.cores = 1
        self.copies = False
        self.written_by_both: set[Storage] = set()
        self.for_values = False
        self.today = False
        self.open_values = False
        self.aliases: list[tuple[Storage, Storage]] = []
        self.mixed_placement = False
        self.names: dict[str, dict[Shape, Instruction]] = {}
        self.result_form: Any = None
        self.edges: list[tuple[Instruction, Instruction]] = []
        self.in_order = False  # the kernel forbids the compiler to reorder
        # the kernel's loops are unrolled before the compiler sees them
        self.skips_middle_end = getattr(function, "skips_middle_end", False)
        self.warnings: list[str] = []
        self.unwritten_at: set[Source | None] = set()
        self.plans: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __repr__(self) -> str:
        given, made = (
            ", ".join(f"{one.name} {one.shape} {one.dtype}" for one in some)
            for some in (self.inputs, self.outputs)
        )
        return (
            f"<{self.name} for {self.core.name}: {len(self.instructions)} instructions from "
            f"{given or 'nothing'} to {made or 'nothing'}>"
        )

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    @functools.cached_property
    def macs(self) -> int:  # every call of the kernel asks for it; first asked once traced
        return sum(i.macs for i in self.instructions)

    @property
    def place(self) -> str:
        """``NAME (FILE:LINE)`` of the kernel's definition, for messages about all of it."""
        code = getattr(self.function, "__code__", None)
        if code is None:
            return self.name
        return f"{self.name} ({code.co_filename}:{code.co_firstlineno})"
