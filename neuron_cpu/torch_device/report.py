"""What a program did on the device: `neuron_cpu run --report PAGE.html SCRIPT`.

Parts are the compiled graphs, and what ran one by one between them. Times are estimates of a
NeuronCore, not measurements: kernels by their schedule, other operators by `runtime.outside`, a
launch for each call of a graph. What the host takes between operators is not in them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from neuron_cpu.console.terminal import table_of
from neuron_cpu.core import KernelCall, Program
from neuron_cpu.core.device.spec import using
from neuron_cpu.core.device.target import DEFAULT, DEFAULT_BEFORE, ENVIRONMENT_VARIABLE, chosen
from neuron_cpu.core.report import bands, report, tables
from neuron_cpu.core.run.execute import Plan
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import Schedule, schedule
from neuron_cpu.errors import UsageError
from neuron_cpu.files import write_text_atomically
from neuron_cpu.page import data
from neuron_cpu.page.write import as_table, write
from neuron_cpu.runtime import outside, recording
from neuron_cpu.runtime.recording import COLLECTIVE, KERNEL, TORCH, Event

from .kernels import mapped
from .state import STATE

_EAGER = "eager"
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_WORK = ("wait_tensor", "barrier", "_local_scalar_dense", "equal")


@dataclass
class Part:
    """A compiled graph, or the operators between two of them.

    Attributes:
        calls: how often it ran.
        events: what it ran -> how often in all.
    """

    name: str
    compiled: bool
    calls: int = 0
    events: dict[Event, int] = field(default_factory=dict)


@dataclass
class Checked:
    """A kernel's results against fp32: the largest difference, and that of the norms.

    Attributes:
        against: what the kernel's own instructions give when nothing is rounded, or the function
            that the user named.
    """

    kernel: str
    shapes: str
    against: str
    largest: float
    relative: float


class Recorder:
    """Watches a program.

    `references` are functions of PyTorch by the kernels' names; `checks`: whether kernels are
    compared with fp32.
    """

    def __init__(self, references: dict[str, Callable] | None = None, checks: bool = True) -> None:
        self._checks = checks
        self.parts: dict[str, Part] = {}
        self.checked: list[Checked] = []
        self.references = references or {}
        self._inside: list[Part] = []
        self._last, self._between = "", False
        self._seen: set[Program] = set()
        self._traced: set[str] = set()

    @property
    def default(self) -> str:
        """The chip where nobody names one: of the older package where all parts are its graphs."""
        traced_alone = self.parts and self.parts.keys() <= self._traced
        return DEFAULT_BEFORE if traced_alone else DEFAULT

    def _part(self) -> Part:
        if self._inside:
            return self._inside[-1]
        name = f"{_EAGER}, after {self._last}" if self._last else _EAGER
        part = self.parts.setdefault(name, Part(name, False))
        part.calls += not self._between
        self._between = True
        return part

    @contextmanager
    def region(self, name: str, _: Any) -> Iterator[None]:
        """A call of a compiled graph."""
        part = self.parts.setdefault(name, Part(name, True))
        part.calls += 1
        self._inside.append(part)
        try:
            yield
        finally:
            self._inside.pop()
            self._last, self._between = name, False

    def graph(self, name: str, events: Sequence[Event]) -> None:
        """A call of a graph of torch_neuronx.trace."""
        self._traced.add(name)
        with self.region(name, None):
            for event in events:
                if event.name not in recording.METADATA_ONLY:
                    self._note(replace(event, where=""))

    def operator(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """An operator of PyTorch, or a collective."""
        name = func._overloadpacket.__name__
        if name in recording.METADATA_ONLY or name in _NO_WORK:
            return
        kind = COLLECTIVE if func.namespace in _COLLECTIVES else TORCH
        inputs, outputs = _shapes((args, kwargs)), _shapes(out)
        dot = recording.Dot.of(name, [one.shape for one in inputs]) if kind == TORCH else None
        self._note(Event("", kind, name, inputs, outputs, 0 if dot is None else dot.macs))

    def _note(self, event: Event) -> None:
        events = self._part().events
        events[event] = events.get(event, 0) + 1

    def before_kernel(self, args: tuple, kwargs: dict) -> Callable[[KernelCall], None]:
        """Keep what a kernel gets, which it may write; returns what takes its results."""
        kept = mapped(torch.clone, args, kwargs)

        def after(call: KernelCall) -> None:
            program = call.program
            shapes = recording.shapes_of(call.inputs), recording.shapes_of(call.outputs)
            self._note(Event("", KERNEL, call.name, *shapes, int(program.macs), program))
            if self._checks and program not in self._seen:
                self._seen.add(program)
                self._check(call, kept)

        return after

    def _check(self, call: KernelCall, kept: tuple[tuple, dict]) -> None:
        tensors: list[torch.Tensor] = []
        mapped(tensors.append, *kept)
        plan = Plan(call.program, shadow=True)
        with torch.inference_mode():
            wide = plan.run([one.contiguous() for one in tensors])
            self._compare(call, "its own instructions in fp32", wide)
            function = self.references.get(call.name)
            if function is not None:
                args, kwargs = mapped(_widened, *kept)
                found = torch.utils._pytree.tree_leaves(function(*args, **kwargs))
                self._compare(call, f"{function.__name__} in fp32", found)

    def _compare(self, call: KernelCall, against: str, expected: Sequence[Any]) -> None:
        pairs = [
            (one.float().reshape(-1), other.float().reshape(-1))
            for one, other in zip(call.outputs, expected)
        ]
        got, wanted = (torch.cat(side) for side in zip(*pairs))
        apart = got - wanted
        norm = float(wanted.norm()) or 1.0
        shapes = ", ".join(str(list(one.shape)) for one in call.inputs)
        figures = float(apart.abs().max()), float(apart.norm()) / norm
        self.checked.append(Checked(call.name, shapes, against, *figures))


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _shapes(values: Any) -> tuple[recording.TensorShape, ...]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return recording.shapes_of([one for one in leaves if isinstance(one, torch.Tensor)])


# --- figures --------------------------------------------------------------------------------------
class Pricer:
    """Estimates of events; a program is scheduled once."""

    def __init__(self) -> None:
        self.overheads = cost.Overheads()
        self.schedules: dict[Program, tuple[Schedule, report.Profile]] = {}
        self.ranks = 1
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            self.ranks = dist.get_world_size()

    def kernel(self, program: Program) -> tuple[Schedule, report.Profile]:
        if program not in self.schedules:
            made = schedule(program)
            self.schedules[program] = made, report.profile(made)
        return self.schedules[program]

    def price(self, event: Event) -> tuple[float, tuple[float, float], dict[str, float]]:
        """Nanoseconds, their band, and nanoseconds by what they go to."""
        if event.program is not None:
            profile = self.kernel(event.program)[1]
            low, high = profile.band_ns
            around = self.overheads.kernel_ns
            parts = {**profile.critical, "launches": around}
            return profile.time_ns + around, (low + around, high + around), parts
        if event.kind == COLLECTIVE:
            time = self.overheads.collective(outside.moved(event), self.ranks, event.name)
            parts = {"collectives": time}
        else:
            work = outside.work(event)
            start = self.overheads.cache_ns if event.name in outside.ROWS else 0.0
            time = start + work.ns(modular=False)
            parts = {"DMA": start + work.dma, "TensorE": work.tensor, "VectorE": work.vector / 2}
        return time, bands.load()[bands.ALL].measured(time), parts


def figures(recorder: Recorder, pricer: Pricer) -> dict[str, Any]:
    """Everything that the page and the file say, as plain data."""
    with using(chosen(recorder.default)):
        parts = parts_of(recorder, pricer)
    return {
        "estimated": True,
        "chip": os.environ.get(ENVIRONMENT_VARIABLE) or recorder.default,
        "parts": parts,
        "kernels": [vars(one) for one in recorder.checked],
        "fallbacks": sorted(STATE.fallbacks),
    }


def parts_of(recorder: Recorder, pricer: Pricer) -> list[dict[str, Any]]:
    """Graphs and what ran between them, with times of the NeuronCore that is in force."""
    return [_part(part, pricer) for part in recorder.parts.values() if part.events]


def _part(part: Part, pricer: Pricer) -> dict[str, Any]:
    launch = pricer.overheads.graph_ns * part.calls if part.compiled else 0.0
    time, low, high = launch, launch, launch
    spent = {"launches": launch}
    rows: list[dict[str, Any]] = []
    for event, count in part.events.items():
        one, band, by = pricer.price(event)
        time += count * one
        low, high = low + count * band[0], high + count * band[1]
        for name, value in by.items():
            spent[name] = spent.get(name, 0.0) + count * value
        rows.append(
            {
                "kind": event.kind,
                "name": event.name,
                "calls": count,
                "macs": event.macs,
                "shapes": [list(tensor.shape) for tensor in event.inputs],
                "time_ns": count * one,
            }
        )
    macs = sum(row["macs"] * row["calls"] for row in rows)
    own = sum(row["macs"] * row["calls"] for row in rows if row["kind"] == KERNEL)
    bound = max(spent, key=lambda name: spent[name])
    return {
        "name": part.name,
        "compiled": part.compiled,
        "calls": part.calls,
        "macs": macs,
        "nki_macs": own,
        "time_ns": time,
        "band_ns": [low, high],
        "bound": bound,
        "bound_share": spent[bound] / (sum(spent.values()) or 1.0),
        "operators": sorted(rows, key=lambda row: -row["time_ns"]),
    }


# --- pages ----------------------------------------------------------------------------------------
def _table(title: str, columns: str, rows: Sequence[Sequence[Any]]) -> Table:
    table = table_of(columns, title)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _tables(found: dict[str, Any]) -> list[Table]:
    def share(part: dict[str, Any]) -> str:
        return f"{100 * part['nki_macs'] / part['macs']:.1f} %" if part["macs"] else "-"

    parts = [
        (
            part["name"],
            f"{part['bound']} ({100 * part['bound_share']:.0f} %)",
            part["calls"],
            f"{part['macs']:,}",
            share(part),
            tables.microseconds(part["time_ns"]),
            " to ".join(map(tables.microseconds, part["band_ns"])),
        )
        for part in found["parts"]
    ]
    operators = [
        (
            part["name"],
            row["kind"],
            row["name"],
            row["shapes"],
            row["calls"],
            tables.microseconds(row["time_ns"]),
        )
        for part in found["parts"]
        for row in part["operators"][:12]
    ]
    kernels = [
        (
            one["kernel"],
            one["shapes"],
            one["against"],
            f"{one['largest']:.3g}",
            f"{one['relative']:.3g}",
        )
        for one in found["kernels"]
    ]
    return [
        _table(
            "Graphs, and what ran between them",
            "part|bound by|>calls|>MACs|>in NKI|>estimated µs|>on a device",
            parts,
        ),
        _table(
            "Kernels against fp32",
            "kernel|arguments|against|>largest difference|>relative",
            kernels,
        ),
        _table(
            "Operators with the longest times",
            "part|kind|name|arguments|>calls|>estimated µs",
            operators,
        ),
    ]


def _sentences(found: dict[str, Any]) -> list[str]:
    said = [
        f"Times are estimates for {found['chip']}, of all calls together; nothing was measured on "
        "a device. The second figures are the calibration's band.",
        "A launch is counted for each call of a graph. The host's time between eager operators is "
        "not counted.",
    ]
    if found["fallbacks"]:
        said.append(f"Left to the CPU: {', '.join(found['fallbacks'])}.")
    return said


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """The recorder sees what runs inside of the block."""
    STATE.observer, STATE.regions = recorder.operator, recorder.region
    STATE.before_kernel, STATE.graphs = recorder.before_kernel, recorder.graph
    try:
        yield
    finally:
        STATE.observer = STATE.regions = STATE.before_kernel = STATE.graphs = None


@contextmanager
def recorded(paths: Sequence[str], references: Sequence[str] = ()) -> Iterator[None]:
    """Watch the program inside of the block; then write each of `paths`.

    Args:
        paths: .json for the figures, else a page.
        references: KERNEL=MODULE:FUNCTION, functions of PyTorch to compare kernels with.
    """
    recorder = Recorder(dict(map(_reference, references)))
    try:
        with watched(recorder):
            yield
    finally:
        pricer = Pricer()
        found = figures(recorder, pricer)
        for path in paths:
            _write(Path(path), found, pricer)
            print(f"report: {path}", file=sys.stderr)


def _write(path: Path, found: dict[str, Any], pricer: Pricer) -> None:
    if path.suffix == ".json":
        write_text_atomically(path, json.dumps(found, indent=1))
        return
    runs = [data.run(profile.name, made) for made, profile in pricer.schedules.values()]
    shown = [as_table(table) for table in _tables(found)]
    write(path, "A program on neuron", runs, None, shown, _sentences(found))


def _reference(text: str) -> tuple[str, Callable]:
    kernel, _, place = text.partition("=")
    module, _, function = place.partition(":")
    try:
        return kernel, getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--without {text} names no function ({error}), expected KERNEL=MODULE:FUNCTION of a "
            "module that Python finds; correct it."
        ) from error
