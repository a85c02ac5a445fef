"""Kernels on int8 and fp8 weights: against float64, and as the model of a quantised checkpoint."""

import pytest
import torch

import models.quantised
from llama import KernelWeight
from neuron_cpu.runtime.ranks import Group, rank_context
from tests.llama import test_references as fp32
from tests.llama.every import llama
from tests.llama.references import EXACT, TORCH, check_error

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WEIGHTS = ("weight_hbm", "gate_hbm", "up_hbm", "down_hbm", "qkv_w_hbm", "out_w_hbm")
LONG = ("linear_kernel", "swiglu_mlp_kernel")  # every token for itself: any number of them


def quantised(weight, dtype):
    """As large as the type allows, so that no product is scaled but by its scale."""
    most = 127 if dtype is torch.int8 else 240
    steps = weight / weight.abs().max() * most
    return steps.round().to(dtype) if dtype is torch.int8 else steps.to(dtype)


def case(name, dtype, tokens):
    """Arguments of a kernel in bf16, in its order; scales bring weights to about their size."""
    values = fp32.arguments(tokens, fp32.LENGTH)
    for key, value in values.items():
        if key in WEIGHTS:
            values[key] = quantised(value, dtype)
        elif isinstance(value, torch.Tensor):
            values[key] = value.to(BF16)
    values["scales_hbm"], values["qkv_b_hbm"] = fp32.scales(name) / 300, None
    values["scales_hbm"][5, 0] = 0  # a row of zeros has the scale 0 in fp8 before SDK 2.22
    if "chunk" in name:
        values["bias_hbm"] = values["cache_bias"]
    names = fp32.inspect.signature(getattr(EXACT, name)).parameters
    return [values[name] for name in names]


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize(
    ("name", "tokens", "padded"),
    [
        *((name, tokens, False) for name in LONG for tokens in (1, 5, 130)),
        ("attention_prefill_kernel", fp32.BATCH * fp32.LENGTH, False),
        ("attention_prefill_kernel", fp32.BATCH * fp32.LENGTH, True),
        ("attention_chunk_kernel", fp32.BATCH * fp32.LENGTH, False),
    ],
)
def test_kernels(name, tokens, padded, dtype):
    """Hidden and inner sizes that are no tiles, three KV heads in tiles of two."""
    given = case(name, dtype, tokens)
    if "prefill" in name and not padded:
        given[9] = None
    results = (getattr(side, name)(*given) for side in (llama, TORCH, EXACT))
    got, torch_bf16, exact = (r if isinstance(r, tuple) else (r,) for r in results)
    for ours, theirs, true in zip(got, torch_bf16, exact):
        if padded and ours.shape[1] == tokens:
            live = (given[9] == 0).reshape(-1)  # padding attends to nothing
            ours, theirs, true = (x[:, live] for x in (ours, theirs, true))
        check_error(ours, theirs, true)


def test_weights_stay_narrow_in_hbm_and_fp8_needs_no_engine():
    """int8 is copied into bf16 once an element, on ScalarE and GpSimdE; fp8 nowhere."""
    for dtype, copied in ((torch.int8, 1), (FP8, 0)):
        given = [
            x.to("meta") if isinstance(x, torch.Tensor) else x for x in case(LONG[1], dtype, 1)
        ]
        program = llama.swiglu_mlp_kernel.trace(*given)
        sources = [v for i in program.instructions if i.op.name == "tensor_copy" for v in i.src]
        wide = sum(view.size for view in sources if view.storage.dtype.itemsize == 1)
        stored = sum(s.size for s in program.inputs if s.dtype.itemsize == 1)
        assert stored and wide == copied * stored


@pytest.mark.parametrize(("tokens", "past"), [(1, 150), (70, 150), (1, 5000)])
def test_cached_keys_and_values_in_fp8(tokens, past, monkeypatch):
    """What is cached is rounded, what is new is not; in one block and in several."""
    monkeypatch.setattr(fp32, "PAST", past)
    kernel = "attention_chunk_kernel"
    values = fp32.arguments(fp32.BATCH * tokens, tokens)
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            values[key] = value.to(FP8 if key in ("keys_hbm", "values_hbm") else BF16)
    values["bias_hbm"] = values["cache_bias"]
    names = fp32.inspect.signature(getattr(EXACT, kernel)).parameters
    given = [values[name] for name in names]
    got, torch_bf16, exact = (getattr(side, kernel)(*given) for side in (llama, TORCH, EXACT))
    for ours, theirs, true in zip(got, torch_bf16, exact):
        check_error(ours, theirs, true)
    read = [s for s in getattr(llama, kernel).trace(*_meta(given)).inputs if len(s.shape) == 4]
    assert {s.dtype.itemsize for s in read} == {1}


def _meta(given):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]


def test_a_weight_that_is_quantised_leaves_no_other_behind():
    """NxD registers a layer's weight a second time, as `master_weight`, while it traces."""
    with rank_context(Group(0, 1)):
        layer = KernelWeight(128, 128, 1, torch.bfloat16)
    layer.master_weight = layer.weight
    models.quantised.hold(layer, "weight", 128, torch.int8)
    held = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    assert held == {"weight": torch.int8}


def test_the_last_pieces_of_the_last_weight_shrink():
    """40 tiles from 8: most would be 10 tiles with their bytes in 32 KiB, a sixth of all is 7."""
    for last, sizes in ((True, [5, 7, 7, 7, 6, 4, 3, 1]), (False, [7] * 5 + [5])):
        pieces = models.quantised.quantised_pieces(40, 8, 1, last, 2048)
        assert [size for _, size in pieces] == sizes
