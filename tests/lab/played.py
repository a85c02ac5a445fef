"""The stand-in plays a device: other constants, noise, a change of mechanism, faults.

The driver's own functions run: `nki.benchmark` of the stand-in gives the times of the played device
because the generation in force is another one while it plays.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np

from harness import sdk
from lab.device import fit, model, plan, running, timing
from lab.device.running import SIMULATOR, Unanswered
from neuron_cpu.core.device import spec, target
from neuron_cpu.core.time import cost, schedule

SPREAD = 0.3  # of a constant's logarithm, either way
ZERO = (5.0, 30.0)  # what a constant that is 0 may be instead
NOISE, NOISE_US = 0.003, 0.1
_numbers = itertools.count()


@dataclass
class Device:
    """A device of its own.

    Attributes:
        seed: constants and noise follow from it.
        mechanism: one of `fit.MECHANISMS` that differs, if any.
        faults: name of a row or kernel -> what becomes of it: refused, hung, died or wrong.
        target: the chip; today: its SDK's language is `nki`.
    """

    seed: int
    mechanism: str | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    target: str = "trn1"
    today: bool = False

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        base = fit.Variant(target.TARGETS[self.target], self.today)
        self.variant = fit.switched(base, self.mechanism) if self.mechanism else base
        self.constants = {name: self._drawn(name) for name in self.variant.names}

    def _drawn(self, name):
        prior = fit.value_of(self.variant.core, name)
        if not prior:
            return float(self.random.uniform(*ZERO))
        return prior * float(np.exp(self.random.uniform(-SPREAD, SPREAD)))

    @contextlib.contextmanager
    def plays(self):
        """Whoever asks the stand-in for a time meanwhile is told the device's."""
        own = {name: v for name, v in self.constants.items() if name not in model.OVERHEADS}
        core = cost.with_constants(self.variant.core, own)
        core = replace(core, name=f"played {next(_numbers)}")  # kernels keep programs by name
        profiles = {
            cost.DEFAULT_PROFILE: replace(
                cost.PROFILES[self.variant.profile], name=cost.DEFAULT_PROFILE
            )
        }
        order = self.variant.order or schedule.usual_order(self.today)
        model._traced.cache_clear()
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(target.TARGETS, {self.target: core}))
            stack.enter_context(mock.patch.dict(cost.PROFILES, profiles))
            stack.enter_context(mock.patch.object(schedule, "usual_order", lambda today: order))
            for name in model.OVERHEADS:
                stack.enter_context(mock.patch.object(spec, name, self.constants[name]))
            yield
        model._traced.cache_clear()

    def noisy(self, us):
        return us * (1 + NOISE * self.random.standard_normal()) + (
            NOISE_US * self.random.standard_normal()
        )

    def fault(self, call):
        """What becomes of a call, or nothing."""
        return self.faults.get(call.get("name", ""), self.faults.get(call.get("kernel", ""), ""))


class Workers:
    """In the place of `running.Workers`: the same functions, in this process."""

    device = Device(0)

    def __init__(self, scratch, target, *_):
        self.asked: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def ask(self, role, do, given, limit):
        module, _, name = do.partition(":")
        function = getattr(importlib.import_module(module), name)
        if role == SIMULATOR:
            return function(**given)
        call = given.get("call", {})
        fault = self.device.fault(call)
        if fault in ("refused", "hung", "died"):
            raise Unanswered(fault, "as played")
        with self.device.plays():
            found = function(**given)
        if fault == "wrong":
            spoil(given["results"])
        if isinstance(found, dict):
            found = {name: self.device.noisy(us) for name, us in found.items()}
        return found


# Today's SDK: a kernel's process (-c PATHS -c CODE CALL FILE) leaves a NEFF, which the profiler
# runs; it tells times.
COMPILES = """
case "$4" in
*timing*) echo '{"p50": 20.0}' > "$6" ;;
*) echo "$5" > "$NKI_ARTIFACTS_DIR/kernel.neff" ;;
esac"""
PROFILES = """
case "$1" in
capture) for n in 11 22 33 44 55; do echo > "profile_exec_$n.ntff"; done ;;
*) echo 'reading'; echo '{"n": {"total_time": 1e-05}}' ;;
esac"""


def sdk_of_today(folder, compiler, profiler):
    """Write both as programs. A row's name has what happens to it instead, in words of bash."""
    for name, given, faults, usual in (
        ("python", '"$5"', compiler, COMPILES),
        ("neuron-explorer", '"$1 $(cat kernel.neff)"', profiler, PROFILES),
    ):
        cases = "".join(f'*\'"name": "{row}"\'*) {does} ;;\n' for row, does in faults.items())
        text = f"#!/usr/bin/env bash\ncase {given} in\n{cases}esac{usual}\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


class WithTools(running.Workers):
    """Real processes, beside which the programs in `tools` are today's SDK."""

    tools = Path()
    patience = 300.0

    def ask(self, role, do, given, limit):
        if role == SIMULATOR:
            return super().ask(role, do, given, limit)
        name = given["call"]["name"]
        asked = {"do": do, "given": given, "tools": str(self.tools)}
        limit = 3.0 if name == HANGS else self.patience
        return super().ask(role, f"{__name__}:beside_tools", asked, limit)


HANGS = "vector-stream-64-512"


def beside_tools(do, given, tools):
    """In a process of its own: what a worker does on a device of today's SDK."""
    module, _, name = do.partition(":")
    sys.executable, timing.TOOLS = f"{tools}/python", tools
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    with mock.patch.object(sdk, "platform", lambda: sdk.DEVICE):
        return getattr(importlib.import_module(module), name)(**given)


def spoil(results):
    """Other numbers in the place of a kernel's results."""
    import torch

    torch.save([-one for one in torch.load(results)], results)


def times(device, rows):
    """Microseconds of the rows as the device shows them."""
    return of_calls(device, {n: plan.of_row(row, device.today).call for n, row in rows.items()})


def of_calls(device, every):
    """Microseconds of calls as the device shows them."""
    with device.plays():
        return {name: device.noisy(model.graph_ns(call) / 1e3) for name, call in every.items()}
