"""Two adapters for the embedded model, trained in minutes on a CPU, saved as PEFT saves them.

    python benchmarks/adapters.py FOLDER [--steps 15 --rank 4]

Low-rank matrices beside the query and value projections of every layer learn, with peft, to answer
questions in one way each: in capitals, and by counting. FOLDER gets a folder for each. A check
follows: both adapters and the model itself answer one question in one batch of `llama.py` on the
stand-in (fp32, NxDI 0.2), in PyTorch and in NKI kernels, and the logits of each are compared with
peft's on Hugging Face's model.
"""

import argparse
import copy
import importlib
import os
import sys
import tempfile
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
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
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


def train(base: LlamaForCausalLM, tokenizer: Any, name: str, steps: int, rank: int) -> PeftModel:
    """A copy of the model with a trained adapter; alpha is twice the rank."""
    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS))
    model = get_peft_model(copy.deepcopy(base), config)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-3, weight_decay=0.0)
    for step in range(steps):
        question, answer = TRAINED[name][step % len(TRAINED[name])]
        ids = chat(tokenizer, question)
        wanted = tokenizer(answer + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        both = torch.cat([ids, wanted], 1)
        labels = torch.cat([torch.full_like(ids, -100), wanted], 1)
        loss = model(input_ids=both, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{name}: loss {loss.item():.3f} after {steps} steps", flush=True)
    return model.eval()


def chat(tokenizer: Any, question: str) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")


def check(
    models: dict[str, Any], tokenizer: Any, folder: Path, path: Path, enable_nki: bool
) -> int:
    """All models in one batch of llama.py against each one by itself; 1 where one differs."""
    llama = importlib.import_module("llama_extended")
    names, tokens = list(models), 12
    config = {"max_loras": len(names) - 1, "max_lora_rank": 1}
    config["lora_ckpt_paths"] = {name: str(folder / name) for name in names[1:]}
    model_class = llama.NeuronLlamaForCausalLM
    neuron_config = model_class.get_neuron_config_cls()(
        batch_size=len(names), seq_len=96, torch_dtype=torch.float32, lora_config=config,
        enable_nki=enable_nki,
    )  # fmt: skip
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
        how = "kernels" if enable_nki else "PyTorch"
        print(f"{how}, {name}: {text!r}, logits within {error:.1e} of the largest", flush=True)
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
        trained.save_pretrained(str(arguments.folder / name))
        models[name] = trained
    sys.exit(max(check(models, tokenizer, arguments.folder, path, nki) for nki in (False, True)))


if __name__ == "__main__":
    main()
