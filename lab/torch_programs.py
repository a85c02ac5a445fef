"""Programs of others on PyTorch's device `neuron`, and in JAX, each as its page tells to run it.

    python -m lab.torch_programs DIR [-k WORDS] [--write]

DIR holds the checkouts. A program is unmodified; `python -m neuron_cpu run` stands before it. Where
it would fetch weights, its loader gives a tiny model with seeded ones, and a file that only defines
operators is called beside PyTorch's own: `lab/torch_stands.py` has both.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab import torch_stands

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "lab" / "docs" / "torch_programs.md"
PORTS = "native-torch-autoporting-trainium"
WAN = "wan22-pytorch-native-trn2"


class Program(NamedTuple):
    """One program of a checkout.

    Attributes:
        right: what it prints, or a part of it, when its own comparison holds.
        ranks: processes of torchrun; 0: none.
        arguments: of the program's command line.
        needs: a package without which it cannot run here.
        missing: why it cannot run at all.
        refused: what it is told instead, and by whom.
    """

    checkout: str
    path: str
    right: str
    ranks: int = 0
    needs: str = "torch"
    missing: str = ""
    refused: str = ""
    arguments: tuple[str, ...] = ()


def _ports() -> list[Program]:
    found = []
    for port in ("clip", "esm2", "gpn-star", "nucleotide-transformer", "evo2"):
        for name in ("01_inference", "02_backprop", "03_training"):
            path = f"{port}/native-pytorch/notebooks/{name}_parity.py"
            # the first of evo2 compares with code that only the weights' hub has
            missing = "not tried: it has no tiny model here" if port == "evo2" else ""
            found.append(Program(PORTS, path, "PARITY: PASS", missing=missing))
    return found


def _jax() -> list[Program]:
    tutorials = "src/nki_samples/tutorials"
    names = (
        "average_pool2d/average_pool2d_jax.py",
        "transpose2d/transpose2d_jax.py",
        "tensor_addition/tensor_addition_jax.py",
        "tensor_addition/spmd_tensor_addition_jax.py",
        "tensor_addition/spmd_multiple_nc_tensor_addition_jax.py",
    )
    return [
        Program("nki-samples", f"{tutorials}/{one}", "NKI and JAX match", needs="jax")
        for one in names
    ]


_SCRIPTS = "torch-neuron-scripts"
_VLLM = "vllm_neuron/functional"
PROGRAMS = [
    *_ports(),
    Program(WAN, "step4_torch_compile_test.py", "FORWARD PASS SUCCEEDED", needs="diffusers"),
    # it halves a norm's weight and leaves the norm's size: PyTorch refuses that on any device
    Program(
        WAN,
        "step4_tp2_compile_test.py",
        "FORWARD PASS SUCCEEDED",
        2,
        "diffusers",
        refused="Expected weight to be of same shape as normalized_shape",
    ),
    Program(
        WAN,
        "run_wan_small.py",
        "Done.",
        1,
        "diffusers",
        arguments=(
            *("--prompt", "A cat", "--height", "64", "--width", "64", "--num-frames", "1"),
            *("--num-steps", "5", "--neff-cache", "neff", "--output", "cat.png"),
        ),
    ),
    Program("neuron-performance-book", "scripts/ch1_model_x.py", "Same result:   True"),
    Program("neuron-performance-book", "scripts/ch14_dma_basics.py", "All DMA examples passed!"),
    Program(
        "neuron-performance-book", "scripts/ch15_matmul_isa.py", "Tensor Engine examples passed"
    ),
    Program(
        "neuron-performance-book", "scripts/ch16_fused_attention.py", "Attention examples passed"
    ),
    Program("XScript-Pretraining", "scripts/neuron_native/nki_rmsnorm.py", "done"),
    Program(
        "deepep-trn",
        "tools/probe_transport.py",
        '"result": "pass"',
        4,
        arguments=("--short-slots", "0", "--width", "64"),
    ),
    Program(_SCRIPTS, "collective_probe.py", "all_reduce OK: got 10.0, expected 10.0", 4),
    Program(_SCRIPTS, "nki_kv_cache.py", "PASS"),
    Program(_SCRIPTS, "gqa_rope_kv_35b_op.py", "PASS"),
    Program(_SCRIPTS, "wan_nki_kernels.py", "PASS"),
    Program("covex_neuron", "_runtime.py", "PASS"),
    Program("vllm-neuron", f"{_VLLM}/cumsum.py", "PASS"),
    Program("vllm-neuron", f"{_VLLM}/argsort_unstable.py", "PASS"),
    Program("vllm-neuron", f"{_VLLM}/moe/topk_reduce.py", "PASS"),
    *_jax(),
    Program("nki-library", "src/nkilib_src/nkilib/core/embeddings/rope.py", "PASS"),
    Program("nki-library", "src/nkilib_src/nkilib/core/cumsum/cumsum.py", "PASS"),
]


# --- each in a process of its own -----------------------------------------------------------------
def run(program: Program, folder: Path) -> tuple[str, str]:
    """right, refused, cannot run or wrong; and the line that says why."""
    if program.missing:
        return "cannot run", program.missing
    if importlib.util.find_spec(program.needs) is None:
        return "cannot run", f"{program.needs} is not installed"
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / program.checkout
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git", "*.mp4", "*.png"))
        script = copy / program.path
        command = [sys.executable, "-m", "neuron_cpu", "run"]
        if program.ranks:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(program.ranks)]
        command += ["-m", "lab.torch_programs", "--inside", str(script), *program.arguments]
        library = find(folder.parent, "nki-library")
        paths = [ROOT, *([] if library is None else [library / "src" / "nkilib_src"])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if program.needs != "jax":  # whose authors ran them on a trn2
            environment["NEURON_PLATFORM_TARGET_OVERRIDE"] = "trn2"
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=900
        )
    said = done.stdout + done.stderr
    if program.right in said and done.returncode == 0:
        return "right", next(line for line in said.splitlines() if program.right in line).strip()
    if program.refused and program.refused in said:
        return "refused", f"PyTorch: {program.refused}"
    errors = re.findall(
        r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception): .*)$", said, re.MULTILINE
    )
    told = [line for line in said.splitlines() if "FAILED" in line or "UNEXPECTED" in line]
    last = (errors or told or ["nothing"])[-1].strip()
    return "wrong", last[:160]


def find(top: Path, checkout: str) -> Path | None:
    """A checkout below the folder, whatever stands in front of its name."""
    found = sorted(one for one in top.iterdir() if one.is_dir() and one.name.endswith(checkout))
    return found[0] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("-k", dest="words", default="")
    parser.add_argument("--write", action="store_true")
    if sys.argv[1:2] == ["--inside"]:
        torch_stands.inside(Path(sys.argv[2]), sys.argv[3:])
        return 0
    given = parser.parse_args()
    rows = []
    for program in PROGRAMS:
        if given.words not in f"{program.checkout}/{program.path}":
            continue
        folder = find(given.folder, program.checkout)
        outcome = ("cannot run", "no checkout") if folder is None else run(program, folder)
        print(program.checkout, program.path, *outcome, sep="  ", flush=True)
        rows.append((program, *outcome))
    if given.write:
        write(rows)
    return any(outcome == "wrong" for _, outcome, _ in rows)


def write(rows: list[tuple[Program, str, str]]) -> None:
    """The table of the page."""
    lines = ["| Program | Outcome | It says |", "|---|---|---|"]
    for program, outcome, said in rows:
        name = program.path.replace("src/nki_samples/tutorials/", "").replace("native-pytorch/", "")
        name = name.replace("src/nkilib_src/nkilib/", "").replace("notebooks/", "")
        short = said.replace("|", "/").replace("facebook", "")[:70]
        lines.append(f"| {name} | {outcome} | {short} |")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- programs: begin -->\n")
    _, _, after = rest.partition("<!-- programs: end -->")
    table = "\n".join(lines)
    PAGE.write_text(
        f"{before}<!-- programs: begin -->\n{table}\n<!-- programs: end -->{after}",
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())
