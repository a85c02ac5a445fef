"""Models that run: compiled into a folder that is reused while nothing has changed, and loaded."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import textwrap
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.files import bytes_of, locked_folder, modified, remove_unlocked
from harness.inputs import models, quantised, submission
from harness.processes.worker import BASELINES, QUANTISED, Role
from harness.processes.workers import Answer, OnEvent, SubmissionFailed, Worker
from harness.session import shared_cache
from harness.session.opening import Session, job_of, work_folder
from harness.settings import Settings
from neuron_cpu.errors import UnwritableError
from neuron_cpu.files import atomic_folder, check_plain, write_text_atomically

MANIFEST = "driver.json"
MOST_COMPILED_BYTES = 16 << 30  # in the cache: some six models of Llama-3.2-1B in bf16
_MODEL = "harness.session.model"


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate, with the findings of its build."""

    session: Session
    role: Role
    worker: Worker
    buckets: dict[str, list[int]]  # of each sub-model
    folder: Path
    draft: Loaded | None = None  # the model that guesses for it

    def call(
        self, function: str, what: str, on_event: OnEvent | None = None, **arguments: Any
    ) -> Answer:
        """Run `module:name` of the harness beside the model; see `Worker.call`."""
        return self.worker.call(function, what, on_event, role=self.role.value, **arguments)


def build(session: Session, role: Role | None = None) -> Loaded:
    """Compile the changed parts, and load.

    A refusal by the compiler leaves an earlier compiled folder as it was.
    """
    role = role or (Role.NKI if session.settings.enable_nki else Role.TORCH)
    inputs = _fingerprint(session, role)  # before the import: an edit in between must not pass
    loaded = construct(session, role)
    if _quantise_once(loaded):
        inputs["quantised checkpoint"] = quantised.identity(_settings_of(session, role))
    folder = loaded.folder
    busy = f"Waiting for another run that uses {console.shown(folder.parent)}"
    with locked_folder(folder.parent, lambda: console.say(busy)):
        _compile_what_changed(loaded, inputs)
        with console.step(f"Loading {role.words}", least_seconds=1):
            what = f"The compiled model in {folder} cannot be loaded"
            loaded.call(f"{_MODEL}:load", what, folder=folder)
    asked = session.settings.speculation
    if asked is None or asked.own_draft is None or role not in (Role.NKI, Role.TORCH):
        return loaded
    return replace(loaded, draft=build(session, Role.DRAFT))


def counting(loaded: Loaded) -> Loaded:
    """The same model in a process of its own, where MACs and times are counted.

    A submission's acts while it generates do not reach that process. The baseline needs none, and
    without isolation there is one process only.
    """
    job = job_of(loaded.session, loaded.role)
    if job.source is None or job.limits is None:
        return loaded
    return construct(loaded.session, loaded.role, counts=True)


def construct(session: Session, role: Role, counts: bool = False) -> Loaded:
    """The model configured, without weights, in the process that its role runs in."""
    with console.step("Importing PyTorch, transformers and the SDK", least_seconds=1):
        job = replace(job_of(session, role), counts=counts)
        worker = session.workers.worker(job, work_folder(session.settings))
        worker.call(f"{_MODEL}:prepare", "The submission cannot be imported")
    answer = worker.call(f"{_MODEL}:construct", "The model cannot be configured", role=role.value)
    folder = session.compiled_root / role.value
    return Loaded(session, role, worker, _checked_buckets(answer.body), folder)


def start(session: Session) -> None:
    """Begin the process of the session's model, which may have another one to meet."""
    role = Role.NKI if session.settings.enable_nki else Role.TORCH
    session.workers.worker(job_of(session, role), work_folder(session.settings))


def _checked_buckets(found: Any) -> dict[str, list[int]]:
    """Sub-model -> bucket lengths, ascending."""
    whole = isinstance(found, dict) and all(
        isinstance(lengths, list) and lengths and all(type(n) is int and n > 0 for n in lengths)
        for lengths in found.values()
    )
    if not whole:
        raise SubmissionFailed(
            f"The model's buckets are no lists of lengths, got {str(found)[:80]!r}; leave the "
            "SDK's wrappers unchanged."
        )
    return found


def _settings_of(session: Session, role: Role) -> Settings:
    """The part of the settings with which one of the models runs."""
    asked = session.settings
    if role in (Role.DRAFT, Role.PRECISE):
        return asked.in_float()
    return asked.of_baseline() if role == Role.BASELINE else asked


