"""Index expressions and masks: everything that can stand in a subscript or in ``mask=``.

All NKI index forms are affine: a constant plus a sum of integer coefficients times the axes of an
index grid (aws-neuron-sdk v2.21.1, general/nki/programming_model.rst, tensor indexing). Loop
variables and program ids are plain ints here, because loops run while tracing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn

import numpy as np

from ..device.dtypes import Shape
from ..device.errors import refuse
from ..device.unknown import Affine

_WHOLE = slice(None)


def is_integer(value: Any) -> bool:
    own = type(value) is int  # decided without a second look, since every subscript asks
    return own or (isinstance(value, (int, np.integer)) and not isinstance(value, bool))


def _comparison(op: str) -> Callable[[Any, Any], Mask]:
    return lambda index, other: index._compare(op, other)


@dataclass(slots=True, eq=False)
class Form:
    """What index expressions with other constants share; equal ones are one object."""

    coefs: Shape
    shape: Shape
    dense: bool = False


form_of = functools.cache(Form)


def affine(const: int, coefs: Shape, shape: Shape, dense: bool = False) -> Index:
    """The index expression of these coefficients on a grid of this shape."""
    return Index(const, form_of(coefs, shape, dense))


class Index(Affine):
    """Affine index expression ``const + sum(coefs[a] * i_a)`` over a grid of ``shape``.

    Attributes:
        shape: size of each grid axis (broadcast axes have size 1 and coefficient 0).
        dense: made by mgrid, whose indices name axes that they do not vary along.
        form: all but the constant.
        pair: constant and form, by which subscripts are looked up.
    """

    __slots__ = ("const", "form", "pair")
    coefs, shape, dense = (
        property(operator.attrgetter(f"form.{name}")) for name in ("coefs", "shape", "dense")
    )

    def __init__(self, const: int, form: Form) -> None:
        self.const, self.form = const, form
        self.pair = const, form

    def __repr__(self) -> str:
        terms = "".join(f" + {c}*i{a}" for a, c in enumerate(self.coefs) if c)
        return f"index({self.const}{terms}, shape={self.shape})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def values(self) -> np.ndarray:
        """The expression on its grid, int64."""
        total = np.full((1,) * self.ndim, self.const, np.int64)
        for axis, (coef, size) in enumerate(zip(self.coefs, self.shape)):
            if coef:
                line = [1] * self.ndim
                line[axis] = size
                total = total + coef * np.arange(size).reshape(line)
        return np.broadcast_to(total, self.shape)

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value on the grid."""
        # Linear along each axis, so both lie at ends of the axes, by the sign of the coefficient.
        low = high = self.const
        for coef, size in zip(self.coefs, self.shape):
            if coef < 0:
                low += coef * (size - 1)
            else:
                high += coef * (size - 1)
        return low, high

    def broadcast(self, shape: Shape) -> Index:
        """The same expression on a larger grid (numpy broadcasting).

        An axis of size 1 that is stretched keeps its one value, so its coefficient goes.
        """
        if shape == self.shape:
            return self
        pad = len(shape) - self.ndim
        kept = tuple(c if n == s else 0 for c, n, s in zip(self.coefs, self.shape, shape[pad:]))
        return affine(self.const, (0,) * pad + kept, shape, self.dense)

    def on_axes(self, axes: Shape, rank: int) -> Index:
        """Axis k of the grid as axis ``axes[k]`` of ``rank`` axes, those it does not vary along
        of size 1."""
        coefs, shape = [0] * rank, [1] * rank
        for axis, coef, size in zip(axes, self.coefs, self.shape):
            if coef:  # an index of an mgrid has the shape of all axes and varies along few
                coefs[axis], shape[axis] = coef, size
        return affine(self.const, tuple(coefs), tuple(shape), self.dense)

    def __getitem__(self, key: Any) -> Index:
        """Insert axes: ``i[:, None]`` and friends; picking elements is not affine and refused."""
        keys = key if isinstance(key, tuple) else (key,)
        kinds = (*map(type, keys),)
        axes = kinds.count(slice)
        plain = axes + kinds.count(NoneType) == len(keys) and keys.count(_WHOLE) == axes
        if not plain or axes > len(self.form.shape):
            raise refuse(
                "sim_index_type",
                f"an index object of {self.ndim} axes is subscripted with {key!r}, expected one "
                "':' for each and None only; build the range you need with nl.arange(start, stop)",
            )
        return _opened(self.const, self.form, kinds)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise refuse(
            "err_cannot_assign_to_index",
            "an index object cannot be assigned to, expected a tensor; turn the index into data "
            "with nisa.iota(expr, dtype) first",
        )

    def __bool__(self) -> NoReturn:
        raise refuse(
            "err_control_flow_condition_depending_on_arange",
            "if/while on an arange or mgrid expression has no single truth value, expected a "
            "condition on loop variables or shapes; select elements with mask=",
        )

    def _combine(self, other: Any, sign: int) -> Any:
        if is_integer(other):
            return Index(self.const + sign * int(other), self.form)
        if not isinstance(other, Index):
            return NotImplemented
        try:
            shape = np.broadcast_shapes(self.shape, other.shape)
        except ValueError:
            raise refuse(
                "sim_index_shape",
                f"index grids of shapes {self.shape} and {other.shape} do not broadcast; give "
                "every arange its own axis with [:, None] or [None, :]",
            ) from None
        a, b = self.broadcast(shape), other.broadcast(shape)
        coefs = tuple(x + sign * y for x, y in zip(a.coefs, b.coefs))
        return affine(a.const + sign * b.const, coefs, shape, self.dense and other.dense)

    def __add__(self, other: Any) -> Any:
        return self._combine(other, 1)

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, -1)

    __radd__ = __add__

    def __rsub__(self, other: Any) -> Any:
        return (self * -1) + other

    def __neg__(self) -> Index:
        return self * -1

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Index):
            self._not_affine("*")
        if isinstance(other, float):
            self._not_affine("* of a fraction")
        if not is_integer(other):
            return NotImplemented
        k = int(other)
        return affine(self.const * k, tuple(c * k for c in self.coefs), self.shape, self.dense)

    __rmul__ = __mul__

    def _not_affine(self, operator: str) -> NoReturn:
        raise refuse(
            "err_unsupported_expression_in_mask",
            f"'{operator}' makes an index or mask expression non-affine, expected sums of integer "
            "multiples of arange, mgrid and loop variables; split the axis into two arange axes",
        )

    def __floordiv__(self, other: Any) -> Index:
        return self._in_one_piece("//", other)

    def __mod__(self, other: Any) -> Index:
        return self._in_one_piece("%", other)

    def _in_one_piece(self, operator: str, other: Any) -> Index:
        """Quotient or remainder, where it is affine after all on this grid.

        ``i // n`` and ``i % n`` are affine in pieces: constant and ``i`` while no multiple of n is
        crossed, and affine where n divides the coefficients. Public kernels that ran on devices
        split a flat index so where it has one piece (arange(2048) // 2048).
        """
        if not is_integer(other) or other <= 0:
            self._not_affine(operator)
        n = int(other)
        low, high = self.bounds()
        if all(c % n == 0 for c in self.coefs):
            const, coefs = self.const // n, tuple(c // n for c in self.coefs)
        elif low // n == high // n:
            const, coefs = low // n, (0,) * self.ndim
        else:
            self._not_affine(operator)
        if operator == "//":
            return affine(const, coefs, self.shape, self.dense)
        return affine(const, coefs, self.shape, self.dense) * -n + self

    def __truediv__(self, other: Any) -> NoReturn:
        self._not_affine("/")

    def _compare(self, op: str, other: Any) -> Mask:
        difference = self._combine(other, -1)
        if difference is NotImplemented:
            raise refuse(
                "err_unsupported_expression_in_mask",
                f"an index is compared with {type(other).__name__}, expected an affine index "
                "expression or an integer; compute data-dependent conditions with nl.where",
            )
        return Mask(((difference, op),))

    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = map(_comparison, ("eq", "ne"))  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


