"""What a Python error in a kernel usually means: the name that was wanted."""

from __future__ import annotations

import difflib
import re
import sys
import types
from collections.abc import Iterable

# numpy and PyTorch say this when their functions get a tile.
_NUMPY = re.compile(r"has no callable (\w+) method")
_TORCH = re.compile(r"^(\w+)\(\).*must be Tensor, not \w+")
_FORMAT = "unsupported format string passed to Tensor."
_TRANSPOSED = ("T", "t", "mT", "transpose", "permute")
# Methods of arrays and PyTorch's tensors, and what a kernel has instead.
_METHODS = {"clone": "copy", "mm": "matmul", "dot": "matmul", "pow": "power", "to": "copy"}


def hint(error: BaseException) -> str:
    """`did you mean ...` or `use ...`; empty where nothing is known to help."""
    text = str(error)
    if isinstance(error, AttributeError) and error.name is not None:
        return _attribute(error)
    if isinstance(error, NameError):
        return _name(error)
    if isinstance(error, TypeError):
        if text.startswith(_FORMAT):
            return "a tensor has no values while a kernel is traced; nl.device_print shows them"
        for pattern in (_NUMPY, _TORCH):
            found = pattern.search(text)
            if found:
                return f"in a kernel use nl.{found[1]}"
    if isinstance(error, SystemExit):
        return "take out what ends the program; a kernel ends by returning its results"
    return "look for a function that calls itself" if isinstance(error, RecursionError) else ""


def _attribute(error: AttributeError) -> str:
    kind = type(error.obj)
    owner = getattr(error.obj, "__name__", kind.__name__).rpartition(".")[2]
    names = [name for name in dir(error.obj) if not name.startswith("_")]
    close = difflib.get_close_matches(error.name, names, 1)
    prefix = {"language": "nl", "isa": "nisa"}.get(owner, owner)
    if isinstance(error.obj, types.ModuleType):
        return f"did you mean {prefix}.{close[0]}?" if close else ""
    if kind.__name__ == "Tensor" and kind.__module__.startswith("neuron_cpu."):
        return _of_tensor(error.name) or (f"did you mean .{close[0]}?" if close else "")
    return f"did you mean .{close[0]}?" if close else ""


def _of_tensor(name: str) -> str:
    """What a kernel has for a method of arrays."""
    nl = sys.modules.get("neuronxcc.nki.language")
    if name in _TRANSPOSED:
        return "in a kernel use nl.transpose, or nl.load_transpose2d for a tensor in HBM"
    function = _METHODS.get(name, name)
    return f"in a kernel use nl.{function}" if hasattr(nl, function) else ""


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
