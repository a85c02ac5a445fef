"""Reductions over free axes, and the norms that are made of them.

They expand as the public tutorials do, so that costs and precision follow.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..device.dtypes import BOOL, FLOAT32, to_dtype
from ..instructions.alu import named
from ..program.view import View
from . import compute, copies
from .creation import ndarray
from .elementwise import multiply
from .operands import tile
from .types import float32


def _make_reduction(name: str, op: str) -> Callable:
    def apply(
        x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False
    ) -> View:
        return compute.tensor_reduce(
            op, tile(x, name), axis, dtype=dtype, mask=mask, keepdims=keepdims
        )

    apply.__doc__ = f"Reduce the last free axes with {op}, fp32 inside; result at least rank 2."
    return named(name, apply)


sum = _make_reduction("sum", "add")
max = _make_reduction("max", "maximum")
min = _make_reduction("min", "minimum")
prod = _make_reduction("prod", "multiply")


def _count(x: View, axis: Any) -> int:
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return int(np.prod([x.shape[a] for a in axes]))


def mean(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> View:
    """Mean over the last free axes; integers give fp32."""
    source = tile(x, "mean")
    dt = (source.dt if source.dt.is_float else FLOAT32) if dtype is None else to_dtype(dtype)
    total = compute.tensor_reduce("add", source, axis, dtype=float32, mask=mask, keepdims=keepdims)
    return compute.tensor_scalar(total, "multiply", 1.0 / _count(source, axis), dtype=dt)


def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """Population variance over the last free axes: mean of the squared distances to the mean."""
    source = tile(x, "var")
    dt = (source.dt if source.dt.is_float else FLOAT32) if dtype is None else to_dtype(dtype)
    count = _count(source, axis)
    total = compute.tensor_reduce("add", source, axis, dtype=FLOAT32, mask=mask, keepdims=True)
    centre = compute.tensor_scalar(total, "multiply", 1.0 / count, dtype=FLOAT32)
    apart = compute.tensor_tensor(
        source, centre.expand(source.shape), "subtract", dtype=FLOAT32, mask=mask
    )
    squares = compute.tensor_tensor(apart, apart, "multiply", dtype=FLOAT32, mask=mask)
    spread = compute.tensor_reduce("add", squares, axis, dtype=FLOAT32, mask=mask)
    return compute.tensor_scalar(spread, "multiply", 1.0 / count, dtype=dt)


def all(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None) -> View:
    """1 where all elements along the last free axes are nonzero; bool unless ``dtype``."""
    dt = BOOL if dtype is None else dtype
    return compute.tensor_reduce("logical_and", tile(x, "all"), axis, dtype=dt, mask=mask)


def softmax(
    x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None
) -> View:
    """Softmax over the last free axes: negated max, exp with bias and sum, reciprocal, product."""
    source = tile(x, "softmax")
    dt = source.dt if dtype is None else to_dtype(dtype)
    inner = FLOAT32 if compute_dtype is None else to_dtype(compute_dtype)
    peak = compute.tensor_reduce("maximum", source, axis, dtype=float32, negate=True, mask=mask)
    total = ndarray((source.shape[0], 1), float32)
    # One row of numbers per partition: the negated maximum is ScalarE's bias, and the sum comes
    # with the exponentials in one pass.
    if peak.free_size == 1:
        exps = compute.activation_reduce(
            "exp", source, bias=peak, reduce_op="add", reduce_res=total, dtype=inner, mask=mask
        )
        inverse = compute.reciprocal(total, dtype=float32)
        return compute.tensor_scalar(exps, "multiply", inverse, dtype=dt, mask=mask)
    # Several rows per partition: ScalarE takes one bias a partition, so VectorE subtracts and sums.
    shape = (*peak.shape, *(1,) * (source.ndim - peak.ndim))
    shifted = compute.tensor_tensor(
        source, peak.reshape(shape).expand(source.shape), "add", dtype=float32, mask=mask
    )
    exps = compute.activation("exp", shifted, dtype=inner, mask=mask)
    sums = compute.tensor_reduce("add", exps, axis, dtype=float32, mask=mask)
    inverse = compute.reciprocal(sums).reshape(shape).expand(source.shape)
    return compute.tensor_tensor(exps, inverse, "multiply", dtype=dt, mask=mask)


def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
) -> View:
    """``x * rsqrt(sum(x^2) / n + epsilon) * w`` over the free axis, fp32 inside."""
    source, weight = tile(x, "rms_norm"), tile(w, "rms_norm")
    dt = source.dt if dtype is None else to_dtype(dtype)
    total = ndarray((source.shape[0], 1), float32)
    compute.activation_reduce(
        "square", source, reduce_op="add", reduce_res=total, dtype=float32, mask=mask
    )
    # ScalarE's scale and bias are free: rsqrt(total * 1/n + epsilon) is one instruction.
    eps = copies.memset((source.shape[0], 1), epsilon, float32)
    scale = compute.activation("rsqrt", total, scale=1.0 / n, bias=eps)
    normed = compute.tensor_scalar(source, "multiply", scale, dtype=float32, mask=mask)
    return multiply(normed, weight, dtype=dt, mask=mask)


named("var", var)
named("logical_and", all)
