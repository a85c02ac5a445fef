"""Prompts longer than the largest prefill graph: fed in chunks, in front of the SDK's adapter."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

from harness.inputs.chunks import chunk_starts
from neuron_cpu.console import progress


class PromptInChunks(HuggingFaceGenerationAdapter):
    """The SDK's adapter, for a model compiled with `prompt_in_chunks`.

    A prompt begins in the largest prefill graph. The sub-model that takes several tokens a step
    adds a chunk of it at a time to the cache, and the last token of every row is a decode step,
    whose logits, or token, are those behind the prompt. Rows shorter than the longest get padding
    behind their end, which the decode steps overwrite before a mask shows it.
    """

    def forward(self, *args: Any, **inputs: Any) -> Any:
        ids, model = inputs.get("input_ids"), self.neuron_model
        longest = model.context_encoding_model.neuron_config.buckets[-1]
        if ids is None or model.kv_cache_populated or ids.shape[1] <= longest:
            return super().forward(*args, **inputs)
        mask, places = inputs.pop("attention_mask"), inputs.pop("position_ids")
        del inputs["input_ids"]
        first = slice(0, longest)
        super().forward(
            *args,
            input_ids=ids[:, first],
            attention_mask=mask[:, first],
            position_ids=places[:, first],
            **inputs,
        )
        chunk, most = model.neuron_config.speculation_length, model.neuron_config.max_length
        padded = torch.nn.functional.pad(ids, (0, chunk))
        for start in chunk_starts(ids.shape[1], longest, chunk, most):
            progress.report("prompt", start, ids.shape[1])
            end = start + chunk
            super().forward(
                *args,
                input_ids=padded[:, start:end],
                attention_mask=mask.new_ones((len(ids), start)),
                position_ids=torch.arange(start, end).expand(len(ids), chunk),
                **inputs,
            )
        progress.report("prompt", ids.shape[1], ids.shape[1])
        last = mask.sum(1, keepdim=True) - 1
        return super().forward(
            *args,
            input_ids=ids.gather(1, last),
            attention_mask=(torch.arange(ids.shape[1] - 1) < last).to(mask.dtype),
            position_ids=last,
            **inputs,
        )
