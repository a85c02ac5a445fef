"""Points where instances of a launch grid wait for each other (``nl.all_reduce``)."""

from ..device.errors import refuse
from .program import Instruction, Program
from .view import View


class Meetings:
    """Phases between the points where instances meet.

    Instances are traced one after the other. Instructions of an instance after its k-th meeting are
    in phase k; at the end all instructions are put in the order of phases, so that every instance
    has brought its part before any goes on. Between meetings instances are independent.

    Attributes:
        phase: meetings that the instance being traced has reached.
        last: the kernel's line of the last of them.
        phases: phase of each instruction by id, where it is not 0.
        open: parts brought so far, by meeting and group of instances.
    """

    def __init__(self) -> None:
        self.phase = 0
        self.last: str | None = None
        self.phases: dict[int, float] = {}
        self.open: dict[tuple, list[tuple[View, View]]] = {}

    def join(self, added: Instruction, other: Instruction) -> None:
        """Put an instruction that was not recorded in its turn into the phase of another."""
        if id(other) in self.phases:
            self.phases[id(added)] = self.phases[id(other)]

    def order(self, program: Program) -> None:
        """Sort the instructions by phase.

        Raises:
            NkiError: some instances of a group did not reach a meeting that others wait at.
        """
        if self.open:
            raise refuse(
                "sim_all_reduce_incomplete",
                f"{next(iter(self.open))[1]} in {program.name} is reached by some grid instances "
                "only, expected all that take part in it; call it outside of conditions",
                program.name,
            )
        if self.phases:  # a stable sort: inside a phase the order of recording stays
            program.instructions.sort(key=lambda i: self.phases.get(id(i), 0))
