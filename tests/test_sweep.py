"""`neuron_cpu sweep` as a user types it."""

import json

import pytest

from neuron_cpu.__main__ import main
from tests.judge.test_check_command import FILE


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def sweep(*arguments):
    return main(["sweep", "mine.py:scaled", *arguments])


def test_sizes_are_doubled_and_timed(folder, capsys):
    files = ["--json", "found.json"]
    assert sweep("--arg", "128xN:bf16", "--range", "N=128..2048", *files) == 0
    rows = json.loads((folder / "found.json").read_text())["N"]
    assert [row["size"] for row in rows] == [128, 256, 512, 1024, 2048]
    assert all(0 < row["bound_ns"] < row["time_ns"] for row in rows)
    assert rows[0]["time_ns"] < rows[-1]["time_ns"] and "share" in capsys.readouterr().out


def test_an_illegal_size_is_told_among_the_others(capsys):
    assert sweep("--arg", "Nx64:f32", "--range", "N=64..256:64") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("refused") == 2 and "exceeds architecture limitation of 128" in said


@pytest.mark.parametrize(
    ("size", "told"),
    [("M=1..4", "no --arg has"), ("N=4..1", "expected"), ("N=a,b", "expected sizes"), ("N", "N")],
)
def test_a_range_that_means_nothing_is_refused(size, told, capsys):
    assert sweep("--arg", "128xN:bf16", "--range", size) == 2
    assert told in capsys.readouterr().err
