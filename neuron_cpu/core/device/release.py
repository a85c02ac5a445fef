"""The SDK release that kernels are checked for, and the rules that differ between releases.

``NEURON_CPU_SDK=2.21 ... 2.26`` chooses it; the default is the contest's, 2.21. Sources:
aws-neuron-sdk v2.21.1 to v2.26.1, general/nki (release notes, nki.errors.rst, API docstrings).
"""

from __future__ import annotations

import os

from .errors import NkiError

ENVIRONMENT_VARIABLE = "NEURON_CPU_SDK"
RELEASES = ("2.21", "2.22", "2.23", "2.24", "2.25", "2.26")


# What a release changed, and the first one in which it holds.
ZEROS_IN_SHARED_HBM_REFUSED = "2.22"  # nki.errors.rst: initial values of HBM tensors
IN_PLACE_OPERATORS_RELIABLE = "2.23"  # release notes; nki_known_issues.rst before
NO_REORDER = "2.23"  # nki.compiler.no_reorder exists
INTEGERS_ON_GPSIMD = "2.26"  # nki.isa.tensor_tensor: int32 tiles are added exactly
BLOCK_AXES_DEPRECATED = "2.23"  # nki.errors.rst: the partition axis must come first


def chosen() -> str:
    """The release in force, as ``2.NN``.

    Raises:
        NkiError: the environment names a release that is not known here.
    """
    release = os.environ.get(ENVIRONMENT_VARIABLE, RELEASES[0])
    if release not in RELEASES:
        raise NkiError(
            "sim_unknown_release",
            f"{ENVIRONMENT_VARIABLE} is {release!r}, expected one of {', '.join(RELEASES)}; unset "
            f"it for {RELEASES[0]}, the contest's",
        )
    return release


def since(release: str) -> bool:
    """True where the release in force is ``release`` or a later one."""
    return RELEASES.index(chosen()) >= RELEASES.index(release)
