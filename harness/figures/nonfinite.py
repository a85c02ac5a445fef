"""Finds the source of the first value that is not finite, in the submission's process.

A prompt runs once more; every kernel call and every module is looked at when it ends, on every
rank, so the first finding is the innermost part that turned finite inputs into something else.
"""

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Optional

import torch

from harness import sdk
from harness.processes.worker import Host, Role
from harness.session.model import generate
from harness.simulator import KernelCall, observe_kernel_calls, origin_of_nonfinite


def locate(host: Host, role: str, ids: Sequence[int], new_tokens: int) -> Optional[dict[str, Any]]:
    """The first finding as `what` (a kernel or module), `kernel`, `element` and `value`, or None.

    Values are looked at over `new_tokens` greedy tokens. A kernel also has `file` and `line` of the
    instruction that made the value. A part that gets -inf (a mask) and passes it on does not count.
    """
    if sdk.real_libraries() is not None:  # its graphs have no modules to look at
        return None
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
        # A tensor that is updated in place is an output, and holds what the call has left.
        outputs = {id(tensor) for tensor in call.outputs}
        inputs = [tensor for tensor in call.inputs if id(tensor) not in outputs]
        self._look(call.name, call, inputs, call.outputs)

    def _module(self, name: str, inputs: Any, output: Any) -> None:
        self._look(name, None, inputs, output)

    def _look(self, what: str, call: Optional[KernelCall], inputs: Any, outputs: Any) -> None:
        if self.first is not None:
            return
        given = {value for tensor in _tensors(inputs) for value in _kinds(tensor)}
        if given - {-math.inf}:
            return
        broken = [found for tensor in _tensors(outputs) if (found := _broken(tensor, given))]
        if not broken:
            return
        element, value = broken[0]
        with self._turn:
            if self.first is None:
                finding = {"what": what, "kernel": None, "element": element, "value": str(value)}
                self.first = finding | (_instruction(call) if call is not None else {})


def _instruction(call: KernelCall) -> dict[str, Any]:
    """The kernel and its line that made a value that is not finite."""
    found: dict[str, Any] = {"kernel": call.name}
    # What was updated in place is gone: its broken elements run again as zeros.
    inputs = [
        torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor)) if changed else tensor
        for tensor, changed in ((t.contiguous(), _kinds(t) - {-math.inf}) for t in call.inputs)
    ]
    instruction = origin_of_nonfinite(call.program, inputs)
    if instruction is not None and instruction.source is not None:
        found.update(file=instruction.source.file, line=instruction.source.line)
    return found


def _tensors(values: Any) -> list[torch.Tensor]:
    """Floating-point tensors among values and lists of them."""
    if isinstance(values, torch.Tensor):
        return [values] if values.is_floating_point() and not values.is_meta else []
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _kinds(tensor: torch.Tensor) -> set[float]:
    """Which of inf and -inf are in a tensor, and nan where there is one."""
    if not tensor.is_floating_point():
        return set()
    broken = tensor.float()
    broken = broken[~broken.isfinite()]
    return {math.nan if math.isnan(value) else value for value in broken.unique().tolist()}


def _broken(tensor: torch.Tensor, given: set[float]) -> Optional[tuple[list[int], float]]:
    """Index and value of the first element that is not finite and not among the inputs."""
    values = tensor.float()
    wrong = ~values.isfinite()
    if given:
        wrong &= values != -math.inf
    found = wrong.nonzero()
    if not len(found):
        return None
    index = found[0].tolist()
    return index, float(values[tuple(index)])
