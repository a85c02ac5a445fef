"""Functions of the submission's process: configure, compile, load, generate. See `worker`."""

import contextlib
import copy
import ctypes
import functools
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from neuronx_distributed_inference.models import config as config_classes
from neuronx_distributed_inference.models.config import (
    NeuronConfig,
    OnDeviceSamplingConfig,
    to_torch_dtype,
)
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from harness import sdk
from harness.errors import UserError, is_refusal
from harness.inputs.chunks import MOST_PREFILL
from harness.processes.worker import (
    BASELINES,
    QUANTISED,
    Answer,
    Host,
    Role,
    check_numbers,
    layers_told,
)
from harness.session import speculation
from harness.session.adapters import name_the_model, room_for_adapters
from harness.session.chunks import PromptInChunks
from harness.settings import OPERATOR, Settings

GRAPHS = "graphs"
# The SDK's compiler works in this folder unless the environment names another one.
_WORK_DIR_VARIABLE = "BASE_COMPILE_WORK_DIR"
_DEFAULT_WORK_DIR = "/tmp/nxd_model/"
_UNUSED = GenerationConfig()


def prepare(host: Host) -> None:
    """Import the submission."""
    _ = host.module


def uncovered(host: Host, role: str) -> str | None:
    """Why the submission does not cover the model with these settings, in its own words; None
    else, or where its configuration has no answer."""
    try:
        _, config = _configured(host, Role(role))
    except UserError as error:
        return str(error)
    why = getattr(config, "uncovered", lambda: None)()
    return None if why is None else str(why)


def construct(host: Host, role: str) -> dict[str, list[int]]:
    """The model, as the contest's driver builds it; sub-model -> buckets."""
    asked, config = _configured(host, Role(role))
    with _told_as_configured(host):
        model = host.model_class(str(_model_path(host, Role(role))), config)
    if asked.prefill_chunk and not hasattr(model, "token_generation_model"):
        raise UserError(
            f"{type(model).__name__} of {type(model).__module__} has no single-token graph beside "
            "that for chunks of a prompt, as NxDI has none since 0.2 unless the model's "
            f"enable_speculation adds it; give --max-context-length {host.job.settings.seq_len}."
        )
    if sdk.real_libraries() is not None and config.neuron_config.torch_dtype == torch.float32:
        model.checkpoint_loader_fn = _in_fp32(model.checkpoint_loader_fn)
    host.models[Role(role)] = model
    return {wrapper.tag: _lengths(wrapper) for wrapper in model.models}


@contextlib.contextmanager
def _told_as_configured(host: Host) -> Iterator[None]:
    """Turn what configurations raise into a refusal."""
    try:
        yield
    except (ValueError, AssertionError, AttributeError, TypeError) as error:
        raise UserError(f"The model cannot be configured: {host.where(error)}.") from error


def _configured(host: Host, role: Role) -> tuple[Settings, Any]:
    """The settings of a role, and its configuration, as the contest's driver makes it."""
    asked = host.job.settings
    if role in (*BASELINES, Role.DRAFT):
        asked = asked.of_baseline() if role == Role.BASELINE else asked.in_float()
        asked = replace(asked, speculation=None)
    if role in BASELINES and asked.seq_len <= MOST_PREFILL:
        asked = asked.whole_prefill()
    settings, model_class = _neuron_settings(asked, role), host.model_class
    with _told_as_configured(host):
        of_neuron = model_class.get_neuron_config_cls()
        if "kv_cache_quant" in settings and hasattr(of_neuron(), "kv_quant_config"):
            settings["kv_quant_config"] = {}  # without it NxDI 0.8 and 0.9 ignore the option
        neuron_config = _made(of_neuron, settings)
        config = model_class.get_config_cls()(
            neuron_config,
            load_config=load_pretrained_config(str(_model_path(host, role))),
            pad_token_id=host.job.pad_token_id,
        )
        if asked.speculation is not None and asked.speculation.fused:
            config.fused_spec_config = _with_draft(host, model_class, neuron_config)
        _check_fields(neuron_config, settings)
    return asked, config


