"""What a stranger's code may try, as functions of a `Reach`; run as a script in a confined process.

``python acts.py SCRATCH PRECIOUS VICTIM HOW`` tries every act and prints how each one ended. HOW is
a word of `OTHERS` or several: who runs it, and what of the sandbox is taken away.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NOBODY = 65534
MPTCP = 262


class Reach(NamedTuple):
    """Whom and what acts are tried on.

    Attributes:
        scratch: the process's own folder.
        precious: a folder of somebody else with a file `file`.
        victim: a process of somebody else.
    """

    scratch: Path
    precious: Path
    victim: int

    @property
    def file(self):
        return self.precious / "file"


def call(name, *arguments):
    """A system call by its number, as no function of Python makes it."""
    library, libc = ctypes.CDLL("libseccomp.so.2"), ctypes.CDLL(None, use_errno=True)
    number = library.seccomp_syscall_resolve_name(name.encode())
    done = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def _as_read(act):
    """An act on a descriptor that was opened for reading, which every file gives."""

    def opened(reach):
        handle = os.open(reach.file, os.O_RDONLY)
        try:
            act(handle)
        finally:
            os.close(handle)

    return opened


def _pipe(act):
    def made(reach):
        ends = os.pipe()
        try:
            act(ends[0])
        finally:
            list(map(os.close, ends))

    return made


def _fork(_):
    if os.fork() == 0:
        os._exit(0)


def _written(path):
    handle = os.open(path, os.O_WRONLY)
    os.write(handle, b"1")


def _exchange(mine, theirs):
    mine.write_text("x")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, bytes(mine), -100, bytes(theirs), 2) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _lock(number):
    """A lock for reading, which keeps others from writing: a database's, for example."""
    whole = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
    return _as_read(lambda handle: fcntl.fcntl(handle, number, whole))


# Files: what Landlock keeps from it.
FILES: dict[str, Callable[[Reach], object]] = {
    "write": lambda r: r.file.write_text("x"),
    "append": lambda r: r.file.open("a"),
    "open for writing": lambda r: os.open(r.file, os.O_RDWR),
    "remove": lambda r: r.file.unlink(),
    "rename": lambda r: r.file.rename(r.precious / "new"),
    "take away": lambda r: r.file.rename(r.scratch / "new"),
    "second name": lambda r: os.link(r.file, r.scratch / "second"),
    "put there": lambda r: (r.scratch / "own").rename(r.precious / "own"),
    "make a folder": lambda r: (r.precious / "new").mkdir(),
    "make a link": lambda r: (r.precious / "new").symlink_to("/"),
    "write through a link": lambda r: (
        (r.scratch / "link").symlink_to(r.file),
        (r.scratch / "link").write_text("x"),
    ),
    "write through /proc/self/cwd": lambda r: (
        os.chdir(r.precious),
        Path("/proc/self/cwd/file").write_text("x"),
    ),
    "shared memory": lambda r: Path(f"/dev/shm/neuron_cpu.{os.getpid()}").write_text("x"),
    "own badness for the kernel": lambda r: Path("/proc/self/oom_score_adj").write_text("0"),
    "environment of others": lambda r: Path(f"/proc/{r.victim}/environ").read_bytes(),
    "addresses of others": lambda r: Path(f"/proc/{r.victim}/maps").read_bytes(),
    "folder of others": lambda r: os.listdir(f"/proc/{r.victim}/cwd/"),
    "badness of others for the kernel": lambda r: _written(f"/proc/{r.victim}/oom_score_adj"),
    "name of others": lambda r: _written(f"/proc/{r.victim}/comm"),
    "own memory through a file": lambda r: os.open("/proc/self/mem", os.O_RDWR),
    "what a crash runs": lambda r: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "terminal of its own": lambda r: os.open("/dev/ptmx", os.O_RDWR),
    "file without a name": lambda r: os.open(r.precious, os.O_TMPFILE | os.O_RDWR),
    "exchange": lambda r: _exchange(r.scratch / "exchanged", r.file),
    "memory of others": lambda r: os.open(f"/proc/{r.victim}/mem", os.O_RDONLY),
    "descriptors of others": lambda r: os.open(f"/proc/{r.victim}/fd/0", os.O_WRONLY),
}
VICTIM = object()  # its number, where an act begins


def _system(name, *arguments):
    """An act that is one system call."""
    return lambda r: call(name, *(r.victim if one is VICTIM else one for one in arguments))


