"""Tells the hardware that a program runs on; NxD 0.13 and later import it from here."""

from typing import Any

SUPPORTED_TYPES = ["inf2", "trn1", "trn1n"]


def get_platform_target(compiler_args: Any = None) -> str:
    """The instance family of the simulated core: NeuronCore-v2, which trn1 and inf2 have."""
    del compiler_args  # may name another target for a graph that is compiled elsewhere
    return "trn1"
