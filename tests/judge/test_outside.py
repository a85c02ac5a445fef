"""Programs that a stranger's process recorded, judged outside of it, for any file and function."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle

import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.language as nl
import pytest
import torch

from neuron_cpu import suite
from neuron_cpu.core import NkiError
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.judge import recorder, verdict
from neuron_cpu.judge.verdict import Settings
from neuron_cpu.oracle import forms
from neuron_cpu.sandbox import records
from neuron_cpu.suite import strangers
from neuron_cpu.suite.strangers import Judging
from tests.crossed import full


@pytest.mark.parametrize(
    "name", [n if n in ("rope", "attention") else full(n)
             for n in suite.names()]
)  # fmt: skip
def test_a_program_is_the_same_as_plain_data(name):
    operator = suite.operator(name)
    for case in operator.cases:
        program = verdict.traced(operator.kernel, case, ())
        same = records.program(records.loaded(records.dumped({"program": program})))
        assert verdict.speed(same, Settings()) == verdict.speed(program, Settings())
        inputs = verdict.tensors_of(*case.values("random", 0))
        pairs = zip(*(verdict.run(p, verdict.Plan(p), inputs) for p in (program, same)))
        assert all(torch.equal(a, b) for a, b in pairs)


def _products(program):
    return [one for one in program if one.op.multiplies]


def _set(of, name, value):
    object.__setattr__(of, name, value)


# What a record may leave out, or say otherwise: as random changes of records have found it.
LESS = {
    "storages of another program": lambda p: p.storages.pop(),
    "storages of another .*": lambda p: p.storages.append(p.storages[0]),
    ".* of another size": lambda p: _set(p.storages[-1], "shape", (-1, *p.storages[-1].shape[1:])),
    "storages .*": lambda p: p.aliases.append((p.storages[0], p.storages[1])),
    "2 cores, expected those of the grid": lambda p: _set(p, "cores", 2),
    ".* with .*Attrs": lambda p: _set(_products(p)[0], "attrs", p.instructions[0].attrs),
    ".*expected fp8 on gen3": lambda p: _set(_products(p)[0].attrs, "double_row", True),
    ".* in shared_hbm": lambda p: [_set(s, "buffer", "shared_hbm") for s in p.storages],
    ".*no instruction wrote|.*undefined|.*never": lambda p: p.instructions.pop(0),
}


@pytest.mark.parametrize("told", LESS)
def test_a_record_that_says_less_than_there_was_is_refused(told):
    """The first seven made estimates of the same results 4 to 100 % shorter."""
    operator = suite.operator("matmul")
    traced = verdict.traced(operator.kernel, operator.cases[0], ())
    program = records.program(records.loaded(records.dumped({"program": traced})))
    LESS[told](program)
    with pytest.raises((ValueError, TypeError, NkiError), match=told):
        records.program(records.loaded(records.dumped({"program": program})))


def test_places_that_a_kernel_chose_are_plain_data_and_as_large_as_their_tensors():
    @nki.jit
    def placed(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        where = ncc.sbuf.alloc(lambda index, partitions, size: (0, 4096 * index[0]))
        tile = nl.ndarray((2, nl.par_dim(128), 64), dtype=x.dtype, buffer=where)
        for k in nl.affine_range(2):
            tile[k] = nl.load(x[:, k * 64 : k * 64 + 64])
            nl.store(out[:, k * 64 : k * 64 + 64], tile[k])
        return out

    traced = placed.trace(torch.empty(128, 128))
    program = records.program(records.loaded(records.dumped({"program": traced})))
    here, there = ([s.address for s in p.storages if s.address][0] for p in (traced, program))
    assert [(t.start, t.stop) for t in here] == [(0, 256), (4096, 4352)]
    assert [(t.start, t.stop) for t in there] == [(0, 256), (4096, 4352)]
    assert schedule(program).end == schedule(traced).end
    there[1].stop, there[0].partitions = 4100, 1
    again = records.program(records.loaded(records.dumped({"program": program})))
    (kept,) = [s.address for s in again.storages if s.address]
    assert [(t.stop, t.partitions) for t in kept] == [(256, 128), (4352, 128)]


HINTED = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

@nki.jit
def kernel(a, b):
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, nisa.nc_matmul(nl.load(a), nl.load(b), {hint}=True))
    return out
"""


@pytest.fixture(scope="module")
def judging(tmp_path_factory):
    made = Judging(tmp_path_factory.mktemp("answers"), (0,), forms.Bounds(memory_gib=2.0), 1)
    yield made
    made.close()


@pytest.mark.parametrize(
    "hint", ["is_stationary_onezero", "is_moving_onezero", "is_transpose"]
)  # fmt: skip
def test_a_promise_of_ones_and_zeros_is_held(hint, judging):
    """It saves passes of TensorE, so whoever gives it without cause was faster for nothing."""
    request = forms.Request(
        kernel=forms.Code(name="kernel", source=HINTED.replace("{hint}", hint)),
        reference=forms.Code(name="reference", source="def reference(a, b):\n    return a.T @ b\n"),
        cases=["128x128:f32 128x128:f32"],
        limits=judging.bounds,
    )
    found = judging.oracle.one(request)
    assert found["outcome"] == "refused" and "whose hint says ones and zeros" in found["sentence"]


