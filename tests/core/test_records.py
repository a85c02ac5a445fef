"""The record of an instruction: what asks it, and that nothing else has to be told of a new one."""

from dataclasses import replace

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from neuron_cpu import suite
from neuron_cpu.core import NkiError
from neuron_cpu.core.current import releases
from neuron_cpu.core.current.operands import alike, isa, put
from neuron_cpu.core.device.spec import Engine, using
from neuron_cpu.core.instructions import entry
from neuron_cpu.core.instructions.vector import TENSOR_TENSOR, BinaryAttrs, Step, StepsAttrs
from neuron_cpu.core.program.attributes import Attrs
from neuron_cpu.core.program.program import Instruction
from neuron_cpu.core.program.view import View
from neuron_cpu.core.report import report
from neuron_cpu.core.time.schedule import schedule


def added(**changes):
    """A tensor_tensor of a traced kernel, with other fields."""

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.add(nl.load(x), nl.load(x)))
        return out

    found = next(i for i in kernel.trace(np.ones((4, 8), np.float32)) if i.op is TENSOR_TENSOR)
    fields = {name: getattr(found, name) for name in ("op", "dst", "src", "attrs")} | changes
    return Instruction(*fields.values(), found.frame, found.source)


WRONG = {
    "constants Attrs, expected BinaryAttrs": lambda one: {"attrs": Attrs()},
    "engine Engine.TENSOR": lambda one: {"attrs": replace(one.attrs, engine=Engine.TENSOR)},
    "1 operands, expected 2 to 2": lambda one: {"src": one.src[:1]},
    "2 results, expected 1 to 1": lambda one: {"dst": one.dst * 2},
    "op 'sum', expected one of": lambda one: {"attrs": BinaryAttrs(op="sum")},
    "sign 3, expected one of": lambda one: {"attrs": BinaryAttrs(op="add", sign=3)},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_record_that_no_call_makes_is_told(said):
    one = added()
    assert not one.op.misfit(one)
    assert one.op.misfit(added(**WRONG[said](one))).startswith(said)


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        (StepsAttrs(steps=(Step("add", 1.0),) * 3), "steps "),
        (StepsAttrs(steps=(Step("exp", 1.0),)), "steps "),
        (StepsAttrs(steps=(), reduce_op="exp"), "reduce_op 'exp'"),
    ],
)
def test_constants_know_their_domains(attrs, said):
    assert attrs.misfit().startswith(said)


@pytest.mark.parametrize("name", suite.names())
def test_what_calls_make_fits(name):
    operator = suite.operator(name)
    positional, named = operator.cases[0].meta()
    program = operator.kernel.trace(*positional, **named)
    with using(program.core):
        assert not [said for i in program if (said := i.op.misfit(i))]


def test_a_new_instruction_is_its_entry_and_its_function(monkeypatch):
    """Nothing but the two is told of it: it is exported, gated, run, timed and doubted."""
    monkeypatch.setattr(entry, "TABLE", dict(entry.TABLE))
    monkeypatch.setitem(entry.FORMS, "nki.isa", dict(entry.FORMS["nki.isa"]))
    cycles = entry.streaming(3.0)
    half = entry.OpSpec(
        "halve",
        "elementwise",
        Attrs,
        lambda _, xs: xs[0] / 2,
        cycles,
        generation=3,
        published=False,
    )

    @isa(half, came="2.31", keywords={"twice": "2.33"})
    def halve(dst: View, data: View, twice=False):
        dst, data = alike("halve", dst, data)
        made = put(half, (dst,), (data,), Attrs())
        return put(half, (dst,), (dst,), Attrs()) if twice else made

    monkeypatch.setattr(nisa, "halve", releases.exported("nki.isa")["halve"], raising=False)

    @nki.jit
    def kernel(x, words):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nisa.halve(tile, tile, **words)
        nl.store(out, tile)
        return out

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert np.array_equal(kernel(x, {}), x / 2)
    assert np.array_equal(kernel(x, {"twice": True}), x / 4)
    program = kernel.trace(x, {})
    assert "nobody publishes the cycles of halve" in report.doubts(program)[-1]
    assert schedule(program).total > 0
    assert [one.function for one in half.forms] == [halve]
    for name, value, words, said in (
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1", {}, "halve is there from gen3 on"),
        ("NEURON_CPU_NKI", "2.30", {}, "halve is there from SDK 2.31 on"),
        ("NEURON_CPU_NKI", "2.32", {"twice": 1}, r"halve\(twice=\) is there from SDK 2.33 on"),
    ):
        with monkeypatch.context() as within:
            within.setenv(name, value)
            with pytest.raises(NkiError, match=said):
                kernel(x, words)
