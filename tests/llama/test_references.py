"""Every kernel has a reference of the same signature and agrees with it, in fp32 closely."""

from __future__ import annotations

import inspect

import pytest
import torch

import llama
from neuron_cpu.core import Kernel
from tests.llama.references import EXACT

KERNELS = sorted(name for name, value in vars(llama).items() if isinstance(value, Kernel))
HIDDEN, F, Q, KV, D, BATCH, LENGTH, PAST = 96, 136, 4, 2, 64, 2, 70, 150


@pytest.mark.parametrize("name", KERNELS)
def test_signatures_agree(name: str) -> None:
    wanted = inspect.signature(getattr(llama, name).function)
    assert inspect.signature(getattr(EXACT, name)) == wanted


def arguments(name: str, tokens: int) -> dict[str, object]:
    """Seeded fp32 arguments of a kernel, by parameter name."""
    torch.manual_seed(len(name))
    positions = torch.arange(tokens).float().reshape(-1, 1)
    inv_freq = torch.tensor([1e4 ** (-2 * i / D) for i in range(D // 2)]).expand(128, -1).clone()
    cos, sin = EXACT.rope_tables_kernel(positions, inv_freq, None)
    n = (Q + 2 * KV) * D
    bias = torch.zeros(BATCH, PAST if "decode" in name else tokens // BATCH)
    bias[1, : PAST // 4 if "decode" in name else 5] = llama.MASKED
    return {
        "x_hbm": torch.randn(tokens, Q * D if name == "rope_kernel" else HIDDEN),
        "gain_hbm": torch.rand(1, HIDDEN), "eps": 1e-5, "n": 77, "f": F,
        "weight_hbm": llama.block_weight(torch.randn(77, HIDDEN) * 0.1),
        "gate_hbm": llama.block_weight(torch.randn(F, HIDDEN) * 0.1),
        "up_hbm": llama.block_weight(torch.randn(F, HIDDEN) * 0.1),
        "down_hbm": llama.block_weight(torch.randn(HIDDEN, F) * 0.1),
        "qkv_w_hbm": llama.block_weight(torch.randn(n, HIDDEN) * 0.1),
        "out_w_hbm": llama.block_weight(torch.randn(HIDDEN, Q * D) * 0.1),
        "qkv_hbm": torch.randn(tokens, n), "cos_hbm": cos.float(), "sin_hbm": sin.float(),
        "position_hbm": positions, "inv_freq_hbm": inv_freq, "dtype": llama.nl.float32,
        "keys_hbm": torch.randn(BATCH, KV, PAST, D), "values_hbm": torch.randn(BATCH, KV, PAST, D),
        "bias_hbm": bias, "batch": BATCH, "q_heads": Q, "kv_heads": KV,
    }  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_its_reference(name: str) -> None:
    """In fp32 nothing is rounded on the way, so only the order of sums differs."""
    tokens = BATCH if "decode" in name else BATCH * LENGTH
    kernel, reference = getattr(llama, name), getattr(EXACT, name)
    values = arguments(name, tokens)
    chosen = {p: values[p] for p in inspect.signature(reference).parameters}
    got, wanted = kernel(**chosen), reference(**chosen)
    pairs = zip(got, wanted) if isinstance(got, tuple) else [(got, wanted)]
    hidden = chosen.get("bias_hbm") is not None and "prefill" in name
    for ours, theirs in pairs:
        if hidden:  # rows of padding attend to nothing and mean nothing
            rows = (values["bias_hbm"] == 0).reshape(-1)
            ours, theirs = ours[rows], theirs[rows]
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-5)
