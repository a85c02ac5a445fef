"""Counts a graph's work on data in the units of its traced record.

A program can tell tracing from running, and act differently. So while somebody is `watching`, every
call of a graph is counted, on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from neuron_cpu.core import observe_kernel_calls
from neuron_cpu.core.program.digest import fingerprint

from . import ranks
from .recording import KERNEL, TORCH, Counts, Dot

# Functions through which a tensor's values leave PyTorch, and then its count.
_LEAVING = frozenset({"numpy", "__array__", "tolist", "data_ptr", "__dlpack__", "from_numpy"})
_active = False  # one process runs one model at a time; its ranks are threads
_made: list[Any] = []  # what graphs gave; the next one that runs behind `made` begins anew
_asked = False


class _Operators(TorchDispatchMode):
    """Counts PyTorch's operators in the thread of one rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to import PyTorch's compiler takes a second

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if func._can_decompose():  # in inference mode composed operators arrive whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        dot = Dot.of(name, [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)])
        if dot is None:
            self.counts.add_other(name, made if isinstance(made, (list, tuple)) else [made])
        else:
            self.counts.rows[TORCH, name, (dot.lhs, dot.rhs), dot.macs, ""] += 1
        return made


class _Leaving(TorchFunctionMode):
    """Counts the places where values leave PyTorch: nobody counts later work on them."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVING:
            self.counts.add_other(name, args[:1])
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Iterator[None]:
    """Count the graphs of this process inside the block.

    PyTorch's own attention counts as two products, as in a trace.
    """
    global _active
    before, _active = _active, True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _active = before
        _made.clear()


def made(rows: torch.Tensor) -> bool:
    """Whether the graphs that ran last have made each of these rows, apart from -inf. A call of
    several tokens gives rows that are asked for one after another, without a graph in between."""
    global _asked
    size, _asked = rows.shape[-1], True
    given: list[torch.Tensor] = []
    for tensor in tree_leaves(_made):
        if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] >= size:
            plain = tensor.as_subclass(torch.Tensor)
            given += plain.reshape(-1, tensor.shape[-1])[:, :size].to(rows.dtype)
    ended = [[one.where(row != -torch.inf, row) for one in given] for row in rows]
    return all(
        any(torch.allclose(row, one, rtol=0, atol=0, equal_nan=True) for one in of_row)
        for row, of_row in zip(rows, ended)
    )


def counted(kept: list[Counts], run: Callable[[], Any]) -> Any:
    """Call `run`, one call of a graph; its counts join `kept`, unless equal ones are there."""
    if not _active or ranks.current_group() is None:
        return run()
    global _asked
    if _asked:
        _made.clear()
        _asked = False
    counts = Counts()

    def on_kernel(call: Any) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in call.inputs)
        macs, program = int(call.program.macs), fingerprint(call.program)
        counts.rows[KERNEL, call.name, shapes, macs, program] += 1

    with observe_kernel_calls(on_kernel), _Operators(counts), _Leaving(counts):
        ranks.set_watch(_paused)
        try:
            result = run()
        finally:
            ranks.set_watch(nullcontext)
    _made.append(result)
    if counts not in kept:
        kept.append(counts)
    return result


@contextmanager
def _paused() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
