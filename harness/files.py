"""Files and folders that are either complete or absent: a temporary sibling, then one rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.errors import UserError


def cache_folder() -> Path:
    """Where converted models and compiled folders live: `$XDG_CACHE_HOME/nki-llama` (~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "nki-llama"


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder that takes the place of `target` when the body ends without an error.

    It stands alone in a temporary sibling of `target`, so what the body leaves beside it goes too.
    An interrupted body leaves `target` as it was. Siblings of processes that were killed are
    removed by the next writer. A UserError tells about an unwritable place or a full disk.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        holder = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent))
        unfinished = holder / target.name
        unfinished.mkdir()
    except OSError as error:
        raise unwritable(target, error) from error
    try:
        yield unfinished
        if target.exists():
            os.rename(target, holder / "old")
        os.rename(unfinished, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise unwritable(target, error) from error
        raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(folder: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """One process at a time, `folder` made where it is missing; `on_wait` before a wait begins.

    The folder itself carries the lock, so nothing stays behind when a process is killed. File
    systems that lock no folders (NFS) raise another error than "busy"; there runs must not overlap.
    """
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
    try:
        yield
    finally:
        os.close(handle)


def write_text_atomically(target: Path, text: str) -> None:
    """Write a whole file in UTF-8 or nothing."""
    write_bytes_atomically(target, text.encode("utf-8"))


def write_bytes_atomically(target: Path, content: bytes) -> None:
    """Write a whole file or nothing; it is on the disk when this returns."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise unwritable(target, error) from error


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


def unwritable(target: Path, error: OSError) -> UserError:
    """The one sentence for a place that cannot be written."""
    reason = error.strerror or str(error)
    return UserError(f"Cannot write {target}: {reason}; free space there or name another path.")


def _remove_abandoned(target: Path) -> None:
    """Remove temporary siblings of `target` whose writers no longer run."""
    prefix = f".{target.name}."
    for sibling in target.parent.glob(f"{prefix}*"):
        owner = sibling.name[len(prefix) :].split(".")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(sibling, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
