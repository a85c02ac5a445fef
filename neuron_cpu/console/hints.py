"""Hints to Python errors in files of strangers: what mends the line."""

from .. import libraries


def hint(error: BaseException) -> str:
    """What mends the error; empty where nothing is known to help, or where it says so itself."""
    from ..core.device.pythons import mend

    if "; " in str(error):
        return ""
    if isinstance(error, SystemExit):
        return "take out what ends the program; a kernel ends by returning its results"
    if isinstance(error, ModuleNotFoundError):
        lacks = f"install {error.name}, or leave it out: kernels import nki and numpy"
        return libraries.lacking(error) or mend(error) or lacks
    return mend(error)
