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
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from neuron_cpu import libraries  # noqa: E402
from tests.real import page, releases  # noqa: E402

COLUMNS = ("fp32", "bf16", "kernels", "library")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, nargs="?", help="folder of both clones")
    parser.add_argument("--releases", nargs="+", default=releases.DEFAULT)
    parser.add_argument("--features", nargs="+", default=[], help="default: all")
    parser.add_argument("--columns", nargs="+", default=COLUMNS)
    parser.add_argument("--workers", type=int, default=1, help="cells at a time")
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        return inside(asked.features, asked.columns, asked.workers)
    table: dict[str, dict[str, dict[str, str]]] = {}
    for name in asked.releases:
        table[name] = run(
            releases.RELEASES[name], asked.public, asked.features, asked.columns, asked.workers
        )
    page.told("features", table, COLUMNS, asked.write)
    return 0


def run(
    release: libraries.Release,
    public: Path,
    features: list[str],
    columns: Sequence[str],
    workers: int,
) -> dict[str, dict[str, str]]:
    """All cells of a release, in a process that finds its sources and its transformers."""
    command = [sys.executable, "-W", "ignore", __file__, "--inside", "--features", *features]
    command += ["--columns", *columns, "--workers", str(workers)]
    cells: dict[str, dict[str, str]] = {}
    environment = releases.environment(release, public)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            feature, column, told = json.loads(line)
            cells.setdefault(feature, {})[column] = told
            print(f"{release.nxdi} {feature} {column}: {told}", file=sys.stderr, flush=True)
    return cells


# --- in the process of a release ------------------------------------------------------------------
def inside(features: list[str], columns: Sequence[str], workers: int) -> int:
    """Run the features; a line of JSON for each cell."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no cell
    from tests.real import cells

    cases = [(row, column) for row in features or cells.FEATURES for column in columns]
    # Each in a process of its own: libraries keep state in modules.
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        for row, column, told in pool.imap_unordered(_cell, cases, chunksize=1):
            print(json.dumps([row, column, told]), file=out, flush=True)
    return 0


def _cell(case: tuple[str, str]) -> tuple[str, str, str]:
    from tests.real import cells

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return *case, cells.cell(*case, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
