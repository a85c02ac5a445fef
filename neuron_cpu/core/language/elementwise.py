"""Functions of ``nki.language``, lowered to instructions of VectorE and ScalarE; operators.

Signatures: aws-neuron-sdk v2.21.1, general/nki/api/nki/language/__init__.py. How the vendor lowers
abs, ceil, floor, trunc, cos and tan is not public; documented instructions make them here.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..device.dtypes import BOOL, FLOAT32, INT32, DType, promote, scalar_dtype, to_dtype
from ..device.errors import refuse, warn
from ..device.release import IN_PLACE_OPERATORS_RELIABLE, since
from ..instructions.alu import ACTIVATIONS, BINARY, named
from ..instructions.arguments import number
from ..instructions.copies import SELECT, SelectAttrs
from ..program.index import DynamicIndex, Index, Mask
from ..program.view import View
from . import assignment, compute, copies, memory
from .creation import ndarray
from .memory import copy, partition_broadcast
from .operands import REDUCTIONS, fitted, fresh, result_type, tile
from .tensor import Tile, sizes_of
from .types import float32


# --- two operands ---------------------------------------------------------------------------------
def _scalar_like(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic))


def _broadcast_pair(name: str, x: View, y: View) -> tuple[View, View]:
    """Operands with one shape; partition broadcast is explicit work, free broadcast a view."""
    if x.ndim != y.ndim:
        low, high = (x, y) if x.ndim < y.ndim else (y, x)
        warn(
            "sim_trailing_broadcast",
            f"nl.{name} broadcasts {low.label()} over trailing axes of {high.label()}, which gave "
            "wrong results on the device (aws-neuron-sdk issue 1138); loop over the axis with "
            "(P, 1) vectors",
        )
        low = low.reshape((*low.shape, *(1,) * (high.ndim - low.ndim)))
        x, y = (low, y) if x.ndim < y.ndim else (x, low)
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise refuse(
            "err_num_partition_mismatch" if x.shape[0] != y.shape[0] else "sim_broadcast",
            f"nl.{name} of {x.label()} and {y.label()}, expected shapes that broadcast; slice them "
            "alike",
        ) from None
    # Free axes broadcast by strides of 0; engines cannot read one partition into many.
    pair = []
    for view in (x, y):
        if view.shape[0] == 1 and shape[0] > 1:
            view = partition_broadcast(view, (shape[0], *view.shape[1:]))
        pair.append(view)
    return pair[0], pair[1]


def _binary(name: str, x: Any, y: Any, dtype: Any, mask: Any) -> View:
    """Lower a binary function to tensor_scalar or tensor_tensor."""
    if isinstance(x, Index) or isinstance(y, Index):
        raise refuse(
            "sim_operand_type",
            f"nl.{name} got an index expression, expected tensors or numbers; use nisa.iota",
        )
    if _scalar_like(x):
        return _with_scalar(name, tile(y, name), x, True, dtype, mask)
    if _scalar_like(y):
        return _with_scalar(name, tile(x, name), y, False, dtype, mask)
    a, b = _broadcast_pair(name, tile(x, name), tile(y, name))
    dt = _result_dtype(name, a.dt, b.dt) if dtype is None else to_dtype(dtype)
    if name == "divide":
        return _binary("multiply", a, compute.reciprocal(b, dtype=float32, mask=mask), dt, mask)
    # (P, 1) against (P, F) is tensor_scalar's own form; power runs on GpSimdE as tensor_tensor.
    if a.shape != b.shape:
        if b.free_size == 1 and name != "power":
            return compute.tensor_scalar(a, name, b, dtype=dt, mask=mask)
        if a.free_size == 1 and name != "power":
            return compute.tensor_scalar(b, name, a, True, dtype=dt, mask=mask)
        shape = tuple(np.broadcast_shapes(a.shape, b.shape))
        a, b = a.widened(shape), b.widened(shape)
    return compute.tensor_tensor(a, b, name, dtype=dt, mask=mask)


def _with_scalar(name: str, x: View, value: Any, reverse: bool, dtype: Any, mask: Any) -> View:
    dt = _result_dtype(name, x.dt, scalar_dtype(value)) if dtype is None else to_dtype(dtype)
    if name == "divide":
        if reverse:
            inverse = compute.reciprocal(x, dtype=float32, mask=mask)
            return compute.tensor_scalar(inverse, "multiply", value, dtype=dt, mask=mask)
        scale = float(np.float32(1.0) / np.float32(value))  # no division on VectorE: 1/y, rounded
        return compute.tensor_scalar(x, "multiply", scale, dtype=dt, mask=mask)
    return compute.tensor_scalar(x, name, value, reverse, dtype=dt, mask=mask)


COMPARISONS = {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq",
    "not_equal": "ne",
}  # fmt: skip
_BOOLEAN = {*COMPARISONS, "logical_and", "logical_or", "logical_xor"}


def _result_dtype(name: str, a: DType, b: DType) -> DType:
    if name in _BOOLEAN:
        return BOOL
    if name == "divide" and not (a.is_float or b.is_float):
        return FLOAT32
    return promote(a, b)


def _make_binary(name: str, doc: str) -> Callable:
    def apply(x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> View:
        return _binary(name, x, y, dtype, mask)

    apply.__doc__ = f"{doc}; numpy broadcasting, the partition axis at extra cost."
    return named(name, apply)


FUNCTIONS: dict[str, Callable] = {  # of ``nki.language``, by name
    name: _make_binary(name, doc)
    for name, doc in (BINARY | {"divide": "x / y (reciprocal, then multiply)"}).items()
}


# --- one operand ----------------------------------------------------------------------------------
def _make_unary(name: str, make: Callable[[View, Any, Any], View], doc: str) -> Callable:
    def apply(x: View, *, dtype: Any = None, mask: Any = None) -> View:
        return make(x, dtype, mask)

    apply.__doc__ = f"{doc}."
    return named(name, apply)


def _make_activation(name: str) -> Callable:
    def make(x: View, dtype: Any, mask: Any) -> View:
        return compute.activation(name, x, dtype=dtype, mask=mask)

    doc = f"Element-wise {name} on ScalarE, fp32 inside; input's type unless dtype"
    return _make_unary(name, make, doc)


def _with_number(operator: str, value: float, own: Any = None) -> Callable[[View, Any, Any], View]:
    """One pass of VectorE with a number; ``own`` is the type of the result where none is asked."""
    return lambda x, dtype, mask: compute.tensor_scalar(
        x, operator, value, dtype=own if dtype is None else dtype, mask=mask
    )


OTHERWISE = ("abs", "copy", "gelu_apprx_sigmoid_dx", "reciprocal")  # on VectorE, or not there
FUNCTIONS |= {name: _make_activation(name) for name in ACTIVATIONS if name not in OTHERWISE}
FUNCTIONS |= {
    name: _make_unary(name, make, doc)
    for name, make, doc in (
        ("negative", _with_number("multiply", -1.0), "``-x`` on VectorE"),
        ("invert", _with_number("invert", 0), "``~x`` of integers, on VectorE"),
        ("abs", _with_number("abs", 0), "``|x|`` on VectorE"),
        (
            "logical_not",
            _with_number("logical_not", 0, BOOL),
            "1 where ``x`` is zero, else 0; bool unless ``dtype``",
        ),
        (
            "reciprocal",
            lambda x, dtype, mask: compute.reciprocal(x, dtype=dtype, mask=mask),
            "``1 / x`` on VectorE (SDK 2.22)",
        ),
    )
}


# --- selection ------------------------------------------------------------------------------------
def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``x`` where the data tile ``condition`` is nonzero, else ``y`` (a tile or a number).

    A condition on indices selects term by term, as ``affine_select`` does; ``y`` is a number then.
    A contest entry ran that on a device (dinghongsong, llama.py of 2025-03-10, its attention).
    """
    if isinstance(condition, Mask) and _scalar_like(y):
        for term in condition.terms:
            x = copies.affine_select(Mask((term,)), x, y, mask=mask, dtype=dtype)
        return x
    cond, first = tile(condition, "where"), tile(x, "where")
    src = [cond.widened(first.shape) if cond.shape != first.shape else cond, first]
    constant, dt = None, first.dt
    if _scalar_like(y):
        constant = number(y)
    else:
        other = tile(y, "where")
        src.append(other.widened(first.shape) if other.shape != first.shape else other)
        dt = promote(first.dt, other.dt)
    return fresh(SELECT, tuple(src), SelectAttrs(on_false=constant), result_type(dtype, dt), mask)


