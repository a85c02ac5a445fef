"""Declared parameters, and a kernel's file with other values for them."""

from __future__ import annotations

from pathlib import Path

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
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> space.Source:
    (tmp_path / "tuned_file.py").write_text(FILE)
    (tmp_path / "helper_of_tuning.py").write_text("DEPTH = 8\nHALF = DEPTH // 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return space.Source(tmp_path / "tuned_file.py", "kernel")


def test_forms_of_values() -> None:
    texts = ["tile=128,256,128", "rows=64..192:64", "order=rows,columns", "m.SIZE=1.5,(1, 2)"]
    assert space.parse(texts) == {
        "tile": [128, 256],
        "rows": [64, 128, 192],
        "order": ["rows", "columns"],
        "m.SIZE": [1.5, "(1", " 2)"],
    }
    assert space.size(space.parse(texts[:2])) == 6
    assert list(space.points({"a": [1, 2], "b": [3]})) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


@pytest.mark.parametrize("text", ["tile", "tile=", "=3", "2=3", "a b=3", "n=5..1", "n=1..9:0",
                                  "n=1..1000000"])  # fmt: skip
def test_what_declares_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="--space"):
        space.parse([text])


def test_what_is_computed_from_a_constant_follows(source: space.Source) -> None:
    point = {"WIDTH": 64, "rows": 16, "helper_of_tuning.DEPTH": 32}
    kernel, keywords = source.at(point)
    assert keywords == {"rows": 16}
    assert kernel.function(None, **keywords) == (64, 256, 16, 32, 16)
    again, _ = source.at({})  # what one point replaced, the next one does not see
    assert again.function(None)[:3] == (128, 512, 32)


def test_the_values_that_the_files_have(source: space.Source) -> None:
    names = ["WIDTH", "rows", "helper_of_tuning.DEPTH", "x_hbm"]
    assert source.current(names) == {"WIDTH": 128, "rows": 32, "helper_of_tuning.DEPTH": 8}


@pytest.mark.parametrize("name", ["ABSENT", "TWICE", "absent_module.SIZE", "helper_of_tuning.NONE"])
def test_names_of_nothing(name: str, source: space.Source) -> None:
    with pytest.raises(UsageError, match="--space names"):
        source.at({name: 1})


def test_a_space_in_the_file(source: space.Source) -> None:
    import sys

    source.at({})
    module = sys.modules["tuned_file"]
    assert space.declared(module) == {"WIDTH": [64, 128], "rows": [1, 2]}
    for wrong in ({}, [1], {"a": 3}, {1: (2,)}, {"a": ()}):
        module.SPACE = wrong
        with pytest.raises(UsageError, match="SPACE"):
            space.declared(module)
    del module.SPACE
    with pytest.raises(UsageError, match="nothing is declared"):
        space.declared(module)
