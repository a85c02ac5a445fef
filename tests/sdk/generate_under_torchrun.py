"""A script of the SDK for torchrun: compiles a Llama, generates, and saves each rank's logits.

torchrun --nproc-per-node 2 generate_under_torchrun.py CHECKPOINT COMPILED RESULTS
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
from neuronx_distributed_inference.models.config import NeuronConfig  # noqa: E402
from neuronx_distributed_inference.models.llama.modeling_llama import (  # noqa: E402
    LlamaInferenceConfig,
    NeuronLlamaForCausalLM,
)
from neuronx_distributed_inference.utils.hf_adapter import (  # noqa: E402
    HuggingFaceGenerationAdapter,
    load_pretrained_config,
)

PROMPT = [5, 17, 101, 3, 44]


def main(checkpoint: Path, compiled: Path, results: Path) -> None:
    """The logits of six greedy tokens, one file a rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.save(logits(checkpoint, compiled, size), results / f"{os.environ.get('RANK', '0')}.pt")


def logits(checkpoint: Path, compiled: Path, degree: int) -> torch.Tensor:
    """fp32 [6, V] of six greedy tokens of `degree` ranks in all, in bf16."""
    neuron = NeuronConfig(seq_len=32, max_context_length=16, tp_degree=degree)
    config = LlamaInferenceConfig(neuron, load_config=load_pretrained_config(str(checkpoint)))
    model = NeuronLlamaForCausalLM(str(checkpoint), config)
    model.compile(compiled)
    model.load(compiled)
    ids = torch.tensor([PROMPT])
    output = HuggingFaceGenerationAdapter(model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        top_k=1,  # what NxDI 0.1 goes by
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.cat(output.logits)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
