"""Where a kernel's data lives and which loop iteration recorded what.

A Storage is one tensor's memory; views (``view.py``) are regions of it. Source, Loop and Frame say
where in the kernel something was recorded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..device.dtypes import DType, Shape

if TYPE_CHECKING:
    from .accumulation import Groups
    from .program import Instruction
    from .view import View

ON_CHIP = frozenset({"sbuf", "psum"})
SPILL = "spill"  # role of what the time model's compiler adds where tiles exceed a memory


@dataclass(slots=True, eq=False)
class Source:
    """A line of a kernel: file, function, line number. Interned, so compare with ``is``."""

    file: str
    function: str
    line: int
    _interned: ClassVar[dict[tuple[str, int], Source]] = {}
    _met: ClassVar[dict[tuple[int, int], tuple[Any, Source]]] = {}  # by code object and place

    @classmethod
    def at(cls, frame: Any) -> Source:
        """The line that ``frame`` is running; one object for all instructions of a line."""
        code = frame.f_code
        met = cls._met.get((id(code), frame.f_lasti))
        if met is None:  # Python counts lines from a function's first one, each time
            key = code.co_filename, frame.f_lineno
            found = cls._interned.setdefault(key, cls(key[0], code.co_name, key[1]))
            met = cls._met[id(code), frame.f_lasti] = code, found
        return met[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(slots=True, eq=False)
class Loop:
    """One execution of a loop statement.

    Attributes:
        kind: ``affine``, ``sequential`` or ``grid`` (the launch grid is the outermost loop).
        n: trip count.
    """

    id: int
    kind: str
    n: int
    source: Source | None


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


@functools.cache
def _sizes(shape: Shape, paxis: int) -> Shape:
    """Elements of a tensor, its tiles, and elements of one in a partition."""
    return tuple(map(math.prod, (shape, shape[:paxis], shape[paxis + 1 :])))


class Watcher(Protocol):
    """Acts before a storage is read."""

    def before_read(self, view: View) -> None:
        """An instruction that reads ``view`` is about to be recorded."""


class Storage:
    """A tensor's memory: a row-major block of elements in HBM, SBUF or PSUM.

    Attributes:
        shape: as declared; on chip ``(blocks..., partitions, free...)``, ``paxis`` block axes.
        free_size: elements per partition of one tile.
        tiles: of the tensor: the product of its block axes.
        tile_bytes: bytes per partition of one tile; no more than a bank in PSUM.
        buffer: ``hbm`` (kernel input or scratch), ``shared_hbm``, ``sbuf`` or ``psum``.
        role: ``input``, ``output``, ``const`` (data known while tracing), ``local`` or ``spill``.
        frame: loop iteration that created it.
        birth: number of instructions recorded before it was created.
        producer: the instruction whose result this fresh tile is, while it may still be moved.
        parts: boxes of this fresh tile that one call wrote, where its mask left several.
        followers: instructions that the producer's own call recorded behind it.
        watcher: told of every instruction that is about to read the storage (while tracing).
        groups: matmul accumulation groups of a PSUM tile whose first matmul overwrites.
        initial: what a reduction over iterations needs it to begin with.
        data: contents of a constant.
        address: explicit placement, from direct allocation.
        mutable: kernel input that the kernel may write and must return.
        ground: where the kernel reads these bytes as types of several sizes, the same memory in
            elements that all of them are multiples of (``View.grounded``).
    """

    __slots__ = (
        "address",
        "birth",
        "buffer",
        "data",
        "dtype",
        "followers",
        "frame",
        "free_size",
        "ground",
        "groups",
        "id",
        "initial",
        "mutable",
        "name",
        "on_chip",
        "parts",
        "paxis",
        "producer",
        "role",
        "shape",
        "size",
        "source",
        "tile_bytes",
        "tiles",
        "watcher",
    )

    def __init__(
        self, id: int, shape: Shape, dtype: DType, buffer: str, role: str = "local"
    ) -> None:
        self.id, self.shape, self.dtype, self.buffer, self.role = id, shape, dtype, buffer, role
        self.name = ""
        self.lay_out(0)
        self.frame: Frame | None = None
        self.birth = 0
        self.source: Source | None = None
        self.producer: Instruction | None = None
        self.followers = 0
        self.parts: Sequence[tuple[slice, ...]] = ()
        self.watcher: Watcher | None = None
        self.groups: Groups | None = None
        self.initial: float | None = None
        self.data: np.ndarray | None = None
        self.address: Any = None
        self.mutable = False
        self.ground: Storage | None = None

    @property
    def memory(self) -> Storage:
        """The memory that stands for these bytes in comparisons of accesses."""
        return self.ground or self

    def lay_out(self, paxis: int) -> None:
        """Make the first ``paxis`` axes block axes.

        What follows from that, from shape and from type is kept, since every check asks for it at
        every access; no record says it.
        """
        self.paxis, self.on_chip = paxis, self.buffer in ON_CHIP
        self.size, self.tiles, self.free_size = _sizes(self.shape, paxis)
        self.tile_bytes = self.free_size * self.dtype.itemsize

    def label(self) -> str:
        """The name for messages: the given one, or kind and memory."""
        kind = self.name or f"{self.buffer} tensor {self.id}"
        return f"'{kind}' {self.shape} {self.dtype}"
