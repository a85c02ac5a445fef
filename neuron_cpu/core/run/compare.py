"""Two runs of one kernel, instruction by instruction: where do their results part?

``shadow`` compares the kernel's own types with a run that keeps every float tile in fp32 and rounds
nothing: the first line that loses more than a tolerance. ``noise`` compares it with a run that
changes the last bit of every result at random (Parker's Monte Carlo arithmetic, 1997): the first
line whose values cancel, so that rounding alone explains a difference. ``unmerged`` compares merged
execution with instruction-by-instruction execution, to tell an error of the simulator from one of
the kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..device.dtypes import Tensors
from ..program.program import Instruction, Program
from ..program.view import View
from .execute import Plan
from .memory import Arena, widen
from .merge import Ref

AGAINST = ("shadow", "unmerged", "noise")


@dataclass
class Difference:
    """Results of one instruction in both runs.

    Attributes:
        number: its number in program order.
        instruction: the instruction, with its source line.
        error: largest difference over the largest magnitude of the reference run.
        place: index of the worst element in the result.
        got, expected: that element in the kernel's run and in the reference run.
    """

    number: int
    instruction: Instruction
    error: float
    place: tuple[int, ...]
    got: float
    expected: float

    def to_json(self) -> dict[str, Any]:
        i = self.instruction
        return {
            "line": str(i.source),
            "instruction": self.number,
            "operator": i.op.name,
            "result": i.dst[0].label(),
            "error": self.error,
            "place": list(self.place),
            "got": self.got,
            "expected": self.expected,
        }

    def __str__(self) -> str:
        i = self.instruction
        return (
            f"{i.source or 'unknown line'}: instruction {self.number} {i.op.name} into "
            f"{i.dst[0].label()}: element {self.place} is {self.got:.7g}, reference "
            f"{self.expected:.7g} (error {self.error:.3g} of the largest magnitude)"
        )


def differences(program: Program, inputs: Tensors, against: str = "shadow") -> Iterator[Difference]:
    """The difference at every instruction that can be compared, in program order.

    Args:
        inputs: tensors in the order of ``program.inputs``; they are not changed.
        against: one of ``AGAINST``.
    """
    if against not in AGAINST:
        raise ValueError(f"compare against {against!r}, expected one of {', '.join(AGAINST)}")
    copies = [[t.detach().clone().contiguous() for t in inputs] for _ in range(2)]
    numbers = {id(i): k for k, i in enumerate(program.instructions)}
    pairs = _against_unmerged if against == "unmerged" else _in_lockstep
    for instruction, got, expected in pairs(program, copies[0], copies[1], against):
        yield _difference(numbers[id(instruction)], instruction, got, expected)


def results(
    program: Program, inputs: Tensors, shadow: bool = False
) -> Iterator[tuple[int, Instruction, View, torch.Tensor]]:
    """Each result of floating point as it is written: number, instruction, view, wide values."""
    plan = Plan(program, False, shadow)
    bound = plan.start([t.detach().clone().contiguous() for t in inputs])
    for number, op in enumerate(plan.ops):
        plan.step(number)
        for ref, view in zip(op.dst, op.instruction.dst):
            if ref.by_data is None and plan.arena.kept(ref).is_float:
                yield number, op.instruction, view, _values(plan.arena, ref)
    plan.finish(bound)


def first_nonfinite(program: Program, inputs: Tensors) -> str:
    """The first instruction with an infinite or NaN element in its result; empty without one."""
    for number, i, _, values in results(program, inputs):
        if not bool(values.isfinite().all()):
            place = i.source or "unknown line"
            return f"{place}: instruction {number} {i.op.name} into {i.dst[0].label()}"
    return ""


Pair = tuple[Instruction, torch.Tensor, torch.Tensor]


def _in_lockstep(program: Program, mine: Tensors, theirs: Tensors, against: str) -> Iterator[Pair]:
    """Both runs in lockstep; every instruction is one operation of each."""
    # Unmerged, so that the operations of both runs are the instructions of the program, in order.
    own, reference = Plan(program, False), Plan(program, False, shadow=against == "shadow")
    bound = own.start(mine), reference.start(theirs)
    draws = torch.Generator().manual_seed(0)
    for k, (a, b) in enumerate(zip(own.ops, reference.ops)):
        own.step(k)
        reference.step(k)
        for one, two in zip(a.dst, b.dst):
            if one.by_data is None:
                if against == "noise":
                    _shake(reference.arena.view(two), draws)
                yield a.instruction, _values(own.arena, one), _values(reference.arena, two)
    own.finish(bound[0])
    reference.finish(bound[1])


def _shake(values: torch.Tensor, draws: torch.Generator) -> None:
    """Change the last bit of every other value at random; whole numbers may be indices or masks."""
    if values.is_floating_point():
        chosen = torch.rand(values.shape, generator=draws)
        bits = ((chosen < 0.25).float() - (chosen > 0.75).float()) * torch.finfo(values.dtype).eps
        values += torch.where(values == values.round(), 0.0, values * bits)


def _against_unmerged(
    program: Program, mine: Tensors, theirs: Tensors, _against: str
) -> Iterator[Pair]:
    """The merged run, and of each of its operations the first iteration run alone.

    A matmul that sums over merged iterations has no counterpart; readers of its sum are compared.
    Outputs come last, whole, with the instruction that writes them last.
    """
    # The unmerged run goes first and leaves copies of the results that the merged one can be held
    # against: memory is shared, so nothing of it is left in place at the end.
    own, alone = Plan(program, True), Plan(program, False)
    wanted = {id(op.instruction) for op in own.ops}
    bound = alone.start(theirs)
    kept: dict[int, Tensors] = {}
    for k, op in enumerate(alone.ops):
        alone.step(k)
        if id(op.instruction) in wanted:
            kept[id(op.instruction)] = [_values(alone.arena, r).clone() for r in op.dst]
    expected = alone.finish(bound)
    bound = own.start(mine)
    for k, op in enumerate(own.ops):
        own.step(k)
        if not op.contract and all(r.by_data is None for r in op.dst):
            for ref, value in zip(op.dst, kept[id(op.instruction)]):
                first = ref.over(ref.shape[op.batch :], ref.strides[op.batch :])  # iteration
                yield op.instruction, _values(own.arena, first), value
    got = own.finish(bound)
    for storage, one, two in zip(program.outputs, got, expected):
        last = [i for i in program.instructions if any(v.storage is storage for v in i.dst)][-1]
        yield last, one, two


def _values(arena: Arena, ref: Ref) -> torch.Tensor:
    return widen(arena.view(ref), arena.kept(ref), False)


def _difference(
    number: int, instruction: Instruction, got: torch.Tensor, expected: torch.Tensor
) -> Difference:
    """Compare in fp64; equal NaN and infinities are no difference."""
    # An error is relative to the result's largest magnitude: small elements of a sum of large ones
    # are wrong by the roundings of those.
    a, b = got.to(torch.float64), expected.to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).reshape(-1)
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    worst = int(apart.argmax())
    error = float(apart[worst])
    if error:
        error = error / scale if scale else float("inf")
    place = []
    for size in reversed(b.shape):
        worst, at = divmod(worst, size)
        place.append(at)
    where = tuple(reversed(place))
    return Difference(number, instruction, error, where, float(a[where]), float(b[where]))


@dataclass
class Comparison:
    """What two runs of a kernel show.

    Attributes:
        name, against, tolerance: of the kernel, the other run, and what was accepted.
        count: results that agree.
        parts: the first one that does not; None where all do.
        worst: of those that agree, the one that differs most.
    """

    name: str
    against: str
    tolerance: float
    count: int = 0
    parts: Difference | None = None
    worst: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        apart = {"parts": self.parts, "worst": self.worst}
        return {
            **{name: getattr(self, name) for name in ("name", "against", "tolerance", "count")},
            **{name: one and one.to_json() for name, one in apart.items()},
        }

    def __str__(self) -> str:
        within, run = f"{self.tolerance:g}", f"{self.against} run"
        if self.parts is not None:
            return f"{self.name} parts from its {run} by more than {within} at\n{self.parts}"
        told = f"{self.name}: {self.count} results agree with the {run} within {within}"
        if self.worst is not None and self.worst.error:
            told += f"\nlargest difference: {self.worst}"
        return told


def compare(
    program: Program, inputs: Tensors, tolerance: float, against: str = "shadow"
) -> Comparison:
    """Both runs on ``inputs``, up to the first result that parts."""
    found = Comparison(program.name, against, tolerance)
    for one in differences(program, inputs, against):
        if one.error > tolerance:
            found.parts = one
            return found
        found.count += 1
        if found.worst is None or one.error > found.worst.error:
            found.worst = one
    return found
