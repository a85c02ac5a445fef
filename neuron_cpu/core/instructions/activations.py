"""Activation functions of ScalarE and the inputs they are specified for.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst (supported activation functions).
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from ..device.errors import look_at, refuse, warn
from .alu import ARITHMETIC, BITWISE

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


# torch.sigmoid, softplus, mish and gelu give other last bits in vector lanes than in the scalar
# tail of a loop: a value's result would depend on where it lies, and merged loops would differ.
# These are built from functions that do not (exp, log1p, tanh, erf); they stay within 2e-7 of
# float64 (relative; gelu absolute).
def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp, with 0 where results would underflow: torch is eleven times slower there."""
    vanishes = x < -110.0  # half of the smallest fp32 is exp(-103.97)
    return torch.where(vanishes, 0.0, torch.exp(torch.where(vanishes, 0.0, x)))


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
