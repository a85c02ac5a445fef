"""Values of a command line: types for argparse, whose errors name the expected form."""

import argparse
import contextlib
import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # of a whole number that may become a size of a tensor


def shown(text: str) -> str:
    """A user's text in few characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _number(
    kind: type, expected: str, fits: Callable[[Any], bool], example: str
) -> Callable[[str], Any]:
    """The type of an argument that is a number which `fits`, as `example` does."""

    def number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if fits(value):
                return value
        parts = re.findall(r"\d+\.?\d*(?:e[-+]?\d+)?", text)
        if re.fullmatch(r"[\d.]+%", text):
            parts = [f"{float(text[:-1]) / 100:g}"]
        with contextlib.suppress(ValueError):
            parts = [part for part in parts if fits(kind(part))]
        raise argparse.ArgumentTypeError(
            f"expected {expected}, got {shown(text)}; write one such as {[*parts, example][0]}"
        )

    return number


# small enough for a tensor's size
positive = _number(int, f"a whole number from 1 to {LARGEST}", lambda n: 1 <= n <= LARGEST, "8")
finite = _number(float, "a finite number", math.isfinite, "1.0")
at_least_zero = _number(float, "a finite number of at least 0", lambda x: 0 <= x < math.inf, "0.5")
above_zero = _number(float, "a finite number above 0", lambda x: 0 < x < math.inf, "0.5")
share = _number(float, "a number above 0 and at most 1", lambda x: 0 < x <= 1, "0.5")
# for torch.manual_seed, of 64 bits
seed = _number(int, "a whole number from 0 to 2^64 - 1", lambda n: 0 <= n < 2**64, "0")


def mended(parser: argparse.ArgumentParser, message: str) -> str:
    """argparse's message, with the value that an option lacks or that is nearest to a wrong one."""
    said = r"argument (?:\S+/)?(--[\w-]+): (?:expected .*arg|invalid choice: '(.*?)')"
    if not (found := re.match(said, message)):
        return message
    action = parser._option_string_actions[found[1]]
    choices = list(map(str, action.choices or ()))
    meant = [action.metavar or "|".join(choices) or action.dest.upper()]
    if found[2] is not None:
        meant = difflib.get_close_matches(found[2].lower(), choices, 1)
    return f"{message}; write {found[1]} {meant[0]}" if meant else f"{message}; {action.help}"


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
