"""PyTorch's calls as data: what they read and write, and where it lies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..device.dtypes import Shape

Home = tuple[str, int]  # ("own", storage), ("outer", memory bound in every run) or ("made", number)
MOVES = ("copy_", "_to_copy", "clone")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "_linear_pointwise")


class Place(NamedTuple):
    """A tensor of a call, by where its elements lie.

    Attributes:
        tensor: the tensor itself, where it exists before and after a run.
        twin: whether it lies in memory of bf16 that can be read as fp32.
    """

    home: Home
    shape: Shape
    strides: Shape
    offset: int
    dtype: torch.dtype
    tensor: torch.Tensor | None = None
    twin: bool = False

    @property
    def key(self) -> tuple:
        return self[:5]

    @property
    def memory(self) -> Home:
        """What a write may change: callers may hand over one memory twice."""
        return ("outer", 0) if self.home[0] == "outer" else self.home

    def seen_as(self, shape: Shape, strides: tuple[int, ...], offset: int) -> Place:
        """Another view of the same memory."""
        tensor = self.tensor
        if tensor is not None:
            tensor = tensor.as_strided(shape, strides, offset)
        return self._replace(shape=shape, strides=strides, offset=offset, tensor=tensor)

    def as_fp32(self) -> Place:
        """The same elements of a twin as fp32."""
        assert self.tensor is not None
        whole = torch.empty(0, dtype=torch.float32).set_(self.tensor.untyped_storage())
        geometry = self.shape, tuple(s // 2 for s in self.strides), self.offset // 2
        tensor = whole.as_strided(*geometry)
        return Place(self.home, *geometry, torch.float32, tensor, True)


class Call(NamedTuple):
    """One call; without a function a step as it was, or a look at values.

    Attributes:
        func: PyTorch's operator, or a Packable (packing.py) or Selection (selections.py) that
            multiplies.
        touches: memories that a step may read and write.
        wide: whether all threads share it.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[Place, ...]
    step: Callable[..., None] | None = None
    touches: tuple[Home, ...] = ()
    wide: bool = False

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__ if self.of_torch else ""

    @property
    def of_torch(self) -> bool:
        return isinstance(self.func, torch._ops.OpOverload)

    @property
    def writes(self) -> tuple[Place, ...]:
        """Tensors that it changes."""
        return tuple(self.args[at] for at in self._written if at < len(self.args))

    @property
    def targets(self) -> tuple[Place, ...]:
        """Tensors that it changes or makes."""
        return self.writes + self.results

    @property
    def _written(self) -> Shape:
        return _changed_by(self.func) if self.of_torch else ()

    @property
    def updates(self) -> tuple[Place, ...]:
        """Those of them whose elements it reads, too."""
        return () if self.name in ("copy_", "fill_", "zero_") else self.writes

    @property
    def moved(self) -> tuple[Place, Place]:
        """(target, source) of one of MOVES."""
        if self.name == "copy_":
            return self.args[0], self.args[1]
        return self.results[0], self.args[0]

    def places(self) -> Iterator[Place]:
        yield from _places((self.args, self.kwargs))

    def reads(self) -> list[Place]:
        """What it reads and leaves as it is."""
        written = self._written
        return list(
            _places(([a for at, a in enumerate(self.args) if at not in written], self.kwargs))
        )

    def with_reads(self, change: Callable[[Place], Place]) -> Call:
        """The call with other places to read."""
        written = self._written

        def changed(value: Any) -> Any:
            if isinstance(value, Place):
                return change(value)
            return type(value)(map(changed, value)) if isinstance(value, (list, tuple)) else value

        args = [a if at in written else changed(a) for at, a in enumerate(self.args)]
        return self._replace(args=tuple(args))


@functools.cache
def _changed_by(operator: Any) -> Shape:
    """Positions of the arguments that an operator changes."""
    infos = [argument.alias_info for argument in operator._schema.arguments]
    return tuple(at for at, info in enumerate(infos) if info is not None and info.is_write)


def _places(tree: Any) -> Iterator[Place]:
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, Place):
            yield part
        elif isinstance(part, (list, tuple, dict)):
            yield from _places(part)
