"""`--mode diff`: where the NKI path and PyTorch begin to differ, and which kernel to open.

The prompt runs through the submission with kernels. Whenever one of its modules has run, the same
module without kernels runs on the same inputs, once in bf16 and once in fp32: that is the module's
own error, free of what it inherited. Beside it, the three models run on their own, and the error
that has accumulated after each layer is compared.

The fp32 shadow stands for the truth. A kernel is suspected where its distance from the truth is
more than SUSPICIOUS times that of PyTorch in bf16, and more than one bf16 spacing.
"""

from __future__ import annotations

import argparse
import ast
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from rich.table import Table

from harness import console, sdk
from harness.errors import UserError
from harness.figures import graphs
from harness.figures.accuracy import bf16_spacing
from harness.figures.flops import DECODE, PREFILL
from harness.inputs.prompts import shorten
from harness.modes.generate import generate_tokens
from harness.session.building import Loaded, build, open_session
from neuron_cpu import terminal

SUSPICIOUS = 3.0
PHASES = {PREFILL: "prefill", DECODE: "decode"}
_LAYER = re.compile(r"^layers\.(\d+)")
_WHOLE_LAYER = re.compile(r"^layers\.\d+$")


@dataclass(frozen=True)
class Error:
    """Distances of one tensor from the fp32 shadow, relative to the shadow's RMS."""

    phase: str
    module: str
    nki: float
    torch: float
    ulps: float  # RMS distance of the NKI result in bf16 spacings at the shadow's RMS

    @property
    def ratio(self) -> float:
        """How much farther from the truth the kernels are than PyTorch in bf16."""
        if self.torch == 0:
            return 1.0 if self.nki == 0 else float("inf")
        return self.nki / self.torch

    @property
    def suspicious(self) -> bool:
        return self.ratio > SUSPICIOUS and self.ulps > 1


def run(args: argparse.Namespace) -> int:
    """Compare on each prompt; exit status 0 where no module is suspected, else 1."""
    if not sdk.is_stand_in():
        raise UserError(
            "--mode diff looks inside the graphs, which a device does not show; run it with "
            "NEURON_CPU=1 or on another machine."
        )
    args.enable_nki = True
    session = open_session(args)
    nki, plain, shadow = (build(session, role) for role in ("nki", "torch", "shadow"))
    suspects = 0
    for prompt, ids in zip(session.prompts, session.prompt_ids):
        with console.step(f"Comparing on {shorten(prompt)}"):
            own = own_errors(nki, plain, shadow, ids)
            grown = accumulated_errors(nki, plain, shadow, ids)
        print(f"Prompt: {shorten(prompt)}")
        report(own, grown, kernels_of(nki), session.submission)
        suspects += sum(error.suspicious for error in own)
    return 1 if suspects else 0


# --- errors ---------------------------------------------------------------------------------------
def error_of(phase: str, module: str, nki: Any, plain: Any, shadow: Any) -> Error:
    """Figures of three equally shaped tensors."""
    truth = shadow.double()
    size = float(truth.square().mean().sqrt())
    distances = [float((x.double() - truth).square().mean().sqrt()) for x in (nki, plain)]
    scale = size or 1.0
    ulps = distances[0] / (bf16_spacing(scale) or 1.0)
    return Error(phase, module, distances[0] / scale, distances[1] / scale, ulps)


class Repeater:
    """Runs the references of one NKI model's modules on the inputs that those modules get.

    A module that hands its input on (its work is part of a later kernel) has no error of its own:
    its references run in front of those of the next module.
    """

    def __init__(self, tokens: int) -> None:
        self.found: list[Error] = []
        self._tokens = tokens
        self._rank = threading.local()  # what one rank has pending; ranks are threads

    def hook(self, phase: str, rank: int, name: str, twins: Sequence[Twin]) -> Callable:
        """A forward hook for one module; `twins` are the bf16 and the fp32 reference."""

        def after(module: Any, arguments: tuple, settings: dict, output: Any) -> None:
            if getattr(self._rank, "busy", False):  # inside a module that is being repeated
                return
            if arguments and output is arguments[0]:
                self._rank.pending = [*getattr(self._rank, "pending", []), twins]
                return
            pending, self._rank.pending = getattr(self._rank, "pending", []), []
            self._rank.busy = True
            try:
                values = [
                    twin.run(arguments, settings, [earlier[side] for earlier in pending])
                    for side, twin in enumerate(twins)
                ]
            finally:
                self._rank.busy = False
            if rank == 0:
                tensors = [_rows(_first(value), self._tokens) for value in (output, *values)]
                self.found.append(error_of(phase, name, *tensors))

        return after


