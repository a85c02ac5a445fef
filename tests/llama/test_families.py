"""Families that differ from a Llama by a row of a table: logits and greedy text of transformers."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
)

from harness.inputs.models import ModelFolder, check_config, expected_shapes
from models import kinds
from tests import greedy
from tests.crossed import full
from tests.llama.every import llama

TOKENS, STEPS, SEQ_LEN = 150, 6, 192  # prompts of more than a tile
PROMPTS = torch.randint(3, 200, (2, TOKENS), generator=torch.Generator().manual_seed(1))
SHAPE: dict[str, Any] = dict(
    hidden_size=192,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=212,
    max_position_embeddings=256,
    initializer_range=0.15,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
PHI = {name: value for name, value in SHAPE.items() if name != "head_dim"} | {"hidden_size": 256}
LONG = dict(type="longrope", short_factor=[1.1 + 0.1 * i for i in range(24)])
LONG["long_factor"] = [4.0] * 24
MULTIPLIERS = dict(
    embedding_multiplier=12.0,
    attention_multiplier=0.1,
    residual_multiplier=0.22,
    logits_scaling=0.7,
)
GEMMA: dict[str, Any] = SHAPE | dict(sliding_window=40, query_pre_attn_scalar=100)
FAMILIES: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=6.0),
    "gemma2 without caps": Gemma2Config(
        **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": Gemma3TextConfig(
        **GEMMA, sliding_window_pattern=2, rope_scaling=dict(rope_type="linear", factor=8.0)
    ),
    "gemma3 with heads of 256": Gemma3TextConfig(
        **GEMMA | {"head_dim": 256, "num_key_value_heads": 1}, sliding_window_pattern=3
    ),
    "granite": GraniteConfig(**SHAPE, **MULTIPLIERS),
    "granite, tied": GraniteConfig(**SHAPE, **MULTIPLIERS, tie_word_embeddings=True),
    "olmo2": Olmo2Config(**SHAPE),
    "olmo2 with one KV head": Olmo2Config(**SHAPE | {"num_key_value_heads": 1}),
    "phi3": Phi3Config(**PHI, sliding_window=60),
    "phi3, in part, long": Phi3Config(
        **PHI | {"max_position_embeddings": 4096},
        original_max_position_embeddings=256,
        partial_rotary_factor=0.75,
        rope_scaling=LONG,
    ),
}
if hasattr(transformers, "SmolLM3Config"):  # 4.53 and later have it
    FAMILIES["smollm3"] = transformers.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])


class Case(NamedTuple):
    """A family and how it runs."""

    name: str
    kernels: bool = True
    degree: int = 1
    dtype: str = "float32"


BRIEF = [Case(name) for name in ("granite, tied", "olmo2")]
WHOLE = [
    Case(name, kernels, degree, dtype)
    for name in FAMILIES
    for kernels in (True, False)
    for degree in (1, 2)
    for dtype in ("float32", "bfloat16")
]


@functools.cache
def checkpoint(name):
    """A seeded model of transformers in fp32 with gains of its own, and its folder, in bf16."""
    folder = Path(tempfile.mkdtemp())
    model = greedy.seeded(FAMILIES[name])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # it rounds angles, too
    return model, folder


def application(case, **neuron):
    _, folder = checkpoint(case.name)
    given = dict(
        enable_nki=case.kernels,
        tp_degree=case.degree,
        torch_dtype=case.dtype,
        batch_size=2,
        seq_len=SEQ_LEN,
        max_context_length=SEQ_LEN,
    )
    config = llama.LlamaInferenceConfig(
        llama.NeuronConfigNKI(**given | neuron), load_config=load_pretrained_config(str(folder))
    )
    return llama.NeuronLlamaForCausalLM(str(folder), config)


def check_config_of(folder):
    """The folder, its config.json checked as the driver checks it."""
    config = json.loads((folder / "config.json").read_text())
    check_config(folder, config)
    return ModelFolder(folder, folder.name, config)


def answer(model):
    """Greedy tokens [2, STEPS] behind two seeded prompts, and their logits [2, STEPS, V]."""
    text, logits = greedy.logits(model, PROMPTS.tolist(), STEPS)
    return text, logits.float()


class Expected(NamedTuple):
    """What transformers says in fp32, and how far its logits of the same text are off in bf16."""

    text: torch.Tensor
    logits: torch.Tensor
    rounding: float


@functools.cache
def expected(name):
    model, folder = checkpoint(name)
    text, logits = answer(model)
    rounded = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        rows = rounded(torch.cat((PROMPTS, text[:, :-1]), 1)).logits[:, TOKENS - 1 :]
    return Expected(text, logits, float((rows.float() - logits).abs().max()))


@pytest.mark.parametrize(
    "case",
    [*BRIEF, *(full(case) for case in WHOLE if case not in BRIEF)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_text_and_logits_are_those_of_transformers(case, tmp_path, monkeypatch):
    """In bf16 the text parts where two tokens are as good to within the error, and nowhere else."""
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    app = application(case)
    app.compile(tmp_path / "compiled")
    app.load(tmp_path / "compiled")
    (text, logits), wanted = answer(app), expected(case.name)
    atol = 5e-4 if case.dtype == "float32" else 2 * wanted.rounding
    for row in range(2):
        parted = (text[row] != wanted.text[row]).nonzero()
        steps = int(parted[0]) + 1 if len(parted) else STEPS
        exact = wanted.logits[row, :steps]
        torch.testing.assert_close(logits[row, :steps], exact, rtol=0, atol=atol)
        if len(parted):
            assert case.dtype == "bfloat16"
            assert exact[-1].max() - exact[-1, text[row, steps - 1]] <= 2 * atol


def test_windows_of_gemma_3_are_those_of_layer_types():
    """Which transformers 4.53 and later write in the place of sliding_window_pattern."""
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    windows = kinds.FAMILIES["gemma3_text"].windows
    assert [windows(config, number) for number in (0, 1)] == [False, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_driver_knows_the_checkpoint_s_tensors(name):
    model, folder = checkpoint(name)
    found = expected_shapes(check_config_of(folder))
    theirs = {key: list(value.shape) for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert found == theirs


@pytest.mark.parametrize(
    ("name", "neuron", "told"),
    [
        ("gemma2", {"kv_cache_quant": True}, "A gemma2 runs without kv_cache_quant here"),
        ("gemma3", {"padding_side": "left"}, "sliding_window 40 counts from the right"),
        ("phi3, in part, long", {"seq_len": 300}, "changes a text's angles beyond"),
    ],
)
def test_what_stays_outside_is_refused(name, neuron, told):
    with pytest.raises(ValueError, match=told):
        application(Case(name), **neuron)


def test_what_no_kernel_computes_is_told(caplog):
    for name in ("gemma2", "gemma3 with heads of 256", "olmo2", "granite"):
        application(Case(name))
    told = [r.getMessage() for r in caplog.records if "outside of NKI" in r.getMessage()]
    causes = "scores have a soft cap", "heads have 256 features", "one norm takes the heads"
    assert len(told) == 3 and all(cause in line for cause, line in zip(causes, told))
