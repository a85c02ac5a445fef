"""The one exception that the harness raises for bad input."""

from collections.abc import Mapping


class UserError(Exception):
    """Bad input: `str(error)` is one sentence for the user; the driver exits with status 2."""


def is_refusal(error: BaseException) -> bool:
    """Whether `str(error)` is one sentence for the user: the harness's own or the stand-in's."""
    if isinstance(error, UserError):
        return True
    return any(kind.__module__.split(".")[0] == "neuron_cpu" for kind in type(error).__mro__)


def words_of(error: BaseException) -> str:
    """What an error says, on one line; the name of its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def at_most(flag: str, value: int, most: int, what: str = "") -> None:
    """A UserError of a number beyond its limit; `what` says whose the limit is."""
    if value > most:
        raise UserError(f"{flag} must be at most {most}{what}, got {value}; write {flag} {most}.")


def refuse_any(given: Mapping[str, object], sentence: str) -> None:
    """A UserError of the first name whose value holds; `{}` in the sentence stands for it."""
    for name, held in given.items():
        if held:
            raise UserError(sentence.format(name))
