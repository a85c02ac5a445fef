"""The main job as a user meets it: `python main.py --enable-nki --mode generate`, first and again.

    python benchmarks/main_job.py [--keep-cache]

Runs the driver twice in a fresh cache (the second run reuses the compiled folder) and prints, for
each run, the seconds from the start of the process to the first character of the answer, tokens/s
after it, and the peak memory, each beside its limit. The ratio at the end is against PyTorch: the
same model without NKI in the same conditions.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT = "Count from 1 to 10."  # 52 tokens of answer
FIRST_RUN_LIMIT, SECOND_RUN_LIMIT = 40.0, 15.0  # seconds to the first token
SPEED_LIMIT = 2.0  # tokens/s
MEMORY_LIMIT = 4.0  # GiB
KIB_PER_GIB = 2**20


@dataclass(frozen=True)
class Figures:
    """One run of the driver."""

    first_token_s: float
    tokens_per_s: float
    peak_gib: float


def run(cache: str, *arguments: str) -> Figures:
    """Run the driver once; raises where it fails."""
    command = [sys.executable, str(REPOSITORY / "main.py"), "--mode", "generate",
               "--prompt", PROMPT, *arguments]  # fmt: skip
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    answer = b"Output 0: "
    heading = process.stdout.read(len(answer))
    process.stdout.read(1)
    first = time.monotonic() - started
    process.stdout.read()
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    speed = re.search(r"then ([0-9.]+) tokens/s", errors)
    if process.returncode or heading != answer or speed is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors}")
    return Figures(first, float(speed.group(1)), _peak(usage))


def _peak(usage: resource.struct_rusage) -> float:
    """Peak resident memory in GiB: Linux counts in KiB, macOS in bytes."""
    unit = 1024 if sys.platform == "darwin" else 1
    return usage.ru_maxrss / unit / KIB_PER_GIB


def show(name: str, figures: Figures, limit: float) -> None:
    """One line; a figure beyond its limit is marked."""

    def mark(good: bool) -> str:
        return "" if good else " MISSED"

    print(
        f"{name:34} first token {figures.first_token_s:6.1f} s (limit {limit:.0f})"
        f"{mark(figures.first_token_s <= limit)}, {figures.tokens_per_s:6.2f} tokens/s "
        f"(at least {SPEED_LIMIT:.0f}){mark(figures.tokens_per_s >= SPEED_LIMIT)}, peak "
        f"{figures.peak_gib:.2f} GiB (limit {MEMORY_LIMIT:.0f})"
        f"{mark(figures.peak_gib <= MEMORY_LIMIT)}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep-cache", help="a folder to use as the cache, kept afterwards")
    keep = parser.parse_args().keep_cache
    with tempfile.TemporaryDirectory() as scratch:
        cache = keep or scratch
        first = run(cache, "--enable-nki")
        show("first run (converts and compiles)", first, FIRST_RUN_LIMIT)
        second = run(cache, "--enable-nki")
        show("second run (reuses both)", second, SECOND_RUN_LIMIT)
        plain = run(cache)
        show("without NKI (compiles)", plain, FIRST_RUN_LIMIT)
    ratio = second.tokens_per_s / plain.tokens_per_s
    print(f"NKI kernels on the simulator run at {ratio:.2f} of the speed of PyTorch")


if __name__ == "__main__":
    main()