# All else: what the filter of system calls keeps from it.
CALLS: dict[str, Callable[[Reach], object]] = {
    "mode": lambda r: os.chmod(r.file, 0o600),
    "mode of what is read": _as_read(lambda handle: os.fchmod(handle, 0o600)),
    "owner": lambda r: os.chown(r.file, os.getuid(), -1),
    "times": lambda r: os.utime(r.file),
    "times of what is read": _as_read(lambda handle: os.utime(handle)),
    "attribute": lambda r: os.setxattr(r.file, "user.x", b"x"),
    "truncate": lambda r: os.truncate(r.file, 0),
    "lock": _as_read(lambda handle: fcntl.flock(handle, fcntl.LOCK_EX)),
    "lock of a part": _lock(fcntl.F_SETLK),
    "lock of an open file": _lock(37),
    "notice of a folder": lambda r: fcntl.fcntl(os.open(r.precious, os.O_RDONLY), 1026, 1),
    "signals of a pipe": _pipe(lambda end: fcntl.ioctl(end, 0x5452, struct.pack("i", 1))),
    "flags of a file": _as_read(lambda handle: fcntl.ioctl(handle, 0x40086602, bytes(8))),
    "blocks of a file": _as_read(lambda handle: fcntl.ioctl(handle, 0x40049409, handle)),
    "file by its handle": _system("open_by_handle_at", 0, 0, 0),
    "device": lambda r: os.mknod(r.scratch / "device", 0o020600, os.makedev(1, 1)),
    "attribute of its own": lambda r: os.setxattr(r.scratch, "user.x", b"x"),
    "a disk written out": _system("syncfs", 0),
    "lease": _as_read(lambda handle: fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)),
    "pipe in the file system": lambda r: os.mkfifo(r.scratch / "fifo"),
    "limits of others": lambda r: resource.prlimit(r.victim, resource.RLIMIT_CPU),
    "end by a limit": lambda r: resource.prlimit(r.victim, resource.RLIMIT_CPU, (0, 0)),
    "own limits": _system("prlimit64", 0, resource.RLIMIT_CORE, 1, 0),
    "signal": lambda r: os.kill(r.victim, signal.SIGKILL),
    "signal to all": lambda r: os.kill(-r.victim, signal.SIGKILL),
    "signal to a thread": _system("tgkill", VICTIM, VICTIM, 9),
    "handle of a process": lambda r: os.pidfd_open(r.victim),
    "signal by a handle": _system("pidfd_send_signal", 0, 9, 0, 0),
    "signal with a value": _system("rt_sigqueueinfo", VICTIM, 9, 0),
    "signal to its group": lambda r: os.kill(0, 0),
    "signal to everybody": lambda r: os.kill(-1, 0),
    "descriptor by a handle": _system("pidfd_getfd", 0, 0, 0),
    "advice on memory of others": _system("process_madvise", 0, 0, 0, 0, 0),
    "write memory of others": _system("process_vm_writev", VICTIM, 0, 0, 0, 0, 0),
    "pages of others": _system("move_pages", VICTIM, 0, 0, 0, 0, 0),
    "compare with others": _system("kcmp", VICTIM, VICTIM, 0, 0, 0),
    "disk before others": _system("ioprio_set", 1, VICTIM, 0),
    "time before others": _system("sched_setattr", 0, 0, 0),
    "traced by anybody": _system("prctl", 0x59616D61, -1, 0, 0, 0),
    "orphans of its own": _system("prctl", 36, 1, 0, 0, 0),
    "another filter": _system("seccomp", 0, 0, 0),
    "another character": _system("personality", 0x40000),
    "pages that stay": _system("mlockall", 3),
    "namespace of a thread": _system("clone", 0x10010900, 0, 0, 0, 0),
    "pages between pipes": _system("vmsplice", 0, 0, 0, 0),
    "messages": _system("mq_open", 0, 0, 0, 0),
    "semaphores": _system("semget", 0, 1, 0o1600),
    "secret memory": _system("memfd_secret", 0),
    "watch of all files": _system("fanotify_init", 0, 0),
    "clock of the machine": _system("clock_settime", 0, 0),
    "signal by a pipe": _pipe(lambda end: fcntl.fcntl(end, fcntl.F_SETOWN, os.getppid())),
    "nice others": lambda r: os.setpriority(os.PRIO_PROCESS, r.victim, 1),
    "processors of others": lambda r: os.sched_setaffinity(r.victim, {0}),
    "memory of others by a call": _system("process_vm_readv", VICTIM, 0, 0, 0, 0, 0),
    "trace": _system("ptrace", 16, VICTIM, 0, 0),
    "fork": _fork,
    "another program": lambda r: os.execv("/bin/true", ["true"]),
    "program beside": lambda r: os.posix_spawn("/bin/true", ["true"], {}),
    "outlive the driver": _system("prctl", 1, 0, 0, 0, 0),
    "session of its own": lambda r: os.setsid(),
    "TCP": lambda r: socket.socket(),
    "MPTCP": lambda r: socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP),
    "UDP": lambda r: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "Unix sockets": lambda r: socket.socket(socket.AF_UNIX),
    "netlink": lambda r: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "pair of sockets": lambda r: socket.socketpair(),
    "shared mapping": lambda r: mmap.mmap(-1, 1 << 20),
    "memory as a file": lambda r: os.memfd_create("x"),
    "segment": _system("shmget", 0, 4096, 0o1600),
    "large pipe": _pipe(lambda end: fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)),
    "type into a terminal": lambda r: fcntl.ioctl(0, 0x5412, b"x"),
    "namespace": _system("unshare", 0x10000000),
    "mount": _system("mount", 0, 0, 0, 0, 0),
    "io_uring": _system("io_uring_setup", 1, 0),
    "bpf": _system("bpf", 0, 0, 0),
    "counters": _system("perf_event_open", 0, 0, 0, 0, 0),
    "keys": _system("keyctl", 0, -3, 0, 0, 0),
    "faults": _system("userfaultfd", 0),
    "watch": _system("inotify_init1", 0),
}
# What a submission needs.
ALLOWED: dict[str, Callable[[Reach], object]] = {
    "own file": lambda r: (r.scratch / "own").write_text("x" * 10_000),
    "own folder": lambda r: (r.scratch / "folder").mkdir(),
    "own name": lambda r: (r.scratch / "own").rename(r.scratch / "other"),
    "temporary file": lambda r: tempfile.mkstemp(),
    "nowhere": lambda r: Path("/dev/null").write_text("x"),
    "read": lambda r: Path(__file__).read_text(),
    "list": lambda r: os.listdir("/"),
    "thread": lambda r: threading.Thread(target=time.time).start(),
    "memory": lambda r: bytes(1 << 26),
    "mapped file": lambda r: mmap.mmap(os.open(__file__, os.O_RDONLY), 0, prot=mmap.PROT_READ),
    "time": lambda r: (time.sleep(0.001), time.perf_counter()),
    "alarm": lambda r: signal.setitimer(signal.ITIMER_REAL, 0),
    "own signal": lambda r: os.kill(os.getpid(), signal.SIGCHLD),
    "own processors": lambda r: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "own limits, read": lambda r: resource.getrlimit(resource.RLIMIT_DATA),
    "pipe": _pipe(lambda end: os.set_blocking(end, False)),
    "random": lambda r: os.urandom(8),
    "is it a terminal": lambda r: os.isatty(0),
}


