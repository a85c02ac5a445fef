"""Numbers of a command line: types for argparse, whose errors name the expected form."""

import argparse
import math

LARGEST = 2**31 - 1  # of a whole number that may become a size of a tensor


def shown(text: str) -> str:
    """A user's text in few characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def positive(text: str) -> int:
    """A whole number of at least 1, and small enough for a tensor's size."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 1 to {LARGEST}, got {shown(text)}"
        )
    return value


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {shown(text)}")
    return value


def at_least_zero(text: str) -> float:
    """A finite number of at least 0."""
    value = finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {shown(text)}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {shown(text)}")
    return value


def seed(text: str) -> int:
    """A seed for torch.manual_seed: a whole number of 64 bits."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**64:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 to 2^64 - 1, got {shown(text)}"
        )
    return value