@functools.lru_cache(1 << 12)  # kernels repeat few of them
def _opened(const: int, form: Form, kinds: tuple[type, ...]) -> Index:
    """The index with further axes, of size 1, where a subscript has None."""
    own = iter(zip(form.coefs, form.shape))
    axes = [*[(0, 1) if kind is NoneType else next(own) for kind in kinds], *own]
    return affine(const, tuple([c for c, _ in axes]), tuple([n for _, n in axes]), form.dense)


_COMPARE = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


class Mask(Affine):
    """A conjunction of affine comparisons with zero: ``expr op 0 & ...``."""

    __slots__ = ("terms",)

    def __init__(self, terms: tuple[tuple[Index, str], ...]) -> None:
        self.terms = terms

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Mask):
            return Mask(self.terms + other.terms)
        if isinstance(other, (bool, np.bool_)):  # a comparison of loop variables, known by now
            return self if other else Mask((*self.terms, (affine(1, (), ()), "lt")))  # 1 < 0
        return NotImplemented

    __rand__ = __and__

    def __getitem__(self, key: Any) -> NoReturn:
        raise refuse(
            "sim_mask_operator",
            "a mask is subscripted, expected it whole; give its indices their axes before they are "
            "compared, as in nl.arange(128)[:, None] < n",
        )

    def __or__(self, other: Any = None) -> NoReturn:
        raise refuse(
            "sim_mask_operator",
            "masks are joined by '|' or negated, expected comparisons joined by '&'; write the "
            "opposite comparison, or make two calls with one mask each",
        )

    __ror__ = __xor__ = __invert__ = __or__  # type: ignore[assignment]

    def __bool__(self) -> NoReturn:
        raise refuse(
            "err_control_flow_condition_depending_on_arange",
            "a mask is used as a truth value (if, while, and, or, not), expected a condition on "
            "loop variables; pass it as mask= and join masks with '&'",
        )

    def shape(self) -> Shape:
        return np.broadcast_shapes(*(e.shape for e, _ in self.terms))

    def evaluate(self, shape: Shape) -> np.ndarray:
        """Boolean array, broadcastable to ``shape``.

        Raises:
            NkiError: the grids of the mask do not broadcast to ``shape``.
        """
        result = np.ones((1,) * len(shape), bool)
        for expr, op in self.terms:
            grid = _fit(expr, shape)
            result = result & _COMPARE[op](grid, 0)
        return result


