"""What is Linux's own stays out of the way on other systems, which are simulated here."""

from __future__ import annotations

import ctypes
import resource
import signal
from pathlib import Path

import pytest

from neuron_cpu import limits


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Linux: neither its files nor its system calls."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("this is Linux's")

    def absent(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(limits, "_LINUX", False)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr(limits.os, "O_PATH", None)


def test_time_is_bounded_without_linux(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("memory is not bounded"))
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError), limits.bounded(0.01, 1 << 30):
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) is before


def test_nothing_is_confined_or_adopted_without_linux(elsewhere: None, tmp_path: Path) -> None:
    limits.adopt_orphans()
    assert not limits.confine([tmp_path]) and not limits.has_landlock()
    assert limits.children(1) == []
    assert limits.default_memory_gib() > 0
