"""What `lab.torch_programs` puts beside strangers' files, which stay as they are.

Where a program fetches weights, its loader gives a tiny model with seeded ones (`TINY`, by the
program's checkout or name). A file that only defines operators is called on the CPU's random
numbers (`DRIVEN`), eager and compiled, and compared with PyTorch's own operators.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch.nn import functional as F


# --- tiny models ----------------------------------------------------------------------------------
class _Tokenizer:
    """Characters as numbers, in place of a vocabulary that a hub has."""

    mask_token_id, pad_token_id, cls_token_id, eos_token_id = 32, 1, 0, 2
    vocab_size = 33

    def __call__(self, texts: str | list[str], max_length: int = 64, **_: Any) -> dict[str, Any]:
        rows = [texts] if isinstance(texts, str) else texts
        coded = [[4 + ord(letter) % 20 for letter in text[:max_length]] for text in rows]
        ids = torch.tensor([row + [1] * (max_length - len(row)) for row in coded])
        return {"input_ids": ids, "attention_mask": (ids != 1).long()}


def _seeded(make: Callable[[], Any]) -> Callable[..., Any]:
    """A loader that makes the model, of any arguments that a hub's loader takes."""

    def load(*_: Any, device: str = "cpu", torch_dtype: Any = None, **__: Any) -> Any:
        torch.manual_seed(0)
        return make().eval().to(device, torch_dtype)

    return load


_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "pad_token_id": 1, "mask_token_id": 32, "vocab_size": 33, "max_position_embeddings": 128,
}  # fmt: skip


def _esm() -> Any:
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(**_SIZES, position_embedding_type="rotary")
    return EsmModel(config, add_pooling_layer=False)


def _esm2() -> None:
    import esm2_neuron as module

    module.load, module.get_tokenizer = _seeded(_esm), lambda *_: _Tokenizer()


def _chapter_1() -> None:
    from transformers import EsmModel, EsmTokenizer

    EsmModel.from_pretrained = _seeded(_esm)  # type: ignore[method-assign]
    EsmTokenizer.from_pretrained = lambda *_: _Tokenizer()  # type: ignore[method-assign]


def _nucleotides() -> None:
    import nucleotide_transformer_neuron as module

    config = module.EsmConfig(
        **_SIZES, position_embedding_type="rotary", add_bias_fnn=False, token_dropout=True
    )
    module.load = _seeded(lambda: module.EsmForMaskedLM(config))
    module.get_tokenizer = lambda *_: _Tokenizer()


def _clip() -> None:
    import clip_neuron as module

    sizes = {
        "embed_dim": 32,
        "image_resolution": 224,
        "vision_layers": 2,
        "vision_width": 64,
        "vision_patch_size": 32,
        "context_length": 77,
        "vocab_size": 49408,
        "transformer_width": 64,
        "transformer_heads": 2,
        "transformer_layers": 2,
    }
    module.load = _seeded(lambda: module.CLIP(**sizes))


def _gpn_star() -> None:
    import gpn_star_neuron as module
    import numpy as np

    species = 6
    folder = tempfile.mkdtemp()
    apart = 1.0 - np.eye(species, dtype=np.float32)
    np.save(f"{folder}/pairwise.npy", apart)
    np.save(f"{folder}/in_clade.npy", apart[0] / 2)
    config = module.GPNStarConfig(
        **{**_SIZES, "vocab_size": 6, "pad_token_id": 0}, phylo_dist_path=folder
    )
    module.num_species = lambda *_: species
    module.load = _seeded(lambda: module.GPNStarForMaskedLM(config))


