"""From arguments to a model that runs: choose, check, compile into a folder, reuse it, load it."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from harness import console, sdk
from harness.errors import UserError, is_refusal
from harness.files import cache_folder, check_writable_folder, locked_folder
from harness.inputs import command_line, models, prompts, submission
from neuron_cpu.files import atomic_folder, write_text_atomically

BASELINE_MODULE = "neuronx_distributed_inference.models.llama.modeling_llama"
_ADAPTER_MODULE = "neuronx_distributed_inference.utils.hf_adapter"
MANIFEST = "driver.json"
GRAPHS = "graphs"
# The SDK's compiler works in this folder unless the environment names another one.
_WORK_DIR_VARIABLE = "BASE_COMPILE_WORK_DIR"
_DEFAULT_WORK_DIR = "/tmp/nxd_model/"


@dataclass
class Session:
    """One run's checked input: everything that costs nothing to find out before a compile."""

    args: argparse.Namespace
    model: models.ModelFolder
    submission: Path
    tokenizer: Any
    pad_token_id: int
    prompts: list[str] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)

    @property
    def continues_prompts(self) -> bool:
        """Whether the output goes on where the prompt ends, rather than answering it."""
        return self.args.raw or not self.tokenizer.chat_template

    @property
    def compiled_root(self) -> Path:
        """Holds one compiled folder for each role.

        In the cache there is one root for each shape of run, so that it does not grow with edits.
        """
        args = self.args
        if args.compiled_model_path is not None:
            return Path(args.compiled_model_path).expanduser()
        shape = f"tp{args.tp_degree}-seq{args.seq_len}-batch{args.batch_size}"
        return cache_folder() / "compiled" / f"{self.model.name}-{shape}"


@dataclass
class Loaded:
    """A model ready to generate, with what was learnt while building it."""

    session: Session
    role: str  # "nki", "torch" (the submission with and without kernels), "shadow", "baseline"
    model: Any
    folder: Path
    generation_config: Any


def open_session(args: argparse.Namespace, prompt_texts: Optional[Sequence[str]] = None) -> Session:
    """Check everything that the arguments name; UserError before anything long has begun.

    `prompt_texts` replaces the command line's prompts (a benchmark file's, say).
    """
    for note in args.prompt_notes:
        console.say(note)
    source = submission.find(args.llama)
    if args.compiled_model_path is not None:
        check_writable_folder(Path(args.compiled_model_path).expanduser())
    model = models.choose_model(args.model_path)
    check_seq_len(args, model)
    args.tp_degree = models.choose_tp_degree(model, args.tp_degree, not sdk.is_stand_in())
    _import_libraries()
    session = Session(args, model, source, *_open_tokenizer(args, model))
    session.prompts = list(args.prompts if prompt_texts is None else prompt_texts)
    if prompt_texts is None and not session.prompts:
        session.prompts = [_default_prompt(session)]
    session.prompt_ids = prompts.encode(session.tokenizer, session.prompts, args.raw)
    prompts.check_lengths(
        session.prompts, session.prompt_ids, args.seq_len, args.max_context_length
    )
    return session


def check_seq_len(args: argparse.Namespace, model: models.ModelFolder) -> None:
    """Refuse lengths beyond the positions that the model was trained for."""
    limit = model.config.get("max_position_embeddings")
    if limit is not None and args.seq_len > limit:
        raise UserError(f"--seq-len must be at most {limit} for {model.name}, got {args.seq_len}.")


def _default_prompt(session: Session) -> str:
    """A question for a model with a chat template, a sentence to go on with for others."""
    return (
        command_line.DEFAULT_PROMPT if session.continues_prompts else command_line.DEFAULT_QUESTION
    )


def _import_libraries() -> None:
    """Import what takes seconds where the user sees it, after the checks that need none of it."""
    names = ("torch", "transformers", BASELINE_MODULE, _ADAPTER_MODULE)
    if not all(name in sys.modules for name in names):
        with console.step("Importing PyTorch, transformers and the SDK"):
            for name in names:
                importlib.import_module(name)


