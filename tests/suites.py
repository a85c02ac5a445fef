"""Run the suites of public packages that simulate their NKI kernels, unmodified, and count.

    python tests/suites.py DIR [--write]

DIR holds the packages' source folders (``trnrand-0.5.0``, or a checkout ``trnrand``), from PyPI or
from github.com/trnsci. Each suite runs in a process of its own, as its authors run it on the
vendor's simulator. *Refused* counts tests that end with a refusal of the simulator; ``--write``
puts the table into docs/simulator.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "simulator.md"
PACKAGES = ("trnblas", "trnfft", "trnrand", "trnsolver", "trnsparse", "trntensor")
KINDS = ("right", "refused", "wrong", "expected failures and skips")
REFUSAL = re.compile(r"\[((?:err|sim)_\w+)\]")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/simulator.md")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds a suite")
    args = parser.parse_args()
    lines = ["| Package | Right | Refused | Wrong | Expected failures and skips | Refused by |"]
    lines.append("|---|--:|--:|--:|--:|---|")
    wrong = 0
    for name in PACKAGES:
        for folder in sorted(args.folder.glob(f"{name}*/tests")):
            print(f"{folder.parent.name} ...", flush=True)
            try:
                counts, by = _run(folder.parent, name, args.time_limit)
            except subprocess.TimeoutExpired:
                print(f"{folder.parent.name} took over {args.time_limit:.0f} s and is left out")
                continue
            wrong += counts["wrong"]
            told = " | ".join(str(counts[kind]) for kind in KINDS)
            lines.append(f"| {folder.parent.name} | {told} | {', '.join(map('`{}`'.format, by))} |")
            print(lines[-1], flush=True)
    if len(lines) == 2:
        print(f"{args.folder} has none of {', '.join(PACKAGES)}, expected their folders.")
        return 2
    if args.write:
        text = PAGE.read_text(encoding="utf-8")
        block = "<!-- suites -->\n" + "\n".join(lines) + "\n<!-- end of suites -->"
        PAGE.write_text(
            re.sub(r"<!-- suites -->.*<!-- end of suites -->", block, text, flags=re.DOTALL),
            encoding="utf-8",
        )
    return 1 if wrong else 0


def _run(folder, name, limit):
    """Counts of one suite by kind, and the identifiers that refused."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "neuron_cpu" / "sdk", folder)))
    own = {f"{name.upper()}_USE_SIMULATOR": "1", f"{name.upper()}_REQUIRE_NKI": "1"}
    chip = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn1"}  # which most of them ran on
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-p", "neuron_cpu.pytest_plugin", "-m", "nki_simulator", "tests"]
        subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=folder,
            timeout=limit,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **own, **chip},
            check=False,
        )
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else []
        kinds = [_kind(case) for case in cases]
    by = sorted({identifier for _, identifier in kinds if identifier})
    return Counter(kind for kind, _ in kinds), by


def _kind(case):
    """How a test ended, and the identifier of the refusal that ended it."""
    if case.find("skipped") is not None:
        return KINDS[3], ""
    failure = case.find("failure")
    failure = case.find("error") if failure is None else failure
    if failure is None:
        return "right", ""
    found = REFUSAL.search(failure.get("message", "") + (failure.text or ""))
    return ("refused", found[1]) if found else ("wrong", "")


if __name__ == "__main__":
    sys.exit(main())