# --- made of several instructions -----------------------------------------------------------------
_WHOLE = 2.0**23  # from here on every fp32 number is whole


def rounded(step: str, x: View, dt: DType, choose: Callable, mask: Any = None) -> View:
    """x rounded to nearest by a cast to int32, moved by one where the direction asks for it.

    ``step`` is "greater" (floor: subtract 1 where the rounded value is above x) or "less" (ceil).
    ``choose`` is the language's ``where``.
    """
    # The cast rounds to nearest and saturates; from 2^23 on x is whole already and stays as it is.
    wide: Any = dict(dtype=FLOAT32, mask=mask)
    near = copies.tensor_copy(copies.tensor_copy(x, dtype=INT32, mask=mask), **wide)
    off = compute.tensor_tensor(near, x, step, **wide)
    moved = compute.tensor_tensor(near, off, "subtract" if step == "greater" else "add", **wide)
    size = compute.tensor_scalar(x, "abs", 0, op1="less", operand1=_WHOLE, **wide)
    return choose(size, moved, x, dtype=dt)


def _own_type(x: View, dtype: Any) -> DType:
    return x.dt if dtype is None else to_dtype(dtype)


def truncated(x: View, dt: DType, choose: Callable, mask: Any = None) -> View:
    """``x`` without its fraction: sign(x) * floor(|x|)."""
    size = compute.tensor_scalar(x, "abs", 0, dtype=FLOAT32, mask=mask)
    sign = compute.activation("sign", x, dtype=FLOAT32, mask=mask)
    below = rounded("greater", size, FLOAT32, choose, mask)
    return compute.tensor_tensor(below, sign, "multiply", dtype=dt, mask=mask)