@dataclass(frozen=True)
class Twin:
    """The same module of a reference model, and that model's modules by the NKI model's."""

    module: Any
    counterparts: dict[Any, Any]
    in_fp32: bool

    def run(self, arguments: tuple, settings: dict, earlier: Sequence[Twin]) -> Any:
        """Run on the NKI module's arguments, after those of `earlier` modules."""
        arguments, settings = self._own(arguments), self._own(settings)
        for twin in earlier:
            arguments = (_first(twin.module(arguments[0])), *arguments[1:])
        return self.module(*arguments, **settings)

    def _own(self, value: Any) -> Any:
        """The same arguments with modules of this model, and in fp32 where it is the shadow."""
        import torch

        if isinstance(value, torch.nn.Module):
            return self.counterparts.get(value, value)
        if isinstance(value, torch.Tensor):
            return value.float() if self.in_fp32 and value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: self._own(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._own(item) for item in value)
        return value


def own_errors(nki: Loaded, plain: Loaded, shadow: Loaded, ids: Sequence[int]) -> list[Error]:
    """Each module's own error: the references run on the inputs of the NKI run, on every rank."""
    import torch

    repeater = Repeater(len(ids))
    with torch.no_grad(), _hooks(nki, (plain, shadow), repeater.hook):
        generate_tokens(nki, [ids], 2, min_new_tokens=2, do_sample=False)
    return repeater.found


def accumulated_errors(
    nki: Loaded, plain: Loaded, shadow: Loaded, ids: Sequence[int]
) -> list[Error]:
    """The error after each layer and at the head when every model runs on its own (prefill)."""
    outputs: list[dict[str, Any]] = []
    for loaded in (nki, plain, shadow):
        kept: dict[str, Any] = {}

        def keep(phase: str, rank: int, name: str, _: Any, kept: dict = kept) -> Callable:
            def hook(module: Any, arguments: tuple, settings: dict, output: Any) -> None:
                handed_on = arguments and output is arguments[0]
                if rank == 0 and phase == PHASES[PREFILL] and not handed_on:
                    kept[name] = _rows(_first(output), len(ids)).clone()

            return hook

        with _hooks(loaded, (), keep):
            generate_tokens(loaded, [ids], 1, min_new_tokens=1, do_sample=False)
        outputs.append(kept)
    names = [name for name in outputs[0] if all(name in kept for kept in outputs)]
    chosen = [name for name in names if _WHOLE_LAYER.match(name) or name in ("norm", "lm_head")]
    return [error_of(PHASES[PREFILL], name, *(kept[name] for kept in outputs)) for name in chosen]


