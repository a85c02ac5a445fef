"""Declared parameters, and a kernel's file with other values for them."""

import importlib
import sys

import pytest

from neuron_cpu.errors import UsageError
from neuron_cpu.tune import space

FILE = """
import neuronxcc.nki as nki
import helper_of_tuning as helper

WIDTH: int = 128
BYTES = WIDTH * 4
TWICE = 1
TWICE = 2
SPACE = {"WIDTH": (64, 128), "rows": range(1, 3)}


@nki.jit
def kernel(x_hbm, rows=32):
    return (WIDTH, BYTES, rows, helper.DEPTH, helper.HALF)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "tuned_file.py").write_text(FILE)
    (tmp_path / "helper_of_tuning.py").write_text("DEPTH = 8\nHALF = DEPTH // 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tuned_file", "helper_of_tuning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("tuned_file")
    return space.Source(tmp_path / "tuned_file.py", "kernel", module)


def test_forms_of_values():
    texts = ["tile=128,256,128", "rows=64..192:64", "order=rows,columns", "m.SIZE=1.5,(1, 2)"]
    assert space.parse(texts) == {
        "tile": [128, 256],
        "rows": [64, 128, 192],
        "order": ["rows", "columns"],
        "m.SIZE": [1.5, "(1", " 2)"],
    }
    assert space.size(space.parse(texts[:2])) == 6
    assert list(space.points({"a": [1, 2], "b": [3]})) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


@pytest.mark.parametrize(
    "text", ["tile", "tile=", "=3", "2=3", "a b=3", "n=5..1", "n=1..9:0", "n=1..1000000"]
)
def test_what_declares_nothing(text):
    with pytest.raises(UsageError, match="--space"):
        space.parse([text])


def test_what_is_computed_from_a_constant_follows(source):
    code = source.at({"WIDTH": 64, "rows": 16, "helper_of_tuning.DEPTH": 32})
    assert (code["name"], code["arguments"]) == ("kernel", "rows=16")
    assert code["source"] == FILE.replace("int = 128", "int = 64")
    assert code["modules"] == {"helper_of_tuning": "DEPTH = 32\nHALF = DEPTH // 2\n"}
    assert source.at({}) == code | {"source": FILE, "modules": {}, "arguments": ""}


def test_lines_keep_their_numbers(source):
    source.path.write_text("A = [\n    1,\n]\nB = (\n    2\n)  # two\n")
    assert source.at({"A": 3, "B": 4})["source"] == "A = 3\n\n\nB = (\n    4\n)  # two\n"


def test_an_object_of_the_file_is_called_by_its_place(source):
    source.module.SPACE = {"rows": (1, {object})}
    point = {"rows": source.module.SPACE["rows"][1]}
    assert source.at(point)["arguments"] == "rows=list(SPACE['rows'])[1]"


@pytest.mark.parametrize("name", ["ABSENT", "TWICE", "absent_module.SIZE", "helper_of_tuning.NONE"])
def test_names_of_nothing(name, source):
    with pytest.raises(UsageError, match="--space names"):
        source.at({name: 1})


def test_values_now(source):
    assert source.current({"x_hbm": [7, 8], "rows": [1], "WIDTH": [64]}) == {
        "x_hbm": 7,
        "rows": 32,
        "WIDTH": 128,
    }
    with pytest.raises(UsageError, match="'Rows', expected rows; write rows="):
        source.current({"Rows": [1]})


def test_a_space_in_the_file(source):
    module = source.module
    assert space.declared(module) == {"WIDTH": [64, 128], "rows": [1, 2]}
    for wrong in ({}, [1], {"a": 3}, {1: (2,)}, {"a": ()}):
        module.SPACE = wrong
        with pytest.raises(UsageError, match="SPACE"):
            space.declared(module)
    del module.SPACE
    with pytest.raises(UsageError, match="nothing is declared"):
        space.declared(module)
