"""Hashes of the programs of every kind of graph that the files beside llama.py make, to compare.

    python -m tests.llama.program_hashes [--cases NAME ...] [--write FILE] [--against FILE]

A program's hash covers its instructions, their operands and constants, loops, and when each one
runs in the schedule; names of kernels and lines of source are left out. ``--against`` compares with
what an earlier run has written, prints what differs and exits with 1. Shapes are those of whole
models cut to two layers, on the meta device: some minutes in all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config  # noqa: E402

from harness.figures import tracing  # noqa: E402
from harness.figures.estimate import events_of  # noqa: E402
from harness.model_shapes import MODEL_SHAPES  # noqa: E402
from neuron_cpu.core.program.digest import Digest, hashed  # noqa: E402
from neuron_cpu.core.time.cost import DEFAULT_PROFILE  # noqa: E402
from neuron_cpu.core.time.schedule import schedule  # noqa: E402
from neuron_cpu.errors import CompileError  # noqa: E402
from neuron_cpu.runtime.outside import moved  # noqa: E402

SMALL = dict(
    MODEL_SHAPES["llama-3.2-1b"],
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=4096,
)
SHAPES = {
    "1B": MODEL_SHAPES["llama-3.2-1b"],
    "3B": MODEL_SHAPES["llama-3.2-3b"],
    "8B": MODEL_SHAPES["llama-3.1-8b"],
    "small": SMALL,
    "tiny": dict(MODEL_SHAPES["llama-3.2-1b"], num_key_value_heads=4, intermediate_size=5632),
}
BLOCKS = dict(
    version="0.6",
    is_block_kv_layout=True,
    is_prefix_caching=True,
    pa_block_size=32,
    pa_num_blocks=64,
    enable_bucketing=True,
    token_generation_buckets=[256, 512],
    context_encoding_buckets=[128, 512],
    prefix_buckets=[128, 384],
    ctx_batch_size=1,
)
ADAPTERS = dict(version="0.6", lora=2)


def of_small(**changes):
    """The small model with other attributes of config.json."""
    return SMALL | changes


def cases():
    """Name -> (config.json, NeuronConfig and version)."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, shape in SHAPES.items():
        for degree in (1, 2, 8) if name in ("1B", "small") else (2,):
            found[f"{name} degree {degree}"] = shape, dict(tp_degree=degree, seq_len=640)
    one = SHAPES["1B"]
    for length in (64, 512, 1024, 2048):
        found[f"1B {length}"] = one, dict(seq_len=length)
    found["8B degree 8"] = SHAPES["8B"], dict(tp_degree=8, seq_len=1024)
    for name in ("1B", "3B", "8B"):
        found[f"{name} batch 4"] = SHAPES[name], dict(batch_size=4, seq_len=256)
        found[f"{name} over 8192"] = SHAPES[name], dict(seq_len=8192, max_context_length=64)
        found[f"{name} chunks"] = (
            SHAPES[name],
            dict(
                seq_len=2048, max_context_length=256, speculation_length=320, prompt_in_chunks=True
            ),
        )
    found["1B batch 3 of 77"] = one, dict(batch_size=3, seq_len=77)
    found["1B fp32"] = one, dict(torch_dtype="float32", seq_len=256)
    found["8B 4096"] = SHAPES["8B"], dict(tp_degree=8, seq_len=4096)
    both = {"small": SMALL, "1B": one}
    for name, shape in both.items():
        found[f"{name} left padding"] = shape, dict(padding_side="left", seq_len=300, batch_size=2)
        found[f"{name} speculation"] = shape, dict(speculation_length=5, seq_len=640, batch_size=2)
        found[f"{name} blocks"] = shape, dict(BLOCKS, seq_len=512, batch_size=2)
        found[f"{name} adapters"] = shape, dict(ADAPTERS, seq_len=640, batch_size=2)
        found[f"{name} int8"] = shape, dict(quantized=True, seq_len=640)
    found["1B fp8 weights"] = one, dict(quantized=True, quantization_dtype="f8e4m3", seq_len=300)
    found["small fp8 cache"] = SMALL, dict(kv_cache_quant=True, speculation_length=4, seq_len=640)
    found["small fp8 blocks"] = SMALL, dict(BLOCKS, kv_cache_quant=True, seq_len=512)
    found["small fp8 long"] = SMALL, dict(kv_cache_quant=True, seq_len=4096, max_context_length=64)
    found["small int8 chunk"] = SMALL, dict(quantized=True, speculation_length=70, seq_len=640)
    found["small adapters, chunk"] = SMALL, dict(ADAPTERS, speculation_length=40, seq_len=640)
    found["small sequence parallel"] = SMALL, dict(sequence_parallel_enabled=True, seq_len=256)
    mistral = dict(model_type="mistral", sliding_window=200)
    for name, changes in {
        "qwen2": dict(model_type="qwen2"),
        "qwen3": dict(model_type="qwen3"),
        "mistral": mistral,
        **{f"heads of {d}": dict(head_dim=d) for d in (48, 80, 96, 128)},
    }.items():
        shape = of_small(**changes)
        found[f"{name}"] = shape, dict(tp_degree=1, seq_len=640, batch_size=2)
        found[f"{name}, chunk"] = shape, dict(speculation_length=140, seq_len=1024)
        found[f"{name}, few"] = shape, dict(speculation_length=4, seq_len=640)
        found[f"{name}, blocks"] = shape, dict(BLOCKS, seq_len=512, batch_size=2)
    found["mistral over heads of 80"] = of_small(**mistral, head_dim=80), dict(seq_len=640)
    found["mistral long"] = of_small(**mistral), dict(seq_len=4096, max_context_length=512)
    found["qwen3 adapters"] = of_small(model_type="qwen3"), dict(ADAPTERS, seq_len=300)
    found["qwen2 adapters"] = of_small(model_type="qwen2"), dict(ADAPTERS, seq_len=300)
    found["qwen3 int8"] = of_small(model_type="qwen3"), dict(quantized=True, seq_len=300)
    found["qwen2 batch 8"] = of_small(model_type="qwen2"), dict(batch_size=8, seq_len=200)
    return found