def outcome(act, reach):
    try:
        act(reach)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error)) if error.errno else str(error)
    except MemoryError:
        return "MemoryError"
    return "done"


NAMESPACES = "unshare", "setns", "mount", "pivot_root", "chroot"
UNKNOWN = ("clone3",)  # as containers have it: the C library then starts threads by another call
LANDLOCK = "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"


def without(calls, number=errno.EPERM):
    """What a container or an older system refuses, by a filter around all that follows."""
    library, allow, refuse = ctypes.CDLL("libseccomp.so.2"), 0x7FFF0000, 0x00050000 | number
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(allow)))
    for name in calls:
        call = library.seccomp_syscall_resolve_name(name.encode())
        assert library.seccomp_rule_add(context, ctypes.c_uint32(refuse), call, 0) == 0
    assert library.seccomp_load(context) == 0


def elsewhere(how):
    """Put this process, and all that it starts, into another place: words of `how`, by commas."""
    if "namespaces" in how:
        without(NAMESPACES)
        without(UNKNOWN, errno.ENOSYS)
    if "landlock" in how:
        without(LANDLOCK, errno.ENOSYS)
    if "nobody" in how:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def main(scratch, precious, victim, *how):
    from neuron_cpu.sandbox import limits

    elsewhere("nobody" if "nobody" in how else "")
    if "without user namespaces" in how:
        elsewhere("namespaces")
    if "without Landlock" in how:
        limits._landlock_version = lambda: 0
    if "without the filter" in how:
        limits._has_filter = lambda: False
    tempfile.tempdir = scratch
    limits.apply(limits.Limits(1 << 30, 60, 60))
    limits.confine([Path(scratch)])
    calls = {"UDP": CALLS["UDP"]} if "without the filter" in how else CALLS
    reach = Reach(Path(scratch), Path(precious), int(victim))
    found = {
        name: outcome(act, reach)
        for table in (ALLOWED, calls, FILES)
        for name, act in table.items()
    }
    found["too much memory"] = outcome(lambda r: bytes(1 << 31), reach)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
