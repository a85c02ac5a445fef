"""Records that a stranger's process may send: what they say is made, or held against something."""

import random

import numpy as np
import pytest

from neuron_cpu import suite
from neuron_cpu.core import NkiError
from neuron_cpu.core.device import dtypes
from neuron_cpu.core.device.spec import Engine
from neuron_cpu.core.program.storage import Frame, Loop
from neuron_cpu.judge import cases, verdict
from neuron_cpu.sandbox import records
from tests.sandbox import changed_records

CHANGES = 60  # of each of these operators; make records has 100,000 of all
OPERATORS = "gelu", "row_sum", "embedding", "rope", "argmax", "matmul"


@pytest.mark.parametrize("name", OPERATORS)
def test_no_changed_record_is_better_than_the_record(name):
    base, draw = changed_records.known(name), random.Random(name)
    found = [changed_records.tried(base, 1 + number % 2, draw) for number in range(CHANGES)]
    words = {word for word, _ in found}
    assert not changed_records.BETTER & words, [
        one for one in found if one[0] in changed_records.BETTER
    ]
    assert {"refused", "dearer"} <= words


def forged(of, change, case=""):
    """The operator's record with a change, as the judge takes it."""
    operator = suite.operator(of)
    one = cases.case(case) if case else operator.cases[0]
    program = verdict.traced(operator.kernel, one, ())
    content = records.loaded(records.dumped({"program": program}))
    change(content["program"])
    asked = verdict.asked_for(one, ())
    return records.program(records.loaded(records.dumped(content)), asked)


def put(of, **values):
    for name, value in values.items():
        object.__setattr__(of, name, value)


def first(record, name):
    return next(one for one in record["instructions"] if one.op.name == name)


def in_turn(record):
    """All instructions as iterations of one loop, the last one first."""
    loop = Loop(0, "affine", len(record["instructions"]), None)
    for number, one in enumerate(reversed(record["instructions"])):
        one.frame = Frame(loop, number, None)


def counted_from(start):
    """All instructions as iterations of one loop, whose first has the number ``start``."""

    def change(record):
        loop = Loop(0, "affine", len(record["instructions"]), None)
        for number, one in enumerate(record["instructions"], start):
            one.frame = Frame(loop, number, None)

    return change


def smaller(record):
    for one in record["inputs"]:
        put(one, dtype=dtypes.BFLOAT16)
    for instruction in record["instructions"]:
        for view in instruction.src:
            if view.storage in record["inputs"]:
                view.dt = dtypes.BFLOAT16


# What a process may say of its kernel, and in which words it is refused.
ACTS = {
    "another engine's work": (
        "gelu", lambda r: put(first(r, "activation").attrs, engine=Engine.TENSOR), "engine",
    ),
    "an engine for a transfer": (
        "gelu", lambda r: put(first(r, "dma_copy").attrs, engine=Engine.SCALAR), "engine",
    ),
    "an engine that cannot": (
        "gelu", lambda r: put(first(r, "tensor_tensor").attrs, engine=Engine.SCALAR), "engine",
    ),
    "arguments of another type": ("gelu", smaller, "arguments .*bfloat16"),
    "an argument that is in SBUF": (
        "gelu", lambda r: put(r["inputs"][0], buffer="sbuf"), "in sbuf",
    ),
    "an argument that is missing": ("vector_add", lambda r: r["inputs"].pop(), "arguments"),
    "more partitions than there are": (
        "gelu", lambda r: put(r["storages"][-1], shape=(1 << 12, 1)), "more partitions",
    ),
    "elements of another size": (
        "gelu", lambda r: put(first(r, "activation").src[0], dt=dtypes.BFLOAT16), "read as",
    ),
    "iterations in another order": ("gelu", in_turn, "out of order"),
    "an iteration before the first": ("gelu", counted_from(-1), "iteration -1 of"),
    "an iteration behind the last": ("gelu", counted_from(1), "iteration ([0-9]+) of \\1"),
    "a mask of other elements": (
        "gelu", lambda r: put(first(r, "activation").attrs, mask=np.ones((1, 1), bool)), "a mask",
    ),
    "cores that gen2 has not": ("gelu", lambda r: r.update(cores=2, grid=(2,)), "2 cores"),
    "a grid that nobody asked for": ("gelu", lambda r: r.update(grid=(2,)), "grid"),
    "another generation's cores": ("gelu", lambda r: r.update(cores=2), "cores"),
    "a sum where there is none": (
        "gelu", lambda r: put(first(r, "activation").attrs, accumulate=True), "a sum",
    ),
    "a constant of another type": (
        "gelu", lambda r: put(first(r, "activation").attrs, scale="1"), "scale",
    ),
    "orders of another language": ("gelu", lambda r: r.update(today=True, in_order=True), "orders"),
    "an instruction twice": (
        "gelu", lambda r: r["instructions"].append(r["instructions"][-1]), "twice",
    ),
    "a transfer of fewer elements": (
        "gelu", lambda r: put(first(r, "dma_copy").src[0], shape=(70, 333)), "elements for",
    ),
    "elements outside of a tensor": (
        "gelu", lambda r: put(first(r, "dma_copy").src[0], offset=1 << 20), "no elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_what_a_record_says_of_itself_is_not_believed(act):
    name, change, words = ACTS[act]
    forged(name, lambda record: None)
    with pytest.raises((ValueError, TypeError, LookupError, NkiError), match=words):
        forged(name, change)


def test_a_field_that_follows_from_others_is_in_no_record():
    operator = suite.operator("gelu")
    program = verdict.traced(operator.kernel, operator.cases[0], ())
    content = records.loaded(records.dumped({"program": program}))["program"]
    assert not {"macs", "direct_allocation", "unwritten_at"} & set(content)
    apart = [
        name for name in ("role", "mutable", "size", "id") if hasattr(content["inputs"][0], name)
    ]
    assert apart == []
    read = forged("gelu", lambda record: None)
    assert [s.role for s in read.storages] == [s.role for s in program.storages]
    assert [s.id for s in read.storages] == [s.id for s in program.storages]


def test_an_estimate_below_products_or_results_alone_is_refused():
    operator = suite.operator("matmul")
    program = verdict.traced(operator.kernel, operator.cases[-1], ())
    products = program.macs / program.core.peak_macs_per_ns
    for least in (products, verdict.speed(program, verdict.Settings()).time_ns):
        verdict.hold_above(program, least * 1.001)
    with pytest.raises(ValueError, match="expected at least"):
        verdict.hold_above(program, 0.99 * products)
