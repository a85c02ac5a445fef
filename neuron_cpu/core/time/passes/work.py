"""A program in transformation: what every pass needs.

Passes take the instructions of a Work and return others; they never change an Instruction in place,
since the kernel's own Program is executed and reported as it is.
"""

from ...device.dtypes import DType, Shape
from ...program.program import Instruction, Program
from ...program.storage import Frame, Storage
from ...program.view import View


class Work:
    """A program in transformation: its instructions and the storages made on the way."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions = program.instructions
        self.storages = list(program.storages)
        self.next_id = 1 + max((s.id for s in program.storages), default=-1)

    def block(self, storage: Storage) -> Storage:
        """A new storage like one block of another one."""
        shape = storage.shape[storage.paxis :]
        made = Storage(self.next_id, shape, storage.dtype, storage.buffer, storage.role)
        made.name, made.source, made.frame = storage.name, storage.source, storage.frame
        self.storages.append(made)
        self.next_id += 1
        return made

    def tile(self, shape: Shape, dtype: DType, buffer: str, frame: Frame | None) -> Storage:
        """A new tile of the compiler's own."""
        made = Storage(self.next_id, shape, dtype, buffer)
        made.frame = frame
        self.storages.append(made)
        self.next_id += 1
        return made

    def finish(self) -> Program:
        program = self.program
        if self.instructions is program.instructions:
            return program
        made = Program(program.name, program.grid, program.function)
        made.instructions, made.storages = self.instructions, self.storages
        made.inputs, made.outputs = program.inputs, program.outputs
        made.output_shapes = program.output_shapes
        made.core, made.edges, made.today = program.core, program.edges, program.today
        made.direct_allocation = program.direct_allocation
        return made


def with_views(
    instruction: Instruction, dst: tuple[View, ...], src: tuple[View, ...]
) -> Instruction:
    return Instruction(
        instruction.op, dst, src, instruction.attrs, instruction.frame, instruction.source
    )


def automatic(storage: Storage) -> bool:
    """Whether the compiler chose, and may change, the place of an on-chip storage."""
    return storage.on_chip and storage.address is None and storage.ground is None
