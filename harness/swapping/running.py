"""Loads, runs and estimates a model of transformers with a kernel, in the kernel's process.

`reference` runs in a process of its own that never imports the kernel, and `measure` in the
kernel's. The clock is the driver's: each run ends with an event. On a busy machine the driver may
read two at once; a run takes at least as long as the kernel's process says that it took.
"""

import contextlib
import functools
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.errors import UserError, at_most, words_of
from harness.inputs import submission
from harness.inputs.features import LONGEST_EAGER
from harness.processes.worker import Answer, Host, layers_told
from harness.settings import ATTENTION, PLACES, Swap
from harness.swapping import call_forms
from harness.swapping.call_forms import Heads
from neuron_cpu import announce
from neuron_cpu.errors import nearest
from neuron_cpu.runtime.refused import Refused

NAME = "nki_swap"  # of the attention function that is registered
FULL, CAUSAL, BIAS = "full", "causal", "bias"  # what a call of attention hides
SCORED_AT_ONCE = 256  # tokens whose logits are in memory together
_SUFFIXES = {"rmsnorm": "RMSNorm", "mlp": "MLP"}
Ids = Sequence[Sequence[int]]


class Hidden(nn.Module):
    """A model's last hidden states, from token ids [B, S] and, where rows are padded, a mask.

    The mask is an input, or a constant of the graph.
    """

    def __init__(self, model: Any, *mask: torch.Tensor) -> None:
        super().__init__()
        self._mask = mask
        # Gemma 3's class for text names a prefix that only its class for images has
        found = (getattr(model, name, None) for name in (model.base_model_prefix, "model"))
        self.base = next((base for base in found if base is not None), model)

    def forward(self, ids: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        given = mask or self._mask
        return self.base(input_ids=ids, attention_mask=given[0] if given else None)[0]


def reference(host: Host, ids: Ids, lengths: Sequence[int], at: str) -> Answer:
    """The model in fp32, by PyTorch.

    Returns the last hidden states [B, S, H] and, of a model with a head, the best token at each
    place [B, S]; the body has the keys that each call of attention hides, in the order of the
    calls.
    """
    eager = len(ids[0]) <= LONGEST_EAGER and (at != ATTENTION or _class_has_interface(host))
    layers = asked_of(host).layers
    model = _load(host.job.model_path, layers, "float32", "eager" if eager else "sdpa")
    calls: list[str] = []
    with host.told_as_the_submission("The model cannot be run"), torch.no_grad():
        attention: Any = contextlib.nullcontext()
        if at == ATTENTION:
            attention = _registered(model, _survey(model, calls, lengths))
            if not has_interface(model):
                attention = _Swapped(_surveyed(calls, lengths))
        with attention, layers_told(model):
            hidden = Hidden(model)(*inputs(ids, lengths))
    return Answer(calls, [hidden.float().numpy(), *_best_tokens(model, hidden)])


def check(host: Host) -> None:
    """Import the kernel, and refuse one that could be swapped into no model."""
    asked = asked_of(host)
    _, kernel = _kernel(asked)
    if not call_forms.is_adapter(kernel):
        call_forms.check(kernel, asked.at)


def measure(
    host: Host, ids: Ids, lengths: Sequence[int], plan: Sequence[str], swapped: bool, runs: int
) -> Answer:
    """Compile, warm up, one run for its results, and `runs` more; after each an event, its seconds.

    `plan` is the reference's: the keys that each call of attention hides. The body is None, or why
    tracing refused the model, of which there are no results then.
    """
    model, tensors = prepared(host, swapped, len(ids[0])), inputs(ids, lengths)
    what = "The kernel cannot be run" if swapped else "The model cannot be run"
    with (
        host.told_as_the_submission(what),
        torch.no_grad(),
        changed(host, model, plan, swapped),
        layers_told(model),
    ):
        import torch_neuronx

        timed = functools.partial(_timed, host)
        try:
            traced = timed(torch_neuronx.trace, Hidden(model), tensors)
        except Refused as error:
            return Answer(str(error))
        timed(traced, *tensors)
        hidden = timed(traced, *tensors)
        for _ in range(runs):
            timed(traced, *tensors)
        return Answer(None, [hidden.float().numpy(), *_best_tokens(model, hidden)])


def measure_on_device(
    host: Host, ids: Ids, lengths: Sequence[int], plan: Sequence[str], swapped: bool, runs: int
) -> Answer:
    """As `measure`, operator by operator on PyTorch's `neuron`: what tracing refuses runs there.

    The body has `ms`, the estimate of one execution with its band, without the host's time between
    operators, and `fallbacks`, operators that the device leaves to the CPU.
    """
    what = "The kernel cannot be run" if swapped else "The model cannot be run"
    with host.told_as_the_submission(what), torch.no_grad(), contextlib.ExitStack() as inside:
        report, timed = announce.room("report"), functools.partial(_timed, host)
        try:
            model = timed(prepared(host, swapped, len(ids[0])).to, "neuron")
        finally:
            forget_model()  # it is on the device from here on
        tensors = [tensor.to("neuron") for tensor in inputs(ids, lengths)]
        with torch.device("neuron"):  # the kernel's own forms of weights
            inside.enter_context(changed(host, model, plan, swapped))
        inside.enter_context(layers_told(model))
        run = Hidden(model)
        timed(run, *tensors)
        recorder = report.Recorder(checks=False)
        with report.watched(recorder):
            hidden = timed(run, *tensors)
        for _ in range(runs):
            timed(run, *tensors)
        parts = report.parts_of(recorder, report.Pricer())
        times = [(part["time_ns"], *part["band_ns"]) for part in parts]
        body = {
            "ms": [sum(ns) / 1e6 for ns in zip(*times)],
            "fallbacks": sorted(report.STATE.fallbacks),
        }
        return Answer(body, [hidden.cpu().float().numpy(), *_best_tokens(model, hidden)])


def _timed(host: Host, what: Callable[..., Any], *arguments: Any) -> Any:
    begin = time.monotonic()
    result = what(*arguments)
    host.emit(time.monotonic() - begin)
    return result


# --- models ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _load(path: Path, layers: int | None, dtype: str, implementation: str) -> Any:
    """The model as transformers makes it, cut to so many layers."""
    import transformers

    config = _config(path, layers)
    kind: Any = transformers.AutoModel
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ()):
        kind = transformers.AutoModelForCausalLM
    try:
        model = kind.from_pretrained(
            str(path),
            config=config,
            torch_dtype=getattr(torch, dtype),
            attn_implementation=implementation,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UserError(
            f"The model in {path} cannot be loaded by transformers ({_reason(error)}); take a "
            "causal LM or an encoder that it has."
        ) from error
    model.config.pad_token_id = None  # transformers would look for it in every input
    return model.eval()


def _config(path: Path, layers: int | None) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"transformers cannot read {path}/config.json ({_reason(error)}); correct it."
        ) from error
    if config.is_encoder_decoder:
        raise UserError(
            f"{path} is an encoder with a decoder, expected a causal LM or an encoder; name one."
        )
    config.use_cache = False
    if hasattr(config, "reference_compile"):  # ModernBERT's torch.compile
        config.reference_compile = False
    if layers is not None:
        found = getattr(config, "num_hidden_layers", None)
        at_most("--layers", layers, found or 0, f" for {path.name}")
        config.num_hidden_layers = layers
    return config


