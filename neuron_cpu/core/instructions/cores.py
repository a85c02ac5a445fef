"""Splits a program of two cores into one program for each core."""

from ..program.attributes import RAW
from ..program.program import Instruction, Program
from ..program.storage import Frame
from .dma import DMA_COPY, EXCHANGE
from .ranks import COLLECTIVE, CollectiveAttrs


def by_core(program: Program) -> list[Program]:
    """The program itself where one core runs it, or the program of each core."""
    if program.cores == 1:
        return [program]
    return [_of_core(program, core) for core in range(program.cores)]


def _of_core(program: Program, core: int) -> Program:
    made = Program(program.name, program.grid, program.function)
    made.storages, made.inputs, made.outputs = program.storages, program.inputs, program.outputs
    made.output_shapes, made.core, made.today = program.output_shapes, program.core, program.today
    made.direct_allocation = program.direct_allocation
    renamed: dict[int, Instruction] = {}
    for instruction in program.instructions:
        part = _part(instruction, core)
        if part is not None:
            made.instructions.append(part)
            renamed[id(instruction)] = part
    made.edges = [
        (renamed[id(a)], renamed[id(b)])
        for a, b in program.edges
        if id(a) in renamed and id(b) in renamed
    ]
    return made


def _part(instruction: Instruction, core: int) -> Instruction | None:
    """The part of an instruction that ``core`` does, outside of the loop over the cores."""
    if instruction.op is EXCHANGE:
        # the other core comes to the meeting as late as this one, whose tile is of the same shape
        views = (instruction.dst[core],), (instruction.src[core],)
        return Instruction(DMA_COPY, *views, RAW, None, instruction.source)
    if instruction.op is COLLECTIVE:  # of both cores, or of the one that it names
        whose = CollectiveAttrs.of(instruction).core
        return instruction if whose in (None, core) else None
    frame = instruction.frame
    root: Frame | None = frame
    while root is not None and root.parent is not None:
        root = root.parent
    if root is None or root.loop.kind != "grid" or root.i != core:
        return None
    kept = None if frame is root else frame
    made = instruction.op, instruction.dst, instruction.src, instruction.attrs
    return Instruction(*made, kept, instruction.source)
