"""What hardware a program runs on."""

from __future__ import annotations


def get_platform_target() -> str:
    """The instance family whose core is simulated: NeuronCore-v2, which trn1 and inf2 have."""
    return "trn1"
