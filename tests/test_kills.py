"""Commands that are killed at random moments: nothing lost, nothing left, the next start right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from neuron_cpu import suite
from neuron_cpu.processes import limits
from tests.conftest import REPOSITORY
from tests.harness.inputs.test_gguf_import import Writer

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not os.path.exists("/proc"), reason="children are found in /proc"),
]
TIMES = int(os.environ.get("KILLS", "20"))  # of each command
SEED = int(os.environ.get("KILLS_SEED", "0"))  # of the moments
SHAPE = ["--seq-len", "128", "--compiled-model-path", "compiled"]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KERNEL = REPOSITORY / "neuron_cpu" / "suite" / "level1" / "gelu.py"
TUNED = """
import time
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x_hbm, width=64, wait=0):
    time.sleep(wait)
    out_hbm = nl.ndarray(x_hbm.shape, dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for column in range(0, x_hbm.shape[1], width):
        nl.store(out_hbm[:, column : column + width], nl.load(x_hbm[:, column : column + width]))
    return out_hbm
"""


def commands(model: Path) -> dict[str, list[object]]:
    """What is killed; each runs in a folder of its own."""
    driver = [REPOSITORY / "main.py", "--model-path", model, *SHAPE]
    # fmt: off
    tuned = ["tuned.py:kernel", "--arg", "128x512:bf16", "--jobs", "2", "--resume", "f.json"]
    waits = "wait=" + ",".join(str(n / 100) for n in range(12))
    return {
        "compile": [*driver, "--mode", "compile"],
        "test.py": [REPOSITORY / "test.py", "--model-path", model, *SHAPE, "--limit", "2"],
        "evaluate_all": [*driver, "--mode", "evaluate_all", "--limit", "1"],
        "serve": [*driver, "--mode", "serve", "--port", "0"],
        "judge": ["-m", "neuron_cpu", "judge", "answers", "--only", "gelu", "--json", "f.json"],
        "tune": ["-m", "neuron_cpu", "tune", *tuned, "--json", "f.json", "--space", waits],
        "calibrate": [
            "benchmarks/calibrate.py", "--public", "../public", "--data", "../rows.json", "--write",
        ],
        "conversion": [
            REPOSITORY / "main.py", "--model-path", "tiny.gguf", *SHAPE, "--mode", "generate",
            "--prompt", "hello", "--max-new-tokens", "3",
        ],
    }


# fmt: on
def calibrated(place: Path) -> None:
    """A checkout to write into, and one public kernel with twelve published times."""
    kept = shutil.ignore_patterns(".*", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, place / "checkout", ignore=kept)
    (place / "public" / "own" / "er@0123456").mkdir(parents=True)
    shutil.copy(KERNEL, place / "public" / "own" / "er@0123456")
    rows = [
        {"id": f"r{n}", "arguments": [f"128x{64 * n}:bf16"], "measured_us": 20}
        for n in range(1, 13)
    ]
    source = {
        "repository": "own/er", "commit": "0123456" + "7" * 33, "file": "gelu.py", "sdk": "2.25",
        "function": "kernel", "figures": "here", "machine": "none", "kind": "p99", "set": "fitted",
        "rows": rows,
    }  # fmt: skip
    (place / "rows.json").write_text(json.dumps({"about": "a test", "sources": {"s": source}}))


def begun(command: list[object], folder: Path) -> subprocess.Popen:
    if command[0] == "benchmarks/calibrate.py":
        folder = folder / "checkout"
    environment = {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(folder / "cache")}
    with open(folder / "told", "w") as told:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=told, env={**os.environ, **environment},
        )  # fmt: skip


def whole(name: str, command: list[object], folder: Path) -> float:
    """A run to its end, and the seconds that it took; a server is ended in order."""
    started = time.monotonic()
    process = begun(command, folder)
    if name == "serve":
        while "Serving " not in (folder / "told").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
    assert process.wait(600) == 0
    return time.monotonic() - started


def descendants(process: int) -> list[int]:
    found = limits.children(process)
    return [*found, *(one for child in found for one in descendants(child))]


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def leftovers(folder: Path) -> list[str]:
    """What writers put beside their targets, and nobody else's."""
    return [str(path) for path in folder.rglob(".*") if path.name.count(".") > 2]


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "answers").mkdir()
    shutil.copy(KERNEL, tmp_path / "answers")
    (tmp_path / "tuned.py").write_text(TUNED)
    gguf = Writer(tmp_path / "tiny.gguf", tiny_model, "llama")
    gguf.bytes_as_tokens(tiny_model)
    gguf.close()
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["compile", "test.py", "evaluate_all", "serve", "judge", "tune", "calibrate", "conversion"],
)
def test_a_kill_loses_and_leaves_nothing(name: str, tiny_model: Path, place: Path) -> None:
    command = commands(tiny_model)[name]
    if name == "calibrate":  # it writes into its own checkout
        calibrated(place)
    chosen, most = random.Random(SEED), whole(name, command, place)
    before = [path.read_text() for path in place.glob("checkout/docs/cost_model.md")]
    for _ in range(TIMES):
        process = begun(command, place)
        moment, how = chosen.uniform(0.05, 1.1) * most, chosen.choice(SIGNALS)
        time.sleep(moment)
        started = descendants(process.pid)
        alive = process.poll() is None
        process.send_signal(how)
        print(f"{name}: {how.name} at {moment:.2f} of {most:.2f} s, {'' if alive else 'after it'}")
        for _ in range(10):  # an interrupt that a library has swallowed is given once more
            try:
                process.wait(30)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        wait_for(lambda started=started: not any(map(runs, started)))
        for path in place.glob("f.json"):
            json.loads(path.read_text())
    whole(name, command, place)
    assert leftovers(place) == []
    assert [path.read_text() for path in place.glob("checkout/docs/cost_model.md")] == before
    assert suite.operator("gelu").path.read_text() == (place / "answers" / "gelu.py").read_text()