def _open_tokenizer(args: argparse.Namespace, model: models.ModelFolder) -> tuple[Any, int]:
    """The tokenizer, and the token that fills prompts up to their bucket."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.path), padding_side=args.padding_side)
    except Exception as error:  # the tokenizers package raises bare Exception on a broken file
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder="...")
        raise UserError(
            f"Cannot read the tokenizer in {model.path} ({reason}), expected "
            "tokenizer.json and tokenizer_config.json as they were published; download them again."
        ) from error
    return tokenizer, _padding_token(tokenizer)


def _padding_token(tokenizer: Any) -> int:
    """A special token that no prompt contains; the end token where there is none.

    NxDI 0.1 counts the tokens that differ from the padding to choose a bucket
    (modules/autobucketing.py), so a padding token inside a prompt can cut it.
    """
    template = tokenizer.chat_template or ""
    reserved = {tokenizer.bos_token_id, tokenizer.eos_token_id, None}
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and index not in reserved and token.content not in template:
            return index
    return tokenizer.eos_token_id


def build(session: Session, role: Optional[str] = None) -> Loaded:
    """Compile what has changed, and load.

    `role` "baseline" is the SDK's own Llama, "shadow" the submission without kernels in fp32.
    A refusal by the compiler leaves an earlier compiled folder as it was.
    """
    role = role or ("nki" if session.args.enable_nki else "torch")
    inputs = _fingerprint(session, role)  # before the import: an edit in between must not pass
    module = (
        importlib.import_module(BASELINE_MODULE)
        if role == "baseline"
        else submission.load(session.submission)
    )
    model = construct_model(session, getattr(module, submission.MODEL_CLASS), role)
    folder = session.compiled_root / role
    busy = f"Waiting for another run that uses {console.shown(folder.parent)}"
    with locked_folder(folder.parent, lambda: console.say(busy)):
        _compile_what_changed(model, session, role, folder, inputs)
        with console.step(f"Loading {_title(role)}"), _told_as_damaged(session, folder):
            model.load(str(folder))
    return Loaded(session, role, model, folder, _generation_config(session))


def _compile_what_changed(
    model: Any, session: Session, role: str, folder: Path, inputs: dict[str, Any]
) -> None:
    """Build `folder` unless it is whole and was built from the same inputs."""
    changed = _changed_inputs(folder, inputs)
    if not changed and not session.args.recompile:
        console.say(f"Reusing the compiled {_title(role)} in {console.shown(folder)}")
        return
    reason = ", ".join(changed) or "asked for"
    with console.step(f"Compiling {_title(role)} ({reason})"), atomic_folder(folder) as target:
        with told_as_the_submission(session, "The model cannot be compiled"):
            _compile(model, session, target)
        manifest = inputs | {"files": _file_sizes(target)}
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        write_text_atomically(target / MANIFEST, text)


@contextmanager
def told_as_the_submission(session: Session, what: str) -> Iterator[None]:
    """An error that is no refusal becomes one: `what`, and the submission's line that raised."""
    try:
        yield
    except Exception as error:
        full_disk = isinstance(error, OSError) and not submission.line_of(error, session.submission)
        if is_refusal(error) or full_disk:
            raise
        raise UserError(f"{what}: {submission.where(error, session.submission)}.") from error


@contextmanager
def _told_as_damaged(session: Session, folder: Path) -> Iterator[None]:
    """What the SDK raises while it reads a compiled folder becomes a refusal that says so."""
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise
        where = submission.where(error, session.submission)
        raise UserError(
            f"The compiled model in {folder} cannot be loaded: {where}; if its files are damaged, "
            "--recompile builds them anew."
        ) from error


def _title(role: str) -> str:
    return {
        "nki": "model with NKI kernels",
        "torch": "model without NKI kernels",
        "baseline": "baseline model",
        "shadow": "model without NKI kernels in fp32",
    }[role]


