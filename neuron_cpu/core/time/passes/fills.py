"""Zeros in PSUM that products replace are never written.

The first product of a group overwrites what PSUM holds. So a fill with zeros that nobody reads
before products have covered it is no instruction of its own: it is the flag of the first product.
"""

from dataclasses import replace

from ...instructions.copies import MEMSET, FillAttrs
from ...program.program import Instruction
from ...program.regions import Box, box_of, overlap
from ...program.view import View
from .work import Work, automatic


class _Fill:
    """A fill with zeros, and the products that were the first in a part of it."""

    __slots__ = ("at", "first", "left")

    def __init__(self, at: int, view: View) -> None:
        self.at, self.left = at, view.size
        self.first: dict[Box, int] = {}

    def cover(self, at: int, view: View) -> bool:
        """Note that a product writes a part; False where it shares elements with another part."""
        box = box_of(view)
        if box in self.first:
            return True
        if any(overlap(box, other) for other in self.first):
            return False
        self.first[box] = at
        self.left -= view.size
        return True


def fills(work: Work) -> list[Instruction]:
    """Leave out fills of PSUM with zeros that products cover before anybody reads."""
    waiting: dict[int, _Fill] = {}
    dropped: set[int] = set()
    starts: set[int] = set()

    def settle(number: int) -> None:
        found = waiting.pop(number, None)
        if found is not None and not found.left:
            dropped.add(found.at)
            starts.update(found.first.values())

    for at, instruction in enumerate(work.instructions):
        for view in instruction.src:
            settle(view.storage.memory.id)
        for view in instruction.dst:
            number = view.storage.memory.id
            found = waiting.get(number)
            if found is not None and instruction.op.multiplies and view.by_data is None:
                if found.cover(at, view):
                    continue
                del waiting[number]
            settle(number)
            if _zeros(instruction, view):
                waiting[number] = _Fill(at, view)
    for number in list(waiting):
        settle(number)
    if not dropped:
        return work.instructions
    return [
        _started(instruction) if at in starts else instruction
        for at, instruction in enumerate(work.instructions)
        if at not in dropped
    ]


def _zeros(instruction: Instruction, view: View) -> bool:
    """Whether an instruction fills a region of PSUM with zeros, all of it."""
    if instruction.op is not MEMSET or view.storage.buffer != "psum" or not automatic(view.storage):
        return False
    return instruction.attrs.mask is None and FillAttrs.of(instruction).value == 0


def _started(instruction: Instruction) -> Instruction:
    """The product as the first one of its group."""
    attrs = replace(instruction.attrs, start=True, accumulate=False)
    return Instruction(
        instruction.op,
        instruction.dst,
        instruction.src,
        attrs,
        instruction.frame,
        instruction.source,
    )
