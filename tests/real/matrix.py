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
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from neuron_cpu import libraries  # noqa: E402

PAGE = REPOSITORY / "docs" / "libraries.md"
MARK = "<!-- make real writes the table below -->"
DEFAULT_RELEASES = ("0.1", "0.3", "0.6", "0.7")
# Of tokenizers the release that each transformers takes.
TOKENIZERS = {"4.45": "0.20.3", "4.48": "0.21.4", "4.51": "0.21.4", "4.56": "0.22.0"}
PINS = {"4.45": "4.45.2", "4.48": "4.48.3", "4.51": "4.51.3", "4.56": "4.56.2"}
COLUMNS = ("fp32", "bf16", "kernels", "library")
PROMPT, STEPS, LENGTH = 24, 3, 64
# feature -> changes of the model, settings of NeuronConfig, ranks, sequences
Feature = tuple[dict[str, Any], dict[str, Any], int, int]
EXTENDED = "extended"  # the submission's other file has it
FEATURES: dict[str, Feature] = {
    "plain": ({}, {}, 2, 1),
    "one rank": ({}, {}, 1, 1),
    "batch of 2": ({}, {}, 2, 2),
    "fused QKV": ({}, {"fused_qkv": True}, 2, 1),
    "heads of 32": ({"head_dim": 32}, {EXTENDED: True}, 2, 1),
    "heads of 80": ({"head_dim": 80}, {EXTENDED: True}, 2, 1),
    "heads of 96": ({"head_dim": 96}, {EXTENDED: True}, 2, 1),
    "heads of 128": ({"head_dim": 128}, {}, 2, 1),
    "KV replication": ({"num_attention_heads": 4, "num_key_value_heads": 2}, {}, 4, 1),
    "sequence parallel": ({}, {"sequence_parallel_enabled": True}, 2, 1),
    "vocabulary parallel": ({}, {"vocab_parallel": True}, 2, 1),
    "continuous batching": ({}, {"is_continuous_batching": True, "ctx_batch_size": 1}, 2, 2),
    "flash decoding": (
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"flash_decoding_enabled": True, EXTENDED: True},
        4,
        1,
    ),
    "context parallel": (
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"cp_degree": 2, EXTENDED: True},
        4,
        1,
    ),
    "fp8 caches": ({}, {"kv_cache_quant": True, EXTENDED: True}, 2, 1),
    "int8": ({}, {"quantized": "int8", EXTENDED: True}, 2, 1),
    "fp8": ({}, {"quantized": "f8e4m3", EXTENDED: True}, 2, 1),
    "async": ({}, {"async_mode": True, "on_device": True}, 2, 1),
    "on-device sampling": ({}, {"on_device": True}, 2, 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, nargs="?", help="folder of both clones")
    parser.add_argument("--releases", nargs="+", default=DEFAULT_RELEASES)
    parser.add_argument("--features", nargs="+", default=list(FEATURES))
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        return inside(asked.features)
    known = {release.nxdi: release for release in libraries.RELEASES}
    table: dict[str, dict[str, dict[str, str]]] = {}
    for name in asked.releases:
        table[name] = run(known[name], asked.public, asked.features)
    text = as_markdown(table)
    print(text)
    if asked.write:
        before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(f"{before}{MARK}\n\n{text}\n", encoding="utf-8")
    return 0


# --- what a release needs -------------------------------------------------------------------------
def run(release: libraries.Release, public: Path, features: list[str]) -> dict[str, dict[str, str]]:
    """All cells of a release, in a process that finds its sources and its transformers."""
    roots = [
        sources(public / "neuronx-distributed", release.nxd_at),
        sources(public / "neuronx-distributed-inference", release.nxdi_at),
    ]
    environment = {
        **os.environ,
        libraries.VARIABLE: os.pathsep.join(map(str, roots)),
        "PYTHONPATH": os.pathsep.join(
            [str(requirements(release)), os.environ.get("PYTHONPATH", "")]
        ),
        "NXD_LOG_LEVEL": "error",
    }
    command = [sys.executable, "-W", "ignore", __file__, "--inside", "--features", *features]
    cells: dict[str, dict[str, str]] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            feature, column, told = json.loads(line)
            cells.setdefault(feature, {})[column] = told
            print(f"{release.nxdi} {feature} {column}: {told}", file=sys.stderr, flush=True)
    return cells


