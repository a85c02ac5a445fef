"""The SDK release that kernels are checked for, and the rules that differ between releases.

``NEURON_CPU_SDK=2.21 ... 2.26`` chooses it for kernels of ``neuronxcc.nki``; the default is the
contest's, 2.21. Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki (release notes,
nki.errors.rst, API docstrings). ``NEURON_CPU_NKI=2.27 ... 2.33`` chooses it for kernels of ``nki``,
or a variable of that name in the kernel's own file; the default is the newest one.
"""

import functools
import os
import threading
from contextlib import AbstractContextManager

from .errors import NkiError, within

ENVIRONMENT_VARIABLE = "NEURON_CPU_SDK"
RELEASES = ("2.21", "2.22", "2.23", "2.24", "2.25", "2.26")


# What a release changed, and the first one in which it holds.
ZEROS_IN_SHARED_HBM_REFUSED = "2.22"  # nki.errors.rst: initial values of HBM tensors
IN_PLACE_OPERATORS_RELIABLE = "2.23"  # release notes; nki_known_issues.rst before
NO_REORDER = "2.23"  # nki.compiler.no_reorder exists
INTEGERS_ASKED_OF_GPSIMD = "2.23"  # release notes: it adds and multiplies 32-bit integers
INTEGERS_ON_GPSIMD = "2.26"  # nki.isa.tensor_tensor: they run there, and differences, too
BLOCK_AXES_DEPRECATED = "2.23"  # nki.errors.rst: the partition axis must come first


def chosen() -> str:
    """The release in force, as ``2.NN``.

    Raises:
        NkiError: the environment names a release that is not known here.
    """
    return _known(os.environ.get(ENVIRONMENT_VARIABLE, RELEASES[0]), ENVIRONMENT_VARIABLE, RELEASES)


def _known(release: str, variable: str, releases: tuple[str, ...]) -> str:
    if release not in releases:
        raise NkiError(
            "sim_unknown_release",
            f"{variable} is {release!r}, expected one of {', '.join(releases)}; leave it out for "
            f"{releases[0] if releases is RELEASES else releases[-1]}",
        )
    return release


def since(release: str) -> bool:
    """True where the release in force is ``release`` or a later one."""
    return RELEASES.index(chosen()) >= RELEASES.index(release)


# --- kernels of nki -------------------------------------------------------------------------------
NKI_VARIABLE = "NEURON_CPU_NKI"
NKI_RELEASES = ("2.27", "2.28", "2.29", "2.30", "2.31", "2.32", "2.33")
REAL_AXES = "2.29"  # tensor_reduce: axis 1 was the last one, whatever the rank
DOUBLED_SCALES = "2.31"  # quantize_mx: twice the scale of the OCP sample
TRACED = "2.33"  # kernels are traced by Python: no parser, all of Python
_local = threading.local()


def of_nki() -> str:
    """The release in force for kernels of ``nki``: the kernel's file's, or the environment's.

    Raises:
        NkiError: there is none of that name.
    """
    return _known(_asked(), NKI_VARIABLE, NKI_RELEASES)


def _asked() -> str:
    return getattr(_local, "release", None) or os.environ.get(NKI_VARIABLE, NKI_RELEASES[-1])


def nki_version() -> str:
    """The version of the package `nki` in the release in force: 0.1.0 came with 2.27, 0.6.0 with
    2.32 (aws-neuron-sdk 81ce03a, release-notes/components/nki.rst); 2.33 goes on counting."""
    return f"0.{int(of_nki().partition('.')[2]) - 26}.0"


def nki_since(release: str) -> bool:
    """True where the release in force for ``nki`` is ``release`` or a later one."""
    return _reached(_asked(), release)


@functools.cache  # a kernel's calls ask it, thousands of times
def _reached(asked: str, release: str) -> bool:
    known = _known(asked, NKI_VARIABLE, NKI_RELEASES)
    return NKI_RELEASES.index(known) >= NKI_RELEASES.index(release)


def said_by(function: object) -> AbstractContextManager[None]:
    """Inside the block the release that the file of a kernel names is in force, or the one that is
    in force around it: the environment is read once."""
    own = getattr(function, "__globals__", {}).get(NKI_VARIABLE)
    return within(_local, release=own or _asked())