def _angle(x: View, shift: float, turns: View, mask: Any) -> View:
    """x + shift - 2 pi turns, kept inside [-pi, pi]; 2 pi in two parts, so that turns cancel."""
    wide: Any = dict(dtype=FLOAT32, mask=mask)
    count = copies.tensor_copy(turns, **wide)
    coarse = 6.28125  # 2 pi in 9 bits: its product with a whole number is exact up to 2^15
    first = compute.tensor_scalar(count, "multiply", -coarse, **wide)
    rest = compute.tensor_scalar(count, "multiply", coarse - 2 * math.pi, **wide)
    reduced = compute.tensor_tensor(x, first, "add", **wide)
    reduced = compute.tensor_tensor(reduced, rest, "add", **wide)
    moved = compute.tensor_scalar(reduced, "add", shift, **wide)
    return compute.tensor_scalar(
        moved, "minimum", math.pi, op1="maximum", operand1=-math.pi, **wide
    )


def shifted_sine(x: View, shift: float, dtype: Any, mask: Any = None) -> View:
    """sin(x + shift): ScalarE's sine takes [-pi, pi] only, so whole turns go first."""
    # x / 2 pi, and the shift as a part of a turn; the cast to int32 rounds to whole turns.
    per_turn = 0.5 / math.pi
    turns = compute.tensor_scalar(
        x, "multiply", per_turn, op1="add", operand1=shift * per_turn, dtype=INT32, mask=mask
    )
    return compute.activation("sin", _angle(x, shift, turns, mask), dtype=dtype, mask=mask)


