"""A kernel traced for a case; and which chips take it, where nobody has named one and a default was
built for."""

from __future__ import annotations

import os
import time
import warnings

from ..core import Kernel, NkiError, Program
from ..core.current.control import NeedsValues
from ..core.current.kernel import Kernel as CurrentKernel
from ..core.device.errors import only_timed
from ..core.device.target import DEFAULT, DEFAULT_BEFORE, ENVIRONMENT_VARIABLE
from ..environment import variable
from .cases import KINDS, Case

# Of the releases that have each language; inf2 has the core of trn1.
CHIPS = {DEFAULT: ("trn1", "trn2"), DEFAULT_BEFORE: ("trn2",)}
SECONDS = 5.0  # of a trace, beyond which no further chip is tried


def others(kernel: Kernel, case: Case, grid: tuple[int, ...]) -> dict[str, str | None]:
    """Chips beside the default, and why they refuse the kernel: "" where they take it, None where
    tracing takes too long to try; nothing where a chip was chosen."""
    if os.environ.get(ENVIRONMENT_VARIABLE) or kernel.options.get("platform_target"):
        return {}
    found: dict[str, str | None] = {}
    end = time.monotonic() + SECONDS
    for chip in CHIPS[_default(kernel)]:
        late = time.monotonic() > end
        found[chip] = None if late else _refusal(kernel, case, grid, chip)
    return found


def _refusal(kernel: Kernel, case: Case, grid: tuple[int, ...], chip: str) -> str:
    alone = type(kernel)(kernel.function, kernel.grid, **kernel.options)  # its programs go with it
    with variable(ENVIRONMENT_VARIABLE, chip), only_timed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced(alone, case, grid)
        except NkiError as error:
            return str(error)
    return ""


def sentence(kernel: Kernel, found: dict[str, str | None]) -> str:
    """What `others` has found, in one sentence; empty where it has nothing."""
    if not found:
        return ""
    said: dict[str | None, list[str]] = {}
    for chip, why in found.items():
        said.setdefault(why, []).append(chip)
    parts = []
    for why, chips in said.items():
        names, one = " and ".join(chips), len(chips) == 1
        if why is None:
            parts.append(f"not tried on {names}, as building it takes long")
        elif why:
            parts.append(f"{names} {'refuses' if one else 'refuse'} it: {why}")
        else:
            parts.append(f"{names} {'takes' if one else 'take'} it, too")
    return f"Built for {_default(kernel)}, the default; {'; '.join(parts)}. --target names a chip."


def _default(kernel: Kernel) -> str:
    return DEFAULT if kernel.today else DEFAULT_BEFORE


def traced(
    kernel: Kernel, case: Case, grid: tuple[int, ...], kind: str = KINDS[0], seed: int = 0
) -> Program:
    """The verified Program for the shapes of a case; of a kernel whose control flow is data, the
    one for values of a kind."""
    positional, named = case.meta()
    launched = kernel[grid if len(grid) > 1 else grid[0]] if grid else kernel
    try:
        return launched.trace(*positional, **named)
    except NeedsValues:
        assert isinstance(launched, CurrentKernel)  # the other language has no such control flow
        positional, named = case.values(kind, seed)
        return launched.trace_with_values(*positional, **named)
