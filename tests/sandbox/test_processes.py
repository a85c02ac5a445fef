"""What a confined process may reach of the processes around it, and what ends it."""

import contextlib
import ctypes
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from harness.processes import worker
from neuron_cpu.sandbox import foreign, forked, limits

_PR_GET_DUMPABLE = 3


def _dumpable():
    return ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)


def _powers():
    """(Root's powers over files before, all powers behind)."""
    held = re.compile(r"CapEff:\s*(\w+)")
    status = Path("/proc/self/status")
    before = int(held.search(status.read_text())[1], 16)
    limits._drop_capabilities()
    return before & 1 << 1, int(held.search(status.read_text())[1], 16)


def _behind_landlock():
    limits._write_only_below([])
    found = []
    for act in (lambda: socket.create_connection(("127.0.0.1", 1)), lambda: os.kill(1, 0)):
        with pytest.raises(OSError) as refused:
            act()
        found.append(refused.type)
    return found


def _tell(told, act):
    told.send(act())


@contextlib.contextmanager
def asked(act):
    """(What ``act`` gives in a process of the fork server, that process)."""
    context = forked.context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, act))
    forked.start(process)
    theirs.close()
    try:
        assert ours.poll(60)
        yield ours.recv(), process
    finally:
        forked.end(process)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_nobody_of_the_same_user_looks_into_server_and_starter():
    """What is not dumpable has no /proc/PID/mem for others, which Landlock forbids elsewhere."""
    with asked(_dumpable) as (told, process):
        assert told == 0  # as it was forked
        assert _dumpable() == 0
        assert process.sentinel in limits.descriptors()


@pytest.mark.skipif(limits._landlock_version() < 6, reason="Linux 6.12 forbids both")
def test_each_fence_holds_alone():
    with asked(_behind_landlock) as (told, _):
        assert told == [PermissionError, PermissionError]
    with asked(_powers) as ((before, behind), _):
        assert before == behind


def test_a_ring_of_causes_has_an_end():
    first, second = ValueError("x"), ValueError("can't allocate memory")
    first.__cause__, second.__cause__ = second, first
    bounds = limits.Limits(1 << 30, 60, 60.0)
    job = type("Job", (), {"limits": bounds})
    assert "limited to 1.0 GiB" in worker._of_memory(first, job)  # type: ignore[arg-type]
    first.__cause__ = first
    assert worker._of_memory(first, job) == "."  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["(" * 10_000, "x = " + "-" * 100_000 + "1"])
def test_a_source_that_is_nested_too_deeply_is_said_so(text, tmp_path):
    path = tmp_path / "deep.py"
    path.write_text(text)
    with pytest.raises(SyntaxError, match="too deeply|too many nested"):
        foreign.imported(path, "deep of a test")