def _made(of_neuron: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """A NeuronConfig; NxDI 0.1 reads its field `async_mode` from the keyword `async`."""
    made = of_neuron(**settings)
    if settings.get("async_mode") and not getattr(made, "async_mode", True):
        made = of_neuron(**settings, **{"async": True})
    return made


def _neuron_settings(asked: Settings, role: Role) -> dict[str, Any]:
    """Arguments of NeuronConfig."""
    settings = asked.neuron_config()
    if role in BASELINES and sdk.platform().simulates and sdk.real_libraries() is None:
        settings["save_sharded_checkpoint"] = False  # `load` reads the checkpoint itself
    if role in (Role.SHADOW, Role.PRECISE):
        settings.update(torch_dtype="float32", rpl_reduce_dtype="float32")
    for name in ("torch_dtype", "rpl_reduce_dtype"):
        if name in settings:
            settings[name] = to_torch_dtype(settings[name])
    sampling = asked.on_device_sampling_config()
    if sampling is not None:
        settings["on_device_sampling_config"] = OnDeviceSamplingConfig(**sampling)
    if "chunked_prefill_config" in settings:
        settings["chunked_prefill_config"] = _chunks_of(settings["chunked_prefill_config"])
    if role == Role.NKI or (role == Role.DRAFT and asked.enable_nki):
        settings["enable_nki"] = True
    if asked.adapters is not None:
        settings["lora_config"] |= room_for_adapters(len(asked.adapters.paths), asked.batch_size)
    return settings


def _in_fp32(load: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., Any]:
    """The checkpoint in fp32: NxDI 0.1 to 0.3 cast none for a model in fp32, whose graph would then
    be given weights of another type."""

    def loaded(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        halves = torch.bfloat16, torch.float16
        tensors = load(*args, **kwargs)
        return {name: t.float() if t.dtype in halves else t for name, t in tensors.items()}

    return loaded


def _lengths(wrapper: Any) -> list[int]:
    """Bucket lengths, ascending; of graphs over blocks new tokens, or the length of a step."""
    buckets = wrapper.neuron_config.buckets
    return sorted({b if isinstance(b, int) else b[0] if b[0] > 1 else b[1] for b in buckets})


def _with_draft(host: Host, model_class: Any, target: Any) -> Any:
    """Add the draft to the configuration of fused speculation's target. The draft's configuration
    is the target's with the changes of NxDI's demo. NxDI 0.1 leaves out the single-token graph only
    by an option."""
    asked = host.job.settings.speculation
    assert asked is not None and asked.draft_path is not None
    if asked.token_tree and not hasattr(target, "token_tree_config"):
        raise UserError(
            "--token-tree-json needs a version of NxDI whose NeuronConfig has token_tree_config "
            "(0.2 and later); leave it out."
        )
    if hasattr(target, "trace_tokengen_model"):
        target.trace_tokengen_model = False
    draft = copy.deepcopy(target)
    draft.enable_fused_speculation = draft.quantized = False
    draft.is_eagle_draft, draft.enable_eagle_draft_input_norm = asked.eagle, asked.eagle_input_norm
    if not asked.eagle:
        draft.speculation_length = 0
    config = model_class.get_config_cls()(
        draft,
        load_config=load_pretrained_config(str(asked.draft_path)),
        pad_token_id=host.job.pad_token_id,
    )
    fused = config_classes.FusedSpecNeuronConfig
    return fused(model_class._model_cls, config, str(asked.draft_path))


def _chunks_of(values: dict[str, Any]) -> Any:
    """NxDI's ChunkedPrefillConfig, which came with 0.4."""
    if "chunked_prefill_config" not in vars(NeuronConfig()):
        raise _later("--is-chunked-prefill", "chunked_prefill_config (0.4 and later)")
    # the imitation of NxDI has no such class, and its NeuronConfig refuses the option by name
    return getattr(config_classes, "ChunkedPrefillConfig", dict)(**values)


def _check_fields(neuron_config: Any, settings: dict[str, Any]) -> None:
    """Refuse fields that this version of NxDI would ignore with a warning."""
    flags = {
        "apply_seq_ids_mask": "--apply-seq-ids-mask",
        "cp_degree": "--cp-degree",
        "is_prefix_caching": "--is-prefix-caching",
        "async_mode": "--async-mode",
        "modules_to_not_convert": "--modules-to-not-convert-file",
    }
    for name, flag in flags.items():
        if settings.get(name) and not getattr(neuron_config, name, None):
            raise _later(flag, name)


def _later(flag: str, name: str) -> UserError:
    return UserError(
        f"{flag} needs a later version of NxDI, whose NeuronConfig has {name}; leave it out, or "
        "without a device set NEURON_CPU_NXDI=0.6 or name checkouts with --libraries."
    )


def _model_path(host: Host, role: Role) -> Path:
    """The Hugging Face folder of a role's model."""
    asked = host.job.settings.speculation
    if role == Role.DRAFT and asked is not None and asked.own_draft is not None:
        return asked.own_draft
    return host.job.model_path


def quantise(host: Host, role: str) -> None:
    """The SDK's quantised checkpoint of the model."""
    model, target = host.models[Role(role)], host.job.scratch / QUANTISED
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    config = copy.copy(model.config)
    config.neuron_config = copy.copy(model.neuron_config)
    config.neuron_config.quantized_checkpoints_path = str(target)
    with host.told_as_the_submission("The checkpoint cannot be quantised"):
        type(model).save_quantized_state_dict(str(host.job.model_path), config)


def compile(host: Host, role: str) -> str:
    """The SDK's compile, with the graphs kept beside its results; returns the folder's name."""
    target = host.job.scratch / Role(role).value
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    work_dir = Path(os.environ.setdefault(_WORK_DIR_VARIABLE, str(target / GRAPHS) + os.sep))
    try:
        with host.told_as_the_submission("The model cannot be compiled"):
            host.models[Role(role)].compile(str(target))
        if not (target / GRAPHS).is_dir():
            # on the stand-in nobody's but this run's: the default folder is of all users
            own = work_dir.is_dir() or sdk.platform().simulates
            source = work_dir if own else Path(_DEFAULT_WORK_DIR)
            for graph in source.glob("*/*/model/graph.hlo"):
                kept = target / GRAPHS / graph.relative_to(source)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(graph, kept)
    finally:
        if os.environ[_WORK_DIR_VARIABLE].startswith(str(target)):
            del os.environ[_WORK_DIR_VARIABLE]
    return target.name


def load(host: Host, role: str, folder: Path) -> None:
    """Load the compiled folder; an error of the SDK means that the folder is damaged."""
    try:
        with _watched(host, Role(role)):
            host.models[Role(role)].load(str(folder))
    except Exception as error:
        if is_refusal(error):
            raise
        raise UserError(
            f"The compiled model in {folder} cannot be loaded: {host.where(error)}; if its files "
            "are damaged, --recompile builds them anew."
        ) from error
    if sdk.platform().simulates:
        _keep_memory()


def _keep_memory() -> None:
    """Keep up to 1 GiB of freed memory in the process, under glibc: pages that the system clears
    anew took half of the time of attention to 1280 tokens."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX


def generate(
    host: Host,
    role: str,
    prompt_ids: Sequence[Sequence[int]],
    new_tokens: int,
    greedy: bool,
    fixed_length: bool,
    scores: bool,
) -> Answer:
    """One call of the SDK's Hugging Face adapter; each step's tokens and seconds are an event.

    The array, if asked for, is the logits [steps, batch, V] after the processors of transformers:
    end tokens are -inf where the length is fixed. Under speculation the body has, for each call
    behind the prefill, the number of guesses, of right guesses, and of the draft's steps.
    """
    settings = host.job.settings
    model = host.models[Role(role)]
    whole = settings.seq_len if settings.padding_side == "left" else None
    tokens, mask = pad_batch(prompt_ids, host.job.pad_token_id, whole)
    seen = _GraphCalls(model)
    options: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([_Observer(host), seen])}
    if settings.on_device_sampling:
        options["sampling_params"] = prepare_sampling_params(
            len(prompt_ids), [settings.top_k], [settings.top_p], [settings.temperature]
        )
    if settings.adapters is not None:
        options["adapter_ids"] = [settings.adapters.chosen] * len(prompt_ids)
        name_the_model(model)
    if fixed_length:
        options["min_new_tokens"] = new_tokens
    if greedy:
        options["do_sample"] = False
    answers = settings.mode in ("generate", "chat")  # others look for NaN themselves, and where
    if answers and not settings.on_device_sampling and settings.speculation is None:
        options["logits_processor"] = LogitsProcessorList([_Numbers()])
    if scores:
        options.update(return_dict_in_generate=True, output_scores=True)
        if settings.speculation is None and _is_watched(host, Role(role)):
            options["logits_processor"] = LogitsProcessorList([_OfGraphs()])
    torch.manual_seed(settings.seed)
    with (
        host.told_as_the_submission("The model fails while it generates"),
        # where operators arrive whole, and Python takes them apart for what watches each of them
        torch.inference_mode(role != Role.BASELINE),
        torch.no_grad(),
        _rounding(settings, Role(role)),
        _watched(host, Role(role), scores),
        _layers_told(model),
    ):
        adapter = _adapter(host, Role(role))
        result = adapter.generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=_generation_config(host),
            max_new_tokens=new_tokens,
            **options,
        )
        model.reset()
        _looked.setdefault(Role(role), []).append(seen.ended())
        logits = torch.stack(result.scores).float().numpy() if scores else None
    arrays: list[np.ndarray] = [] if logits is None else [logits]
    return Answer(list(getattr(adapter, "steps", ())), arrays)


def run_plainly(host: Host, role: Role, ids: Sequence[int], count: int) -> None:
    """Generate `count` greedy tokens for the sake of hooks, one a call: a submission that looks
    ahead takes plain steps, as its references do."""
    quiet = replace(host, emit=lambda _: None)
    with getattr(host.models[role], "plain_steps", contextlib.nullcontext)():
        generate(quiet, role.value, [ids], count, greedy=True, fixed_length=True, scores=False)


_looked: dict[Role, list[list[list[int]]]] = {}  # of each generation since `looked`


def looked(host: Host, role: str) -> list[list[list[int]]]:
    """Of each generation since the last time: of each call behind the prompt's the tokens that it
    took beside the newest one, the answers that it gave beside the first, and 0."""
    return _looked.pop(Role(role), [])


class _GraphCalls(StoppingCriteria):
    """Sees which call of a graph each token came from, where a submission looks ahead by itself."""

    def __init__(self, model: Any) -> None:
        self._calls: list[list[int]] = []
        self._hooks = [
            wrapper.register_forward_pre_hook(functools.partial(self._called, wrapper))
            for wrapper in model.models
        ]

    def _called(self, wrapper: Any, *_: Any) -> None:
        if wrapper.tag != "context_encoding_model":
            self._calls.append([wrapper.neuron_config.n_active_tokens - 1, -1, 0])

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self._calls:
            self._calls[-1][1] += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def ended(self) -> list[list[int]]:
        """The calls that gave tokens, which chunks of a prompt do not; hooks are gone."""
        for hook in self._hooks:
            hook.remove()
        return [call for call in self._calls if call[1] >= 0]


def _watched(
    host: Host, role: Role, wanted: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Count the work of the submission's graphs, to compare it with their traces."""
    if not wanted or not _is_watched(host, role):
        return contextlib.nullcontext()
    return importlib.import_module("neuron_cpu.runtime.executed").watching()


@contextlib.contextmanager
def _layers_told(model: Any) -> Iterator[None]:
    """Progress inside of a call; graphs of a device and of the real libraries have no modules."""
    with contextlib.ExitStack() as stack:
        if sdk.platform().simulates and sdk.real_libraries() is None:
            for wrapper in model.models:
                stack.enter_context(layers_told(wrapper.model.modules[0]))
        yield


def _is_watched(host: Host, role: Role) -> bool:
    of_submission = role in (Role.NKI, Role.TORCH) and "evaluate" in host.job.settings.mode
    return of_submission and sdk.platform().simulates


def _rounding(settings: Settings, role: Role) -> contextlib.AbstractContextManager[None]:
    """The baseline rounds as a compiled graph does, unless each operator of PyTorch is to round."""
    if (
        role != Role.BASELINE
        or settings.baseline_rounding == OPERATOR
        or not sdk.platform().simulates
    ):
        return contextlib.nullcontext()
    return importlib.import_module("neuron_cpu.runtime.rounding").fused(settings.baseline_rounding)


def _adapter(host: Host, role: Role) -> PromptInChunks:
    """The adapter that drives a role's model."""
    asked, model = host.job.settings.speculation, host.models[role]
    if asked is None or role not in (Role.NKI, Role.TORCH):
        return PromptInChunks(model)
    if asked.tree:
        return speculation.Tree(model)
    return speculation.adapter(asked, model, host.models.get(Role.DRAFT))


class _Numbers(LogitsProcessor):
    """Refuses logits of which some are NaN: whatever token is chosen among them means nothing."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        check_numbers(scores)
        return scores


class _OfGraphs(LogitsProcessor):
    """Refuses logits that no graph has made: no figure counts the host's work."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not importlib.import_module("neuron_cpu.runtime.executed").made(scores):
            raise UserError(
                "the logits of a step are computed on the host, expected logits of a graph; "
                "compute them in the traced model, whose time is counted"
            )
        return scores


def pad_batch(
    prompt_ids: Sequence[Sequence[int]], pad_token_id: int, whole: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [batch, longest prompt] int64, padded on the right; or
    [batch, whole] and on the left, where NxDI takes nothing shorter than a cache line."""
    width = whole or max(len(ids) for ids in prompt_ids)
    tokens = torch.full((len(prompt_ids), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompt_ids):
        where = slice(0, len(ids)) if whole is None else slice(-len(ids), None)
        tokens[row, where] = torch.tensor(list(ids))
        mask[row, where] = 1
    return tokens, mask


class _Observer(StoppingCriteria):
    """Sends each row's token and the seconds since the step before, since a busy driver may read
    two steps at once. Stops all rows where the driver asks for it."""

    def __init__(self, host: Host) -> None:
        self._host, self._last = host, time.monotonic()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        self._host.emit([input_ids[:, -1].tolist(), now - self._last])
        self._last = now
        return torch.full((input_ids.shape[0],), self._host.stopped())


def _generation_config(host: Host) -> GenerationConfig:
    """The model's own generation settings with the command line's on top."""
    settings = host.job.settings
    if (host.job.model_path / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(str(host.job.model_path))
    else:
        config = GenerationConfig(eos_token_id=host.job.eos_token_id)
    asked: int | None = settings.pad_token_id
    config.update(
        do_sample=settings.samples,
        # NxDI makes tensors of them, sampling or not: transformers' own defaults, not None.
        top_k=settings.top_k if settings.samples else _UNUSED.top_k,
        top_p=settings.top_p if settings.samples else _UNUSED.top_p,
        temperature=settings.temperature if settings.samples else _UNUSED.temperature,
        pad_token_id=host.job.pad_token_id if asked is None else asked,
        max_length=None,
    )
    return config
