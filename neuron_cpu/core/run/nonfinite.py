"""Which instruction of a kernel first made a NaN or an infinity that its results still hold."""

from collections.abc import Sequence

import torch

from ..program.program import Instruction, Program
from .execute import Plan
from .memory import gather_index, widen
from .merge import Ref

_NOBODY = -1  # the origin of what is finite, and of infinities that are there on purpose


def origin(program: Program, inputs: Sequence[torch.Tensor]) -> Instruction | None:
    """The instruction that made the first element of the results that is not finite.

    A fill with infinity is on purpose: masks are made so. None where the results are finite, or
    what is not came in with `inputs` (contiguous, in the order of ``program.inputs``; copies of
    them are run).
    """
    plan = Plan(program, False)  # unmerged: every operation is one instruction
    results = plan.start([tensor.clone() for tensor in inputs])
    traces = _Traces(plan)
    with torch.inference_mode():
        for number in range(len(plan.ops)):
            traces.step(number)
    found = traces.first([plan.external.get(storage.id) for storage in program.outputs])
    plan.finish(results)
    return None if found == _NOBODY else plan.ops[found].instruction


class _Traces:
    """For each element of a memory, the number of the operation that broke it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._origins: dict[int, torch.Tensor] = {}  # by id of the memory, one element each

    def step(self, number: int) -> None:
        """Run one operation and record the origin of its results."""
        op, attrs = self._plan.ops[number], self._plan.ops[number].attrs
        # A product adds to what its region of PSUM holds, others write over theirs.
        read = [*op.src, *op.dst] if op.instruction.op.multiplies or attrs.accumulate else op.src
        inherited = next((n for n in map(self._origin, read) if n != _NOBODY), _NOBODY)
        kinds = {kind for ref in op.src for kind in _kinds(self._values(ref))}
        self._plan.step(number)
        for ref in op.dst:
            values = self._values(ref)
            made = _kinds(values)
            # handed on as it was given, or a fill with infinity, as masks do
            meant = made <= kinds or (not op.src and "nan" not in made)
            if inherited == _NOBODY and made and not meant:
                inherited = number
            if made or id(ref.memory) in self._origins:
                self._note(ref, torch.where(values.isfinite(), _NOBODY, inherited))

    def first(self, memories: Sequence) -> int:
        """The origin of the first broken element of the first memory that has one."""
        for memory in memories:
            origins = self._origins.get(id(memory))
            if origins is not None and len(found := origins[origins != _NOBODY]):
                return int(found[0])
        return _NOBODY

    def _values(self, ref: Ref) -> torch.Tensor:
        """The values of an operand, as fp32."""
        arena = self._plan.arena
        if ref.by_data is not None or min(ref.strides, default=0) < 0:
            raw = arena.of(ref.memory)[gather_index(ref, arena)]
        else:
            raw = arena.view(ref)
        return widen(raw, arena.kept(ref), False)

    def _origin(self, ref: Ref) -> int:
        """The first origin among an operand's elements."""
        origins = self._origins.get(id(ref.memory))
        if origins is None:
            return _NOBODY
        known = origins[self._places(ref, len(origins))]
        known = known[known != _NOBODY]
        return int(known[0]) if len(known) else _NOBODY

    def _note(self, ref: Ref, numbers: torch.Tensor) -> None:
        origins = self._origins.get(id(ref.memory))
        if origins is None:
            size = self._plan.arena.of(ref.memory).numel()
            origins = self._origins[id(ref.memory)] = torch.full((size,), _NOBODY)
        places = self._places(ref, len(origins))
        if places.numel() == numbers.numel():
            origins[places] = numbers.reshape(places.shape)

    def _places(self, ref: Ref, size: int) -> torch.Tensor:
        """Element numbers of an operand; views of another width may reach beyond."""
        return gather_index(ref, self._plan.arena).clamp(max=size - 1)


def _kinds(values: torch.Tensor) -> set[str]:
    """Which of NaN, inf and -inf are among some values."""
    broken = values[~values.isfinite()]
    return {str(float(value)) for value in broken.unique()} if len(broken) else set()
