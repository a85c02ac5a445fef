"""Prompts longer than the largest prefill graph: fed in chunks, in front of the SDK's adapter."""

from collections.abc import Mapping
from typing import Any

import torch
from neuronx_distributed_inference.utils import hf_adapter

from harness.inputs.chunks import chunk_starts
from neuron_cpu.console import progress

# NxDI 0.7 to 0.9 hand on a hook that their adapter does not define and their models do not take
# (v0.7.14366, utils/hf_adapter.py): without these lines no text comes of them, on a device neither.
_HOOK = "tensor_capture_hook"
if not hasattr(hf_adapter, _HOOK):
    setattr(hf_adapter, _HOOK, None)


# The imitation has its adapter without transformers' model classes, too: they import for a second.
_Adapter: Any = (
    getattr(hf_adapter, "GenerationAdapter", None) or hf_adapter.HuggingFaceGenerationAdapter
)


class PromptInChunks(_Adapter):
    """The SDK's adapter, for a model compiled with `prompt_in_chunks`.

    A prompt begins in the largest prefill graph. The sub-model that takes several tokens a step
    adds a chunk of it at a time to the cache, and the last token of every row is a decode step,
    whose logits, or token, are those behind the prompt. Rows shorter than the longest get padding
    behind their end, which the decode steps overwrite before a mask shows it.
    """

    beside: Mapping[str, Any] = {}  # what every call of a text gets besides its tokens

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # NxDI's adapter puts the model's forward in the place of this class's.
        self.__dict__.pop("forward", None)

    def _sample(self, *args: Any, **given: Any) -> Any:
        # NxDI 0.1 draws among the best `top_k` even where `do_sample` is False (v0.1.0, Sampler of
        # utils/hf_adapter.py), and transformers' default is 50: here, as it has checked them.
        if not given["generation_config"].do_sample:
            given["generation_config"].top_k = 1
        return super()._sample(*args, **given)

    def behind(self, tokens: torch.Tensor, start: int, seen: int = 0) -> Any:
        """What the graph gives for tokens [1, T] behind the first `start` of the cache, of which
        the mask shows `seen` (0: all)."""
        return self(
            input_ids=tokens,
            attention_mask=torch.ones((1, seen or start), dtype=torch.int64),
            position_ids=torch.arange(start, start + tokens.shape[1])[None],
            **self.beside,
        )

    def forward(self, **inputs: Any) -> Any:
        if inputs.get(_HOOK) is None:
            inputs.pop(_HOOK, None)
        ids, model = inputs.get("input_ids"), self.neuron_model
        longest = model.context_encoding_model.neuron_config.buckets[-1]
        if ids is None or model.kv_cache_populated or ids.shape[1] <= longest:
            return model(**inputs)
        mask, places = inputs.pop("attention_mask"), inputs.pop("position_ids")
        del inputs["input_ids"]

        def call(ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> Any:
            return model(input_ids=ids, attention_mask=mask, position_ids=places, **inputs)

        call(ids[:, :longest], mask[:, :longest], places[:, :longest])
        chunk, most = model.neuron_config.speculation_length, model.neuron_config.max_length
        padded = torch.nn.functional.pad(ids, (0, chunk))
        for start in chunk_starts(ids.shape[1], longest, chunk, most):
            progress.report("prompt", start, ids.shape[1])
            end = start + chunk
            call(
                padded[:, start:end],
                mask.new_ones((len(ids), start)),
                torch.arange(start, end).expand(len(ids), chunk),
            )
        progress.report("prompt", ids.shape[1], ids.shape[1])
        last = mask.sum(1, keepdim=True) - 1
        seen = (torch.arange(ids.shape[1] - 1) < last).to(mask.dtype)
        return call(ids.gather(1, last), seen, last)
