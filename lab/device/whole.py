"""Whole graphs of Llama-3.2-1B on a device: prefill and decode of a length, from seeded weights."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness import sdk
from harness.figures import benchmark
from harness.inputs import command_line
from harness.inputs.models import ModelFolder, embedded_model, expected_shapes
from harness.model_shapes import MODEL_SHAPES
from harness.session.building import build
from harness.session.generation import generate_tokens
from harness.session.opening import open_session
from harness.simulator import cost
from lab.device import calls, model

NEW_TOKENS = 8
WORD, PROMPT = "a", "The capital of France is"


def measure(length: int, file: str, degree: int) -> dict[str, Any]:
    """Microseconds of a prefill of `length` tokens and of a decode step behind them, by the host's
    clock, its own work included, for a submission; where no device is, what is estimated of both.
    """
    if sdk.platform().simulates:
        beside = (cost.Overheads().step_ns() - cost.Overheads().graph_ns) / 1e3
        graphs = {p: model.graph(f"{p}-{length}", file, degree) for p in ("prefill", "decode")}
        return {f"{p} p50": found["us"] + beside for p, found in graphs.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODEL_SHAPES[model.SHAPES])
        argv = (
            f"--mode generate --enable-nki --raw --seq-len {length} --max-new-tokens {NEW_TOKENS} "
            f"--tp-degree {degree} --model-path {folder} --llama {calls.ROOT / file}"
        ).split()
        prompt = " ".join([WORD] * (length - NEW_TOKENS))
        session = open_session(command_line.parse([*argv, "--prompt", prompt]))
        runs = benchmark.runs_asked(None)
        speed = benchmark.measure(build(session), session.prompt_ids, NEW_TOKENS, runs)
    steps = {"prefill": speed.context_encoding_model, "decode": speed.token_generation_model}
    return {f"{p} p50": 1e3 * found["latency_ms_p50"] for p, found in steps.items() if found}


def text(file: str) -> list[int]:
    """Greedy tokens of the embedded model, on a device or on the stand-in."""
    argv = "--mode generate --enable-nki --raw --seq-len 128 --tp-degree 1 --llama"
    named = [str(calls.ROOT / file), "--model-path", str(embedded_model()), "--prompt", PROMPT]
    session = open_session(command_line.parse([*argv.split(), *named]))
    steps = generate_tokens(build(session), session.prompt_ids, 2 * NEW_TOKENS)
    return [row[0] for row in steps]


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """A folder of a model whose weights are seeded, with a tokenizer of one word."""
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    values = calls.Seeded()
    shapes = expected_shapes(ModelFolder(folder, folder.name, dict(config)))
    weights = {name: values(shape, "bf16") for name, shape in shapes.items()}
    norms = {n: torch.ones_like(t) for n, t in weights.items() if n.endswith("norm.weight")}
    save_file(weights | norms, str(folder / "model.safetensors"))
    words = Tokenizer(models.WordLevel({"<unknown>": 0, WORD: 1}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unknown>")
    tokenizer.save_pretrained(folder)
