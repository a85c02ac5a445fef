"""How fast the scheduler is: 50 000 instructions against tracing them, and a whole profile.

    python benchmarks/scheduler.py

Goals: 50 000 instructions in 1.5 s, the profile of Llama-3.2-1B decode at degree 2 in 10 s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402 - after the path

from neuron_cpu import ensure_sdk  # noqa: E402

ensure_sdk()
import calibration_kernels as kernels  # noqa: E402 - needs the SDK names
from simulator import best  # noqa: E402

from neuron_cpu.core.time import schedule  # noqa: E402

RUNS = 3
INSTRUCTIONS = 50_000


def main() -> None:
    left = torch.empty(8192, 3072, dtype=torch.bfloat16, device="meta")
    right = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    kernel = kernels.matmul_hoisted

    def trace():
        kernel.programs.clear()
        return kernel.trace(left, right)

    tracing = best(trace, RUNS)
    program = trace()
    scheduling = best(lambda: schedule.schedule(program), RUNS)
    scaled = scheduling * INSTRUCTIONS / len(program)
    print(f"{len(program)} instructions: traced and verified in {tracing:.2f} s, scheduled in")
    print(f"{scheduling:.2f} s ({scheduling / tracing:.2f} of that); {scaled:.2f} s for 50 000")
    command = [sys.executable, str(ROOT / "main.py"), "--mode", "profile", "--enable-nki",
               "--profile-model", "llama-3.2-1b", "--tp-degree", "2"]  # fmt: skip
    whole = best(lambda: subprocess.run(command, check=True, capture_output=True), RUNS)
    bare = best(
        lambda: subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True),
        RUNS,
    )
    print(f"profile of Llama-3.2-1B at degree 2: {whole:.1f} s, {whole / bare:.1f} times the bare")
    print(f"import of torch and transformers ({bare:.1f} s)")


if __name__ == "__main__":
    main()
