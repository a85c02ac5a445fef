"""One layer of every supported model at every degree, with seeded weights, at full size.

Each kernel runs in strict mode and is compared with float64 beside PyTorch in bf16 (the bound of
test_kernels.py); its program must fit into SBUF and PSUM with every stream buffered twice, and hold
every multiplication. What has little room is traced without weights.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch

from harness.inputs.chunks import default_chunk
from neuron_cpu.core.device.spec import GEN2
from neuron_cpu.core.time.cost import DEFAULT_PROFILE, dma_profile
from neuron_cpu.core.time.schedule import schedule
from tests import peaks
from tests.crossed import crossed, full
from tests.llama.every import kernel_of, llama
from tests.llama.references import EXACT, TORCH, check_error

BF16 = torch.bfloat16


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


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("NKI_CPU_STRICT", "1")


class Layer:
    """Arguments of one layer's kernels for one rank: seeded, or without data on ``meta``."""

    def __init__(self, name, degree, device="cpu"):
        self.model, self.degree = MODELS[name] if isinstance(name, str) else name, degree
        model = self.model
        self.device, self.seed = device, 0
        replicas = max(1, degree // model.kv_heads)
        kv = math.ceil(model.kv_heads * replicas / degree)  # zero heads included
        group = math.ceil(model.q_heads // model.kv_heads / replicas)
        self.heads = llama.HeadShape(kv * group, kv, model.head_dim)
        self.f, self.vocabulary = model.intermediate // degree, model.vocabulary // degree

    def values(self, *shape, scale=1.0):
        """Normal bf16 numbers; large tensors repeat a pool of prime length, no two rows alike."""
        if self.device == "meta":
            return torch.empty(shape, dtype=BF16, device="meta")
        self.seed += 1
        size, generator = math.prod(shape), torch.Generator().manual_seed(self.seed)
        pool = (torch.randn(min(size, 4194301), generator=generator) * scale).to(BF16)
        return pool.repeat(math.ceil(size / pool.numel()))[:size].reshape(shape)

    def weight(self, n, k):
        """A kernel weight, the padding of its inputs not zero: it meets zeros."""
        n_tiles, k_tiles = llama.whole_tiles(n), llama.whole_tiles(k)
        return self.values(128, n_tiles * k_tiles * 128, scale=k**-0.5)

    def columns(self, tokens, length):
        """Hidden states [H, T] of sequences of ``length``, zero behind the features that count."""
        return llama.in_blocks(self.values(tokens, self.model.hidden), length)

    def norm(self):
        return llama.Norm(self.model.hidden, 1e-5)

    def inputs(self, tokens, length):
        """x, delta and norm."""
        return self.columns(tokens, length), self.columns(tokens, length), self.norm()

    def projections(self):
        heads, hidden = self.heads, self.model.hidden
        tiles = heads.stacks * heads.group
        values = heads.kv_heads * heads.head_dim
        return (
            self.weight((tiles + heads.stacks) * 128 + values, hidden),
            self.weight(hidden, tiles * 128),
        )

    def tables(self, positions):
        """cos and sin [128, T] in bf16."""
        if self.device == "meta":
            return [self.values(128, len(positions))] * 2
        d = self.model.head_dim
        frequencies = 500000.0 ** (-torch.arange(0, d, 2) / d)
        lanes = torch.cat((frequencies, -frequencies)).repeat(128 // d)
        angles = lanes[:, None] * positions
        return [angles.cos().to(BF16), angles.sin().to(BF16)]

    def prefill(self, batch, length):
        """Name, arguments and multiplications of the attention block for new sequences."""
        tokens, q, kv, d = batch * length, *self.heads
        tables = self.tables(torch.arange(length).repeat(batch))
        args = *self.inputs(tokens, length), *self.projections(), *tables, self.heads, batch
        linear = tokens * self.model.hidden * 2 * (q + kv) * d
        attention = batch * q * d * length * (length + 1)  # half of the square, twice
        return "attention_prefill_kernel", args, linear + attention

    def decode(self, batch, past):
        """The same for one new token per sequence; each has another number of live keys."""
        q, kv, d = self.heads
        if past > llama.DECODE_KEYS:
            return self.chunk(batch, 1, past)
        args = (
            *self.inputs(batch, 1),
            *self.projections(),
            *self.tables(torch.full((batch,), past)),
            *self.cache(batch, past, 128 // kv),
            self.heads,
        )
        macs = batch * (self.model.hidden * 2 * (q + kv) * d + 2 * q * d * (past + 1))
        return "attention_decode_kernel", args, macs

    def cache(self, batch, past, lanes):
        """Keys, values and bias, in runs; each sequence has another number of live keys."""
        _, kv, d = self.heads
        bias = torch.zeros(batch, past, device=self.device, dtype=BF16)
        if self.device != "meta":
            live = torch.arange(batch)[:, None] * past // batch + math.ceil(past / 2)
            bias[torch.arange(past)[None] >= live] = llama.MASKED
        keys, values = self.values(batch, kv, past, d), self.values(batch, kv, past, d)
        return llama.cache_in_runs(keys, values, bias, lanes)

    def chunk(self, batch, n, past):
        """The same for several new tokens per sequence; None: a chunk as the driver feeds it."""
        q, kv, d = self.heads
        if n is None:
            model, ranks = self.model, self.degree
            config = {
                "hidden_size": model.hidden,
                "num_attention_heads": model.q_heads,
                "num_key_value_heads": model.kv_heads,
                "num_hidden_layers": 16,
                "head_dim": d,
            }
            n = default_chunk(config, ranks, past, [])
        keys, values, bias = self.cache(batch, past, 128)
        active = None
        if n <= 128:
            active = torch.full((batch, n, n), llama.MASKED, dtype=BF16, device=self.device).triu(1)
        positions = past + torch.arange(n).repeat(batch)
        args = (
            *self.inputs(batch * n, n),
            *self.projections(),
            *self.tables(positions),
            keys,
            values,
            bias,
            active,
            self.heads,
        )
        macs = batch * n * (self.model.hidden * 2 * (q + kv) * d + 2 * q * d * (past + n / 2))
        return "attention_chunk_kernel", args, int(macs)

    def mlp(self, tokens):
        hidden, f = self.model.hidden, self.f
        weights = self.weight(f, hidden), self.weight(f, hidden), self.weight(hidden, f)
        return (
            "swiglu_mlp_kernel",
            (*self.inputs(tokens, tokens), *weights),
            3 * tokens * hidden * f,
        )

    def head(self, rows=1):
        n, hidden = self.vocabulary, self.model.hidden
        args = self.columns(rows, 1), self.weight(n, hidden), self.norm()
        return "linear_kernel", args, rows * n * hidden


def check_program(program, macs):
    """Within SBUF and PSUM with the streams buffered twice, and no product left out."""
    high_water = peaks.sbuf_high_water(program)
    assert high_water + llama.PIECE_BYTES <= GEN2.sbuf_usable_bytes
    assert 2 * peaks.psum_high_water(program) <= GEN2.psum_banks
    assert program.macs >= macs


def check_traced(name, args, macs):
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
    check_program(kernel_of(name, args).trace(*meta), macs)


def check(name, args, macs):
    """Run a kernel and compare each of its results."""
    check_traced(name, args, macs)
    kernels = kernel_of(name, args), *(getattr(side, name) for side in (TORCH, EXACT))
    results = [kernel(*args) for kernel in kernels]
    if isinstance(results[0], torch.Tensor):
        results = [[value] for value in results]
    for got, bf16, exact in zip(*results):
        check_error(got, bf16, exact.double())


# Of one layer's kernels in the default run: some of the quick ones. The rest: make test-full.
MLPS = {("SmolLM2-135M", 2)}
ATTENTION = {
    ("SmolLM2-135M", 1),
    ("SmolLM2-135M", 2),
    *product(["TinyLlama-1.1B", "Llama-3.2-3B"], [8]),
}


def rest_in_full(chosen):
    """All models and degrees; those that are not chosen are left to the full run."""
    return [row if row in chosen else full(*row) for row in product(MODELS, DEGREES)]


class TestOneLayer:
    """Prefill of 64 tokens and a decode step, with the heads, features and rows of one rank."""

    @pytest.mark.parametrize(("name", "degree"), rest_in_full(ATTENTION))
    def test_attention(self, name, degree):
        check(*Layer(name, degree).prefill(1, 64))
        check(*Layer(name, degree).decode(1, 128))

    @pytest.mark.parametrize(("name", "degree"), rest_in_full(MLPS))
    def test_mlp_and_head(self, name, degree):
        check(*Layer(name, degree).mlp(16))  # errors of one token alone vary by a seventh
        check(*Layer(name, degree).mlp(64))
        check(*Layer(name, degree).head())


@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [
        *crossed(["Llama-3.2-1B", "Llama-3.1-8B"], [1, 3], [1, 77]),
        full("Llama-3.1-8B", 2, 513),
        full("Llama-3.2-1B", 1, 1024),
        full("Llama-3.1-8B", 1, 2100),
        full("Llama-3.2-1B", 1, 8192),
    ],
)
def test_prefill_lengths_and_batches(name, batch, length):
    """One KV head's share of a model with heads of 64 and of one with heads of 128."""
    check(*Layer(name, 8).prefill(batch, length))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *crossed(
            ["Llama-3.2-1B", "Llama-3.1-8B"],
            [(8, 2048), (5, 1), (2, 2175), (3, 333), (1, 8193), (8, 64)],
        ),
        full("Llama-3.2-1B", (1, 131072)),
        full("Llama-3.1-8B", (1, 131072)),
    ],
)
def test_decode_caches_and_batches(name, sizes):
    check(*Layer(name, 8).decode(*sizes))


FEW_ROOM = [
    full("Llama-3.2-3B", 1, "prefill", (1, 1024)),  # three blocks: 161 of 160 KiB beside weights
    full("Llama-3.2-1B", 2, "prefill", (2, 2048)),  # 177 of 176
    ("Llama-3.2-3B", 1, "decode", (1, 2048)),  # keys of all heads on their way: 256 KiB
    ("Llama-3.2-3B", 2, "chunk", (4, 1, 2048)),  # caches of four sequences: 148 of 96 KiB
    full("Llama-3.2-1B", 8, "chunk", (1, 128, 131072)),  # the longest cache, in two passes
    full("Llama-3.2-1B", 2, "chunk", (1, None, 32768)),  # a chunk as the driver feeds it
    full("TinyLlama-1.1B", 4, "prefill", (8, 512)),
    ("SmolLM2-135M", 1, "decode", (8, 4096)),
]


@pytest.mark.parametrize(("name", "degree", "phase", "sizes"), FEW_ROOM)
def test_what_has_little_room_traces(name, degree, phase, sizes):
    check_traced(*getattr(Layer(name, degree, "meta"), phase)(*sizes))


@pytest.mark.full
def test_one_token_over_a_long_cache_streams_it():
    """128K keys: at most a sixth longer than their bytes, and the weights', take DMA."""
    layer = Layer("Llama-3.2-1B", 2, "meta")
    name, args, _ = layer.decode(1, 131072)
    bytes_read = sum(a.nbytes for a in args if isinstance(a, torch.Tensor))
    plateau = dma_profile(DEFAULT_PROFILE).peak
    assert schedule(kernel_of(name, args).trace(*args)).total < bytes_read / plateau * 7 / 6
