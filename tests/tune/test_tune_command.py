"""`neuron_cpu tune` as a user types it; the search in processes is one run for all tests."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neuron_cpu.__main__ import main
from neuron_cpu.sandbox import limits
from neuron_cpu.tune.search import Search, Trial, beaten
from neuron_cpu.tune.tables import reasons
from tests.conftest import REPOSITORY

FILE = """
import time
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

WIDTH = 64


@nki.jit
def doubled(x_hbm, factor=2.0, trick="none", wait=0):
    rows, width = x_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    if trick == "raise":
        raise ValueError("odd")
    for column in range(0, width, WIDTH):
        x_sb = nl.load(x_hbm[:, column : column + WIDTH])
        if trick == "illegal":
            nl.store(out_hbm, x_sb)
        nl.store(out_hbm[:, column : column + WIDTH], nl.multiply(x_sb, factor))
    time.sleep(wait)
    return out_hbm


def reference(x):
    return x * 2.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tuned")
    (made / "tuned.py").write_text(FILE)
    return made


def tune(folder, *arguments):
    target = f"{folder / 'tuned.py'}:doubled"
    return main(["tune", target, "--arg", "128x512:bf16", *arguments])


@pytest.fixture(scope="module")
def found(folder):
    """Twelve points, of which two thirds cannot be used."""
    figures = folder / "figures.json"
    space = ["WIDTH=256,512", "factor=2.0,3.0", "trick=none,illegal,raise"]
    status = tune(
        folder,
        "--ref",
        f"{folder / 'tuned.py'}:reference",
        "--jobs",
        "2",
        "--json",
        str(figures),
        "--space",
        *space,
    )
    assert status == 0
    return json.loads(figures.read_text())


def test_only_legal_and_right_points_are_kept(found):
    trials = found["trials"]
    points = [tuple(trial["point"].values()) for trial in trials]
    assert len(points) == len(set(points)) == 12
    for trial in trials:
        width, factor, trick = trial["point"].values()
        if trick == "raise":
            assert trial["kind"] == "failed" and "ValueError: odd" in trial["refusal"]
        elif trick == "illegal" and width < 512:
            assert trial["kind"] == "refused"
        elif factor == 3.0:  # where a right point is as good in both, a wrong one is not run
            assert trial["kind"] == "wrong" or not trial["checked"]
    assert found["front"] and all(t["checked"] for t in found["front"])
    assert all(t["point"]["factor"] == 2.0 for t in found["front"])


def test_the_front_is_time_against_sbuf(found):
    times = [t["time_ns"] for t in found["front"]]
    sizes = [t["sbuf_bytes"] for t in found["front"]]
    assert times == sorted(times) and sizes == sorted(sizes, reverse=True)
    assert found["front"][0]["point"]["WIDTH"] > 64 and times[0] < found["now"]["time_ns"]
    assert found["now"]["point"] == {"WIDTH": 64, "factor": 2.0, "trick": "none"}


def test_points_that_others_beat():
    assert beaten((2.0, 5), [(1.0, 5)]) and beaten((2.0, 5), [(2.0, 4), (2.0, 5)])
    assert not beaten((2.0, 5), [(2.0, 5), (1.0, 6), (3.0, 4)])


