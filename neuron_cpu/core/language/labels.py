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

from ..device.errors import NkiError, refuse, users_frames
from ..device.target import needs
from ..device.unknown import CALLS, KEYWORDS
from ..instructions.entry import FORMS, Form
from ..program import trace
from ..program.view import View
from .operands import newer


def labelled(function: Callable, form: Form | None = None) -> Callable:
    """``function`` with the keyword ``name``, and refusals for arguments that it does not take; of
    a form also with the warning of earlier releases and the refusal of earlier generations."""
    return fitted(function, "name" not in inspect.signature(function).parameters, form)


def fitted(function: Callable, names: bool = False, form: Form | None = None) -> Callable:
    """``function`` with refusals for arguments that it does not take, and its result's name."""
    came, generation = (form.came, form.generation) if form is not None else ("", 2)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # as in a kernel's call
        name = kwargs.pop("name", "") if names else ""
        try:
            if generation > 2:
                needs(function.__name__, generation)
            if came:
                newer(function.__name__, came)
            result = function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise _misfit(function, error, kwargs) from None
            raise
        except NkiError as error:
            if trace.active() is None:  # no kernel's call takes the entries of ours away
                raise error.with_traceback(users_frames(error)) from None
            raise
        if name and isinstance(result, View) and not result.storage.name:
            result.storage.name = name
        return result

    return call


_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")
_QUOTED = re.compile(r"'(\w+)'")


def _misfit(function: Callable, error: TypeError, given: dict) -> NkiError:
    """Arguments that a function does not take (the call itself failed, no line of the function)."""
    told = " ".join(str(error).split())
    wrong = _KEYWORD.search(told)
    names = list(inspect.signature(function).parameters)
    meant = KEYWORDS.get(wrong[1], "").split() if wrong else []
    right = next((one for one in meant if one in names), None)
    mend = CALLS.get(wrong[1] if wrong else function.__name__, "")
    if right:
        mend = f"the kernel language's keyword is {right}="
    elif not mend and "missing" in told and names[:1] == ["dst"] and "dst" not in given:
        mend = "nothing is returned: give a tile of nl.ndarray as dst=, and the rest by name"
    elif not mend and "missing" in told:
        mend = f"add {', '.join(f'{name}=' for name in _QUOTED.findall(told))}"
    return refuse(
        "sim_arguments",
        f"{told}, expected {function.__name__}({', '.join(names)}); "
        f"{mend or 'give each once, and by its name'}",
    )


def exported() -> dict[str, Callable]:
    """The functions that ``neuronxcc.nki.isa`` offers: the forms of its instructions."""
    forms = FORMS["neuronxcc.nki.isa"]
    return {name: labelled(one.function, one) for name, one in forms.items()}


def label_all(namespace: dict[str, Any], names: list[str]) -> None:
    """Give the functions among ``names`` the keyword and the refusals."""
    for key in names:
        function = namespace[key]
        if isinstance(function, FunctionType):
            namespace[key] = labelled(function)