@contextmanager
def _hooks(loaded: Loaded, others: Sequence[Loaded], make: Callable) -> Iterator[None]:
    """A forward hook on every module that all models have, on every rank, taken off at the end."""
    handles = []
    for index, wrapper in enumerate(loaded.model.models):
        if wrapper.tag not in PHASES:
            continue
        for rank, module in enumerate(wrapper.model.modules):
            modules = dict(module.named_modules())
            others_modules = [
                dict(other.model.models[index].model.modules[rank].named_modules())
                for other in others
            ]
            counterparts = [
                {part: theirs[name] for name, part in modules.items() if name in theirs}
                for theirs in others_modules
            ]
            for name, part in modules.items():
                if _is_comparable(name) and all(name in theirs for theirs in others_modules):
                    twins = [
                        Twin(theirs[name], mapping, other.role == "shadow")
                        for theirs, mapping, other in zip(others_modules, counterparts, others)
                    ]
                    hook = make(PHASES[wrapper.tag], rank, name, twins)
                    handles.append(part.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_comparable(name: str) -> bool:
    """Layers, their direct parts, and what stands outside of the layers, but for caches."""
    return (
        bool(name)
        and name.count(".") <= 2
        and not name.startswith(("kv_mgr", "rank_util", "sampler"))
    )


def _first(output: Any) -> Any:
    """The hidden states of a module's result."""
    return output[0] if isinstance(output, (list, tuple)) else output


def _rows(tensor: Any, tokens: int) -> Any:
    """[1, S, ...] cut to the prompt's tokens: rows behind them hold what padding computes."""
    return tensor[:, :tokens].float() if tensor.dim() == 3 else tensor.float()


# --- report ---------------------------------------------------------------------------------------
def kernels_of(loaded: Loaded) -> dict[str, list[str]]:
    """Module path -> kernels that it, or a module inside it, calls."""
    found: dict[str, list[str]] = {}
    for graph in graphs.read(loaded.folder):
        for row in graph.operators:
            parts = row.operator.split(".")
            for depth in range(1, len(parts) + 1) if row.in_kernel else ():
                names = found.setdefault(".".join(parts[:depth]), [])
                if row.name not in names:
                    names.append(row.name)
    return found


def kernel_lines(source: Path) -> dict[str, int]:
    """Function name -> line of its definition in the submission."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return {node.name: node.lineno for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def report(
    own: Sequence[Error], grown: Sequence[Error], kernels: dict[str, list[str]], source: Path
) -> None:
    """Both tables and one sentence about where the error starts."""
    out = terminal.output(120)
    terminal.print_table(out, _own_table(own, kernels), ("ulps",), "kernels")
    terminal.print_table(out, _grown_table(grown))
    print(verdict(own, kernels, source))


def _own_table(own: Sequence[Error], kernels: dict[str, list[str]]) -> Table:
    """Worst layer of each operator, in the order in which they run."""
    worst: dict[tuple[str, str], Error] = {}
    for error in own:
        key = error.phase, _LAYER.sub("layers.*", error.module)
        if key not in worst or error.nki > worst[key].nki:
            worst[key] = error
    table = Table(title="\nEach operator on the same inputs (worst layer)", title_justify="left")
    for name in ("phase", "operator", "NKI vs fp32", "PyTorch vs fp32", "ratio", "ulps", "kernels"):
        table.add_column(name)
    for error in worst.values():
        mark = " !" if error.suspicious else ""
        table.add_row(
            error.phase,
            error.module,
            f"{error.nki:.2e}",
            f"{error.torch:.2e}",
            f"{error.ratio:.2f}{mark}",
            f"{error.ulps:.2f}",
            ", ".join(kernels.get(error.module, ["-"])),
        )
    return table


def _grown_table(grown: Sequence[Error]) -> Table:
    title = "\nHow the error grows from layer to layer (prefill)"
    table = Table(title=title, title_justify="left")
    for name in ("after", "NKI vs fp32", "PyTorch vs fp32", "ratio", "ulps"):
        table.add_column(name)
    for error in grown:
        cells = (
            f"{error.nki:.2e}",
            f"{error.torch:.2e}",
            f"{error.ratio:.2f}",
            f"{error.ulps:.2f}",
        )
        table.add_row(error.module, *cells)
    return table


def verdict(own: Sequence[Error], kernels: dict[str, list[str]], source: Path) -> str:
    """Where the error starts: the first suspected module, its innermost one first."""
    suspect = first_suspect(own)
    if suspect is None:
        return (
            f"No operator is more than {SUSPICIOUS:.0f} times farther from fp32 than PyTorch in "
            "bf16 is."
        )
    lines = kernel_lines(source)
    places = ", ".join(
        f"{name} ({source.name}:{lines[name]})" if name in lines else name
        for name in kernels.get(suspect.module, [])
    )
    return (
        f"The error starts in {suspect.module} ({suspect.phase}): {suspect.nki:.2e} from fp32 "
        f"where PyTorch in bf16 is {suspect.torch:.2e}; open "
        f"{places or 'its PyTorch code: it calls no kernel'}."
    )


def first_suspect(own: Sequence[Error]) -> Optional[Error]:
    """The first suspected module in the order of ends, so that parts come before the whole."""
    return next((error for error in own if error.suspicious), None)