def cache(*parts: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root.joinpath("nki-llama", "real", *parts)


def sources(clone: Path, at: str) -> Path:
    """The sources of a tag or commit of a clone."""
    folder = cache("sources", f"{clone.name}-{at}")
    if not folder.is_dir():
        packed = subprocess.run(
            ["git", "-C", str(clone), "archive", at, "src"], check=True, capture_output=True
        ).stdout
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(unfinished, filter="data")
            os.rename(unfinished, folder)
            os.mkdir(unfinished)
    return folder


def requirements(release: libraries.Release) -> Path:
    """The transformers that a release pins, and what NxD imports besides."""
    folder = cache("packages", PINS[release.transformers])
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pinned = [
            f"transformers=={PINS[release.transformers]}",
            f"tokenizers=={TOKENIZERS[release.transformers]}",
        ]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), *pinned], check=True)
        subprocess.run([*pip, "--target", str(folder), "boto3", "tenacity"], check=True)
        subprocess.run([*pip, "--no-deps", "--target", str(folder), "scipy"], check=True)
    return folder


# --- in the process of a release ------------------------------------------------------------------
def inside(features: list[str]) -> int:
    """Run the features; a line of JSON for each cell."""
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no cell
    for feature in features:
        for column in COLUMNS:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                told = cell(FEATURES[feature], column, Path(folder))
            print(json.dumps([feature, column, told]), file=out, flush=True)
    return 0


def cell(feature: Feature, column: str, folder: Path) -> str:
    """The error, or the first line of what was raised."""
    try:
        return f"{error(feature, column, folder):.1e}"
    except Exception as raised:  # the cell is what the library says
        cause: BaseException = raised
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [""]
        told = re.sub(r"\S*/(?=\w+\.py\b)", "", lines[0])  # of a path the file's name
        return f"{type(cause).__name__}: {told[:300]}"


def error(feature: Feature, column: str, folder: Path) -> float:
    """The largest error of the logits, relative to the largest one of Hugging Face in fp32."""
    import torch
    from transformers import LlamaForCausalLM

    changes, settings, ranks, batch = feature
    model = checkpoint(folder / "model", changes)
    reference = LlamaForCausalLM.from_pretrained(str(model), torch_dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 250, (batch, PROMPT + STEPS), generator=generator)
    with torch.no_grad():
        expected = reference(ids).logits[:, PROMPT - 1 :]
    application = built(column, model, settings, ranks, batch, folder)
    if settings.get("on_device"):
        return tokens_apart(application, ids[:, :PROMPT], expected)
    got = logits(application, ids)
    return float((got - expected).abs().max() / expected.abs().max())


def checkpoint(folder: Path, changes: dict[str, Any]) -> Path:
    """A seeded Llama of two layers in fp32."""
    from safetensors.torch import load_file, save_file

    from tests.tiny_model import write_tiny_model

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} | changes
    if "head_dim" in changes:
        heads["hidden_size"] = heads["num_attention_heads"] * changes["head_dim"]
    else:
        heads |= {"hidden_size": 64 * heads["num_attention_heads"], "head_dim": 64}
    write_tiny_model(folder, **heads, torch_dtype="float32")
    file = str(folder / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})  # transformers 4.45 asks for it
    return folder


