"""Finds storages of a kernel that only carry tensors across its boundary, and round them there."""

from collections import defaultdict
from collections.abc import Iterable

from ..program.program import Instruction, Program
from ..program.storage import Storage

_MOVING = ("copy", "transpose", "permute")


def carriers(program: Program, given: Iterable[Storage]) -> set[Storage]:
    """The storages of two bytes an element that ``Plan(wide=...)`` keeps in fp32, so that nothing
    is rounded at the kernel's boundary, and everything where it was inside of it.

    These are results, the inputs of which the caller has fp32 values (``given``), and tiles between
    these and the kernel's arithmetic. A tile carries an input where only moves from carriers write
    it. It carries a result where only moves into carriers read it. Operands of TensorE's products
    stay as they are, and so does memory that the kernel changes for its caller.
    """
    writers: dict[Storage, list[Instruction]] = defaultdict(list)
    readers: dict[Storage, list[Instruction]] = defaultdict(list)
    barred: set[Storage] = set()
    for i in program:
        for written, view in i.accesses():
            (writers if written else readers)[view.storage].append(i)
            if view.dt is not view.storage.dtype or i.attrs.bits:
                barred.add(view.storage)
    narrow = {
        storage
        for storage in program.storages
        if storage.dtype.is_float and storage.dtype.itemsize == 2 and storage.ground is None
    } - barred
    tiles = {storage for storage in narrow if storage.role == "local"}
    inputs = {storage for storage in given if storage in narrow and not storage.mutable}
    outputs = {storage for storage in program.outputs if storage in narrow} - set(program.inputs)

    def carries_input(tile: Storage, carried: set[Storage]) -> bool:
        sources = [_moved(i) and i.src[0].storage in carried for i in writers[tile]]
        multiplied = any(i.op.multiplies for i in readers[tile])
        return bool(sources) and all(sources) and not multiplied

    def carries_result(tile: Storage, carried: set[Storage]) -> bool:
        targets = [_moved(i) and i.dst[0].storage in carried for i in readers[tile]]
        return bool(targets) and all(targets)

    found: set[Storage] = set()
    for ends, carries in ((inputs, carries_input), (outputs, carries_result)):
        carried, lost = tiles | ends, tiles
        while lost:
            lost = {tile for tile in carried - ends if not carries(tile, carried)}
            carried -= lost
        found |= carried
    return found


def _moved(i: Instruction) -> bool:
    return i.op.flow in _MOVING and len(i.src) == 1
