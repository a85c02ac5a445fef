"""Execute instructions one by one while a kernel is being traced, so that values can be seen."""

import numpy as np
import torch

from ..program.program import Instruction
from ..program.storage import Storage
from ..program.view import View
from . import merge
from .doubts import watched
from .execute import make_step
from .instances import WrittenByBoth
from .memory import Arena, reinterpreted, widen


class Machine:
    """Executes instructions one by one as they are recorded (eager mode).

    Attributes:
        open_values: as in ``Program``.
        both: compares the writes of two cores, if there are two.
    """

    def __init__(self) -> None:
        self.open_values = False
        self.both: WrittenByBoth | None = None
        self.arena = Arena()
        self.lowering = merge.Lowering(merge=False)

    def _memory(self, storage: Storage) -> merge.Memory:
        return self.lowering.ref(View.whole(storage)).memory

    def bind(self, storage: Storage, values: torch.Tensor) -> None:
        """Give a kernel input its data."""
        self.arena.bind(self._memory(storage), values)

    def alias(self, storage: Storage, base: Storage) -> None:
        """Let a storage read the memory of another one as another type."""
        self.arena.bind(self._memory(storage), reinterpreted(self.memory(base), storage))

    def memory(self, storage: Storage) -> torch.Tensor:
        """Contents of a storage, in its declared shape."""
        return self.arena.of(self._memory(storage)).reshape(storage.shape)

    def run(self, instruction: Instruction) -> None:
        """Execute one instruction."""
        with torch.inference_mode():  # as Plan.run; a decorator would be a frame of the user's
            op = self.lowering.op(instruction)
            step = make_step(op, self.arena)
            if self.both is not None:
                step = self.both.watching(step, op, self.arena)
            (watched(step, op, self.arena, self.open_values) or step)()

    def values(self, view: View) -> np.ndarray:
        """Current values of a view, as a numpy array of fp32 (integers unchanged)."""
        ref = self.lowering.ref(view)
        raw = self.arena.view(ref)
        if view.dt.is_int:
            return raw.numpy().copy()
        return widen(raw, self.arena.kept(ref), False).numpy().copy()
