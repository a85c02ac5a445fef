"""Generation as drivers ask for it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..models.application_base import NeuronApplicationBase
from .hf_adapter import GenerationAdapter


def get_generate_outputs_from_token_ids(
    model: Any,
    token_ids: torch.Tensor | Sequence[Sequence[int]],
    tokenizer: Any,
    attention_mask: torch.Tensor | None = None,
    is_hf: bool = False,
    draft_model: Any | None = None,
    input_capture_hook: Callable[..., Any] | None = None,
    **generate_kwargs: Any,
) -> tuple[Any, list[str]]:
    """Generate from token ids (B, L), padded on the model's side. Lists of unequal lengths get the
    tokenizer's padding token. Returns `generate`'s result and the texts without special tokens."""
    if draft_model is not None:
        raise NotImplementedError(
            "A draft model guesses over the real libraries only, expected none over this imitation "
            "of them; name checkouts with NEURON_CPU_LIBRARIES (docs/libraries.md), or run main.py "
            "with --speculate."
        )
    if not isinstance(token_ids, torch.Tensor):
        batch = tokenizer.pad({"input_ids": [list(ids) for ids in token_ids]}, return_tensors="pt")
        token_ids, attention_mask = batch["input_ids"], batch["attention_mask"]
    if attention_mask is None:
        attention_mask = torch.ones_like(token_ids)
    if input_capture_hook is not None:
        generate_kwargs["input_capture_hook"] = input_capture_hook
    target = model if is_hf else GenerationAdapter(model)
    outputs = target.generate(token_ids, attention_mask=attention_mask, **generate_kwargs)
    if isinstance(model, NeuronApplicationBase):
        model.reset()
    sequences = outputs if isinstance(outputs, torch.Tensor) else outputs.sequences
    texts = tokenizer.batch_decode(
        sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return outputs, texts


def get_generate_outputs(
    model: Any,
    prompts: str | Sequence[str],
    tokenizer: Any,
    is_hf: bool = False,
    draft_model: Any | None = None,
    device: str = "neuron",
    input_capture_hook: Callable[..., Any] | None = None,
    input_start_offsets: list[int] | None = None,
    **generate_kwargs: Any,
) -> tuple[Any, list[str]]:
    """Generate from texts: padding on the right for Neuron, on the left for Hugging Face."""
    del device  # there is only the CPU
    if input_start_offsets:
        raise NotImplementedError("input_start_offsets are not supported; pass none.")
    tokenizer.pad_token_id = tokenizer.eos_token_id
    tokenizer.padding_side = "left" if is_hf else model.neuron_config.padding_side
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    return get_generate_outputs_from_token_ids(
        model,
        batch["input_ids"],
        tokenizer,
        attention_mask=batch["attention_mask"],
        is_hf=is_hf,
        draft_model=draft_model,
        input_capture_hook=input_capture_hook,
        **generate_kwargs,
    )
