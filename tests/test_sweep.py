"""`neuron_cpu sweep` as a user types it."""

import json

import pytest
from PIL import Image

from neuron_cpu.__main__ import main
from tests.judge.test_check_command import FILE


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def sweep(*arguments):
    return main(["sweep", "mine.py:scaled", *arguments])


def test_sizes_are_doubled_timed_and_drawn(folder, capsys):
    files = ["--json", "found.json", "--plot", "found.png"]
    assert sweep("--arg", "128xN:bf16", "--range", "N=128..2048", *files) == 0
    rows = json.loads((folder / "found.json").read_text())["N"]
    assert [row["size"] for row in rows] == [128, 256, 512, 1024, 2048]
    assert all(0 < row["bound_ns"] < row["time_ns"] for row in rows)
    assert rows[0]["time_ns"] < rows[-1]["time_ns"] and "share" in capsys.readouterr().out
    assert min(Image.open(folder / "found.png").size) > 400


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


def test_a_plot_is_a_whole_picture_or_nothing(folder, capsys):
    sizes = ["--arg", "128xN:bf16", "--range", "N=128..256"]
    assert sweep(*sizes, "--plot", "sizes") == 0
    assert Image.open(folder / "sizes").format == "PNG"
    assert sweep(*sizes, "--plot", "sizes.xyz") == 2
    assert "expected a name such as sizes.png" in capsys.readouterr().err
    assert sweep(*sizes, "--plot", "/dev/full") == 2
    assert "Cannot write /dev/full" in capsys.readouterr().err
    assert sorted(path.name for path in folder.glob("sizes*")) == ["sizes"]