def application(module, folder, config, asked):
    """The model of a case on the meta device."""
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    asked = {"tp_degree": 2, "batch_size": 1, **asked}
    asked = {"max_context_length": asked["seq_len"], "torch_dtype": "bfloat16", **asked}
    asked["torch_dtype"] = getattr(torch, asked["torch_dtype"])
    os.environ["NEURON_CPU_NXDI"] = asked.pop("version", "0.1")
    adapters = asked.pop("lora", 0)
    if adapters:
        projections = ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]
        paths = {}
        for number in range(adapters):
            paths[f"adapter{number}"] = str(folder / f"adapter{number}")
            (folder / f"adapter{number}").mkdir()
            said = json.dumps(dict(target_modules=projections, r=8, lora_alpha=8))
            (folder / f"adapter{number}" / "adapter_config.json").write_text(said)
            (folder / f"adapter{number}" / "adapter_model.safetensors").touch()
        asked["lora_config"] = dict(max_loras=adapters, max_lora_rank=8, lora_ckpt_paths=paths)
    if asked.get("quantized"):
        asked = {
            "quantization_dtype": "int8",
            "quantization_type": "per_channel_symmetric",
            **asked,
        }
        asked["quantized_checkpoints_path"] = str(folder)
    cls = module.NeuronLlamaForCausalLM
    config_cls = cls.get_config_cls()
    neuron_config = config_cls.get_neuron_config_cls()(enable_nki=True, **asked)
    loader = load_pretrained_config(str(folder))
    return cls(str(folder), config_cls(neuron_config, load_config=loader))


def of_program(program):
    """[hash of the instructions, hash of the schedule, its microseconds, instructions]."""
    own, timed = Digest(), Digest()
    for each in program:
        own.instruction(each)
    found = schedule(program, DEFAULT_PROFILE)
    timed.add(repr([[round(x, 3) for x in ends] for ends in (found.start, found.end)]))
    hashes = [digest.hash.hexdigest()[:12] for digest in (own, timed)]
    return [*hashes, round(found.total / 1e3, 2), len(program)]


def of_case(module, config, asked):
    """(name of a graph, its programs, hash of what else runs) of a case's graphs."""
    with tempfile.TemporaryDirectory() as folder:
        model = application(module, Path(folder), config, asked)
        for wrapper in model.models:
            for bucket in wrapper.neuron_config.buckets:
                events = events_of(tracing.record(model, wrapper, bucket, Path(folder)))
                known: dict[int, list[Any]] = {}
                programs = []
                for event in events:
                    if event.program is None:
                        continue
                    if id(event.program) not in known:
                        known[id(event.program)] = of_program(event.program)
                    programs.append(known[id(event.program)])
                others = [(e.kind, e.name, moved(e)) for e in events if e.program is None]
                yield f"{wrapper.tag} {bucket}", programs, hashed(repr(others).encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", default="llama")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    module, every = importlib.import_module(args.module), cases()
    wanted = json.loads(args.against.read_text()) if args.against else {}
    found, differ = {}, 0
    for name in args.cases or every:
        try:
            graphs = {graph: [ran, rest] for graph, ran, rest in of_case(module, *every[name])}
        except (AssertionError, NotImplementedError, ValueError, CompileError) as error:
            graphs = {"refused": f"{type(error).__name__}: {error}"}
        found[name] = json.loads(json.dumps(graphs))
        if args.write:
            args.write.write_text(json.dumps(found, indent=1))
        same = found[name] == wanted.get(name) if args.against else None
        differ += same is False
        told = {None: "", True: ": the same", False: f":\n  {found[name]}\n  {wanted.get(name)}"}
        print(f"{name}{told[same]}", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
