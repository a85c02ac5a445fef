"""What a Python error in a kernel usually means: the name that was wanted."""

from __future__ import annotations

import difflib
import re
import types

# numpy and PyTorch say this when their functions get a tile.
_NUMPY = re.compile(r"has no callable (\w+) method")
_TORCH = re.compile(r"^(\w+)\(\).*must be Tensor, not \w+")


def hint(error: BaseException) -> str:
    """`did you mean ...` or `use ...`; empty where nothing is known to help."""
    text = str(error)
    if isinstance(error, AttributeError) and error.name is not None:
        owner = getattr(error.obj, "__name__", type(error.obj).__name__).rpartition(".")[2]
        names = [name for name in dir(error.obj) if not name.startswith("_")]
        close = difflib.get_close_matches(error.name, names, 1)
        prefix = {"language": "nl", "isa": "nisa"}.get(owner, owner)
        if close and isinstance(error.obj, types.ModuleType):
            return f"did you mean {prefix}.{close[0]}?"
        return f"did you mean .{close[0]}?" if close else ""
    if isinstance(error, TypeError):
        for pattern in (_NUMPY, _TORCH):
            found = pattern.search(text)
            if found:
                return f"in a kernel use nl.{found[1]}"
    return ""
