"""Numbers among the arguments of functions, and the refusal of anything else."""

from collections.abc import Sequence
from typing import Any

from ..device.errors import refuse
from ..instructions.arguments import number
from ..program.index import is_integer
from ..program.view import View


def _told(value: Any) -> str:
    return value.label() if isinstance(value, View) else f"{type(value).__name__}"


def real(value: Any, what: str) -> float:
    """``value`` as a float."""
    value = number(value)
    if isinstance(value, (int, float)):
        return float(value)
    raise refuse("sim_number", f"{what} is a {_told(value)}, expected a number")


def whole(value: Any, what: str) -> int:
    """``value`` as an int, known while building."""
    if is_integer(value) or isinstance(value, bool):
        return int(value)
    raise refuse("sim_number", f"{what} is a {_told(value)}, expected an integer")


def flag(value: Any, what: str) -> bool:
    """``value`` as True or False, known while building."""
    if is_integer(value) or isinstance(value, bool):
        return bool(value)
    raise refuse("sim_number", f"{what} is a {_told(value)}, expected True or False")


def several(value: Any, what: str) -> Sequence[Any]:
    """``value`` as a list or tuple of values."""
    if isinstance(value, (list, tuple)):
        return value
    raise refuse("sim_sequence", f"{what} is a {_told(value)}, expected a list or tuple")


def wholes(value: Any, what: str) -> list[int]:
    """``value`` as integers."""
    return [whole(one, what) for one in several(value, what)]


def pairs(pattern: Any, what: str) -> list[tuple[int, int]]:
    """``[[step, num], ...]`` as pairs of integers."""
    found = []
    for pair in several(pattern, what):
        step, num = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        found.append((whole(step, f"step of {what}"), whole(num, f"count of {what}")))
    return found
