"""The tensor object that kernels hold: a view with the language's subscripts and operators.

``elementwise.py`` records the operators, and attaches them to the class.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ..device import written
from ..device.dtypes import Shape, to_dtype
from ..device.errors import refuse
from ..device.unknown import Foreign
from ..program import trace
from ..program.subscript import subscript
from ..program.view import View
from .assignment import assign
from .types import BY_KIND, Buffer


class Tile(trace.Values, Foreign, View):
    """A tensor in HBM, SBUF or PSUM, or a part of one (``neuronxcc.nki.tensor``).

    Attributes:
        shape: sizes, partition axis first for a tile.
        dtype: element type, equal to ``nl.bfloat16`` etc. (an np.dtype, except for tf32).
        ndim, itemsize, buffer: as the names say.
    """

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return self.dt.itemsize

    @property
    def buffer(self) -> Buffer:
        """The memory as kernels name it: ``nl.sbuf``, ``nl.psum``, ``nl.hbm`` or ``shared_hbm``."""
        return BY_KIND[self.storage.buffer]

    # --- regions and shapes -----------------------------------------------------------------------
    def __getitem__(self, key: Any) -> Tile:
        return subscript(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self if key is Ellipsis else self[key]  # t[...] is by far the most frequent
        assign(view, value)

    def reshape(self, *sizes: Any, shape: Any = None) -> Tile:
        """View with other sizes, one of them possibly -1; the partition axis stays unchanged."""
        new = sizes_of(sizes, shape)
        if -1 in new:
            known = -int(np.prod(new))
            new = tuple(self.size // known if s == -1 else s for s in new)
        return super().reshape(new)

    def view(self, dtype: Any) -> Tile:
        """The same bits as another type of the same size."""
        return self.bitcast(to_dtype(dtype))

    def assert_shape(self, shape: Any) -> Tile:
        """Check the shape and return the tensor."""
        if tuple(shape) != tuple(self.shape):
            raise refuse(
                "err_annotation_shape_mismatch",
                f"{self.label()} has shape {self.shape}, expected {tuple(shape)}; give the "
                "call another, or mend the number",
            )
        return self

    # --- data and truth ---------------------------------------------------------------------------
    def __bool__(self) -> NoReturn:
        raise refuse(*_truth_refusal(self))

    def __iter__(self) -> NoReturn:
        raise refuse(
            "sim_tensor_iteration",
            f"{self.label()} cannot be iterated over; loop over nl.affine_range and index it, or "
            "add up an axis with nl.sum",
        )

    def __int__(self) -> NoReturn:
        raise refuse(
            "err_ambiguous_tensor_truth_value",
            f"{self.label()} is used as a Python number (int, float, a size, a range), expected "
            "one known while tracing, when tensors have no values yet; compute with functions of "
            "nl, nl.exp for math.exp, and give counts as arguments",
        )

    __float__ = __int__
    __index__ = __int__
    __hash__ = object.__hash__


def _truth_refusal(tensor: Tile) -> tuple[str, str]:
    """Identifier and message for a truth test, by the statement that asks.

    Python calls ``__bool__`` alike for if, while, and, or, not: only the source line tells which.
    """
    if written.word() == "while":
        return (
            "err_while_loop_requires_unconditional_entry",
            f"while loop on {tensor.label()}, expected a condition known while tracing; loop over "
            "nl.sequential_range with a fixed trip count and mask finished elements",
        )
    if written.word() in ("if", "elif"):
        return (
            "err_dynamic_control_flow_not_supported",
            f"{tensor.label()} is used as the condition of an if, expected a Python value known "
            "while tracing; select values with nl.where or a mask",
        )
    return (
        "err_ambiguous_tensor_truth_value",
        f"{tensor.label()} is used as a truth value (and, or, not, bool), which has no meaning for "
        "a tensor, expected a Python value; choose with nl.where, nl.maximum or nl.minimum, join "
        "with & and |, negate with ~, test 'is None'",
    )


def sizes_of(given: tuple[Any, ...], shape: Any) -> Shape:
    """Sizes given one by one, as one sequence, or by keyword."""
    if shape is None:
        shape = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return tuple(int(s) for s in shape)
