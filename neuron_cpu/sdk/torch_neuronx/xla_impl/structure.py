"""Turns a call's tensors into a graph's inputs, and its outputs into results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import scripting

scripting.install()


class Flattener:
    """A call's tensors in order, without those that the graph leaves out."""

    def __init__(self, layout: Sequence[int], exclude: Sequence[int] | None = None) -> None:
        self.layout, self.exclude = tuple(layout), exclude

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        left_out = set(self.exclude or ())
        return [inputs[place] for place in self.layout if place not in left_out]


@dataclass(eq=False)
class Packer:
    """A call's result: one tensor by itself, several as a list. `layout`, `identifiers` and
    `constants` concern the outputs that no state takes."""

    layout: Any
    identifiers: Any = None
    constants: Any = None

    def __call__(self, outputs: Sequence[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else list(outputs)
