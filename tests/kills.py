"""Commands that are killed at random moments: nothing lost, nothing left behind, next start right.

    python tests/kills.py FOLDER [--times 20] [--only compile,serve] [--minutes 30] [--write]

FOLDER keeps what was done, so a later run goes on. Two of four kills find the results of earlier
runs removed, and only what killed ones left; the other two find what the kill before has left. Then
a run goes to its end, and what it says and leaves has to be what the first run said and left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from neuron_cpu import suite  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402 - after the path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell has in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

PAGE = REPOSITORY / "docs" / "strangers.md"
BLOCK = 4  # kills between two runs to the end
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MARK = "KILLED_COMMAND"  # in the environment of all that a command starts
ORDERLY_SECONDS = 60  # that an end in order may take on a busy machine
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


def commands():
    """What is killed; each runs in a folder of its own, where `prepared` has put what it needs."""
    shape = ["--seq-len", "64", "--tp-degree", "1", "--compiled-model-path", "compiled"]
    driver = [REPOSITORY / "main.py", "--model-path", "tiny", *shape]
    tuned = ["tuned.py:kernel", "--arg", "128x512:bf16", "--jobs", "2"]
    waits = "wait=" + ",".join(str(n / 100) for n in range(12))
    # fmt: off
    return {
        "compile": [*driver, "--mode", "compile"],
        "test.py": [REPOSITORY / "test.py", "--model-path", "tiny", *shape, "--limit", "1"],
        "evaluate_all": [*driver, "--mode", "evaluate_all", "--limit", "1"],
        "serve": [*driver, "--mode", "serve", "--port", "0"],
        "judge": ["-m", "neuron_cpu", "judge", "answers", "--only", "gelu", "--json", "f.json"],
        "tune": ["-m", "neuron_cpu", "tune", *tuned, "--json", "f.json", "--space", waits],
        "calibrate": [
            "-m", "lab.calibrate", "--public", "../public", "--data", "../rows.json", "--write",
        ],
        "conversion": [
            "-c", "from harness.inputs.models import embedded_model; print(embedded_model().name)",
        ],
    }
    # fmt: on


def prepared(name, folder):
    """The folder, with what the command needs in it."""
    if folder.exists():
        return folder
    (folder / "answers").mkdir(parents=True)
    (folder / "answers" / "gelu.py").write_text(suite.template("gelu"))
    (folder / "tuned.py").write_text(TUNED)
    write_tiny_model(folder / "tiny")
    if name == "calibrate":
        _calibrated(folder)
    return folder


def _calibrated(folder):
    """A checkout to write into, and one public kernel with twelve published times."""
    kept = shutil.ignore_patterns(".*", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, folder / "checkout", ignore=kept)
    (folder / "public" / "own" / "er@0123456").mkdir(parents=True)
    (folder / "public" / "own" / "er@0123456" / "gelu.py").write_text(suite.template("gelu"))
    rows = [
        {"id": f"r{n}", "arguments": [f"128x{64 * n}:bf16"], "measured_us": 20}
        for n in range(1, 13)
    ]
    source = {
        "repository": "own/er",
        "commit": "0123456" + "7" * 33,
        "file": "gelu.py",
        "sdk": "2.25",
        "function": "kernel",
        "figures": "here",
        "machine": "none",
        "kind": "p99",
        "set": "fitted",
        "rows": rows,
    }
    (folder / "rows.json").write_text(json.dumps({"about": "a test", "sources": {"s": source}}))


class Killed:
    """One command in its folder."""

    def __init__(self, name, folder):
        self.name, self.folder = name, prepared(name, folder)
        self.command, self.mark = commands()[name], f"{name} {folder}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)

    def begun(self):
        place = self.folder / "checkout" if self.name == "calibrate" else self.folder
        environment = {
            "PYTHONPATH": str(REPOSITORY),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
        }
        with open(self.folder / "told", "w") as told, open(self.folder / "said", "w") as said:
            return subprocess.Popen(
                [sys.executable, *map(str, self.command)],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=told,
                env={**os.environ, **environment},
            )

    def whole(self):
        """Seconds of a run to its end, and what it says and leaves, without times."""
        started, said = time.monotonic(), ""
        process = self.begun()
        if self.name == "serve":
            try:
                said = self._answered(process)
            finally:
                process.terminate()
        status = process.wait(900)
        took = time.monotonic() - started
        assert status == 0, (status, (self.folder / "told").read_text()[-2000:])
        self._all_ended()
        return took, self._result() | {"said": said}

    def _answered(self, process):
        """The text that a server gives to one client."""
        port = None
        while port is None:
            assert process.poll() is None, (self.folder / "told").read_text()[-2000:]
            port = re.search(r"http://[\w.]+:(\d+)", (self.folder / "told").read_text())
            time.sleep(0.05)
        asked = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port[1]}/v1/completions",
            asked,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["choices"][0]["text"]

    def _result(self):
        if self.name == "conversion":
            return {"text": (self.folder / "said").read_text()} | _digests(self.folder / "cache")
        if self.name == "judge":
            (one,) = json.loads((self.folder / "f.json").read_text())["answers"]
            return {"outcome": one["outcome"], "speedup": one["speedup"]}
        if self.name == "tune":
            return {"points": _points(self.folder / "f.json")}
        if self.name == "calibrate":
            page = self.folder / "checkout" / "lab" / "docs" / "calibration.md"
            return {"page": hashlib.sha256(page.read_bytes()).hexdigest()}
        if self.name in ("test.py", "evaluate_all"):
            found = sorted((self.folder / "results").glob("*/report.json"))[-1]
            rows = json.loads(found.read_text())["results"]
            return {"passed": [row["accurate"] for row in rows]}
        return _digests(self.folder / "compiled")

    def fresh(self):
        """Remove what runs have completed, and leave what killed ones have left."""
        for place in (
            "compiled",
            "results",
            "cache/nki-llama/models",
            "cache/nki-llama/references",
        ):
            for path in (self.folder / place).glob("[!.]*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.folder / "f.json").unlink(missing_ok=True)
        if self.name == "calibrate":
            page = Path("lab") / "docs" / "calibration.md"
            shutil.copy(REPOSITORY / page, self.folder / "checkout" / page)

    def kill(self, how, moment):
        """Kill a run after so many seconds; what became of it."""
        known = _points(self.folder / "f.json") if self.name == "tune" else 0
        process = self.begun()
        if self.name == "conversion" and moment < 1:  # from the first thing that it writes
            models = self.folder / "cache" / "nki-llama" / "models"
            while process.poll() is None and not models.exists():
                time.sleep(0.01)
        time.sleep(moment)
        running = process.poll() is None
        process.send_signal(how)
        started = time.monotonic()
        try:
            status = process.wait(ORDERLY_SECONDS)
        finally:
            process.kill()
        told = (self.folder / "told").read_text()
        assert "Traceback" not in told, told[-2000:]
        self._all_ended()
        gone = time.monotonic() - started
        for path in self.folder.rglob("*.json"):  # each is whole
            if path.parts[-2] != "checkout":
                json.loads(path.read_text())
        assert self.name != "tune" or _points(self.folder / "f.json") >= known
        return {
            "signal": how.name,
            "moment": round(moment, 2),
            "running": running,
            "status": status,
            "gone": round(gone, 2),
            "temporary": len(os.listdir(self.temporary)),
        }

    def _all_ended(self):
        deadline = time.monotonic() + ORDERLY_SECONDS
        while left := [p for p in Path("/proc").glob("[0-9]*/environ") if self._is_of(p)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _is_of(self, environment):
        with contextlib.suppress(OSError):
            return f"{MARK}={self.mark}\0".encode() in environment.read_bytes()
        return False

    def leftovers(self):
        """What writers put beside their targets, and what is in the folder for temporary files."""
        beside = [path for path in self.folder.rglob(".*") if path.name.count(".") > 2]
        return sorted(str(path.relative_to(self.folder)) for path in beside) + [
            name for name in os.listdir(self.temporary) if not name.startswith("torchinductor")
        ]


def _points(path):
    return len(json.loads(path.read_text())["trials"]) if path.exists() else 0


def _digests(folder):
    """Of the files below a folder that hold no times."""
    names = ("*.safetensors", "config.json", "tokenizer.json")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in names
        for path in sorted(folder.rglob(name))
    }


def block(name, folder, number, done):
    """BLOCK kills and a run to the end; a failure is an AssertionError."""
    killed, chosen = Killed(name, folder), random.Random(f"{name} {number}")
    if "right" not in done:
        killed.fresh()
        done["seconds"], done["right"] = killed.whole()
    found = []
    for turn in range(BLOCK):
        if turn % 2 == 0:
            killed.fresh()
        moment = chosen.uniform(0.02, 1.1) * done["seconds"]
        if name == "conversion" and turn % 2 == 0:
            moment = chosen.uniform(0, 0.5)
        found.append(killed.kill(chosen.choice(SIGNALS), moment))
    _, result = killed.whole()
    assert result == done["right"], (result, done["right"])
    assert killed.leftovers() == [], killed.leftovers()
    return found


def table(kept):
    """Markdown: kills by command."""
    heads = ("Command", "kills", "SIGKILL, SIGTERM, SIGINT", "in its run", "all ended after")
    lines = [f"| {' | '.join((*heads, 'next starts right'))} |", "|---|---|---|---|---|---|"]
    for name, done in kept.items():
        kills = done["kills"]
        by = Counter(one["signal"] for one in kills)
        gone = sorted(one["gone"] for one in kills)
        lines.append(
            f"| {name} | {len(kills)} | {', '.join(str(by[s.name]) for s in SIGNALS)} "
            f"| {sum(one['running'] for one in kills)} "
            f"| {gone[len(gone) // 2]:.1f} s, at most {gone[-1]:.1f} "
            f"| {done['whole']} of {done['whole'] + len(done['failures'])} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", default=",".join(commands()))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--write", action="store_true", help="the table of the page")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    file, until = chosen.folder.resolve() / "kills.json", time.monotonic() + 60 * chosen.minutes
    kept = json.loads(file.read_text()) if file.exists() else {}
    for number in range(-(-chosen.times // BLOCK)):
        for name in chosen.only.split(","):
            empty: dict[str, Any] = {"kills": [], "whole": 0, "failures": []}
            done = kept.setdefault(name, empty)
            if len(done["kills"]) >= (number + 1) * BLOCK or time.monotonic() > until:
                continue
            try:
                done["kills"] += block(name, file.parent / name.replace(".", "_"), number, done)
                done["whole"] += 1
            except Exception as error:
                done["failures"].append(f"block {number}: {type(error).__name__}: {error}"[:3000])
            file.write_text(json.dumps(kept, indent=1))
            print(f"{name}: {len(done['kills'])} kills, {done['failures'][-1:]}", flush=True)
    print(table(kept))
    if chosen.write:
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- kills: begin -->\n")
        after = rest[rest.index("<!-- kills: end -->") :]
        PAGE.write_text(f"{before}{mark}{table(kept)}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
