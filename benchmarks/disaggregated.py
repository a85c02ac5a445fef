"""Prefill in one process, decode in another: equal tokens, and what moves between them.

    torchrun --nproc-per-node 2 benchmarks/disaggregated.py [--prompt-tokens 96 --new-tokens 16]

Both processes load the same seeded Llama of the stand-in's. Rank 0 prefills and sends the caches of
the prompt and the first token (gloo), rank 1 decodes behind them. Rank 0 then decodes, too, and the
tokens have to be equal. Times are the CPU's: the share of the transfer in them says nothing about a
Trainium, where caches go from device to device over EFA.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import neuron_cpu

neuron_cpu.ensure_sdk()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from neuronx_distributed_inference.models.config import NeuronConfig  # noqa: E402
from neuronx_distributed_inference.models.llama.modeling_llama import (  # noqa: E402
    LlamaInferenceConfig,
    NeuronLlamaForCausalLM,
)
from neuronx_distributed_inference.modules.kvcache.transfer import (  # noqa: E402
    export_kv,
    import_kv,
    receive_kv,
    send_kv,
)
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


def load(folder: Path, longest: int) -> NeuronLlamaForCausalLM:
    """A seeded model of four layers, compiled and loaded: the same in both processes."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(shape).bfloat16().save_pretrained(folder)
    config = LlamaInferenceConfig(
        NeuronConfig(seq_len=longest), load_config=load_pretrained_config(str(folder))
    )
    model = NeuronLlamaForCausalLM(str(folder), config)
    model.compile(folder / "compiled")
    model.load(folder / "compiled")
    return model


def decode(model: NeuronLlamaForCausalLM, token: int, length: int, count: int) -> list[int]:
    """`count` greedy tokens from `token` on, which stands at position `length`."""
    tokens = [token]
    for position in range(length, length + count - 1):
        output = model(
            input_ids=torch.tensor([tokens[-1:]]),
            attention_mask=torch.ones(1, position),
            position_ids=torch.tensor([[position]]),
        )
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=16)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    length = asked.prompt_tokens
    with tempfile.TemporaryDirectory() as folder:
        model = load(Path(folder), length + asked.new_tokens)
        dist.barrier()
        if dist.get_rank() == 0:
            prefill(model, length, asked.new_tokens)
        else:
            state = receive_kv(torch.bfloat16, 0)
            import_kv(model, 0, state)
            made = decode(model, state.token, state.length, asked.new_tokens)
            dist.send(torch.tensor(made), 0)
    dist.destroy_process_group()


def prefill(model: NeuronLlamaForCausalLM, length: int, count: int) -> None:
    """Rank 0: prefill, send, and compare what comes back with what is decoded here."""
    prompt = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(1))
    started = time.perf_counter()
    output = model(input_ids=prompt, position_ids=torch.arange(length)[None])
    filled = time.perf_counter()
    token = int(output.logits[0, -1].argmax())
    state = export_kv(model, 0, length, token)
    send_kv(state, 1)
    sent = time.perf_counter()
    there = torch.empty(count, dtype=torch.int64)
    dist.recv(there, 1)
    here = decode(model, token, length, count)
    print(f"prefill of {length} tokens: {(filled - started) * 1e3:.1f} ms (CPU)")
    print(f"transfer: {state.nbytes:,} bytes, {(sent - filled) * 1e3:.1f} ms (CPU, loopback)")
    if there.tolist() != here:
        sys.exit(f"decoded there {there.tolist()}, expected {here}")
    print(f"{count} tokens are equal")


if __name__ == "__main__":
    main()
