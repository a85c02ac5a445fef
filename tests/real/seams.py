"""What can be seen of either libraries from below, as JSON: run with the real ones and with the
imitation, the two are compared (`test_contracts.py`).

For each setting: shapes and types of every graph's inputs; parameters with their tags; how each
class of module is called and what it returns; or that it was refused.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import warnings
from itertools import zip_longest
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTH = 32
# Settings that are compiled.
COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"torch_dtype": "float32"},
    "one rank": {"tp_degree": 1},
    "fused QKV": {"fused_qkv": True},
    "two buckets": {"enable_bucketing": True, "seq_len": 256, "max_context_length": 256},
    "continuous": {"batch_size": 2, "ctx_batch_size": 1, "is_continuous_batching": True},
    "vocabulary parallel": {"vocab_parallel": True},
    "fp8 caches": {"kv_cache_quant": True},
    "on device": {"on_device_sampling_config": {"top_k": 1}},
    "speculation": {"speculation_length": 4},
}
# Settings that a release may refuse before anything is compiled.
REFUSED: dict[str, dict[str, Any]] = {
    "context bucket above the length": {"context_encoding_buckets": [64]},
    "decode bucket above the length": {"token_generation_buckets": [512]},
    "context above the length": {"max_context_length": 64},
    "unknown type": {"torch_dtype": "float7"},
    "speculation and async": {"speculation_length": 4, "async_mode": True},
    "Medusa and async": {
        "is_medusa": True,
        "num_medusa_heads": 4,
        "medusa_speculation_length": 8,
        "async_mode": True,
    },
    "context ranks that do not divide": {"cp_degree": 3, "tp_degree": 4},
    "unknown cast": {"cast_type": "none"},
    "rmsnorm kernel alone": {"rmsnorm_quantize_kernel_enabled": True},
    "cache update without its kernel": {"attn_block_tkg_nki_kernel_cache_update": True},
    "block kernel without QKV's": {"attn_block_tkg_nki_kernel_enabled": True},
    "two decode kernels": {
        "attn_tkg_nki_kernel_enabled": True,
        "attn_tkg_builtin_kernel_enabled": True,
    },
    "chunks without blocks": {"chunked_prefill_config": {"max_num_seqs": 2}},
}


def main():
    os.environ["BASE_COMPILE_WORK_DIR"] = tempfile.mkdtemp() + os.sep
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no finding
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(REPOSITORY))
    import neuron_cpu

    neuron_cpu.ensure_sdk()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(found(Path(folder), sys.argv[1])), file=out)


def found(folder, name):
    """Setting -> what is seen of it, of the library's own model of that name."""
    from tests.real.cells import FAMILIES, LLAMA, checkpoint, of_family

    family = LLAMA if name == "llama" else FAMILIES[name]
    model = checkpoint(folder / "model", {}) if family is LLAMA else of_family(folder, family)
    made = functools.partial(application, family, model)
    told = {name: _attempted(made, given, compiled) for name, given in COMPILED.items()}
    return told | {name: _attempted(made, given, _nothing) for name, given in REFUSED.items()}


def application(family, model, given):
    """An application of the library's own class; ValueError where a release lacks a setting."""
    import importlib

    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig, to_torch_dtype
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    place = f"neuronx_distributed_inference.models.{family.name}.modeling_{family.name}"
    kind = getattr(importlib.import_module(place), family.kind)
    settings = {"tp_degree": 2, "seq_len": LENGTH, "torch_dtype": "bfloat16", **given}
    settings["torch_dtype"] = to_torch_dtype(settings["torch_dtype"])
    if "on_device_sampling_config" in given:
        sampling = OnDeviceSamplingConfig(**given["on_device_sampling_config"])
        settings["on_device_sampling_config"] = sampling
    config = kind.get_neuron_config_cls()(**settings)
    kept = vars(config) | {"async": config.async_mode}
    if lacking := [key for key in given if given[key] and not kept.get(key)]:
        raise NotImplementedError(f"without {lacking[0]}")
    load = load_pretrained_config(str(model))
    return kind(str(model), kind.get_config_cls()(config, load_config=load))


def _attempted(made, given, told):
    try:
        return told(made(given))
    except Exception as error:  # the finding is that it was refused
        if os.environ.get("NEURON_CPU_DEBUG"):
            import traceback

            traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"[:300]}


def _nothing(_):
    return {}


def compiled(application):
    """Inputs, parameters and calls of an application's graphs."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    calls: dict[str, set[str]] = {}

    def seen(module, args, kwargs, result):
        if type(module).__module__.startswith("neuronx_distributed"):
            given = {"args": args, "kwargs": kwargs, "result": result}
            calls.setdefault(type(module).__name__, set()).add(json.dumps(shape_of(given)))

    inputs = {
        wrapper.tag: [shape_of(list(example)) for example in wrapper.input_generator()]
        for wrapper in application.models
    }
    kept = []
    for wrapper in application.models:
        wrapper.get_model_instance = _kept(wrapper.get_model_instance, kept)
    hook = register_module_forward_hook(seen, with_kwargs=True)
    try:
        application.compile(tempfile.mkdtemp())
    finally:
        hook.remove()
    parameters = {
        name: {"value": shape_of(value)} | {k: str(v) for k, v in sorted(vars(value).items())}
        for instance in kept[:1]
        for name, value in instance.module.named_parameters()
        if isinstance(value, torch.Tensor)
    }
    listed = {name: sorted(given) for name, given in calls.items()}
    return {"inputs": inputs, "parameters": parameters, "calls": listed}


def _kept(make, kept):
    def made():
        kept.append(make())
        return kept[-1]

    return made


def shape_of(value):
    """Tensors as type and shape, in what holds them; other values by their type."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return [shape_of(item) for item in value]
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in sorted(value.items())}
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


# --- Two of them ----------------------------------------------------------------------------------
Difference = tuple[str, str, str]  # kind, setting and place, what


def differences(ours, theirs):
    """What the imitation has otherwise; that it refuses more is no difference."""
    for case, known in theirs.items():
        own = ours[case]
        if "refused" in own or "refused" in known:
            if "refused" not in own:
                yield "refusal", case, f"takes what is refused: {known['refused']}"
            continue
        for kind in known:
            for name in sorted({*own[kind], *known[kind]}):
                for what in _otherwise(kind, own[kind].get(name), known[kind].get(name)):
                    yield kind, f"{case}: {name}", what


def _otherwise(kind, mine, other):
    if mine is None or other is None:
        yield "is not there" if mine is None else "is there"
    elif kind == "parameters":
        yield from _apart(mine, other)
    elif kind == "calls":
        pairs = (sorted(set(a) - set(b)) for a, b in ((mine, other), (other, mine)))
        for pair in zip_longest(*(map(_flat, calls) for calls in pairs), fillvalue={}):
            yield from _apart(*pair)
    elif mine != other:
        yield f"{mine}, not {other}"


def _apart(mine, other):
    for name in sorted({*mine, *other}):
        a, b = (each.get(name, "nothing") for each in (mine, other))
        if a != b:
            yield f"{name} is {a}, not {b}"


def _flat(call):
    found = json.loads(call)
    return {f"argument {n}": arg for n, arg in enumerate(found["args"])} | {
        **found["kwargs"],
        "result": found["result"],
    }


if __name__ == "__main__":
    main()
