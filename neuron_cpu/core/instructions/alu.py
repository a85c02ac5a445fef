"""Operators of the ALU (steps of VectorE and GpSimdE), and activation functions of ScalarE.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst (supported math operators).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..device.errors import look_at, refuse, warn


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
# Functions of both languages on two operands, and what they compute.
BINARY = {
    "add": "x + y",
    "subtract": "x - y",
    "multiply": "x * y",
    "maximum": "The larger one",
    "minimum": "The smaller one",
    "power": "x to the power of y (two tiles: on GpSimdE)",
    "mod": "x modulo y, of the sign of y",
    "fmod": "The remainder of C, of the sign of x",
    "equal": "1 where x == y, else 0",
    "not_equal": "1 where x != y, else 0",
    "less": "1 where x < y, else 0",
    "less_equal": "1 where x <= y, else 0",
    "greater": "1 where x > y, else 0",
    "greater_equal": "1 where x >= y, else 0",
    "bitwise_and": "Bits of both integers",
    "bitwise_or": "Bits of either integer",
    "bitwise_xor": "Bits of one of the integers",
    "left_shift": "x shifted left, of integers",
    "right_shift": "x shifted right, of integers, zeros coming in",
    "logical_and": "1 where both are nonzero",
    "logical_or": "1 where either is nonzero",
    "logical_xor": "1 where one of them is nonzero",
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


FEW = 8  # elements that PyTorch adds up faster than numpy: 7 calls


def added_in_order(x: torch.Tensor, axes: int) -> torch.Tensor:
    """Sums of the last axes, one element after the other in fp32.

    A trn1 gave these bits in 16,384 published rows of tensor_reduce, where pairwise sums differ.
    """
    rows = x.flatten(-axes) if axes > 1 else x
    if rows.shape[-1] <= FEW:  # calls that a plan's short form records
        return _fold(torch.add, rows, (-1,)).clone()
    if rows.numel() == rows.shape[-1]:  # numpy would add a single row in pairs
        return torch.from_numpy(np.add.accumulate(rows.numpy(), axis=-1)[..., -1].copy())
    return torch.from_numpy(np.add.reduce(rows.movedim(-1, 0).contiguous().numpy(), axis=0))


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


# --- activation functions of ScalarE, and the inputs that they are specified for ------------------
# Source: the same page, supported activation functions.
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


# torch.sigmoid, softplus, mish and gelu give other last bits in vector lanes than in the scalar
# tail of a loop: a value's result would depend on where it lies, and merged loops would differ.
# These are built from functions that do not (exp, log1p, tanh, erf); they stay within 2e-7 of
# float64 (relative; gelu absolute).
def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp, of -infinity where results would underflow: torch is three times slower there."""
    # half of the smallest fp32 is exp(-103.97)
    return torch.exp(torch.nn.functional.threshold(x, -110.0, -math.inf))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.reciprocal(1.0 + torch.exp(-x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))  # beyond 20 both round to x


def _gelu_dx(x: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _silu_dx(x: torch.Tensor, slope: float = 1.0) -> torch.Tensor:
    s = _sigmoid(slope * x)
    return s * (1 + slope * x * (1 - s))


def _sin(x: torch.Tensor) -> torch.Tensor:
    """Sine inside [-pi, pi]; outside, the odd polynomial that fits it there runs away.

    Later documentation gives sin(9) as about 27.65 on ScalarE. The polynomial's coefficients are
    not public; the Taylor polynomial of degree 11 (sin(9) = -1144) has the same character: values
    outside are visibly wrong, not a wrapped sine.
    """
    inside = x.abs() <= math.pi + 1e-6
    if bool(inside.all()):
        return torch.sin(x)
    square = x * x
    series = x * (1 - square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72))))
    return torch.where(inside, torch.sin(x), series)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: x,
    "square": torch.square,
    "sigmoid": _sigmoid,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_dx": _gelu_dx,
    "gelu_apprx_tanh": lambda x: 0.5
    * x
    * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))),
    "gelu_apprx_sigmoid": lambda x: x * _sigmoid(1.702 * x),
    "gelu_apprx_sigmoid_dx": lambda x: _silu_dx(x, 1.702),
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "exp": _exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "softplus": _softplus,
    "mish": lambda x: x * torch.tanh(_softplus(x)),
    "erf": torch.erf,
    "erf_dx": lambda x: 2.0 / math.sqrt(math.pi) * torch.exp(-x * x),
    "sin": _sin,
    "arctan": torch.atan,
    "sign": torch.sign,
    "abs": torch.abs,
}
# Inputs for which ScalarE's polynomials are stated (nki.api.shared.rst, v2.22 and later), as
# magnitudes for SIGNED_INPUTS. sqrt(0) is 0 on every implementation and common: zero passes there.
ACTIVATION_RANGES: dict[str, tuple[float, float]] = {
    "sin": (0.0, math.pi),
    "arctan": (0.0, math.pi / 2),
    "log": (2.0**-64, 2.0**64),
    "sqrt": (0.0, 2.0**100),
    "rsqrt": (2.0**-87, 2.0**97),
    "reciprocal": (2.0**-42, 2.0**42),
}
SIGNED_INPUTS = frozenset({"sin", "arctan", "reciprocal"})


def check_range(op: str, x: torch.Tensor, mask: np.ndarray | None) -> None:
    """Warn of inputs outside of a function's stated range, where the kernel's line is known.

    NaN stands for elements that nobody wrote, and those outside of ``mask`` are not computed.
    """
    if op in ACTIVATION_RANGES:
        look_at(lambda values: _look_at_range(op, values, mask), x)


def _look_at_range(op: str, x: np.ndarray, mask: np.ndarray | None) -> None:
    low, high = ACTIVATION_RANGES[op]
    most = high * (1 + 2.0**-20)  # pi itself rounds up in fp32
    signed = op in SIGNED_INPUTS
    # One pass decides for most tiles; only magnitudes of both signs that may be too small need two.
    if x.min() >= (-most if signed and not low else low) and x.max() <= most:
        return
    size = np.abs(x) if signed else x
    outside = (size < low) | (size > most)
    if mask is not None:
        outside &= mask
    if outside.any():
        sign = "+-" if signed else ""
        got = float(x[outside][0])
        warn(
            "sim_activation_range",
            f"{op} of {got:.6g}, expected {sign}[{low:.6g}, {high:.6g}], outside of which "
            "ScalarE is not specified; reduce the argument or clamp it first",
        )


def no_activation(code: str) -> Exception:
    """The refusal of an operator that ScalarE has no function for."""
    mend = "compose it from those (cos(x) = sin(x + pi/2))"
    if code in ARITHMETIC or code in BITWISE:
        mend = "use nisa.tensor_tensor for two tiles, nisa.tensor_scalar for a tile and a number"
    return refuse(
        "sim_activation_function",
        f"activation function 'nl.{code}' does not exist on ScalarE, expected one of "
        f"{', '.join(sorted(ACTIVATIONS))}; {mend}",
    )
