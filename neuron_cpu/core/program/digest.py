"""A digest of a program's work: equal for kernels that differ in names and lines only."""

import functools
import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .attributes import Attrs
from .program import Instruction, Program
from .storage import Frame, Storage
from .view import View

OF_A_RANK = {"members", "place", "sender"}  # of a collective, which ranks take part in alike
_known = WeakKeyDictionary[Program, str]()


class Digest:
    """A hash of instructions that numbers storages and loops in the order in which they are met.

    Programs repeat few attributes, layouts and frames: the texts of these are made once.
    """

    def __init__(self) -> None:
        self.hash, self.numbers = hashlib.sha256(), dict[int, int]()
        self._known: dict[int, str] = {}
        self._layout = functools.cache(lambda *layout: ", ".join(map(repr, layout)))

    def add(self, text: str) -> None:
        self.hash.update(text.encode())

    def number(self, thing: Any) -> int:
        return self.numbers.setdefault(id(thing), len(self.numbers))

    def storage(self, storage: Storage) -> int:
        known = self.numbers.get(id(storage))
        if known is not None:
            return known
        number = self.number(storage)
        data = None if storage.data is None else hashed(np.asarray(storage.data).tobytes())
        self.add(repr((storage.shape, str(storage.dtype), storage.buffer, storage.paxis, data)))
        return number

    def view(self, view: View) -> str:
        by_data = "None"
        if view.by_data:
            parts = self.view(view.by_data[0]), *map(repr, view.by_data[1:])
            by_data = f"({', '.join(parts)})"
        layout = self._layout(tuple(view.shape), tuple(view.strides), str(view.dt))
        return f"({self.storage(view.storage)}, {view.offset}, {layout}, {by_data})"

    def instruction(self, each: Instruction) -> None:
        loops, told = self._known.get(id(each.frame)), self._known.get(id(each.attrs))
        if loops is None:
            loops = self._known[id(each.frame)] = self._loops(each.frame)
        if told is None:
            told = self._known[id(each.attrs)] = _constants(each.attrs)
        views = ", ".join([self.view(view) for view in (*each.dst, *each.src)])
        self.add(f"({each.op.name!r}, {len(each.dst)}, [{views}], {told}, {loops})")

    def _loops(self, frame: Frame | None) -> str:
        frames = [] if frame is None else frame.path()
        return repr([(self.number(one.loop), one.loop.kind, one.i) for one in frames])


def _constants(attrs: Attrs) -> str:
    names = {n for cls in type(attrs).__mro__ for n in getattr(cls, "__slots__", ())} - OF_A_RANK
    values = [getattr(attrs, name) for name in sorted(names) if not name.startswith("_")]
    return repr([v.tobytes() if isinstance(v, np.ndarray) else repr(v) for v in values])


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def of_program(program: Program) -> str:
    """Digest of arguments, instructions, results and cores."""
    found = Digest()
    found.add(repr(([found.storage(s) for s in program.inputs], program.grid, program.cores)))
    for each in program:
        found.instruction(each)
    found.add(repr(([found.storage(s) for s in program.outputs], program.output_shapes)))
    return found.hash.hexdigest()[:24]


def fingerprint(program: Program) -> str:
    """`of_program` of a program that changes no more, whose every call in a graph asks for it."""
    if program not in _known:
        _known[program] = of_program(program)
    return _known[program]
