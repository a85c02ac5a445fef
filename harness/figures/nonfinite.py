"""Where the first value that is not finite comes from, looked for beside the submission.

A prompt runs once more; every kernel call and every module is looked at when it ends, on every
rank, so the first finding is the innermost part that turned finite inputs into something else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Optional

import torch

from harness.session.model import generate
from harness.session.roles import Role
from harness.session.worker import Host
from harness.simulator import KernelCall, observe_kernel_calls


def locate(host: Host, role: str, ids: Sequence[int], new_tokens: int) -> Optional[dict[str, Any]]:
    """The first finding as `what` (a kernel or module), `kernel`, `element` and `value`, or None.

    Values are looked at over `new_tokens` greedy tokens; masks and scores that hold -inf on purpose
    are inside of modules and kernels, and do not come out of them.
    """
    seen = _Seen()
    with ExitStack() as stack:
        for wrapper in host.models[Role(role)].models:
            for root in wrapper.model.modules:
                seen.watch(root, stack)
        quiet = replace(host, emit=lambda _: None)
        generate(quiet, role, [ids], new_tokens, greedy=True, fixed_length=True, scores=False)
    return seen.first


class _Seen:
    """Keeps the first value that is not finite; ranks are threads."""

    def __init__(self) -> None:
        self.first: Optional[dict[str, Any]] = None
        self._turn = threading.Lock()
        self._observers = threading.local()

    def watch(self, root: torch.nn.Module, stack: ExitStack) -> None:
        """Look at a rank's modules, and at kernel calls while its root runs."""

        def begin(*_: Any) -> None:
            observing = self._observers.open = observe_kernel_calls(self._kernel)
            observing.__enter__()

        def end(*_: Any) -> None:
            self._observers.open.__exit__(None, None, None)

        for name, module in root.named_modules():
            if name:
                handle = module.register_forward_hook(
                    lambda _m, inputs, output, name=name: self._module(name, inputs, output)
                )
                stack.callback(handle.remove)
        for handle in (
            root.register_forward_pre_hook(begin),
            root.register_forward_hook(end, always_call=True),
        ):
            stack.callback(handle.remove)

    def _kernel(self, call: KernelCall) -> None:
        self._look(call.name, call.name, call.inputs, call.outputs)

    def _module(self, name: str, inputs: Any, output: Any) -> None:
        self._look(name, None, _tensors(inputs), _tensors(output))

    def _look(self, what: str, kernel: Optional[str], inputs: Any, outputs: Any) -> None:
        if self.first is not None:
            return
        broken = [found for found in map(_broken, _tensors(outputs)) if found is not None]
        if not broken or any(_broken(tensor) is not None for tensor in _tensors(inputs)):
            return
        element, value = broken[0]
        with self._turn:
            if self.first is None:
                self.first = {"what": what, "kernel": kernel, "element": element, "value": value}


def _tensors(values: Any) -> list[torch.Tensor]:
    """Floating-point tensors among values and lists of them."""
    if isinstance(values, torch.Tensor):
        return [values] if values.is_floating_point() and not values.is_meta else []
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _broken(tensor: torch.Tensor) -> Optional[tuple[list[int], str]]:
    """Index and value of the first element that is not finite."""
    found = (~tensor.float().isfinite()).nonzero()
    if not len(found):
        return None
    index = found[0].tolist()
    return index, str(float(tensor[tuple(index)]))