@pytest.mark.parametrize(
    ("share", "change", "word", "said"),
    [
        (0.5, "", "correct", ""),
        (1e3, "", "failed", "which half of the task's data and products take"),
        (0.5, "dtype=nl.bfloat16", "wrong", "returns bfloat16 [77, 333], expected float32"),
    ],
)
def test_an_estimate_below_what_data_alone_take_is_refused(
    share, change, word, said, judging, monkeypatch
):
    """And so are results of other types than the task's."""
    monkeypatch.setattr(strangers, "LEAST_SHARE", share)
    text = suite.template("gelu")
    result = "dtype=x_hbm.dtype"
    assert result in text
    (judging.folder / "gelu.py").write_text(text.replace(result, change or result))
    outcome = judging.one("gelu")
    assert (outcome.word, said in outcome.sentence) == (word, True), outcome.sentence


def refused(content):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        records.program(records.loaded(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"[{}, [], []]", pickle.dumps(print), pickle.dumps({"program": {}})],
)
def test_bytes_of_another_origin_are_no_program(content):
    refused(content)


STORAGE = "neuron_cpu.core.program.storage:Storage"


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ({"x": {"class": ["pathlib:Path", "/"]}}, []),
        ({"x": {"class": ["neuron_cpu.core.program.program:Program", "x", [], None]}}, []),
        ({"x": {"class": [STORAGE, 0, [1], None, "hbm"]}}, []),
        ({"x": {"entry": ["matmul"]}}, []),
        ({"x": {"os": ["system"]}}, []),
        ({}, ["os:system"]),
        ({}, ["neuron_cpu.core.program.program:Program"]),
        ({}, ["neuron_cpu.core.instructions.entry:OpSpec"]),
    ],
)
def test_data_makes_no_objects_but_a_programs(head, names):
    """Only instances of a program's own classes, with their own fields; nothing is called."""
    batches = [[name, [number], []] for number, name in enumerate(names)]
    refused(json.dumps([{"dict": [["program", head]]}, batches]).encode())


@pytest.mark.parametrize("numbers", [[0, 0], [1, 2], [-1, 0], [0, 10**12], ["a", 0], [True, None]])
def test_no_instance_gets_the_fields_of_another(numbers):
    source = "neuron_cpu.core.program.storage:Source"
    columns = [["x", "y"], ["f", "g"], [1, 2]]  # file, function, line
    held = {"dict": [["x", {"objects": [0, 1]}]]}
    good = json.dumps([held, [[source, [0, 1], columns]]]).encode()
    assert [one.line for one in records.loaded(good)["x"]] == [1, 2]
    bad = json.dumps([held, [[source, numbers, columns]]]).encode()
    with pytest.raises(ValueError):
        records.loaded(bad)


def test_a_record_changes_nothing_that_others_share():
    """A pickle could: its state is set on whatever is named, a generation's clock or a class."""
    operator = suite.operator("gelu")
    program = verdict.traced(operator.kernel, operator.cases[0], ())
    before, clock = vars(type(program.storages[0])).copy(), dict(program.core.clock_hz)
    head, batches = json.loads(records.dumped({"program": program}))
    name, numbers, columns = next(one for one in batches if one[0] == STORAGE)
    object_ = {"object": numbers[0]}
    for odd in ([], {"generation": "gen2"}, object_, {"set": [1]}, {"slice": [0, 1, 2]}):
        for column in range(len(columns)):
            changed = [*columns[:column], [odd for _ in numbers], *columns[column + 1 :]]
            others = [one for one in batches if one[0] != STORAGE]
            with contextlib.suppress(Exception):
                content = json.dumps([head, [*others, [name, numbers, changed]]]).encode()
                records.program(records.loaded(content))
    assert vars(type(program.storages[0])) == before and program.core.clock_hz == clock


@pytest.mark.parametrize("by", ["judge", "oracle"])
def test_a_file_s_process_has_no_values_no_seeds_and_no_reference(by):
    """All that `recorder.record` is given, as it crosses to that process."""
    cases = suite.operator("embedding").cases
    if by == "judge":
        given = [case.public for case in cases]
    else:
        request = forms.Request(
            kernel=forms.Code(name="kernel", source="SOURCE"),
            cases=[str(one) for one in cases],
            reference=forms.Code(name="of_the_asker", source="REFERENCE"),
            seeds=[123456789],
        )
        asked = request.recording("SOURCE")
        given = asked.cases
        assert not any(word in repr(asked) for word in ("123456789", "REFERENCE", "of_the_asker"))
    fields = {one.name for one in dataclasses.fields(recorder.Recording)}
    assert fields == {
        "file",
        "function",
        "cases",
        "grid",
        "bounds",
        "text",
        "alone",
        "modules",
        "arguments",
        "environment",
    }
    assert [str(one) for one in given] == ["77x1:i32 200x96:f32", "256x1:i32 8192x512:bf16"]
    assert all(one.hide is None for one in given)