def _fit(expr: Index, shape: Shape) -> np.ndarray:
    """Values of ``expr`` with its axes aligned to those of the masked region (trailing axes).

    Indices of an mgrid count by the axes that they vary along, from the first one.
    """
    placed: Index | None = expr
    if expr.dense:
        # Its own axes if they fit; otherwise, made for another operand, the axis of its size.
        used = [a for a, c in enumerate(expr.coefs) if c]
        if all(a < len(shape) and expr.shape[a] in (1, shape[a]) for a in used):
            placed = expr.on_axes(tuple(range(expr.ndim)), len(shape))
        else:
            placed = _on_axis_of_its_size(expr, used, shape)
    elif expr.ndim > len(shape) or any(
        n not in (1, s) for n, s in zip(expr.shape[::-1], shape[::-1])
    ):
        placed = None
    if placed is None:
        raise refuse(
            "sim_mask_shape",
            f"mask of shape {expr.shape} does not fit the region of shape {shape}, expected "
            "broadcastable shapes; build it from the arange objects that index the operand",
        )
    return placed.values()


def _on_axis_of_its_size(expr: Index, used: list[int], shape: Shape) -> Index | None:
    """The expression of one mgrid axis on the only axis of ``shape`` that has its size."""
    if len(used) != 1:
        return None
    fitting = [a for a, s in enumerate(shape) if s == expr.shape[used[0]]]
    if len(fitting) != 1:
        return None
    return expr.on_axes(tuple(fitting) * expr.ndim, len(shape))


