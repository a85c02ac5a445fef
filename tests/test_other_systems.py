"""What is Linux's own stays out of the way on other systems, which are simulated here."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_cpu.sandbox import limits
from tests.conftest import REPOSITORY


@pytest.fixture
def elsewhere(monkeypatch):
    """No Linux: neither its files nor its system calls."""

    def refused(*_, **__):
        raise AssertionError("this is Linux's")

    def absent(path, *_, **__):
        raise FileNotFoundError(path)

    monkeypatch.setattr(limits, "_LINUX", False)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(limits.os, "O_PATH", None)


def test_time_is_bounded_without_linux(elsewhere, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("memory is not bounded"))
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), limits.bounded(0.01, 1 << 30):
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_nothing_is_confined_or_adopted_without_linux(elsewhere, tmp_path):
    limits.adopt_orphans()
    limits.confine([tmp_path])
    assert "no Landlock" in limits.missing() and "no libseccomp" in limits.missing()
    assert limits.children(1) == []
    assert limits.default_memory_gib() > 0


KERNEL = """
import numpy
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


def reference(x):
    return 2 * x


@nki.jit
def double(x, tile=128):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for k in nl.affine_range(x.shape[1] // tile):
        nl.store(out[:, nl.ds(k * tile, tile)], nl.load(x[:, nl.ds(k * tile, tile)]) * 2)
    return out


if __name__ == "__main__":
    print("sum", double(numpy.ones((4, 256), numpy.float32)).sum())
"""

COMMANDS = """
import multiprocessing, os, signal, sys

assert sys.platform == "darwin" and multiprocessing.get_start_method() == "spawn"
assert not hasattr(os, "sched_getaffinity") and not os.path.exists("/proc/self")

from neuron_cpu.__main__ import main

if __name__ == "__main__":
    for line in sys.argv[1:]:
        print(line.split()[0], main(line.split()))
"""


def run_elsewhere(folder, *lines):
    """What commands print, one after the other in a process that has what macOS has."""
    (folder / "k.py").write_text(KERNEL)
    (folder / "commands.py").write_text(COMMANDS)
    paths = [str(REPOSITORY / "tests" / "elsewhere"), str(REPOSITORY)]
    done = subprocess.run(
        [sys.executable, "commands.py", *lines],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full  # 3 s
def test_commands_run_with_what_macos_has(tmp_path):
    kernel = "k.py:double --arg 128x512:bf16"
    told = run_elsewhere(
        tmp_path, "run k.py", f"check {kernel} --ref k.py:reference --html page.html"
    )
    assert "sum 2048.0" in told and (tmp_path / "page.html").is_file()
    assert "\nrun 0\n" in told and "\ncheck 0\n" in told


@pytest.mark.full  # as processes of `check` above; 6 s
def test_others_run_with_what_macos_has(tmp_path):
    kernel = "k.py:double --arg 128x512:bf16"
    told = run_elsewhere(
        tmp_path,
        f"profile {kernel} --trace trace.json",
        "judge answers --template",
        "judge answers --only row_sum",
        f"tune {kernel} --ref k.py:reference --space tile=128,512 --jobs 2",
    )
    assert "\nprofile 0\n" in told and "\njudge 0\n" in told and "level 1" in told
    assert "2 points tried: 2 legal" in told and told.endswith("tune 0\n")
