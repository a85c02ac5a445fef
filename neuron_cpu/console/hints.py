"""Hints to Python errors in a kernel: the name that the writer probably meant."""

import difflib
import types
from collections.abc import Iterable

from .. import libraries


def hint(error: BaseException) -> str:
    """`did you mean ...` or `use ...`; empty where nothing is known to help."""
    if isinstance(error, AttributeError) and error.name is not None:
        return _attribute(error)
    if isinstance(error, NameError):
        return _name(error)
    if told := libraries.lacking(error):
        return told
    if isinstance(error, SystemExit):
        return "take out what ends the program; a kernel ends by returning its results"
    return "look for a function that calls itself" if isinstance(error, RecursionError) else ""


def _attribute(error: AttributeError) -> str:
    kind = type(error.obj)
    owner = getattr(error.obj, "__name__", kind.__name__).rpartition(".")[2]
    names = [name for name in dir(error.obj) if not name.startswith("_")]
    close = difflib.get_close_matches(error.name or "", names, 1)
    prefix = f"{owner}." if isinstance(error.obj, types.ModuleType) else "."
    return f"did you mean {prefix}{close[0]}?" if close else ""


def _name(error: NameError) -> str:
    """The name that the frame has and that is nearest to the unknown one."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    wanted = getattr(error, "name", None)
    if place is None or not wanted:
        return ""
    known: Iterable[str] = {**place.tb_frame.f_globals, **place.tb_frame.f_locals}
    close = difflib.get_close_matches(wanted, [n for n in known if not n.startswith("_")], 1)
    return f"did you mean {close[0]}?" if close else ""
