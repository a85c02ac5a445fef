"""The one exception that the harness raises for bad input."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: `str(error)` is one sentence for the user; the driver exits with status 2."""


def is_refusal(error: BaseException) -> bool:
    """Whether `str(error)` is one sentence for the user: the harness's own or the stand-in's."""
    if isinstance(error, UserError):
        return True
    return any(kind.__module__.split(".")[0] == "neuron_cpu" for kind in type(error).__mro__)