def _cosine(x: View, dt: DType, choose: Callable, mask: Any = None) -> View:
    return shifted_sine(x, math.pi / 2, dt, mask)


def _tangent(x: View, dt: DType, choose: Callable, mask: Any = None) -> View:
    inverse = compute.reciprocal(_cosine(x, FLOAT32, choose, mask), mask=mask)
    sine = shifted_sine(x, 0.0, FLOAT32, mask)
    return compute.tensor_tensor(sine, inverse, "multiply", dtype=dt, mask=mask)


# Of both languages: what makes them of x, the result's type and the language's ``where``.
SEVERAL: dict[str, tuple[Callable[..., View], str]] = {
    "floor": (partial(rounded, "greater"), "Largest whole number not above ``x``"),
    "ceil": (partial(rounded, "less"), "Smallest whole number not below ``x``"),
    "trunc": (truncated, "``x`` without its fraction: sign(x) * floor(|x|)"),
    "cos": (_cosine, "Cosine as sin(x + pi/2) with whole turns removed"),
    "tan": (_tangent, "Tangent as sine times the reciprocal of the cosine"),
}


def _of_several(name: str) -> Callable:
    make, doc = SEVERAL[name]

    def apply(x: View, dtype: Any, mask: Any) -> View:
        return make(x, _own_type(x, dtype), partial(where, mask=mask), mask)

    return _make_unary(name, apply, doc)


def dropout(x: View, rate: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """``x`` with elements set to zero with probability ``rate`` (a number or [P, 1])."""
    return copies.dropout(x, rate, dtype=dtype, mask=mask)


def static_cast(arr: Any, dtype: Any) -> Any:
    """A tile or number as another type."""
    if isinstance(arr, View):
        return copy(arr, dtype=dtype)
    return to_dtype(dtype).numpy.type(arr)


FUNCTIONS |= {name: _of_several(name) for name in SEVERAL}
FUNCTIONS |= {made.__name__: made for made in (where, dropout, static_cast)}


# --- operators and methods of tensors, attached to ``Tile`` ---------------------------------------
SYMBOLS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "truediv", "power": "pow",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "lshift",
    "right_shift": "rshift",
}  # fmt: skip
IN_PLACE = {"add": "iadd", "subtract": "isub", "multiply": "imul", "divide": "itruediv"}


