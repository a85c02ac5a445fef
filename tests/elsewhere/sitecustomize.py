"""A Python that has what macOS has: first on PYTHONPATH of a process, and so of those it starts.

What only Linux's Python has is taken away, its file systems are not there, and multiprocessing
starts processes as it does on macOS. C code is still Linux's.
"""

# ruff: noqa: E402
import select

for name in [name for name in vars(select) if name.lower().startswith("epoll")]:
    delattr(select, name)  # before modules that choose by it

import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import sys
import sysconfig
import time
import types

# Names of CPython that its documentation gives for Linux, or for Unix without macOS.
GONE = {
    os: """
        O_PATH O_TMPFILE O_LARGEFILE O_DIRECT O_RSYNC O_NOATIME P_PIDFD PIDFD_NONBLOCK
        sched_getaffinity sched_setaffinity sched_setscheduler sched_getscheduler sched_getparam
        sched_setparam sched_rr_get_interval pidfd_open memfd_create eventfd eventfd_read
        eventfd_write timerfd_create splice copy_file_range pipe2 posix_fadvise posix_fallocate
        fdatasync getrandom getxattr setxattr listxattr removexattr setresuid setresgid getresuid
        getresgid unshare setns posix_openpt prlimit
    """,
    resource: """
        prlimit RUSAGE_THREAD RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME
        RLIMIT_SIGPENDING RLIMIT_OFILE
    """,
    signal: """
        sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGPOLL SIGCLD
        SIGSTKFLT
    """,
    socket: "AF_NETLINK AF_PACKET AF_ALG AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
ABSENT = ("/proc", "/sys", "/dev/shm", "/dev/full", "/run")


def _take_away():
    for module, names in GONE.items():
        for name in names.split():
            vars(module).pop(name, None)


def _refuse(path):
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if any(text == folder or text.startswith(f"{folder}/") for folder in ABSENT):
        raise FileNotFoundError(2, "not on this system", text)


def _refuse_linux_files(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        _refuse(arguments[0])


def _refusing(usual):
    """`os.stat`, of which no hook is told."""

    def stat(path, **named):
        _refuse(path)
        return usual(path, **named)

    return stat


class _Library(ctypes.CDLL):
    """The C library without Linux's own calls."""

    def __getattr__(self, name):
        if name in ("prctl", "syscall", "sched_getaffinity", "mallopt", "malloc_trim"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


class _Usage:
    """`getrusage` with its memory in bytes."""

    def __init__(self, usage):
        self._usage = usage
        self.ru_maxrss = usage.ru_maxrss * 1024  # type: ignore[attr-defined]

    def __getattr__(self, name):
        return getattr(self._usage, name)


_take_away()
sysconfig.get_config_vars()  # of this build; a module that macOS has is named after the platform
_proxies = types.ModuleType("_scproxy")  # an extension module of macOS alone, which urllib imports
vars(_proxies).update(_get_proxies=dict, _get_proxy_settings=dict)
sys.modules["_scproxy"] = _proxies
_getrusage = resource.getrusage
resource.getrusage = lambda who: _Usage(_getrusage(who))
os.stat, os.lstat = _refusing(os.stat), _refusing(os.lstat)
ctypes.CDLL = _Library
multiprocessing.set_start_method("spawn")
sys.platform = "darwin"
sys.addaudithook(_refuse_linux_files)
