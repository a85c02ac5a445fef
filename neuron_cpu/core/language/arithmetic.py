"""Operators and methods of kernel tensors that record instructions, attached to ``Tile``.

They stand apart from the class because they call ``nl``, whose functions take and make tensors.
"""

from collections.abc import Callable
from typing import Any

from ..device.errors import refuse, warn
from ..device.release import IN_PLACE_OPERATORS_RELIABLE, since
from ..program.index import DynamicIndex, Index
from ..program.view import View
from . import assignment, elementwise, memory
from .labels import fitted
from .tensor import Tile, sizes_of

BINARY = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "power": "pow",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "lshift",
    "right_shift": "rshift",
}  # fmt: skip
COMPARISONS = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne",
}  # fmt: skip
IN_PLACE = {"add": "iadd", "subtract": "isub", "multiply": "imul", "divide": "itruediv"}


def _operator(name: str, reflected: bool = False) -> Callable[[Tile, Any], Any]:
    function = getattr(elementwise, name)

    def apply(self: Tile, other: Any) -> Any:
        if isinstance(other, Index) and name == "add":  # t[rows + nl.arange(n)[None, :]]
            return DynamicIndex(self, other)
        if isinstance(other, Tile) and other.shape[0] != self.shape[0]:
            raise refuse(
                "err_num_partition_mismatch",
                f"operator '{name}' of {self.label()} and {other.label()}, expected equal "
                "partition counts: operators do not broadcast the partition axis; use nl "
                "functions, or broadcast_to of a row (1, n)",
            )
        return function(other, self) if reflected else function(self, other)

    return apply


def _in_place(name: str) -> Callable[[Tile, Any], View]:
    """``x += y``: accumulation of a matmul in PSUM, else ``x[...] = nl.add(x, y)``."""
    function = getattr(elementwise, name)

    def apply(self: Tile, other: Any) -> View:
        if isinstance(other, View) and assignment.was_skipped(other):  # its mask selects nothing
            return self
        if name == "add" and assignment.accumulate(self, other):
            return self
        if not since(IN_PLACE_OPERATORS_RELIABLE):
            warn(  # two entries of the contest ran so on 2.21, hence no error in strict mode
                "sim_inplace_operator",
                f"in-place '{name}' on {self.label()} is no matmul accumulation in PSUM, which SDK "
                f"releases before 2.23 may miscompute; write x[...] = nl.{name}(x, y)",
                advice=True,
            )
        assignment.assign(self, function(self, other))
        return self

    return apply


def attach() -> None:
    """Give ``Tile`` its operators."""
    for name, symbol in BINARY.items():
        setattr(Tile, f"__{symbol}__", _operator(name))
        setattr(Tile, f"__r{symbol}__", _operator(name, reflected=True))
    for name, symbol in COMPARISONS.items():
        setattr(Tile, f"__{symbol}__", _operator(name))
    for name, symbol in IN_PLACE.items():
        setattr(Tile, f"__{symbol}__", _in_place(name))
    methods = {
        "__neg__": lambda self: elementwise.negative(self),
        "__invert__": lambda self: elementwise.invert(self),
        "broadcast_to": lambda self, *sizes, shape=None: memory.broadcast_to(
            self, shape=sizes_of(sizes, shape)
        ),
        "astype": lambda self, dtype: memory.copy(self, dtype=dtype),
        "reshape": fitted(Tile.reshape),
        "view": fitted(Tile.view),
        "as_tile": lambda self: self,  # public kernels call it; no document says what it does
    }
    for name, method in methods.items():
        setattr(Tile, name, method)
