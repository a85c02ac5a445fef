"""Runs a model's modules again without kernels, beside the submission: see `divergence`."""

from __future__ import annotations

import importlib
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from transformers import LogitsProcessor

from harness import sdk
from harness.figures.accuracy import bf16_spacing
from harness.figures.divergence import (
    ALL,
    CHUNK_PHASE,
    DECODE_PHASE,
    NKI_TOKENS,
    PREFILL_PHASE,
    Boundary,
    Divergences,
    Error,
)
from harness.figures.graphs import CHUNK, DECODE, PREFILL
from harness.processes.worker import BASELINES, Host, Role
from harness.session.model import followed, run_plainly

PHASES = {PREFILL: PREFILL_PHASE, CHUNK: CHUNK_PHASE, DECODE: DECODE_PHASE}
_WHOLE_LAYER = re.compile(r"^layers\.\d+$")


def measure(host: Host, role: str, ids: Sequence[int]) -> dict[str, Any]:
    """Both kinds of errors on one prompt, as plain data."""
    with host.told_as_the_submission("The models cannot be compared"):
        own, grown = own_errors(host, ids), accumulated_errors(host, ids)
    return asdict(Divergences(own, grown))


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


def first_broken(value: Any, truth: Any) -> Optional[list[int]]:
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


def own_errors(host: Host, ids: Sequence[int]) -> list[Error]:
    """Each module's own error: the references run on the inputs of the NKI run, on every rank."""
    repeater = Repeater(len(ids))
    with torch.no_grad(), _hooks(host, Role.NKI, (Role.TORCH, Role.SHADOW), repeater.hook):
        run_plainly(host, Role.NKI, ids, NKI_TOKENS)
    return repeater.found


def accumulated_errors(host: Host, ids: Sequence[int]) -> list[Error]:
    """The error after each layer and at the head when every model runs on its own (prefill)."""
    outputs: list[dict[str, Any]] = []
    for role in (Role.NKI, Role.TORCH, Role.SHADOW):
        kept: dict[str, Any] = {}

        def keep(phase: str, rank: int, name: str, _: Any, kept: dict = kept) -> Callable:
            def hook(module: Any, arguments: tuple, settings: dict, output: Any) -> None:
                handed_on = arguments and _hands_on(arguments[0], output)
                if rank == 0 and phase == PREFILL_PHASE and _grows(name) and not handed_on:
                    kept[name] = _rows(_first(output), len(ids)).clone()

            return hook

        with _hooks(host, role, (), keep):
            run_plainly(host, role, ids, 1)
        outputs.append(kept)
    chosen = [name for name in outputs[0] if all(name in kept for kept in outputs)]
    return [error_of(PREFILL_PHASE, name, *(kept[name] for kept in outputs)) for name in chosen]


def _grows(name: str) -> bool:
    """Whole layers and the modules behind them."""
    return bool(_WHOLE_LAYER.match(name)) or name in ("norm", "lm_head")


@contextmanager
def _hooks(host: Host, role: Role, others: Sequence[Role], make: Callable) -> Iterator[None]:
    """A forward hook on every module that all models have, on every rank, taken off at the end."""
    handles = []
    theirs_by_tag = [{one.tag: one for one in host.models[other].models} for other in others]
    for wrapper in host.models[role].models:
        if wrapper.tag not in PHASES or not all(wrapper.tag in theirs for theirs in theirs_by_tag):
            continue
        phase = PHASES[wrapper.tag]
        for rank, module in enumerate(wrapper.model.modules):
            modules = dict(module.named_modules())
            others_modules = [
                dict(by_tag[wrapper.tag].model.modules[rank].named_modules())
                for by_tag in theirs_by_tag
            ]
            counterparts = [_counterparts(modules, theirs) for theirs in others_modules]
            for name, part in modules.items():
                if _is_comparable(name, phase) and all(name in theirs for theirs in others_modules):
                    twins = [
                        Twin(theirs[name], mapping, host.models[other].neuron_config.torch_dtype)
                        for theirs, mapping, other in zip(others_modules, counterparts, others)
                    ]
                    hook = make(phase, rank, name, twins)
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
    unread = phase == CHUNK_PHASE and name in ("norm", "lm_head")
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
    return _first(output[0]) if isinstance(output, (list, tuple)) else output


def _hands_on(given: Any, output: Any) -> bool:
    """True where a module returns the hidden states that it got, in any layout."""
    if output is given:
        return True
    return hasattr(given, "rows") and torch.is_tensor(output) and torch.equal(output, given.rows())


def _rows(tensor: Any, tokens: int) -> Any:
    """[1, S, ...] cut to the prompt's tokens: rows behind them hold what padding computes."""
    return tensor[:, :tokens].float() if tensor.dim() == 3 else tensor.float()


def boundaries(host: Host, role: str, ids: Sequence[int], new_tokens: int) -> list[dict[str, Any]]:
    """Every boundary of the model on one prompt, as plain data."""
    rounding = importlib.import_module("neuron_cpu.runtime.rounding")
    assumed, model = host.job.settings.rounding, host.models[Role(role)]
    boundaries = rounding.Boundaries(operators=Role(role) in BASELINES)
    with (
        host.told_as_the_submission("The boundaries cannot be compared"),
        torch.inference_mode(),
        rounding.fused(assumed, boundaries),
        _places(model, rounding.within),
    ):
        whole = _logits(host, model, ids, new_tokens, None)
        text, rows, every = whole.argmax(-1), [], rounding.Site(ALL, "", True)
        for site in [*boundaries.met, every]:
            found, rounds = whole, site.of_kernel or site in boundaries.read
            if site == every or rounds and boundaries.met[site]:
                boundaries.closes = lambda one, site=site: site in (one, every)
                found = _logits(host, model, ids, new_tokens, text)
            tokens = int((found.argmax(-1) != text).sum())
            change = (found - whole).abs()
            share = change.count_nonzero().item() / change.numel()
            row = Boundary(site.where, site.what, share, tokens, change.max().item())
            rows.append(asdict(row))
    return rows


def _logits(
    host: Host, model: Any, ids: Sequence[int], new_tokens: int, text: Optional[torch.Tensor]
) -> torch.Tensor:
    """Logits [new_tokens, V] behind a prompt, on the greedy tokens or on a text's tokens."""
    follower = _Follower(text)
    followed(host, model, torch.tensor([list(ids)]), new_tokens, follower)
    return torch.cat(follower.logits)


class _Follower(LogitsProcessor):
    """Notes the logits of each step, rounded, and has the text's next token chosen."""

    def __init__(self, text: Optional[torch.Tensor]) -> None:
        self._text = text
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.to(torch.bfloat16).float()
        self.logits.append(scores)
        if self._text is None:
            return scores
        target = self._text[len(self.logits) - 1].reshape(1, 1)
        return torch.full_like(scores, -torch.inf).scatter(1, target, 0.0)


@contextmanager
def _places(model: Any, within: Callable[[str], None]) -> Iterator[None]:
    """Tells whose operators run, module by module; graphs of the real library know."""
    with ExitStack() as stack:
        for wrapper in [] if sdk.real_libraries() is not None else model.models:
            for root in wrapper.model.modules:
                for name, module in root.named_modules():
                    for handle in _entered(module, name, within):
                        stack.callback(handle.remove)
        yield


def _entered(module: Any, name: str, within: Callable[[str], None]) -> list[Any]:
    above = name.rpartition(".")[0]
    return [
        module.register_forward_pre_hook(lambda *_: within(name)),
        module.register_forward_hook(lambda *_: within(above), always_call=True),
    ]
