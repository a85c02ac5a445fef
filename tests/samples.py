"""Tutorials and samples of AWS on the simulator, each file as its page tells to run it.

    python tests/samples.py DIR [-k WORDS] [--seconds N] [--forms] [--json FILE] [--write]

DIR holds checkouts of aws-neuron-sdk (its folder nki), nki-samples and nki-autotune, at any depth.
A file that begins with ``test_`` runs under pytest, any other one as a script. The file is
unmodified; only `python -m neuron_cpu run` stands before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "lab" / "docs" / "library_results.md"
# What marks a checkout, its files, and what its page asks for
SETS = {
    "aws-neuron-sdk": (
        "nki/examples",
        ("nki/examples/**/*.py", "nki/deep-dives/src/*/*_toplevel.py", "nki/test/test_*.py"),
    ),
    "nki-samples": (
        "src/nki_samples",
        (
            "src/nki_samples/tutorials/**/*.py",
            "src/nki_samples/tutorials/*/*_toplevel.py",
            "contributed/*.py",
            "test/unit/test_*.py",
        ),
    ),
    "nki-autotune": (
        "nkigym/src/nkigym",
        ("test/codegen/test_render.py", "test/transforms/test_*.py"),  # what calls nki.simulate
    ),
}


def runs(path):
    """Whether a file is more than definitions."""
    text = path.read_text(encoding="utf-8")
    return path.name.startswith("test_") or "__main__" in text or "layout-" in path.name


def run(path, top, seconds, forms):
    """How a file of the checkout ``top`` ends, and the last line that it or pytest says; with
    ``forms`` also which kernels gave the same results merged and one by one."""

    def limits():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))

    text = path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "neuron_cpu", "run"]
    if path.name.startswith("test_") and not re.search(r"^test_\w+\(", text, re.M):
        command += ["-m", "pytest", "-q", "-p", "no:cacheprovider"]  # not one that calls its tests
    sources = [
        ROOT,
        *(one for one in map(top.joinpath, ("src", "nkigym/src", "autotune/src")) if one.is_dir()),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    environment |= {"NEURON_CPU": "1", "OMP_NUM_THREADS": "1"}
    if "neuronxcc.nki" in text:  # the older language as its last release had it
        environment |= {"NEURON_CPU_SDK": "2.26", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}
    if "trn3" in text:
        environment["NEURON_PLATFORM_TARGET_OVERRIDE"] = "trn3"
    with tempfile.TemporaryDirectory() as scratch:
        package = (path.parent / "__init__.py").exists()  # its tests import each other by name
        folder = top if package else path.parent
        copy = Path(scratch) / ("checkout" if package else folder.name)  # no package's name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git"))
        names = Path(scratch) / "compared.json"
        if forms:
            command[1:3] = [str(ROOT / "tests" / "repeated.py"), str(names)]
        done = subprocess.run(
            [*command, str(path.relative_to(folder))],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=limits,
        )
        compared = json.loads(names.read_text()) if names.exists() else []
    said = (done.stdout + done.stderr).strip().splitlines()
    errors = [
        line for line in said if re.search(r"Error|error|\[(sim|err)_|passed|failed|skipped", line)
    ]
    return {
        "status": done.returncode,
        "said": (errors or said or [""])[-1][:300],
        "log": said[-60:],
        **({"compared": compared} if forms else {}),
    }


def why(one):
    """The error that ended a file, without the places of this machine."""
    told = re.compile(r"(?:E +)?(?:[\w.]+\.)?(\w*(?:Error|Exception|UnknownName)): (.*)")
    found = [m for m in map(told.match, one["log"]) if m]
    text = f"{found[-1][1]}: {found[-1][2]}" if found else one["said"]
    text = re.sub(r"/tmp/\w+/", "", text)
    return re.sub(r"/\S*/(\w+\.py)", r"\1", text)[:220]


def table(found):
    """Files by folder, and what ended those that did not run."""
    folders: dict[str, list[bool]] = {}
    lines = ["| Folder | files | run to their end |", "|---|--:|--:|"]
    for key, one in sorted(found.items()):
        folders.setdefault(key.rpartition("/")[0], []).append(not one["status"])
    lines += [f"| {name} | {len(ends)} | {sum(ends)} |" for name, ends in folders.items()]
    lines.append("")
    for key, one in sorted(found.items()):
        if one["status"]:
            told = f"- {key.rpartition('/')[2]}: {why(one)}".replace("|", "/")
            lines += textwrap.wrap(told, 118, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", nargs="*", default=[], help="only files with one of these words")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time for a file")
    parser.add_argument("--forms", action="store_true", help="each kernel merged and one by one")
    parser.add_argument("--json", type=Path, help="keeps the outcomes; files in it do not run")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    chosen = parser.parse_args()
    kept = chosen.json
    found = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for name, (mark, patterns) in SETS.items():
        places = sorted(chosen.folder.resolve().glob(f"**/{mark}"), key=lambda p: len(p.parts))
        if not places:
            print(f"no checkout of {name} below {chosen.folder}")
            continue
        top = places[0].parents[len(Path(mark).parts) - 1]
        for path in sorted({p for pattern in patterns for p in top.glob(pattern)}):
            key = f"{name}: {path.relative_to(top)}"
            wanted = not chosen.k or any(word in key for word in chosen.k)
            if not wanted or key in found or not runs(path):
                continue
            found[key] = run(path, top, chosen.seconds, chosen.forms)
            print(f"{found[key]['status']:4} {key}: {found[key]['said'][:160]}", flush=True)
            if kept:
                kept.write_text(json.dumps(found, indent=1))
    if chosen.forms:
        calls = [name for one in found.values() for name in one.get("compared", ())]
        print(f"{len(calls)} calls of {len(set(calls))} kernels were compared in all forms.")
    if chosen.write:
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- samples -->\n")
        after = rest.partition("<!-- end -->")[2]
        PAGE.write_text(f"{before}{mark}{table(found)}<!-- end -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
