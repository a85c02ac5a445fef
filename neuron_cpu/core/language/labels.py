"""``name=``: every function of ``nki.language`` and ``nki.isa`` takes it, as a label.

The documented signatures end in ``**kwargs`` (aws-neuron-sdk v2.21.1, general/nki/api/nki); public
kernels use it for this keyword. The label names the result in messages and reports.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..device.errors import NkiError, refuse
from ..device.unknown import KEYWORDS
from ..program.view import View


def labelled(function: Callable) -> Callable:
    """``function`` with the keyword ``name``, and refusals for arguments that it does not take."""
    return fitted(function, "name" not in inspect.signature(function).parameters)


def fitted(function: Callable, names: bool = False) -> Callable:
    """``function`` with refusals for arguments that it does not take, and its result's name."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.pop("name", "") if names else ""
        try:
            result = function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise _misfit(function, error, kwargs) from None
            raise
        if name and isinstance(result, View) and not result.storage.name:
            result.storage.name = name
        return result

    return call


_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")


def _misfit(function: Callable, error: TypeError, given: dict) -> NkiError:
    """Arguments that a function does not take (the call itself failed, no line of the function)."""
    wrong = _KEYWORD.search(str(error))
    names = list(inspect.signature(function).parameters)
    meant = KEYWORDS.get(wrong[1], "").split() if wrong else []
    right = next((one for one in meant if one in names), None)
    mend = f"the kernel language's keyword is {right}=" if right else "mend the call"
    if wrong and wrong[1] == "dst":
        mend = "this language returns the result, so assign it to a name"
    elif wrong and wrong[1] == "mask" and not right:
        mend = "leave elements out by slices of both sides"
    elif "missing" in str(error) and function.__name__ == "store":
        mend = "a store takes a tensor in HBM and the tile that goes there"
    elif "missing" in str(error) and names[:1] == ["dst"] and "dst" not in given:
        mend = "nothing is returned: give a tile of nl.ndarray as dst=, and the rest by name"
    return refuse(
        "sim_arguments",
        f"{' '.join(str(error).split())}, expected {function.__name__}({', '.join(names)}); {mend}",
    )


def label_all(namespace: dict[str, Any], names: list[str]) -> None:
    """Give the functions among ``names`` the keyword and the refusals."""
    for key in names:
        function = namespace[key]
        if isinstance(function, FunctionType):
            namespace[key] = labelled(function)
