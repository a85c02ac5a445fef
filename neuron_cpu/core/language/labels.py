"""``name=``: every function of ``nki.language`` and ``nki.isa`` takes it, as a label.

The documented signatures end in ``**kwargs`` (aws-neuron-sdk v2.21.1, general/nki/api/nki); public
kernels use it for this keyword. The label names the result in messages and reports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..program.view import View


def labelled(function: Callable) -> Callable:
    """``function`` with the keyword ``name``."""

    @functools.wraps(function)
    def call(*args: Any, name: str = "", **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if name and isinstance(result, View) and not result.storage.name:
            result.storage.name = name
        return result

    return call


def label_all(namespace: dict[str, Any], names: list[str]) -> None:
    """Give the functions among ``names`` the keyword, unless they have it already."""
    for key in names:
        function = namespace[key]
        if isinstance(function, FunctionType) and "name" not in function.__code__.co_varnames:
            namespace[key] = labelled(function)
