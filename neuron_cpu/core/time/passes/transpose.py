"""Loads and stores that turn rows into columns go through TensorE.

A DMA that transposes needs a descriptor for every element. The compiler moves whole rows instead
and turns them on chip: blocks of up to 128 x 128, one product with the identity and one copy out of
PSUM each. Kernels with ``nl.load_transpose2d`` and transposing stores on devices are 7 to 9 times
faster than their descriptors would allow.
"""

from collections.abc import Iterator

from ...device.spec import CORE
from ...instructions.copies import DMA_COPY, DMA_TRANSPOSE, TENSOR_COPY, copy_attrs
from ...instructions.entry import OpSpec
from ...instructions.tensor_engine import NC_TRANSPOSE, TransposeAttrs
from ...program.program import Instruction
from ...program.view import View, contiguous
from .work import Work


def transpose(work: Work) -> list[Instruction]:
    """Replace transposing transfers between HBM and SBUF."""
    result: list[Instruction] = []
    for instruction in work.instructions:
        op = instruction.op
        if op is not DMA_COPY and (op is not DMA_TRANSPOSE or _by_engine(work, instruction)):
            result.append(instruction)
            continue
        source, target = instruction.src[0], instruction.dst[0]
        if op is DMA_TRANSPOSE and len(source.shape) == 2:
            result.extend(_turned(work, instruction, target, source))
        elif op is DMA_COPY and _columns(source, target):
            result.extend(_turned(work, instruction, target, _flip(source)))
        elif op is DMA_COPY and _columns(target, source):
            result.extend(_turned(work, instruction, _flip(target), source))
        else:
            result.append(instruction)
    return result


def _by_engine(work: Work, instruction: Instruction) -> bool:
    """Whether the DMA engine itself transposes: for `neuronxcc.nki` short types alone."""
    if not CORE.dma.transposed:
        return False
    return work.program.today or (instruction.src[0].dt.itemsize <= CORE.dma.transposed_most_bytes)


def _flip(view: View) -> View:
    return View(view.storage, view.offset, view.shape[::-1], view.strides[::-1], view.dt)


def _columns(outside: View, inside: View) -> bool:
    """Whether HBM has contiguous elements along the partitions of a tile, and only there."""
    if inside.storage.buffer != "sbuf":
        return False
    if outside.storage.on_chip or outside.by_data is not None or inside.by_data is not None:
        return False
    if len(outside.shape) != 2 or outside.shape != inside.shape or min(outside.shape) < 2:
        return False
    return outside.strides[0] == 1 and outside.strides[1] > 1


def _turned(
    work: Work, instruction: Instruction, target: View, source: View
) -> Iterator[Instruction]:
    """``target[j, i] = source[i, j]`` in blocks of 128 x 128."""
    block = CORE.partitions
    rows, columns = source.shape
    for i in range(0, rows, block):
        for j in range(0, columns, block):
            part = source.slice_box(
                (slice(i, min(i + block, rows)), slice(j, min(j + block, columns)))
            )
            to = target.slice_box(
                (slice(j, min(j + block, columns)), slice(i, min(i + block, rows)))
            )
            yield from _block(work, instruction, to, part)


def _block(work: Work, origin: Instruction, target: View, source: View) -> Iterator[Instruction]:
    """One block: to SBUF unless it is there, through TensorE, out of PSUM, to HBM if it must."""

    def step(op: OpSpec, to: View, of: View) -> View:
        kind = TransposeAttrs(raw=True) if op is NC_TRANSPOSE else copy_attrs(to.dt, of.dt)
        made.append(Instruction(op, (to,), (of,), kind, origin.frame, origin.source))
        return to

    made: list[Instruction] = []
    if not source.storage.on_chip:
        source = step(DMA_COPY, _tile(work, origin, source.shape, source, "sbuf"), source)
    turned = step(NC_TRANSPOSE, _tile(work, origin, target.shape, source, "psum"), source)
    if target.storage.on_chip:
        step(TENSOR_COPY, target, turned)
    else:
        copied = step(TENSOR_COPY, _tile(work, origin, target.shape, target, "sbuf"), turned)
        step(DMA_COPY, target, copied)
    yield from made


def _tile(work: Work, origin: Instruction, shape: tuple[int, ...], like: View, buffer: str) -> View:
    return View(work.tile(shape, like.dt, buffer, origin.frame), 0, shape, contiguous(shape))
