"""A digest of what a program does: equal for kernels that differ in names and lines alone."""

import hashlib
from typing import Any

import numpy as np

from .program import Instruction, Program
from .storage import Storage
from .view import View


class Digest:
    """A hash of instructions that numbers storages and loops in the order in which they are met."""

    def __init__(self) -> None:
        self.hash, self.numbers = hashlib.sha256(), dict[int, int]()

    def add(self, *values: Any) -> None:
        self.hash.update(repr(values).encode())

    def number(self, thing: Any) -> int:
        return self.numbers.setdefault(id(thing), len(self.numbers))

    def storage(self, storage: Storage) -> int:
        known = id(storage) in self.numbers
        number = self.number(storage)
        if not known:
            data = None if storage.data is None else hashed(np.asarray(storage.data).tobytes())
            self.add(storage.shape, str(storage.dtype), storage.buffer, storage.paxis, data)
        return number

    def view(self, view: View) -> tuple[Any, ...]:
        by_data = view.by_data and (self.view(view.by_data[0]), *view.by_data[1:])
        return (
            self.storage(view.storage), view.offset, tuple(view.shape), tuple(view.strides),
            str(view.dt), by_data,
        )  # fmt: skip

    def instruction(self, each: Instruction) -> None:
        frames = [] if each.frame is None else each.frame.path()
        loops = [(self.number(frame.loop), frame.loop.kind, frame.i) for frame in frames]
        names = sorted(
            {n for cls in type(each.attrs).__mro__ for n in getattr(cls, "__slots__", ())}
        )
        values = [getattr(each.attrs, name) for name in names if not name.startswith("_")]
        told = [v.tobytes() if isinstance(v, np.ndarray) else repr(v) for v in values]
        views = [self.view(view) for view in (*each.dst, *each.src)]
        self.add(each.op.name, len(each.dst), views, told, loops)


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def of_program(program: Program) -> str:
    """Digest of arguments, instructions, results and cores."""
    found = Digest()
    found.add([found.storage(s) for s in program.inputs], program.grid, program.cores)
    for each in program:
        found.instruction(each)
    found.add([found.storage(s) for s in program.outputs], program.output_shapes)
    return found.hash.hexdigest()[:24]
