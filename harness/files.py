"""Where the driver keeps its files, one process at a time, and whether it may.

References are results that kernels are held against: a CPU takes long for them.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import UserError
from neuron_cpu.files import unwritable, write_bytes_atomically


def cache_folder() -> Path:
    """Where converted models and compiled folders live: `$XDG_CACHE_HOME/nki-llama` (~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "nki-llama"


@contextlib.contextmanager
def locked_folder(folder: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """One process at a time, `folder` made where it is missing; `on_wait` before a wait begins.

    The folder itself carries the lock, so nothing stays behind when a process is killed; a folder
    that was made here goes again where it stays empty. File systems that lock no folders (NFS)
    raise another error than "busy"; there runs must not overlap.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    handle = _locked(folder, on_wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # one of them holds something
            for path in made:
                path.rmdir()
        os.close(handle)


def _locked(folder: Path, on_wait: Callable[[], object]) -> int:
    """The open folder with its lock; whoever had the lock before may have removed the folder."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise unwritable(folder, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
        if folder.exists() and os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
        os.close(handle)


def remove_unlocked(folder: Path) -> bool:
    """Remove a folder, unless another process has it locked; whether it is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return not folder.exists()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(handle)
    return not folder.exists()


def bytes_of(folder: Path) -> int:
    """The size of all files below; another run may remove some of them meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def modified(path: Path) -> float:
    """When it was written last, in seconds since 1970; 0 where another run has removed it."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read_key(file: Path | None) -> str | None:
    """The first line of a file: an argument could be read by every user of the machine."""
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"Cannot read the key in {file}: {reason}; name a readable text file."
        ) from error
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(f"The first line of {file} must be a key in printable ASCII letters.")
    return key


def check_writable_folder(target: Path) -> None:
    """Refuse early, before anything long, a folder that could not be made or written."""
    existing = target
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"Cannot write {target}: {existing} is not a folder; name another path.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"Cannot write {target}: no write permission in {existing}; name another path."
        )


MOST_REFERENCE_BYTES = 4 << 30
_BODY = "body"


def reference_file(identity: Mapping[str, Any]) -> Path:
    """The file for a result that depends on `identity` alone."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "references" / f"{digest}.npz"


def read_reference(path: Path) -> tuple[Any, list[Any]] | None:
    """Read body and arrays; None where the file is missing or damaged."""
    import numpy as np  # a tenth of a second that no start of the driver has to take

    try:
        with np.load(path, allow_pickle=False) as kept:
            arrays = [kept[name] for name in sorted(kept.files) if name != _BODY]
            os.utime(path)  # when it was used last
            return json.loads(str(kept[_BODY])), arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write_reference(path: Path, body: Any, arrays: list[Any]) -> None:
    """Keep a result; those used longest ago go until all fit MOST_REFERENCE_BYTES."""
    import numpy as np

    content = io.BytesIO()
    named = {f"array{index:02}": array for index, array in enumerate(arrays)}
    np.savez(content, **{_BODY: np.array(json.dumps(body))}, **named)  # type: ignore[arg-type]
    write_bytes_atomically(path, content.getvalue())
    room = bytes_of(path.parent) - MOST_REFERENCE_BYTES
    for file in sorted(path.parent.glob("*.npz"), key=modified):
        if room <= 0 or file == path:
            return
        with contextlib.suppress(OSError):
            room -= file.stat().st_size
            file.unlink()