def aligned(indices: list[Index], shapes: list[Shape]) -> tuple[list[Index], Shape]:
    """Index expressions of one subscript on one grid, and the grid's shape.

    numpy broadcasting, except for indices of mgrid: each counts by the axes that it varies along,
    axes of grids of different rank are matched from the first one, and axes after the second that
    no index names are left out. Indices of different mgrids that meet on one axis with different
    sizes take the axes in the order of the subscript. ``shapes`` are those of index tiles.

    Raises:
        NkiError: the grids do not broadcast.
    """
    if not any(i.dense for i in indices):
        shape = _broadcast([i.shape for i in indices] + shapes)
        return [i.broadcast(shape) for i in indices], shape
    # With an mgrid: as many axes as some index varies along, counted from the first one, so that
    # indices of a 3-axis and of a 2-axis grid meet on their leading axes.
    named = [1 + max((a for a, c in enumerate(i.coefs) if c), default=0) for i in indices]
    fixed = [i.ndim for i in indices if not i.dense] + [len(s) for s in shapes]
    rank = max(2, *named, *fixed)
    opened = [i.on_axes(tuple(range(i.ndim)), rank) for i in indices]
    tiles = [s + (1,) * (rank - len(s)) for s in shapes]
    # Two mgrids of one subscript, as in t[a.p, b.x] with grids of different sizes: no common grid
    # fits both, so the k-th index of the subscript takes the k-th axis.
    sizes = [{i.shape[a] for i in opened} - {1} for a in range(rank)]
    if any(len(s) > 1 for s in sizes) and all(sum(map(bool, i.coefs)) <= 1 for i in indices):
        rank = max(2, len(indices))
        opened = [i.on_axes((k,) * i.ndim, rank) for k, i in enumerate(indices)]
    shape = _broadcast([i.shape for i in opened] + tiles)
    return [i.broadcast(shape) for i in opened], shape


def _broadcast(shapes: list[Shape]) -> Shape:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise refuse(
            "sim_index_shape",
            f"index grids of shapes {', '.join(map(str, shapes))} in one subscript do not "
            "broadcast; give every axis its own arange with [:, None] or [None, :]",
        ) from None


def arange(*args: int) -> Index:
    """``nl.arange(stop)`` or ``nl.arange(start, stop[, step])``: a 1-D index vector."""
    for value in args:
        if type(value) is not int and not is_integer(value):
            raise refuse(
                "sim_index_type",
                f"nl.arange got a {type(value).__name__}, expected integers known while tracing; "
                "divide sizes with //",
            )
    return _line(*args)


@functools.lru_cache(1 << 12)
def _line(*args: int) -> Index:
    start, stop, step = {1: (0, *args, 1), 2: (*args, 1), 3: args}[len(args)]
    size = max(0, -(-(int(stop) - int(start)) // int(step)))
    return affine(int(start), (int(step),), (size,))


class Grid(tuple):
    """The result of ``nl.mgrid[...]``: one index per axis, also as ``.p``, ``.x``, ``.y`` etc."""

    __slots__ = ()

    p, x, y, z, w = (property(operator.itemgetter(axis)) for axis in range(5))


class MGrid:
    """``nl.mgrid[0:p, 0:f]``: dense index grid, one index object per axis."""

    def __getitem__(self, key: Any) -> Grid:
        slices = key if isinstance(key, tuple) else (key,)
        lines = [arange(s.start or 0, s.stop, s.step or 1) for s in slices]
        shape = tuple(line.shape[0] for line in lines)
        unit = range(len(lines))
        return Grid(
            affine(line.const, tuple(line.coefs[0] if a == axis else 0 for a in unit), shape, True)
            for axis, line in enumerate(lines)
        )


mgrid = MGrid()


def ds(start: int, size: int) -> slice:
    """``nl.ds(start, size)``: the slice ``start:start + size``."""
    return slice(start, start + size)


@dataclass(slots=True, eq=False)
class DynamicIndex:
    """Run-time scalar (or per-partition row number) plus an affine index, inside one subscript."""

    tensor: Any
    index: Index | int

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Index) or is_integer(other):
            return DynamicIndex(self.tensor, self.index + other)
        return NotImplemented

    __radd__ = __add__
