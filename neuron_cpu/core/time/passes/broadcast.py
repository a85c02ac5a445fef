"""An operator that broadcasts over partitions reads the product with ones where it lies.

From one partition to many, a row is multiplied by a column of ones; the product lies in PSUM. Where
a statement of its own asks for the wide tile (``broadcast_to``), it is copied to SBUF. Where an
operator stretches its operand by itself, nobody else needs the copy: the operator reads PSUM, at
one cycle an element instead of two.
"""

from ...instructions.copies import FillAttrs
from ...instructions.vector import TENSOR_TENSOR
from ...program.program import Instruction
from .work import Work, automatic, with_views


def broadcast(work: Work) -> list[Instruction]:
    """Drop copies of broadcast rows that only the statement's own operator reads."""
    copies = _candidates(work.instructions)
    if not copies:
        return work.instructions
    result = []
    for instruction in work.instructions:
        storage = instruction.dst[0].storage.id if instruction.dst else -1
        if storage in copies and instruction is copies[storage]:
            continue
        used = [v for v in instruction.src if v.storage.id in copies]
        if used:
            source = copies[used[0].storage.id].src[0]
            src = tuple([source if v is used[0] else v for v in instruction.src])
            instruction = with_views(instruction, instruction.dst, src)
        result.append(instruction)
    return result


def _candidates(instructions: list[Instruction]) -> dict[int, Instruction]:
    """Copies that can go, by the storage that they fill."""
    ones: set[int] = set()  # tiles of one partition that hold nothing but ones
    wide: set[int] = set()  # products with them, in PSUM
    copies: dict[int, Instruction] = {}
    for instruction in instructions:
        if not instruction.dst:
            continue
        target, attrs = instruction.dst[0], instruction.attrs
        number = target.storage.id
        # Anybody else who reads it, or the statement a part of it, needs the copy.
        for view in instruction.src:
            copy = copies.get(view.storage.id)
            if copy is not None and not _reads_all(instruction, copy, view.storage.id):
                del copies[view.storage.id]
        copies.pop(number, None)  # written again
        if isinstance(attrs, FillAttrs) and target.shape[0] == 1 and attrs.value == 1:
            ones.add(number)
        elif instruction.op.multiplies and instruction.src[0].storage.id in ones:
            if target.size == target.storage.size:
                wide.add(number)
        elif instruction.op.is_copy and instruction.src[0].storage.id in wide:
            whole = target.size == target.storage.size and automatic(target.storage)
            if whole and target.shape == instruction.src[0].shape:
                copies[number] = instruction
    return copies


def _reads_all(reader: Instruction, copy: Instruction, storage: int) -> bool:
    """Whether the statement that made the copy reads all of it, as the only operand in PSUM."""
    if reader.op is not TENSOR_TENSOR or reader.source is not copy.source:
        return False
    mine = [v for v in reader.src if v.storage.id == storage]
    others = [v for v in reader.src if v.storage.id != storage]
    return (
        len(mine) == 1
        and mine[0].shape == copy.dst[0].shape
        and mine[0].strides == copy.dst[0].strides
        and all(v.storage.buffer != "psum" for v in others)
        and reader.frame is copy.frame
    )