def test_a_legal_point_that_warned_says_so():
    cases = [{"warnings": []}, {"warnings": ["73 elements are missing"]}]
    trials = [Trial({}, answer={"cases": cases}), Trial({}, answer={"cases": cases[:1]})]
    assert reasons(trials) == [("legal, but warned of: 73 elements are missing", 1)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--space", "WIDHT=1,2"], "a constant of its file (WIDTH"),
        (["--space", "rows=64,8"], "give the kernel an argument rows=64, and use it there"),
        (["--space", "WIDTH"], "expected NAME=VALUE"),
        (["--space", "WIDTH=64-256"], "write --space WIDTH=64,128,256."),
        (["--space", "WIDTH=64:100"], "write --space WIDTH=64..100."),
        ([], "nothing is declared"),
        (["--space", "WIDTH=64", "--values", "odd"], "--values without a reference"),
        (["--space", "WIDTH=64", *["--arg", "1"] * 4], "fails unchanged"),
        (["--space", "WIDTH=64", "--ref", "absent.py:f"], "absent.py does not exist"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence, folder, capsys):
    assert tune(folder, *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_an_interrupted_search_prints_what_it_has(folder, capsys, monkeypatch):
    finish = Search._finish

    def interrupt_after(self, *arguments):
        finish(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_finish", interrupt_after)
    before = set(multiprocessing.active_children())
    assert tune(folder, "--jobs", "1", "--space", "wait=0,1000") == 130
    told = capsys.readouterr()
    assert "1 points tried: 1 legal" in told.out and "interrupted" in told.err
    started = set(multiprocessing.active_children()) - before
    for process in started:
        process.join(30)
    assert not any(process.is_alive() for process in started)


def test_a_point_that_takes_too_long_is_left(folder, capsys):
    assert tune(folder, "--jobs", "1", "--space", "wait=1000", "--time-limit", "4") == 1
    assert "1 points tried: 1 failed" in capsys.readouterr().out


def test_a_point_that_ends_its_process_costs_itself(folder, capsys):
    ending = FILE.replace("time.sleep(wait)", "if wait: import os; os._exit(wait)")
    (folder / "ends.py").write_text(ending)
    target = f"{folder / 'ends.py'}:doubled"
    space = ["--space", "wait=0,3", "--jobs", "1"]
    assert main(["tune", target, "--arg", "128x512:bf16", *space]) == 0
    told = capsys.readouterr()
    assert "1 legal, 1 failed" in told.out and "status 3" in told.out


def test_a_constant_of_a_module_and_an_object_of_the_space(folder, capsys):
    """Both reach the oracle's process; the reference gets neither."""
    (folder / "widths.py").write_text("WIDTH = 64\n")
    file = FILE.replace("WIDTH = 64", "import widths").replace("WIDTH)", "widths.WIDTH)")
    file = file.replace(" + WIDTH", " + widths.WIDTH").replace(
        "nl.load(", "nl.load(dtype=kind, src="
    )
    file = file.replace("factor=2.0", "kind=nl.bfloat16, factor=2.0")
    file += "\n\nSPACE = {'kind': (nl.float32, nl.bfloat16), 'widths.WIDTH': (64, 512)}\n"
    (folder / "spaced.py").write_text(file)
    options = ["--ref", f"{folder / 'spaced.py'}:reference", "--json", str(folder / "spaced.json")]
    target = f"{folder / 'spaced.py'}:doubled"
    assert main(["tune", target, "--arg", "128x512:bf16", "--jobs", "1", *options]) == 0
    content = json.loads((folder / "spaced.json").read_text())
    assert len({trial["sbuf_bytes"] for trial in content["trials"]}) == 4
    assert content["front"][0]["answer"]["cases"][0]["estimate"]["engine_percent"]


def test_a_large_space_without_optuna_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert tune(folder, "--space", "WIDTH=64,128", "--jobs", "1", "--points", "1") == 2
    assert "pip install optuna, or raise --points" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_search_keeps_its_points_and_leaves_nothing(number, folder, tmp_path):
    figures = tmp_path / "f.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "neuron_cpu",
            "tune",
            f"{folder / 'tuned.py'}:doubled",
            "--arg",
            "128x512:bf16",
            "--jobs",
            "2",
            "--json",
            str(figures),
            "--space",
            "WIDTH=64,128",
            f"wait={','.join(str(n / 100) for n in range(30, 90))}",
        ],
        cwd=REPOSITORY,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while not figures.exists():
        assert process.poll() is None
        time.sleep(0.1)
    started = descendants(process.pid)
    assert len(started) >= 3
    process.send_signal(number)
    process.wait()
    deadline = time.monotonic() + 60
    while left := [one for one in started if runs(one)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert json.loads(figures.read_text())["trials"]
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]


def descendants(process):
    found = limits.children(process)
    return [*found, *(one for child in found for one in descendants(child))]


def runs(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
