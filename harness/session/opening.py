"""From settings to a session: model, tokenizer and prompts, checked before anything long starts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.errors import UserError
from harness.files import cache_folder, check_writable_folder
from harness.inputs import command_line, models, prompts, quantised, submission
from harness.inputs.chunks import with_chunks
from harness.processes.worker import BASELINES, Role
from harness.processes.workers import Job, Workers
from harness.session import shared_cache
from harness.settings import Settings
from neuron_cpu.console import streams
from neuron_cpu.environment import variable
from neuron_cpu.sandbox.limits import Limits


@dataclass(frozen=True)
class Session:
    """One run's checked input: everything that costs nothing to find out before a compile."""

    settings: Settings
    model: models.ModelFolder
    submission: Path
    tokenizer: Any
    pad_token_id: int
    prompts: tuple[str, ...] = ()
    prompt_ids: tuple[list[int], ...] = ()
    workers: Workers = field(default_factory=Workers)

    @property
    def continues_prompts(self) -> bool:
        """Whether the output continues the prompt rather than answering it."""
        return self.settings.raw or not self.tokenizer.chat_template

    @functools.cached_property
    def source(self) -> Path:
        """The file that runs: the submission, or the one that it has beside it for models and
        settings that it does not cover, as it says itself, in its own process."""
        other = submission.BEYOND.get(self.submission)
        if other is None:
            return self.submission
        role = Role.NKI if self.settings.enable_nki else Role.TORCH
        job = job_of(self, role, self.submission)
        with console.step("Importing PyTorch, transformers and the SDK", least_seconds=1):
            worker = self.workers.worker(job, work_folder(self.settings))
            asked = "harness.session.model:uncovered"
            why = worker.call(asked, "The model cannot be configured", role=role.value).body
        return self.submission if why is None else other

    @property
    def compiled_root(self) -> Path:
        """The folder of the compiled folders, one for each role. The cache has one root for each
        choice of settings, so a former choice is found compiled, and an edited submission replaces
        its earlier version. Compared submissions have roots of their own: workers may evaluate
        several at once.
        """
        settings, own = self.settings, ""
        if len(settings.contestants) > 1:
            own = submission.digest(self.source)
        if settings.compiled_model_path is not None:
            return settings.compiled_model_path / own[:8]
        shape = f"tp{settings.tp_degree}-seq{settings.seq_len}-batch{settings.batch_size}"
        asked: list[Any] = [settings.neuron_config(), settings.on_device_sampling_config()]
        if settings.speculation is not None:
            asked.append(str(settings.speculation.draft_path))
        if own:
            asked.append(own)
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
        return cache_folder() / "compiled" / f"{self.model.name}-{shape}-{digest}"

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.model.config["vocab_size"]

    @property
    def stop_tokens(self) -> list[int]:
        """The end tokens of generation as a list, whatever form the model has them in."""
        ends = self.model.generation.get("eos_token_id", self.tokenizer.eos_token_id)
        if ends is None:
            return []
        return [ends] if isinstance(ends, int) else list(ends)

    def changed(self, **values: Any) -> Session:
        """The same session with other settings."""
        return replace(self, settings=replace(self.settings, **values))


def open_session(settings: Settings, prompt_texts: Sequence[str] | None = None) -> Session:
    """Check everything that the settings name; UserError before anything long has begun.

    `prompt_texts` replaces the command line's prompts (a benchmark file's, say).
    """
    for note in settings.prompt_notes:
        console.say(note)
    source = submission.find(settings.llama)
    if settings.compiled_model_path is not None:
        check_writable_folder(settings.compiled_model_path)
    shared_cache.check()
    if not (cache_folder() / "models").exists():  # imports while the embedded one is converted
        Workers().prepare()
    model = models.choose_model(settings.model_path)
    if len(settings.contestants) <= 1:
        submission.check_named(source, model.config["model_type"])
    check_seq_len(settings.seq_len, model)
    ranks = models.choose_tp_degree(model, settings.tp_degree, sdk.platform().default_ranks)
    if settings.speculation is not None and settings.speculation.tree:
        models.check_medusa_heads(model)
    if settings.speculation is not None and settings.speculation.draft_path is not None:
        path, eagle = settings.speculation.draft_path, settings.speculation.eagle
        draft = models.check_eagle_folder(path, model) if eagle else models.check_folder(path)
        models.check_draft(draft, model, ranks, settings.seq_len)
    session = Session(replace(settings, tp_degree=ranks), model, source, None, 0)
    alone = len(settings.contestants) <= 1
    # imports while the tokenizer is read
    session.workers.prepare(compiled=alone and session.compiled_root.exists())
    tokenizer = read_tokenizer(model.path, settings.padding_side, alone=settings.isolate)
    session = replace(
        session,
        tokenizer=tokenizer,
        pad_token_id=_padding_token(tokenizer),
        settings=quantised.with_checkpoint(session.settings, model),
    )
    texts = settings.prompts if prompt_texts is None else tuple(prompt_texts)
    if prompt_texts is None and not texts:
        # a sentence to go on with, or a question where there is a chat template
        question = command_line.DEFAULT_QUESTION
        texts = (command_line.DEFAULT_PROMPT if session.continues_prompts else question,)
    ids = prompts.encode(session.tokenizer, texts, settings.raw)
    prompts.check_lengths(
        texts,
        ids,
        settings.seq_len,
        None if settings.takes_chunks else settings.max_context_length,
        model.config.get("max_position_embeddings"),
    )
    check_vocabulary(session, ids)
    sized = with_chunks(session.settings, model.config, ids)
    return replace(session, settings=sized, prompts=texts, prompt_ids=tuple(ids))


