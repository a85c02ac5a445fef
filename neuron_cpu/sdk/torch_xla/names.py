"""``device="xla"`` and ``.to("xla")``, which AWS's examples write, mean the CPU, as
``xla_device()``.

PyTorch's dispatch key of that name gets the two operators that make memory. ``to`` and
``torch.tensor`` ask for a device guard before that, so they are wrapped.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins

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
    _before = getattr(_owner, _name)
    setattr(_owner, _name, _on_cpu(_before))
    # TorchScript knows functions of PyTorch by their identity, and NxD scripts some of its own
    if _builtins._find_builtin(_before) is not None:
        _builtins._register_builtin(getattr(_owner, _name), _builtins._find_builtin(_before))
