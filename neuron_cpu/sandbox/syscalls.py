"""The only system calls that a stranger's code may make (Linux).

libseccomp makes the filter, as it knows the numbers on every processor; Debian, Ubuntu, Fedora and
Amazon Linux have it (apt and systemd need it). PyPI's `pyseccomp` wraps the same library, of which
six functions are called here directly. Other calls fail with EPERM: sockets, processes, signals to
others, limits, modes and times of files, shared memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import NamedTuple

LIBRARY = "libseccomp.so.2"
ALWAYS = """
brk munmap mremap mprotect madvise mincore msync membarrier get_mempolicy
set_robust_list get_robust_list rseq futex futex_wait futex_wake futex_requeue futex_waitv
set_tid_address arch_prctl gettid sched_yield sched_getaffinity sched_getparam sched_getscheduler
sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority exit exit_group
restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack pause wait4 waitid nanosleep clock_nanosleep clock_gettime clock_getres
gettimeofday time times getrusage setitimer getitimer alarm timer_create timer_settime
timer_gettime timer_delete timer_getoverrun timerfd_create timerfd_settime timerfd_gettime
open openat openat2 creat close close_range read write pread64 pwrite64 readv writev preadv pwritev
preadv2 pwritev2 lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
readlink readlinkat getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat
rename renameat renameat2 link linkat symlink symlinkat ftruncate fallocate fadvise64 fsync
fdatasync sync_file_range dup dup2 dup3 umask pipe pipe2 eventfd eventfd2 poll ppoll select
pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 sendfile
copy_file_range readahead getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
getuid geteuid getgid getegid getresuid getresgid getgroups getpid getppid getpgid getpgrp getsid
capget uname sysinfo getrandom getcpu getrlimit
"""
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032)  # no locks, owners, signals, leases, sizes
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, how much is there
_PRCTL = (2, 3, 15, 16, 21, 23, 0x53564D41)  # what is set, names of threads and memory
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020080  # all that begin namespaces
_MAP_SHARED, _MAP_ANONYMOUS = 1, 0x20
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7  # comparisons
_ALL_THREADS = 4  # attribute: threads that run already get the filter, too
_PR_GET_SECCOMP = 21


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


class Call(NamedTuple):
    """A system call that is allowed where all arguments are as they should be: (number, mask,
    value) each; a mask of None compares the whole."""

    name: str
    arguments: tuple[tuple[int, int | None, int], ...] = ()


def has_filter() -> bool:
    """Whether `allow_only` can do its work on this Linux."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0


def allow_only(calls: list[Call]) -> None:
    """Leave all threads of this process, for good, nothing but these calls.

    Raises:
        OSError: the kernel or the library refuses.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    _done(library.seccomp_attr_set(context, _ALL_THREADS, 1))
    # glibc falls back to clone, whose flags can be looked at.
    _add(library, context, _ERRNO | errno.ENOSYS, Call("clone3"))
    for call in calls:
        _add(library, context, _ALLOW, call)
    _done(library.seccomp_load(context))
    library.seccomp_release(context)


def calls_of(process: int) -> list[Call]:
    """The system calls of a process with a stranger's code."""
    low = (1 << 32) - 1
    return [
        *map(Call, ALWAYS.split()),
        Call("clone", ((0, _CLONE_THREAD | _CLONE_NEW, _CLONE_THREAD),)),  # threads only
        Call("mmap", ((3, _MAP_SHARED, 0),)),
        Call("mmap", ((3, _MAP_SHARED | _MAP_ANONYMOUS, _MAP_SHARED),)),  # of files
        Call("kill", ((0, low, process),)),
        Call("tgkill", ((0, low, process),)),
        Call("sched_setaffinity", ((0, low, 0),)),
        Call("prlimit64", ((0, low, 0), (2, None, 0))),  # to look at its own
        *(Call("fcntl", ((1, low, number),)) for number in _FCNTL),
        *(Call("ioctl", ((1, low, number),)) for number in _IOCTL),
        *(Call("prctl", ((0, low, number),)) for number in _PRCTL),
    ]


def _add(library: ctypes.CDLL, context: ctypes.c_void_p, action: int, call: Call) -> None:
    number = library.seccomp_syscall_resolve_name(call.name.encode())
    if number == -1:  # newer than the library, or of another processor
        return
    made = [
        _Comparison(at, _EQUAL, value, 0) if mask is None else _Comparison(at, _MASKED, mask, value)
        for at, mask, value in call.arguments
    ]
    given = (_Comparison * len(made))(*made)
    _done(
        library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(made), given)
    )


def _done(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), LIBRARY)