def built(
    column: str, model: Path, settings: dict[str, Any], ranks: int, batch: int, folder: Path
) -> Any:
    """The application, compiled and loaded."""
    import importlib

    import torch
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    asked = dict(settings)
    extended, on_device = asked.pop(EXTENDED, False), asked.pop("on_device", False)
    own = "llama_extended" if extended else "llama"
    name = "neuronx_distributed_inference.models.llama.modeling_llama"
    kind = importlib.import_module(name if column == "library" else own).NeuronLlamaForCausalLM
    if on_device:
        asked["on_device_sampling_config"] = OnDeviceSamplingConfig(top_k=1)
    if column == "kernels":
        asked["enable_nki"] = True
    quantised = asked.pop("quantized", None)
    if quantised:
        asked |= {"quantized": True, "quantization_dtype": quantised}
        asked["quantized_checkpoints_path"] = str(folder / "quantised")
        asked["quantization_type"] = "per_channel_symmetric"
        (folder / "quantised").mkdir()
    dtype = torch.float32 if column in ("fp32", "library") else torch.bfloat16
    config = kind.get_neuron_config_cls()(
        tp_degree=ranks,
        batch_size=batch,
        max_context_length=LENGTH,
        seq_len=LENGTH,
        torch_dtype=dtype,
        rpl_reduce_dtype=dtype,
        **asked,
    )
    whole = kind.get_config_cls()(config, load_config=load_pretrained_config(str(model)))
    if quantised:
        kind.save_quantized_state_dict(str(model), whole)
    application = kind(str(model), whole)
    os.environ["BASE_COMPILE_WORK_DIR"] = str(folder / "work") + os.sep
    application.compile(str(folder / "compiled"))
    application.load(str(folder / "compiled"))
    return application


def logits(application: Any, ids: Any) -> Any:
    """Of the prompt's last token and of each further one, which is given: [batch, STEPS + 1, V]."""
    import torch

    batch, found = ids.shape[0], []
    for end in range(PROMPT, PROMPT + STEPS + 1):
        new = ids[:, :PROMPT] if end == PROMPT else ids[:, end - 1 : end]
        places = torch.arange(end - new.shape[1], end).expand(batch, -1)
        seen = max(PROMPT, end - 1)  # a decode step's mask has what is cached
        out = application(
            input_ids=new,
            attention_mask=torch.ones(batch, seen, dtype=torch.int64),
            position_ids=places.contiguous(),
            seq_ids=torch.arange(batch),
        )
        found.append(out.logits[:, -1].float())
    return torch.stack(found, dim=1)


def tokens_apart(application: Any, prompt: Any, expected: Any) -> float:
    """How far below the best logit the chosen token's lies, relative to the largest."""
    import torch
    from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

    from harness.session.chunks import PromptInChunks

    adapter = PromptInChunks(application)
    made = adapter.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=1,
        do_sample=False,
        sampling_params=prepare_sampling_params(len(prompt), [1], [1.0], [1.0]),
    )
    first = expected[:, 0]
    chosen = first.gather(1, made[:, prompt.shape[1], None])[:, 0]
    return float((first.max(dim=1).values - chosen).max() / first.abs().max())


def as_markdown(table: dict[str, dict[str, dict[str, str]]]) -> str:
    """A table for each release, features by columns, and below it what was raised."""
    parts = []
    for name, cells in table.items():
        lines = [f"NxD Inference {name}:", "", "| | " + " | ".join(COLUMNS) + " |"]
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        notes: list[str] = []
        for feature, found in cells.items():
            shown = [marked(found.get(column, "not run"), notes) for column in COLUMNS]
            lines.append(f"| {feature} | " + " | ".join(shown) + " |")
        for number, note in enumerate(notes, 1):
            lines += ["", *textwrap.wrap(f"({number}) {note}", 120, break_on_hyphens=False)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def marked(told: str, notes: list[str]) -> str:
    """A cell's figure, or the number of the note that says why there is none."""
    if ":" not in told:
        return told
    if told not in notes:
        notes.append(told)
    return f"({notes.index(told) + 1})"


if __name__ == "__main__":
    sys.exit(main())