def _operator(name: str, reflected: bool = False) -> Callable[[Tile, Any], Any]:
    function = FUNCTIONS[name]

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
    function = FUNCTIONS[name]

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
    for name, symbol in SYMBOLS.items():
        setattr(Tile, f"__{symbol}__", _operator(name))
        setattr(Tile, f"__r{symbol}__", _operator(name, reflected=True))
    for name, symbol in COMPARISONS.items():
        setattr(Tile, f"__{symbol}__", _operator(name))
    for name, symbol in IN_PLACE.items():
        setattr(Tile, f"__{symbol}__", _in_place(name))
    methods = {
        "__neg__": lambda self: FUNCTIONS["negative"](self),
        "__invert__": lambda self: FUNCTIONS["invert"](self),
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


# --- reductions and norms -------------------------------------------------------------------------
# They expand as the public tutorials do, so that costs and precision follow.
def _make_reduction(name: str, op: str) -> Callable:
    def apply(
        x: View, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False
    ) -> View:
        return compute.tensor_reduce(op, x, axis, dtype=dtype, mask=mask, keepdims=keepdims)

    apply.__doc__ = f"Reduce the last free axes with {op}, fp32 inside; result at least rank 2."
    return named(name, apply)


FUNCTIONS |= {name: _make_reduction(name, op) for name, op in REDUCTIONS.items()}


def _float_type(x: View, dtype: Any) -> DType:
    """The type asked for, else that of ``x``, fp32 for integers."""
    return FLOAT32 if dtype is None and not x.dt.is_float else _own_type(x, dtype)


def mean(
    x: View, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False
) -> View:
    """Mean over the last free axes; integers give fp32."""
    dt, axes = _float_type(x, dtype), axis if isinstance(axis, (tuple, list)) else (axis,)
    total = compute.tensor_reduce("add", x, axis, dtype=float32, mask=mask, keepdims=keepdims)
    share = 1.0 / math.prod(x.shape[a] for a in axes)
    return compute.tensor_scalar(total, "multiply", share, dtype=dt)


def var(x: View, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Population variance over the last free axes: mean of the squared distances to the mean."""
    centre = mean(x, axis, dtype=FLOAT32, mask=mask, keepdims=True)
    apart = compute.tensor_tensor(x, centre.widened(x.shape), "subtract", dtype=FLOAT32, mask=mask)
    squares = compute.tensor_tensor(apart, apart, "multiply", dtype=FLOAT32, mask=mask)
    return mean(squares, axis, dtype=_float_type(x, dtype), mask=mask)


def all(x: View, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """1 where all elements along the last free axes are nonzero; bool unless ``dtype``."""
    dt = BOOL if dtype is None else dtype
    return compute.tensor_reduce("logical_and", x, axis, dtype=dt, mask=mask)


def softmax(
    x: View, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None
) -> View:
    """Softmax over the last free axes: negated max, exp with bias and sum, reciprocal, product."""
    dt = _own_type(x, dtype)
    inner = FLOAT32 if compute_dtype is None else to_dtype(compute_dtype)
    peak = compute.tensor_reduce("maximum", x, axis, dtype=float32, negate=True, mask=mask)
    total = ndarray((x.shape[0], 1), float32)
    # One row of numbers per partition: the negated maximum is ScalarE's bias, and the sum comes
    # with the exponentials in one pass.
    if peak.free_size == 1:
        exps = compute.activation_reduce(
            "exp", x, bias=peak, reduce_op="add", reduce_res=total, dtype=inner, mask=mask
        )
        inverse = compute.reciprocal(total, dtype=float32)
        return compute.tensor_scalar(exps, "multiply", inverse, dtype=dt, mask=mask)
    # Several rows per partition: ScalarE takes one bias a partition, so VectorE subtracts and sums.
    shape = (*peak.shape, *(1,) * (x.ndim - peak.ndim))
    shifted = compute.tensor_tensor(
        x, peak.reshape(shape).widened(x.shape), "add", dtype=float32, mask=mask
    )
    exps = compute.activation("exp", shifted, dtype=inner, mask=mask)
    sums = compute.tensor_reduce("add", exps, axis, dtype=float32, mask=mask)
    inverse = compute.reciprocal(sums).reshape(shape).widened(x.shape)
    return compute.tensor_tensor(exps, inverse, "multiply", dtype=dt, mask=mask)


def rms_norm(
    x: View,
    w: View,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
) -> View:
    """``x * rsqrt(sum(x^2) / n + epsilon) * w`` over the free axis, fp32 inside."""
    dt = _own_type(x, dtype)
    total = ndarray((x.shape[0], 1), float32)
    compute.activation_reduce(
        "square", x, reduce_op="add", reduce_res=total, dtype=float32, mask=mask
    )
    # ScalarE's scale and bias are free: rsqrt(total * 1/n + epsilon) is one instruction.
    eps = copies.memset((x.shape[0], 1), epsilon, float32)
    scale = compute.activation("rsqrt", total, scale=1.0 / n, bias=eps)
    normed = compute.tensor_scalar(x, "multiply", scale, dtype=float32, mask=mask)
    return _binary("multiply", normed, w, dt, mask)


named("var", var)
named("logical_and", all)
FUNCTIONS |= dict(all=all, mean=mean, rms_norm=rms_norm, softmax=softmax, var=var)
