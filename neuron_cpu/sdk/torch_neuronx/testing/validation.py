"""Compares a model's logits with expected ones, with teacher forcing at each divergence.

Tolerances and rules follow the onboarding guide of aws-neuron-sdk v2.21.1
(libraries/nxd-inference/developer_guides/onboarding-models.rst) and NxDI's calls.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

ToleranceMap = dict[int | None, tuple[float, float]]

# k largest expected logits (None: all) -> (atol, rtol)
DEFAULT_TOLERANCE_MAP: ToleranceMap = {
    5: (1e-5, 0.01),
    50: (1e-5, 0.02),
    1000: (1e-5, 0.03),
    None: (1e-5, 0.05),
}
DEFAULT_DIVERGENCE_DIFFERENCE_TOLERANCE = 0.001


def _decimals(value: float) -> int:
    """The number of decimals of `value`: 2 for 0.05."""
    return max(1, len(f"{value:.12f}".rstrip("0").split(".")[1]))


def custom_allclose(
    expected: torch.Tensor, actual: torch.Tensor, atol: float, rtol: float
) -> tuple[bool, float]:
    """Whether (|actual - expected| - atol) / max |expected| stays within `rtol`, and its maximum.

    The error is rounded to `rtol`'s number of decimals first, so that rtol 0.05 accepts up to about
    0.055. Both tensors have one shape; fp64 compares them.
    """
    expected, actual = expected.double(), actual.double()
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    error = float((((actual - expected).abs() - atol) / largest).max().clamp_min(0.0))
    return round(error, _decimals(rtol)) <= rtol, error


class AllCloseSummary(NamedTuple):
    """Whether two tensors agree, and their distance (NxDI 0.9 reads both)."""

    allclose: bool
    max_rel_error: float


def neuron_allclose(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 0.01, atol: float = 1e-5
) -> AllCloseSummary:
    """`custom_allclose` with named results; the defaults are assumed."""
    return AllCloseSummary(*custom_allclose(expected, actual, atol, rtol))


def _remove_shift(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """`actual` (V,) without the constant offset of a least-squares fit on `expected` (V,)."""
    expected, actual = expected.double(), actual.double()
    centred = expected - expected.mean()
    variance = (centred * centred).sum()
    if variance == 0:
        return actual - (actual.mean() - expected.mean())
    slope = (centred * (actual - actual.mean())).sum() / variance
    return actual - (actual.mean() - slope * expected.mean())


def _check_token(
    expected: torch.Tensor, actual: torch.Tensor, tol_map: ToleranceMap, divergence_tol: float
) -> dict:
    """The verdict on one position of one row; expected and actual are (V,) logits."""
    finite = torch.isfinite(expected) & torch.isfinite(actual)
    expected, actual = expected[finite].double(), actual[finite].double()
    shifted = _remove_shift(expected, actual)
    order = torch.argsort(expected, descending=True, stable=True)
    result: dict = {"passed": True, "errors": {}, "divergence_difference": 0.0}
    for top_k, (atol, rtol) in tol_map.items():
        chosen = order if top_k is None else order[:top_k]
        passed, error = custom_allclose(expected[chosen], shifted[chosen], atol, rtol)
        result["errors"][top_k] = error
        result["passed"] &= passed
    actual_best, expected_best = int(actual.argmax()), int(expected.argmax())
    if actual_best != expected_best:
        difference = float((actual[actual_best] - actual[expected_best]).abs())
        result["divergence_difference"] = difference
        result["passed"] &= difference < divergence_tol
    return result


def _first_divergence(expected: torch.Tensor, actual: torch.Tensor) -> int:
    """The positions to validate, up to and including a row's first other greedy token."""
    differs = (expected.argmax(dim=-1) != actual.argmax(dim=-1)).any(dim=-1)  # (T,)
    return int(differs.int().argmax()) + 1 if bool(differs.any()) else len(expected)


def _status(results: list[list[dict]], tol_map: ToleranceMap, divergence_tol: float) -> str:
    """A short report: failed positions, and the largest error of each top-k set."""
    flat = [token for position in results for token in position]
    failed = [i for i, position in enumerate(results) if not all(t["passed"] for t in position)]
    lines = [f"Validated {len(results)} positions of {len(results[0]) if results else 0} rows."]
    for top_k, (_, rtol) in tol_map.items():
        worst = max((token["errors"][top_k] for token in flat), default=0.0)
        rounded, name = round(worst, _decimals(rtol)), "all" if top_k is None else top_k
        lines.append(f"Top {name}: error {worst:.5f}, rounded {rounded}, limit {rtol}.")
    worst = max((token["divergence_difference"] for token in flat), default=0.0)
    lines.append(f"Divergence difference {worst:.5f}, limit {divergence_tol}.")
    lines.append(f"Positions that failed: {failed}." if failed else "Every position passed.")
    return "\n".join(lines)


def logit_validation(
    input_ids: torch.Tensor,
    generate_fn: Callable[[torch.Tensor], torch.Tensor],
    expected_logits: torch.Tensor,
    tol_map: ToleranceMap | None = None,
    divergence_difference_tol: float | None = None,
) -> tuple[bool, list[list[dict]], str]:
    """Compare generated logits with `expected_logits` (T, B, V), forcing the expected tokens.

    `generate_fn(input_ids)` gets (B, L) ids and returns the logits (>= 1, B, V) of the tokens after
    them. Positions are validated up to and including the first greedy divergence. Then the expected
    tokens join the input and generation starts again, until all T positions are covered. Returns
    (passed, results[position][row], message).
    """
    tol_map = DEFAULT_TOLERANCE_MAP if tol_map is None else tol_map
    if divergence_difference_tol is None:
        divergence_difference_tol = DEFAULT_DIVERGENCE_DIFFERENCE_TOLERANCE
    total = expected_logits.shape[0]
    expected_ids = expected_logits.argmax(dim=-1).T  # (B, T)
    results: list[list[dict]] = []
    while len(results) < total:
        done = len(results)
        forced = torch.cat([input_ids, expected_ids[:, :done].to(input_ids.dtype)], dim=1)
        actual = generate_fn(forced)[: total - done]
        if len(actual) == 0:
            raise ValueError(
                f"generate_fn returned no logits for an input of {forced.shape[1]} tokens, "
                f"expected those of {total - done} more positions; let it generate to the end."
            )
        window = expected_logits[done : done + len(actual)]
        for position in range(_first_divergence(window, actual)):
            results.append(
                [
                    _check_token(want, got, tol_map, divergence_difference_tol)
                    for want, got in zip(window[position], actual[position], strict=True)
                ]
            )
    passed = all(token["passed"] for position in results for token in position)
    return passed, results, _status(results, tol_map, divergence_difference_tol)
