"""Low-rank adapters with seeded weights, as PEFT saves them, and what peft makes of them."""

import copy
import json

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder, model, targets=(*ATTENTION, *MLP), rank=4, seed=1, strength=0.5, **config
):
    """An adapter of a Hugging Face model; `strength` scales what it adds."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] not in targets:
            continue
        for kind, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            if kind == "B":
                values *= strength
            tensors[f"base_model.model.{path}.lora_{kind}.weight"] = values
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    content |= {"target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def merge_adapter(model, folder):
    """Add what an adapter adds to the weights of a Hugging Face model."""
    content = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    for name, weight in model.named_parameters():
        path = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{path}A.weight" in tensors:
            product = tensors[f"{path}B.weight"] @ tensors[f"{path}A.weight"]
            weight.data += content["lora_alpha"] / content["r"] * product


def as_peft(model, folder):
    """A copy of a Hugging Face model with the adapter, as peft loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()


def continued(app, names, prompts, steps):
    """Greedy answers by continuous batching: prompts one by one, then all of them in each step.

    Args:
        app: application with a context encoding batch of 1.
        names: adapter of each cache line, in the order of the prompts; fewer than the batch has.
        prompts: token ids, one for each line.
        steps: of token generation behind the prompts.

    Yields:
        Of each prompt, then of each line in each step: line, all tokens that the model has seen,
        logits [V] of what follows them.
    """
    tokens = {line: list(prompt) for line, prompt in zip(names, prompts)}

    # the driver of real libraries makes adapters without them
    from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

    from harness.session.adapters import named

    def call(lines, ids, positions):
        adapters = named(app, [names[line] for line in lines])
        return app(
            input_ids=ids,
            position_ids=positions,
            seq_ids=torch.tensor(lines),
            sampling_params=prepare_sampling_params(len(lines)),
            adapter_ids=adapters,
        ).logits[:, -1]

    def told(lines, logits):
        for line, row in zip(lines, logits):
            yield line, list(tokens[line]), row
            tokens[line].append(int(row.argmax()))

    for line, seen in tokens.items():
        yield from told([line], call([line], torch.tensor([seen]), torch.arange(len(seen))[None]))
    for _ in range(steps):
        newest = torch.tensor([seen[-1:] for seen in tokens.values()])
        places = torch.tensor([[len(seen) - 1] for seen in tokens.values()])
        yield from told(list(tokens), call(list(tokens), newest, places))
