"""Runs a model with single boundaries closed, beside the submission: see `rounding`."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, Optional

import torch
from transformers import LogitsProcessor

from harness import sdk
from harness.figures.rounding import ALL, Boundary
from harness.processes.roles import BASELINES, Role
from harness.processes.worker import Host
from harness.session.model import followed


def measure(host: Host, role: str, ids: Sequence[int], new_tokens: int) -> list[dict[str, Any]]:
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
