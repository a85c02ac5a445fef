"""``device="xla"`` and ``.to("xla")``, which AWS's examples write: the CPU, as ``xla_device()`` is.

PyTorch's own dispatch key of that name is given the two operators that make memory; ``to`` and
``torch.tensor`` ask for a device guard before that, so they are wrapped.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_OPERATORS = torch.library.Library("aten", "IMPL")


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    form = memory_format or torch.contiguous_format
    return torch.empty(size, dtype=dtype, device=CPU, memory_format=form)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CPU)


def _here(given: Any) -> Any:
    named = isinstance(given, (str, torch.device)) and str(given).partition(":")[0] == "xla"
    return CPU if named else given


def _on_cpu(method: Callable) -> Callable:
    @functools.wraps(method)
    def here(*args: Any, **named: Any) -> Any:
        return method(*map(_here, args), **{k: _here(v) for k, v in named.items()})

    return here


_OPERATORS.impl("empty.memory_format", _empty, "XLA")
_OPERATORS.impl("empty_strided", _empty_strided, "XLA")
for _owner, _name in (
    (torch.Tensor, "to"),
    (torch.nn.Module, "to"),
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
):
    setattr(_owner, _name, _on_cpu(getattr(_owner, _name)))