def _quantise_once(loaded: Loaded) -> bool:
    """Make a missing quantised checkpoint if the settings ask for it; returns whether it was
    made."""
    settings = _settings_of(loaded.session, loaded.role)
    target = settings.quantized_checkpoints_path
    if not settings.quantized or target is None:
        return False
    busy = f"Waiting for another run that quantises into {console.shown(target.parent)}"
    with locked_folder(target.parent, lambda: console.say(busy)):
        if target.exists():
            return False
        title = f"Quantising {loaded.session.model.name} ({settings.quantised_words}; once)"
        with console.step(title), atomic_folder(target) as unfinished:
            loaded.call(f"{_MODEL}:quantise", "The checkpoint cannot be quantised")
            _take(loaded.worker.job.scratch / QUANTISED, unfinished)
    return True


def _compile_what_changed(loaded: Loaded, inputs: dict[str, Any]) -> None:
    """Build the compiled folder unless it is whole and was built from the same inputs."""
    folder, words, settings = loaded.folder, loaded.role.words, loaded.session.settings
    changed = _changed_inputs(folder, inputs)
    if not changed and not settings.recompile:
        os.utime(folder / MANIFEST)  # when it was used last
        console.say(f"Reusing the compiled {words} in {console.shown(folder)}")
        return
    shared = shared_cache.entry(inputs)
    if shared is not None and not settings.recompile and _fetched(loaded, inputs, shared):
        return
    reason = ", ".join(changed) or "asked for"
    title = f"Compiling {words} ({reason})"
    with console.step(title) as step, atomic_folder(folder) as target:
        loaded.call(f"{_MODEL}:compile", "The model cannot be compiled")
        _take(loaded.worker.job.scratch / loaded.role.value, target)
        _save_tokenizer(loaded.session.tokenizer, target)
        sums = _checksums(target, settings.time_limit)
        _write_manifest(target, inputs, sums, shared)
        if settings.compiled_model_path is None:
            step.note(f"{title}; {_make_room(folder, bytes_of(target))}")
    if shared is None:
        return
    try:
        with console.step(f"Storing it at {shared.path}", least_seconds=1):
            shared.store(folder)
    except Exception as error:  # each file system has its own
        console.say(f"The compiled model is not stored at {shared.path} ({_reason(error)})")


def _fetched(loaded: Loaded, inputs: dict[str, Any], shared: shared_cache.Entry) -> bool:
    """Take the compiled folder of the shared cache; False where it has none that is whole."""
    folder, limit = loaded.folder, loaded.session.settings.time_limit
    try:
        if not shared.files.exists(shared.path):
            return False
        title = f"Fetching the compiled {loaded.role.words} from {shared.path}"
        with console.step(title), atomic_folder(folder) as target:
            shared.fetch(target)
            found = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
            if found["shared"] != shared.key:
                raise ValueError("it is another model's")
            sums = _checksums(target, limit)
            if found["files"] != sums:
                raise ValueError("its files have other checksums")
            _write_manifest(target, inputs, sums, shared)
            if loaded.session.settings.compiled_model_path is None:
                _make_room(folder, bytes_of(target))
    except UnwritableError:
        raise
    except Exception as error:  # each file system has its own
        console.say(
            f"{shared.path} holds no compiled model that this run can take ({_reason(error)}); it "
            "compiles anew and stores that there."
        )
        return False
    return True


def _reason(error: Exception) -> str:
    """What an error says, in a line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder="...")


def _write_manifest(
    target: Path, inputs: dict[str, Any], sums: dict[str, str], shared: shared_cache.Entry | None
) -> None:
    manifest = inputs | {"files": sums, "shared": shared and shared.key}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_text_atomically(target / MANIFEST, text)


def _make_room(folder: Path, size: int) -> str:
    """Remove what was used longest ago until a new folder fits; says what the cache holds."""
    cache = folder.parent.parent
    left, gone = forget_old(cache, MOST_COMPILED_BYTES - size, folder.parent)
    room = f", {gone} unused for longest removed" if gone else ""
    return (
        f"{console.shown(cache)} holds {(left + size) / 2**30:.1f} of at most "
        f"{MOST_COMPILED_BYTES / 2**30:.0f} GiB{room}"
    )


def _take(made: Path, target: Path) -> None:
    """Move a submission's files to the place of an empty folder: plain files, or nothing."""
    try:
        check_plain(made)  # a link in the place of the folder itself
        os.rename(made, target)
        check_plain(target)  # where the submission reaches nothing any more
    except (ValueError, FileNotFoundError) as error:
        raise SubmissionFailed(
            f"The submission's folder holds no compiled model ({error}); expected "
            "plain files and folders."
        ) from error


