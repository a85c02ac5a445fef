"""A traced kernel: storages, instructions and the loops that they stood in.

A Program is a flat list. Loops are unrolled while tracing; every instruction keeps the frame of the
loop iteration it came from, so that consumers can check iterations against each other or run all of
them at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device.dtypes import DType

if TYPE_CHECKING:
    from ..instructions.entry import OpSpec
    from ..language.tensor import Tensor

ON_CHIP = frozenset({"sbuf", "psum"})


class Source:
    """A line of a kernel: file, line number, function. Interned, so compare with ``is``."""

    __slots__ = ("file", "function", "line")
    _interned: dict[tuple[str, int], Source] = {}

    def __init__(self, file: str, line: int, function: str) -> None:
        self.file, self.line, self.function = file, line, function

    @classmethod
    def at(cls, frame: Any) -> Source:
        key = (frame.f_code.co_filename, frame.f_lineno)
        found = cls._interned.get(key)
        if found is None:
            found = cls._interned[key] = cls(*key, frame.f_code.co_name)
        return found

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Loop:
    """One execution of a loop statement.

    Attributes:
        kind: ``affine``, ``sequential`` or ``grid`` (the launch grid is the outermost loop).
        n: trip count.
    """

    __slots__ = ("id", "kind", "n", "source")

    def __init__(self, id: int, kind: str, n: int, source: Source | None) -> None:
        self.id, self.kind, self.n, self.source = id, kind, n, source


class Frame:
    """Iteration ``i`` of ``loop`` inside ``parent``; instructions of one iteration share it."""

    __slots__ = ("depth", "i", "loop", "parent")

    def __init__(self, loop: Loop, i: int, parent: Frame | None) -> None:
        self.loop, self.i, self.parent = loop, i, parent
        self.depth: int = 1 if parent is None else parent.depth + 1

    def path(self) -> list[Frame]:
        """Frames from the outermost loop to this one."""
        frames: list[Frame] = []
        at: Frame | None = self
        while at is not None:
            frames.append(at)
            at = at.parent
        return frames[::-1]


class Storage:
    """A tensor's memory: a row-major block of elements in HBM, SBUF or PSUM.

    Attributes:
        shape: as declared; on chip ``(blocks..., partitions, free...)``, ``paxis`` block axes.
        buffer: ``hbm`` (kernel input or scratch), ``shared_hbm``, ``sbuf`` or ``psum``.
        role: ``input``, ``output``, ``const`` (data known while tracing) or ``local``.
        frame: loop iteration that created it.
        birth: number of instructions recorded before it was created.
        zero_init: PSUM tile from nl.zeros: its first matmul overwrites instead of accumulating.
        needs_zero: some of it is read before any matmul wrote it, so the zero fill is real.
        producer: the instruction whose result this fresh tile is, while it may still be redirected.
        redirect: where an assignment moved that result to.
        data: contents of a constant.
        address: explicit placement, from direct allocation.
        placed: its buffer is one of ``ncc``, whether or not the addresses are used; such a PSUM
            tile cannot have an initial value, so its first matmul overwrites too.
        mutable: kernel input that the kernel may write and must return.
    """

    __slots__ = (
        "address", "birth", "buffer", "data", "dtype", "frame", "id", "mutable", "name",
        "needs_zero", "paxis", "placed", "producer", "redirect", "role", "shape", "size", "source",
        "zero_init",
    )  # fmt: skip

    def __init__(
        self, id: int, shape: tuple[int, ...], dtype: DType, buffer: str, role: str = "local"
    ) -> None:
        self.id, self.shape, self.dtype, self.buffer, self.role = id, shape, dtype, buffer, role
        self.name = ""
        size = 1
        for s in shape:
            size *= s
        self.size = size
        self.paxis = 0
        self.frame: Frame | None = None
        self.birth = 0
        self.source: Source | None = None
        self.zero_init = False
        self.needs_zero = False
        self.producer: Instruction | None = None
        self.redirect: Tensor | None = None
        self.data: np.ndarray | None = None
        self.address: Any = None
        self.placed = False
        self.mutable = False

    @property
    def on_chip(self) -> bool:
        return self.buffer in ON_CHIP

    @property
    def free_size(self) -> int:
        """Elements per partition of one tile."""
        size = 1
        for s in self.shape[self.paxis + 1 :]:
            size *= s
        return size

    @property
    def partition_bytes(self) -> int:
        """Bytes per partition of the whole tensor, blocks included."""
        blocks = 1
        for s in self.shape[: self.paxis]:
            blocks *= s
        return blocks * self.free_size * self.dtype.itemsize

    def label(self) -> str:
        """Name for messages: the given one, or what and where it is."""
        kind = self.name or f"{self.buffer} tensor {self.id}"
        return f"'{kind}' {self.shape} {self.dtype}"


class Instruction:
    """One device instruction.

    Attributes:
        op: its entry in the instruction table.
        dst, src: operand views, in the order of the table entry.
        attrs: constants of the instruction (sorted tuple of pairs would cost more; a shared dict).
        frame: loop iteration, None at top level.
        source: line of the kernel.
    """

    __slots__ = ("attrs", "dst", "frame", "op", "source", "src")

    def __init__(
        self,
        op: OpSpec,
        dst: tuple[Tensor, ...],
        src: tuple[Tensor, ...],
        attrs: dict[str, Any],
        frame: Frame | None,
        source: Source | None,
    ) -> None:
        self.op, self.dst, self.src, self.attrs = op, dst, src, attrs
        self.frame, self.source = frame, source

    def __repr__(self) -> str:
        outs = ", ".join(map(repr, self.dst))
        return f"{outs} = {self.op.name}({', '.join(map(repr, self.src))}, {self.attrs})"

    @property
    def macs(self) -> int:
        """Multiply-accumulates: K x M x N of a matmul, 0 for transposes and everything else."""
        if self.op.name != "nc_matmul" or self.attrs.get("is_transpose"):
            return 0
        stationary, moving = self.src[0], self.src[1]
        return stationary.shape[0] * stationary.free_size * moving.free_size


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
    """

    def __init__(self, name: str, grid: tuple[int, ...], function: Callable | None) -> None:
        self.name, self.grid, self.function = name, grid, function
        self.instructions: list[Instruction] = []
        self.storages: list[Storage] = []
        self.inputs: list[Storage] = []
        self.outputs: list[Storage] = []
        self.output_shapes: list[tuple[int, ...]] = []
        self.return_tuple = False
        self.returns = True
        self.direct_allocation = False
        self.warnings: list[str] = []

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    @functools.cached_property
    def macs(self) -> int:  # every call of the kernel asks for it; first asked once traced
        return sum(i.macs for i in self.instructions)

    def listing(self, limit: int | None = None) -> str:
        """One line per instruction: number, place, text."""
        lines = [f"program {self.name} grid={self.grid} {len(self)} instructions"]
        for k, i in enumerate(self.instructions[:limit]):
            place = f"{i.source.line}" if i.source else "?"
            lines.append(f"{k:6d} :{place:5s} {i!r}")
        return "\n".join(lines)
