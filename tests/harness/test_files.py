"""Files and folders that are complete or absent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import files
from harness.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_only_when_finished(tmp_path: Path) -> None:
    target = tmp_path / "a" / "target"
    with files.atomic_folder(target) as unfinished:
        (unfinished / "x").write_text("1")
        assert not target.exists()
    assert names(target) == ["x"] and names(target.parent) == ["target"]
    with files.atomic_folder(target) as unfinished:
        (unfinished / "y").write_text("2")
    assert names(target) == ["y"] and names(target.parent) == ["target"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_interrupted_folder_keeps_the_old_one(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(type(error)), files.atomic_folder(target) as unfinished:
        (unfinished / "half").write_text("2")
        raise error
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left"), files.atomic_folder(tmp_path / "t"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.atomic_folder(tmp_path / "t"):
        (tmp_path / "nowhere").read_text()


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                              capture_output=True, text=True, check=True)  # fmt: skip
    dead = tmp_path / f".t.{finished.stdout.strip()}.abc"
    alive = tmp_path / f".t.{os.getpid()}.abc"
    dead.mkdir()
    alive.mkdir()
    with files.atomic_folder(tmp_path / "t"):
        pass
    assert not dead.exists() and alive.exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "t", tmp_path / "file"):
        with pytest.raises(UserError, match="not a folder"):
            files.check_writable_folder(target)
    with pytest.raises(UserError), files.atomic_folder(tmp_path / "file" / "t"):
        pass
    with pytest.raises(UserError):
        files.write_text_atomically(tmp_path / "file" / "t", "x")


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    files.write_text_atomically(path, "one\n")
    files.write_text_atomically(path, "zwei ü\n")
    assert path.read_text(encoding="utf-8") == "zwei ü\n" and names(tmp_path) == ["report.json"]


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "nki-llama"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.cache_folder() == tmp_path / "home" / ".cache" / "nki-llama"
