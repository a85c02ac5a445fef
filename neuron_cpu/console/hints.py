"""Hints to Python errors in files of strangers: what mends the line."""

import re
import sys

from .. import libraries

# Libraries whose names a kernel's file has from another one, too.
INSTEAD = {"jax": "write import numpy as jnp: numpy has jax.numpy's functions for a reference"}


def hint(error: BaseException) -> str:
    """What mends the error; empty where nothing is known to help, or where it says so itself."""
    from ..core.device.pythons import mend

    if "; " in str(error):
        return ""
    if isinstance(error, SystemExit):
        return "take out what ends the program; a kernel ends by returning its results"
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        lacks = f"install {package}, or leave it out: kernels import nki and numpy"
        return libraries.lacking(error) or mend(error) or INSTEAD.get(package, lacks)
    if isinstance(error, ImportError):
        return _of_import(error)
    return mend(error)


def _of_import(error: ImportError) -> str:
    """What stands in place of a name that a module of the SDK lacks."""
    module = sys.modules.get(error.name or "")
    for name in re.findall(r"cannot import name '(\w+)'", str(error)) if module else ():
        try:
            getattr(module, name)
        except AttributeError as unknown:
            mends = str(unknown).partition("; ")[2].rpartition(" [")[0]
            return f"take {name} out of the import, and {mends}" if mends else ""
    return ""
