"""The generation that kernels are built for.

Chosen as the SDK chooses it (aws-neuron-sdk v2.32.0, nki/guides/nki_simulator.rst): by environment,
else by the chip in the machine, else by a default. There is no chip here. The default of `nki` is
trn3; that of `neuronxcc.nki` is trn1, the contest's.
"""

import os
import re

from .errors import refuse
from .spec import GEN2, GEN3, GEN4, NeuronCore, in_force

ENVIRONMENT_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
TARGETS = {
    "trn1": GEN2, "inf2": GEN2, "gen2": GEN2, "trn2": GEN3, "gen3": GEN3, "trn3": GEN4,
    "gen4": GEN4,
}  # fmt: skip
DEFAULT, DEFAULT_BEFORE = "trn3", "trn1"  # of `nki`, of `neuronxcc.nki`


def chosen(default: str = DEFAULT) -> NeuronCore:
    """The generation that the environment names.

    Raises:
        NkiError: there is none of that name.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE) or default
    found = TARGETS.get(name)
    if found is None:
        meant = ("inf" if "inf" in name.lower() else "trn") + re.sub(r"\D", "", name)[:1]
        mend = f"write {meant}" if meant in TARGETS else f"unset it for {default}"
        raise refuse(
            "sim_unknown_target",
            f"{ENVIRONMENT_VARIABLE} is {name!r}, expected one of {', '.join(TARGETS)}; {mend}",
        )
    return found


def needs(what: str, number: int) -> None:
    """Refuse what the generation in force does not have yet."""
    core = in_force()
    if core.number < number:
        raise refuse(
            "sim_newer_core",
            f"{what} is there from gen{number} on, expected what {core.name} has; choose the "
            f"target with {ENVIRONMENT_VARIABLE}, or branch on nisa.get_nc_version()",
        )


def named_cores() -> int | None:
    """The cores of this process that the runtime's variables name; None: neither does."""
    visible, count = (os.environ.get(f"NEURON_RT_{n}") for n in ("VISIBLE_CORES", "NUM_CORES"))
    if visible:
        ends = [[int(end) for end in part.split("-")] for part in visible.split(",")]
        return sum(part[-1] - part[0] + 1 for part in ends)
    return int(count) if count and count.isdigit() else None