def _wan() -> None:
    """A pipeline of Wan: transformer, text encoder, decoder of images, scheduler."""
    import diffusers
    import transformers

    model: Any = diffusers.WanTransformer3DModel
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2}
    model.from_pretrained = _seeded(lambda: model(**sizes))
    text = transformers.UMT5Config(
        vocab_size=33, d_model=4096, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    encoder = transformers.UMT5EncoderModel
    encoder.from_pretrained = _seeded(lambda: encoder(text))
    decoder: Any = diffusers.AutoencoderKLWan
    decoder.from_pretrained = _seeded(lambda: decoder(base_dim=8, num_res_blocks=1))
    scheduler: Any = diffusers.UniPCMultistepScheduler
    scheduler.from_pretrained = lambda *_, **__: scheduler()
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: _Tokenizer()


TINY: dict[str, Callable[[], None]] = {
    "esm2": _esm2,
    "nucleotide-transformer": _nucleotides,
    "clip": _clip,
    "gpn-star": _gpn_star,
    "ch1_model_x": _chapter_1,
    "step4_torch_compile_test": _wan,
    "step4_tp2_compile_test": _wan,
    "run_wan_small": _wan,
}


# --- files that define operators ------------------------------------------------------------------
def _forms(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The operator eager, then compiled."""
    yield run
    yield torch.compile(lambda *x: run(*x), backend="neuron", fullgraph=True, dynamic=False)


def _on(*values: Any) -> list[Any]:
    return [one.to("neuron") if isinstance(one, torch.Tensor) else one for one in values]


def _same(got: torch.Tensor, expected: torch.Tensor, apart: float = 1e-4) -> None:
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=apart, atol=apart)


def _cache_copies(file: Any) -> None:
    k, v = torch.randn(300, 2, 16), torch.randn(300, 2, 16)
    for copy in _forms(file.cache_copy):
        (into,) = _on(torch.zeros(300, 2, 16))
        copy(into, *_on(k))
        _same(into, k, 0)
    for copy in _forms(file.kv_cache_copy):
        k_into, v_into = _on(torch.zeros_like(k), torch.zeros_like(v))
        copy(k_into, *_on(k), v_into, *_on(v))
        _same(k_into, k, 0)
        _same(v_into, v, 0)


def _rotated_cache(file: Any) -> None:
    batch, heads, chunk, rows, groups, at, group = 2, 2, 128, 256, 2, 64, 1
    query = torch.randn(batch, heads, chunk, 256).bfloat16()
    key, value = (torch.randn(batch, chunk, 256).bfloat16() for _ in "kv")
    cos, sin = torch.randn(rows, 64), torch.randn(rows, 64)

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high, rest = x.float().split((32, 32, 192), -1)
        c, s = cos[at : at + chunk], sin[at : at + chunk]
        first, second = low * c[:, :32] - high * s[:, :32], high * c[:, 32:] + low * s[:, 32:]
        return torch.cat((first, second, rest), -1)

    for run in _forms(file.gqa35b_rope_kv_dynamic):
        kept, kept_v = _on(*(torch.zeros(groups * batch * rows, 256).bfloat16() for _ in "kv"))
        base = torch.tensor([[at]], dtype=torch.int32)
        found = run(*_on(query, key, value, cos, sin), kept, kept_v, *_on(base), group, groups)
        expected = torch.zeros(groups, batch, rows, 256), torch.zeros(groups, batch, rows, 256)
        expected[0][group, :, at : at + chunk] = turned(key).bfloat16()
        expected[1][group, :, at : at + chunk] = value
        _same(found[0], turned(query), 1e-2)
        _same(found[1], turned(key).bfloat16(), 1e-2)
        for ours, theirs in zip((kept, kept_v, *found[2:]), expected * 2):
            _same(ours, theirs.reshape(-1, 256), 1e-2)


def _wan_kernels(file: Any) -> None:
    x, weight = torch.randn(2, 96, 256), torch.randn(256)
    q, k, v = (torch.randn(2, 256, 64).bfloat16() for _ in "qkv")
    turns = torch.randn(64, 1, 2, 128), torch.randn(32, 1, 128), torch.randn(32, 1, 128)
    twin = importlib.import_module("nkilib.core.embeddings.rope_torch").rope_torch_ref
    for run in _forms(file.nki_rmsnorm):
        _same(run(*_on(x, weight)), F.rms_norm(x, (256,), weight, 1e-5))
    for run in _forms(file.nki_rope):
        _same(run(*_on(*turns)), _first(twin(*turns)))
    for run in _forms(file.nki_attn_cte):
        expected = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        _same(run(*_on(q, k.transpose(1, 2).contiguous(), v)), expected, 2e-2)


def _first(found: Any) -> torch.Tensor:
    """The result of a twin of nki-library, which may be a dictionary."""
    return next(iter(found.values())) if isinstance(found, dict) else found


def _library(kernel: str, twin: str, *given: torch.Tensor) -> Callable[[Any], None]:
    """A kernel of nki-library through `wrap_nki`, beside the library's own twin in PyTorch."""

    def drive(file: Any) -> None:
        from torch_neuronx import wrap_nki

        expected = _first(getattr(importlib.import_module(f"{file.__name__}_torch"), twin)(*given))
        for run in _forms(wrap_nki(getattr(file, kernel))[1]):
            _same(run(*_on(*given)), expected)

    return drive


def _functional(name: str, *given: Any) -> Callable[[Any], None]:
    """A function of vLLM Neuron: the kernel on the device, and in its CPU mode; the twin without.

    `can_run_kernel` chooses: see `vllm_neuron/utils/neuron_utils.py`.
    """

    def drive(file: Any) -> None:
        run, settings = getattr(file, name), cast(Any, sys.modules["vllm_neuron.envs"])
        expected = run(*given)  # on the CPU: the twin
        for form in _forms(run):
            _same(form(*_on(*given)), expected, 1e-3)
        settings.VLLM_NEURON_CPU_MODE, os.environ["NKI_SIMULATOR"] = True, "1"
        _same(run(*given), expected, 1e-3)

    return drive


def _covex(file: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=33, use_cache=False)
    model, tokenizer = GPT2LMHeadModel(config).eval(), _Tokenizer()
    ids = tokenizer("accelerators", max_length=48)["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        prepared = file.prepare(model, tokenizer, max_length=48)
        again = tokenizer("accelerators")["input_ids"]
        assert file.device() == "neuron" and torch.equal(again, ids)
        _same(prepared(*_on(again)).logits, expected, 0.05)


def _picked(tokens: int, hidden: int) -> torch.Tensor:
    """Rows of bfloat16 whose two last columns are the number of the token, from 1."""
    rows = torch.randn(32, hidden + 2).bfloat16()
    numbers = torch.randint(1, tokens + 1, (32, 1), dtype=torch.int32)
    rows[:, hidden:] = numbers.view(torch.bfloat16)
    return rows


torch.manual_seed(0)
_TURNS = torch.randn(64, 1, 2, 128), torch.randn(32, 1, 128), torch.randn(32, 1, 128)
DRIVEN: dict[str, Callable[[Any], None]] = {
    "nki_kv_cache": _cache_copies,
    "gqa_rope_kv_35b_op": _rotated_cache,
    "wan_nki_kernels": _wan_kernels,
    "embeddings/rope": _library("RoPE", "rope_torch_ref", *_TURNS),
    "cumsum/cumsum": _library("cumsum", "cumsum_torch_ref", torch.randn(128, 256)),
    "functional/cumsum": _functional("cumsum", torch.randn(4, 256)),
    "functional/argsort_unstable": _functional("argsort_unstable", torch.randperm(24).float()),
    "moe/topk_reduce": _functional("topk_reduce", _picked(8, 1024), 8, 4),
    "covex_neuron/_runtime": _covex,
}


def _shells(script: Path) -> None:
    """Packages whose own first file asks for vLLM, which is no part of their kernels."""
    top = next((one for one in script.parents if one.name == "vllm_neuron"), None)
    if top is not None:
        shell = ModuleType("vllm_neuron")
        shell.__path__ = [str(top)]
        settings = {"VLLM_NEURON_CPU_MODE": False, "VLLM_NEURON_DISABLE_NKI_KERNELS": False}
        shell.envs = SimpleNamespace(**settings)  # type: ignore[attr-defined]
        sys.modules.update({"vllm_neuron": shell, "vllm_neuron.envs": shell.envs})  # type: ignore


def _loaded(script: Path) -> Any:
    """The file as a module: of its package where it has one, else by its path."""
    for top in script.parents:
        if top.name in ("nkilib_src", "vllm-neuron"):
            sys.path.insert(0, str(top))
            return importlib.import_module(".".join(script.relative_to(top).with_suffix("").parts))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inside(script: Path, arguments: list[str]) -> None:
    """Run a program with what stands here beside it."""
    sys.path[:0] = [str(script.parent), str(script.parent.parent / "src")]
    for name, change in TINY.items():
        if name in (script.stem, *(one.name for one in script.parents)):
            change()
    drive = next((one for end, one in DRIVEN.items() if f"{script}".endswith(f"/{end}.py")), None)
    if drive is not None:
        _shells(script)
        drive(_loaded(script))
        print("PASS")
        return
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
