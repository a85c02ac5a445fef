"""Changes of recorded programs, field by field: what a stranger's process might send.

python -m tests.sandbox.changed_records --changes 100000 --seed 0

Each record is that of a kernel of the suite on its odd case. A change does no harm where its record
is refused, where it costs at least what the record costs unchanged, or where results are wrong.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import warnings
from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

import neuron_cpu

neuron_cpu.ensure_sdk()

from neuron_cpu import suite  # noqa: E402
from neuron_cpu.core.device.spec import Engine  # noqa: E402
from neuron_cpu.core.instructions.entry import TABLE, OpSpec  # noqa: E402
from neuron_cpu.core.program import regions  # noqa: E402
from neuron_cpu.core.program.storage import Storage  # noqa: E402
from neuron_cpu.core.run.execute import Plan  # noqa: E402
from neuron_cpu.judge import verdict  # noqa: E402
from neuron_cpu.judge.cases import Case  # noqa: E402
from neuron_cpu.judge.verdict import Settings  # noqa: E402
from neuron_cpu.sandbox import limits, records  # noqa: E402

SETTINGS = Settings()
# What authors write as they like: orders to the compiler, the language, and promises about values,
# which a run holds them to; and the line on which a call stands, since an estimate joins small
# instructions of one line.
CHOICES = {"skips_middle_end", "in_order", "today", "stationary_onezero", "moving_onezero"}
CHOICES |= {"source", "file", "function", "line"}
BETTER = frozenset({"faster", "fuller"})
PIECE = 500  # changes of a worker at a time
SECONDS, MEMORY = 20.0, 2 << 30  # of one change: sizes of a record may ask for any


def objects(content):
    """(object, field) of everything that a record holds."""
    found: dict[int, Any] = {}
    fields: list[tuple[Any, str]] = [(content["program"], name) for name in content["program"]]
    waiting: list[Any] = list(content["program"].values())
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple, set)):
            waiting += one
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif type(one).__module__.startswith("neuron_cpu.core") and id(one) not in found:
            if isinstance(one, (OpSpec, Enum)) or type(one).__name__ in ("DType", "NeuronCore"):
                continue
            found[id(one)] = one
            for name in records._FORM.fields(type(one)):
                fields.append((one, name))
                waiting.append(getattr(one, name))
    return fields


def get(one, name):
    return one[name] if isinstance(one, dict) else getattr(one, name)


def put(one, name, value):
    if isinstance(one, dict):
        one[name] = value
    else:
        object.__setattr__(one, name, value)


def others(value, pool, draw):
    """Another value for a field."""
    made: list[Any] = [None, True, False, 0, 1, 2, -1, "", (), []]
    if isinstance(value, bool):
        made = [not value] * 20 + made
    elif isinstance(value, int):
        made += [value + 1, value - 1, 2 * value, value // 2, -value, 128, 1 << 20]
    elif isinstance(value, float):
        made += [0.0, 2 * value, -value, float("inf"), float("nan")]
    elif isinstance(value, str):
        made += ["input", "output", "const", "local", "spill", "hbm", "shared_hbm", "sbuf", "psum"]
        made += ["affine", "sequential", "grid", *Engine.__members__]
    elif isinstance(value, (tuple, list)) and value:
        at = draw.randrange(len(value))
        few = list(value)
        changed = [
            few[:at] + few[at + 1 :],
            few + few[at : at + 1],
            few[::-1],
            few[:at] + [others(few[at], pool, draw)] + few[at + 1 :],
        ]
        made += 3 * [type(value)(one) for one in changed]
    elif isinstance(value, np.ndarray):
        made += [
            np.zeros_like(value),
            np.ones_like(value),
            ~value if value.dtype == bool else -value,
        ]
    elif isinstance(value, OpSpec):
        made += draw.sample(list(TABLE.values()), 5)
    elif isinstance(value, (Engine, type(None))):
        made += list(Engine)
    same = [one for one in pool if type(one) is type(value)]
    if same and not isinstance(value, (bool, int, str, float, type(None))):
        made += draw.choices(same, k=8)
    return draw.choice(made)


class Change(NamedTuple):
    """What was changed: `Class.field`, and the values in words.

    Attributes:
        chosen: whether the author of a kernel may have written it so: `CHOICES`, another of the
            engines that the instruction has, the same elements in another access pattern, the other
            memory on the chip, or a tile with room to spare.
    """

    where: str
    before: str
    after: str
    chosen: bool


class Record:
    """A record that is read once; each change of it is undone."""

    def __init__(self, data):
        self._content = records.loaded(data)
        self._instructions = list(self._content["program"]["instructions"])
        self._owners: dict[tuple[type, str], list[Any]] = {}
        values = {}
        for one, name in objects(self._content):
            self._owners.setdefault((type(one), name), []).append(one)
            value = get(one, name)
            values[id(value)] = value
        self._kinds = list(self._owners)
        self._values = [value for value in values.values() if value is not None]

    def changed(self, number, draw):
        """The record with some fields changed."""
        told, undone = [], []
        try:
            for _ in range(number):
                kind, name = draw.choice(self._kinds)
                one = draw.choice(self._owners[kind, name])
                before, elements = get(one, name), _elements(one)
                undone.append((one, name, before))
                put(one, name, after := others(before, self._values, draw))
                chosen = name in CHOICES or (elements is not None and elements == _elements(one))
                if name == "engine":
                    users = [i.op for i in self._instructions if getattr(i, "attrs", None) is one]
                    chosen = all(after in (None, *op.engines) for op in users)
                if name == "buffer" and isinstance(after, str):
                    chosen = {before, after} <= {"sbuf", "psum"}
                if name == "shape" and isinstance(one, Storage) and one.on_chip:
                    chosen = _is_larger(before, after)
                of = "Program" if kind is dict else kind.__name__
                told.append(Change(f"{of}.{name}", _words(before), _words(after), chosen))
            return told, records.dumped(self._content)
        finally:
            for one, name, before in reversed(undone):
                put(one, name, before)


def _is_larger(before, after):
    """Whether a tile has as many partitions as before and more elements in each."""
    whole = isinstance(after, tuple) and all(type(n) is int for n in after) and bool(after)
    return whole and after[0] == before[0] and math.prod(after) >= math.prod(before)


def _elements(view):
    """The elements of a view, in no order; None of what is no view."""
    try:
        return sorted(regions.elements(view, np.ones(view.shape, bool)).tolist())
    except Exception:  # of numbers that are none, a kernel's tensors among them
        return None


def _words(value):
    try:
        return repr(value)[:80]
    except Exception:  # a part of it has been changed before
        return f"a {type(value).__name__}"


class Known(NamedTuple):
    """A record, and what it costs and computes unchanged."""

    name: str
    case: Case
    record: Record
    time: float
    share: float
    trials: list[tuple[list[torch.Tensor], list[torch.Tensor]]]  # inputs and results


def known(name):
    operator = suite.operator(name)
    case = operator.cases[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = verdict.traced(operator.kernel, case, ())
        data = records.dumped({"program": program})
        asked = verdict.asked_for(case, ())
        read = records.program(records.loaded(data), asked)
        speed = verdict.speed(read, SETTINGS)
        inputs = [verdict.tensors_of(*case.values(kind, 0)) for kind in operator.values]
        trials = [(one, verdict.run(read, Plan(read), one)) for one in inputs]
    return Known(name, case, Record(data), speed.time_ns, speed.roofline_percent, trials)


def outcome(of, data):
    """The word for a record: refused, dearer, wrong; or better: faster, or fuller of products."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = records.program(records.loaded(data), verdict.asked_for(of.case, ()))
            speed = verdict.speed(program, SETTINGS)
            verdict.hold_above(program, speed.time_ns)
            faster = speed.time_ns < of.time * (1 - 1e-9)
            if not faster and speed.roofline_percent <= of.share * (1 + 1e-9):
                return "dearer"
            for inputs, expected in of.trials:
                results = verdict.run(program, Plan(program), inputs)
                for mine, right in zip(results, expected, strict=True):
                    pair = mine.double(), right.double()
                    if mine.shape != right.shape or not torch.allclose(*pair, 1e-3, 1e-5, True):
                        return "wrong"
    except TimeoutError:
        raise
    except Exception:  # as the judge's process takes it
        return "refused"
    return "faster" if faster else "fuller"