def check_vocabulary(session: Session, ids: Sequence[Sequence[int]]) -> None:
    """Refuse a tokenizer whose tokens the model's embedding does not have."""
    for token in (session.pad_token_id, *(token for row in ids for token in row)):
        if type(token) is not int or not 0 <= token < session.vocabulary:
            raise UserError(
                f"The tokenizer in {session.model.path} gives token {token}, and config.json has "
                f"vocab_size {session.vocabulary}; take both from the same model."
            )


def check_seq_len(seq_len: int, model: models.ModelFolder) -> None:
    """Refuse lengths beyond the positions that the model was trained for."""
    limit = model.config.get("max_position_embeddings")
    if limit is not None and seq_len > limit:
        raise UserError(
            f"--seq-len must be at most {limit} for {model.name}, got {seq_len}; write that."
        )


def read_tokenizer(folder: Path, padding_side: str, alone: bool = False) -> Any:
    """The tokenizer in a model's folder, after a trial; a UserError where it is broken.

    Args:
        alone: no model runs in this process.
    """
    with _without_torch(alone), streams.uninterrupted():
        from transformers import AutoTokenizer  # takes seconds, so after the checks above

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side=padding_side)
        tokenizer.decode(tokenizer("A trial.")["input_ids"])
        _padding_token(tokenizer)
    except BaseException as error:  # a broken file: bare Exception, or a panic of Rust
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder="...")
        raise UserError(
            f"Cannot read the tokenizer in {folder} ({reason}), expected "
            "tokenizer.json and tokenizer_config.json as they were published; download them again."
        ) from error
    return tokenizer


def _without_torch(alone: bool) -> contextlib.AbstractContextManager[None]:
    """Tokenizers that are ``alone`` need none of the seconds that PyTorch's import takes.

    Where a model runs in this process, or PyTorch is imported already, transformers may see
    PyTorch: its choice at the first import holds for the process.
    """
    if not alone or "torch" in sys.modules:
        return contextlib.nullcontext()
    return variable("USE_TORCH", "0")


def _padding_token(tokenizer: Any) -> int:
    """A special token that no prompt contains, or else the end token.

    NxDI 0.1 counts the tokens that differ from the padding to choose a bucket
    (modules/autobucketing.py), so a padding token inside a prompt can cut it.
    """
    template = tokenizer.chat_template or ""
    reserved = {tokenizer.bos_token_id, tokenizer.eos_token_id, None}
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and index not in reserved and token.content not in template:
            return index
    return tokenizer.eos_token_id


def job_of(session: Session, role: Role, source: Path | None = None) -> Job:
    """The process of one of the session's models; ``source`` runs in it, else the session's.

    The baseline gets a process of its own where the platform allows two.
    """
    settings, platform_here = session.settings, sdk.platform()
    own = role in BASELINES and platform_here.simulates
    return Job(
        settings=settings,
        model_path=session.model.path,
        model_type=session.model.config["model_type"],
        pad_token_id=session.pad_token_id,
        eos_token_id=getattr(session.tokenizer, "eos_token_id", None),
        source=None if own else source or session.source,
        scratch=Path(),
        limits=limits_of(settings) if settings.isolate else None,
        confined=platform_here.confines,
    )


def work_folder(settings: Settings) -> Path:
    """Where processes get folders of their own: on the disk where compiled folders go.

    A UserError where there is no cache, as in a home that may not be written.
    """
    cache = cache_folder()
    if settings.compiled_model_path is None:
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(
                f"Cannot write {cache}; set XDG_CACHE_HOME to a folder that may be written, or "
                "name one with --compiled-model-path."
            )
    return (settings.compiled_model_path or cache) / "work"


def limits_of(settings: Settings) -> Limits:
    """The limits of a submission's or a kernel's process."""
    return Limits(
        memory_bytes=int(settings.memory_limit * 2**30),
        cpu_seconds=settings.cpu_limit,
        wall_seconds=settings.time_limit,
    )