def _save_tokenizer(tokenizer: Any, target: Path) -> None:
    """Write the tokenizer's files elsewhere first: files in their places are not opened."""
    own = target.parent / "tokenizer"
    tokenizer.save_pretrained(str(own))
    for file in own.iterdir():
        try:
            os.replace(file, target / file.name)
        except IsADirectoryError as error:
            raise SubmissionFailed(
                f"The submission has made a folder {file.name}, where the driver puts a file of "
                "the tokenizer; name it otherwise."
            ) from error


def last_used(root: Path) -> float:
    """When one of its compiled models was last compiled or loaded."""
    return max(map(modified, root.glob(f"*/{MANIFEST}")), default=0.0)


def forget_old(cache: Path, most_bytes: int, keep: Path) -> tuple[int, int]:
    """Remove compiled folders that were used longest ago, until the others fit.

    Folders that another run has locked stay, and so does `keep`. Returns the bytes left, and the
    number of folders removed.
    """
    roots = [path for path in cache.iterdir() if path.is_dir() and path != keep]
    sizes = {path: bytes_of(path) for path in [*roots, keep]}
    before = len(sizes)
    for root in sorted(roots, key=last_used):
        if sum(sizes.values()) <= most_bytes:
            break
        if remove_unlocked(root):
            del sizes[root]
    return sum(sizes.values()), before - len(sizes)


def _fingerprint(session: Session, role: Role) -> dict[str, Any]:
    """Everything that a compiled folder depends on, under the names a user would know."""
    files = "" if role in BASELINES else submission.digest(session.source)
    settings, folder = _settings_of(session, role), session.model.path
    if role == Role.DRAFT and settings.speculation and settings.speculation.own_draft:
        folder = settings.speculation.own_draft
    config = settings.neuron_config() | {"on_device": settings.on_device_sampling_config()}
    asked = settings.speculation
    fused = asked.draft_path if asked and asked.fused else None
    return {
        "settings": json.loads(json.dumps(config)),
        "submission": files,
        "checkpoint": models.checkpoint_identity(folder),
        "adapters": [
            models.checkpoint_identity(path) for path in settings.adapter_folders.values()
        ],
        "quantised checkpoint": quantised.identity(settings),
        "draft": models.checkpoint_identity(fused) if fused else None,
        "SDK": [sdk.identity(), sdk.version()],
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def identity(loaded: Loaded) -> str:
    """A digest of the inputs of a compiled model, and of the code here that runs it."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256((loaded.folder / MANIFEST).read_bytes() + code).hexdigest()


def _changed_inputs(folder: Path, inputs: dict[str, Any]) -> list[str]:
    """The inputs that have changed since a folder was compiled; ["first time"] without a folder.
    Missing files, and files with another checksum, count as changed.
    """
    try:
        built_from = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        changed = [f"{name} changed" for name in inputs if built_from.get(name) != inputs[name]]
        sums = dict(built_from.get("files", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ["first time"]
    if changed:
        return changed
    with console.step("Checking the compiled files", least_seconds=1):
        whole = sums and all(_checksum(folder / name) == sum for name, sum in sums.items())
    return changed if whole else [*changed, "compiled files damaged"]


def _checksums(folder: Path, seconds: float) -> dict[str, str]:
    """Relative path -> checksum of everything in a compiled folder but the manifest itself."""
    until = time.monotonic() + seconds
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: _checksum(folder / name, until) for name in names if name != MANIFEST}


def _checksum(path: Path, until: float = math.inf) -> str:
    """Size and CRC-32 of a file, "" without one: damage shows, at 4 GB/s of one core (measured).

    A file with nothing in it may say any length: a SubmissionFailed at `until` (monotonic).
    """
    value, size = 0, 0
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                value, size = zlib.crc32(part, value), size + len(part)
                if time.monotonic() > until:
                    raise SubmissionFailed(
                        "Reading the submission's folder takes longer than the limit: "
                        f"{path.name!r:.80} is too large; --time-limit changes the limit."
                    )
    except OSError:
        return ""
    return f"{size} {value:08x}"
