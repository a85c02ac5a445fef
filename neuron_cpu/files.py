"""Files and folders that are either complete or absent: a temporary sibling, then one rename.

What a rename makes visible is on the disk before it: after a power failure a name stands for the
whole new content or for the whole old one, never for a file that is cut short.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from .errors import UnwritableError

# A disk that is full or may not be written; every other OSError is somebody's mistake.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder that takes the place of `target` when the body ends without an error.

    It stands alone in a temporary sibling of `target`, so what the body leaves beside it goes too.
    An interrupted body leaves `target` as it was. Siblings of processes that were killed are
    removed by the next writer. An UnwritableError tells about an unwritable place or a full disk.
    """
    try:
        holder = temporary_sibling(target)
        unfinished = holder / target.name
        unfinished.mkdir()
    except OSError as error:
        raise unwritable(target, error) from error
    try:
        yield unfinished
        _sync_tree(unfinished)
        _replace_folder(target, unfinished, holder / "old")
    except Exception as error:
        refused = _system_error(error)
        if refused is not None and refused.errno in _UNWRITABLE:
            raise unwritable(target, refused) from error
        raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _system_error(error: Exception) -> Optional[OSError]:
    """What the system said; libraries in Rust (tokenizers, safetensors) tell it in words only."""
    if isinstance(error, OSError):
        return error
    found = _RUST_ERROR.search(str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


_RUST_ERROR = re.compile(r"(?:\(os error |Os \{ code: )(\d+)")


def temporary_sibling(target: Path) -> Path:
    """A new folder beside `target`; those of processes that no longer run are removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent))


def _replace_folder(target: Path, unfinished: Path, retired: Path) -> None:
    """Put `unfinished` in the place of `target`, which comes back where that fails."""
    replaces = target.exists()
    if replaces:  # a folder that holds something cannot be renamed over
        os.rename(target, retired)
    try:
        os.rename(unfinished, target)
    except OSError:
        if replaces:
            os.rename(retired, target)
        raise
    _sync(target.parent)


def write_text_atomically(target: Path, text: str) -> None:
    """Write a whole file in UTF-8 or nothing; lone surrogates become question marks."""
    write_bytes_atomically(target, text.encode("utf-8", errors="replace"))


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
        _sync(target.parent)
    except OSError as error:
        raise unwritable(target, error) from error


def unwritable(target: Path, error: OSError) -> UnwritableError:
    """The one sentence for a place that cannot be written."""
    reason = error.strerror or str(error)
    return UnwritableError(
        f"Cannot write {target}: {reason}; free space there or name another path."
    )


def _sync_tree(folder: Path) -> None:
    """Bring every file and folder below `folder`, and itself, to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                _sync(path)
        _sync(root)


def _sync(path: str | Path) -> None:
    """fsync of a file or folder; file systems that cannot sync folders say EINVAL."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


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
