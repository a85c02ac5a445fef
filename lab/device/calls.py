"""A kernel call as plain data: made from a graph, written to a report, made again in a process.

Tensors are ``128x512:bf16``, tuples with names ``{"type": "Norm", "values": [...]}``; their classes
are those of the kernel's module. Every process makes the same values from the same seed.
"""

import functools
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import neuron_cpu
from harness import sdk
from harness.errors import UserError
from harness.inputs import submission

SEED = 20261123
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)")
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32,
    "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# of neuronxcc.nki, and of nki (SDK 2.29 and later)
MICRO, MICRO_TODAY = MICROS = "lab.device.micro", "lab.device.micro_today"
SUBMISSIONS = "llama.py", "models/step.py"
OF_TODAY = (MICRO_TODAY, SUBMISSIONS[True])
ROOT = Path(__file__).resolve().parents[2]
MOST_INDEX = 128  # rows of the smallest table or cache that a kernel indexes


@functools.cache
def module(name: str) -> ModuleType:
    """A module by its name, a submission of the repository or a generated file by its path."""
    if name == MICRO_TODAY:  # the same file, which looks at its name
        spec: Any = importlib.util.spec_from_file_location(name, ROOT / "lab/device/micro.py")
        made = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made
    if not name.endswith(".py"):
        return importlib.import_module(name)
    return submission.imported(ROOT / name)


def written(value: Any) -> Any:
    """An argument as JSON holds it."""
    if isinstance(value, torch.Tensor):
        return f"{'x'.join(map(str, value.shape))}:{NAMES[value.dtype]}"
    if isinstance(value, tuple) or _of_fields(type(value)):
        names = getattr(type(value), "__annotations__", {})
        parts = value if isinstance(value, tuple) else [getattr(value, name) for name in names]
        return {"type": type(value).__name__, "values": [written(one) for one in parts]}
    if value is None or isinstance(value, (int, float, str)):
        return value
    raise TypeError(f"an argument of {type(value).__name__}, expected a tensor, tuple or number")


def _of_fields(kind: type) -> bool:
    """Whether a class is one of a kernel's own, of today's language, made from its fields."""
    return any(base.__name__ == "NKIObject" for base in kind.__mro__)


def read(value: Any, origin: ModuleType, tensor: Callable[[list[int], str], Any]) -> Any:
    """The argument again; ``tensor`` makes those from shape and type."""
    if isinstance(value, Mapping):
        parts = [read(one, origin, tensor) for one in value["values"]]
        kind = tuple if value["type"] == "tuple" else getattr(origin, value["type"])
        if not (isinstance(kind, type) and (issubclass(kind, tuple) or _of_fields(kind))):
            raise UserError(f"an argument of {value['type']!r:.80}, expected a tuple's class")
        return kind(parts) if kind is tuple else kind(*parts)
    found = TENSOR.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else tensor([int(n) for n in found[1].split("x")], found[2])


def arguments(call: Mapping[str, Any], tensor: Callable[[list[int], str], Any]) -> Any:
    """(kernel, positional arguments, keywords) of a call."""
    origin = module(call["module"])
    given = [read(value, origin, tensor) for value in call["arguments"]]
    named = {name: read(value, origin, tensor) for name, value in call["keywords"].items()}
    return getattr(origin, call["kernel"]), given, named


def shapes(shape: list[int], dtype: str) -> torch.Tensor:
    """A call that is traced only."""
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


class Seeded:
    """Tensors of values, the same ones in every process; ``whole`` holds them in fp32."""

    def __init__(self, whole: bool = False) -> None:
        self._source, self._whole = torch.Generator().manual_seed(SEED), whole

    def __call__(self, shape: list[int], dtype: str) -> torch.Tensor:
        if not DTYPES[dtype].is_floating_point:
            return torch.randint(MOST_INDEX, shape, generator=self._source).to(DTYPES[dtype])
        # small: a product over 2048 features of a norm's rows stays near one
        made = (0.02 * torch.randn(shape, generator=self._source)).to(DTYPES[dtype])
        return made.float() if self._whole else made


def computed(call: Mapping[str, Any], tensor: Callable[[list[int], str], Any]) -> list[Any]:
    """All results of a kernel, of nested tuples too."""
    kernel, given, named = arguments(call, tensor)
    waiting, flat = [kernel(*given, **named)], []
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, (tuple, list)):
            waiting[:0] = one
        else:
            flat.append(one)
    return flat


def run(call: Mapping[str, Any], results: str) -> None:
    """Run a kernel on seeded values, on the device where there is one, and keep its results."""
    seeded = Seeded()
    if call["module"] in OF_TODAY or sdk.today():  # a kernel runs NumPy's arrays by itself
        outs = computed(call, lambda *asked: _to_numpy(seeded(*asked)))
        torch.save([_from_numpy(one) for one in outs], results)
        return
    import torch_xla.core.xla_model as xm

    device = xm.xla_device()
    outs = computed(call, lambda *asked: seeded(*asked).to(device))
    xm.mark_step()
    torch.save([one.cpu() for one in outs], results)


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _from_numpy(array: Any) -> torch.Tensor:
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view("int16")).view(torch.bfloat16)


def compare(call: Mapping[str, Any], results: str) -> dict[str, Any]:
    """The simulator's results beside those of `run`: figures of the whole call, and how far both
    are from the simulator's results in fp32, where the kernel takes fp32."""
    ours, theirs = computed(call, Seeded()), torch.load(results, weights_only=True)
    if [tuple(a.shape) for a in ours] != [tuple(b.shape) for b in theirs]:
        return {"equal": 0.0, "error": math.inf}
    found = difference(ours, theirs)
    try:
        whole = computed(call, Seeded(whole=True))
    except Exception as error:  # tiles of fp32 may be too large, or a kernel take bf16 alone
        return found | {"no fp32": f"{type(error).__name__}: {error}"[:200]}
    for side, results_of in (("device", theirs), ("simulator", ours)):
        found[f"{side} to fp32"] = difference(whole, results_of)["error"]
    return found


def difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Share of elements that are equal to the bit, and the distance relative to the values' size.

    NaN equals NaN; one that only one side has makes the distance infinite.
    """
    a, b = (torch.cat([t.double().flatten() for t in side]) for side in (ours, theirs))
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((a.isfinite() != b.isfinite()).any()):
        error = math.inf
    else:
        finite = a.isfinite()
        size = float(a[finite].square().mean().sqrt()) or 1.0
        error = float((a - b)[finite].square().mean().sqrt()) / size
    return {"equal": float(same.double().mean()), "error": error}


if __name__ == "__main__":  # a process that leaves the device free for the profiler
    neuron_cpu.ensure_sdk()
    run(json.loads(sys.argv[1]), sys.argv[2])
