"""Every supported model, degree, bucket and batch traces, passes strict verification and fits SBUF.

Tracing needs no weights: meta tensors stand for them. What the kernels compute at full size is
checked on one product of each model; the small shapes are compared in test_kernels.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

import llama
from neuron_cpu.core import Program, capacity, spec


class Model(NamedTuple):
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


MODELS = {
    "SmolLM2-135M": Model(576, 9, 3, 64, 1536, 49152),
    "SmolLM2-360M": Model(960, 15, 5, 64, 2560, 49152),
    "TinyLlama-1.1B": Model(2048, 32, 4, 64, 5632, 32000),
    "Llama-3.2-1B": Model(2048, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": Model(3072, 24, 8, 128, 8192, 128256),
    "Llama-3.1-8B": Model(4096, 32, 8, 128, 14336, 128256),
}
DEGREES = (1, 2, 4, 8)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(n: int, k: int) -> torch.Tensor:
    layout = llama.BlockLayout.of(n, k)
    return meta(layout.blocks, layout.block_size)


def heads_per_rank(model: Model, degree: int) -> tuple[int, int]:
    """Query and KV heads of one rank, zero heads of the padding included."""
    kv = math.ceil(model.kv_heads / degree)
    return kv * (model.q_heads // model.kv_heads), kv


def check(program: Program, macs: int) -> None:
    """Within SBUF and PSUM with the streams buffered twice, and no product left out."""
    weight_block = max(
        (s.partition_bytes for s in program.storages if s.on_chip and s.paxis == 0
         and len(s.shape) == 3 and s.shape[0] == 128 and s.shape[2] <= 512), default=0,
    )  # fmt: skip
    assert capacity.sbuf_high_water(program) + weight_block <= spec.SBUF_USABLE_BYTES
    assert 2 * capacity.psum_high_water(program) <= spec.PSUM_BANKS
    assert program.macs >= macs


def prefill(model: Model, degree: int, batch: int, length: int) -> tuple[Program, int]:
    q, kv = heads_per_rank(model, degree)
    d, hidden, tokens = model.head_dim, model.hidden, batch * length
    program = llama.attention_prefill_block_kernel.trace(
        meta(tokens, hidden), meta(1, hidden), 1e-5, weight((q + 2 * kv) * d, hidden),
        weight(hidden, q * d), meta(tokens, d // 2), meta(tokens, d // 2), batch, q, kv,
    )  # fmt: skip
    return program, tokens * hidden * (2 * q + 2 * kv) * d + batch * q * d * length * (length + 1)


def decode(model: Model, degree: int, batch: int, past: int) -> tuple[Program, int]:
    q, kv = heads_per_rank(model, degree)
    d, hidden = model.head_dim, model.hidden
    program = llama.attention_decode_block_kernel.trace(
        meta(batch, hidden), meta(1, hidden), 1e-5, weight((q + 2 * kv) * d, hidden),
        weight(hidden, q * d), meta(batch, d // 2), meta(batch, d // 2),
        meta(batch, kv, past, d), meta(batch, kv, past, d),
        meta(batch, past, dtype=torch.float32), q, kv,
    )  # fmt: skip
    return program, batch * hidden * (2 * q + 2 * kv) * d + 2 * batch * q * d * past


def mlp(model: Model, degree: int, tokens: int) -> tuple[Program, int]:
    f, hidden = model.intermediate // degree, model.hidden
    program = llama.swiglu_mlp_kernel.trace(
        meta(tokens, hidden), weight(f, hidden), weight(f, hidden), weight(hidden, f), f,
        meta(1, hidden), 1e-5,
    )  # fmt: skip
    return program, 3 * tokens * hidden * f


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_one_layer_and_head(name: str, degree: int) -> None:
    """Prefill of 64 tokens, a decode step of every rank's heads, MLP and head."""
    model = MODELS[name]
    check(*prefill(model, degree, 1, 64))
    check(*decode(model, degree, 1, 128))
    check(*mlp(model, degree, 1))
    vocabulary, hidden = model.vocabulary // degree, model.hidden
    program = llama.linear_kernel.trace(
        meta(1, hidden), weight(vocabulary, hidden), vocabulary, meta(1, hidden), 1e-5
    )
    check(program, hidden * vocabulary)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (8, 64), (3, 77), (2, 513), (1, 1024)])
def test_prefill_lengths_and_batches(batch: int, length: int) -> None:
    check(*prefill(MODELS["Llama-3.2-1B"], 8, batch, length))
    check(*mlp(MODELS["Llama-3.2-1B"], 8, batch * length))


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-8B"])
def test_prefill_of_8192_tokens(name: str) -> None:
    """One head pair's share, so that the trace stays short; SBUF holds the same tiles."""
    check(*prefill(MODELS[name], 8, 1, 8192))


@pytest.mark.parametrize(("batch", "past"), [(8, 64), (5, 1), (1, 8193), (1, 131072)])
def test_decode_caches_and_batches(batch: int, past: int) -> None:
    check(*decode(MODELS["Llama-3.2-1B"], 8, batch, past))
