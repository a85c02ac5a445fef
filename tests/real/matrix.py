"""The real NxD and NxD Inference on the stand-in's lower tier: a matrix of features by releases.

`python tests/real/matrix.py PUBLIC` (make real PUBLIC=DIR) takes clones of neuronx-distributed and
neuronx-distributed-inference below PUBLIC, puts each release's sources and the transformers that it
pins into the cache, and runs every feature on a seeded model of two layers: this repository's
submission in PyTorch in fp32 and bf16 and with its kernels, and the library's own Llama in fp32.
A cell is the largest error of the logits of a prompt and three decode steps, relative to the
largest logit that Hugging Face computes in fp32; or why there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from neuron_cpu import libraries  # noqa: E402
from tests.real import page, releases  # noqa: E402

COLUMNS = page.COLUMNS[page.FEATURES]
Case = list[str]  # row and column


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, nargs="?", help="folder of both clones")
    parser.add_argument("--releases", nargs="+", default=releases.DEFAULT)
    parser.add_argument("--features", nargs="*", default=[], help="default: all")
    parser.add_argument("--columns", nargs="+", default=COLUMNS)
    parser.add_argument("--crosses", action="store_true", help="pairs of features")
    parser.add_argument("--workers", type=int, default=1, help="cells at a time")
    parser.add_argument("--resume", action="store_true", help="leave out what is known")
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        rows = asked.features + (crosses() if asked.crosses else [])
        return inside(json.loads(asked.inside), rows, asked.columns, asked.workers)
    table = page.CROSSES if asked.crosses else page.FEATURES
    known = page.kept(table) if asked.resume else {}
    for release in asked.releases:
        done = [[row, c] for row, cells in known.get(release, {}).items() for c in cells]
        passed = ["--inside", json.dumps(done), "--workers", str(asked.workers)]
        passed += ["--columns", *asked.columns, "--features", *asked.features]
        passed += ["--crosses"] * asked.crosses
        run(table, releases.RELEASES[release], asked.public, passed)
    if asked.write:
        page.write(table)
    return 0


def run(table: str, release: libraries.Release, public: Path, passed: list[str]) -> None:
    """Cells of a release, in a process that finds its sources and its transformers."""
    command = [sys.executable, "-W", "ignore", __file__, *passed]
    environment = releases.environment(release, public)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page.keep_rows(table, json.loads(process.stdout.readline()))
        for line in process.stdout:
            page.keep(table, release.nxdi, *json.loads(line))


# --- in the process of a release ------------------------------------------------------------------
def inside(done: list[Case], features: list[str], columns: list[str], workers: int) -> int:
    """Run the cells but those done; a line of JSON with all rows, then one for each cell."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no cell
    from tests.real import cells

    print(json.dumps(list(cells.FEATURES)), file=out, flush=True)
    every = [[row, column] for row in features or cells.FEATURES for column in columns]
    cases = [case for case in every if case not in done]
    # Each in a process of its own: libraries keep state in modules.
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(_cell, cases, chunksize=1):
            print(json.dumps(found), file=out, flush=True)
    return 0


def crosses() -> list[str]:
    """The rows of the table of crosses."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    from tests.real import cells

    return [", ".join(pair) for pair in cells.pairs()]


def _cell(case: Case) -> tuple[str, str, str]:
    """A row and a column, and what was found there."""
    from tests.real import cells

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return *case, cells.cell(*case, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
