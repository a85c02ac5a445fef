"""The real NxD and NxD Inference on the stand-in's lower tier: a matrix of features by releases.

`python tests/real/matrix.py PUBLIC` (make real PUBLIC=DIR) takes clones of neuronx-distributed and
neuronx-distributed-inference below PUBLIC, puts each release's sources and the transformers that it
pins into the cache, and runs every feature on a seeded model of two layers: this repository's
submission in PyTorch in fp32 and bf16 and with its kernels, and the library's own Llama in fp32.
A cell is the largest error of the logits of a prompt and three decode steps, relative to the
largest logit that Hugging Face computes in fp32; or why there is none.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.real import page, releases  # noqa: E402
from tests.real.alone import alone  # noqa: E402

COLUMNS = page.COLUMNS[page.FEATURES]
Case = list[str]  # row and column
LIMIT_SECONDS = 600  # of one cell


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, nargs="?", help="folder of both clones")
    parser.add_argument("--releases", nargs="+", default=releases.DEFAULT)
    parser.add_argument("--features", nargs="*", default=[], help="default: all")
    parser.add_argument("--columns", nargs="+", default=COLUMNS)
    parser.add_argument("--crosses", action="store_true", help='pairs of features: "a, b"')
    parser.add_argument("--workers", type=int, default=1, help="cells at a time")
    parser.add_argument("--resume", action="store_true", help="leave out what this tree found")
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        return inside(json.loads(asked.inside), asked)
    table = page.CROSSES if asked.crosses else page.FEATURES
    known = page.done(table) if asked.resume else {}
    for release in asked.releases:
        done = [[row, column] for row, cells in known.get(release, {}).items() for column in cells]
        passed = ["--inside", json.dumps(done), "--workers", str(asked.workers)]
        passed += ["--columns", *asked.columns, "--features", *asked.features]
        passed += ["--crosses"] * asked.crosses
        run(table, releases.RELEASES[release], asked.public, passed)
    page.end(table, asked.write)
    return 0


def run(table, release, public, passed):
    """Cells of a release, in a process that finds its sources and its transformers."""
    command = [sys.executable, "-W", "ignore", __file__, *passed]
    environment = releases.environment(release, public)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page.keep_rows(table, json.loads(process.stdout.readline()))
        for line in process.stdout:
            page.keep(table, release.nxdi, *json.loads(line))


# --- in the process of a release ------------------------------------------------------------------
def inside(done, asked):
    """Run the cells but those done; a line of JSON with all rows, then one for each cell."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no cell
    from tests.real import cells

    rows = [", ".join(pair) for pair in cells.pairs()] if asked.crosses else list(cells.FEATURES)
    print(json.dumps(rows), file=out, flush=True)
    every = [[row, column] for row in asked.features or rows for column in asked.columns]
    cases = [case for case in every if case not in done]
    with concurrent.futures.ThreadPoolExecutor(asked.workers) as pool:
        for found in pool.map(_found, cases):
            print(json.dumps(found), file=out, flush=True)
    return 0


def _found(case):
    """A row and a column, what was found there, and the seconds that it took."""
    return *case, *alone(LIMIT_SECONDS, _cell, case)


def _cell(case):
    from tests.real import cells

    return cells.cell(*case, Path.cwd())


if __name__ == "__main__":
    sys.exit(main())
