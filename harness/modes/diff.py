"""`--mode diff`: where the NKI path and PyTorch begin to differ, and which kernel to open."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from harness import console, sdk
from harness.errors import UserError
from harness.figures import divergence, graphs
from harness.figures.divergence import PHASES, SUSPICIOUS, Error
from harness.inputs.prompts import shorten
from harness.inputs.submission import kernel_places
from harness.processes.worker import Role
from harness.session.building import Loaded, build
from harness.session.opening import open_session
from harness.settings import Settings
from neuron_cpu.console import terminal

_LAYER = re.compile(r"^layers\.(\d+)")
# Columns that a narrow terminal does without, the first one first; the verdict names the kernels.
EXPENDABLE = ("ulps", "PyTorch vs fp32", "NKI vs fp32", "kernels")
_NO_KERNEL = "its PyTorch code: it calls no kernel"
Kernels = dict[tuple[str, str], list[str]]  # (phase, module path) -> kernels


def run(settings: Settings) -> int:
    """Compare on each prompt; exit status 0 where no module is suspected, else 1.

    Status 1 also where fp32 itself is not finite, so nothing can be compared.
    """
    if not sdk.platform().simulates:
        raise UserError(
            "--mode diff looks inside the graphs, which a device does not show; run it with "
            "NEURON_CPU=1 or on another machine."
        )
    if sdk.real_libraries() is not None:
        raise UserError(
            "--mode diff runs each module again, and the libraries' graphs have no modules left; "
            "leave --libraries out, so that the imitation runs the same kernels."
        )
    session = open_session(replace(settings, enable_nki=True))
    nki, *_ = [build(session, role) for role in (Role.NKI, Role.TORCH, Role.SHADOW)]
    suspects = 0
    for prompt, ids in zip(session.prompts, session.prompt_ids):
        with console.step(f"Comparing on {shorten(prompt)}"):
            found = divergence.measure(nki, ids)
        terminal.printed(f"Prompt: {shorten(prompt)}")
        report(found, kernels_of(nki), session.source)
        suspects += sum(error.suspicious or error.undefined for error in found)
    return 1 if suspects else 0


# --- report ---------------------------------------------------------------------------------------
def kernels_of(loaded: Loaded) -> Kernels:
    """Which kernels each module calls, or a module inside it, in prefill and in decode."""
    found: Kernels = {}
    for graph in graphs.read(loaded.folder):
        for row in graph.operators:
            parts = row.operator.split(".")
            for depth in range(1, len(parts) + 1) if row.in_kernel else ():
                key = PHASES.get(graph.submodel, graph.submodel), ".".join(parts[:depth])
                names = found.setdefault(key, [])
                if row.name not in names:
                    names.append(row.name)
    return found


def report(own: Sequence[Error], kernels: Kernels, source: Path) -> None:
    """The table and one sentence about where the error starts."""
    terminal.print_table(terminal.output(120), _table(own, kernels), EXPENDABLE, "kernels")
    terminal.printed(verdict(own, kernels, source))


def _table(own: Sequence[Error], kernels: Kernels) -> Table:
    """Worst layer of each operator, in the order in which they run."""
    worst: dict[tuple[str, str], Error] = {}
    for error in own:
        key = error.phase, _LAYER.sub("layers.*", error.module)
        if key not in worst or error.nki > worst[key].nki:
            worst[key] = error
    title = "\nEach operator on the same inputs (worst layer)"
    columns = "phase|operator|NKI vs fp32|PyTorch vs fp32|ratio|ulps|kernels"
    table = terminal.table_of(columns, title)
    for error in worst.values():
        called = ", ".join(kernels.get((error.phase, error.module), ["-"]))
        figures = f"{error.nki:.2e}", f"{error.torch:.2e}"
        ratio = f"{error.ratio:.2f}{' !' if error.suspicious else ''}", f"{error.ulps:.2f}"
        table.add_row(error.phase, error.module, *figures, *ratio, called)
    return table


def verdict(own: Sequence[Error], kernels: Kernels, source: Path) -> str:
    """Where the error starts: the first suspected module, its innermost one first."""
    # in the order of ends, so that parts come before the whole; what is not finite in fp32 is no
    # kernel's fault
    suspect = next((error for error in own if error.suspicious), None)
    undefined = next((error for error in own if error.undefined), None)
    if undefined is not None and (suspect is None or own.index(undefined) < own.index(suspect)):
        return (
            f"Nothing can be compared: {undefined.module} ({undefined.phase}) is not finite in "
            "fp32 either; look for NaN in the checkpoint."
        )
    if suspect is None:
        return (
            f"No operator is more than {SUSPICIOUS:.0f} times farther from fp32 than PyTorch in "
            "bf16 is."
        )
    defined = kernel_places(source)
    places = ", ".join(
        f"{name} ({defined[name]})" if name in defined else name
        for name in kernels.get((suspect.phase, suspect.module), [])
    )
    if suspect.broken is not None:
        return (
            f"A value that is not finite comes out of {suspect.module} ({suspect.phase}) first, at "
            f"element {suspect.broken}; open {places or _NO_KERNEL}."
        )
    return (
        f"The error starts in {suspect.module} ({suspect.phase}): {suspect.nki:.2e} from fp32 "
        f"where PyTorch in bf16 is {suspect.torch:.2e}; open "
        f"{places or _NO_KERNEL}."
    )