def tried(of, number, draw):
    """The outcome of some changes at a time, and what they were; a form of no record is refused."""
    try:
        told, data = of.record.changed(number, draw)
    except Exception as error:  # it has no form of a record at all
        return "refused", error
    word = outcome(of, data)
    return "chosen" if word in BETTER and any(one.chosen for one in told) else word, told


def piece(given):
    """Words for some changes of one operator's record, and what is better, in words."""
    name, changes, seed = given
    base, draw = known(name), random.Random(seed)
    counts: Counter[str] = Counter()
    found = []
    for k in range(changes):
        try:
            with limits.bounded(SECONDS, MEMORY):
                word, told = tried(base, 1 + k % 2, draw)
        except TimeoutError:  # as the judge's own limit ends it
            word, told = "late", None
        counts[word] += 1
        if word in BETTER:
            found.append(f"{name} {word} {told}")
    return counts, found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    names = list(suite.names())
    pieces = [
        (names[number % len(names)], min(PIECE, given.changes - start), f"{given.seed} {number}")
        for number, start in enumerate(range(0, given.changes, PIECE))
        if start >= given.start
    ]
    counts: Counter[str] = Counter()
    with multiprocessing.Pool(given.jobs) as pool:
        for words, found in pool.imap(piece, pieces):
            counts += words
            for line in found:
                print(line, flush=True)
            print(f"{counts.total()} of {given.changes}: {dict(counts)}", file=sys.stderr)
    sys.exit(any(counts[word] for word in BETTER))


if __name__ == "__main__":
    main()
