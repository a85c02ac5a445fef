"""Files and folders that are either complete or absent: a temporary sibling, then one rename.

New content is on the disk before the rename. So after a power failure a name stands for the whole
new content or the whole old one, never for a file that is cut short.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from .errors import UnwritableError

_SUM = 4  # bytes of a checksum
MOST_FILES = 10_000  # of a folder that a stranger leaves; each is checked, synced and removed
_ODD = stat.S_ISUID | stat.S_ISGID | stat.S_IRUSR  # of a plain file the last is set alone
# A disk that is full or may not be written; every other OSError is somebody's mistake.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def sealed(kind: bytes, content: bytes) -> bytes:
    """What a file of a kind holds: its first line, a checksum and the content."""
    return kind + zlib.crc32(content).to_bytes(_SUM, "big") + content


def unsealed(kind: bytes, held: bytes) -> bytes:
    """The content of what `sealed` made; a ValueError for another kind or a damaged one."""
    content = held[len(kind) + _SUM :]
    if not content or held != sealed(kind, content):
        raise ValueError("it is of another kind, damaged or cut short")
    return content


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
        remove_tree(holder)


def check_plain(folder: Path) -> None:
    """Refuse entries of a stranger's `folder` that are neither folders nor files of their own.

    Raises:
        ValueError: a link, a pipe, a device, a file with a second name, one that its owner may not
            read or that runs as its owner; more than MOST_FILES; nothing that opens.
    """

    def refuse(error: OSError) -> None:
        raise error

    number = 0
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise ValueError(f"{folder.name!r:.80} is no folder")
        for root, folders, names in os.walk(folder, onerror=refuse):
            number += len(folders) + len(names)
            if number > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES:,} files")
            for name in (*folders, *names):
                found = os.lstat(os.path.join(root, name))
                alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
                if not (alone and found.st_mode & _ODD == 0o400 or stat.S_ISDIR(found.st_mode)):
                    raise ValueError(f"{name!r:.80} is no plain file")
    except OSError as error:
        name = Path(error.filename or "").name
        raise ValueError(f"{name!r:.80} cannot be read: {error.strerror}") from error


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Read a stranger's file, which may have become another kind of file meanwhile.

    Raises:
        ValueError: it is no plain file, or has more bytes.
        OSError: it cannot be read, or is a link.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path.name!r:.80} is no plain file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path.name!r:.80} has more than {most_bytes} bytes")
    return content


def remove_tree(folder: Path) -> None:
    """Remove a tree as far as possible, also closed and very deep folders of strangers."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def _system_error(error: Exception) -> OSError | None:
    """The system's error; libraries in Rust (tokenizers, safetensors) have it only as text."""
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
    """Write a whole file or nothing; it is on the disk when this returns.

    A link stays, and its target is replaced. A terminal, a pipe or a device is written to.
    """
    given = target
    try:
        if target.exists() and not (target.is_file() or target.is_dir()):
            target.write_bytes(content)
            return
        target = Path(os.path.realpath(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        name = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync(target.parent)
    except OSError as error:
        raise unwritable(given, error) from error


def told(error: OSError) -> str:
    """The one sentence for what the system refuses."""
    if error.filename is None:
        return f"The system refuses: {str(error).rstrip('.')}."
    return f"Cannot use {os.fsdecode(error.filename)}: {error.strerror}; correct the path."


def unwritable(target: Path, error: OSError) -> UnwritableError:
    """The one sentence for a place that cannot be written."""
    reason = error.strerror or str(error)
    mend = "name a file in it" if target.is_dir() else "free space there or name another path"
    return UnwritableError(f"Cannot write {target}: {reason}; {mend}.")


def _sync_tree(folder: Path) -> None:
    """Bring every file and folder below `folder`, and itself, to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
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
    """Remove temporary siblings of `target`, files and folders, whose writers no longer run."""
    prefix = f".{target.name}."
    for sibling in target.parent.glob(f"{prefix}*"):
        owner = sibling.name[len(prefix) :].split(".")[0]
        if owner.isdigit() and not _is_running(int(owner)):
            remove_tree(sibling)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