def construct_model(session: Session, model_class: Any, role: str) -> Any:
    """Config objects and the model, as the contest's driver builds them."""
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig, to_torch_dtype
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    settings = command_line.settings(session.args)
    if role == "shadow":
        settings.update(torch_dtype="float32", rpl_reduce_dtype="float32")
    for name in ("torch_dtype", "rpl_reduce_dtype"):
        if name in settings:
            settings[name] = to_torch_dtype(settings[name])
    sampling = command_line.sampling_settings(session.args)
    if sampling is not None:
        settings["on_device_sampling_config"] = OnDeviceSamplingConfig(**sampling)
    if role == "nki":
        settings["enable_nki"] = True
    path = str(session.model.path)
    try:
        neuron_config = model_class.get_neuron_config_cls()(**settings)
        config = model_class.get_config_cls()(
            neuron_config,
            load_config=load_pretrained_config(path),
            pad_token_id=session.pad_token_id,
        )
        return model_class(path, config)
    except (ValueError, AssertionError, AttributeError, TypeError) as error:
        where = submission.where(error, session.submission)
        raise UserError(f"The model cannot be configured: {where}.") from error


def _compile(model: Any, session: Session, target: Path) -> None:
    """The SDK's compile, with the graphs and the tokenizer kept beside its results."""
    work_dir = Path(os.environ.setdefault(_WORK_DIR_VARIABLE, str(target / GRAPHS) + os.sep))
    try:
        model.compile(str(target))
        if not (target / GRAPHS).is_dir():
            source = work_dir if work_dir.is_dir() else Path(_DEFAULT_WORK_DIR)
            for graph in source.glob("*/*/model/graph.hlo"):
                kept = target / GRAPHS / graph.relative_to(source)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(graph, kept)
    finally:
        if os.environ[_WORK_DIR_VARIABLE].startswith(str(target)):
            del os.environ[_WORK_DIR_VARIABLE]
    session.tokenizer.save_pretrained(str(target))


def _fingerprint(session: Session, role: str) -> dict[str, Any]:
    """Everything that a compiled folder depends on, under the names a user would know."""
    text = b"" if role == "baseline" else session.submission.read_bytes()
    settings = dict(
        command_line.settings(session.args), on_device=command_line.sampling_settings(session.args)
    )
    return {
        "settings": json.loads(json.dumps(settings)),
        "submission": hashlib.sha256(text).hexdigest(),
        "checkpoint": _checkpoint_identity(session.model.path),
        "SDK": [sdk.identity(), os.environ.get("NEURON_CPU_NXDI", "")],
        "Python": platform.python_version(),
        "torch": importlib.import_module("torch").__version__,
    }


def _checkpoint_identity(folder: Path) -> dict[str, list[Any]]:
    """File name -> size and modification time: as good as a hash and instant at any size."""
    stats = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()} | {
        "folder": [str(folder)]
    }


def _changed_inputs(folder: Path, inputs: dict[str, Any]) -> list[str]:
    """Which inputs a compiled folder was not built from; ["first time"] where there is none.

    Files that are missing or have another size than when they were written count as changed.
    """
    try:
        built_from = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        changed = [f"{name} changed" for name in inputs if built_from.get(name) != inputs[name]]
        sizes = dict(built_from.get("files", {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return ["first time"]
    present = _file_sizes(folder)
    whole = sizes and all(present.get(name) == size for name, size in sizes.items())
    return changed if whole else [*changed, "compiled files damaged"]


def _file_sizes(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of everything in a compiled folder but the manifest itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    sizes.pop(MANIFEST, None)
    return sizes


def _generation_config(session: Session) -> Any:
    """The model's own generation settings with the command line's on top."""
    from transformers import GenerationConfig

    args = session.args
    if (session.model.path / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(str(session.model.path))
    else:
        config = GenerationConfig(eos_token_id=session.tokenizer.eos_token_id)
    sampling = args.do_sample and args.top_k != 1
    pad = args.pad_token_id if args.pad_token_id is not None else session.pad_token_id
    config.update(
        do_sample=sampling,
        top_k=args.top_k if sampling else None,
        top_p=args.top_p if sampling else None,
        temperature=args.temperature if sampling else None,
        pad_token_id=pad,
        max_length=None,
    )
    return config
