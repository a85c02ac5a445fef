"""How far a result is from the reference in float64, element by element."""

from dataclasses import dataclass

import numpy as np
import torch

from .patterns import pattern

# Largest error that is accepted by default, by the coarsest floating-point type among a kernel's
# arguments and results: four spacings at 1 of bf16 and fp16, for several roundings one after
# another; one and a half roundings of fp8 e4m3; for fp32 what long sums in another order differ by,
# with room. An error is relative to the element, or to the size of its row (`measure`).
TOLERANCES = {
    torch.bfloat16: 2.0**-5,
    torch.float16: 2.0**-8,
    torch.float32: 1e-4,
    torch.float8_e4m3fn: 0.1,
    torch.float8_e5m2: 0.2,
}
ROW = 8  # elements from which on a last axis is a row of its own
# A kernel may be SLACK times as bad as the reference in the kernel's own types, where that is worse
# than the tolerance, up to CAP tolerances: a chain of operations that each round loses more. In
# fp32 up to CAP32: of a rounding, 6e-8, of scores of 1e4 softmax makes errors of 6e-4.
SLACK, CAP, CAP32 = 2.0, 4.0, 16.0
NEAR = 256  # that a sum on the way may be larger than what it gives


def default_tolerance(types: list[torch.dtype]) -> float:
    """The largest of the `TOLERANCES` of these types; 0 where none is floating-point."""
    return max((TOLERANCES.get(t, 0.0) for t in types), default=0.0)


@dataclass
class Accuracy:
    """Errors of one result.

    Attributes:
        largest: largest error of an element: relative to the element or the RMS of its row,
            whichever is larger; absolute for integers.
        rms: root of the mean square of the differences over that of the expected values.
        bound: what `largest` may be.
        wrong: elements with a larger error.
        judged: elements that were judged.
        first: index of the first wrong element, None without one.
        got, expected: that element, or the worst one.
        pattern: what the wrong elements look like (`patterns.pattern`), "" without any.
    """

    largest: float
    rms: float
    bound: float
    wrong: int
    judged: int
    first: tuple[int, ...] | None
    got: float
    expected: float
    pattern: str = ""

    @property
    def correct(self) -> bool:
        return self.wrong == 0


def measure(
    got: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    tolerance: float,
    plain: torch.Tensor | None = None,
    nan_is_asked: bool = False,
) -> Accuracy:
    """Compare a result with the reference's.

    Values beyond the result's type, infinities included, count as its largest finite value. An
    element is not judged where the reference in float64 is NaN (unless `nan_is_asked`: then NaN is
    expected), and where the reference in the kernel's own types overflows although float64 does
    not: there no implementation in these types is better. A reference that computes in float64
    whatever it is given does not show that, so a row in which the result overflows is left out,
    too, if it is expected to come within `NEAR` of the largest value.

    Args:
        got: the kernel's result, any type, of the shape of `expected`.
        expected: float64.
        dtype: of the kernel's result.
        tolerance: accepted error; more where `plain` has more (`SLACK`, `CAP`).
        plain: float64 copy of the reference's result in the kernel's own types.
    """
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.inf
    got, right = got.to(torch.float64).clamp(-most, most), expected.clamp(-most, most)
    judged = ~right.isnan()
    if nan_is_asked:
        judged = torch.ones_like(judged)
    elif plain is not None:
        judged &= plain.isfinite() | ~expected.isfinite()
    if dtype.is_floating_point and right.ndim:
        passed = ((got.abs() >= most) & (right.abs() < most)).any(-1, keepdim=True)
        judged &= ~(passed & (right.abs() >= most / NEAR).any(-1, keepdim=True))
    if dtype.is_floating_point:
        errors = _errors(got, right, judged, dtype)
    else:
        errors, tolerance, plain = (got - right).abs_().masked_fill_(~judged, 0.0), 0.0, None
    bound = tolerance
    if plain is not None:
        usual = _errors(plain.clamp(-most, most), right, judged & plain.isfinite(), dtype)
        worst = float(usual.max()) if usual.numel() else 0.0
        cap = CAP if tolerance > TOLERANCES[torch.float32] else CAP32
        bound = max(bound, min(SLACK * worst, cap * tolerance))
    return _summary(got, right, errors, judged, bound)


def _errors(
    got: torch.Tensor, right: torch.Tensor, judged: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Differences over the larger of the element and its row's RMS; a NaN in one is infinite."""
    known = torch.where(judged, right, 0.0).nan_to_num_(nan=0.0)
    square = known.square()
    whole = square.mean().sqrt() if square.numel() else square.sum()
    in_rows = known.ndim > 0 and known.shape[-1] >= ROW
    size = square.mean(-1, keepdim=True).sqrt() if in_rows else whole
    # Rows of zeros between others are held to one spacing of the whole result, a result of nothing
    # but zeros to 1.
    floor = float(whole) * torch.finfo(dtype).eps or 1.0
    scale = torch.maximum(known.abs_(), size).clamp_(min=floor)
    same = (got == right) | (got.isnan() & right.isnan())
    apart = (got - right).abs_().div_(scale).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return apart.masked_fill_(same | ~judged, 0.0)


def _summary(
    got: torch.Tensor, right: torch.Tensor, errors: torch.Tensor, judged: torch.Tensor, bound: float
) -> Accuracy:
    if not errors.numel():
        return Accuracy(0.0, 0.0, bound, 0, 0, None, 0.0, 0.0)
    wrong = errors > bound
    at = int(wrong.reshape(-1).to(torch.int8).argmax()) if wrong.any() else int(errors.argmax())
    where = tuple(int(i) for i in np.unravel_index(at, errors.shape))  # PyTorch's imports sympy
    known = torch.where(judged, right, 0.0).nan_to_num_(nan=0.0)
    apart = (got - right).masked_fill_(~judged | (errors == 0), 0.0)
    size = float(known.square_().mean().sqrt())
    rms = float(apart.nan_to_num_(nan=torch.inf).square_().mean().sqrt())
    return Accuracy(
        largest=float(errors.max()),
        rms=rms / size if size else rms,
        bound=bound,
        wrong=int(wrong.sum()),
        judged=int(judged.sum()),
        first=where if wrong.any() else None,
        got=float(got[where]),
        expected=float(right[where]),
        pattern=pattern(got.numpy(), right.numpy(), wrong.numpy(), bound) if wrong.any() else "",
    )
