"""Programs of others on PyTorch's device `neuron`, and in JAX, each as its page tells to run it.

    python -m lab.torch_programs DIR [-k WORDS] [--write]

DIR holds the checkouts. A program is unmodified; `python -m neuron_cpu run` stands before it. Where
it would fetch weights, its loader gives a tiny model with seeded ones: that is in `TINY` below, by
the name of the module that the program imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "lab" / "docs" / "torch_programs.md"
PORTS = "native-torch-autoporting-trainium"
WAN = "wan22-pytorch-native-trn2"


class Program(NamedTuple):
    """One program of a checkout.

    Attributes:
        right: what it prints, or a part of it, when its own comparison holds.
        ranks: processes of torchrun; 0: none.
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
    ),  # fmt: skip
    *_jax(),
    Program("nki-library", "src/nkilib_src/nkilib/core/embeddings/rope.py", "PASS"),
    Program("nki-library", "src/nkilib_src/nkilib/core/cumsum/cumsum.py", "PASS"),
]


# --- tiny models, in the program's own process ----------------------------------------------------
class _Tokenizer:
    """Characters as numbers, in place of a vocabulary that a hub has."""

    mask_token_id, pad_token_id, cls_token_id, eos_token_id = 32, 1, 0, 2

    def __call__(self, texts: list[str], max_length: int = 64, **_: Any) -> dict[str, Any]:
        import torch

        rows = [[4 + ord(letter) % 20 for letter in text[:max_length]] for text in texts]
        padded = [row + [1] * (max_length - len(row)) for row in rows]
        ids = torch.tensor(padded)
        return {"input_ids": ids, "attention_mask": (ids != 1).long()}


def _seeded(make: Callable[[], Any]) -> Any:
    import torch

    torch.manual_seed(0)
    return make().eval()


_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "pad_token_id": 1, "mask_token_id": 32, "vocab_size": 33, "max_position_embeddings": 128,
}  # fmt: skip


def _esm2(module: Any) -> None:
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(**_SIZES, position_embedding_type="rotary")
    module.load = lambda *_, device="cpu", **__: _seeded(
        lambda: EsmModel(config, add_pooling_layer=False)
    ).to(device)
    module.get_tokenizer = lambda *_: _Tokenizer()


def _nucleotides(module: Any) -> None:
    config = module.EsmConfig(
        **_SIZES, position_embedding_type="rotary", add_bias_fnn=False, token_dropout=True
    )
    module.load = lambda *_, device="cpu", **__: _seeded(lambda: module.EsmForMaskedLM(config)).to(
        device
    )
    module.get_tokenizer = lambda *_: _Tokenizer()


def _clip(module: Any) -> None:
    sizes = {
        "embed_dim": 32, "image_resolution": 224, "vision_layers": 2, "vision_width": 64,
        "vision_patch_size": 32, "context_length": 77, "vocab_size": 49408,
        "transformer_width": 64, "transformer_heads": 2, "transformer_layers": 2,
    }  # fmt: skip
    module.load = lambda *_, device="cpu", **__: _seeded(lambda: module.CLIP(**sizes)).to(device)


def _gpn_star(module: Any) -> None:
    import numpy as np

    species = 6
    folder = tempfile.mkdtemp()
    apart = 1.0 - np.eye(species, dtype=np.float32)
    np.save(f"{folder}/pairwise.npy", apart)
    np.save(f"{folder}/in_clade.npy", apart[0] / 2)
    config = module.GPNStarConfig(
        **{**_SIZES, "vocab_size": 6, "pad_token_id": 0}, phylo_dist_path=folder
    )
    module.num_species = lambda *_: species
    module.load = lambda *_, device="cpu", **__: _seeded(
        lambda: module.GPNStarForMaskedLM(config)
    ).to(device)


def _wan(module: Any) -> None:
    model = module.WanTransformer3DModel

    def load(*_: Any, torch_dtype: Any = None, **__: Any) -> Any:
        return _seeded(
            lambda: model(num_attention_heads=2, attention_head_dim=32, ffn_dim=128, num_layers=2)
        ).to(torch_dtype)

    model.from_pretrained = load


TINY: dict[str, Callable[[Any], None]] = {
    "esm2_neuron": _esm2,
    "nucleotide_transformer_neuron": _nucleotides,
    "clip_neuron": _clip,
    "gpn_star_neuron": _gpn_star,
    "diffusers": _wan,
}


def _library(script: Path) -> None:
    """A kernel of nki-library through `wrap_nki`, beside the library's own twin in PyTorch."""
    import torch
    from torch_neuronx import wrap_nki

    sys.path.insert(0, str(script.parents[3]))
    name = script.stem
    folder = f"nkilib.{script.parent.parent.name}.{script.parent.name}"
    kernels, twins = (importlib.import_module(f"{folder}.{one}") for one in (name, f"{name}_torch"))
    torch.manual_seed(0)
    if name == "rope":
        kernel, twin = kernels.RoPE, twins.rope_torch_ref
        given = [torch.randn(64, 1, 2, 128), torch.randn(32, 1, 128), torch.randn(32, 1, 128)]
    else:
        kernel, twin, given = kernels.cumsum, twins.cumsum_torch_ref, [torch.randn(128, 256)]
    found = twin(*given)
    expected = next(iter(found.values())) if isinstance(found, dict) else found
    on_device = [one.to("neuron") for one in given]
    run = wrap_nki(kernel)[1]
    for call in (run, torch.compile(lambda *x: run(*x), backend="neuron", fullgraph=True)):
        torch.testing.assert_close(call(*on_device).cpu(), expected, rtol=1e-4, atol=1e-4)
    print("PASS")


def inside(script: Path) -> None:
    """Run a program whose loaders give tiny models."""
    sys.path.insert(0, str(script.parent.parent / "src"))
    for name, change in TINY.items():
        if importlib.util.find_spec(name) is not None:
            change(importlib.import_module(name))
    if "nkilib_src" in script.parts:
        return _library(script)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return None


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
        command += ["-m", "lab.torch_programs", "--inside", str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["HF_HUB_OFFLINE"] = "1"
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
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside)
        return 0
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
