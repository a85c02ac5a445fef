"""Generation for checks, and comparison of a Neuron application with a Hugging Face model."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch_neuronx.testing.validation import logit_validation
from transformers import GenerationConfig, PreTrainedModel

from ..models.application_base import NeuronApplicationBase
from .constants import TEST_PROMPT
from .hf_adapter import HuggingFaceGenerationAdapter


def get_generate_outputs_from_token_ids(
    model: Any,
    token_ids: Union[torch.Tensor, Sequence[Sequence[int]]],
    tokenizer: Any,
    attention_mask: Optional[torch.Tensor] = None,
    is_hf: bool = False,
    draft_model: Optional[Any] = None,
    input_capture_hook: Optional[Callable[..., Any]] = None,
    **generate_kwargs: Any,
) -> Tuple[Any, List[str]]:
    """Generate from token ids (B, L), padded on the side that the model wants.

    Lists of unequal lengths are padded with the tokenizer's padding token. Returns what
    `generate` returned and the decoded texts without special tokens.
    """
    if draft_model is not None:
        raise NotImplementedError(
            "A draft model is not supported by neuron_cpu; use prompt lookup, or none."
        )
    if not isinstance(token_ids, torch.Tensor):
        batch = tokenizer.pad({"input_ids": [list(ids) for ids in token_ids]}, return_tensors="pt")
        token_ids, attention_mask = batch["input_ids"], batch["attention_mask"]
    if attention_mask is None:
        attention_mask = torch.ones_like(token_ids)
    if input_capture_hook is not None:
        generate_kwargs["input_capture_hook"] = input_capture_hook
    target = model if is_hf else HuggingFaceGenerationAdapter(model)
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
    prompts: Union[str, Sequence[str]],
    tokenizer: Any,
    is_hf: bool = False,
    draft_model: Optional[Any] = None,
    device: str = "neuron",
    input_capture_hook: Optional[Callable[..., Any]] = None,
    input_start_offsets: Optional[List[int]] = None,
    **generate_kwargs: Any,
) -> Tuple[Any, List[str]]:
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


def _golden_model(neuron_model: Any, hf_model: Optional[PreTrainedModel]) -> PreTrainedModel:
    """The Hugging Face model to compare with: the one given, or the application's own, in fp32."""
    if hf_model is not None:
        return hf_model
    return neuron_model.load_hf_model(neuron_model.model_path.rstrip("/")).eval().float()


def _encode(prompt: Any, tokenizer: Any, rows: int, side: str) -> Dict[str, torch.Tensor]:
    """Ids and mask of `rows` copies of a prompt, padded on `side`."""
    tokenizer.pad_token_id = tokenizer.eos_token_id
    tokenizer.padding_side = side
    texts = [prompt or TEST_PROMPT] * rows
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def check_accuracy(
    neuron_model: Any,
    tokenizer: Any,
    generation_config: Optional[GenerationConfig] = None,
    expected_token_ids: Optional[torch.Tensor] = None,
    num_tokens_to_check: Optional[int] = None,
    do_sample: bool = False,
    draft_model: Optional[Any] = None,
    prompt: Optional[str] = None,
    image: Optional[Any] = None,
    hf_model: Optional[PreTrainedModel] = None,
    execution_mode: str = "config",
) -> None:
    """AssertionError unless the tokens agree with `expected_token_ids` or Hugging Face's.

    `prompt` is repeated over the compiled batch; `num_tokens_to_check` limits the comparison.
    """
    del execution_mode
    if image is not None:
        raise NotImplementedError("Images are not supported by neuron_cpu; pass text only.")
    config = neuron_model.neuron_config
    batch = _encode(prompt, tokenizer, config.batch_size, config.padding_side)
    arguments: Dict[str, Any] = dict(
        do_sample=do_sample, max_length=config.max_length, generation_config=generation_config
    )
    if expected_token_ids is None:
        golden = _golden_model(neuron_model, hf_model)
        expected_token_ids = golden.generate(**batch, **arguments)
    actual, _ = get_generate_outputs_from_token_ids(
        neuron_model,
        batch["input_ids"],
        tokenizer,
        attention_mask=batch["attention_mask"],
        draft_model=draft_model,
        **arguments,
    )
    start = batch["input_ids"].shape[1]
    stop = None if num_tokens_to_check is None else start + num_tokens_to_check
    expected, actual = expected_token_ids[:, start:stop], actual[:, start:stop]
    if expected.shape != actual.shape or not torch.equal(expected, actual):
        raise AssertionError(
            f"Generated tokens differ, expected {expected.tolist()}, got {actual.tolist()}."
        )


def _scores(
    model: Any,
    ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    count: int,
    generation_config: Optional[GenerationConfig],
) -> torch.Tensor:
    """Greedy scores (count, B, V) behind `ids`, whose first columns `prompt_mask` describes."""
    ones = prompt_mask.new_ones((len(prompt_mask), ids.shape[1] - prompt_mask.shape[1]))
    outputs = model.generate(
        ids,
        attention_mask=torch.cat([prompt_mask, ones], dim=1),
        generation_config=generation_config,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return torch.stack(outputs.scores)[:count]


def check_accuracy_logits(
    neuron_model: Any,
    tokenizer: Any,
    generation_config: Optional[GenerationConfig] = None,
    prompt: Optional[str] = None,
    expected_logits: Optional[torch.Tensor] = None,
    divergence_difference_tol: float = 0.001,
    tol_map: Optional[Dict[Any, Tuple[float, float]]] = None,
    num_tokens_to_check: Optional[int] = None,
    execution_mode: str = "config",
    image: Optional[Any] = None,
    hf_model: Optional[PreTrainedModel] = None,
) -> None:
    """AssertionError unless the logits agree with `expected_logits` (T, B, V) or Hugging Face's.

    The comparison is `logit_validation`'s, with teacher forcing at each divergence.
    """
    del execution_mode
    if image is not None:
        raise NotImplementedError("Images are not supported by neuron_cpu; pass text only.")
    if neuron_model.on_device_sampling:
        raise ValueError(
            "Logits are not returned under on-device sampling; compile without "
            "on_device_sampling_config to validate them."
        )
    config = neuron_model.neuron_config
    batch = _encode(prompt, tokenizer, config.batch_size, config.padding_side)
    input_ids, mask = batch["input_ids"], batch["attention_mask"]
    steps = num_tokens_to_check or config.max_length - input_ids.shape[1]
    if expected_logits is None:
        golden = _golden_model(neuron_model, hf_model)
        expected_logits = _scores(golden, input_ids, mask, steps, generation_config)
    expected_logits = expected_logits[:steps]
    adapter = HuggingFaceGenerationAdapter(neuron_model)

    def generate(ids: torch.Tensor) -> torch.Tensor:
        left = steps - (ids.shape[1] - input_ids.shape[1])
        return _scores(adapter, ids, mask, left, generation_config)

    passed, _, status = logit_validation(
        input_ids,
        generate,
        expected_logits,
        tol_map=tol_map,
        divergence_difference_tol=divergence_difference_tol,
    )
    if not passed:
        raise AssertionError(status)
