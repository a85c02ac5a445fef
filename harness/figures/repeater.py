"""Runs a model's modules again without kernels, beside the submission: see `divergence`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.figures.accuracy import bf16_spacing
from harness.figures.divergence import NKI_TOKENS, PHASES, Error
from harness.figures.graphs import CHUNK
from harness.processes.worker import Host, Role
from harness.session.model import run_plainly


def measure(host: Host, role: str, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Each module's own error on one prompt, as plain data: the references run on the inputs of the
    NKI run, on every rank."""
    repeater = Repeater(len(ids))
    with (
        host.told_as_the_submission("The models cannot be compared"),
        torch.no_grad(),
        _hooks(host, repeater),
    ):
        run_plainly(host, Role.NKI, ids, NKI_TOKENS)
    return [asdict(error) for error in repeater.found]


def error_of(phase: str, module: str, nki: Any, plain: Any, shadow: Any) -> Error:
    """Figures of three equally shaped tensors."""
    truth = shadow.double()
    size = float(truth.square().mean().sqrt())
    distances = [float((x.double() - truth).square().mean().sqrt()) for x in (nki, plain)]
    scale = size or 1.0
    broken = first_broken(nki, shadow)
    if broken is not None:
        return Error(phase, module, math.inf, distances[1] / scale, math.inf, broken)
    ulps = distances[0] / (bf16_spacing(scale) or 1.0)
    return Error(phase, module, distances[0] / scale, distances[1] / scale, ulps)


def first_broken(value: Any, truth: Any) -> list[int] | None:
    """Index of the first element that is not finite where the truth is; None without one."""
    found = (~value.isfinite() & truth.isfinite()).nonzero()
    return found[0].tolist() if len(found) else None


class Repeater:
    """Runs the references of one NKI model's modules on the inputs that those modules get.

    A module that returns its input (a later kernel does its work) has no error of its own: its
    references run in front of the next module's references.
    """

    def __init__(self, tokens: int) -> None:
        self.found: list[Error] = []
        self._tokens = tokens
        self._rank = threading.local()  # what one rank has pending; ranks are threads

    def hook(self, phase: str, rank: int, name: str, twins: Sequence[Twin]) -> Callable:
        """A forward hook for one module; `twins` are the bf16 and the fp32 reference."""

        def after(module: Any, arguments: tuple, settings: dict, output: Any) -> None:
            if getattr(self._rank, "busy", False):  # inside a module that is being repeated
                return
            if arguments and _hands_on(arguments[0], output):
                self._rank.pending = [*getattr(self._rank, "pending", []), twins]
                return
            pending, self._rank.pending = getattr(self._rank, "pending", []), []
            self._rank.busy = True
            try:
                values = [
                    twin.run(arguments, settings, [earlier[side] for earlier in pending])
                    for side, twin in enumerate(twins)
                ]
            finally:
                self._rank.busy = False
            if rank == 0:
                tensors = [_rows(_first(value), self._tokens) for value in (output, *values)]
                self.found.append(error_of(phase, name, *tensors))

        return after


@dataclass(frozen=True)
class Twin:
    """The same module of a reference model, and that model's modules by the NKI model's (ids)."""

    module: Any
    counterparts: dict[int, Any]
    dtype: torch.dtype

    def run(self, arguments: tuple, settings: dict, earlier: Sequence[Twin]) -> Any:
        """Run on the NKI module's arguments, after those of `earlier` modules."""
        arguments, settings = self._own(arguments), self._own(settings)
        for twin in earlier:
            arguments = (_first(twin.module(arguments[0])), *arguments[1:])
        return self.module(*arguments, **settings)

    def _own(self, value: Any) -> Any:
        """The same arguments with modules of this model; fp32 tensors become the model's type.

        Hidden states in a layout of the submission's own have a method ``rows`` for [B, S, H].
        """
        if id(value) in self.counterparts:
            return self.counterparts[id(value)]
        if isinstance(value, torch.Tensor):
            wide = value.is_floating_point() and torch.float32 in (value.dtype, self.dtype)
            return value.to(self.dtype) if wide else value
        if isinstance(value, dict):
            return {key: self._own(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            if hasattr(value, "rows"):
                return self._own(value.rows())
            own = [self._own(item) for item in value]
            return type(value)(*own) if hasattr(value, "_fields") else type(value)(own)
        return value


@contextmanager
def _hooks(host: Host, repeater: Repeater) -> Iterator[None]:
    """A forward hook on every module that all models have, on every rank, taken off at the end."""
    handles = []
    references = [host.models[role] for role in (Role.TORCH, Role.SHADOW)]
    by_tag = [{one.tag: one for one in model.models} for model in references]
    dtypes = [model.neuron_config.torch_dtype for model in references]
    for wrapper in host.models[Role.NKI].models:
        if wrapper.tag not in PHASES or not all(wrapper.tag in theirs for theirs in by_tag):
            continue
        phase = PHASES[wrapper.tag]
        for rank, module in enumerate(wrapper.model.modules):
            modules = dict(module.named_modules())
            others = [
                dict(theirs[wrapper.tag].model.modules[rank].named_modules()) for theirs in by_tag
            ]
            counterparts = [_counterparts(modules, theirs) for theirs in others]
            for name, part in modules.items():
                if _is_comparable(name, phase) and all(name in theirs for theirs in others):
                    twins = [
                        Twin(theirs[name], mapping, dtype)
                        for theirs, mapping, dtype in zip(others, counterparts, dtypes)
                    ]
                    hook = repeater.hook(phase, rank, name, twins)
                    handles.append(part.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _counterparts(modules: dict[str, Any], theirs: dict[str, Any]) -> dict[int, Any]:
    """The reference's module for each of the NKI model's, and for each attribute that stands in
    the place of a module: a norm that a kernel computes, say."""
    found: dict[int, Any] = {}
    for name, part in modules.items():
        twin = theirs.get(name)
        if twin is None:
            continue
        found[id(part)] = twin
        for attribute, value in vars(part).items():
            module = getattr(twin, attribute, None)
            if isinstance(module, torch.nn.Module) and isinstance(value, tuple):
                found[id(value)] = module
    return found


def _is_comparable(name: str, phase: str) -> bool:
    """Layers, their direct parts, and modules outside of the layers. Caches do not count, nor do
    the logits of a chunk: nobody reads them, and a model may leave out all but one."""
    unread = phase == PHASES[CHUNK] and name in ("norm", "lm_head")
    return (
        bool(name)
        and not unread
        and name.count(".") <= 2
        and not name.startswith(("kv_mgr", "rank_util", "sampler"))
    )


def _first(output: Any) -> Any:
    """The hidden states of a module's result, [B, S, H]."""
    if hasattr(output, "rows"):  # a layout of the submission's own
        return output.rows()
    return output if torch.is_tensor(output) else _first(output[0])  # NxDI 0.6's has no list's type


def _hands_on(given: Any, output: Any) -> bool:
    """True where a module returns the hidden states that it got, in any layout."""
    if output is given:
        return True
    return hasattr(given, "rows") and torch.is_tensor(output) and torch.equal(output, given.rows())


def _rows(tensor: Any, tokens: int) -> Any:
    """[1, S, ...] cut to the prompt's tokens: rows behind them hold what padding computes."""
    return tensor[:, :tokens].float() if tensor.dim() == 3 else tensor.float()
