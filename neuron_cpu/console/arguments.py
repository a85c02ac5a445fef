"""Values of a command line: types for argparse, whose errors name the expected form."""

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # of a whole number that may become a size of a tensor


def shown(text: str) -> str:
    """A user's text in few characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _number(kind: type, text: str, expected: str, fits: Callable[[Any], bool]) -> Any:
    """The number of a text, where it is one that `fits`."""
    with contextlib.suppress(ValueError):
        value = kind(text)
        if fits(value):
            return value
    raise argparse.ArgumentTypeError(f"expected {expected}, got {shown(text)}")


def positive(text: str) -> int:
    """A whole number of at least 1, and small enough for a tensor's size."""
    return _number(int, text, f"a whole number from 1 to {LARGEST}", lambda n: 1 <= n <= LARGEST)


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    return _number(float, text, "a finite number", math.isfinite)


def at_least_zero(text: str) -> float:
    """A finite number of at least 0."""
    return _number(float, text, "a finite number of at least 0", lambda x: 0 <= x < math.inf)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    return _number(float, text, "a finite number above 0", lambda x: 0 < x < math.inf)


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    return _number(float, text, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def seed(text: str) -> int:
    """A seed for torch.manual_seed: a whole number of 64 bits."""
    return _number(int, text, "a whole number from 0 to 2^64 - 1", lambda n: 0 <= n < 2**64)


def path(text: str) -> Path:
    """A path with `~` resolved."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a path, got {shown(text)}: {str(error).rstrip('.')}"
        ) from error
