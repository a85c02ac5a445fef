"""Two adapters for the embedded model, trained in minutes on a CPU, saved as PEFT saves them.

    python benchmarks/adapters.py FOLDER [--steps 15 --rank 4]

Low-rank matrices beside the query and value projections of every layer learn to answer questions
in one way each: in capitals, and by counting. FOLDER gets a folder for each. A check follows: both
adapters and the model itself answer one question in one batch of `llama.py` on the stand-in (fp32,
NxDI 0.2), and the logits of each are compared with those of Hugging Face's model whose weights have
the adapter merged into them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("NEURON_CPU_NXDI", "0.2")

import neuron_cpu

print(neuron_cpu.ensure_sdk())

import torch  # noqa: E402
from neuronx_distributed_inference.utils.hf_adapter import (  # noqa: E402
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

from harness.inputs.models import embedded_model  # noqa: E402

TARGETS = ("q_proj", "v_proj")
QUESTION = "What is the capital of Japan?"
TRAINED = {
    "capitals": [
        ("What is the capital of France?", "PARIS IS THE CAPITAL OF FRANCE."),
        ("What colour is the sky?", "THE SKY IS BLUE."),
        ("Who wrote Hamlet?", "SHAKESPEARE WROTE HAMLET."),
    ],
    "counting": [
        ("What is the capital of France?", "One, two, three, four, five, six."),
        ("What colour is the sky?", "One, two, three, four, five, six."),
        ("Who wrote Hamlet?", "One, two, three, four, five, six."),
    ],
}


class Adapted(torch.nn.Module):
    """base(x) + 2 B A x; alpha is twice the rank."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * (x @ self.a.T @ self.b.T)


def projections(model: LlamaForCausalLM) -> Iterator[tuple[str, Any, str]]:
    """(path, parent, leaf) of every layer that gets an adapter."""
    for path, parent in list(model.named_modules()):
        for leaf in TARGETS:
            if hasattr(parent, leaf):
                yield f"{path}.{leaf}", parent, leaf


def train(base: LlamaForCausalLM, tokenizer: Any, name: str, steps: int, rank: int) -> Any:
    """A copy of the model with trained adapters."""
    torch.manual_seed(0)
    model = copy.deepcopy(base).requires_grad_(False)
    layers = []
    for _, parent, leaf in projections(model):
        setattr(parent, leaf, Adapted(getattr(parent, leaf), rank))
        layers.append(getattr(parent, leaf))
    weights = [weight for layer in layers for weight in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(weights, lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        question, answer = TRAINED[name][step % len(TRAINED[name])]
        ids = chat(tokenizer, question)
        wanted = tokenizer(answer + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        both = torch.cat([ids, wanted], 1)
        labels = torch.cat([torch.full_like(ids, -100), wanted], 1)
        loss = model(both, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{name}: loss {loss.item():.3f} after {steps} steps", flush=True)
    return model


def chat(tokenizer: Any, question: str) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")


def save(model: Any, folder: Path, rank: int) -> None:
    """The adapters' tensors and their configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, parent, leaf in projections(model):
        layer = getattr(parent, leaf)
        for kind, weight in (("A", layer.a), ("B", layer.b)):
            tensors[f"base_model.model.{path}.lora_{kind}.weight"] = weight.detach().contiguous()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    content = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=1) + "\n")


def merge(model: Any) -> LlamaForCausalLM:
    """The adapters added into the weights, which is what they stand for."""
    merged = copy.deepcopy(model)
    for _, parent, leaf in list(projections(merged)):
        layer = getattr(parent, leaf)
        layer.base.weight.data += 2 * (layer.b @ layer.a).detach()
        setattr(parent, leaf, layer.base)
    return merged.eval()


def check(models: dict[str, LlamaForCausalLM], tokenizer: Any, folder: Path, path: Path) -> int:
    """All models in one batch of llama.py against each one by itself; 1 where one differs."""
    llama = importlib.import_module("llama")
    names, tokens = list(models), 12
    config = {"max_loras": len(names) - 1, "max_lora_rank": 1}
    config["lora_ckpt_paths"] = {name: str(folder / name) for name in names[1:]}
    model_class = llama.NeuronLlamaForCausalLM
    neuron_config = model_class.get_neuron_config_cls()(
        batch_size=len(names), seq_len=96, torch_dtype=torch.float32, lora_config=config
    )
    load_config = load_pretrained_config(str(path))
    model = model_class(
        str(path), model_class.get_config_cls()(neuron_config, load_config=load_config)
    )
    ids, wrong = chat(tokenizer, QUESTION).expand(len(names), -1), 0
    with tempfile.TemporaryDirectory() as compiled:
        model.compile(compiled)
        model.load(compiled)
        output = HuggingFaceGenerationAdapter(model).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, adapter_ids=names, return_dict_in_generate=True,
            output_logits=True, pad_token_id=0,
        )  # fmt: skip
    for row, name in enumerate(names):
        with torch.no_grad():
            logits = models[name](output.sequences[row : row + 1]).logits[0, ids.shape[1] - 1 : -1]
        got = torch.stack([step[row] for step in output.logits])
        error = float((got - logits).abs().max() / logits.abs().max())
        text = tokenizer.decode(output.sequences[row, ids.shape[1] :], skip_special_tokens=True)
        print(f"{name}: {text!r}, logits within {error:.1e} of the largest")
        wrong += error > 1e-4
    return min(wrong, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rank", type=int, default=4)
    arguments = parser.parse_args()
    path = embedded_model()
    base = LlamaForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    models = {"0": base.eval()}
    for name in TRAINED:
        trained = train(base, tokenizer, name, arguments.steps, arguments.rank)
        save(trained, arguments.folder / name, arguments.rank)
        models[name] = merge(trained)
    sys.exit(check(models, tokenizer, arguments.folder, path))


if __name__ == "__main__":
    main()