def _reason(error: Exception) -> str:
    return words_of(error).rstrip(".")[:200]


def forget_model() -> None:
    """Load it anew next time."""
    _load.cache_clear()


def prepared(host: Host, swapped: bool, tokens: int) -> Any:
    """The model in the type and for the length of the job.

    By eager attention, unless the kernel enters through sdpa or its scores would not fit.
    """
    asked = asked_of(host)
    through = swapped and asked.at == ATTENTION and not _class_has_interface(host)
    kind = "sdpa" if through or tokens > LONGEST_EAGER else "eager"
    return _load(host.job.model_path, asked.layers, host.job.settings.torch_dtype, kind)


def asked_of(host: Host) -> Swap:
    """The swap of a job; only this mode's jobs come here."""
    assert host.job.settings.swap is not None
    return host.job.settings.swap


def inputs(ids: Ids, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Token ids [B, S], and a mask [B, S] where a row is padded on the right."""
    tokens = torch.tensor([list(row) for row in ids])
    if min(lengths) == tokens.shape[1]:
        return (tokens,)
    return tokens, (torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]).long()


def _best_tokens(model: Any, hidden: torch.Tensor) -> list[np.ndarray]:
    """The best token at each place [B, S], where the model has a head."""
    head = model.get_output_embeddings()
    if head is None:
        return []
    with torch.no_grad():
        parts = [head(part).argmax(-1) for part in hidden.split(SCORED_AT_ONCE, dim=1)]
    return [torch.cat(parts, 1).cpu().float().numpy()]


# --- the kernel in its place ----------------------------------------------------------------------


@contextlib.contextmanager
def changed(host: Host, model: Any, plan: Sequence[str], swapped: bool) -> Iterator[None]:
    """The kernel in the model, as long as the body runs."""
    if not swapped:
        yield
        return
    asked = asked_of(host)
    home, kernel = _kernel(asked)
    if call_forms.replaces_modules(kernel, asked.at):
        if asked.at == ATTENTION and BIAS in plan:
            raise call_forms.takes_no_mask()
        with _replaced(_parts(model, asked.at), kernel, home, asked.at):
            yield
        return
    adapter = kernel if call_forms.is_adapter(kernel) else None
    attend: Any = None if adapter else _by_plan(call_forms.attention(kernel, home), plan)
    if has_interface(model):
        with _registered(model, adapter or _interface(attend)):
            yield
    elif attend is None:
        raise UserError(
            f"{type(model).__name__} of this transformers has no attention function to replace by "
            "an adapter; name a kernel of a known form, which enters through PyTorch's sdpa."
        )
    else:
        with _Swapped(attend):
            yield


def _kernel(asked: Swap) -> tuple[Any, Any]:
    """The kernel's file, imported once, and the kernel."""
    home = _imported(asked.source)
    kernel = getattr(home, asked.name, None)
    if not callable(kernel):
        mend = nearest(asked.name, vars(home))
        raise UserError(f"{asked.source} has no kernel {asked.name}; {mend}.")
    return home, kernel


_imported = functools.cache(submission.imported)


def _parts(model: nn.Module, at: str) -> list[nn.Module]:
    """The modules that a kernel replaces."""
    if at == ATTENTION:
        found = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "o_proj")]
    else:
        suffix = _SUFFIXES[at]
        found = [m for m in model.modules() if type(m).__name__.endswith(suffix)]
    if not found:
        raise UserError(
            f"{type(model).__name__} has nothing to replace at {at} ({PLACES[at]}); choose another "
            "--at."
        )
    return found


