"""The steps of AWS's talk AIM414 over `torch_neuronx.trace`: eager, adapter, trace, save, load,
replicas, MSE and cosine, prompts a second, and a profile of the whole model.
"""

import json
import time

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import pytest
import torch
import torch_neuronx
from torch import nn
from transformers import AttentionInterface, Qwen3Config, Qwen3Model

from neuron_cpu.core.report import report as profiles
from neuron_cpu.core.time import cost
from neuron_cpu.core.time.schedule import schedule
from neuron_cpu.torch_device.report import recorded

BATCH, TOKENS, HIDDEN, FEED, HEADS, KV_HEADS, WIDTH, LAYERS = 2, 48, 64, 96, 4, 2, 16, 2
RUNS = 3


@nki.jit
def causal(q, k, v, scale):
    """q, k [H, D, S], v [H, S, D], S and D up to 128 -> [H, S, D]."""
    heads, d, s = q.shape
    out = nl.ndarray((heads, s, d), dtype=q.dtype, buffer=nl.shared_hbm)
    i_query, i_key = nl.arange(s)[:, None], nl.arange(s)[None, :]
    for h in nl.affine_range(heads):
        scores = nl.matmul(nl.load(q[h]), nl.load(k[h]), transpose_x=True) * scale
        weights = nl.softmax(nl.where(i_query >= i_key, scores, -30000.0), axis=1)
        nl.store(out[h], nl.matmul(weights, nl.load(v[h])))
    return out


@nki.jit
def without_mask(q, k, v, scale):
    """The same, but every token sees all of them."""
    heads, d, s = q.shape
    out = nl.ndarray((heads, s, d), dtype=q.dtype, buffer=nl.shared_hbm)
    for h in nl.affine_range(heads):
        scores = nl.matmul(nl.load(q[h]), nl.load(k[h]), transpose_x=True) * scale
        nl.store(out[h], nl.matmul(nl.softmax(scores, axis=1), nl.load(v[h])))
    return out


def adapter(kernel):
    """transformers' signature around a kernel: heads before tokens in, tokens before heads out."""

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        b, h, s, d = query.shape
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        q, k = (x.reshape(b * h, s, d).permute(0, 2, 1) for x in (query, key))
        out = kernel(q, k, value.reshape(b * h, s, d), scaling)
        return out.reshape(b, h, s, d).transpose(1, 2).contiguous(), None

    return attention


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3Config(
            256,
            HIDDEN,
            FEED,
            LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=WIDTH,
            use_cache=False,
            attn_implementation="eager",
        )
        self.model = Qwen3Model(config).eval()

    def forward(self, ids):
        return self.model(ids).last_hidden_state


def apart(got, reference):
    """The mean squared error, and the least cosine of a token."""
    cosine = torch.cosine_similarity(got, reference, -1).min()
    return float((got - reference).square().mean()), float(cosine)


@pytest.fixture
def reference():
    model = Embedding()
    ids = torch.randint(256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model, ids, model(ids)


def test_the_talk_from_eager_to_its_profile(reference, tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    model, ids, expected = reference
    AttentionInterface.register("causal of the talk", adapter(causal))
    rates = {}
    with torch.no_grad(), recorded([str(tmp_path / "run.json"), str(tmp_path / "run.html")]):
        for name in ("eager", "causal of the talk"):
            model.model.config._attn_implementation = name
            torch.jit.save(torch_neuronx.trace(model, ids), tmp_path / f"{name}.pt")
            loaded = torch.jit.load(tmp_path / f"{name}.pt")
            begin = time.perf_counter()
            outs = [loaded(ids) for _ in range(RUNS)]
            rates[name] = RUNS * BATCH / (time.perf_counter() - begin)
            for out in outs:
                mse, cosine = apart(out, expected)
                assert mse < 1e-10 and cosine > 0.99999, name
        replicas = torch_neuronx.DataParallel(loaded, device_ids=[0, 1])
        assert apart(replicas(ids.repeat(2, 1)), expected.repeat(2, 1, 1))[1] > 0.99999
    assert min(rates.values()) > 0
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["chip"] == "trn1" and (tmp_path / "run.html").stat().st_size > 10_000
    eager, swapped = found["parts"]
    assert eager["name"].endswith("eager.pt") and swapped["name"].endswith("talk.pt")
    check_profile(eager, RUNS, kernel=False)
    check_profile(swapped, RUNS + 2, kernel=True)


def check_profile(part, calls, kernel):
    """Multiplications by hand; the kernel's time by its own schedule."""
    rows = BATCH * TOKENS
    projections = rows * HIDDEN * WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * rows * HIDDEN * FEED
    attention = 2 * BATCH * HEADS * TOKENS**2 * WIDTH
    positions = BATCH * TOKENS * WIDTH // 2
    least = calls * LAYERS * (projections + attention)
    assert part["calls"] == calls and part["compiled"]
    assert least <= part["macs"] <= least + calls * positions
    assert part["nki_macs"] == (calls * LAYERS * attention if kernel else 0)
    low, high = part["band_ns"]
    assert low <= part["time_ns"] <= high
    own = [row for row in part["operators"] if row["kind"] == "kernel"]
    assert len(own) == kernel
    if kernel:
        shapes = [(BATCH * HEADS, WIDTH, TOKENS)] * 2 + [(BATCH * HEADS, TOKENS, WIDTH)]
        program = causal.trace(*map(torch.zeros, shapes), WIDTH**-0.5)
        alone = profiles.profile(schedule(program)).time_ns + cost.Overheads().kernel_ns
        assert own[0]["time_ns"] == pytest.approx(calls * LAYERS * alone)


def test_a_kernel_without_its_mask_is_far_off(reference):
    model, ids, expected = reference
    AttentionInterface.register("without mask of the talk", adapter(without_mask))
    model.model.config._attn_implementation = "without mask of the talk"
    mse, cosine = apart(torch_neuronx.trace(model, ids)(ids), expected)
    assert mse > 1e-4 and cosine < 0.999


def test_a_report_of_a_trace_that_reads_values_names_them(tmp_path):
    traced = torch_neuronx.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2, 3))
    with recorded([str(tmp_path / "run.json")]), pytest.warns(UserWarning, match="value"):
        assert torch.equal(traced(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert json.loads((tmp_path / "run.json").read_text())["parts"] == []
