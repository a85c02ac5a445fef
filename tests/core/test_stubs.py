"""Stubs of the SDK's names are current, and a type checker tells wrong names by them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_cpu import suite
from neuron_cpu.lessons import LESSONS

ROOT = Path(__file__).resolve().parents[2]
RIGHT = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import neuronxcc.nki.isa as before
from neuronxcc.nki.kernels.attention import flash_fwd

@nki.jit
def kernel(x: nt.tensor[128, 64], w: nl.ndarray) -> nl.ndarray:
    rows = x.shape[0]
    turned: nt.tensor[rows, 128] = before.nc_transpose(w[0:128].T, name="turned")
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.activation(tile, nl.exp, tile[0:128], scale=0.5, reduce_cmd=nisa.reduce_cmd.idle)
    nisa.tensor_copy(dst=tile, src=tile, dtype=nl.float32)
    if nisa.get_nc_version() >= nisa.nc_version.gen3:
        nl.store(out, nl.exp(tile.permute((0, 1))))
    return out
"""
# A kernel's own classes, as nki-library writes them.
OWN = """
from dataclasses import dataclass
from typing import Any

@dataclass
class Buffers(nl.NKIObject):
    tile = None
    kind: nki.dtype

def filled(tiles: list[nl.ndarray], number: Any, out: nt.mutable_tensor) -> nl.ndarray:
    held = Buffers(tile=tiles[0], kind=nki.dtype.bfloat16)
    nisa.tensor_copy(dst=tiles[number][0:128, 0:64], src=held.tile)
    return tiles[number]

def both(tile: nl.ndarray):
    return filled([tile], 0, tile)
"""
WRONG = {  # line, and what is said of it
    "nl.expp(x)": 'Module has no attribute "expp"',
    "nisa.activation(x, op=nl.exp, data=x, scal=2.0)": 'Unexpected keyword argument "scal"',
    "nl.ndarray((128, 64), nl.float32, bufer=nl.sbuf)": 'Unexpected keyword argument "bufer"',
    "nisa.activation(x, nl.exp)": 'Missing positional argument "data"',
    "old.matmull(x, x)": 'Module has no attribute "matmull"',
    "nisa.engine.vectr": '"type[engine]" has no attribute "vectr"',
    "nl.load(x).permutee()": "",  # what functions return is any tensor
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the stubs have the names that they are stubs of."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("nki", "neuronxcc"):
        shutil.copytree(ROOT / "stubs" / f"{name}-stubs", folder / name)
    return folder


def wrong():
    """A file of the wrong lines."""
    lines = ["import nki.isa as nisa, nki.language as nl", "import neuronxcc.nki.language as old"]
    return "\n".join([*lines, "def kernel(x):", *(f"    {line}" for line in WRONG)])


def checked(site, *files):
    """What mypy reports of the files."""
    options = ["--config-file=", "--no-incremental", "--no-site-packages"]
    options += [
        "--check-untyped-defs",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--scripts-are-modules",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)],
        cwd=site,
        env={**os.environ, "MYPYPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def test_pyright_reports_wrong_names_and_nothing_else(site):
    """`make test-editors`: the lessons, and fields and lists of a kernel's own classes."""
    pytest.importorskip("pyright", reason="requirements-editors.txt is not installed")
    files = {
        f"{lesson.name}_{language}_{kind}": getattr(lesson.track(language), kind)
        for lesson in LESSONS
        for language in ("nki", "neuronxcc")
        for kind in ("exercise", "solution")
    }
    for name, text in (files | {"right": RIGHT + OWN, "wrong": wrong()}).items():
        (site / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "."],
        cwd=site,
        capture_output=True,
        text=True,
    )
    told = json.loads(done.stdout)["generalDiagnostics"]
    told = [one for one in told if one["file"].endswith(".py")]  # a package's stubs are not checked
    reported = [one for one in told if one["severity"] == "error"]
    assert {Path(one["file"]).name for one in reported} == {"wrong.py"}
    lines = {one["range"]["start"]["line"] for one in reported}
    assert lines == {number for number, said in enumerate(WRONG.values(), 3) if said}


def test_they_are_current():
    done = subprocess.run(
        [sys.executable, "stubs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full  # 2 s
def test_kernels_that_run_have_no_errors_and_wrong_names_are_reported(site):
    files = {
        "right": RIGHT + OWN,
        "wrong": wrong(),
        **{n: suite.template(n) for n in suite.names()},
    }
    for name, text in files.items():
        (site / f"{name}.py").write_text(text)
    found = checked(site, *(site / f"{name}.py" for name in files))
    assert all("wrong.py:" in one for one in found)
    said = {int(re.findall(r":(\d+): ", one)[0]): one for one in found}
    for number, message in enumerate(WRONG.values(), 4):
        assert (message in said[number]) if message else number not in said
