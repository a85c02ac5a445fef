"""Greedy text and logits of a Hugging Face model or of an application, by the same call."""

import warnings

import torch


def padded(prompts, width, left=False):
    """Token ids and mask [B, width] of prompts of unequal lengths."""
    ids = torch.zeros((len(prompts), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        at = width - len(prompt) if left else 0
        ids[row, at : at + len(prompt)] = torch.tensor(prompt)
        mask[row, at : at + len(prompt)] = 1
    return ids, mask


def generated(model, prompts, steps, adapter=None, **options):
    """What `generate` returns for prompts of unequal lengths, and the width that they fill."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    left = getattr(model, "padding_side", "right") == "left"
    width = model.neuron_config.max_length if left else max(map(len, prompts))
    ids, mask = padded(prompts, width, left)
    if adapter is None:
        adapter = model if hasattr(model, "generate") else HuggingFaceGenerationAdapter(model)
    asked = dict(do_sample=False, top_k=1, eos_token_id=None, pad_token_id=0, max_new_tokens=steps)
    with warnings.catch_warnings():  # NxDI 0.1 goes by top_k
        warnings.filterwarnings("ignore", "`do_sample` is set to `False`")
        return adapter.generate(ids, attention_mask=mask, **(asked | options)), width


def seeded(config):
    """A model of transformers in fp32 with weights of a seed, biases and gains among them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def tokens(model, prompts, steps, **options):
    """New tokens [B, steps]."""
    output, width = generated(model, prompts, steps, **options)
    return output[:, width:]


def logits(model, prompts, steps, **options):
    """New tokens [B, steps] and their logits [B, steps, V]."""
    options |= dict(return_dict_in_generate=True, output_logits=True)
    output, width = generated(model, prompts, steps, **options)
    return output.sequences[:, width:], torch.stack(output.logits, 1)


def alone(model, prompt, steps):
    """Tokens [steps] behind one prompt and their logits [steps, V]."""
    return [found[0] for found in logits(model, [prompt], steps)]


def assert_equal(app, model, prompts, steps):
    """An application's text behind each prompt is the model's."""
    for found, prompt in zip(tokens(app, prompts, steps), prompts, strict=True):
        assert found.tolist() == alone(model, prompt, steps)[0].tolist()
