"""What a confined process may reach of the processes around it, and what ends it."""

import ctypes
import sys

import pytest

from harness.processes import worker
from neuron_cpu.sandbox import foreign, forked, limits

_PR_GET_DUMPABLE = 3


def _dumpable(told):
    told.send(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_nobody_of_the_same_user_looks_into_server_and_starter():
    """What is not dumpable has no /proc/PID/mem for others, which Landlock forbids elsewhere."""
    context = forked.context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_dumpable, args=(theirs,))
    forked.start(process)
    theirs.close()
    try:
        assert ours.poll(60) and ours.recv() == 0  # as it was forked
        assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
        assert process.sentinel in limits.descriptors()
        assert ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
    finally:
        forked.end(process)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


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
