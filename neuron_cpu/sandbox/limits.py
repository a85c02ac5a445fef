"""Limits on a process with a stranger's code: memory, time, and writable folders.

Memory and processor time are POSIX limits. The rest is Linux's, and `missing` on other systems:
Landlock (Linux 5.13) keeps a process from writing outside of named folders; a filter of system
calls (`syscalls`) denies what is neither a file of its own, nor memory, a thread or time. No
privilege is needed. System call numbers and structures: linux/landlock.h and
Documentation/userspace-api/landlock.rst of the Linux source.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
# Access rights of landlock.h by the version that brought them; reading and executing stay free.
_WRITES = (
    (1, (1 << 1) | sum(1 << bit for bit in range(4, 13))),  # write, remove, make
    (2, 1 << 13),  # rename or link into another folder
    (3, 1 << 14),  # truncate
)
_TCP, _TCP_SINCE = (1 << 0) | (1 << 1), 4  # bind and connect
_SIGNALS_AND_SOCKETS, _SCOPES_SINCE = (1 << 0) | (1 << 1), 6  # abstract sockets, signals
_OF_FILES = (1 << 1) | (1 << 14)  # rights that a rule about one file may name
_PR_SET_NO_NEW_PRIVS, _PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 38, 1, 36
_PR_SET_DUMPABLE = 4
_CAPABILITY_VERSION_3, _DAC_OVERRIDE = 0x20080522, 1 << 1
_LINUX = sys.platform == "linux"
WAITS = 6  # a busy machine gives a process a part of its time only
_GRACE_SECONDS = 5  # from the signal that says why to the one that cannot be ignored
MOST_OPEN_FILES = 4096  # pipes of its own hold memory, too


@dataclass(frozen=True)
class Limits:
    """The limits of one process.

    Attributes:
        memory_bytes: of data; files that are mapped for reading do not count.
        cpu_seconds: of all its threads together.
        wall_seconds: of one step: a compile, a load, a generation.
    """

    memory_bytes: int
    cpu_seconds: int
    wall_seconds: float


def default_memory_gib() -> float:
    """Three quarters of the memory of the machine or container."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            size = min(size, int(Path(name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 0.75 * size / 2**30


def apply(limits: Limits) -> None:
    """Put this process, a new group of its own, under `limits`, until its parent dies."""
    os.setsid()
    end_with_parent()
    _set(resource.RLIMIT_DATA, limits.memory_bytes)
    _set(resource.RLIMIT_CPU, limits.cpu_seconds, _GRACE_SECONDS)
    _set(resource.RLIMIT_CORE, 0)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set(resource.RLIMIT_NOFILE, min(soft, MOST_OPEN_FILES))


@contextlib.contextmanager
def bounded(seconds: float, memory_bytes: int | None) -> Iterator[None]:
    """Bounds for Python of somebody else that runs in this process, such as a template.

    Raises:
        TimeoutError: the body takes more seconds of processor time, or WAITS times as many by the
            clock, which goes on while other processes run.
        MemoryError: it takes that much more memory than there is now (on Linux; None: any).
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, WAITS * seconds),
    )
    before = [signal.signal(number, late) for number, _, _ in timers]
    bound_memory = _LINUX and memory_bytes is not None  # a confined process may change no limit
    if _LINUX and memory_bytes is not None:
        data = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
        _set(resource.RLIMIT_DATA, data + memory_bytes, keep_hard=True)
    running = [signal.setitimer(timer, length) for _, timer, length in timers]
    try:
        yield
    finally:
        for (number, timer, _), handler, left in zip(timers, before, running):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
            signal.setitimer(timer, *left)  # of a bound around this one
        if bound_memory:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def end_with_parent() -> None:
    """Have the kernel end this process with the one that forked it (a fork server ends with its
    own)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of orphans of this process's descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_memory() -> None:
    """Let no process of the same user look into this one, where Landlock does not forbid it: no
    debugger, no `/proc/PID/mem`. Processes that are forked from it inherit that."""
    _prctl(_PR_SET_DUMPABLE, 0)


def descriptors() -> list[int]:
    """The open descriptors of this process, which Linux lets it list even where others may not."""
    return list(map(int, os.listdir("/dev/fd")))


def children(process: int) -> list[int]:
    """The processes whose parent a process is; none where it has ended, or without /proc."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def confine(writable: Sequence[Path]) -> None:
    """Keep this process from all but files below `writable`, memory, threads and time, for good.

    Parts that are `missing` here are left out.
    """
    _drop_capabilities()
    if _landlock_version() > 0:
        _write_only_below(writable)
    if _has_filter():
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        syscalls.allow_only(syscalls.calls_of(os.getpid()))


def _drop_capabilities() -> None:
    """Drop root's powers except the one over files, which may belong to others. Other powers open
    more than files, such as the environment of other processes (CAP_PERFMON, since Linux 6.15)."""
    if _LINUX:
        for kept in (_DAC_OVERRIDE, 0):  # it may not have that one
            sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
            if _libc().capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), sets) == 0:
                break


def missing() -> str:
    """The parts of the sandbox that this system lacks, and what they leave open; empty: none."""
    parts = []
    if _landlock_version() < 1:
        parts.append("no Landlock (Linux 5.13), so it may write all files that you may")
    if not _has_filter():
        parts.append(
            f"no {syscalls.LIBRARY}, so it may start processes, signal yours and open connections"
        )
    return "; ".join(parts)


def _write_only_below(folders: Sequence[Path]) -> None:
    version, libc = _landlock_version(), _libc()
    handled = sum(rights for since, rights in _WRITES if version >= since)
    network = _TCP if version >= _TCP_SINCE else 0
    scopes = _SIGNALS_AND_SOCKETS if version >= _SCOPES_SINCE else 0
    sizes = 8 * (1 + (version >= _TCP_SINCE) + (version >= _SCOPES_SINCE))
    attributes = struct.pack("=QQQ", handled, network, scopes)[:sizes]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in (*folders, Path(os.devnull)):
        handle = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", handled if path.is_dir() else handled & _OF_FILES, handle)
        libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        os.close(handle)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if ruleset < 0 or libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses")
    os.close(ruleset)


def _landlock_version() -> int:
    if not _LINUX:
        return 0
    return _libc().syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def _has_filter() -> bool:
    return _LINUX and syscalls.has_filter()


def _set(kind: int, value: int, grace: int = 0, keep_hard: bool = False) -> None:
    _, hard = resource.getrlimit(kind)
    most = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
    resource.setrlimit(kind, (min(value, most), hard if keep_hard else most))


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        _libc().prctl(option, value, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
