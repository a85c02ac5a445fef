"""Every kernel has a reference and agrees with it, in fp32 closely."""

import inspect

import pytest
import torch

from neuron_cpu.core import Kernel
from tests.llama.every import llama
from tests.llama.references import EXACT, from_tiles, in_tiles

KERNELS = sorted({value.__name__ for value in llama.values if isinstance(value, Kernel)})
HIDDEN, F, D, BATCH, LENGTH, FEW, PAST = 200, 300, 64, 2, 70, 10, 150
HEADS = llama.HeadShape(6, 3, D)  # three KV heads: one tile of two, and one half empty


def biases():
    """Of Q, K and V in the order of tiles [rows, 1], zeros where no head is."""
    q, k, v = (torch.randn(n * D, 1) for n in (HEADS.q_heads, HEADS.kv_heads, HEADS.kv_heads))
    return torch.cat((HEADS.order(q, HEADS.group), HEADS.order(k, 1), v))


def arguments(tokens, keys):
    """Seeded fp32 arguments of the kernels, by parameter name."""
    torch.manual_seed(tokens)

    def random(*shape):
        return torch.randn(*shape) * 0.1

    length = keys if tokens > keys else 1  # of a sequence: of PAST keys, tokens are decode steps

    def columns():
        return llama.in_blocks(torch.randn(tokens, HIDDEN), length)

    q, k, v = (random(n * D, HIDDEN) for n in (HEADS.q_heads, HEADS.kv_heads, HEADS.kv_heads))
    qkv = torch.cat((HEADS.order(q, HEADS.group), HEADS.order(k, 1), v))
    out = HEADS.order(random(HEADS.q_heads * D, HIDDEN), HEADS.group).t()
    angles = torch.tensor([1e4 ** (-2 * i / D) for i in range(D // 2)])[:, None]
    angles = torch.cat((angles, -angles)).repeat(128 // D, 1) * torch.arange(tokens)
    bias = torch.zeros(BATCH, keys)
    bias[1, : keys // 4] = llama.MASKED
    weight, runs = llama.kernel_layout, llama.in_runs
    cached = torch.randn(BATCH, 3, PAST, D), torch.randn(BATCH, 3, PAST, D)
    hidden = torch.zeros(BATCH, PAST)
    hidden[1, : PAST // 4] = llama.MASKED
    return {
        "x_hbm": columns(),
        "delta_hbm": columns(),
        "norm": llama.Norm(HIDDEN, 1e-5),
        "weight_hbm": weight(runs(runs(random(77, HIDDEN), 0), 1)),
        "gate_hbm": weight(runs(random(F, HIDDEN), 1)),
        "up_hbm": weight(runs(random(F, HIDDEN), 1)),
        "down_hbm": weight(runs(random(HIDDEN, F), 0)),
        "qkv_w_hbm": weight(runs(qkv, 1)),
        "out_w_hbm": weight(runs(out, 0)),
        "cos_hbm": angles.cos(),
        "sin_hbm": angles.sin(),
        "heads": HEADS,
        "batch": BATCH,
        "keys_hbm": cached[0],
        "values_hbm": cached[1],
        "bias_hbm": bias,
        "cache_bias": llama.cache_in_runs(*cached, hidden)[2],
        "active_hbm": None,
        "length": length,
        "qkv_b_hbm": llama.pad_tiles(biases(), 0).t(),
        "q_hbm": in_tiles(torch.randn(tokens, HEADS.q_heads, D), HEADS, 2).transpose(0, 1),
        "k_hbm": in_tiles(torch.randn(tokens, HEADS.kv_heads, D), HEADS, 1).transpose(0, 1),
        "v_hbm": torch.randn(tokens, HEADS.kv_heads * D),
        "features": llama.pad_tiles(q, 1).shape[1],
        "context_hbm": in_tiles(torch.randn(tokens, HEADS.q_heads, D), HEADS, 2).transpose(0, 1),
        "act": "silu",
        "gain_hbm": torch.rand(128, llama.whole_tiles(HIDDEN)) + 0.5,
        "gains_hbm": torch.randn(D, 2).repeat(128 // D, 1),
        "scales_hbm": None,
        "a_hbm": None,
        "b_hbm": None,
        "chosen_hbm": None,
        "rows_hbm": None,
        "window": 33,
        "owners_hbm": None,
        "each": 1,
    }


def scales(name):
    """What a kernel's quantised weights would bring, in its order."""
    hidden = llama.whole_tiles(HIDDEN)
    turned, width = HEADS.stacks * (HEADS.group + 1), HEADS.kv_heads * D
    columns = {
        "linear_kernel": (llama.whole_tiles(77), 0, hidden),
        "swiglu_mlp_kernel": (2 * llama.whole_tiles(F), 0, 2 * hidden),
    }.get(name, (turned, width, 2 * hidden))
    drawn = torch.rand(128, sum(columns)) + 0.5
    drawn[:, columns[0] : columns[0] + columns[1]] = torch.rand(columns[1]) + 0.5  # on all alike
    return drawn


RANKS = 150  # more than a tile of partitions


def adapters(name, tokens):
    """A, B and each token's ranks: none, or a run of them."""
    hidden, own = llama.whole_tiles(HIDDEN), HEADS.q_tiles + 2 * HEADS.stacks
    tiles = llama.whole_tiles(F)
    k_tiles, n_tiles = 3 * hidden + HEADS.q_tiles, own + hidden
    if "mlp" in name:
        k_tiles, n_tiles = 2 * hidden + tiles, 2 * tiles + hidden
    chosen = torch.zeros(RANKS, tokens)
    for token in range(1, tokens):
        chosen[7 * token % 130 :, token][:20] = 1
    a, b = torch.randn(128, k_tiles * RANKS), torch.randn(RANKS, n_tiles * 128)
    return {"a_hbm": a * 0.1, "b_hbm": b * 0.2, "chosen_hbm": chosen}


TAKEN = {name: inspect.signature(getattr(EXACT, name)).parameters for name in KERNELS}
LEFT_OUT = "nothing", "delta_hbm", "norm", "scales_hbm", "a_hbm"


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        *((n, one) for n in KERNELS for one in LEFT_OUT if one in (LEFT_OUT[0], *TAKEN[n])),
        ("attention_prefill_kernel", "bias_hbm"),  # then blocks overlap
        ("swiglu_mlp_kernel", "act"),
    ],
)
def test_kernel_equals_its_reference(name, left_out):
    """In fp32 nothing is rounded on the way, so only the order of sums differs."""
    decode, share = "decode" in name, "share" in name
    kernel, reference = getattr(llama, name), getattr(EXACT, name)
    length = FEW if share else LENGTH
    values = arguments(*((BATCH, PAST) if decode else (BATCH * length, length)))
    if "chunk" in name or share:
        values["bias_hbm"] = values["cache_bias"]
    if share:
        triangle = torch.ones(BATCH, FEW, FEW, dtype=torch.bool).tril()
        values["active_hbm"] = llama._mask_bias(triangle, torch.float32)
    chosen = {p: values[p] for p in inspect.signature(reference).parameters}
    if left_out == "act":
        chosen["act"] = "gelu_pytorch_tanh"
    elif left_out == "nothing" and "scales_hbm" in chosen:
        chosen["scales_hbm"] = scales(name)
        if "qkv_b_hbm" in chosen:  # refused behind quantised weights
            chosen["qkv_b_hbm"] = None
    elif left_out in chosen:
        chosen[left_out] = None
    if left_out not in ("nothing", "a_hbm") and "a_hbm" in chosen:  # refused behind quantised ones
        chosen |= adapters(name, BATCH if decode else BATCH * LENGTH)
    if left_out == "norm" and "gains_hbm" in chosen:  # norms of heads take its epsilon
        chosen["gains_hbm"] = None
    got, wanted = kernel(**chosen), reference(**chosen)
    pairs = zip(got, wanted) if isinstance(got, tuple) else [(got, wanted)]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        if "prefill" in name and left_out != "bias_hbm" and ours.shape[1] == BATCH * LENGTH:
            rows = (values["bias_hbm"] == 0).reshape(-1)  # padding attends to nothing
            ours, theirs = (llama.from_blocks(x, LENGTH)[rows] for x in (ours, theirs))
        if "projection" in name and ours.dim() == 3:  # adapters fill lanes without a head, too
            ours, theirs = (from_tiles(x[:, : HEADS.q_tiles], HEADS, 2) for x in (ours, theirs))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-4, atol=5e-5)
