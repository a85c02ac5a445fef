"""ALU operators: the functions of one step of VectorE and GpSimdE.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst (supported math operators).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _logical(fn: Callable) -> Callable:
    return lambda a, b: fn(a != 0, b != 0).to(torch.float32)


def _compare(fn: Callable) -> Callable:
    return lambda a, b: fn(a, b).to(torch.float32)


ARITHMETIC: dict[str, Callable] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": lambda a, b: torch.pow(a.double(), b.double()).to(a.dtype),  # the same in any place
    "equal": _compare(torch.eq),
    "not_equal": _compare(torch.ne),
    "greater": _compare(torch.gt),
    "greater_equal": _compare(torch.ge),
    "less": _compare(torch.lt),
    "less_equal": _compare(torch.le),
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "logical_xor": _logical(torch.logical_xor),
    "rsqrt": lambda a, b: torch.rsqrt(a + b),
    "abs": lambda a, b: torch.abs(a),
    "reciprocal": lambda a, b: torch.reciprocal(a),
    "logical_not": lambda a, b: (a == 0).to(torch.float32),
    "mod": torch.remainder,
    "fmod": torch.fmod,
}
BITWISE: dict[str, Callable] = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "invert": lambda a, b: torch.bitwise_not(a),
}
# Operators of later generations: the signed operand of larger (smaller) magnitude, the second on a
# tie; and two of one operand (aws-neuron-sdk v2.32.0, nki/api/nki/language).
LATER: dict[str, Callable] = {
    "abs_max": lambda a, b: torch.where(a.abs() > b.abs(), a, b),
    "abs_min": lambda a, b: torch.where(a.abs() < b.abs(), a, b),
    "square": lambda a, b: torch.square(a),
    "relu": lambda a, b: torch.relu(a),
}
COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
OPERATORS = frozenset({*ARITHMETIC, *BITWISE, *LATER})
REDUCTIONS: dict[str, Callable] = {
    "add": lambda x, d: x.sum(dim=d),
    "subtract": lambda x, d: x.narrow(-1, 0, 1).squeeze(-1) * 2 - x.sum(dim=d),
    "multiply": lambda x, d: _fold(torch.mul, x, d),
    "maximum": lambda x, d: x.amax(dim=d),
    "minimum": lambda x, d: x.amin(dim=d),
    "logical_and": lambda x, d: (x != 0).flatten(-len(d)).all(dim=-1).to(torch.float32),
    "logical_or": lambda x, d: (x != 0).flatten(-len(d)).any(dim=-1).to(torch.float32),
    "logical_xor": lambda x, d: ((x != 0).sum(dim=d) % 2).to(torch.float32),
    "bitwise_and": lambda x, d: _fold(torch.bitwise_and, x, d),
    "bitwise_or": lambda x, d: _fold(torch.bitwise_or, x, d),
    "bitwise_xor": lambda x, d: _fold(torch.bitwise_xor, x, d),
}


def _fold(fn: Callable, x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    flat = x.flatten(-len(dims)) if len(dims) > 1 else x
    total = flat[..., 0]
    for k in range(1, flat.shape[-1]):
        total = fn(total, flat[..., k])
    return total


def reduce_last(op: str, x: torch.Tensor, axes: int) -> torch.Tensor:
    """Reduce the last ``axes`` axes with ALU operator ``op``."""
    if op == "subtract" and axes > 1:
        x, axes = x.flatten(-axes), 1
    return REDUCTIONS[op](x, tuple(range(-axes, 0)))


def added_in_order(x: torch.Tensor, axes: int) -> torch.Tensor:
    """Sums of the last axes, one element after the other in fp32.

    A trn1 gave these bits in 16,384 published rows of tensor_reduce, where pairwise sums differ.
    """
    rows = x.flatten(-axes) if axes > 1 else x
    if rows.numel() == rows.shape[-1]:  # numpy would add a single row in pairs
        return torch.from_numpy(np.add.accumulate(rows.numpy(), axis=-1)[..., -1].copy())
    first = rows.movedim(-1, 0).contiguous().numpy()
    return torch.from_numpy(np.add.reduce(first, axis=0))


def alu(op: str, a: torch.Tensor, b: Any) -> torch.Tensor:
    """One ALU step; ``b`` is a tensor or a number."""
    fn = BITWISE.get(op) or ARITHMETIC.get(op) or LATER[op]
    if not isinstance(b, torch.Tensor):
        b = torch.tensor(b, dtype=a.dtype)
    return fn(a, b)


def named(name: str, function: Callable) -> Callable:
    """Mark a function as operator ``name``, so that it can be passed as ``op=``."""
    function.__name__ = function.__qualname__ = name
    function.nki_name = name  # type: ignore[attr-defined]
    return function
