"""Refusals of the SDK stand-in: each is one sentence that says what, expected, got and the mend."""

import difflib
from collections.abc import Iterable

# What installs PyTorch without CUDA.
CPU_TORCH = (
    "PyTorch is not installed, expected it beside neuron_cpu; pip install uv==0.13.9 && uv pip "
    "install --torch-backend cpu torch takes the CPU build, 0.2 GB where pip alone takes 2.8."
)


def nearest(name: str, known: Iterable[str], otherwise: str = "correct it") -> str:
    """What a misspelt name is to be written as."""
    names = list(known)
    close = [one for one in names if one.startswith(name)][:1]
    close = close or difflib.get_close_matches(name, names, 1, 0.5)
    return f"write {close[0]}" if close else otherwise


class StandInError(RuntimeError):
    """Base of every refusal of the stand-in outside kernels; `str(error)` is the whole sentence."""


class CompileError(StandInError):
    """Something that the device's compiler would reject, or could not represent in a graph."""


class CheckpointError(StandInError):
    """A checkpoint that does not fit the model: a missing file or a tensor of another shape."""


class CollectiveError(StandInError):
    """A collective outside of the ranks that it is between."""


class UnwritableError(StandInError):
    """A file or folder that cannot be written: no permission, no space, or something in the way."""


class UsageError(StandInError):
    """A command line that cannot be carried out."""