@contextlib.contextmanager
def _replaced(parts: Sequence[nn.Module], kernel: Any, home: Any, at: str) -> Iterator[None]:
    """Other `forward`s of modules, found before the first is changed."""
    forwards = [call_forms.forward(kernel, home, at, part) for part in parts]
    try:
        for part, changed in zip(parts, forwards):
            part.forward = changed  # type: ignore[method-assign]
        yield
    finally:
        for part in parts:
            del part.forward


def _class_has_interface(host: Host) -> bool:
    """Whether the model's class looks its attention up by name, before the model is made."""
    import transformers

    config = _config(host.job.model_path, None)
    with contextlib.suppress(KeyError):
        mapping: Any = transformers.MODEL_MAPPING
        return hasattr(sys.modules[mapping[type(config)].__module__], "ALL_ATTENTION_FUNCTIONS")
    return False


def has_interface(model: Any) -> bool:
    """Whether the model looks its attention up in transformers' table (4.48 and later)."""
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


@contextlib.contextmanager
def _registered(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """An attention function of transformers, and the model set to it."""
    if not has_interface(model):
        yield
        return
    table = sys.modules[type(model).__module__].ALL_ATTENTION_FUNCTIONS
    before, model.config._attn_implementation = model.config._attn_implementation, NAME
    table[NAME] = function
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del table[NAME]


def _by_plan(attend: call_forms.Attend, plan: Sequence[str]) -> Callable[..., torch.Tensor]:
    """A kernel with the signature of PyTorch's attention; calls are in the order of the plan."""
    hidden = itertools.cycle(plan)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        hides = next(hidden)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        bias = _bias(attn_mask, query) if hides == BIAS else None
        return attend(Heads(query, key, value, scale, hides == CAUSAL, bias))

    return attention


def _interface(attend: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The signature of transformers around that of PyTorch."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if softcap is not None:
            _tell_cap(softcap)
        out = attend(query, key, value, attention_mask, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    return attention


@functools.cache
def _tell_cap(cap: float) -> None:
    """Once a process: a cap of scores (Gemma 2's) is in no form of call."""
    logging.warning(
        "The model caps its scores at %g and the kernel does not, as no form of call passes the "
        "cap on; write an adapter for it.",
        cap,
    )


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] to add to the scores, in the type of the queries, the same for all heads."""
    if mask is None or mask.shape[1] != 1:
        raise UserError(
            "A layer of this model adds its own to the scores of each head, which no form of call "
            "here passes on; write an adapter."
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, call_forms.HIDDEN_KEY)
    shape = (query.shape[0], 1, query.shape[2], query.shape[2])
    return mask[..., : query.shape[2]].expand(shape).to(query.dtype)


class _Swapped(TorchFunctionMode):
    """Another function for PyTorch's own attention, in models without a table of functions."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            func = self._attend
        return func(*args, **(kwargs or {}))


# --- what masks hide ------------------------------------------------------------------------------


def _survey(model: Any, calls: list[str], lengths: Sequence[int]) -> Callable[..., Any]:
    """The model's own attention function, which records the keys that each call hides."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    home = sys.modules[type(model).__module__]
    own: Any = getattr(home, "eager_attention_forward", sdpa_attention_forward)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        causal = options.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", False)
        calls.append(hidden_keys(mask, bool(causal) and mask is None, lengths, query.shape[2]))
        compute = own if query.shape[2] <= LONGEST_EAGER else sdpa_attention_forward
        return compute(module, query, key, value, mask, **options)

    return attention


def _surveyed(calls: list[str], lengths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """PyTorch's own attention, which records the keys that each call hides."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        calls.append(hidden_keys(attn_mask, bool(is_causal), lengths, query.shape[2]))
        compute = nn.functional.scaled_dot_product_attention
        return compute(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return attention


def hidden_keys(
    mask: torch.Tensor | None, causal: bool, lengths: Sequence[int], tokens: int
) -> str:
    """The keys that a mask [B, 1, S, S], added or of booleans, hides from queries without padding.

    FULL: nothing. CAUSAL: the keys behind a query. BIAS: something else.
    """
    if mask is None:
        return CAUSAL if causal else FULL
    if mask.shape[1] != 1:
        return BIAS
    seen = mask if mask.dtype == torch.bool else mask == 0
    triangle = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    added = None if mask.dtype == torch.bool else mask[..., :tokens].expand(-1, -1, tokens, -1)
    plain = full = True
    for row, length in enumerate(lengths):
        own = seen[min(row, len(seen) - 1), 0].expand(tokens, -1)[:length, :tokens]
        plain = plain and bool((own == triangle[:length]).all())
        full = full and bool(own.all())
        if added is not None:
            values = added[min(row, len(added) - 1), 0, :length]
            if bool(((values != 0) & (values > call_forms.HIDDEN_KEY)).any()):
                return BIAS
    return FULL if full else CAUSAL if plain else BIAS
